"""Backend of ``torch.distributed.checkpoint``: saves sharded tensors (FSDP2, tensor parallel), and restores them onto
other shards.

The folder has torch's own format, with tensors only. torch's own metadata is a pickle, which would execute any code of
a stranger: it is written, and never read. The parts of each tensor are read from a JSON file beside it:

    {"model.weight": [[[0, 0], [50, 60], "__0_0.distcp", 0, 13304], …]}      offsets, sizes, file, first byte, length
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.serialization.config  # imported now: torch would import it at the first write
from torch.distributed.checkpoint import state_dict as canonical
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from midepoch._internal.values import reason
from midepoch.checkpoint.arrays import ArraySpec, StoredArray, bytes_of, is_sharded, make_array, torch_dtype
from midepoch.checkpoint.backends import ReadJson, Restorable, Snapshot, quoted_name
from midepoch.checkpoint.files import BytesSource
from midepoch.checkpoint.stateful import check_fits, check_module, is_distributed, load_state, restore_targets, state_of
from midepoch.checkpoint.tree import EncodedTree, array_specs, decode, encode
from midepoch.distributed.world import World
from midepoch.errors import CheckpointDamagedError, CheckpointError

_PARTS = "parts.json"
_MOST_BYTES = 2**62


class DcpBackend:
    """Backend that uses torch.distributed.checkpoint."""

    def __init__(self, world: World, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        # Collectives of a save in a thread must not mix with those of the training loop.
        self._alone = world.size == 1 or not dist.is_initialized()
        self._group = None if self._alone else dist.new_group(backend="gloo")
        self._rank = 0 if self._alone else dist.get_rank()

    def snapshot(self, models: Mapping[str, Any], *, copy: bool) -> Snapshot:
        encoded = {name: self._encoded(models, name, saving=True) for name in models}
        tensors = {
            f"{name}.{quoted_name(key)}": _tensor(spec, value, copy)
            for name, (_, each) in encoded.items()
            for key, (spec, value) in each.arrays.items()
        }

        def write(folder: Path) -> None:
            writer = _Writer(str(folder), single_file_per_rank=True, sync_files=False)
            with _errors_of(self._rank):
                dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._alone)

        parts = {name: EncodedTree({"by": by, "tree": each.json}) for name, (by, each) in encoded.items()}
        return Snapshot(parts, write if tensors else None)

    def load(self, folder: Path, models: Mapping[str, Any], read: ReadJson) -> list[Restorable]:
        loaded = []
        for name, model in models.items():
            saved = read(name)
            specs = array_specs(saved["tree"])
            _metadata(folder, name, specs)
            nothing = BytesSource(np.empty(0, np.uint8))
            outline = {key: StoredArray(key, spec, nothing, 0) for key, spec in specs.items()}
            if saved["by"] == "names":
                with self._current(models, name) as current:
                    check_module({key: value for key, (_, value) in current.items()}, outline, name)
            else:
                outline = decode(saved["tree"], outline, allow_pickle=self._allow_pickle)
                check_fits(model, outline, name)
            loaded.append(Restorable(name, partial(self._restore, folder, models, name, saved, outline)))
        return loaded

    def _restore(self, folder: Path, models: Mapping[str, Any], name: str, saved: Any, outline: Any) -> None:
        """Read into the existing tensors where possible, and into new ones elsewhere."""
        if saved["by"] != "names":
            targets = restore_targets(models[name], outline)
            load_state(models[name], self._tree(folder, name, saved["tree"], targets), name)
            return
        with self._current(models, name) as current:
            targets = {key: value.detach() for key, (_, value) in current.items()}
            tree = self._tree(folder, name, saved["tree"], targets)
        if name == "model":
            canonical.set_model_state_dict(models["model"], tree)
        else:
            canonical.set_optimizer_state_dict(models["model"], models[name], tree)

    def read(self, folder: Path, name: str, read: ReadJson) -> Any:
        return self._tree(folder, name, read(name)["tree"], {})

    def _tree(self, folder: Path, name: str, saved: Any, targets: Mapping[str, Any]) -> Any:
        """Return the saved values, read into the arrays of their names, or into new tensors."""
        specs = array_specs(saved)
        metadata = _metadata(folder, name, specs)
        tensors = {key: _target(spec, targets.get(key)) for key, spec in specs.items()}
        if tensors:
            sharded = any(is_sharded(tensor) for tensor in tensors.values())
            with _errors_of(self._rank):
                dcp.load(
                    {f"{name}.{quoted_name(key)}": tensor for key, tensor in tensors.items()},
                    storage_reader=_Reader(folder, metadata),
                    process_group=self._group if sharded else None,
                    no_dist=self._alone or not sharded,
                )
        arrays = {key: targets[key] if key in targets else _array(spec, tensors[key]) for key, spec in specs.items()}
        return decode(saved, arrays, allow_pickle=self._allow_pickle)

    def _encoded(self, models: Mapping[str, Any], name: str, *, saving: bool) -> tuple[str, EncodedTree]:
        """Return the encoded state of a model; for a sharded one with keys that do not depend on its shards ("names").

        torch creates the state of a new optimizer by a step with a learning rate of 0, which counts as a step: such a
        state is not requested when saving.
        """
        owner, model = models[name], models.get("model")
        by, state = "numbers", None
        if isinstance(model, torch.nn.Module) and is_distributed(model):
            if owner is model:
                by, state = "names", canonical.get_model_state_dict(model)
            elif isinstance(owner, torch.optim.Optimizer) and (owner.state or not saving):
                by, state = "names", canonical.get_optimizer_state_dict(model, owner)
        elif is_distributed(owner):
            raise TypeError(f"{name} is sharded, and its names come from the model. Pass the model as well: model=….")
        state = state_of(owner) if state is None else state
        return by, encode(state, name, inline=0, distributed=("torch",), allow_pickle=self._allow_pickle)

    @contextmanager
    def _current(self, models: Mapping[str, Any], name: str) -> Iterator[Mapping[str, tuple[ArraySpec, Any]]]:
        """Sharded arrays of a model by name. A new optimizer is as new as before afterwards."""
        new = isinstance(models[name], torch.optim.Optimizer) and not models[name].state
        try:
            yield self._encoded(models, name, saving=False)[1].arrays
        finally:
            if new:  # requesting its sharded state has created one
                models[name].state.clear()


def _target(spec: ArraySpec, array: Any) -> torch.Tensor:
    """Return the tensor to read into: over an array's own memory, or new memory."""
    if array is None:
        return torch.empty(_stored_shape(spec), dtype=_stored_dtype(spec))
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array.reshape(-1).view(np.uint8))


