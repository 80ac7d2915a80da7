"""The proof that a run delivered every unit once: one tiling of rows, outputs, batches by tokens and leases.

Every record says which units were done before it: a state was loaded there, or the run continued. In the order of the
records, the proof keeps the set of units that the weights have seen:

- A record that goes back (a loaded state, a fresh start, a look that is taken back) claims a set. Units that were
  delivered and are not in it are delivered *again* later. Units in it that were never delivered are lost: *never*.
- A step adds its units. Those that are in the set already are *repeated*.
- Excluded units are in neither.

A run can go back to a step, continue from there, and later come back to a state of the *branch* that it left. So the
sets at the beginning of every branch are kept, with its passes, and a loaded state that was saved in a pass of another
branch continues that branch.

Positions are compared in rows, also where batches by tokens changed their budget. In lanes, units are outputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.lanes import LaneTrack
from midepoch.audit.passes import Generation
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import LaneCursor, WindowAt
from midepoch.pipeline.plans import StepPlan, TokenPlan

if TYPE_CHECKING:
    from midepoch.audit.run import Run

Int64Array = npt.NDArray[np.int64]
_LANE = 1 << 44
"""Units of lane n are numbered from n << 44 on, so that those of all lanes are one set."""


def in_lane(lane: int, units: Intervals) -> Intervals:
    """Return units of a lane, as numbered among those of all lanes."""
    return Intervals.of(units.starts + lane * _LANE, units.stops + lane * _LANE)


class Claim(NamedTuple):
    """Statement of a record about the units before it, in some lanes: which are done, and which later are excluded."""

    lanes: frozenset[int]
    done: Intervals = EMPTY
    excluded: Intervals = EMPTY

    @property
    def all_units(self) -> Intervals:
        """All units of its lanes."""
        starts = np.array(sorted(self.lanes), np.int64) * _LANE
        return Intervals.of(starts, starts + _LANE)

    def of(self, lanes: frozenset[int]) -> Claim:
        """Return what it says of some lanes."""
        part = Claim(lanes).all_units
        return Claim(lanes, self.done.intersection(part), self.excluded.intersection(part))


class LeaseCounts(NamedTuple):
    """Counts of positions, or of outputs of lanes, in an epoch.

    ``leased``: deliveries. ``acknowledged``: those that the run kept, including ``rejected``. ``out``: delivered in the
    last start and neither acknowledged nor ``returned``.
    """

    leased: int
    acknowledged: int
    rejected: int
    out: int
    returned: int


@dataclass(frozen=True)
class EpochUnits:
    """The units of an epoch: what the weights have seen, what is excluded, and what is wrong."""

    kept: Intervals = EMPTY
    excluded: Intervals = EMPTY
    rejected: Intervals = EMPTY
    twice: Intervals = EMPTY
    lost: Intervals = EMPTY
    """Units that a state claimed to be done, and that were not delivered before."""
    dropped: Intervals = EMPTY
    """Outputs of lanes that were too few for a batch at the end of the epoch."""
    again: int = 0
    leased: int = 0
    records: tuple[Generation, ...] = ()
    """Its records since the run was last taken back before it, in their order."""

    def back_to(self, claim: Claim) -> EpochUnits:
        """Return the units where the run continues, if a record claims that these are done."""
        units, kept = claim.all_units, self.kept
        gone = units.minus(claim.done)
        # What was excluded and passed is done, too. A state from before an exclusion takes it back.
        passed = self.excluded.minus(gone).minus(kept.intersection(units))
        dropped = self.dropped.minus(gone)
        missing = claim.done.minus(kept).minus(passed).minus(dropped)
        return replace(
            self,
            again=self.again + len(kept.intersection(gone)),
            kept=kept.minus(gone),
            dropped=dropped,
            twice=self.twice.minus(gone),
            rejected=self.rejected.minus(gone),
            lost=self.lost.minus(units).union(missing),
            excluded=passed.union(claim.excluded),
        )

    def after(self, one: Generation, run: Run) -> EpochUnits:
        """Return the units after a pass."""
        units = delivered_by(one, run)
        leased = sum(units_in(one, rank, record.delivered, run) for rank, record in one.leases.items())
        return replace(
            self,
            excluded=self.excluded.union(claim_of(one, run).excluded),
            twice=self.twice.union(units.intersection(self.kept)),
            kept=self.kept.union(units),
            dropped=self.dropped.union(_dropped(one)),
            leased=self.leased + leased,
            rejected=self.rejected.union(_acknowledged(one, run, rejected=True)),
            records=self.records if any(one is other for other in self.records) else (*self.records, one),
        )

    @property
    def never(self) -> Intervals:
        """Units that were passed over."""
        return self.lost.minus(self.kept)

    @property
    def left_out(self) -> Intervals:
        """Units that are excluded and were not delivered."""
        return self.excluded.minus(self.kept)

    @property
    def examples(self) -> tuple[int, ...]:
        """The first units that were delivered more than once, or passed over."""
        return tuple(self.twice.union(self.never).first(10))


class Kept(NamedTuple):
    """A pass of the history: the number of its steps that no later record took back, and the steps before it."""

    one: Generation
    steps: int
    first: int


class Line(NamedTuple):
    """The history at a moment: the units of each epoch, and the passes that are kept."""

    epochs: Mapping[int, EpochUnits] = {}
    kept: tuple[Kept, ...] = ()
    offset: int = 0
    """Steps before a loader that counts from 0, if every epoch has a new one."""

    def units(self, epoch: int) -> EpochUnits:
        """Return the units of an epoch."""
        return self.epochs.get(epoch, EpochUnits())

    def having(self, epoch: int, units: EpochUnits) -> Line:
        """Return the history with other units of an epoch."""
        return self._replace(epochs={**self.epochs, epoch: units})

    def after(self, one: Generation, run: Run, part: Generation | None = None) -> Line:
        """Return the history after a pass. ``part``: the part of it that counts."""
        part, epoch = part or one, one.shape.epoch
        kept = Kept(one, part.most_steps, self.offset + one.before)
        return self.having(epoch, self.units(epoch).after(part, run))._replace(kept=(*self.kept, kept))

    def missing(self, load: Generation, claim: Claim) -> Intervals:
        """Return the units that a loaded state claims to be done, and that the history does not have."""
        here = self.units(load.shape.epoch)
        return claim.done.minus(here.kept).minus(here.excluded).minus(here.dropped)

    def is_at(self, load: Generation, claim: Claim) -> bool:
        """Return True if the history has what a loaded state claims to be done, and not more."""
        kept = self.units(load.shape.epoch).kept.intersection(claim.all_units)
        return not self.missing(load, claim) and not kept.minus(claim.done)

    def counting(self, other: Line) -> Line:
        """Return the history with all deliveries of another one, which it replaces."""
        epochs = dict(self.epochs)
        for epoch, units in other.epochs.items():
            here = self.units(epoch)
            epochs[epoch] = replace(here, again=units.again + len(units.kept) - len(here.kept))
        return self._replace(epochs=epochs)


class Branch(NamedTuple):
    """The history where the run went back, and the passes since then."""

    line: Line
    passes: list[Generation]


class History:
    """The history that the weights have.

    A state that was loaded counts if a pass follows, or nothing; of several, the last one. A pass of one batch may be a
    look, such as a sample to build the model from: it counts only if the run continues after it, if the next record is
    of a later epoch and it reached the end of its own, or if nothing follows.
    """

    def __init__(self, records: Sequence[Generation], run: Run) -> None:
        self._run, self.line = run, Line()
        self._begun: set[Any] = set()  # stretches, epochs and lanes in which the run has delivered something
        self._branches: list[Branch] = []
        self._forks = True  # the next pass begins a branch
        load: Generation | None = None
        look: tuple[Generation, str] | None = None  # with the way in which the run came to it
        for one in records:
            if one.is_load:
                load = one
                continue
            how = one.how
            if look is not None:
                how, look = self._judge(*look, load or one, one.how), None
            if load is not None:
                self._go_back(load)
                load = None
            if _may_be_look(one, run):
                look = one, how
            else:
                self._add(one, how)
        if look is not None:
            self._judge(*look, load, "on")
        if load is not None:
            self._go_back(load)

    def _judge(self, look: Generation, before: str, following: Generation | None, how: str) -> str:
        """Count a pass of one batch if the run continued after it.

        ``before``: how the run came to it. ``following``: the record after it, or the state that was loaded. Return how
        the run came to the pass after it, which says ``how``: after a look that is taken back, as it came to the look.
        """
        units = delivered_by(look, self._run)
        if following is None or self._is_after(look, following, units):
            self._add(look, before)
            return how
        line, begun, epoch = self.line, set(self._begun), look.shape.epoch
        self._add(look, before)  # a branch: the run may come back to a state that was saved in it
        here = line.units(epoch)
        self.line, self._begun = line.having(epoch, replace(here, again=here.again + len(units))), begun
        self._forks = True
        return before if how != "fresh" and not following.is_load else how

    def _is_after(self, look: Generation, one: Generation, units: Intervals) -> bool:
        """Return True if a record begins after a look, whose units are done there, and no others."""
        if look.shape.epoch != one.shape.epoch:
            return one.shape.epoch > look.shape.epoch and self._run.reached_end(look)
        before, after = claim_of(look, self._run), claim_of(one, self._run)
        own = units.intersection(after.all_units)
        return not own.minus(after.done) and not after.done.minus(own.union(before.done, before.excluded))

    def _go_back(self, one: Generation) -> None:
        """Continue where a record begins, without what was delivered after it."""
        claim, epoch, stretch = claim_of(one, self._run), one.shape.epoch, one.stretch
        self._forks = True
        if one.is_load:
            self.line = self._line_of(one, claim)
        fresh = frozenset(lane for lane in claim.lanes if (stretch, epoch, lane) not in self._begun)
        self._begun |= {(stretch, epoch, lane) for lane in claim.lanes}
        here, epochs = self.line.units(epoch).back_to(claim.of(fresh)), dict(self.line.epochs)
        epochs[epoch] = replace(here, records=(one,) if fresh else (*here.records, one))
        for other, later in self.line.epochs.items():
            if other > epoch and (stretch, other, -1) not in self._begun:  # the run was there, and comes there again
                self._begun.add((stretch, other, -1))
                lanes = claim.lanes | frozenset((later.kept.starts // _LANE).tolist())
                epochs[other] = replace(later.back_to(Claim(lanes)), records=())
        kept = list(self.line.kept)
        if fresh:
            while kept and _is_taken_back(kept[-1].one, one):
                kept.pop()
            last = kept[-1].one if kept else None
            if last is not None and last.shape.epoch == epoch and not last.leases:
                kept[-1] = kept[-1]._replace(steps=min(kept[-1].steps, _steps_before(last, one, claim)))
                # Units that were delivered only in what is taken back are lost.
                here, cut = epochs[epoch], _cut_by(last, claim, self._run)
                epochs[epoch] = replace(here, kept=here.kept.minus(cut), lost=here.lost.union(cut))
        self.line = self.line._replace(epochs=epochs, kept=tuple(kept))

    def _line_of(self, load: Generation, claim: Claim) -> Line:
        """Return the history in which a loaded state was saved: of another branch, if the run had left that.

        A state names its branch. If it claims other units than that has, it stays the branch, and they are lost.
        """
        now, origins = self.line, load.origins
        in_line = {each.one.key: each.steps for each in now.kept} if not now.missing(load, claim) else {}
        passes = [
            (branch, number)
            for branch in self._branches
            for number, one in enumerate(branch.passes)
            if not origins or one.branches & origins
        ]
        passes.reverse()  # the latest first, and those of the line before others
        passes.sort(key=lambda each: each[0].passes[each[1]].key not in in_line)
        other: Line | None = None
        for branch, number in passes:
            one = branch.passes[number]
            saved = self._saved_in(one, load, claim)
            if saved is None:
                continue
            line = branch.line
            for before in branch.passes[:number]:
                line = line.after(before, self._run)
            line = line.after(one, self._run, saved)
            is_over = load.cursor.lanes_ended or load.shape.epoch > saved.shape.epoch
            knows_end = not is_over or self._run.reached_end(saved)
            if knows_end and line.is_at(load, claim):
                has_left_it = saved.most_steps > in_line.get(one.key, -1)
                return (line if has_left_it else now).counting(now)
            other = other or line
        return now if other is None or not origins else other.counting(now)

    def _saved_in(self, one: Generation, load: Generation, claim: Claim) -> Generation | None:
        """Return a pass as it was when a loaded state may have been saved, or None.

        Ranks with leases, or with lanes of their own, may be at different steps: on each, the units tell.
        """
        ranks = one.of_rank.items()
        if not (one.leases or one.in_lanes):
            steps = load.before - one.before
            found = any(min(steps, record.steps) == saved for _, record in ranks for saved, _ in record.saves)
            return replace(one, of_rank={rank: record.until(steps) for rank, record in ranks}) if found else None

        def matches(rank: int, steps: int, stop: int | None = None) -> bool:
            record = one.of_rank[rank]
            parts = (replace(one, of_rank={rank: each}) for each in (record, record.until(steps, stop)))
            whole, part = (delivered_by(each, self._run) for each in parts)
            is_over = load.shape.epoch > one.shape.epoch  # then the state has all of it
            return part == (whole if is_over else whole.intersection(claim.done))

        saves = {rank: next((s for s in reversed(one.saves) if matches(rank, *s)), None) for rank, one in ranks}
        if not (matched := [save for save in saves.values() if save is not None]):
            return None
        # A rank may have saved none of its own: of a lane that it shares, or before its first lease.
        other = (0, 0) if one.leases else (max(matched)[0], None)
        if any(save is None and not matches(rank, *other) for rank, save in saves.items()):
            return None
        return replace(one, of_rank={rank: record.until(*(saves[rank] or other)) for rank, record in ranks})

    def _add(self, one: Generation, how: str) -> None:
        """Add a pass to the history."""
        if how == "fresh":  # a state that was loaded has a record of its own
            self._go_back(one)
            kept = self.line.kept
            self.line = self.line._replace(offset=kept[-1].first + kept[-1].steps - one.before if kept else 0)
        if self._forks:
            self._branches.append(Branch(self.line, []))
            self._forks = False
        self._branches[-1].passes.append(one)
        self._begun |= {(one.stretch, one.shape.epoch, lane) for lane in claim_of(one, self._run).lanes}
        self.line = self.line.after(one, self._run)


def _is_taken_back(one: Generation, by: Generation) -> bool:
    """Return True if a pass begins where a record continues, or later. One that only found the end is kept."""
    if one.shape.epoch == by.shape.epoch and one.before == by.before and not one.most_steps:
        return not by.cursor.lanes_ended
    return (one.shape.epoch, one.before) >= (by.shape.epoch, by.before)


def _steps_before(one: Generation, by: Generation, claim: Claim) -> int:
    """Return the steps of a pass that a later record of its epoch has not taken back.

    Ranks with lanes of their own may have had different numbers of steps when the pass began. So the steps of each
    follow from the outputs that are done.
    """
    if not one.in_lanes or len({record.header.cursor.steps for record in one.of_rank.values()}) == 1:
        return by.before - one.before
    done = {lane: claim.done.count(lane * _LANE, (lane + 1) * _LANE) for lane in claim.lanes}
    found = [one.most_steps]
    for track in one.tracks.values():
        own = [lane for lane in track.begin if lane in done and lane not in track.ended]
        steps = range(1, track.recorded + 1)
        kept = bisect_left(steps, True, key=partial(_is_beyond, track, own, done))
        found += [kept] if kept < len(steps) else []
    return min(found)


def _cut_by(one: Generation, claim: Claim, run: Run) -> Intervals:
    """Return the units of a step of a pass that a later state claims in part: steps without a record led to it."""
    if one.in_lanes or one.shape.batching.budget or one.first.header.excluded or one.missing or claim.excluded:
        return EMPTY
    claimed = delivered_by(one, run).intersection(claim.done)
    steps = range(one.most_steps)
    step = bisect_left(steps, len(claimed), key=lambda before: len(delivered_by(one, run, before + 1)))
    is_cut = step < len(steps) and len(delivered_by(one, run, step + 1)) > len(claimed)
    return claimed.minus(delivered_by(one, run, step)) if is_cut else EMPTY


def _is_beyond(track: LaneTrack, lanes: list[int], done: Mapping[int, int], step: int) -> bool:
    """Return True if a lane had more outputs after a step than are done."""
    return any(track.taken(lane, step) > done[lane] for lane in lanes)


def _may_be_look(one: Generation, run: Run) -> bool:
    """Return True if no rank received more than a first batch, as far as it could be recorded.

    The only batch of an epoch is no look. The last batch after a loaded state may be: ``set_epoch`` returns to it.
    """
    if one.most_steps > 1 or one.leases or one.lost:
        return False
    return not run.reached_end(one) or (one.most_steps == 1 and one.cursor.begun)


def claim_of(one: Generation, run: Run) -> Claim:
    """Return what a record says of the units before it."""
    if one.in_lanes:
        known, numbers = one.cursor.lanes, {number for track in one.tracks.values() for number in track.begin}
        lanes = {number: known.get(number, LaneCursor()) for number in numbers}
        # Of one whose rank was in the next epoch already, a state of all ranks says only that it has ended.
        lanes = {number: lane for number, lane in lanes.items() if lane.taken or not lane.ended}
        done = EMPTY.union(*(in_lane(number, _done(lane)) for number, lane in lanes.items()))
        excluded = EMPTY.union(*(in_lane(number, lane.excluded) for number, lane in lanes.items()))
        return Claim(frozenset(lanes), done, excluded)
    lane = in_rows(one, one.cursor.lane, run)
    excluded = lane.excluded.union(run.excluded_positions(one).from_(lane.taken))
    return Claim(frozenset([0]), _done(lane).minus(lane.excluded), excluded)


def in_rows(one: Generation, lane: LaneCursor, run: Run) -> LaneCursor:
    """Return a cursor of a pass over positions in rows."""
    at = lane.at
    if isinstance(at, WindowAt) and at.first == lane.taken and not (lane.excluded or lane.ahead):
        return at.rows  # also if nothing is left to plan
    plan = run.plan_of(one) if one.shape.batching.budget else None
    if not isinstance(plan, TokenPlan):
        return lane
    return plan.batches.in_rows(lane) if lane.at is not None else LaneCursor()


def _done(lane: LaneCursor) -> Intervals:
    return Intervals.of(0, lane.taken).union(lane.ahead)


def delivered_by(one: Generation, run: Run, steps: int | None = None) -> Intervals:
    """Return the units that a pass delivered, or that were acknowledged of it. ``steps``: only of its first steps."""
    if one.leases:
        return _acknowledged(one, run)
    if one.in_lanes:
        return EMPTY.union(*(outputs_in(one, lane, one.common_steps(lane, steps)) for lane in range(one.lanes)))
    plan = run.plan_of(one)
    counts = {rank: count if steps is None else min(count, steps) for rank, count in one.steps.items()}
    common = 0 if one.missing else min(counts.values())
    found = [rows_of(plan, plan.units(0, common))] if common else []
    for rank, count in counts.items():
        if count > common:
            own = own_positions(plan, range(common, count), Shard(rank, one.shape.ranks))
            found.append(Intervals.from_positions(own))
    return EMPTY.union(*found)


def rows_of(plan: StepPlan, units: Intervals) -> Intervals:
    """Return the positions of units of a plan."""
    return plan.batches.rows_in(units) if isinstance(plan, TokenPlan) else units


def own_positions(plan: StepPlan, steps: range, shard: Shard) -> Int64Array:
    """Return the positions of a rank in some steps, without padding."""
    there = [step for step in steps if plan.has(step)]
    if not there:
        return np.zeros(0, np.int64)
    asked = plan.ask(there, shard)
    return asked.positions[: asked.genuine] if asked.genuine is not None else asked.positions


def outputs_in(one: Generation, lane: int, steps: int) -> Intervals:
    """Return the outputs of a lane in the first steps of a pass, without those that were done before."""
    track, at = one.owner(lane), one.cursor.lanes.get(lane, LaneCursor())
    if track is None:
        return EMPTY
    taken = track.taken(lane, min(steps, track.recorded))
    return in_lane(lane, Intervals.of(track.taken(lane, 0), taken).minus(at.done))


def _dropped(one: Generation) -> Intervals:
    """Return the outputs of lanes that were left over at the end of the epoch, if a pass came to it."""
    if one.shape.batching.ends != "drop":
        return EMPTY
    return EMPTY.union(
        *(
            in_lane(lane, Intervals.of(track.taken(lane, track.delivered), track.taken(lane, track.delivered + 1)))
            for track in one.tracks.values()
            if track.end is not None
            for lane in set(track.begin) - track.ended
        )
    )


def _acknowledged(one: Generation, run: Run, *, rejected: bool = False) -> Intervals:
    """Return the units that were acknowledged in a pass of leases."""
    found = []
    for rank, record in one.leases.items():
        units = record.rejected if rejected else record.acked
        if one.in_lanes:
            found += [in_lane(lane, some) for lane, some in units.items()]
        elif turns := units.get(0):  # numbers of units of a rank among those that the pass delivers
            plan, shard = run.plan_of(one), Shard(rank, one.shape.ranks)
            ranges = zip(turns.starts.tolist(), turns.stops.tolist(), strict=True)
            positions = [plan.done.remaining(shard.positions(first, stop)) for first, stop in ranges]
            found.append(rows_of(plan, Intervals.from_positions(np.concatenate(positions))))
    return EMPTY.union(*found)


def units_in(one: Generation, rank: int, steps: Intervals, run: Run) -> int:
    """Return the number of units of a rank in steps of a pass of leases. In lanes, of full steps."""
    if one.in_lanes:
        sizes = one.shape.batching.sizes
        return len(steps) * (sizes if isinstance(sizes, int) else sizes.sizes[0])
    plan, shard = run.plan_of(one), Shard(rank, one.shape.ranks)
    ranges = zip(steps.starts.tolist(), steps.stops.tolist(), strict=True)
    return sum(len(own_positions(plan, range(first, stop), shard)) for first, stop in ranges)
