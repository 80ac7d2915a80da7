"""Bundles of rows made ahead by workers, and delivered in the order of each lane."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from midepoch._internal.processes import cores
from midepoch._internal.timings import TimingReports, Timings
from midepoch.loader.crew import Crew, Job, Link, MainIsGone, receive_within, report
from midepoch.loader.crews import open_crew
from midepoch.loader.options import Options
from midepoch.loader.processes import compact
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.rows import Bundle, FirstPass, Made, Sizes, make_good, most_rows
from midepoch.transforms import Batch
from midepoch.transforms.features import Encoded

_Lane = tuple[int, int, Shard]  # leaf, epoch, lane
_BEFORE = 8
"""Bundles by which a lane may be opened again before those that are requested: rows of outputs that were made ahead."""


@dataclass
class _Asked:
    """A bundle that was requested: its worker, and its outputs once received."""

    bundle: Bundle
    worker: int
    made: Made | None = None
    problem: Any = None
    is_done: bool = False


class BundlePool:
    """Workers that make any requested bundle, in turn. Each has at most ``prefetch`` requests outstanding."""

    def __init__(self, leaves: Sequence[Leaf], options: Options, timings: Timings) -> None:
        self._timings, self.skipped = timings, 0
        self.excluded: Sequence[Intervals] = ()
        self.first_passes: dict[tuple[int, int], FirstPass] = {}
        self.engines = [Engine(leaf, shared=True) for leaf in leaves]
        self._sizes = Sizes(leaves)
        self._slots, self._timeout = options.prefetch, options.timeout
        self._window = cores()
        """Maximum of requests. It grows with every bundle: the first come sooner if not all compete for the cores."""
        self._lanes: dict[_Lane, deque[_Asked]] = {}
        self._sent: list[deque[_Asked | None]] = [deque() for _ in range(options.num_workers)]  # None: not needed
        job = _BundleJob(tuple(leaves), options.worker_init_fn)
        self.crew: Crew = open_crew(job, leaves, replace(options, collate_fn=None))

    @property
    def is_here(self) -> bool:
        """True if the workers belong to this process, not to one from which it was forked."""
        return self.crew.is_here

    def close(self) -> None:
        """Stop the workers."""
        self.crew.close()

    def begin(self, excluded: Sequence[Intervals]) -> None:
        """Begin a pass. What is requested ahead is kept for lanes that continue there."""
        self.first_passes, self.excluded = {}, excluded

    def forget(self) -> None:
        """Forget all requests."""
        self._lanes.clear()
        self._sent = [deque(None for _ in sent) for sent in self._sent]

    def take(
        self, leaf: int, epoch: int, lane: Shard, row: int, total: int, excluded: Intervals = EMPTY
    ) -> tuple[int, Batch]:
        """Return the bundle that begins at a row. It was requested unless the lane is new. Raises WorkerError."""
        key = (leaf, epoch, lane)
        asked = self._lanes.setdefault(key, deque())
        self._drop_stale(asked, excluded)
        if not asked or asked[0].bundle.row != row:
            last = min(row + self._sizes.now(leaf), total)
            if asked and row < asked[0].bundle.row <= row + _BEFORE * self._sizes.now(leaf):
                last = min(last, asked[0].bundle.row)  # after an edit: what is requested ahead of it is kept
            else:
                self._forget(asked)
            asked.appendleft(self._ask(Bundle(leaf, epoch, lane, row, last, excluded.from_(row).before_(last))))
        self._ask_ahead(key, asked, total, excluded)
        request = asked.popleft()
        while not request.is_done:
            self._hear_from(request.worker)
        if request.problem is not None:
            self.crew.fail(request.worker, request.problem)
        assert request.made is not None
        if request.made.stop < request.bundle.stop:
            self._forget(asked)  # the next one begins earlier
        if request.made.stop >= total:
            del self._lanes[key]
        else:
            self._ask_ahead(key, asked, total, excluded, after=request.made.stop)
        self.skipped += request.made.skipped
        return request.made.stop, request.made.batch

    def _drop_stale(self, asked: deque[_Asked], excluded: Intervals) -> None:
        """Forget requests from the first one on of which other rows are excluded now."""
        for number, one in enumerate(asked):
            bundle = one.bundle
            if excluded.from_(bundle.row).before_(bundle.stop) != bundle.excluded:
                later = deque(list(asked)[number:])
                while len(asked) > number:
                    asked.pop()
                self._forget(later)
                return

    def _ask_ahead(
        self, key: _Lane, asked: deque[_Asked], total: int, excluded: Intervals, after: int | None = None
    ) -> None:
        """Request the next bundles of a lane while there is room: as many as of every other lane."""
        asked_for = sum(map(len, self._sent))
        room = min(self._slots * len(self._sent), self._window) - asked_for
        share = max(1, self._slots * len(self._sent) // max(1, len(self._lanes)))
        row = asked[-1].bundle.stop if asked else after
        while room > 0 and row is not None and row < total and len(asked) < share:
            stop = min(row + self._sizes.now(key[0]), total)
            asked.append(self._ask(Bundle(*key, row, stop, excluded.from_(row).before_(stop))))
            row, room = stop, room - 1

    def _ask(self, bundle: Bundle) -> _Asked:
        """Request a bundle from the worker with the fewest requests."""
        number = min(range(len(self._sent)), key=lambda i: len(self._sent[i]))
        while len(self._sent[number]) >= self._slots:
            self._hear_from(number)
        asked = _Asked(bundle, number)
        self.crew.tell(number, (bundle, self.crew.grant(number)))
        self._sent[number].append(asked)
        return asked

    def _hear_from(self, number: int) -> None:
        """Receive the next bundle of a worker. They arrive in the order of the requests."""
        took, made, problem = receive_within(self.crew, number, self._timeout)
        asked = self._sent[number].popleft()
        self._window = min(self._window + 2, self._slots * len(self._sent))
        if asked is None:
            return
        asked.problem, asked.is_done = problem, True
        bundle = asked.bundle
        if problem is None:
            seconds, timings, stop, skipped = took
            if timings is not None:
                self._timings.add(timings)
            asked.made = made = Made(stop, made, skipped)
            rows, engine = made.stop - bundle.row, self.engines[bundle.leaf]
            self._sizes.took(bundle.leaf, most_rows(engine, rows, made.batch), rows, seconds)

    def _forget(self, asked: deque[_Asked]) -> None:
        for one in asked:
            sent = self._sent[one.worker]
            if not one.is_done:
                sent[sent.index(one)] = None
        asked.clear()


@dataclass(frozen=True)
class _BundleJob:
    leaves: tuple[Leaf, ...]
    init: Callable[[int], Any] | None
    drawing: tuple[Hashable, ...] | None = None

    def in_threads(self, drawing: tuple[Hashable, ...]) -> Job:
        return replace(self, drawing=drawing)

    def run(self, link: Link) -> None:
        _BundleWorker(link, self).live()


class _BundleWorker:
    def __init__(self, link: Link, job: _BundleJob) -> None:
        self._link, self._leaves, self._drawing, self._init = link, job.leaves, job.drawing, job.init
        self._engines: dict[int, Engine] = {}
        self._timings = Timings()
        self._reports = TimingReports(self._timings)

    def live(self) -> None:
        while True:
            bundle, granted = self._link.hear()
            slot = self._link.accept(granted)
            try:
                started = time.perf_counter()
                made = self._make(bundle)
                batch = _compacted(made.batch) if self._link.is_process else made.batch
                took = (time.perf_counter() - started, self._reports.take(), made.stop, made.skipped)
                began = time.perf_counter()
                self._link.send((took, batch, None), slot)
                self._timings.transport += time.perf_counter() - began
            except MainIsGone:
                raise
            except BaseException as problem:
                self._link.send((None, None, report(problem, self._link.number)), slot)

    def _make(self, bundle: Bundle) -> Made:
        leaf = self._leaves[bundle.leaf]
        if self._init is not None:
            self._init(self._link.number)
            self._init = None
        if bundle.leaf not in self._engines:
            self._engines[bundle.leaf] = Engine(leaf, shared=True, timings=self._timings, drawing=self._drawing)
        return make_good(self._engines[bundle.leaf], bundle)


def _compacted(batch: Batch) -> Batch:
    """Return the batch with only its own rows: Arrow slices of a block would be sent with the complete block."""
    arrays = {name: column for name, column in batch.columns.items() if isinstance(column, (pa.Array, Encoded))}
    if not arrays:
        return batch
    plain = [column.array if isinstance(column, Encoded) else column for column in arrays.values()]
    table = compact(pa.Table.from_arrays(plain, names=[str(i) for i in range(len(plain))]))
    columns = dict(batch.columns)
    for (name, column), made in zip(arrays.items(), table.columns, strict=True):
        joined = made.combine_chunks() if made.num_chunks != 1 else made.chunk(0)
        columns[name] = replace(column, array=joined) if isinstance(column, Encoded) else joined
    return replace(batch, columns=columns)
