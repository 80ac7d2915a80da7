"""The rows of a run: those of a step, the steps of one, and those that two runs have in common."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch._internal.values import LARGEST, integer
from midepoch.audit.consumed import Delivery
from midepoch.audit.documents import Document
from midepoch.audit.orders import KnownSource
from midepoch.audit.passes import Generation
from midepoch.audit.proof import delivered_by, own_positions
from midepoch.errors import DataNotFoundError, StateError
from midepoch.order import Shard
from midepoch.pipeline.plans import TokenPlan

if TYPE_CHECKING:
    from midepoch.audit.run import Run

Int64Array = npt.NDArray[np.int64]
Report = Callable[[int, int], None]


class Overlap(NamedTuple):
    """Numbers of rows of the files that two runs have seen: the first, the second, both."""

    first: int
    second: int
    both: int


class _Place(NamedTuple):
    """A step of a run: the number of its pass among those that are kept, the pass, and the step's number in it."""

    number: int
    one: Generation
    step: int


def _place_of(run: Run, step: int, *, any_branch: bool = False) -> _Place:
    """Return the pass with a step. Raise DataNotFoundError if there is no such step.

    ``any_branch``: look for it among steps that were taken back, too, if it is in no other.
    """
    _check_ranks(run)
    step = _integer(step, "step")
    if any_branch and step > run.steps:
        for one in reversed(run.every):
            if one.before < step <= one.before + one.most_steps:
                return _Place(len(run.generations), one, step - 1 - one.before)
    if not 1 <= step <= run.steps:
        raise DataNotFoundError(f"there is no step {step}: the run has {run.steps:,} steps, counted from 1.")
    for number in reversed(range(len(run.generations))):
        one, place = run.generations[number], step - 1 - run.first_steps[number]
        if 0 <= place < one.reach and any(one.received(rank, place) for rank in one.of_rank):
            return _Place(number, one, place)
    raise DataNotFoundError(f"step {step} is not recorded: the ledger of the run begins later.")


def _check_ranks(run: Run) -> None:
    """Raise DataNotFoundError if the blocks of leases of one rank do not correspond to those of others."""
    leased = [one for one in run.every if one.leases and one.shape.ranks > 1]
    blocks = Counter((one.beginning[:2], one.shape.epoch, rank) for one in leased for rank in one.steps)
    again = {(start, epoch) for (start, epoch, _), count in blocks.items() if count > 1}
    for one in leased:
        alone = one.missing or len({record.header.how for record in one.of_rank.values()}) > 1
        if alone and (one.beginning[:2], one.shape.epoch) in again:
            raise DataNotFoundError(
                f"epoch {one.shape.epoch}: each rank takes leases at its own pace, and one has left a block and "
                "entered another where others have not. So the steps of the ranks have no common numbers."
            )


def rows_delivered_at(run: Run, step: int) -> list[tuple[int, int]]:
    """Return the sources and rows that were delivered at a step, also if the run was taken back before it since then.

    Raises DataNotFoundError if there is no such step, or if it is not known which rows its outputs are of.
    """
    found = _place_of(run, step, any_branch=True)
    if (documents := _documents_at(run, found, step)) is not None:
        return list(dict.fromkeys((one.source, one.row) for one in documents))
    if found.one.in_lanes:
        raise DataNotFoundError(
            f"the rows of step {step} are not recorded: the pipeline changes the number of rows, and the loader had no "
            "provenance=True. Record the run with it, or exclude the rows that you know."
        )
    return [(0, one.row) for one in _rows_at(run, found, step)]


def documents_of_step(run: Run, step: int) -> list[Document] | None:
    """Return the documents of a step, rank by rank in the order of the batch, with the tokens of each.

    None if they are not recorded: the loader had no ``provenance=True``, or ``rows_of_step`` is exact without it.
    """
    return _documents_at(run, _place_of(run, step), step)


def _documents_at(run: Run, found: _Place, step: int) -> list[Document] | None:
    _, one, place = found
    if not one.first.records_documents:
        return None
    ranks = (rank for rank in one.of_rank if one.received(rank, place))
    return [document for rank in ranks for document in _documents(run, one, rank, place, step)]


