"""Models and optimizers through ``torch.distributed.checkpoint``: sharded (FSDP2, tensor parallel), and resharded.

The folder is one of torch's own. It is read here without its pickles: torch would run whatever they say.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as canonical
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils import _pytree as pytree

from midepoch.checkpoint import parts
from midepoch.checkpoint.backends import ReadJson, Taken
from midepoch.errors import CheckpointDamagedError, CheckpointMismatchError
from midepoch.world import World

_HARMLESS = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class DcpBackend:
    """A Backend, see there."""

    def __init__(self, world: World) -> None:
        # Collectives of a save in a thread must not meet those of the training loop.
        alone = world.size == 1 or not dist.is_initialized()
        self._group = None if alone else dist.new_group(backend="gloo")
        self._alone = alone

    def take(self, things: Mapping[str, Any], copy: bool) -> Taken:
        state = _states(things)
        if copy:
            state = pytree.tree_map(_copied, state)

        def write(folder: Path) -> None:
            writer = dcp.FileSystemWriter(str(folder), single_file_per_rank=True, sync_files=False)
            with _quiet():
                dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=self._alone)

        return Taken({}, write)

    def restore(self, folder: Path, things: Mapping[str, Any], read: ReadJson) -> None:  # noqa: ARG002
        state = _states(things)
        reader = _Reader(str(folder))
        _check(reader.read_metadata(), state)
        with _quiet():
            dcp.load(state, storage_reader=reader, planner=_Planner(), process_group=self._group, no_dist=self._alone)
        _give(things, state)

    def read(self, folder: Path, name: str, read: ReadJson) -> Any:  # noqa: ARG002
        state: dict[str, Any] = {}
        with _quiet():
            _load_state_dict(
                state, storage_reader=_Reader(str(folder)), planner=_EmptyPlanner(keys={name}), no_dist=True
            )
        return state[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """One process is what is meant, and torch says at every save that it assumes so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def make_backend(world: World) -> DcpBackend:
    return DcpBackend(world)


def _states(things: Mapping[str, Any]) -> dict[str, Any]:
    """State dicts with names that do not depend on how a model is wrapped and sharded."""
    model, optimizer = things.get("model"), things.get("optimizer")
    found: dict[str, Any] = {}
    if model is not None:
        module = isinstance(model, torch.nn.Module)
        found["model"] = canonical.get_model_state_dict(model) if module else parts.tree_of(model)
    if optimizer is not None:
        if isinstance(model, torch.nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
            found["optimizer"] = canonical.get_optimizer_state_dict(model, optimizer)
        else:
            found["optimizer"] = parts.tree_of(optimizer)
    return found


def _give(things: Mapping[str, Any], state: dict[str, Any]) -> None:
    model, optimizer = things.get("model"), things.get("optimizer")
    if isinstance(model, torch.nn.Module):
        canonical.set_model_state_dict(model, state["model"])
    elif model is not None:
        parts.give(model, state["model"], "model")
    if optimizer is None:
        return
    if isinstance(model, torch.nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
        canonical.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        parts.give(optimizer, state["optimizer"], "optimizer")


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()


def _check(metadata: Metadata, state: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatchError unless the saved tensors are those that are there, of the same shapes."""
    saved = metadata.state_dict_metadata
    current = {".".join(map(_text, path)): value for path, value in pytree.tree_flatten_with_path(dict(state))[0]}
    shapes = {name: tuple(value.shape) for name, value in current.items() if isinstance(value, torch.Tensor)}
    stored = {name: tuple(entry.size) for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    differ = sorted(name for name in set(shapes) | set(stored) if shapes.get(name) != stored.get(name))
    differ = [name for name in differ if name in shapes or name.split(".", 1)[0] in state]
    if differ:
        name = differ[0]
        raise CheckpointMismatchError(
            name,
            stored.get(name, "not there"),
            shapes.get(name, "not there"),
            f"another model ({len(differ)} tensors differ)" if len(differ) > 1 else "another model",
        )


def _text(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", key)))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS and not (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            raise CheckpointDamagedError(f"the metadata of the tensors names {module}.{name}, which torch never writes")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):  # type: ignore[misc]
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        if kwargs.get("rank") is not None and not path.exists():
            return super().read_metadata(*args, **kwargs)
        try:
            with path.open("rb") as file:
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


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, _plain_bytes(value))


class _EmptyPlanner(_EmptyStateDictLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, _plain_bytes(value))


def _plain_bytes(value: io.BytesIO) -> io.BytesIO:
    """The same bytes, if they hold nothing but plain values: torch is about to unpickle them."""
    try:
        torch.load(value, weights_only=True)
    except Exception as problem:
        raise CheckpointDamagedError(f"a value is no plain one: {problem!s:.200}") from None
    value.seek(0)
    return value
