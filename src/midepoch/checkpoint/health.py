"""Whether a step is whole, and what it is: for people, who want to see all steps and not only the first good one."""

from __future__ import annotations

from dataclasses import dataclass

from midepoch.checkpoint.manager import PipelineCheckpoint
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError


@dataclass(frozen=True)
class StepHealth:
    """``problem`` is None if nothing is wrong with it."""

    step: int
    time: float | None = None
    bytes: int | None = None
    world_size: int | None = None
    parts: tuple[str, ...] = ()
    problem: str | None = None


def health(saved: PipelineCheckpoint, step: int, *, read: bool) -> StepHealth:
    """Of a step; ``read``: after every byte of it was read. Raises CheckpointNotFoundError if it is not there."""
    try:
        manifest = saved.manifest(step)
    except CheckpointDamagedError as problem:
        return StepHealth(step, problem=str(problem))
    about = (step, manifest.time, manifest.nbytes, manifest.world_size, tuple(sorted(manifest.parts)))
    try:
        if read:
            saved.verify(step)
    except (CheckpointDamagedError, CheckpointNotFoundError) as problem:
        return StepHealth(*about, problem=str(problem))
    return StepHealth(*about)
