"""The history of a run: the rows that its weights have seen, over all restarts and world sizes, and its proof."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import hinted
from midepoch.audit.consumed import Delivery, LaneCounts, LaneRun
from midepoch.audit.coverage import count, pieces_of, positions_in
from midepoch.audit.history import History
from midepoch.audit.orders import KnownOrder
from midepoch.audit.passes import Generation, ledger_folder, read_generations
from midepoch.errors import DataNotFoundError, StateError

Int64Array = npt.NDArray[np.int64]
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class EpochProof:
    """Counts of deliveries of the rows of an epoch, in the history that the weights have.

    - ``never``: rows that were left out
    - ``dropped``: rows after the last full batch under ``last_batch="drop"``
    - ``pending``: rows that are not delivered yet
    - ``skipped``: rows skipped under ``on_error="skip"``, which count as delivered
    - ``again``: rows delivered by a start that crashed, and again after the resume
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

    @property
    def exact(self) -> bool:
        """True if no row was lost or repeated, so far."""
        return not self.repeated and not self.never

    @property
    def complete(self) -> bool:
        """True if the epoch is over and every row of it (except for dropped ones) was delivered exactly once."""
        return self.exact and not self.pending


class Overlap(NamedTuple):
    """Numbers of rows of the files that two runs have seen: the first, the second, both."""

    first: int
    second: int
    both: int


