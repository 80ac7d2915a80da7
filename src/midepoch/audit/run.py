"""The history of a run: the rows that its weights have seen, over all restarts and world sizes, and its proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import hinted
from midepoch.audit.consumed import LaneCounts
from midepoch.audit.coverage import count, never_in, pieces_of
from midepoch.audit.history import History
from midepoch.audit.leased import count_leases
from midepoch.audit.leases import LeaseCounts
from midepoch.audit.mixes import WeightChange, weight_changes
from midepoch.audit.naming import Naming
from midepoch.audit.orders import KnownOrder
from midepoch.audit.passes import Generation, ledger_folder, read_generations
from midepoch.audit.planned import KnownBatches
from midepoch.audit.records import UNKNOWN, Shape
from midepoch.errors import DataNotFoundError
from midepoch.order.intervals import EMPTY

Int64Array = npt.NDArray[np.int64]


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
    excluded: int = 0
    """Rows that ``Loader.exclude`` left out. In lanes, of excluded steps: outputs, whose rows count."""
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


class Run(Naming):
    """The ledger of a run, read. ``stream`` is one of the loaders that recorded there (``streams``).

    Steps are counted from 1 over all starts, as the weights have seen them: a step that was lost in a crash and
    repeated counts once, and one that is excluded, or acknowledged before a block of leases, has a number, too. Rows
    are numbers in the dataset before shuffling.
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
    def _batches(self) -> dict[Shape, KnownBatches]:
        return {}

    @property
    def unit(self) -> str:
        """The unit of positions: rows or, if they are put together by tokens, batches."""
        return "batches" if self.every[-1].shape.batches else "rows"

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
        return list(accumulate((one.kept_numbers for one in self.generations), initial=0))

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
    def weight_changes(self) -> list[WeightChange]:
        """The weights that were set during the run (``Loader.set_weights``), in the order of their steps."""
        return weight_changes(zip(self._first_steps, self.generations, strict=False))

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
            if one.missing
            and not one.leases
            and any(one.steps.values())
            and (one is not self.generations[-1] or _are_through(one))
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
        if any(one.leases for one in every):
            return self._lease_proof(epoch, every)
        if self.every[-1].lanes:
            return self._lane_proof(epoch, kept, every)
        rows, unknown = self.every[-1].rows, False
        if rows == UNKNOWN:  # batches that were not counted: more may come until the end is reached
            rows = max((min(one.end, one.frontier) for one in kept), default=0)
            unknown = not any(one.finished for one in kept)
        pieces = [piece for one in kept for piece in pieces_of(one)]
        end, frontier = self._end(epoch, kept, rows)
        sure, rest, behind = count(pieces, 0, frontier), count(pieces, frontier, end), count(pieces, end, rows)
        made = sum(_rows(one, one.made) for one in every)
        left_out = EMPTY.union(*(one.done for one in kept)).before_(rows)
        parts = ((0, frontier), (frontier, end), (end, rows))
        excluded = [never_in(pieces, left_out, *part) if left_out else 0 for part in parts]
        examples = sure.examples + tuple(rest.examples if rest.repeated else ())
        if left_out:
            examples = tuple(each for each in examples if not left_out.contains(np.array([each]))[0])
        return EpochProof(
            epoch,
            rows,
            once=sure.once + rest.once + behind.once,
            repeated=sure.repeated + rest.repeated + behind.repeated,
            never=sure.never - excluded[0],
            dropped=behind.never - excluded[2],
            pending=rest.never - excluded[1] + unknown,
            skipped=sum(one.kept_skipped for one in kept),
            again=made - sum(_rows(one, one.reached) for one in kept),
            steps=sum(one.kept_steps for one in kept),
            examples=examples[:10],
            excluded=sum(excluded),
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
        rows = sum(self.lanes_of(one).excluded_rows(one) for one in kept if one.excluded)
        return EpochProof(
            epoch,
            rows=total.once + total.repeated + total.never + total.dropped + total.pending,
            once=total.once - rows,
            repeated=total.repeated,
            never=total.never,
            dropped=total.dropped,
            pending=total.pending,
            skipped=skipped,
            again=made - consumed,
            steps=sum(one.kept_steps for one in kept),
            filtered=max(0, total.filtered - skipped - rows),
            excluded=sum(_dropped(one) for one in kept) + rows,
        )

    def _lease_proof(self, epoch: int, every: list[Generation]) -> EpochProof:
        """Count what was acknowledged: each start must begin where the states before it were."""
        counts, over = count_leases(every), any(one.shape.epoch > epoch for one in self.every)
        latest = [one for one in every if one.shape.attempt == every[-1].shape.attempt]
        ended = {rank for one in latest for rank, track in one.tracks.items() if track.finished}
        complete = len(ended) == every[-1].shape.ranks and not counts.out and not counts.returned
        done = sum(map(len, counts.kept.values()))
        rows, last = every[-1].rows, every[-1]
        if last.lanes or rows == UNKNOWN:
            rows = done + counts.excluded + (not complete)  # outputs are not known before
        tail = rows - last.end - last.done.count(last.end, rows)
        dropped = tail if _drops(last, tail) else 0
        left = max(0, rows - done - counts.excluded - dropped)
        return EpochProof(
            epoch,
            rows,
            once=done - counts.never - counts.repeated,
            repeated=counts.repeated,
            never=counts.never + (left if over else 0),
            dropped=dropped,
            pending=0 if over else left,
            skipped=sum(rows for one in every for of_rank in one.skipped.values() for _, rows in of_rank),
            again=counts.again,
            steps=sum(
                len(one.leases[rank].delivered) if rank in one.leases else steps
                for one in every
                for rank, steps in one.steps.items()
            ),
            examples=counts.examples,
            excluded=counts.excluded,
            leases=counts,
        )

    def _has_lane(self, one: Generation, lane: int) -> bool:
        return self.lanes_of(one).owner(one, lane) is not None

    def _end(self, epoch: int, kept: list[Generation], rows: int) -> tuple[int, int]:
        """Return the end of an epoch (later rows are dropped), and of the rows that must be delivered by now."""
        if not kept:
            left_out = epoch < max(self._by_epoch)
            return rows, rows if left_out else 0
        last = max(kept, key=lambda one: (one.place, one.beginning))
        end = last.end if _drops(last, rows - last.end - last.done.count(last.end, rows)) else rows
        later = [one for one in self.generations if one.shape.epoch > epoch]
        # A resume with larger batches than the rest of the epoch drops the rest, possibly in a pass that is not kept.
        if any(
            one.origin == (epoch, last.frontier)
            and (one.shape.epoch > epoch or (one.is_load and one is self._all[-1]))
            and _drops(one, rows - last.frontier - one.done.count(last.frontier, rows))
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
    start, ranks, amid = one.shape.start, one.shape.ranks, one.shape.amid
    if amid is not None:
        start = amid.start
        return sum(
            len(range(start + (rank - start) % ranks, amid.done.before(reached(rank)), ranks)) for rank in one.steps
        )
    return sum(len(range(start + (rank - start) % ranks, reached(rank), ranks)) for rank in one.steps)


def _dropped(one: Generation) -> int:
    """Return the outputs excluded in a pass. Ranks that share lanes record the same."""
    of_lanes: dict[frozenset[int], int] = {}
    for track in one.tracks.values():
        lanes = frozenset(track.begin)
        of_lanes[lanes] = max(of_lanes.get(lanes, 0), track.dropped(one.kept_steps))
    return sum(of_lanes.values())
