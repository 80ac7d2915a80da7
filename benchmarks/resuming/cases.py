"""The changes of topology, and the count of rows that a resumed run loses and repeats.

A run of two ranks with two workers each stops in mid-epoch and is resumed with another topology until the epoch ends.
The numbers of rows and steps are chosen so that every global batch is full, before and after: a library that drops or
pads a last batch shows no loss by that. Only `ranks 2 → 3, odd step` leaves an incomplete last batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.resuming import Topology
from benchmarks.resuming.launch import Leg, LegError

Run = Callable[[Topology, list[bytes], int | None], Leg]

BEFORE = Topology(world_size=2, workers=2, batch_size=24)
# Rows of a full and of a quick measurement. Multiples of 1,152 = 24 (ranks × workers) × 48 (global batch).
ROWS = 18_432
QUICK_ROWS = 2_304
UNINTERRUPTED = "uninterrupted"


@dataclass(frozen=True)
class Case:
    """`after` lists the topologies of the resumes: each runs for a quarter of the epoch, the last one to its end."""

    name: str
    after: tuple[Topology, ...]
    extra_steps: int = 0


CASES = (
    Case("same settings", (BEFORE,)),
    Case("same settings, odd step", (BEFORE,), extra_steps=1),
    Case("workers 2 → 3", (replace(BEFORE, workers=3),)),
    Case("batch 24 → 36", (replace(BEFORE, batch_size=36),)),
    Case("ranks 2 → 3", (replace(BEFORE, world_size=3),)),
    Case("ranks 2 → 4", (replace(BEFORE, world_size=4),)),
    Case("ranks 2 → 3 → 2", (replace(BEFORE, world_size=3), BEFORE)),
    Case("ranks 2 → 3, odd step", (replace(BEFORE, world_size=3),), extra_steps=1),
)


@dataclass(frozen=True)
class Outcome:
    """Lost and repeated rows of one case, or the error that ended it. `exact` where the order can be compared."""

    lost: int = 0
    repeated: int = 0
    exact: bool | None = None
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return self.error.partition(":")[0]
        return f"{self.lost} / {self.repeated}" + (", other order" if self.exact is False else "")


def count(ids: Sequence[int], rows: int) -> tuple[int, int]:
    """Return how many of `rows` ids are missing, and how many deliveries were not the first of their row."""
    seen = Counter(ids)
    if unknown := [row for row in seen if not 0 <= row < rows]:
        raise ValueError(f"ids must be in [0, {rows}), got {unknown[:3]}")
    return rows - len(seen), len(ids) - len(seen)


def measure(run: Run, rows: int, cases: Sequence[Case] = CASES) -> dict[str, Outcome]:
    """Run all cases of one contender. Cases share the legs that they have in common."""
    legs: dict[tuple[Topology | int | None, ...], Leg | str] = {}

    def leg(*path: tuple[Topology, int | None]) -> Leg:
        """Return the last leg of a path of (topology, steps), each one resumed from the states of the one before."""
        key = tuple(part for step in path for part in step)
        if key not in legs:
            states = leg(*path[:-1]).states if len(path) > 1 else []
            try:
                legs[key] = run(path[-1][0], states, path[-1][1])
            except LegError as error:
                legs[key] = str(error)
        found = legs[key]
        if isinstance(found, str):
            raise LegError(found)
        return found

    outcomes = {}
    try:
        whole = leg((BEFORE, None))
        outcomes[UNINTERRUPTED] = Outcome(*count(whole.ids(), rows))
    except LegError as error:
        return {UNINTERRUPTED: Outcome(error=str(error))}
    for case in cases:
        path: list[tuple[Topology, int | None]] = [(BEFORE, rows // BEFORE.global_batch // 2 + case.extra_steps)]
        path += [(topology, rows // topology.global_batch // 4) for topology in case.after[:-1]]
        path.append((case.after[-1], None))
        try:
            parts = [leg(*path[: stop + 1]) for stop in range(len(path))]
        except LegError as error:
            outcomes[case.name] = Outcome(error=str(error))
            continue
        lost, repeated = count([row for part in parts for row in part.ids()], rows)
        exact = _joined(parts) == whole.batches if case.after == (BEFORE,) else None
        outcomes[case.name] = Outcome(lost, repeated, exact)
    return outcomes


def _joined(parts: Sequence[Leg]) -> list[list[list[int]]]:
    """Return the batches of each rank over all legs."""
    return [
        [batch for rank in ranks for batch in rank] for ranks in zip(*(part.batches for part in parts), strict=True)
    ]
