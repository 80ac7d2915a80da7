"""Reading the ledger: the passes of every process, and their grouping over ranks."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from midepoch.audit.documents import RecordedDocuments
from midepoch.audit.lanes import LaneTrack
from midepoch.audit.ledger import host_of
from midepoch.audit.records import SUFFIX, LeaseRecord, Mark, Passed, Shape, read_passes, steps_in
from midepoch.errors import DataNotFoundError
from midepoch.pipeline.cursor import Cursor
from midepoch.storage.address import Address, is_address

_OTHER_CLOCK = 300.0
"""Seconds by which the clocks of two machines may differ."""


PassKey = tuple[Shape, tuple[int, int, int, int]]
"""Shape and beginning of a pass, which no other pass has."""


@dataclass
class Generation:
    """The records of one pass on all ranks."""

    shape: Shape
    beginning: tuple[int, int, int, int]
    """Sort key: the number of the start, earlier uses of its name, and the largest and least number of the pass."""
    of_rank: dict[int, Passed]
    """By rank, its record."""
    missing: tuple[int, ...]
    """Ranks without a record."""
    end: int
    """Units of the epoch, if they are known, else UNKNOWN."""
    overtaken: bool
    """True if an earlier start continued after this one had begun to record."""
    beside: bool
    """True if another loader of the same rows recorded at the same time."""
    times: tuple[float, float]
    """Times of the first and the last record, as far as they are known."""
    kept_steps: int = 0
    """Steps that the run kept: those that no later pass took back."""
    how_after_look: str = ""
    """The way in which the run came to it, if a look before it was taken back."""

    @cached_property
    def key(self) -> PassKey:
        """Identity of the pass, also if only a part of its steps is kept."""
        return self.shape, self.beginning

    @cached_property
    def first(self) -> Passed:
        """The record of one of the ranks, for what they have in common."""
        return next(iter(self.of_rank.values()))

    @cached_property
    def is_load(self) -> bool:
        """True if a state was loaded, and no pass is begun yet."""
        return self.first.header.is_load

    @property
    def in_lanes(self) -> bool:
        """True if positions cannot be computed."""
        return self.first.header.unit == "outputs"

    @property
    def lanes(self) -> int:
        """The number of lanes, or 0 if positions can be computed."""
        return self.first.header.lanes

    @cached_property
    def before(self) -> int:
        """Steps of the run before it: the most of all ranks."""
        return max(one.header.cursor.steps for one in self.of_rank.values())

    @property
    def cursor(self) -> Cursor:
        """The cursor at which it begins, with the lanes of all ranks."""
        lanes = {number: lane for one in self.of_rank.values() for number, lane in one.header.cursor.lanes.items()}
        return Cursor(self.shape.epoch, lanes, self.before)

    @property
    def steps(self) -> dict[int, int]:
        """By rank, the number of steps delivered."""
        return {rank: one.steps for rank, one in self.of_rank.items()}

    @property
    def most_steps(self) -> int:
        """Steps of the rank that has most."""
        return max(self.steps.values())

    @property
    def reach(self) -> int:
        """Steps that the run kept or, of leases, up to the last that was delivered, with those that it left out."""
        records = [record for record in self.leases.values() if record.delivered]
        return max((int(record.delivered.stops[-1]) - record.first for record in records), default=self.kept_steps)

    @cached_property
    def how(self) -> str:
        """The way in which the run came to it: if one rank loaded a state, all are assumed to have."""
        hows = {one.header.how for one in self.of_rank.values()}
        return next(how for how in ("loaded", "fresh", "on") if how in hows)

    @property
    def tracks(self) -> dict[int, LaneTrack]:
        """By rank, the cursors of its lanes."""
        return {rank: one.track for rank, one in self.of_rank.items() if one.track is not None}

    @property
    def leases(self) -> dict[int, LeaseRecord]:
        """By rank, what was leased and acknowledged."""
        return {rank: one.leases for rank, one in self.of_rank.items() if one.leases is not None}

    @property
    def documents(self) -> dict[int, tuple[RecordedDocuments, int]]:
        """By rank, the documents of the steps of its process, and the number of the pass in that process."""
        found = ((rank, one) for rank, one in self.of_rank.items() if one.documents is not None)
        return {rank: (one.documents, one.header.number) for rank, one in found if one.documents is not None}

    @property
    def marks(self) -> dict[int, tuple[float, tuple[Mark, ...]]]:
        """By rank, the time of its beginning, and its occasional records."""
        return {rank: (one.header.time, one.marks) for rank, one in self.of_rank.items()}

    @property
    def last_steps(self) -> dict[int, float]:
        """By rank, the time of its last step, as far as it is known."""
        return {rank: _last_time(one) for rank, one in self.of_rank.items()}

    @property
    def processes(self) -> dict[int, tuple[str, str]]:
        """By rank, the name of its process, and of the machine or container in which it can be seen."""
        return {rank: (one.header.process, one.header.space) for rank, one in self.of_rank.items()}

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks whose ledger could not be written any further in this pass."""
        return tuple(rank for rank, one in self.of_rank.items() if one.lost)

    @property
    def gaps(self) -> tuple[int, ...]:
        """Ranks that could not record a pass before this one."""
        return tuple(rank for rank, one in self.of_rank.items() if one.gap)

    @property
    def workers(self) -> int:
        """The most workers of a rank."""
        return max(one.header.workers for one in self.of_rank.values())

    def owner(self, lane: int) -> LaneTrack | None:
        """Return the record of a lane: of the ranks that share it, that of the one with the most recorded steps."""
        tracks = [track for track in self.tracks.values() if lane in track.begin and lane not in track.ended]
        return max(tracks, key=lambda track: (track.recorded, track.delivered), default=None)

    def common_steps(self, lane: int, most: int | None = None) -> int:
        """Return the steps of a lane that all ranks took that share it. ``most``: not more than these.

        A rank that came to the end of the epoch had nothing in the steps that others took after that.
        """
        track = self.owner(lane)
        if track is None:
            return 0
        sharing = (one for one in self.of_rank.values() if one.track is not None and lane in one.track.begin)
        common = min((one.steps for one in sharing if not one.finished), default=track.recorded)
        return min(common, track.recorded, track.recorded if most is None else most)

    @property
    def branches(self) -> set[str]:
        """The branches of the run that its ranks were in."""
        return {one.header.branch for one in self.of_rank.values()}

    @property
    def origins(self) -> set[str]:
        """The branches in which the state was saved that was loaded, if they are known."""
        return {branch for one in self.of_rank.values() for branch in one.header.origins}

    def of(self, rank: int, record: Passed) -> Generation:
        """Return the pass of one rank alone, by another record."""
        return replace(self, of_rank={rank: record})

    def skipped(self, steps: int) -> int:
        """Return the rows that were skipped in the first steps."""
        return sum(rows for one in self.of_rank.values() for step, rows in one.skipped if step < steps)

    def received(self, rank: int, step: int) -> bool:
        """Return True if a rank got a step. Of a pass of leases, it may have acknowledged it before."""
        one = self.of_rank.get(rank)
        if one is None or (one.leases is None and step >= one.steps):
            return False
        return one.leases is None or one.leases.has(step)


