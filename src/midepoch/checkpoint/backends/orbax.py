"""Arrays through Orbax: those that lie on several processes, restored onto others.

The folder is an Orbax checkpoint of a dict of arrays by name for each thing, which Orbax reads without midepoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from midepoch.checkpoint import parts
from midepoch.checkpoint.arrays import SAFE, Kind, bytes_of, make
from midepoch.checkpoint.backends import ReadJson, Restorable, Taken, plain_name
from midepoch.checkpoint.tree import Encoded, array_kinds, decode, encode
from midepoch.errors import CheckpointDamagedError
from midepoch.world import World


class OrbaxBackend:
    """A Backend, see there."""

    def take(self, things: Mapping[str, Any], *, copy: bool, allow_pickle: bool) -> Taken:
        encoded = {name: _encoded(thing, name, allow_pickle) for name, thing in things.items()}
        tree = {
            name: {plain_name(key): _for_orbax(kind, value, copy) for key, (kind, value) in one.arrays.items()}
            for name, one in encoded.items()
            if one.arrays
        }

        def write(folder: Path) -> None:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))

        return Taken({name: Encoded(one.json) for name, one in encoded.items()}, write if tree else None)

    def load(self, folder: Path, things: Mapping[str, Any], read: ReadJson, *, allow_pickle: bool) -> list[Restorable]:
        found = []
        for name, thing in things.items():
            current = _encoded(thing, name, allow_pickle).arrays
            tree = self._tree(folder, name, read(name), current, allow_pickle)
            parts.check(thing, tree, name)
            found.append(Restorable(name, partial(parts.give, thing, tree, name)))
        return found

    def read(self, folder: Path, name: str, read: ReadJson, *, allow_pickle: bool) -> Any:
        return self._tree(folder, name, read(name), {}, allow_pickle)

    def _tree(
        self, folder: Path, name: str, json: Any, current: Mapping[str, tuple[Kind, Any]], allow_pickle: bool
    ) -> Any:
        kinds = array_kinds(json)
        if not kinds:
            return decode(json, {}, allow_pickle=allow_pickle)
        targets = {plain_name(key): _target(kind, current.get(key)) for key, kind in kinds.items()}
        args = ocp.args.PyTreeRestore(
            item={name: dict.fromkeys(targets, 0)}, restore_args={name: targets}, partial_restore=True
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                flat = checkpointer.restore(folder, args=args)[name]
            except (ValueError, KeyError, OSError) as problem:
                raise CheckpointDamagedError(f"Orbax cannot read {name}: {problem!s:.300}") from problem
        arrays = {key: _as(kind, flat[plain_name(key)]) for key, kind in kinds.items()}
        return decode(json, arrays, allow_pickle=allow_pickle)


def make_backend(world: World) -> OrbaxBackend:  # noqa: ARG001  Orbax asks JAX itself
    return OrbaxBackend()


def _encoded(thing: Any, name: str, allow_pickle: bool) -> Encoded:
    return encode(parts.tree_of(thing), name, inline=0, distributed=("jax",), allow_pickle=allow_pickle)


def _for_orbax(kind: Kind, value: Any, copy: bool) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value  # of several processes: Orbax has to see it, and nothing else holds its memory
    data = bytes_of(value)
    # What Orbax may not know is stored as the bytes it is.
    array = make(Kind("numpy", kind.dtype, kind.shape), data) if kind.dtype in SAFE else data
    return np.array(array) if copy else array


def _target(kind: Kind, current: tuple[Kind, Any] | None) -> Any:
    """How Orbax is to restore an array: onto the devices of the one it is for, if those are several processes'."""
    value = current[1] if current is not None else None
    if isinstance(value, jax.Array) and not value.is_fully_addressable and kind.library != "key":
        return ocp.ArrayRestoreArgs(sharding=value.sharding, global_shape=value.shape)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _as(kind: Kind, value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value
    data = bytes_of(np.array(value))
    if len(data) != kind.nbytes:
        raise CheckpointDamagedError(f"Orbax has {len(data)} bytes for {kind.dtype} {kind.shape}")
    return make(kind, data)