class Run:
    """The ledger of a run, read. ``stream`` is one of the loaders that recorded there (``streams``).

    Steps are counted from 1 over all starts, as the weights have seen them: a step that was lost in a crash and
    repeated counts once. Rows are numbers in the dataset before shuffling.
    """

    def __init__(self, folder: Path, generations: list[Generation], stream: str) -> None:
        self.folder, self.stream = folder, stream
        self._all = [one for one in generations if one.shape.stream == stream]  # with states that were only loaded
        self.every = [one for one in self._all if not one.is_load]
        """All passes, also those that a later one took over."""
        self.streams = {one.shape.stream: one.name for one in generations}
        """All loaders that recorded in the folder, with the names that were given to them."""
        self.generations = History(self._all).all
        """The passes that the weights have seen, each up to the point where a later one took over."""

    @cached_property
    def _orders(self) -> dict[str, KnownOrder]:
        return {one.shape.order: KnownOrder(self.folder, one.shape.order) for one in (*self.every, *self.generations)}

    @property
    def order(self) -> KnownOrder:
        """The order of the rows in the last pass. (Passes before a fresh start may have another.)"""
        return self._orders[self.generations[-1].shape.order]

    @cached_property
    def _first_steps(self) -> list[int]:
        """The number of steps before each pass, and the total."""
        return list(accumulate((one.kept_steps for one in self.generations), initial=0))

    @property
    def steps(self) -> int:
        return self._first_steps[-1]

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
    def incomplete(self) -> set[int]:
        """The epochs in which the ledger could not be written: rows counted as never may have been delivered."""
        return {one.shape.epoch for one in self.generations if one.lost}

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the ledger does not prove anything, in words. Empty if there are none."""
        problems = [
            f"epoch {one.shape.epoch} from position {one.shape.start:,}: no record of rank "
            f"{', '.join(map(str, one.missing[:8]))}{', …' * (len(one.missing) > 8)} of {one.shape.ranks}"
            for one in self.generations
            if one.missing and any(one.steps.values()) and (one is not self.generations[-1] or _are_through(one))
        ]
        if any(one.beside for one in self.every):
            problems.append(
                "two loaders of the same rows recorded at the same time, so their records cannot be separated: name "
                'them, loader(audit=midepoch.audit.Ledger(folder, name="train"))'
            )
        problems += [
            f"epoch {one.shape.epoch} from position {one.shape.start:,}: the record is incomplete, because the ledger "
            f"of rank {', '.join(map(str, one.lost[:8]))} could not be written. Rows counted as never may have been "
            "delivered"
            for one in self.generations
            if one.lost
        ]
        if any(one.reused and one.missing for one in self.every):
            problems.append(
                "several starts had the same name (MIDEPOCH_RUN_ID), and not all of their ranks can be separated: "
                "set a new name for every start"
            )
        if any(one.overtaken for one in self._all):
            problems.append("two starts of the run recorded at the same time: each row may have been seen by both")
        for epoch, passes in self._by_epoch.items():
            if len({one.shape.order for one in passes}) > 1:
                problems.append(f"epoch {epoch} was resumed in another order than it was begun in")
        return problems

    @cached_property
    def _by_epoch(self) -> dict[int, list[Generation]]:
        found: dict[int, list[Generation]] = {}
        for one in self.generations:
            found.setdefault(one.shape.epoch, []).append(one)
        return found

    @cached_property
    def epochs(self) -> list[EpochProof]:
        """The proof, epoch by epoch, including skipped epochs."""
        every: dict[int, list[Generation]] = {}
        for one in self.every:
            every.setdefault(one.shape.epoch, []).append(one)
        return [self._proof(epoch, every.get(epoch, [])) for epoch in range(min(every), max(every) + 1)]

    @property
    def exact(self) -> bool:
        """True if no row of any epoch was lost or repeated, so far, and the ledger is complete."""
        return not self.problems and all(epoch.exact for epoch in self.epochs)

    def _proof(self, epoch: int, every: list[Generation]) -> EpochProof:
        kept = self._by_epoch.get(epoch, [])
        if self.every[-1].lanes:
            return self._lane_proof(epoch, kept, every)
        rows = self.every[-1].rows
        pieces = [piece for one in kept for piece in pieces_of(one)]
        end, frontier = self._end(epoch, kept, rows)
        sure, rest, behind = count(pieces, 0, frontier), count(pieces, frontier, end), count(pieces, end, rows)
        made = sum(_rows(one, one.made) for one in every)
        return EpochProof(
            epoch,
            rows,
            once=sure.once + rest.once + behind.once,
            repeated=sure.repeated + rest.repeated + behind.repeated,
            never=sure.never,
            dropped=behind.never,
            pending=rest.never,
            skipped=sum(one.kept_skipped for one in kept),
            again=made - sum(_rows(one, one.reached) for one in kept),
            steps=sum(one.kept_steps for one in kept),
            examples=(sure.examples + tuple(rest.examples if rest.repeated else ()))[:10],
        )

    def _lane_proof(self, epoch: int, kept: list[Generation], every: list[Generation]) -> EpochProof:
        """Count rows by the cursors of the lanes: each pass must begin where the one before it was left."""
        total = LaneCounts()
        for lane in range(kept[-1].lanes if kept else 0):
            over = any(one.shape.epoch > epoch and self._has_lane(one, lane) for one in self.generations)
            total = total.plus(self.lanes_of(kept[-1]).counts(kept, lane, over))
        if not kept and any(one.shape.epoch > epoch for one in self.generations):
            total = total.plus(LaneCounts(never=self.every[-1].rows))
        skipped = sum(one.kept_skipped for one in kept)
        made = sum(self.lanes_of(one).rows_of(one, max(one.steps.values())) for one in every)
        consumed = sum(self.lanes_of(one).rows_of(one, one.kept_steps) for one in kept)
        return EpochProof(
            epoch,
            rows=total.once + total.repeated + total.never + total.dropped + total.pending,
            once=total.once,
            repeated=total.repeated,
            never=total.never,
            dropped=total.dropped,
            pending=total.pending,
            skipped=skipped,
            again=made - consumed,
            steps=sum(one.kept_steps for one in kept),
            filtered=max(0, total.filtered - skipped),
        )

    def _has_lane(self, one: Generation, lane: int) -> bool:
        return self.lanes_of(one).owner(one, lane) is not None

    def _end(self, epoch: int, kept: list[Generation], rows: int) -> tuple[int, int]:
        """Return the end of an epoch (later rows are dropped), and of the rows that must be delivered by now."""
        if not kept:
            left_out = epoch < max(self._by_epoch)
            return rows, rows if left_out else 0
        last = max(kept, key=lambda one: (one.place, one.beginning))
        end = last.end if _drops(last, rows - last.end) else rows
        later = [one for one in self.generations if one.shape.epoch > epoch]
        # A resume with larger batches than the rest of the epoch drops the rest, possibly in a pass that is not kept.
        if any(
            one.origin == (epoch, last.frontier)
            and (one.shape.epoch > epoch or (one.is_load and one is self._all[-1]))
            and _drops(one, rows - last.frontier)
            for one in self._all
        ):
            end = min(end, last.frontier)
        # Ranks may be one step apart, also across the end of an epoch: in the last start that is not a gap yet.
        attempt = self.generations[-1].shape.attempt
        behind = {rank for rank in range(last.shape.ranks) if last.reached(rank) < min(last.end, last.until)}
        waiting = all(one.shape.attempt == attempt and behind <= set(one.missing) for one in later)
        alone = bool(last.missing) and _are_through(last)  # ranks without any record
        if last.shape.attempt == attempt and waiting and (behind or not later) and not alone:
            return end, min(last.common, end)
        return end, end

    def rows_of_step(self, step: int) -> list[Delivery]:
        """Return the rows of a step, in the order of their positions."""
        if not 1 <= step <= self.steps:
            raise DataNotFoundError(f"there is no step {step}: the run has {self.steps:,} steps.")
        number = bisect_right(self._first_steps, step - 1) - 1
        one = self.generations[number]
        if one.lanes:
            later, place = self.generations[number + 1 :], step - self._first_steps[number]
            if all(track.recorded < place <= track.delivered for track in one.tracks.values()):
                raise DataNotFoundError(
                    f"the rows of step {step} are not recorded: its process ended before they were written. Those of "
                    "the last seconds before a crash may be missing."
                )
            return list(self.lanes_of(one).deliveries(one, step - 1 - self._first_steps[number], step, later))
        first = one.shape.start + (step - 1 - self._first_steps[number]) * one.shape.global_batch
        positions = np.arange(first, min(first + one.shape.global_batch, one.end, one.until))
        ranks = positions % one.shape.ranks
        here = np.array([one.reached(rank) for rank in range(one.shape.ranks)])[ranks] > positions
        positions, ranks = positions[here], ranks[here]
        rows = self._orders[one.shape.order].source.at(one.shape.epoch).chosen(positions)
        return [
            Delivery(step, one.shape.epoch, *values)
            for values in zip(positions.tolist(), ranks.tolist(), rows.tolist(), strict=True)
        ]

    def steps_of_row(self, row: int, source: int = 0) -> list[Delivery]:
        """Return every step that saw a row, epoch by epoch. ``source``: its number, if there are several."""
        if self.generations[0].lanes:
            sources = self.order.sources
            if not 0 <= source < len(sources):
                raise DataNotFoundError(f"there is no source {source}: the run has {len(sources)}, counted from 0.")
            if not 0 <= row < (rows := sources[source].numbered):
                raise DataNotFoundError(f"there is no row {row}: source {source} has {rows:,} rows.")
            passes = zip(self.generations, self._first_steps, strict=False)
            return [
                each
                for number, (one, first) in enumerate(passes)
                for each in self.lanes_of(one).steps_of_row(one, first, row, source, self.generations[number + 1 :])
            ]
        rows = self.order.source.numbered
        if not 0 <= row < rows:
            raise DataNotFoundError(f"there is no row {row}: the dataset has {rows:,} rows.")
        deliveries = []
        places: dict[tuple[str, int], list[int]] = {}
        for number, one in enumerate(self.generations):
            order, epoch, ranks = one.shape.order, one.shape.epoch, one.shape.ranks
            if (order, epoch) not in places:
                places[order, epoch] = self._orders[order].source.at(epoch).positions_of(row).tolist()
            for position in places[order, epoch]:
                if one.shape.start <= position < one.reached(position % ranks):
                    step = self._first_steps[number] + (position - one.shape.start) // one.shape.global_batch + 1
                    deliveries.append(Delivery(step, epoch, position, position % ranks, row))
        return deliveries

    def overlap(self, other: Run, report: Report | None = None) -> Overlap:
        """Return the number of rows of the files that both runs have seen, in any order and selection."""
        data, other_data = self.order.source.about["data"], other.order.source.about["data"]
        if data != other_data:
            raise StateError(
                f"the runs read different data (fingerprints {data}, {other_data}): their rows cannot be compared."
            )
        first = self._seen(report)
        second = other._seen(report)
        return Overlap(int(first.sum()), int(second.sum()), int((first & second).sum()))

    def _seen(self, report: Report | None) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows of the files that were consumed at least once."""
        seen = np.zeros(self.order.source.source_rows, dtype=np.bool_)
        done, total = 0, sum(min(one.frontier, one.end) - one.shape.start for one in self.generations)
        for one in self.generations:
            known = self._orders[one.shape.order].source
            for epoch, positions in self._positions_of(one):
                seen[known.in_source(known.at(epoch).chosen(positions))] = True
                done += len(positions)
                if report is not None:
                    report(done, max(done, total))
        return seen

    def _positions_of(self, one: Generation) -> Iterator[tuple[int, Int64Array]]:
        """Yield epochs of the source, and positions in them, that a pass consumed."""
        if not one.lanes:
            yield from ((one.shape.epoch, positions) for positions in positions_in(pieces_of(one)))
            return
        lanes = self.lanes_of(one)
        for lane in range(one.lanes):
            if (track := lanes.owner(one, lane)) is not None:
                for each in lanes.intervals(one, lane, 0, min(track.delivered, one.kept_steps)):
                    yield each.epoch, each.lane.locals(each.first, each.first + each.touched)

    def lanes_of(self, one: Generation) -> LaneRun:
        """Return the lanes of a pass, read with its order."""
        return LaneRun(self._orders[one.shape.order])


