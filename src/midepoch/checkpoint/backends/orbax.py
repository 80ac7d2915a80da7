"""Models and optimizers through Orbax: arrays that lie on several processes, restored onto others.

The folder is an Orbax checkpoint of a nested dict, which Orbax reads without midepoch. What is no array (numbers,
texts, the classes of nodes) is kept by midepoch, beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from midepoch.checkpoint import parts
from midepoch.checkpoint.arrays import Kind, bytes_of, make
from midepoch.checkpoint.backends import ReadJson, Taken
from midepoch.checkpoint.tree import Encoded, array_kinds, decode, encode
from midepoch.errors import CheckpointDamagedError, CheckpointMismatchError
from midepoch.world import World


class OrbaxBackend:
    """A Backend, see there."""

    def take(self, things: Mapping[str, Any], copy: bool) -> Taken:
        encoded = {name: _encoded(thing, name) for name, thing in things.items()}
        tree = {
            name: {key: _for_orbax(kind, value, copy) for key, (kind, value) in one.arrays.items()}
            for name, one in encoded.items()
        }

        def write(folder: Path) -> None:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(folder, args=ocp.args.PyTreeSave(_nested(tree)))

        return Taken({name: Encoded(one.json) for name, one in encoded.items()}, write)

    def restore(self, folder: Path, things: Mapping[str, Any], read: ReadJson) -> None:
        trees = {}
        for name, thing in things.items():
            current = _encoded(thing, name).arrays
            trees[name] = self._tree(folder, name, read(name), current)
            parts.check(thing, trees[name], name)
        for name, thing in things.items():
            parts.give(thing, trees[name], name)

    def read(self, folder: Path, name: str, read: ReadJson) -> Any:
        return self._tree(folder, name, read(name), {})

    def _tree(self, folder: Path, name: str, json: Any, current: Mapping[str, tuple[Kind, Any]]) -> Any:
        kinds = array_kinds(json)
        if not kinds:
            return decode(json, {})
        if current and set(current) != set(kinds):
            differ = sorted(set(current) ^ set(kinds))[:6]
            raise CheckpointMismatchError(name, len(kinds), len(current), f"other arrays: {', '.join(differ)}")
        targets = {key: _target(kind, current.get(key)) for key, kind in kinds.items()}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                args = ocp.args.PyTreeRestore(
                    item=_nested({name: dict.fromkeys(targets, 0)}),
                    restore_args=_nested({name: targets}),
                    partial_restore=True,
                )
                found = checkpointer.restore(folder, args=args)
            except (ValueError, KeyError, OSError) as problem:
                raise CheckpointDamagedError(f"Orbax cannot read {name}: {problem!s:.300}") from problem
        flat = _flat(found[name])
        return decode(json, {key: _as(kind, flat[key]) for key, kind in kinds.items()})


def make_backend(world: World) -> OrbaxBackend:  # noqa: ARG001  Orbax asks JAX itself
    return OrbaxBackend()


def _encoded(thing: Any, name: str) -> Encoded:
    return encode(parts.tree_of(thing), name, inline=0, distributed=True)


def _for_orbax(kind: Kind, value: Any, copy: bool) -> Any:
    if kind.library == "key":
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value  # of several processes: Orbax has to see it, and nothing else holds its memory
    if kind.library == "torch":
        value = make(Kind("numpy", kind.dtype, kind.shape), bytes_of(value))
    return np.array(value) if copy else np.asarray(value)


def _target(kind: Kind, current: tuple[Kind, Any] | None) -> Any:
    """How Orbax is to restore an array: onto the devices of the one it is for, if those are several processes'."""
    value = current[1] if current is not None else None
    if isinstance(value, jax.Array) and not value.is_fully_addressable and kind.library != "key":
        return ocp.ArrayRestoreArgs(sharding=value.sharding, global_shape=value.shape)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _as(kind: Kind, value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value
    array = np.asarray(value)
    if tuple(array.shape) != kind.shape or array.dtype.name != kind.dtype:
        raise CheckpointDamagedError(f"Orbax has {array.dtype} {array.shape} for {kind.dtype} {kind.shape}")
    return make(kind, bytes_of(array))


def _nested(trees: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Names with dots as dicts in dicts."""
    found: dict[str, Any] = {}
    for name, flat in trees.items():
        for key, value in flat.items():
            node = found.setdefault(name, {})
            *path, last = key.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
    return found


def _flat(tree: Any, before: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {before: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{before}.{key}" if before else str(key))
    return found
