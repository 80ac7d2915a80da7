"""Who writes the arrays of models and optimizers: midepoch's own files, Orbax, or torch's distributed checkpoints.

What is no array stays with midepoch, as JSON. Data, RNG and extras are always midepoch's own files; the commit is the
same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from midepoch.checkpoint.tree import Encoded
from midepoch.world import World, jax_processes, process_group

_EXTRAS = {"orbax": "jax", "dcp": "torch"}

ReadJson = Callable[[str], Any]
"""The JSON that a backend has given for a thing of this name."""


@dataclass(frozen=True)
class Taken:
    """Things as they were at the moment of the call: JSON for midepoch to keep, and what writes the arrays, if any."""

    parts: dict[str, Encoded]
    write: Callable[[Path], None] | None


@dataclass(frozen=True)
class Restorable:
    """A thing with the values that were saved of it, which fit."""

    name: str
    give: Callable[[], None]


class Backend(Protocol):
    """Writes and reads the arrays of things in a folder. All ranks call each method, with the same names."""

    def take(self, things: Mapping[str, Any], *, copy: bool, allow_pickle: bool) -> Taken:
        """With ``copy`` the things may change while they are being written."""

    def load(self, folder: Path, things: Mapping[str, Any], read: ReadJson, *, allow_pickle: bool) -> list[Restorable]:
        """Read from a folder whose files have been checked. CheckpointMismatchError if it does not fit. No change."""

    def read(self, folder: Path, name: str, read: ReadJson, *, allow_pickle: bool) -> Any:
        """The values of one thing, as a tree."""


def backend_named(name: str, world: World) -> Backend | None:
    """A backend; None for midepoch's own files."""
    if name == "files":
        return None
    if name not in _EXTRAS:
        raise ValueError(f"backend: expected 'files', 'orbax' or 'dcp', got {name!r}")
    if world.size > 1 and not _has_processes(name, world):
        framework = "torch.distributed" if name == "dcp" else "jax.distributed"
        raise ValueError(f"backend={name!r} for {world.size} ranks needs {framework} to be initialised with as many.")
    try:
        found: Backend = import_module(f"midepoch.checkpoint.backends.{name}").make_backend(world)
    except ImportError as problem:
        needed = f'pip install "midepoch[{_EXTRAS[name]}]"'
        raise ImportError(f"backend={name!r} needs more packages: {needed} ({problem})") from problem
    return found


def _has_processes(name: str, world: World) -> bool:
    if name == "dcp":
        return (dist := process_group()) is not None and dist.get_world_size() == world.size
    return (jax := jax_processes()) is not None and jax.process_count() == world.size


def plain_name(name: str) -> str:
    """The name of an array as one that cannot mean anything to the library that stores it."""
    quoted = quote(name, safe="_.-")
    return quoted if quoted.strip(".") else f"%{quoted}"
