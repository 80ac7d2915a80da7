"""The history of a run: the rows that its weights have seen, over all restarts and world sizes, and its proof."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from midepoch._internal.hints import hinted
from midepoch.audit import naming
from midepoch.audit.consumed import LaneRun, RowCounts, joins
from midepoch.audit.orders import KnownOrder, KnownSource, SourceKey, WeightChange, weight_changes
from midepoch.audit.passes import Generation, PassKey, ledger_folder, read_generations
from midepoch.audit.proof import EpochUnits, History, LeaseCounts, outputs_in, units_in
from midepoch.audit.records import Count
from midepoch.errors import DataNotFoundError, StateError
from midepoch.order import Shard
from midepoch.order.budget import Budget
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.planned import PlannedEpoch, Planning, window_at
from midepoch.pipeline.plans import UNKNOWN, Plan, TokenPlan


@dataclass(frozen=True)
class EpochProof:
    """Counts of deliveries of the rows of an epoch, in the history that the weights have.

    - ``never``: rows that were left out
    - ``dropped``: rows after the last full batch under ``last_batch="drop"``
    - ``pending``: rows that are not delivered yet
    - ``skipped``: rows skipped under ``on_error="skip"``, which count as delivered
    - ``again``: rows delivered by a start that crashed, and again after the resume

    If positions cannot be computed, ``repeated`` and ``never`` count outputs of the pipeline.
    """

    epoch: int
    rows: int
    once: int
    repeated: int
    never: int
    dropped: int
    pending: int
    skipped: int
    again: int
    steps: int
    examples: tuple[int, ...] = ()
    """The first positions that were delivered more than once or never, if positions can be computed."""
    filtered: int = 0
    """Rows that were consumed without an output, as by a filter. They count as delivered once."""
    excluded: int = 0
    """Rows that ``Loader.exclude`` left out."""
    excluded_outputs: int = 0
    """Outputs of excluded steps, such as packed sequences, if positions cannot be computed. Their rows count as
    delivered once.
    """
    leases: LeaseCounts | None = None
    """Counts of leases, if there were some. Then rows count as delivered when they are acknowledged and, if positions
    cannot be computed, outputs are counted instead of rows.
    """

    @property
    def exact(self) -> bool:
        """True if no row was lost or repeated, so far."""
        return not self.repeated and not self.never

    @property
    def complete(self) -> bool:
        """True if the epoch is over and every row of it (except for dropped ones) was delivered exactly once."""
        return self.exact and not self.pending


class Run:
    """The ledger of a run, read. ``stream`` is one of the loaders that recorded there (``streams``).

    A loader whose mix is changed at a resume remains the same one: ``runs`` has its name by every name of its rows.

    Steps are counted from 1 over all starts, as ``loader.steps`` counts them: a step that was lost in a crash and
    repeated counts once. Rows are numbers in the dataset before shuffling.
    """

    def __init__(
        self,
        folder: Path,
        generations: list[Generation],
        stream: str,
        runs: Mapping[str, str],
        cut: Sequence[str] = (),
    ) -> None:
        self.folder, self.stream, self._cut = folder, stream, cut
        self._all = [one for one in generations if runs[one.shape.stream] == stream]
        """Its passes, and the states that were only loaded."""
        self.every = [one for one in self._all if not one.is_load]
        """All passes, also those that a later one took over."""
        self.streams = {runs[one.shape.stream]: one.first.header.name for one in generations}
        """All loaders that recorded in the folder, with the names that were given to them."""
        self._plans: dict[PassKey, Plan | TokenPlan] = {}
        line = History(self._all, self).line
        self._units = line.epochs
        self.generations, self.first_steps = [kept.one for kept in line.kept], [kept.first for kept in line.kept]
        """The passes that the weights have seen, and the number of steps before each."""
        for one, steps, _ in line.kept:
            one.kept_steps = steps

    # Its parts

    @cached_property
    def _orders(self) -> dict[str, KnownOrder]:
        return {one.shape.order: KnownOrder(self.folder, one.shape.order) for one in self._all}

    def order_of(self, one: Generation) -> KnownOrder:
        """Return the order of the rows of a pass."""
        return self._orders[one.shape.order]

    @property
    def order(self) -> KnownOrder:
        """The order of the rows in the last pass. (Passes before a fresh start may have another.)"""
        return self.order_of(self.generations[-1] if self.generations else self.every[-1])

    @cached_property
    def sources(self) -> list[KnownSource]:
        """The sources of the run, as they are numbered in it: those of the last mix, and then those that have left."""
        return list(self._by_key.values())

    @cached_property
    def _by_key(self) -> dict[SourceKey, KnownSource]:
        found: dict[SourceKey, KnownSource] = {}
        for order in (self.order, *map(self.order_of, reversed(self.every))):
            for key, source in zip(order.keys, order.sources, strict=True):
                found.setdefault(key, source)
        return found

    @cached_property
    def _numbers(self) -> dict[SourceKey, int]:
        return {key: number for number, key in enumerate(self._by_key)}

    def numbers_in(self, one: Generation) -> list[int]:
        """Return the numbers in the run of the sources of a pass."""
        return [self._numbers[key] for key in self.order_of(one).keys]

    def lanes_of(self, one: Generation) -> LaneRun:
        """Return the lanes of a pass, read with its order."""
        return LaneRun(self.order_of(one))

    def excluded_positions(self, one: Generation) -> Intervals:
        """Return the positions of the rows that are excluded in every epoch."""
        if not one.first.header.excluded:
            return EMPTY
        source = self.order_of(one).source
        rows = one.first.header.excluded_rows(1)[0].positions()
        return Intervals.from_positions(source.at(one.shape.epoch).positions_of_rows(rows))

    def plan_of(self, one: Generation) -> Plan | TokenPlan:
        """Return the steps of a pass over positions, as they were planned.

        If the rows of batches by tokens are not known, it counts batches.
        """
        if one.key not in self._plans:
            try:
                self._plans[one.key] = self._made_plan(one)
            except StateError:
                ranks, ends, done = one.shape.ranks, one.shape.batching.ends, one.cursor.lane.done
                end = UNKNOWN >> 1 if one.end == UNKNOWN else one.end
                self._plans[one.key] = Plan.of(one.cursor, end, 1, ranks, ends, done)
        return self._plans[one.key]

    def rows_plan(self, one: Generation) -> Plan | TokenPlan:
        """Return the steps of a pass over positions. Raises StateError if the rows of their batches are not known."""
        plan = self.plan_of(one)
        return plan if not self._counts_batches(one) else self._made_plan(one)

    def _counts_batches(self, one: Generation) -> bool:
        """Return True if the rows of batches by tokens are not known."""
        return not one.in_lanes and bool(one.shape.batching.budget) and not isinstance(self.plan_of(one), TokenPlan)

    def _made_plan(self, one: Generation) -> Plan | TokenPlan:
        batching, cursor, ranks = one.shape.batching, one.cursor, one.shape.ranks
        source, excluded = self.order_of(one).source, self.excluded_positions(one)
        if not batching.budget:
            done = cursor.lane.done.union(excluded).from_(cursor.lane.taken)
            return Plan.of(cursor, one.first.header.rows, batching.sizes, ranks, batching.ends, done)
        length = json.loads(batching.budget)[-1]
        budget = Budget(1, length=length).earlier(batching.budget)
        if budget is None:
            raise StateError(
                "the rows of batches that were balanced by a function cannot be named: the function is not recorded."
            )
        planning = Planning(budget, self.order_of(one).lengths(length), 1.0, by_source=False)
        at = window_at(cursor.lane)
        batches = PlannedEpoch(source.order, source.layout, planning, one.shape.epoch, at, excluded)
        ends = None if batching.ends == "dealt" else batching.ends
        return TokenPlan(batches, cursor, one.first.header.rows, ranks, ends)

    # Its history

    @property
    def unit(self) -> str:
        """The unit of its counts: rows, or batches by tokens if the rows of those are not known."""
        return "batches" if self._counts_batches(self.every[-1]) else "rows"

    @property
    def steps(self) -> int:
        """The number of steps that the weights have seen."""
        ends = (first + one.reach for first, one in zip(self.first_steps, self.generations, strict=True))
        return max(ends, default=0)

    @property
    def attempts(self) -> int:
        """The number of starts of the run."""
        return len({one.shape.attempt for one in self._all})

    @property
    def worlds(self) -> list[int]:
        """The world sizes, in the order of the passes."""
        sizes = [one.shape.ranks for one in self._all]
        return [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]

    @property
    def weight_changes(self) -> list[WeightChange]:
        """The weights that were set during the run, or with which it was resumed, in the order of their steps."""
        passes = zip(self.first_steps, self.generations, strict=True)
        return weight_changes((steps, one, self.order_of(one)) for steps, one in passes)

    @property
    def incomplete(self) -> set[int]:
        """The epochs in which the ledger could not be written: rows counted as never may have been delivered."""
        epochs = [one.shape.epoch for one in self.generations]
        before = zip(self.generations, [0, *epochs], epochs, strict=False)
        return {epoch for one, first, last in before if one.lost for epoch in range(first, last + 1)}

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the ledger does not prove anything, in words. Empty if there are none."""

        def place(one: Generation) -> str:
            return f"epoch {one.shape.epoch} after step {one.before:,}"

        kept, known = self.generations, {branch for one in self.every for branch in one.branches}
        problems = [
            f"{place(one)}: no record of rank {', '.join(map(str, missing[:8]))}{', …' * (len(missing) > 8)} of "
            f"{one.shape.ranks}"
            for number, one in enumerate(kept)
            if (missing := self._missing(one, number))
            and not one.leases
            and one.most_steps
            and (one is not kept[-1] or self._is_through(one))
        ]
        problems += [
            f"{place(one)}: the record is incomplete, because the ledger of rank {', '.join(map(str, one.lost[:8]))} "
            "could not be written there, or when a pass before that step began. Rows counted as never may have been "
            "delivered"
            for one in kept
            if one.lost
        ]
        problems += [
            f"the end of {name} is missing: the file was cut after it was written. Restore it from a copy. Rows "
            "counted as never may have been delivered"
            for name in self._cut
        ]
        problems += [
            f"{place(one)}: the state that was loaded was saved in a part of the run that is not recorded here. Rows "
            "counted as never may have been delivered"
            for one in self._all
            if one.is_load and one.origins and not one.origins & known and any(proof.never for proof in self.epochs)
        ]
        budgets = {(one.shape.epoch, one.shape.batching.budget) for one in kept if self._counts_batches(one)}
        orders = sorted({(one.shape.epoch, one.shape.stream, one.shape.order) for one in kept})
        rules = {
            "two loaders of the same rows recorded at the same time, so their records cannot be separated: name them, "
            'loader(audit=midepoch.audit.Ledger(folder, name="train"))': any(
                process.counters[Count.BESIDE] for one in self.every for process in one.processes
            ),
            "two starts of the run recorded at the same time: each row may have been seen by both": any(
                one.overtaken for one in self._all
            ),
            "batches by tokens were formed in two ways in one epoch, and the lengths of their rows are not stored "
            "beside the ledger: they cannot be compared": len(budgets) > len({epoch for epoch, _ in budgets}),
            **{
                f"epoch {epoch} was resumed in another order than it was begun in": True
                for (epoch, rows, _), (again, others, _) in pairwise(orders)
                if (epoch, rows) == (again, others)
            },
            "several starts had the same name (MIDEPOCH_RUN_ID), and not all of their ranks can be separated: set a "
            "new name for every start": any(one.first.reused and one.missing for one in self.every),
        }
        return problems + [text for text, is_so in rules.items() if is_so]

    def _missing(self, one: Generation, number: int) -> list[int]:
        """Return the ranks without a record of a pass, except for those that were at the end of the epoch before."""
        same = (one.shape.epoch, one.shape.attempt)
        before = [other for other in self.generations[:number] if (other.shape.epoch, other.shape.attempt) == same]
        return [rank for rank in one.missing if not any(rank in self._finished(other) for other in before)]

    # Its proof

    @cached_property
    def epochs(self) -> list[EpochProof]:
        """The proof, epoch by epoch, including skipped epochs."""
        known = [one.shape.epoch for one in self.every] + [epoch for epoch, of in self._units.items() if of.never]
        return [self._proof(epoch, self._units.get(epoch, EpochUnits())) for epoch in range(min(known), max(known) + 1)]

    @property
    def exact(self) -> bool:
        """True if no row of any epoch was lost or repeated, so far, and the ledger is complete."""
        return not self.problems and all(epoch.exact for epoch in self.epochs)

    def _proof(self, epoch: int, units: EpochUnits) -> EpochProof:
        """Count the rows of an epoch. Those of leases count when they are acknowledged and, in lanes, as outputs."""
        passes = [one for one in self.every if one.shape.epoch == epoch]
        kept = [one for one in self.generations if one.shape.epoch == epoch]
        over, leases, last = self._is_over(epoch, units), None, (passes or self.every)[-1]
        counted: dict[str, Any] = {
            "epoch": epoch,
            "repeated": len(units.twice),
            "skipped": sum(one.skipped(one.kept_steps) for one in kept),
            "steps": sum(one.kept_steps for one in kept),
        }
        if any(one.leases for one in passes):
            out = self._still_out(units)
            if not any(other > epoch and of.records for other, of in self._units.items()):
                # What is out comes again first. A pass without leases has delivered it.
                waits = any(out) and any(one.leases for one in [one for one in units.records if not one.is_load][-1:])
                over = (over or self._all_finished(units)) and not waits
            leases = LeaseCounts(units.leased, len(units.kept), len(units.rejected), *out)
            counted["steps"] = sum(
                len(one.leases[rank].delivered) if rank in one.leases else steps
                for one in passes
                for rank, steps in one.steps.items()
            )
        elif self.every[-1].in_lanes:
            return self._lane_proof(units, passes, kept, over, counted)
        seen, excluded, never = len(units.kept), len(units.left_out), len(units.never)
        rows, dropped = last.first.header.rows, 0
        if last.in_lanes:  # outputs are not known before
            dropped = len(units.dropped.minus(units.kept).minus(units.excluded))
            rows = seen + excluded + dropped + never + (not over)
        elif passes and self._counts_batches(last):
            rows = seen + excluded + (not over) if last.end == UNKNOWN else last.end
        left = max(0, rows - seen - excluded - never)
        if not last.in_lanes:
            dropped = min(left, self._dropped(epoch, units, left, over))
        left -= dropped
        examples = units.examples
        if over and left and not examples:
            examples = tuple(Intervals.of(0, rows).minus(units.kept.union(units.excluded)).first(10))
        return EpochProof(
            rows=rows,
            once=seen - len(units.twice),
            never=never + (left if over else 0),
            dropped=dropped,
            pending=0 if over else left,
            again=units.again,
            examples=() if last.in_lanes else examples,
            excluded=excluded,
            leases=leases,
            **counted,
        )

    def _dropped(self, epoch: int, units: EpochUnits, left: int, over: bool) -> int:
        """Return the rows that are too few for a batch at the end of an epoch.

        A resume with larger batches than the rest of the epoch drops the rest, in a pass of the next epoch.
        """
        # A start with larger batches had none left, and may have gone to the next epoch by an edit, without a batch.
        starts = (one for one in self._all if over and one.is_load and one.shape.epoch == epoch and not one.in_lanes)
        if any(one.shape.batching.ends == "drop" and not self.plan_of(one).has(0) for one in starts):
            return left
        here = units.records[-1:]
        after = [one for other, of in sorted(self._units.items()) if other > epoch for one in of.records][:1]
        for one in (*here, *after):
            if one.shape.batching.ends != "drop" or (one.shape.batching.budget and not over):
                continue
            if one.shape.epoch == epoch and not one.shape.batching.budget:
                tail = Intervals.of(self.plan_of(one).rows, one.first.header.rows)
                seen = units.kept.union(units.excluded)
                if tail and not self.plan_of(one).left_out(1):
                    return len(tail.minus(seen))
            elif 0 < left < _enough(one):
                return left
        return 0

    def _lane_proof(
        self, units: EpochUnits, passes: list[Generation], kept: list[Generation], over: bool, counted: dict[str, Any]
    ) -> EpochProof:
        """Count rows by the cursors of the lanes, and outputs by what was recorded of them."""
        total, wrong, left, lanes_drop = RowCounts(), 0, self.every[-1].first.header.rows, False
        if kept:
            lanes, numbers = self.lanes_of(kept[-1]), range(kept[-1].lanes)
            *earlier, last = [list(passes) for _, passes in groupby(kept, lambda one: one.shape.order)]
            total = RowCounts(*map(sum, zip(*(lanes.counts(last, lane) for lane in numbers), strict=True)))
            total = self._with_earlier(total, earlier, last)
            wrong, left = sum(self._joints(kept, lane) for lane in numbers), total.left
            lanes_drop = lanes.may_drop(kept[-1])
        lost = units.never
        if over:  # of the ranks that share a lane, some may have left the epoch before others
            outputs = (outputs_in(one, lane, one.kept_steps) for one in kept for lane in range(one.lanes))
            lost = lost.union(EMPTY.union(*outputs).minus(units.kept).minus(units.excluded))
        ended = any(one.lanes_ended for one in units.records[-1:])
        cut = 0 if not over or left or ended or lanes_drop else total.begun  # it was left inside of its last rows
        made = sum(self._rows_of(one, one.most_steps) for one in passes)
        consumed = sum(self._rows_of(one, one.kept_steps) for one in kept)
        excluded = sum(self.lanes_of(one).excluded_rows(one) for one in kept if one.first.header.excluded)
        return EpochProof(
            rows=total.consumed + total.dropped + left,
            once=max(0, total.consumed - excluded - len(lost) - cut),
            never=len(lost) + wrong + cut + (left if over else 0),
            dropped=total.dropped,
            pending=(0 if over else left or total.begun) or (0 if ended else total.unended),
            again=max(0, made - consumed),
            filtered=max(0, total.filtered - counted["skipped"] - excluded),
            excluded=excluded,
            excluded_outputs=len(units.left_out),
            **counted,
        )

    def _with_earlier(
        self, total: RowCounts, earlier: Sequence[Sequence[Generation]], last: Sequence[Generation]
    ) -> RowCounts:
        """Return the counts with those of passes over earlier mixes, whose cursors have other sources."""
        consumed = filtered = 0
        for passes, following in pairwise([*earlier, last]):
            here, there = self.lanes_of(passes[-1]), self.lanes_of(following[0])
            for lane in range(passes[-1].lanes):
                filtered += sum(here.filtered(one, lane) for one in passes)
                consumed += here.consumed_besides(passes[-1], lane, there)
        return total._replace(consumed=total.consumed + consumed, filtered=total.filtered + filtered)

    def _joints(self, passes: Sequence[Generation], lane: int) -> int:
        """Return how often a pass began in a lane at other rows than those at which the pass before it was left."""
        known = [found for one in passes if (found := self.lanes_of(one).begin_and_ends(one, lane)) is not None]
        return sum(not any(joins(begin, end) for end in ends) for (_, ends), (begin, _) in pairwise(known))

    def _rows_of(self, one: Generation, steps: int) -> int:
        lanes = self.lanes_of(one)
        return lanes.consumed(one, steps) - lanes.consumed(one, 0)

    def _still_out(self, units: EpochUnits) -> tuple[int, int]:
        """Return the units that are leased and not acknowledged, and those that were returned."""
        back = max((i for i, one in enumerate(units.records) if one.is_load or one.how == "fresh"), default=0)
        last: dict[int, Generation] = {}
        delivered: dict[int, Intervals] = {}
        finished: dict[int, Intervals] = {}
        for one in units.records[back:]:
            for rank, record in one.leases.items():
                last[rank] = one
                delivered[rank] = delivered.get(rank, EMPTY).union(record.delivered)
                finished[rank] = finished.get(rank, EMPTY).union(record.finished)
        out = returned = 0
        for rank, one in last.items():
            count = units_in(one, rank, delivered[rank].minus(finished[rank]), self)
            out, returned = (out, returned + count) if one.leases[rank].returned else (out + count, returned)
        return out, returned

    def _all_finished(self, units: EpochUnits) -> bool:
        """Return True if every rank came to the end of the epoch since the run was last taken back."""
        passes = [one for one in units.records if not one.is_load]
        if not passes:
            return False
        last = passes[-1]
        ranks = {rank for one in passes if one.shape.attempt == last.shape.attempt for rank in self._finished(one)}
        if not ranks >= set(last.of_rank):
            return False
        if last.leases:  # a rank that has no record of it may have a step of it
            others = (Shard(rank, last.shape.ranks) for rank in last.missing)
            return last.in_lanes or not any(self.plan_of(last).has_for(0, shard) for shard in others)
        return not last.missing or self._is_through(last)

    def _finished(self, one: Generation) -> set[int]:
        """Return the ranks that came to the end of the epoch in a pass."""
        found = {rank for rank, record in one.of_rank.items() if record.finished}
        if one.in_lanes:
            return found
        plan = self.plan_of(one)
        for rank, record in one.of_rank.items():
            steps = record.steps if record.leases is None else int([0, *record.leases.delivered.stops.tolist()][-1])
            if not plan.has_for(steps, Shard(rank, one.shape.ranks)):
                found.add(rank)
        return found

    def _is_over(self, epoch: int, units: EpochUnits) -> bool:
        """Return True if nothing more of an epoch will be delivered, by what is recorded.

        Ranks may be one step apart, also across the end of an epoch: in the last start that is not the end yet.
        """
        later = [one for other, of in self._units.items() if other > epoch for one in of.records]
        if not units.records:
            return bool(later)
        last = units.records[-1]
        if last.lanes_ended:
            return True
        if last.is_load and not later:
            return not last.in_lanes and last.cursor.begun and not self.plan_of(last).has(0)
        if not later:
            return self._all_finished(units)
        passes = [one for one in units.records if not one.is_load and one.shape.attempt == last.shape.attempt]
        behind = set(last.of_rank) - {rank for one in passes for rank in self._finished(one)}
        if any(one.shape.attempt != last.shape.attempt or one.how != "on" for one in later):
            return True
        return not behind or any(behind & set(one.of_rank) for one in later)

    def _is_through(self, one: Generation) -> bool:
        """Return True if some rank has completed a pass of several steps, so that the others have begun it."""
        return one.most_steps > 1 and bool(self._finished(one))

    # Its rows

    documents_of_step = naming.documents_of_step
    documents_of_row = naming.documents_of_row
    rows_of_step = naming.rows_of_step
    steps_of_row = naming.steps_of_row
    overlap = naming.overlap

    def reached(self, one: Generation, steps: int) -> int:
        """Return the rows (in lanes: outputs) of the epoch before and in the first steps of a pass, on all ranks."""
        if not one.in_lanes:
            plan = self.plan_of(one)
            return plan.rows_before(plan.cursor(min(steps, len(plan)) - 1).lane.taken)
        tracks = [(lane, track) for lane in range(one.lanes) if (track := one.owner(lane)) is not None]
        known = min((track.recorded for _, track in tracks), default=0)  # those of the last may not be written yet
        taken = sum(track.taken(lane, min(steps, known)) for lane, track in tracks)
        return taken + max(0, steps - known) * one.shape.global_batch

    def reached_end(self, one: Generation) -> bool:
        """Return True if all ranks that have a record of a pass came to the end of the epoch in it."""
        return self._finished(one) >= set(one.of_rank)

    def is_finished(self, one: Generation) -> bool:
        """Return True if all ranks came to the end of the epoch in a pass."""
        return len(self._finished(one)) == one.shape.ranks