def _documents(run: Run, one: Generation, rank: int, place: int, step: int) -> Iterator[Document]:
    """Yield the documents of a step of one rank."""
    table = one.of_rank[rank].documents.of(one.of_rank[rank].header.number, place)
    if table is None:
        raise DataNotFoundError(
            f"the documents of step {step} on rank {rank} are not recorded: their file is missing or damaged. Restore "
            "the .documents files of the run from a copy."
        )
    names, numbers = one.first.header.sources, run.numbers_in(one)
    lengths = np.maximum(table.columns[3], 0).astype(np.int64)
    offsets = np.cumsum(lengths) - lengths
    for sequence, (first, stop) in enumerate(pairwise(table.bounds.tolist())):
        for number in range(first, stop):
            source, row, start, length = (int(column[number]) for column in table.columns)
            end, offset = None if length < 0 else start + length, int(offsets[number] - offsets[first])
            name, source, epoch = names[source], numbers[source], one.shape.epoch
            place_of_row = run.sources[source].place(row)
            yield Document(step, epoch, rank, sequence, source, name, row, start, end, offset, place_of_row)


def documents_of_row(run: Run, row: int, source: int | str = 0) -> list[Document] | None:
    """Return every delivery of a row, with its tokens. ``source``: its number or name.

    None if they are not recorded.
    """
    _check_ranks(run)
    if not all(one.first.records_documents for one in run.generations):
        return None
    documents: list[Document] = []
    names = {
        number: name
        for one in run.generations
        for number, name in zip(run.numbers_in(one), one.first.header.sources, strict=True)
    }
    number = next((number for number, name in names.items() if name == source), source)
    if number not in names:
        known = ", ".join(f"{number} ({name})" for number, name in sorted(names.items())[:20])
        raise DataNotFoundError(f"there is no source {source!r}. The sources are: {known}.")
    _check_row(run.sources[number], row, f"source {source}")
    for one, before in zip(run.generations, run.first_steps, strict=True):
        numbers = run.numbers_in(one)
        if number not in numbers:  # of another mix
            continue
        leaf = numbers.index(number)
        for rank, record in one.of_rank.items():
            for place in record.documents.steps_with(record.header.number, leaf, row):
                if place < one.kept_steps and one.received(rank, place):
                    found = _documents(run, one, rank, place, before + place + 1)
                    documents += [each for each in found if (each.source, each.row) == (number, row)]
    return sorted(set(documents))  # a lease that was delivered again keeps its number


def _integer(value: Any, what: str) -> int:
    return integer(value, what, -LARGEST)


def _check_row(source: KnownSource, row: int, name: str) -> None:
    if not 0 <= _integer(row, "row") < source.numbered:
        raise DataNotFoundError(f"there is no row {row}: {name} has {source.numbered:,} rows.")


def rows_of_step(run: Run, step: int) -> list[Delivery]:
    """Return the rows of a step, in the order of their positions."""
    return _rows_at(run, _place_of(run, step), step)


def _rows_at(run: Run, at: _Place, step: int) -> list[Delivery]:
    number, one, place = at
    if one.in_lanes:
        if all(track.recorded <= place < track.delivered for track in one.tracks.values()):
            raise DataNotFoundError(
                f"the rows of step {step} are not recorded: its process ended before they were written. Those of "
                "the last seconds before a crash may be missing."
            )
        later, numbers = _alike(run, number), run.numbers_in(one)
        try:
            deliveries = run.lanes_of(one).deliveries(one, place, step, later, known=True)
            return [each._replace(source=numbers[each.source]) for each in deliveries]
        except DataNotFoundError as problem:
            raise DataNotFoundError(
                f"the rows of step {step} are not known: {problem}. Record the run with provenance=True."
            ) from None
    found: list[tuple[int, int]] = []
    for rank in one.of_rank:
        if one.received(rank, place):
            own = own_positions(run.rows_plan(one), range(place, place + 1), Shard(rank, one.shape.ranks))
            found += [(position, rank) for position in own.tolist()]
    if not one.shape.batching.budget:
        found.sort()
    rows = run.order_of(one).source.at(one.shape.epoch).chosen(np.array([position for position, _ in found], np.int64))
    return [
        Delivery(step, one.shape.epoch, position, rank, row)
        for (position, rank), row in zip(found, rows.tolist(), strict=True)
    ]


