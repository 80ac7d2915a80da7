"""Reading the ledger: the passes of every process, and which of them belong together."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

from midepoch._internal.address import Address, is_address
from midepoch.audit.lanes import LaneTrack
from midepoch.audit.records import SUFFIX, UNKNOWN, Passed, Place, Shape, read_passes, steps_in
from midepoch.errors import DataNotFoundError

_OTHER_CLOCK = 300.0
"""Seconds by which the clocks of two machines may differ."""


@dataclass
class Generation:
    """All ranks' records of one pass. ``until`` is where the run left it: what lies behind was made again later."""

    shape: Shape
    beginning: tuple[int, int, int, int]
    """What passes are ordered by: the number of the start, how often its name was used before, and the largest and
    least number of the pass in its processes.
    """
    hows: dict[int, str]
    """How each rank came to it: with a "fresh" loader, a "loaded" state, or going "on"."""
    origin: Place
    end: int
    rows: int
    name: str
    steps: dict[int, int]
    skipped: dict[int, tuple[tuple[int, int], ...]]
    until: int
    beside: bool = False
    missing: tuple[int, ...] = field(default=())
    is_load: bool = False
    """Whether a state was loaded, and no pass begun yet."""
    reused: bool = False
    """Whether another start had the same name."""
    lost: tuple[int, ...] = ()
    """Ranks whose ledger could not be written any further in this pass."""
    overtaken: bool = False
    """Whether an earlier start went on after this one had begun to record."""
    times: tuple[float, float] = (0.0, 0.0)
    """When something was recorded first and last, as far as that is told."""
    tracks: dict[int, LaneTrack] = field(default_factory=dict)
    """By rank, the cursors of its lanes, where positions cannot be computed."""
    lanes: int = 0
    marks: dict[int, tuple[float, tuple[tuple[int, int, int], ...]]] = field(default_factory=dict)
    """By rank, when it began, and (steps so far, milliseconds since, milliseconds waited for data), now and then."""

    @property
    def how(self) -> str:
        """How the run came to it: if one rank loaded a state, all are taken to have."""
        return next(how for how in ("loaded", "fresh", "on") if how in self.hows.values())

    @property
    def place(self) -> Place:
        return (self.shape.epoch, self.shape.start)

    @property
    def behind(self) -> Place:
        """The place behind all that was kept of it."""
        return (self.shape.epoch, self.frontier)

    @property
    def is_look(self) -> bool:
        """Whether no rank was handed more than a first batch, of several."""
        return max(self.steps.values()) <= 1 and self.shape.start + self.shape.global_batch < self.end

    def made(self, rank: int) -> int:
        """The position up to which a rank was handed its rows, whether the run kept them or not."""
        return min(self.shape.start + self.steps.get(rank, 0) * self.shape.global_batch, self.end)

    def reached(self, rank: int) -> int:
        """The position up to which a rank got its rows, as the run went on."""
        return min(self.made(rank), self.until)

    @property
    def common(self) -> int:
        """The position up to which all ranks got their rows."""
        return self.shape.start if self.missing else min(map(self.reached, self.steps))

    @property
    def frontier(self) -> int:
        """The position that the rank ahead of all others reached."""
        return max(map(self.reached, self.steps))

    @property
    def kept_steps(self) -> int:
        """Steps that were made, up to where the run left the pass."""
        return -(-(self.frontier - self.shape.start) // self.shape.global_batch)

    @property
    def kept_skipped(self) -> int:
        """Rows passed over in those."""
        return sum(rows for of_rank in self.skipped.values() for step, rows in of_rank if step < self.kept_steps)


def ledger_folder(run: str | Path) -> Path:
    """The folder with the ledger of a run: itself, or ``ledger`` in it."""
    given = Path(run).expanduser()
    for folder in (given, given / "ledger"):
        if any(folder.glob(f"*{SUFFIX}")):
            return folder
    if is_address(given):
        raise DataNotFoundError(f"{Address(str(run))} is an address, and ledgers are in local folders. Name a folder.")
    name = Address(str(given)).public
    raise DataNotFoundError(f"there is no ledger in {name}: make loaders with audit={name!r} to keep one.")


def read_generations(folder: Path) -> list[Generation]:
    """All passes over all processes and starts, and all states loaded, in the order in which they were begun."""
    files = {path.name: read_passes(path) for path in sorted(folder.glob(f"*{SUFFIX}"))}
    uses = _uses(files)
    of_process: dict[tuple[str, int], list[Passed]] = defaultdict(list)
    reused = {one.shape.attempt for passes in files.values() for one in passes if uses.get(one.process, 0)}
    for passes in files.values():
        for one in passes:
            if one.shape.attempt in reused:
                attempt = f"{one.shape.attempt} ({uses.get(one.process, 0) + 1})"
                one = replace(one, shape=one.shape._replace(attempt=attempt), reused=True)
            of_process[one.process, one.rank].append(one)
    groups: dict[tuple[Shape, bool, int], list[Passed]] = defaultdict(list)
    for passes in of_process.values():
        passes.sort(key=lambda one: one.beginning)
        left = Counter((one.shape, one.is_load) for one in passes)
        for one in passes:
            # Counted from the last: a rank may have had a look at the first batch that the others did not have.
            left[one.shape, one.is_load] -= 1
            groups[one.shape, one.is_load, left[one.shape, one.is_load]].append(one)
    found = [_together(shape, passes, uses, files) for (shape, _, _), passes in groups.items()]
    return sorted(found, key=lambda one: one.beginning)


def _uses(files: dict[str, list[Passed]]) -> dict[str, int]:
    """How often the name of its start was used before, by process: as MIDEPOCH_RUN_ID is by a job that is queued again.

    Two processes of one rank and name are of one start if both went on (tensor parallelism), else of two.
    """
    before: dict[str, tuple[str, bool]] = {}
    for passes in files.values():
        for one in passes:
            for name, seen in one.previous:
                if (theirs := files.get(name)) and theirs[0].shape.attempt == one.shape.attempt:
                    over = 0 < seen == steps_in(theirs, one.shape.stream)
                    before[one.process] = (theirs[0].process, over)
    found: dict[str, int] = {}
    for process in before:
        chain = [process]
        while chain[-1] in before and before[chain[-1]][0] not in chain:
            chain.append(before[chain[-1]][0])
        found[process] = sum(before[other][1] for other in chain if other in before)
    return found


def _overtaken(one: Passed, files: dict[str, list[Passed]]) -> bool:
    """Whether another start went on after this one had begun to record: told by what was there to be seen, not by
    clocks. Between machines, where what is written may show up late, clocks must say so as well.
    """
    for name, seen in one.previous:
        theirs = files.get(name)
        if not theirs or theirs[0].shape.attempt == one.shape.attempt or steps_in(theirs, one.shape.stream) <= seen:
            continue
        if _host(theirs[0]) == _host(one) or max(map(_last_time, theirs)) > one.beginning[2] + _OTHER_CLOCK:
            return True
    return False


def _host(one: Passed) -> str:
    return one.process.rsplit("-", 2)[0]


def _last_time(one: Passed) -> float:
    return one.beginning[2] + (one.marks[-1][1] / 1000 if one.marks else 0)


def _together(shape: Shape, passes: list[Passed], uses: dict[str, int], files: dict[str, list[Passed]]) -> Generation:
    of_rank: dict[int, Passed] = {}
    for one in passes:  # several processes of one rank (tensor parallelism) see the same rows
        if one.rank not in of_rank or one.steps > of_rank[one.rank].steps:
            of_rank[one.rank] = one
    starts, numbers, times = zip(*(one.beginning for one in passes), strict=True)
    end = max(one.end for one in passes)
    if end == UNKNOWN and len(of_rank) == shape.ranks and all(one.finished for one in of_rank.values()):
        end = shape.start + max(one.steps for one in of_rank.values()) * shape.global_batch
    return Generation(
        shape,
        (min(starts), uses.get(passes[0].process, 0), max(numbers), min(numbers)),
        {rank: one.how for rank, one in of_rank.items()},
        min(one.origin for one in passes),
        end,
        passes[0].rows,
        passes[0].name,
        {rank: one.steps for rank, one in of_rank.items()},
        {rank: one.skipped for rank, one in of_rank.items() if one.skipped},
        end,
        any(one.beside for one in passes),
        tuple(rank for rank in range(shape.ranks) if rank not in of_rank),
        passes[0].is_load,
        passes[0].reused,
        tuple(rank for rank, one in of_rank.items() if one.lost),
        any(_overtaken(one, files) for one in passes),
        (min(times), max(map(_last_time, passes))),
        {rank: one.track for rank, one in of_rank.items() if one.track is not None},
        passes[0].lanes,
        {rank: (one.beginning[2], one.marks) for rank, one in of_rank.items()},
    )