def _tensor(spec: ArraySpec, value: Any, copy: bool) -> torch.Tensor:
    tensor = value.detach() if spec.library == "torch" else torch.from_numpy(bytes_of(value))
    if not copy:
        return tensor
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def _stored_shape(spec: ArraySpec) -> tuple[int, ...]:
    return spec.shape if spec.library == "torch" else (spec.nbytes,)


def _stored_dtype(spec: ArraySpec) -> torch.dtype:
    return torch_dtype(spec.dtype) if spec.library == "torch" else torch.uint8


def _array(spec: ArraySpec, value: torch.Tensor) -> Any:
    return value if spec.library == "torch" else make_array(spec, value.numpy())


@contextmanager
def _errors_of(rank: int) -> Iterator[None]:
    """Raise torch's own error, which is no Exception, as a CheckpointError; Ctrl-C on this rank as such.

    Suppresses the warning about a single process, which is intended.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as problem:
            failures = {number: failure[0] for number, failure in sorted(problem.failures.items())}
            own = failures.get(rank)
            if own is not None and not isinstance(own, Exception):
                raise own from None
            texts = [f"rank {number}: {type(failure).__name__}: {failure}" for number, failure in failures.items()]
            text = (texts or [reason(problem)])[0]
            raise CheckpointError(f"torch.distributed.checkpoint: {text:.500}") from (own or problem)


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]
    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        parts: dict[str, list[Any]] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            infos = [metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in tensor.chunks]
            parts[name] = [
                [list(chunk.offsets), list(chunk.sizes), info.relative_path, info.offset, info.length]
                for chunk, info in zip(tensor.chunks, infos, strict=True)
            ]
        (Path(self.path) / _PARTS).write_text(json.dumps(parts))


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


def _metadata(folder: Path, name: str, specs: Mapping[str, ArraySpec]) -> Metadata:
    """Return torch's metadata of the tensors of a model. Raises CheckpointDamagedError if one is incomplete."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    try:
        parts = json.loads((folder / _PARTS).read_bytes()) if specs else {}
        for key, spec in specs.items():
            shape, tensor = _stored_shape(spec), f"{name}.{quoted_name(key)}"
            chunks = []
            for offsets, sizes, file, first, length in parts[tensor]:
                if not isinstance(file, str) or set(file) & set("/\\\0") or file in ("", ".", ".."):
                    raise ValueError(f"a file {file!r:.80}")
                chunks.append(ChunkStorageMetadata(_size(offsets, len(shape)), _size(sizes, len(shape))))
                storage[MetadataIndex(tensor, chunks[-1].offsets)] = _StorageInfo(file, *_size([first, length], 2))
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
                raise ValueError(f"{tensor!r:.80} is not complete")
            properties = TensorProperties(dtype=_stored_dtype(spec))
            tensors[tensor] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointDamagedError(f"the parts of the tensors cannot be read: {problem!r:.200}") from None
    return Metadata(tensors, storage_data=storage)


def _size(numbers: Any, length: int) -> torch.Size:
    if len(numbers) != length or any(type(number) is not int or not 0 <= number < _MOST_BYTES for number in numbers):
        raise ValueError(f"{numbers!r:.80} in place of {length} integers")
    return torch.Size(numbers)
