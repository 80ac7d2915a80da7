"""Leases in a ledger: which of them were acknowledged, and the proof that each was once.

A pass of leases has ``leases`` in its first line: the steps that it leaves out because this rank has acknowledged
them and, in lanes, what is not delivered after its start (else that is in ``done``). Among its steps are records in
angle brackets, written when acknowledgements are settled: ``<a3-9,12;0:192-640>``, the steps, and by lane their
outputs, or as lane 0 their turns (the numbers of their positions among those that the pass delivers). ``r`` instead of
``a``: they were rejected. ``<u>``: all that were out are returned. An acknowledgement is recorded before it is in a
state, so that one without a record is in no state either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor

_RECORD = re.compile(rb"<([aru])([^>]*)>|\.")


class LeaseSteps(NamedTuple):
    """The steps of a pass of leases: those of the plan that it leaves out or, in lanes, of the pass.

    ``first``: the number of its first step, in lanes.
    """

    left_out: Intervals
    first: int = 0


def leases_of(cursor: Cursor, leased: LeaseSteps) -> dict[str, Any]:
    """Return the field ``leases`` of a pass that begins at a cursor."""
    left_out = leased.left_out
    if cursor.lanes is None:
        return {"acked": left_out.encode()}
    lanes = {lane: [at.outputs, at.done.encode()] for lane, at in cursor.lanes.by_lane.items()}
    return {"lanes": lanes, "acked": left_out.encode(), "first": leased.first}


def record_of(kind: str, steps: Intervals, units: Mapping[int, Intervals]) -> bytes:
    """Return the record of acknowledged (``a``) or rejected (``r``) steps, and of their outputs or turns."""
    lanes = "|".join(f"{lane}:{_ranges(some)}" for lane, some in units.items())
    return f"<{kind}{_ranges(steps)};{lanes}>".encode()


RETURNED = b"<u>"


def _ranges(some: Intervals) -> str:
    pairs = zip(some.starts.tolist(), (some.stops - 1).tolist(), strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def _intervals(text: str) -> Intervals:
    pairs = [each.partition("-")[::2] for each in text.split(",") if each]
    return Intervals.of([int(first) for first, _ in pairs], [int(last or first) + 1 for first, last in pairs])


class LeaseRecord(NamedTuple):
    """The leases of one pass by one process. Units are outputs of lanes, or turns as those of lane 0."""

    done: Intervals
    """Not delivered in the pass, of positions."""
    lanes: Mapping[int, tuple[int, Intervals]] | None
    """By lane: outputs before the pass, and later ones that are not delivered in it. None with positions."""
    delivered: Intervals
    """Numbers of its steps."""
    finished: Intervals
    """Numbers of steps that are acknowledged."""
    acked: Mapping[int, Intervals]
    rejected: Mapping[int, Intervals]
    returned: bool
    first: int = 0
    """The number of the first step of the pass, in lanes."""

    @property
    def reach(self) -> int:
        """Steps up to the last that was delivered, with those that were left out before it."""
        return int(self.delivered.stops[-1]) - self.first if self.delivered else 0

    def has(self, step: int) -> bool:
        """Return True if a step of the pass was delivered. One that was acknowledged before is left out."""
        return bool(self.delivered.contains(np.array([self.first + step]))[0])

    def base(self, start: int) -> dict[int, Intervals]:
        """Return what was acknowledged or excluded before the pass, by lane. Positions are those of lane 0."""
        if self.lanes is None:
            return {0: self.done.union(Intervals.of(0, start))}
        return {lane: some.union(Intervals.of(0, before)) for lane, (before, some) in self.lanes.items()}

    def places(self, units: Mapping[int, Intervals], start: int, shard: Shard) -> Mapping[int, Intervals]:
        """Return the positions, or outputs by lane, of some units of a rank."""
        if self.lanes is not None:
            return units
        done = self.done.from_(self.done.after(start))
        turns = [
            shard.positions(first, stop)
            for some in units.values()
            for first, stop in zip(some.starts.tolist(), some.stops.tolist(), strict=True)
        ]
        return {0: Intervals.from_positions(done.remaining(np.concatenate(turns)))} if turns else {}


def read_leases(header: Mapping[str, Any], record: bytes) -> LeaseRecord | None:
    """Return the leases of a pass, or None if it had none."""
    if (field := header.get("leases")) is None:
        return None
    acked: dict[int, list[Intervals]] = {}
    rejected: dict[int, list[Intervals]] = {}
    delivered, steps, returned = 0, EMPTY, False
    for kind, text in _RECORD.findall(record):
        if not kind:
            delivered, returned = delivered + 1, False
        elif kind == b"u":
            returned = True
        else:
            of_steps, _, lanes_of_units = text.decode().partition(";")
            steps = steps.union(_intervals(of_steps))
            for part in filter(None, lanes_of_units.split("|")):
                lane, _, units = part.partition(":")
                acked.setdefault(int(lane), []).append(_intervals(units))
                if kind == b"r":
                    rejected.setdefault(int(lane), []).append(_intervals(units))
    lanes, first = field.get("lanes"), field.get("first", 0)
    if lanes is not None:
        lanes = {int(lane): (int(before), Intervals.decode(text)) for lane, (before, text) in lanes.items()}
    return LeaseRecord(
        Intervals.decode(header.get("done", "")),
        lanes,
        _steps(delivered, Intervals.decode(field.get("acked", "")), None if lanes is None else first),
        steps,
        {lane: EMPTY.union(*some) for lane, some in acked.items()},
        {lane: EMPTY.union(*some) for lane, some in rejected.items()},
        returned,
        first,
    )


def _steps(delivered: int, left_out: Intervals, first: int | None) -> Intervals:
    """Return the numbers of the first steps of a pass. ``first``: that of the first one, in lanes."""
    if first is None:
        return Intervals.from_positions(left_out.remaining(np.arange(delivered)))
    own = Intervals.of(0, delivered).minus(left_out)
    return Intervals.of(own.starts + first, own.stops + first)


class RankPass(NamedTuple):
    """A pass of one rank, as far as leases matter. ``plain``: what it received, if its batches were no leases."""

    start: int
    end: int
    shard: Shard
    batch: int
    """Rows of a step, of all ranks."""
    record: LeaseRecord | None
    plain: Intervals | None = None
    done: Intervals = EMPTY
    """Positions that a pass without leases did not deliver."""
    excluded: Mapping[int, Intervals] = {}
    """Outputs by lane, or positions as those of lane 0, that are excluded after its start."""


class LeaseCounts(NamedTuple):
    """Counts of positions, or of outputs of lanes, in an epoch.

    ``leased``: deliveries. ``acknowledged``: those that the run kept, including ``rejected``. ``again``: acknowledged,
    but in no state when the run was stopped, so that they are delivered again. ``out``: delivered in the last start and
    neither acknowledged nor ``returned``.
    """

    leased: int
    acknowledged: int
    rejected: int
    again: int
    out: int
    returned: int
    repeated: int
    never: int
    excluded: int
    examples: tuple[int, ...]
    """Some positions, or outputs, that were acknowledged twice or never."""
    kept: Mapping[int, Intervals]

    @property
    def totals(self) -> dict[str, int]:
        """The counts that tools show."""
        return {name: getattr(self, name) for name in ("leased", "acknowledged", "rejected", "out", "returned")}


class LeaseCounter:
    """Counts leases over the passes of all starts, in their order.

    Every start must begin with what was acknowledged or excluded before it, or less: else something was skipped. Within
    a start, nothing may be acknowledged that was so before.
    """

    def __init__(self) -> None:
        self._excluded: dict[int, Intervals] = {}
        self._kept: dict[int, Intervals] = {}
        self._rejected: dict[int, Intervals] = {}
        self._begun: set[int] = set()  # lanes of which the beginning in this start is known
        self._steps: dict[int, tuple[Intervals, Intervals, RankPass]] = {}  # of each rank: delivered, and acknowledged
        self._leased = self._again = self._repeated = self._never = 0
        self._is_sure = True  # False after a pass over lanes without leases, whose outputs are not recorded
        self._examples: list[int] = []

    def begin(self) -> None:
        """Begin with passes after a start of the run, or after a state was loaded."""
        self._begun, self._steps = set(), {}

    def add(self, one: RankPass) -> None:
        """Count one more pass of a rank."""
        record, shard = one.record, one.shard
        if record is None:
            if one.plain is None:
                self._is_sure = False
            else:
                self._begin(0, one.done.union(Intervals.of(0, one.start)), one.excluded)
                self._acknowledge(0, one.plain)
            return
        for lane, base in record.base(one.start).items():
            self._begin(lane, base, one.excluded)
        acked = record.places(record.acked, one.start, shard)
        for lane, some in acked.items():
            self._acknowledge(lane, some)
        for lane, some in record.places(record.rejected, one.start, shard).items():
            self._rejected[lane] = self._rejected.get(lane, EMPTY).union(some)
        self._leased += _units(one, record.delivered.intersection(record.finished), acked)
        self._leased += _units(one, record.delivered.minus(record.finished), None)
        delivered, finished, _ = self._steps.get(shard.index, (EMPTY, EMPTY, one))
        self._steps[shard.index] = (delivered.union(record.delivered), finished.union(record.finished), one)

    def _begin(self, lane: int, base: Intervals, excluded: Mapping[int, Intervals]) -> None:
        before, kept = self._excluded.get(lane, EMPTY), self._kept.get(lane, EMPTY)
        if lane not in self._begun:
            before = before.intersection(base)  # a state from before an exclusion takes it back
        self._excluded[lane] = before.union(excluded.get(lane, EMPTY))
        if lane in self._begun:
            return
        self._begun.add(lane)
        base = base.minus(self._excluded[lane].minus(kept))
        self._again += len(kept.minus(base))
        skipped = base.minus(kept) if self._is_sure else EMPTY
        self._never += len(skipped)
        self._examples += skipped.positions()[:10].tolist()
        self._kept[lane] = base
        self._rejected[lane] = self._rejected.get(lane, EMPTY).intersection(base)

    def _acknowledge(self, lane: int, acked: Intervals) -> None:
        kept = self._kept.get(lane, EMPTY)
        twice = acked.intersection(kept)
        self._repeated += len(twice)
        self._examples += twice.positions()[:10].tolist()
        self._kept[lane] = kept.union(acked)

    def counts(self) -> LeaseCounts:
        """Return the counts so far."""
        left = {True: 0, False: 0}
        for delivered, finished, one in self._steps.values():
            if one.record is not None:
                left[one.record.returned] += _units(one, delivered.minus(finished), None)
        return LeaseCounts(
            self._leased,
            sum(map(len, self._kept.values())) - self._never,
            sum(map(len, self._rejected.values())),
            self._again,
            left[False],
            left[True],
            self._repeated,
            self._never,
            sum(len(some.minus(self._kept.get(lane, EMPTY))) for lane, some in self._excluded.items()),
            tuple(self._examples[:10]),
            self._kept,
        )


def _units(one: RankPass, steps: Intervals, acked: Mapping[int, Intervals] | None) -> int:
    """Return the number of positions, or outputs, in steps of a rank. ``acked``: the outputs, if they are known."""
    record, shard = one.record, one.shard
    if record is None or not steps:
        return 0
    if record.lanes is not None:
        known = len(record.finished) if acked is not None else 0
        return sum(map(len, (acked or {}).values())) if known else len(steps) * one.batch // shard.count
    first = record.done.after(one.start)
    stop = record.done.from_(first).before(one.end)
    edges = zip((first + steps.starts * one.batch).tolist(), (first + steps.stops * one.batch).tolist(), strict=True)
    return sum(len(shard.positions(begin, min(end, stop))) for begin, end in edges)
