"""State of a loader for all ranks, and its JSON file in the checkpoint folder of another library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from midepoch.checkpoint import disk
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError, WorldError
from midepoch.loader import Loader
from midepoch.sources.storage import atomic_write


def for_all_ranks(loader: Loader, state: Any, group: Any = None) -> Any:
    """Return the state that restores every rank. All ranks (of a process group that has all data ranks) must call it,
    because they may have to exchange their states.
    """
    if loader.state_is_global or loader.shard.count == 1:
        return state
    import torch.distributed as dist

    if not dist.is_initialized():
        raise WorldError(
            f"the state of rank {loader.shard.index} does not restore the other {loader.shard.count - 1} ranks, and "
            "there is no process group to exchange states. Initialise torch.distributed, or use with_lanes(1)."
        )
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (loader.shard.index, state), group)
    states = dict(gathered)  # ranks that share a data rank have the same state
    return [states[index] for index in range(loader.shard.count)]


def write_state(path: Path, state: Any) -> None:
    """Write a state atomically and durably."""
    disk.make_folder(path.parent)
    atomic_write(path, json.dumps(state).encode())
    disk.sync(path.parent)


def read_state(path: Path) -> Any:
    """Read a state. Raise CheckpointNotFoundError if there is none: resuming without it would repeat or lose rows."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{path} does not exist: the checkpoint does not contain the position in the data, and rows would be lost "
            "or repeated. It was written without midepoch, or its save was interrupted. Try an earlier one."
        ) from None
    except ValueError as problem:
        raise CheckpointDamagedError(f"{path} cannot be read: {problem}") from None


def check_same_steps(saved: int, now: int, what: str) -> None:
    """Raise ValueError if a step has another number of rows than when a state was saved: loops that count steps would
    stop too early or too late.
    """
    if saved != now:
        raise ValueError(
            f"a step had {saved} rows over all ranks when this was saved, and has {now} now: {what} counts steps and "
            "would skip or repeat rows at the end. Keep ranks × batch size × accumulated batches as they were. (The "
            "loader itself resumes with any: your own loops may change it.)"
        )


def check_equal_epochs(loader: Loader, what: str, otherwise: str) -> None:
    """Raise ValueError if epochs have different numbers of batches, for loops that take the first number for all."""
    options = loader.options
    if options.planning is not None and not options.steps_per_epoch:
        also = f", {otherwise}" if otherwise else ""
        raise ValueError(
            f"batches by max_tokens: epochs have different numbers of them, but {what} counts those of one epoch for "
            f"all, and would stop too early or too late. Pass steps_per_epoch=… to the loader{also}."
        )
