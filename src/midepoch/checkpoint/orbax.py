"""The state of a pipeline as an item of an Orbax checkpoint, beside the model that Orbax saves.

manager.save(step, args=ocp.args.Composite(model=ocp.args.StandardSave(state), data=DataSave(loader)))
manager.restore(step, args=ocp.args.Composite(model=…, data=DataRestore(loader)))
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from midepoch.checkpoint import parts, tensors, tree
from midepoch.checkpoint.files import BytesSource, Summing
from midepoch.checkpoint.stored import StoredTree
from midepoch.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


class DataHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """Saves and restores anything with ``get_state`` or ``state_dict``: one file for all processes where one state
    holds for all, else one for each.
    """

    def save(self, directory: Any, args: DataSave) -> None:
        state = parts.tree_of(args.item)
        rank, size = jax.process_index(), jax.process_count()
        if parts.is_global(args.item, state) or size == 1:
            if rank == 0:
                _write(directory, "data", state)
        else:
            _write(directory, f"data-{rank:05d}-of-{size:05d}", state)

    def restore(self, directory: Any, args: DataRestore) -> Any:
        """Restores into ``args.item`` and returns it; CheckpointMismatchError if the state belongs to other data."""
        own = f"data-{jax.process_index():05d}-of-{jax.process_count():05d}"
        name = "data" if (directory / "data.json").exists() else own
        if not (directory / f"{name}.json").exists():
            if any(str(path.name).startswith("data-") for path in directory.iterdir()):
                cause = "each process saved a state of its own, which fits the same number of processes only"
                raise CheckpointMismatchError("process_count", "another", jax.process_count(), cause)
            raise CheckpointNotFoundError(f"{directory} holds no state of a pipeline.")
        state = _read(directory, name)
        parts.check(args.item, state, "data")
        parts.give(args.item, state, "data")
        return args.item


@ocp.args.register_with_handler(DataHandler, for_save=True)
@dataclass
class DataSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save: a loader, a dataset, an iterator."""

    item: Any


@ocp.args.register_with_handler(DataHandler, for_restore=True)
@dataclass
class DataRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to restore into."""

    item: Any


def _write(directory: Any, name: str, state: Any) -> None:
    encoded = tree.encode(state, "data")
    (directory / f"{name}.json").write_text(json.dumps(encoded.json, allow_nan=False))
    if encoded.arrays:
        buffer = _Buffer()
        tensors.write(Summing(buffer), encoded.arrays)
        (directory / f"{name}.safetensors").write_bytes(bytes(buffer.data))


def _read(directory: Any, name: str) -> Any:
    try:
        text = json.loads((directory / f"{name}.json").read_text())
    except ValueError as problem:
        raise CheckpointDamagedError(f"{directory / name}.json cannot be read: {problem}") from None
    kinds = tree.array_kinds(text)
    if not kinds:
        return tree.decode(text, {})
    data = np.frombuffer((directory / f"{name}.safetensors").read_bytes(), np.uint8)
    return StoredTree(text, tensors.find(BytesSource(data), kinds.items())).read()


class _Buffer:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview, /) -> None:
        self.data += data