def ledger_folder(run: str | Path) -> Path:
    """Return the folder with the ledger of a run: itself, or ``ledger`` in it."""
    if not isinstance(run, (str, os.PathLike)):
        raise TypeError(f"expected the folder of a run, such as 'runs/7', got {run!r:.60}")
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
    reused = {one.shape.attempt for passes in files.values() for one in passes if uses.get(one.header.process, 0)}
    for passes in files.values():
        for one in passes:
            if one.shape.attempt in reused:
                attempt = f"{one.shape.attempt} ({uses.get(one.header.process, 0) + 1})"
                one = replace(one, header=replace(one.header, attempt=attempt), reused=True)
            of_process[one.header.process, one.header.rank].append(one)
    joined = [_joined(sorted(passes, key=_beginning)) for passes in of_process.values()]
    generations = [_together(shape, passes, uses, files) for (shape, *_), passes in _grouped(joined).items()]
    return sorted(generations, key=lambda one: one.beginning)


def _grouped(processes: list[list[Passed]]) -> dict[tuple[Shape, bool, int, int], list[Passed]]:
    """Return the passes that ranks have taken together.

    If all have the same number of passes, these correspond. Otherwise, those that begin at the same step do. They are
    counted from the last: possibly only some of the ranks looked at the first batch.
    """
    counts: dict[tuple[Shape, bool], set[int]] = defaultdict(set)
    for passes in processes:
        for kind, count in Counter((one.shape, one.header.is_load) for one in passes).items():
            counts[kind].add(count)
    groups: dict[tuple[Shape, bool, int, int], list[Passed]] = defaultdict(list)
    for passes in processes:
        keys = [
            (one.shape, load, one.header.cursor.steps if len(counts[one.shape, load]) > 1 else 0)
            for one in passes
            for load in (one.header.is_load,)
        ]
        left = Counter(keys)
        for one, key in zip(passes, keys, strict=True):
            left[key] -= 1
            groups[(*key, left[key])].append(one)
    return groups


