"""Arrays through ``torch.distributed.checkpoint``: sharded ones (FSDP2, tensor parallel), restored onto other shards.

The folder is one of torch's own, with tensors only. Its pickled metadata is read by an unpickler that knows nothing but
torch's few classes for it: torch itself would run whatever it says.
"""

from __future__ import annotations

import pickle
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
import torch.utils.serialization.config  # here, as torch imports it when it first writes
from torch.distributed.checkpoint import state_dict as canonical
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from midepoch.checkpoint import inplace, parts
from midepoch.checkpoint.arrays import Kind, bytes_of, is_sharded, make
from midepoch.checkpoint.backends import ReadJson, Restorable, Taken, plain_name
from midepoch.checkpoint.files import BytesSource
from midepoch.checkpoint.stored import Stored
from midepoch.checkpoint.tree import Encoded, array_kinds, decode, encode
from midepoch.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from midepoch.reasons import reason
from midepoch.world import World

_HARMLESS = {
    ("torch", "Size"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class DcpBackend:
    """A Backend, see there."""

    def __init__(self, world: World) -> None:
        # Collectives of a save in a thread must not meet those of the training loop.
        self._alone = world.size == 1 or not dist.is_initialized()
        self._group = None if self._alone else dist.new_group(backend="gloo")
        self._rank = 0 if self._alone else dist.get_rank()

    def take(self, things: Mapping[str, Any], *, copy: bool, allow_pickle: bool) -> Taken:
        encoded = {name: _encoded(things, name, allow_pickle, saving=True) for name in things}
        tensors = {
            f"{name}.{plain_name(key)}": _tensor(kind, value, copy)
            for name, (_, one) in encoded.items()
            for key, (kind, value) in one.arrays.items()
        }

        def write(folder: Path) -> None:
            writer = dcp.FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=False)
            with _errors_of(self._rank):
                dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._alone)

        json = {name: Encoded({"by": by, "tree": one.json}) for name, (by, one) in encoded.items()}
        return Taken(json, write if tensors else None)

    def load(self, folder: Path, things: Mapping[str, Any], read: ReadJson, *, allow_pickle: bool) -> list[Restorable]:
        found = []
        for name, thing in things.items():
            json = read(name)
            kinds = array_kinds(json["tree"])
            _check_stored(folder, name, kinds)
            if json["by"] == "names":
                with _current(things, name, allow_pickle) as current:
                    _check_shapes(kinds, current, name)
            else:
                outline = {key: Stored(key, kind, BytesSource(np.empty(0, np.uint8)), 0) for key, kind in kinds.items()}
                parts.check(thing, decode(json["tree"], outline, allow_pickle=allow_pickle), name)
            found.append(Restorable(name, partial(self._give, folder, things, name, json, allow_pickle)))
        return found

    def _give(self, folder: Path, things: Mapping[str, Any], name: str, json: Any, allow_pickle: bool) -> None:
        """Read into the tensors that there are, as far as they can take it, and new ones else."""
        if json["by"] != "names":
            into = inplace.targets(things[name], json["tree"])
            parts.give(things[name], self._tree(folder, name, json["tree"], into, allow_pickle), name)
            return
        with _current(things, name, allow_pickle) as current:
            into = {key: value.detach() for key, (_, value) in current.items()}
            tree = self._tree(folder, name, json["tree"], into, allow_pickle)
        if name == "model":
            canonical.set_model_state_dict(things["model"], tree)
        else:
            canonical.set_optimizer_state_dict(things["model"], things[name], tree)

    def read(self, folder: Path, name: str, read: ReadJson, *, allow_pickle: bool) -> Any:
        json = read(name)["tree"]
        _check_stored(folder, name, array_kinds(json))
        return self._tree(folder, name, json, {}, allow_pickle)

    def _tree(self, folder: Path, name: str, json: Any, into: Mapping[str, Any], allow_pickle: bool) -> Any:
        """The saved values, read into the arrays of their names, or into new tensors."""
        kinds = array_kinds(json)
        targets = {key: _target(kind, into.get(key)) for key, kind in kinds.items()}
        if targets:
            sharded = any(is_sharded(target) for target in targets.values())
            with _errors_of(self._rank):
                dcp.load(
                    {f"{name}.{plain_name(key)}": target for key, target in targets.items()},
                    storage_reader=_Reader(str(folder)),
                    process_group=self._group if sharded else None,
                    no_dist=self._alone or not sharded,
                )
        arrays = {key: into[key] if key in into else _as(kind, targets[key]) for key, kind in kinds.items()}
        return decode(json, arrays, allow_pickle=allow_pickle)


def make_backend(world: World) -> DcpBackend:
    return DcpBackend(world)


