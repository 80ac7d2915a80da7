"""The state of a loader for all ranks, and as a JSON file in the checkpoint folder of another library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from midepoch.checkpoint import disk
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError, WorldError
from midepoch.loader.common import AnyLoader
from midepoch.sources.storage import atomic_write


def for_all_ranks(loader: AnyLoader, state: Any) -> Any:
    """What restores every rank, of the state of this one. All ranks must call it: they may have to exchange theirs."""
    if loader.state_is_global or loader.cut.count == 1:
        return state
    import torch.distributed as dist

    if not dist.is_initialized():
        raise WorldError(
            f"the state of rank {loader.cut.index} does not hold for the other {loader.cut.count - 1}, and there is no "
            "process group to exchange theirs through: initialise torch.distributed, or use with_lanes(1)."
        )
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (loader.cut.index, state))
    states = dict(told)  # ranks that share a data rank stand at the same place
    return [states[index] for index in range(loader.cut.count)]


def write_state(path: Path, state: Any) -> None:
    """Write a state: it is there whole or not at all, whatever is killed whenever."""
    disk.make_folder(path.parent)
    atomic_write(path, json.dumps(state).encode())
    disk.sync(path.parent)


def read_state(path: Path) -> Any:
    """Read a state. CheckpointNotFoundError if there is none: going on without it would repeat or lose rows."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path} does not exist: the checkpoint does not say where in the data it was saved, and rows would be "
            "lost or repeated. Was it written without midepoch, or its saving cut short? An earlier one may be whole."
        ) from None
    except ValueError as problem:
        raise CheckpointDamagedError(f"{path} cannot be read: {problem}") from None


def check_same_steps(saved: int, now: int, what: str) -> None:
    """Raise ValueError if a step has another number of rows than when a state was saved: loops that count steps would
    end too early or too late.
    """
    if saved != now:
        raise ValueError(
            f"a step had {saved} rows over all ranks when this was saved, and has {now} now: {what} counts steps, and "
            "would leave rows out or repeat them at the end. Keep ranks × batch size × accumulated batches as they "
            "were. (The loader itself goes on with any: loops of your own may change it.)"
        )
