"""The state of a command: a JSON file, or a step of a folder of checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from midepoch._internal.address import Address
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.cli import common
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError, StateError
from midepoch.tools.locate import state_in


class Chosen(NamedTuple):
    """A state, and its step if it is that of a checkpoint."""

    state: Any
    step: int | None


def open_state(where: str, step: int | None = None, part: str | None = None, *, ranks: int = 1) -> Chosen:
    """Return the state in a JSON file or a checkpoint. Default: the step that ``restore_latest`` takes."""
    if os.path.isfile(where):
        try:
            return Chosen(state_in(json.loads(Path(where).read_text()), part), None)
        except ValueError as problem:
            raise StateError(f"{where} is not JSON: {problem}") from None
    saved = PipelineCheckpoint(where, rank=0, world_size=ranks)
    latest = saved.latest_step()
    if latest is None:
        raise CheckpointNotFoundError(f"there is no checkpoint in {Address(where)}.")
    if step is not None:
        return Chosen(_read(saved, step, part), step)
    older = [number for number in reversed(saved.steps()) if number != latest]
    for number in (latest, *older):
        try:
            return Chosen(_read(saved, number, part), number)
        except CheckpointDamagedError as problem:
            common.errors.print(common.styled(f"step {number} would be skipped: {problem}", "yellow"))
    raise CheckpointDamagedError(f"all steps in {Address(where)} are damaged.")


def _read(saved: PipelineCheckpoint, step: int, part: str | None) -> Any:
    try:
        return state_in(saved.read(step, part or "data"))
    except CheckpointNotFoundError:
        if part is None:
            raise
        return state_in(saved.read(step, "data"), part)  # one of several pipelines that were saved together