def _joined(passes: list[Passed]) -> list[Passed]:
    """Return the passes of a process. One that only finds that nothing is left of its epoch is a part of the last."""
    found: list[Passed] = []
    for one in passes:
        before = found[-1] if found else None
        if before is None or before.track is None or one.track is None or not one.finds_the_end_of(before):
            found.append(one)
            continue
        found[-1] = before.with_end(one)
    return found


def _uses(files: dict[str, list[Passed]]) -> dict[str, int]:
    """Return by process how often the name of its start was used before.

    A job that is queued again uses the same MIDEPOCH_RUN_ID. Two processes of one rank and name are of one start if
    both continued (tensor parallelism), else of two.
    """
    before: dict[str, tuple[str, bool]] = {}
    for passes in files.values():
        for one in passes:
            for name, seen in one.header.previous:
                if (previous := files.get(name)) and previous[0].shape.attempt == one.shape.attempt:
                    over = 0 < seen == steps_in(previous, one.shape.stream)
                    before[one.header.process] = (previous[0].header.process, over)
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
    for name, seen in one.header.previous:
        passes = files.get(name)
        if not passes or passes[0].shape.attempt == one.shape.attempt or steps_in(passes, one.shape.stream) <= seen:
            continue
        if (
            host_of(passes[0].header.process) == host_of(one.header.process)
            or max(map(_last_time, passes)) > one.header.time + _OTHER_CLOCK
        ):
            return True
    return False


def _last_time(one: Passed) -> float:
    return max(one.seen, one.header.time + (one.marks[-1].elapsed / 1000 if one.marks else 0))


def _beginning(one: Passed) -> tuple[int, int, float]:
    """Return the number of the start, of the pass in its process, and the time."""
    return one.start, one.header.number, one.header.time


def _together(shape: Shape, passes: list[Passed], uses: dict[str, int], files: dict[str, list[Passed]]) -> Generation:
    of_rank: dict[int, Passed] = {}
    for one in passes:  # several processes of one rank (tensor parallelism) see the same rows
        rank = one.header.rank
        if rank not in of_rank or one.steps > of_rank[rank].steps:
            of_rank[rank] = one
    starts, numbers, times = zip(*map(_beginning, passes), strict=True)
    return Generation(
        shape,
        (min(starts), uses.get(passes[0].header.process, 0), max(numbers), min(numbers)),
        dict(sorted(of_rank.items())),
        tuple(rank for rank in range(shape.ranks) if rank not in of_rank),
        min(one.header.end for one in passes),
        any(_overtaken(one, files) for one in passes),
        any(one.beside for one in passes),
        (min(times), max(map(_last_time, passes))),
    )
