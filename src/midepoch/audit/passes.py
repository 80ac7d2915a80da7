"""Reading the ledger: the passes of every process, and their grouping over ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from midepoch._internal.address import Address, is_address
from midepoch.audit.documents import RecordedDocuments
from midepoch.audit.figures import Mark
from midepoch.audit.lanes import LaneTrack
from midepoch.audit.leases import LeaseRecord
from midepoch.audit.mixes import RecordedMix
from midepoch.audit.records import SUFFIX, UNKNOWN, Passed, Place, Shape, read_passes, steps_in
from midepoch.audit.starts import host_of
from midepoch.errors import DataNotFoundError
from midepoch.order.intervals import Intervals

_OTHER_CLOCK = 300.0
"""Seconds by which the clocks of two machines may differ."""


@dataclass
class Generation:
    """The records of one pass on all ranks.

    ``until``: position at which the run left the pass; later rows were delivered again.
    """

    shape: Shape
    beginning: tuple[int, int, int, int]
    """Sort key: the number of the start, earlier uses of its name, and the largest and least number of the pass."""
    hows: dict[int, str]
    """The way in which each rank came to it: with a "fresh" loader, a "loaded" state, or continuing ("on")."""
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
    """True if a state was loaded, and no pass is begun yet."""
    reused: bool = False
    """True if another start had the same name."""
    lost: tuple[int, ...] = ()
    """Ranks whose ledger could not be written any further in this pass."""
    overtaken: bool = False
    """True if an earlier start continued after this one had begun to record."""
    times: tuple[float, float] = (0.0, 0.0)
    """Times of the first and the last record, as far as they are known."""
    tracks: dict[int, LaneTrack] = field(default_factory=dict)
    """By rank, the cursors of its lanes, if positions cannot be computed."""
    lanes: int = 0
    marks: dict[int, tuple[float, tuple[Mark, ...]]] = field(default_factory=dict)
    """By rank, the time of its beginning, and its occasional records."""
    processes: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By rank, the name of its process, and of the machine or container in which it can be seen."""
    last_steps: dict[int, float] = field(default_factory=dict)
    """By rank, the time of its last step, as far as it is known."""
    workers: int | None = None
    finished: bool = False
    """True if all ranks reached the end of the epoch."""
    sources: tuple[str, ...] = ()
    """Names of the sources, if batches have provenance."""
    documents: dict[int, tuple[RecordedDocuments, int]] = field(default_factory=dict)
    """By rank, the documents of the steps of its process, and the number of the pass in that process."""
    leases: dict[int, LeaseRecord] = field(default_factory=dict)
    """By rank, what was leased and acknowledged."""
    numbers: dict[int, int] = field(default_factory=dict)
    """By rank, the number of the pass in its process."""
    excluded: str = ""
    """Rows of the sources that yield nothing, as text, if positions cannot be computed."""
    excluded_places: Mapping[int, Intervals] = field(default_factory=dict)
    """Outputs by lane, or positions as those of lane 0, that ``Loader.exclude`` left out after the start."""
    mix: RecordedMix | None = None
    """The mix, if it has a schedule or weights that were set."""

    @property
    def how(self) -> str:
        """The way in which the run came to it: if one rank loaded a state, all are assumed to have."""
        return next(how for how in ("loaded", "fresh", "on") if how in self.hows.values())

    @property
    def place(self) -> Place:
        return (self.shape.epoch, self.shape.start)

    @property
    def after(self) -> Place:
        """The place after all rows that were kept of it."""
        return (self.shape.epoch, self.frontier)

    @property
    def is_look(self) -> bool:
        """True if no rank received more than a first batch, of several."""
        few = max(self.steps.values()) <= 1 and self.shape.after(1) < self.end
        return few and not any(track.finished for track in self.tracks.values())

    def made(self, rank: int) -> int:
        """Return the position up to which a rank received its rows, whether the run kept them or not."""
        record = self.leases.get(rank)
        steps = self.steps.get(rank, 0) if record is None or self.lanes else record.reach
        return min(self.shape.after(steps), self.end)

    def received(self, rank: int, step: int) -> bool:
        """Return True unless a step of a pass of leases was left out: the rank had acknowledged it before."""
        return (record := self.leases.get(rank)) is None or record.has(step)

    def reached(self, rank: int) -> int:
        """Return the position up to which a rank received the rows that the run kept."""
        return min(self.made(rank), self.until)

    @property
    def common(self) -> int:
        """The position up to which all ranks received their rows."""
        return self.shape.start if self.missing else min(map(self.reached, self.steps))

    @property
    def frontier(self) -> int:
        """The position of the rank with the most steps."""
        return max(map(self.reached, self.steps))

    @property
    def kept_steps(self) -> int:
        """Number of steps up to the position at which the run left the pass."""
        return self.shape.steps_to(self.frontier)

    @property
    def kept_numbers(self) -> int:
        """Number of those steps, with the ones that were excluded before and between them."""
        if (amid := self.shape.amid) is None:
            return self.kept_steps
        return amid.numbers.number(self.kept_steps) - self.shape.first_step

    @property
    def done(self) -> Intervals:
        """Positions that are not delivered."""
        return Intervals.decode(self.shape.done)

    @property
    def kept_skipped(self) -> int:
        """Number of rows skipped in those."""
        return sum(rows for of_rank in self.skipped.values() for step, rows in of_rank if step < self.kept_steps)


