"""The rows of a run: those of a step, the steps of one, and those that two runs have in common."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.consumed import Delivery, LaneRun
from midepoch.audit.coverage import pieces_of, positions_in
from midepoch.audit.documents import Document, documents_of
from midepoch.audit.orders import KnownOrder
from midepoch.audit.passes import Generation
from midepoch.audit.planned import KnownBatches
from midepoch.audit.records import Shape
from midepoch.errors import DataNotFoundError, StateError
from midepoch.order.budget import dealt
from midepoch.transforms.provenance import DocumentTable

Int64Array = npt.NDArray[np.int64]
Report = Callable[[int, int], None]


class Overlap(NamedTuple):
    """Numbers of rows of the files that two runs have seen: the first, the second, both."""

    first: int
    second: int
    both: int


class Naming:
    """The methods of a run that name rows."""

    folder: Path
    generations: list[Generation]
    every: list[Generation]

    @property
    def _orders(self) -> dict[str, KnownOrder]:
        raise NotImplementedError

    @property
    def _first_steps(self) -> list[int]:
        raise NotImplementedError

    @property
    def _batches(self) -> dict[Shape, KnownBatches]:
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """The number of steps."""
        raise NotImplementedError

    @property
    def order(self) -> KnownOrder:
        """The order of the rows in the last pass."""
        raise NotImplementedError

    def _pass_of(self, step: int) -> int:
        """Return the number of the pass with a step."""
        self._check_ranks()
        if not 1 <= step <= self.steps:
            raise DataNotFoundError(f"there is no step {step}: the run has {self.steps:,} steps.")
        return bisect_right(self._first_steps, step - 1) - 1

    def _check_ranks(self) -> None:
        """Raise DataNotFoundError if the blocks of leases of one rank do not correspond to those of others."""
        leased = [one for one in self.every if one.leases and one.shape.ranks > 1]
        blocks = Counter((one.beginning[:2], one.shape.epoch, rank) for one in leased for rank in one.steps)
        again = {(start, epoch) for (start, epoch, _), count in blocks.items() if count > 1}
        for one in leased:
            alone = one.missing or len(set(one.hows.values())) > 1
            if alone and (one.beginning[:2], one.shape.epoch) in again:
                raise DataNotFoundError(
                    f"epoch {one.shape.epoch}: each rank takes leases at its own pace, and one has left a block and "
                    "entered another where others have not. So the steps of the ranks have no common numbers."
                )

    def documents_of_step(self, step: int) -> list[Document] | None:
        """Return the documents of a step, rank by rank in the order of the batch, with the tokens of each.

        None if they are not recorded: the loader had no ``provenance=True``, or ``rows_of_step`` is exact without it.
        """
        number = self._pass_of(step)
        one, place = self.generations[number], step - 1 - self._first_steps[number]
        if not one.documents:
            return None
        self._check_delivered(one, place, step)
        documents: list[Document] = []
        for rank, (records, passed) in sorted(one.documents.items()):
            if place < one.steps[rank] and one.received(rank, place):
                if (table := records.of(passed, place)) is None:
                    raise DataNotFoundError(
                        f"the documents of step {step} on rank {rank} are not recorded: their file is missing or "
                        "damaged. Restore the .documents files of the run from a copy."
                    )
                documents += self._documents(one, table, step, rank)
        return documents

    def documents_of_row(self, row: int, source: int | str = 0) -> list[Document] | None:
        """Return every delivery of a row, with its tokens. ``source``: its number or name.

        None if they are not recorded.
        """
        self._check_ranks()
        if not all(one.documents for one in self.generations):
            return None
        documents: list[Document] = []
        for one, before in zip(self.generations, self._first_steps, strict=False):
            leaf = one.sources.index(source) if source in one.sources else source
            if isinstance(leaf, str) or not 0 <= leaf < len(one.sources):
                names = ", ".join(f"{i} ({name})" for i, name in enumerate(one.sources[:20]))
                raise DataNotFoundError(f"there is no source {source!r}. The sources are: {names}.")
            for rank, (records, passed) in sorted(one.documents.items()):
                for place in records.steps_with(passed, leaf, row):
                    table = records.of(passed, place)
                    delivered = place < min(one.steps[rank], one.kept_steps) and one.received(rank, place)
                    if table is not None and delivered:
                        found = self._documents(one, table, before + place + 1, rank)
                        documents += [each for each in found if (each.source, each.row) == (leaf, row)]
        return sorted(documents)

    def _documents(self, one: Generation, table: DocumentTable, step: int, rank: int) -> Iterator[Document]:
        sources = self._orders[one.shape.order].sources
        return documents_of(
            table, step, one.shape.epoch, rank, one.sources, lambda source, row: sources[source].place(row)
        )

    def rows_of_step(self, step: int) -> list[Delivery]:
        """Return the rows of a step, in the order of their positions."""
        number = self._pass_of(step)
        one, before = self.generations[number], step - 1 - self._first_steps[number]
        if one.lanes:
            self._check_delivered(one, before, step)
            if all(track.recorded <= before < track.delivered for track in one.tracks.values()):
                raise DataNotFoundError(
                    f"the rows of step {step} are not recorded: its process ended before they were written. Those of "
                    "the last seconds before a crash may be missing."
                )
            return list(self.lanes_of(one).deliveries(one, before, step, self.generations[number + 1 :]))
        number = self._number_in_plan(one, step, before)
        self._check_delivered(one, number, step)
        positions, ranks = self._positions_of_step(one, number)
        reached = [one.reached(rank) if one.received(rank, number) else 0 for rank in range(one.shape.ranks)]
        here = np.array(reached)[ranks] > positions
        positions, ranks = positions[here], ranks[here]
        if one.shape.batches:
            positions, ranks = self._in_batches(one, positions, ranks)
        rows = self._orders[one.shape.order].source.at(one.shape.epoch).chosen(positions)
        return [
            Delivery(step, one.shape.epoch, *values)
            for values in zip(positions.tolist(), ranks.tolist(), rows.tolist(), strict=True)
        ]

    def _number_in_plan(self, one: Generation, step: int, before: int) -> int:
        """Return the number of a step among those that a pass may deliver. Raise DataNotFoundError if it may not."""
        if (amid := one.shape.amid) is None:
            return before
        wanted = one.shape.first_step + before
        number = amid.numbers.step(wanted)
        if amid.numbers.number(number) != wanted:
            leases = any(other.leases for other in self.generations)
            reason = "excluded, or acknowledged before a state was loaded" if leases else "excluded"
            raise DataNotFoundError(f"step {step} was {reason}: its rows were not delivered.")
        return number

    @staticmethod
    def _check_delivered(one: Generation, number: int, step: int) -> None:
        """Raise DataNotFoundError if all ranks had acknowledged a step of a pass before it."""
        if not any(one.received(rank, number) for rank in one.steps):
            raise DataNotFoundError(
                f"step {step} was acknowledged before this block of leases began: its rows were not delivered again. "
                "They are those of an earlier step."
            )

    @staticmethod
    def _positions_of_step(one: Generation, number: int) -> tuple[Int64Array, Int64Array]:
        """Return the positions of a step of a pass, and their ranks. ``number``: that in its plan."""
        if (amid := one.shape.amid) is None:
            positions = np.arange(one.shape.after(number), min(one.shape.after(number + 1), one.end, one.until))
            return positions, positions % one.shape.ranks
        numbers = np.arange(amid.numbers.begin(number), amid.numbers.begin(number + 1))
        positions = amid.done.remaining(numbers)
        inside = positions < min(one.end, one.until)
        return positions[inside], (numbers % one.shape.ranks)[inside]

    def steps_of_row(self, row: int, source: int = 0) -> list[Delivery]:
        """Return every step that saw a row, epoch by epoch. ``source``: its number, if there are several."""
        self._check_ranks()
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
                unit = self.batches_of(one).batch_of(position) if one.shape.batches else position
                if unit is None:
                    continue
                amid = one.shape.amid
                if amid is not None and amid.done.contains(np.array([unit]))[0]:
                    continue
                rank = (unit if amid is None else amid.done.before(unit)) % ranks
                start = one.shape.start if amid is None else amid.start
                if start <= unit < one.reached(rank):
                    step = one.shape.steps_to(unit + 1)
                    if not one.received(rank, step - 1):
                        continue
                    if amid is not None:
                        step = amid.numbers.number(step - 1) + 1 - one.shape.first_step
                    deliveries.append(Delivery(self._first_steps[number] + step, epoch, position, rank, row))
        return deliveries

    def overlap(self, other: Naming, report: Report | None = None) -> Overlap:
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
        self._check_ranks()
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
            for positions in positions_in(pieces_of(one)):
                for each in self.batches_of(one).positions(positions) if one.shape.batches else [positions]:
                    yield one.shape.epoch, each
            return
        lanes = self.lanes_of(one)
        for lane in range(one.lanes):
            if (track := lanes.owner(one, lane)) is not None:
                for some in lanes.intervals(one, lane, 0, min(track.delivered, one.kept_steps)):
                    yield some.epoch, some.lane.locals(some.first, some.first + some.touched)

    def lanes_of(self, one: Generation) -> LaneRun:
        """Return the lanes of a pass, read with its order."""
        return LaneRun(self._orders[one.shape.order])

    def batches_of(self, one: Generation) -> KnownBatches:
        """Return the batches of a pass, if they are by tokens."""
        if one.shape not in self._batches:
            self._batches[one.shape] = KnownBatches(self.folder, self._orders[one.shape.order], one.shape)
        return self._batches[one.shape]

    def _in_batches(self, one: Generation, batches: Int64Array, ranks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the positions of the rows of some batches, and the rank of each."""
        found = self.batches_of(one).positions(batches)
        of_rows = np.repeat(ranks, [len(each) for each in found])
        positions = np.concatenate(found) if found else np.zeros(0, np.int64)
        if one.shape.ends == "dealt" and len(found) < one.shape.ranks:  # the last step: its rows are dealt to all ranks
            pieces = dealt(np.array([len(each) for each in found]), one.shape.ranks)
            of_rows = np.repeat(np.arange(one.shape.ranks), [stop - first for _, first, stop in pieces])
        return positions, of_rows
