"""The history of a run: what its weights have seen, over all restarts and world sizes, and what can be proven of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.coverage import Piece, count, pieces_of, positions_in
from midepoch.audit.orders import KnownOrder
from midepoch.audit.passes import Generation, ledger_folder, read_generations
from midepoch.errors import DataNotFoundError, StateError

Int64Array = npt.NDArray[np.int64]
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class EpochProof:
    """How often the rows of an epoch were handed over, in the history that the weights have.

    ``never``: rows that were left out. ``dropped``: rows behind the last whole batch under ``ends="drop"``.
    ``pending``: rows that have not come yet. ``skipped``: rows that were passed over under ``on_error="skip"``, which
    count as handed over. ``again``: rows handed over by a start that crashed, and once more after the resume.
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
    """The first positions that were handed over more than once or never."""

    @property
    def exact(self) -> bool:
        """Whether nothing was lost and nothing repeated, so far."""
        return not self.repeated and not self.never

    @property
    def complete(self) -> bool:
        """Whether the epoch is over and every row of it (but for dropped ones) came exactly once."""
        return self.exact and not self.pending


class Delivery(NamedTuple):
    """A row at a step: which rank got it, at which position of which epoch."""

    step: int
    epoch: int
    position: int
    rank: int
    row: int


class Overlap(NamedTuple):
    """Rows of the files that two runs have seen: by the first, by the second, by both."""

    first: int
    second: int
    both: int


