"""Backends: writers of the arrays of models and optimizers other than midepoch's own files.

All other values of models and optimizers are saved by midepoch, as JSON, and so are data, RNG and extras. The commit is
the same for all backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from midepoch.checkpoint.tree import EncodedTree
from midepoch.distributed.world import World, jax_processes, process_group

_CLASSES = {"orbax": ("OrbaxBackend", "jax"), "dcp": ("DcpBackend", "torch")}
"""Class of each backend, and the library whose processes it needs, which is also the name of midepoch's extra."""

ReadJson = Callable[[str], Any]
"""Return the JSON that a backend has provided for the model or optimizer of this name."""


@dataclass(frozen=True)
class Snapshot:
    """Models at the moment of the call: JSON for midepoch to save, and a writer of the arrays, if there are any."""

    parts: dict[str, EncodedTree]
    write: Callable[[Path], None] | None


@dataclass(frozen=True)
class Restorable:
    """Part of a verified step, to be restored once all parts fit."""

    name: str
    restore: Callable[[], None]
    check: Callable[[], None] = lambda: None
    """Raises CheckpointMismatchError if it does not fit. Changes nothing."""


class Backend(Protocol):
    """Writer and reader of the arrays of models in a folder. All ranks call each method, with the same names."""

    def snapshot(self, models: Mapping[str, Any], *, copy: bool) -> Snapshot:
        """With ``copy`` the models may change while they are being written."""

    def load(self, folder: Path, models: Mapping[str, Any], read: ReadJson) -> list[Restorable]:
        """Read from a verified folder. Raises CheckpointMismatchError if it does not fit. Changes nothing."""

    def read(self, folder: Path, name: str, read: ReadJson) -> Any:
        """Return the values of one model, as a tree."""


def backend_named(name: str, world: World, allow_pickle: bool) -> Backend | None:
    """Return a backend; None for midepoch's own files."""
    if name == "files":
        return None
    if name not in _CLASSES:
        raise ValueError(f"backend: expected 'files', 'orbax' or 'dcp', got {name!r}")
    class_name, library = _CLASSES[name]
    if world.size > 1 and world.size != _processes(library):
        raise ValueError(
            f"backend={name!r} with {world.size} ranks needs {library}.distributed, initialised with as many."
        )
    try:
        module = import_module(f"midepoch.checkpoint.{name}")
    except ImportError as problem:
        command = f'pip install "midepoch[{library}]"'
        raise ImportError(f"backend={name!r} needs more packages: {command} ({problem})") from problem
    backend: Backend = getattr(module, class_name)(world, allow_pickle)
    return backend


def _processes(library: str) -> int:
    if library == "torch":
        return 0 if (dist := process_group()) is None else int(dist.get_world_size())
    return 0 if (jax := jax_processes()) is None else int(jax.process_count())


def quoted_name(name: str) -> str:
    """Return the name of an array without characters that have a meaning in the library that stores it."""
    quoted = quote(name, safe="_.-")
    return quoted if quoted.strip(".") else f"%{quoted}"
