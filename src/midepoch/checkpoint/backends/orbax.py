"""Backend of Orbax: saves arrays that span several processes, and restores them with another topology.

The folder is an Orbax checkpoint with a dict of arrays by name for each model, which Orbax reads without midepoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from midepoch.checkpoint.arrays import SAFETENSORS, ArraySpec, bytes_of, make_array
from midepoch.checkpoint.backends import ReadJson, Restorable, Snapshot, quoted_name
from midepoch.checkpoint.stateful import check_fits, load_state, state_of
from midepoch.checkpoint.tree import EncodedTree, array_specs, decode, encode
from midepoch.distributed.world import World
from midepoch.errors import CheckpointDamagedError


class OrbaxBackend:
    """Backend that uses Orbax."""

    def __init__(self, world: World, allow_pickle: bool) -> None:  # noqa: ARG002  Orbax asks JAX itself
        self._allow_pickle = allow_pickle

    def snapshot(self, models: Mapping[str, Any], *, copy: bool) -> Snapshot:
        encoded = {name: self._encoded(model, name) for name, model in models.items()}
        tree = {
            name: {quoted_name(key): _for_orbax(spec, value, copy) for key, (spec, value) in each.arrays.items()}
            for name, each in encoded.items()
            if each.arrays
        }

        def write(folder: Path) -> None:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))

        return Snapshot({name: EncodedTree(each.json) for name, each in encoded.items()}, write if tree else None)

    def load(self, folder: Path, models: Mapping[str, Any], read: ReadJson) -> list[Restorable]:
        loaded = []
        for name, model in models.items():
            tree = self._tree(folder, name, read(name), self._encoded(model, name).arrays)
            check_fits(model, tree, name)
            loaded.append(Restorable(name, partial(load_state, model, tree, name)))
        return loaded

    def read(self, folder: Path, name: str, read: ReadJson) -> Any:
        return self._tree(folder, name, read(name), {})

    def _encoded(self, model: Any, name: str) -> EncodedTree:
        return encode(state_of(model), name, inline=0, distributed=("jax",), allow_pickle=self._allow_pickle)

    def _tree(self, folder: Path, name: str, json: Any, current: Mapping[str, tuple[ArraySpec, Any]]) -> Any:
        specs = array_specs(json)
        if not specs:
            return decode(json, {}, allow_pickle=self._allow_pickle)
        targets = {quoted_name(key): _target(spec, current.get(key)) for key, spec in specs.items()}
        args = ocp.args.PyTreeRestore(
            item={name: dict.fromkeys(targets, 0)}, restore_args={name: targets}, partial_restore=True
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                flat = checkpointer.restore(folder, args=args)[name]
            except (ValueError, KeyError, OSError) as problem:
                raise CheckpointDamagedError(f"Orbax cannot read {name}: {problem!s:.300}") from problem
        arrays = {key: _from_orbax(spec, flat[quoted_name(key)]) for key, spec in specs.items()}
        return decode(json, arrays, allow_pickle=self._allow_pickle)


def _for_orbax(spec: ArraySpec, value: Any, copy: bool) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value  # of several processes: Orbax needs it as it is, and its memory is not shared
    data = bytes_of(value)
    # A dtype that Orbax may not support is stored as bytes.
    known = spec.dtype in SAFETENSORS
    array = make_array(ArraySpec("numpy", spec.dtype, spec.shape), data) if known else data
    return np.array(array) if copy else array


def _target(spec: ArraySpec, current: tuple[ArraySpec, Any] | None) -> Any:
    """Return Orbax's arguments for an array: on the devices of the current one if it spans several processes."""
    value = current[1] if current is not None else None
    if isinstance(value, jax.Array) and not value.is_fully_addressable and spec.library != "key":
        return ocp.ArrayRestoreArgs(sharding=value.sharding, global_shape=value.shape)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _from_orbax(spec: ArraySpec, value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value
    data = bytes_of(np.array(value))
    if len(data) != spec.nbytes:
        raise CheckpointDamagedError(f"Orbax has {len(data)} bytes for {spec.dtype} {spec.shape}")
    return make_array(spec, data)