def _enough(one: Generation) -> int:
    """Return the number of rows that are enough for a batch. Those of batches by tokens may be all rows of a window."""
    budget = one.shape.batching.budget
    return int(json.loads(budget)[4]) * 2 if budget else one.shape.global_batch


@hinted()
def read_run(folder: str | Path, stream: str | None = None) -> Run:
    """Return the run whose ledger is in a folder, as recorded so far.

    ``stream``: a loader by its name, or by its key in ``streams``. Default: the one with the most steps.
    """
    recorded = read_runs(folder)
    runs = [run for run in recorded if stream is None or stream in (run.stream, run.streams[run.stream])]
    if not runs:
        there = ", ".join(name or key for key, name in recorded[0].streams.items())
        raise DataNotFoundError(f"no loader {stream!r} recorded in {folder}. The recorded ones are: {there}.")
    return max(runs, key=lambda run: run.steps)


@hinted()
def read_runs(folder: str | Path) -> list[Run]:
    """Return all loaders that recorded in a folder."""
    where = ledger_folder(folder)
    generations, cut = read_generations(where)
    runs = _runs_of(generations)
    names = dict.fromkeys(runs[one.shape.stream] for one in generations if not one.is_load)
    if not names:
        raise DataNotFoundError(f"the ledger in {where} has no step yet. Pass a run that has trained a batch.")
    return [Run(where, generations, name, runs, cut) for name in names]


def _runs_of(generations: Sequence[Generation]) -> dict[str, str]:
    """Return for each name of rows that of its run: the last one, if a state was loaded into a mix of other sources.

    A state names the branch in which it was saved. Loaders of one start may have branches of one name.
    """
    own: dict[str, set[str]] = {}
    for one in generations:
        own.setdefault(one.shape.stream, set()).update(() if one.is_load else one.branches)
    runs = {stream: stream for stream in own}
    for one in generations:
        stream, name = one.shape.stream, one.first.header.name
        if not (one.is_load and one.in_lanes and one.origins) or one.origins & own[stream]:
            continue
        before = {
            runs[other.shape.stream]
            for other in generations
            if other.in_lanes and other.first.header.name == name and own[other.shape.stream] & one.origins
        }
        if len(before) == 1:
            runs = {each: runs[stream] if run in before else run for each, run in runs.items()}
    return runs
