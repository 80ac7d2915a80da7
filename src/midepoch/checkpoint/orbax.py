"""State of a pipeline as an item of an Orbax checkpoint, beside the model that Orbax saves.

manager.save(step, args=ocp.args.Composite(model=ocp.args.StandardSave(state), data=DataSave(loader)))
manager.restore(step, args=ocp.args.Composite(model=…, data=DataRestore(loader)))
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from midepoch.checkpoint import stateful
from midepoch.checkpoint.files import BytesSource
from midepoch.checkpoint.tensor_files import StoredTree, find_arrays, write_arrays
from midepoch.checkpoint.tree import array_specs, decode, encode
from midepoch.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError


class DataHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """Handler of any object with ``get_state`` or ``state_dict``: one file if one state restores all processes, else
    one for each.
    """

    def save(self, directory: Any, args: DataSave) -> None:
        state = stateful.state_of(args.item)
        rank, size = jax.process_index(), jax.process_count()
        if stateful.is_global_state(args.item, state) or size == 1:
            if rank == 0:
                _write(directory, "data", state)
        else:
            _write(directory, f"data-{rank:05d}-of-{size:05d}", state)

    def restore(self, directory: Any, args: DataRestore) -> Any:
        """Restore into ``args.item`` and return it; CheckpointMismatchError if the state belongs to other data."""
        own = f"data-{jax.process_index():05d}-of-{jax.process_count():05d}"
        name = "data" if (directory / "data.json").exists() else own
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


def _write(directory: Any, name: str, state: Any) -> None:
    encoded = encode(state, "data")
    (directory / f"{name}.json").write_text(json.dumps(encoded.json, allow_nan=False))
    if encoded.arrays:
        buffer = io.BytesIO()
        write_arrays(buffer, encoded.arrays)
        (directory / f"{name}.safetensors").write_bytes(buffer.getvalue())


def _read(directory: Any, name: str) -> Any:
    try:
        text = json.loads((directory / f"{name}.json").read_text())
    except ValueError as problem:
        raise CheckpointDamagedError(f"{directory / name}.json cannot be read: {problem}") from None
    specs = array_specs(text)
    if not specs:
        return decode(text, {})
    data = np.frombuffer((directory / f"{name}.safetensors").read_bytes(), np.uint8)
    return StoredTree(text, find_arrays(BytesSource(data), specs.items())).read()