def _encoded(things: Mapping[str, Any], name: str, allow_pickle: bool, *, saving: bool) -> tuple[str, Encoded]:
    """The state of a thing, with names that do not depend on its shards ("names") where it has any.

    torch makes the state of a fresh optimizer by a step with a learning rate of 0, which counts as a step: such a
    state is not asked for when saving.
    """
    thing, model = things[name], things.get("model")
    by, state = "numbers", None
    if isinstance(model, torch.nn.Module) and parts.is_spread(model):
        if thing is model:
            by, state = "names", canonical.get_model_state_dict(model)
        elif isinstance(thing, torch.optim.Optimizer) and (thing.state or not saving):
            by, state = "names", canonical.get_optimizer_state_dict(model, thing)
    elif parts.is_spread(thing):
        raise TypeError(f"{name} is sharded, and its names come from the model. Give the model as well: model=….")
    state = parts.tree_of(thing) if state is None else state
    return by, encode(state, name, inline=0, distributed=("torch",), allow_pickle=allow_pickle)


@contextmanager
def _current(things: Mapping[str, Any], name: str, allow_pickle: bool) -> Iterator[Mapping[str, tuple[Kind, Any]]]:
    """The sharded arrays of a thing by name. A fresh optimizer is one again after it."""
    fresh = isinstance(things[name], torch.optim.Optimizer) and not things[name].state
    try:
        yield _encoded(things, name, allow_pickle, saving=False)[1].arrays
    finally:
        if fresh:  # asking for its sharded state has made one
            things[name].state.clear()


def _target(kind: Kind, array: Any) -> torch.Tensor:
    """The tensor to read into: an array's own memory, or new memory."""
    if array is None:
        return torch.empty(_stored_shape(kind), dtype=_stored_dtype(kind))
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array.reshape(-1).view(np.uint8))


def _tensor(kind: Kind, value: Any, copy: bool) -> torch.Tensor:
    if kind.library != "torch":
        data = torch.from_numpy(bytes_of(value))
        return data.clone() if copy else data
    tensor = value.detach()
    if tensor.device.type != "cpu":
        return tensor.cpu() if copy else tensor
    return tensor.clone() if copy else tensor


def _stored_shape(kind: Kind) -> tuple[int, ...]:
    return kind.shape if kind.library == "torch" else (kind.nbytes,)


def _stored_dtype(kind: Kind) -> torch.dtype:
    found = getattr(torch, kind.dtype, None) if kind.library == "torch" else torch.uint8
    if not isinstance(found, torch.dtype):
        raise CheckpointDamagedError(f"this torch has no dtype {kind.dtype!r:.40}")
    return found


def _as(kind: Kind, value: torch.Tensor) -> Any:
    return value if kind.library == "torch" else make(kind, value.numpy())


def _check_shapes(saved: Mapping[str, Kind], current: Mapping[str, tuple[Kind, Any]], name: str) -> None:
    kinds = {key: kind for key, (kind, _) in current.items()}
    differ = sorted(key for key in set(saved) | set(kinds) if saved.get(key) != kinds.get(key))
    if differ:
        one, two = saved.get(differ[0]), kinds.get(differ[0])
        raise CheckpointMismatchError(
            f"{name}, {differ[0]}",
            f"{one.dtype} {one.shape}" if one else "not there",
            f"{two.dtype} {two.shape}" if two else "not there",
            f"another model: {len(differ)} of {len(saved)} tensors differ",
        )


def _check_stored(folder: Path, name: str, kinds: Mapping[str, Kind]) -> None:
    """Raise CheckpointDamagedError unless torch has these tensors, of these shapes and dtypes."""
    if not kinds:
        return
    stored = _Reader(str(folder)).read_metadata().state_dict_metadata
    for key, kind in kinds.items():
        entry = stored.get(f"{name}.{plain_name(key)}")
        dtype = _stored_dtype(kind)
        if not isinstance(entry, TensorStorageMetadata) or tuple(entry.size) != _stored_shape(kind):
            raise CheckpointDamagedError(
                f"the folder of torch has no tensor {name}.{key!r:.80} of {dtype} {_stored_shape(kind)}"
            )


@contextmanager
def _errors_of(rank: int) -> Iterator[None]:
    """torch's own error, which is no Exception, as one of ours; Ctrl-C on this rank as what it is.

    And no word about a single process: it is meant.
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in _HARMLESS and not is_dtype:
            raise CheckpointDamagedError(f"the metadata of the tensors names {module}.{name}, which torch never writes")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise ValueError("no metadata")
        except CheckpointDamagedError:
            raise
        except Exception as problem:
            raise CheckpointDamagedError(f"the metadata of the tensors cannot be read: {problem!r:.200}") from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        for entry in (metadata.storage_data or {}).values():
            if Path(entry.relative_path).name != entry.relative_path:
                raise CheckpointDamagedError(f"the metadata of the tensors names a file {entry.relative_path!r:.80}")
        return metadata