def _alike(run: Run, number: int) -> list[Generation]:
    """Return the passes after one whose cursors are alike: of the same mix."""
    order = run.generations[min(number, len(run.generations) - 1)].shape.order
    return [one for one in run.generations[number + 1 :] if one.shape.order == order]


def steps_of_row(run: Run, row: int, source: int = 0) -> list[Delivery]:
    """Return every step that saw a row, epoch by epoch. ``source``: its number, if there are several."""
    _check_ranks(run)
    sources = run.sources
    if not 0 <= _integer(source, "source") < len(sources):
        raise DataNotFoundError(f"there is no source {source}: the run has {len(sources)}, counted from 0.")
    _check_row(sources[source], row, f"source {source}" if len(sources) > 1 else "the dataset")
    deliveries: list[Delivery] = []
    for number, (one, before) in enumerate(zip(run.generations, run.first_steps, strict=True)):
        if one.in_lanes:
            numbers, lanes = run.numbers_in(one), run.lanes_of(one)
            if source in numbers:
                found = lanes.steps_of_row(one, before, row, numbers.index(source), _alike(run, number))
                deliveries += [each._replace(source=source) for each in found]
            continue
        positions = run.order_of(one).source.at(one.shape.epoch).positions_of(row).tolist()
        for position in positions:
            deliveries += _steps_with(run, one, before, position, row)
    return list(dict.fromkeys(deliveries))  # a lease that was delivered again keeps its number


def _steps_with(run: Run, one: Generation, before: int, position: int, row: int) -> Iterator[Delivery]:
    """Yield the step of a pass over positions that delivered a position, if one did."""
    plan = run.rows_plan(one)
    unit = plan.batches.batch_of(position) if isinstance(plan, TokenPlan) else position
    if unit is None or unit < plan.first_lane.taken or plan.done.contains_one(unit):
        return
    steps, turn = range(one.reach), plan.done.before(unit)
    step = bisect_right(steps, turn, key=lambda step: int(plan.turns(np.array([step + 1]))[0]))
    for rank in one.of_rank if step in steps else ():
        if one.received(rank, step):
            own = own_positions(plan, range(step, step + 1), Shard(rank, one.shape.ranks))
            if (own == position).any():
                yield Delivery(before + step + 1, one.shape.epoch, position, rank, row)


def overlap(run: Run, other: Run, report: Report | None = None) -> Overlap:
    """Return the number of rows of the files that both runs have seen, in any order and selection."""
    data, other_data = run.order.source.about["data"], other.order.source.about["data"]
    if data != other_data:
        raise StateError(
            f"the runs read different data (fingerprints {data}, {other_data}): their rows cannot be compared."
        )
    first, second = _seen(run, report), _seen(other, report)
    return Overlap(int(first.sum()), int(second.sum()), int((first & second).sum()))


def _seen(run: Run, report: Report | None) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows of the files that were consumed at least once."""
    _check_ranks(run)
    seen = np.zeros(run.order.source.source_rows, dtype=np.bool_)
    for number, one in enumerate(run.generations):
        known = run.order_of(one).source
        for epoch, positions in _positions_of(run, one):
            seen[known.in_source(known.at(epoch).chosen(positions))] = True
        if report is not None:
            report(number + 1, len(run.generations))
    return seen


def _positions_of(run: Run, one: Generation) -> Iterator[tuple[int, Int64Array]]:
    """Yield epochs of the source, and positions in them, that a pass consumed."""
    if not one.in_lanes:
        yield one.shape.epoch, delivered_by(one, run, one.kept_steps).positions()
        return
    lanes = run.lanes_of(one)
    for lane in range(one.lanes):
        if (track := one.owner(lane)) is not None:
            for some in lanes.intervals(one, lane, 0, one.kept_of(track)):
                yield some.epoch, some.lane.locals(some.first, some.first + some.touched)