@hinted()
def read_run(folder: str | Path, stream: str | None = None) -> Run:
    """Return the run whose ledger is in a folder, as recorded so far.

    ``stream``: a loader by its name, or by its key in ``streams``. Default: the one with the most steps.
    """
    runs = read_runs(folder)
    if stream is not None:
        runs = [run for run in runs if stream in (run.stream, run.streams[run.stream])]
        if not runs:
            there = ", ".join(name or key for key, name in read_runs(folder)[0].streams.items())
            raise DataNotFoundError(f"no loader {stream!r} recorded in {folder}. The recorded ones are: {there}.")
    return max(runs, key=lambda run: run.steps)


@hinted()
def read_runs(folder: str | Path) -> list[Run]:
    """Return all loaders that recorded in a folder."""
    where = ledger_folder(folder)
    generations = read_generations(where)
    names = dict.fromkeys(one.shape.stream for one in generations if not one.is_load)
    if not names:
        raise DataNotFoundError(f"the ledger in {where} has no step yet.")
    return [Run(where, generations, name) for name in names]


def _are_through(one: Generation) -> bool:
    """Return True if some rank has completed a pass of several steps, so that the others have begun it."""
    finished = one.frontier >= one.end or any(track.finished for track in one.tracks.values())
    return finished and max(one.steps.values()) > 1


def _drops(one: Generation, rows: int) -> bool:
    """Return True if a pass drops this number of rows at the end of an epoch."""
    return one.shape.ends == "drop" and 0 < rows < one.shape.global_batch


def _rows(one: Generation, reached: Callable[[int], int]) -> int:
    """Return the number of rows delivered over all ranks, up to a position for each."""
    start, ranks = one.shape.start, one.shape.ranks
    return sum(len(range(start + (rank - start) % ranks, reached(rank), ranks)) for rank in one.steps)
