"""Reading the ledger: the passes of every process, and their grouping over ranks."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from midepoch.audit.lanes import LaneTrack
from midepoch.audit.ledger import host_of
from midepoch.audit.records import SUFFIX, Count, LeaseRecord, Passed, Shape, read_file, steps_in
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
    processes: Sequence[Passed]
    """The records of all processes. Several of one rank (tensor parallelism) see the same rows."""
    overtaken: bool
    """True if an earlier start continued after this one had begun to record."""
    kept_steps: int = 0
    """Steps that the run kept: those that no later pass took back."""

    @cached_property
    def key(self) -> PassKey:
        """Identity of the pass, also if only a part of its steps is kept."""
        return self.shape, self.beginning

    @cached_property
    def first(self) -> Passed:
        """The record of one of the ranks, for what they have in common."""
        return next(iter(self.of_rank.values()))

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a record."""
        return tuple(rank for rank in range(self.shape.ranks) if rank not in self.of_rank)

    @cached_property
    def end(self) -> int:
        """Units of the epoch, if they are known, else UNKNOWN."""
        return min(one.header.end for one in self.processes)

    @property
    def times(self) -> tuple[float, float]:
        """Times of the first and the last record, as far as they are known."""
        return min(one.header.time for one in self.processes), max(one.last_time for one in self.processes)

    @cached_property
    def is_load(self) -> bool:
        """True if a state was loaded, and no pass is begun yet."""
        return self.first.header.is_load

    @property
    def in_lanes(self) -> bool:
        """True if positions cannot be computed."""
        return self.lanes > 0

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

    @cached_property
    def lanes_ended(self) -> bool:
        """True if all lanes had ended where it begins."""
        return self.cursor.lanes_ended and len(self.cursor.lanes) == self.lanes

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
    def lost(self) -> list[int]:
        """Ranks whose ledger could not be written any further in this pass, or in one before it."""
        return [rank for rank, one in self.of_rank.items() if one.counters[Count.LOST]]

    def owner(self, lane: int) -> LaneTrack | None:
        """Return the record of a lane: of the ranks that share it, that of the one with the most recorded steps."""
        tracks = [track for track in self.tracks.values() if lane in track.begin and lane not in track.ended]
        return max(tracks, key=lambda track: (track.recorded, track.delivered), default=None)

    def kept_of(self, track: LaneTrack) -> int:
        """Return the steps of a rank that the run kept."""
        return min(track.delivered, self.kept_steps)

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

    @cached_property
    def stretch(self) -> tuple[tuple[int, int], int]:
        """The start of the run, and how often it went back before.

        Ranks go back one after the other. What one has delivered since then is not taken back by another.
        """
        return self.beginning[:2], max(int(branch.rpartition(".")[2]) for branch in self.branches)

    @property
    def origins(self) -> set[str]:
        """The branches in which the state was saved that was loaded, if they are known."""
        return {branch for one in self.of_rank.values() for branch in one.header.origins}

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


def read_generations(folder: Path) -> tuple[list[Generation], list[str]]:
    """Return what a ledger has, and the names of its files whose ends are missing.

    It has all passes of all processes and starts, and all loaded states, in the order of their beginnings.
    """
    read = {path.name: read_file(path) for path in sorted(folder.glob(f"*{SUFFIX}"))}
    files = {name: file.passes for name, file in read.items()}
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
    generations = [_together(passes, uses, files) for passes in _grouped(joined)]
    return sorted(generations, key=lambda one: one.beginning), [name for name, file in read.items() if file.is_cut]


def _grouped(processes: list[list[Passed]]) -> Iterable[list[Passed]]:
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
        later: Counter[tuple[Shape, bool, int]] = Counter()
        for one in reversed(passes):
            kind = one.shape, one.header.is_load
            key = (*kind, one.header.cursor.steps if len(counts[kind]) > 1 else 0)
            groups[(*key, later[key])].append(one)
            later[key] += 1
    return groups.values()


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
        is_here = host_of(passes[0].header.process) == host_of(one.header.process)
        if is_here or max(each.last_time for each in passes) > one.header.time + _OTHER_CLOCK:
            return True
    return False


def _beginning(one: Passed) -> tuple[int, int, float]:
    """Return the number of the start, of the pass in its process, and the time."""
    return one.start, one.header.number, one.header.time


def _together(passes: list[Passed], uses: dict[str, int], files: dict[str, list[Passed]]) -> Generation:
    of_rank: dict[int, Passed] = {}
    for one in sorted(passes, key=lambda one: (one.header.rank, -one.steps)):
        of_rank.setdefault(one.header.rank, one)
    starts, numbers, _ = zip(*map(_beginning, passes), strict=True)
    beginning = min(starts), uses.get(passes[0].header.process, 0), max(numbers), min(numbers)
    return Generation(passes[0].shape, beginning, of_rank, passes, any(_overtaken(one, files) for one in passes))
