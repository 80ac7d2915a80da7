"""Orbax: the state of a pipeline as an item of an Orbax checkpoint, and the backend of PipelineCheckpoint.

manager.save(step, args=ocp.args.Composite(model=ocp.args.StandardSave(state), data=DataSave(loader)))
manager.restore(step, args=ocp.args.Composite(model=…, data=DataRestore(loader)))
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from midepoch.checkpoint import stateful
from midepoch.checkpoint.arrays import SAFETENSORS, ArraySpec, bytes_of, make_array
from midepoch.checkpoint.backends import ReadJson, Restorable, Snapshot, quoted_name
from midepoch.checkpoint.files import BytesSource
from midepoch.checkpoint.stateful import check_fits, load_state, state_of
from midepoch.checkpoint.tree import EncodedTree, StoredTree, array_specs, decode, encode
from midepoch.distributed.world import World
from midepoch.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


class DataHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """Handler of any object with ``get_state`` or ``state_dict``: one file if one state restores all processes, else
    one for each.
    """

    def save(self, directory: Any, args: DataSave) -> None:
        state = stateful.state_of(args.item)
        is_one = stateful.is_global_state(args.item, state) or jax.process_count() == 1
        if is_one and jax.process_index():
            return
        for file, write in encode(state, "data").files("data" if is_one else _own_name()).items():
            buffer = io.BytesIO()
            write(buffer)
            (directory / file).write_bytes(buffer.getvalue())

    def restore(self, directory: Any, args: DataRestore) -> Any:
        """Restore into ``args.item`` and return it; CheckpointMismatchError if the state belongs to other data."""
        name = "data" if (directory / "data.json").exists() else _own_name()
        if not (directory / f"{name}.json").exists():
            if any(str(path.name).startswith("data-") for path in directory.iterdir()):
                cause = "each process saved its own state, which only fits the same number of processes"
                raise CheckpointMismatchError("process_count", "another", jax.process_count(), cause)
            raise CheckpointNotFoundError(f"{directory} holds no state of a pipeline.")
        state = _read(directory, name)
        stateful.check_fits(args.item, state, "data")
        stateful.load_state(args.item, state, "data")
        return args.item


@ocp.args.register_with_handler(DataHandler, for_save=True)
@dataclass
class DataSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Item to save: a loader, a dataset, an iterator."""

    item: Any


@ocp.args.register_with_handler(DataHandler, for_restore=True)
@dataclass
class DataRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Item to restore into."""

    item: Any


def _own_name() -> str:
    return f"data-{jax.process_index():05d}-of-{jax.process_count():05d}"


def _read(directory: Any, name: str) -> Any:
    try:
        text = json.loads((directory / f"{name}.json").read_text())
    except ValueError as problem:
        raise CheckpointDamagedError(f"{directory / name}.json cannot be read: {problem}") from None
    arrays = directory / f"{name}.safetensors"
    return StoredTree.opened(text, lambda: BytesSource(np.frombuffer(arrays.read_bytes(), np.uint8))).read()


class OrbaxBackend:
    """Backend that saves arrays that span several processes, and restores them with another topology.

    The folder is an Orbax checkpoint with a dict of arrays by name for each model, which Orbax reads without midepoch.
    """

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