def ledger_folder(run: str | Path) -> Path:
    """Return the folder with the ledger of a run: itself, or ``ledger`` in it."""
    given = Path(run).expanduser()
    for folder in (given, given / "ledger"):
        if any(folder.glob(f"*{SUFFIX}")):
            return folder
    if is_address(given):
        raise DataNotFoundError(f"{Address(str(run))} is an address, but ledgers are in local folders. Pass a folder.")
    name = Address(str(given)).public
    missing = "" if given.exists() else ", which does not exist"
    raise DataNotFoundError(
        f"there is no ledger in {name}{missing}. Pass the folder of a run, which loader(audit=…) was given: a folder "
        "of its own, not that of the data."
    )


def read_generations(folder: Path) -> list[Generation]:
    """Return all passes of all processes and starts, and all loaded states, in the order of their beginnings."""
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
            # Counted from the last: possibly only some of the ranks looked at the first batch.
            left[one.shape, one.is_load] -= 1
            groups[one.shape, one.is_load, left[one.shape, one.is_load]].append(one)
    generations = [_together(shape, passes, uses, files) for (shape, _, _), passes in groups.items()]
    return sorted(generations, key=lambda one: one.beginning)


def _uses(files: dict[str, list[Passed]]) -> dict[str, int]:
    """Return by process how often the name of its start was used before.

    A job that is queued again uses the same MIDEPOCH_RUN_ID. Two processes of one rank and name are of one start if
    both continued (tensor parallelism), else of two.
    """
    before: dict[str, tuple[str, bool]] = {}
    for passes in files.values():
        for one in passes:
            for name, seen in one.previous:
                if (previous := files.get(name)) and previous[0].shape.attempt == one.shape.attempt:
                    over = 0 < seen == steps_in(previous, one.shape.stream)
                    before[one.process] = (previous[0].process, over)
    found: dict[str, int] = {}
    for process in before:
        chain = [process]
        while chain[-1] in before and before[chain[-1]][0] not in chain:
            chain.append(before[chain[-1]][0])
        found[process] = sum(before[other][1] for other in chain if other in before)
    return found


def _overtaken(one: Passed, files: dict[str, list[Passed]]) -> bool:
    """Return True if another start continued after this one had begun to record.

    This is decided by the files that were visible, not by clocks. Between machines, where writes may become visible
    late, clocks must confirm it.
    """
    for name, seen in one.previous:
        passes = files.get(name)
        if not passes or passes[0].shape.attempt == one.shape.attempt or steps_in(passes, one.shape.stream) <= seen:
            continue
        if (
            host_of(passes[0].process) == host_of(one.process)
            or max(map(_last_time, passes)) > one.beginning[2] + _OTHER_CLOCK
        ):
            return True
    return False


def _is_over(one: Passed) -> bool:
    """Return True if a process delivered the last batch of its epoch."""
    steps = one.steps if one.leases is None or one.lanes else one.leases.reach
    return one.finished or one.shape.after(steps) >= one.end


def _last_time(one: Passed) -> float:
    return max(one.seen or 0.0, one.beginning[2] + (one.marks[-1].elapsed / 1000 if one.marks else 0))


def _together(shape: Shape, passes: list[Passed], uses: dict[str, int], files: dict[str, list[Passed]]) -> Generation:
    of_rank: dict[int, Passed] = {}
    for one in passes:  # several processes of one rank (tensor parallelism) see the same rows
        if one.rank not in of_rank or one.steps > of_rank[one.rank].steps:
            of_rank[one.rank] = one
    starts, numbers, times = zip(*(one.beginning for one in passes), strict=True)
    end = max(one.end for one in passes)
    if end == UNKNOWN and len(of_rank) == shape.ranks and all(one.finished for one in of_rank.values()):
        end = shape.after(max(one.steps for one in of_rank.values()))
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
        {rank: (one.process, one.space) for rank, one in of_rank.items()},
        {rank: _last_time(one) for rank, one in of_rank.items()},
        max((one.workers for one in passes if one.workers is not None), default=None),
        len(of_rank) == shape.ranks and all(_is_over(one) for one in of_rank.values()),
        passes[0].sources,
        {rank: (one.documents, one.beginning[1]) for rank, one in of_rank.items() if one.documents is not None},
        {rank: one.leases for rank, one in of_rank.items() if one.leases is not None},
        {rank: one.beginning[1] for rank, one in of_rank.items()},
        passes[0].excluded,
        {lane: places for one in passes for lane, places in one.excluded_places.items()},
        passes[0].mix,
    )