class Run:
    """The ledger of a run, read. ``stream`` chooses among several (training, evaluation) by name.

    Steps are counted from 1 over the whole run, as its weights have seen them: one that was lost with a crash and made
    again counts once. Rows are numbers in the dataset before it was shuffled.
    """

    def __init__(self, folder: Path, generations: list[Generation], stream: str) -> None:
        self.folder, self.stream = folder, stream
        self._all = [one for one in generations if one.shape.stream == stream]
        self.streams = tuple(dict.fromkeys(one.shape.stream for one in generations))
        self.generations = _history(self._all)
        """The passes that the weights have seen, each up to where the next one took over."""

    @cached_property
    def _orders(self) -> dict[str, KnownOrder]:
        return {one.shape.order: KnownOrder(self.folder, one.shape.order) for one in self.generations}

    @property
    def order(self) -> KnownOrder:
        """The order of the rows, as of the last pass. (Another one may stand before a start from the beginning.)"""
        return self._orders[self.generations[-1].shape.order]

    @cached_property
    def _first_steps(self) -> list[int]:
        """The number of steps before each pass, and the total."""
        return list(accumulate(map(_steps, self.generations), initial=0))

    @property
    def steps(self) -> int:
        return self._first_steps[-1]

    @property
    def attempts(self) -> int:
        """How many times the run was started."""
        return len({one.shape.attempt for one in self._all})

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks, one after the other."""
        sizes = [one.shape.ranks for one in self._all]
        return [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]

    @property
    def gaps(self) -> list[str]:
        """Passes of which some ranks left no record."""
        return [
            f"epoch {one.shape.epoch} from position {one.shape.start:,}: no record of rank "
            f"{', '.join(map(str, one.missing[:8]))}{', …' * (len(one.missing) > 8)} of {one.shape.ranks}"
            for one in self.generations
            if one.missing
        ]

    @cached_property
    def epochs(self) -> list[EpochProof]:
        """The proof, epoch by epoch."""
        return [self._proof(epoch) for epoch in sorted({one.shape.epoch for one in self._all})]

    @property
    def exact(self) -> bool:
        """Whether no row of any epoch was lost or repeated, so far."""
        return all(epoch.exact for epoch in self.epochs)

    def _pieces(self, epoch: int) -> list[Piece]:
        return [piece for one in self.generations if one.shape.epoch == epoch for piece in pieces_of(one)]

    def _proof(self, epoch: int) -> EpochProof:
        mine = [one for one in self.generations if one.shape.epoch == epoch]
        rows = next(one.rows for one in self._all if one.shape.epoch == epoch)
        pieces = self._pieces(epoch)
        last = mine[-1] if mine else None
        running = last is not None and last is self.generations[-1]
        # Of a pass that may still be going on, ranks are a step apart now and then: that is no gap yet.
        frontier = last.common if running and last else last.end if last else 0
        end = last.end if last is not None else rows
        sure, rest = count(pieces, 0, frontier), count(pieces, frontier, end)
        behind = count(pieces, end, rows)  # nothing, unless the batch size changed under ends="drop"
        made = sum(_rows(one, until=one.end) for one in self._all if one.shape.epoch == epoch)
        kept = sum(_rows(one, until=one.until) for one in mine)
        return EpochProof(
            epoch,
            rows,
            once=sure.once + rest.once + behind.once,
            repeated=sure.repeated + rest.repeated + behind.repeated,
            never=sure.never,
            dropped=behind.never,
            pending=rest.never,
            skipped=sum(one.skipped for one in mine),
            again=made - kept,
            steps=sum(map(_steps, mine)),
            examples=(sure.examples + tuple(rest.examples if rest.repeated else ()))[:10],
        )

    def rows_of_step(self, step: int) -> list[Delivery]:
        """The rows that fed a step, in the order of their positions."""
        if not 1 <= step <= self.steps:
            raise DataNotFoundError(f"there is no step {step}: the run has made {self.steps:,} steps.")
        number = bisect_right(self._first_steps, step - 1) - 1
        one = self.generations[number]
        first = one.shape.start + (step - 1 - self._first_steps[number]) * one.shape.global_batch
        positions = np.arange(first, min(first + one.shape.global_batch, one.end, one.until))
        ranks = positions % one.shape.ranks
        here = np.array([one.reached(rank) for rank in range(one.shape.ranks)])[ranks] > positions
        positions, ranks = positions[here], ranks[here]
        rows = self._orders[one.shape.order].at(one.shape.epoch).chosen(positions)
        return [
            Delivery(step, one.shape.epoch, *values)
            for values in zip(positions.tolist(), ranks.tolist(), rows.tolist(), strict=True)
        ]

    def steps_of_row(self, row: int) -> list[Delivery]:
        """Every step that saw a row, epoch by epoch."""
        rows = self.generations[0].rows
        if not 0 <= row < rows:
            raise DataNotFoundError(f"there is no row {row}: the dataset has {rows:,} rows.")
        found = []
        places: dict[int, int] = {}
        for number, one in enumerate(self.generations):
            epoch, ranks = one.shape.epoch, one.shape.ranks
            if epoch not in places:
                places[epoch] = int(self._orders[one.shape.order].at(epoch).positions(np.array([row]))[0])
            position = places[epoch]
            if one.shape.start <= position < one.reached(position % ranks):
                step = self._first_steps[number] + (position - one.shape.start) // one.shape.global_batch + 1
                found.append(Delivery(step, epoch, position, position % ranks, row))
        return found

    def overlap(self, other: Run, report: Report | None = None) -> Overlap:
        """How many rows of the files both runs have seen: of the same data, in whichever order and selection."""
        mine, theirs = self.order.about["data"], other.order.about["data"]
        if mine != theirs:
            raise StateError(
                f"the runs read different data (fingerprints {mine} and {theirs}): their rows cannot be compared."
            )
        first = self._seen(report)
        second = other._seen(report)
        return Overlap(int(first.sum()), int(second.sum()), int((first & second).sum()))

    def _seen(self, report: Report | None) -> npt.NDArray[np.bool_]:
        """Which rows of the files were handed over at least once."""
        seen = np.zeros(self.order.source_rows, dtype=bool)
        done, total = 0, sum(one.frontier - one.shape.start for one in self.generations)
        for one in self.generations:
            known = self._orders[one.shape.order]
            order = known.at(one.shape.epoch)
            for positions in positions_in(pieces_of(one)):
                seen[known.in_source(order.chosen(positions))] = True
                done += len(positions)
                if report is not None:
                    report(done, max(done, total))
        return seen


def read_run(folder: str | Path, stream: str | None = None) -> Run:
    """The run whose ledger is in a folder, as it stands now. Of several streams the one with the most steps."""
    where = ledger_folder(folder)
    generations = read_generations(where)
    names = list(dict.fromkeys(one.shape.stream for one in generations))
    if stream is not None and stream not in names:
        raise DataNotFoundError(f"there is no stream {stream!r} in {where}: it has {', '.join(names) or 'none'}.")
    if not names:
        raise DataNotFoundError(f"the ledger in {where} holds no step yet.")
    chosen = [stream] if stream is not None else names
    return max((Run(where, generations, name) for name in chosen), key=lambda run: run.steps)


def _history(generations: list[Generation]) -> list[Generation]:
    """The passes in the order in which they were begun; each takes the place of all that lies behind its beginning."""
    history: list[Generation] = []
    for one in generations:
        begin = (one.shape.epoch, one.shape.start)
        for before in history:
            if before.shape.epoch == one.shape.epoch:
                before.until = min(before.until, one.shape.start)
        history = [
            before
            for before in history
            if (before.shape.epoch, before.shape.start) < begin and before.until > before.shape.start
        ]
        history.append(one)
    return history


def _steps(one: Generation) -> int:
    """Steps that were made, up to where the run left the pass."""
    return -(-(one.frontier - one.shape.start) // one.shape.global_batch)


def _rows(one: Generation, until: int) -> int:
    """Rows that were handed over, over all ranks, up to a position."""
    shape = one.shape
    total = 0
    for rank, steps in one.steps.items():
        stop = min(shape.start + steps * shape.global_batch, one.end, until)
        total += len(range(shape.start + (rank - shape.start) % shape.ranks, stop, shape.ranks))
    return total
