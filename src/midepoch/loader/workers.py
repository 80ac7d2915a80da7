"""Workers that make complete batches, or bundles of rows, and exit with the main process."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import thread_time
from typing import Any

import pyarrow as pa

from midepoch._internal.processes import cores
from midepoch._internal.progress import TimingReports, Timings
from midepoch.errors import MapError
from midepoch.loader.batches import BatchMaker
from midepoch.loader.crew import SHORT, Crew, Job, MainIsGone, WorkerLink, receive_within, report
from midepoch.loader.options import Options
from midepoch.loader.plans import MadeBatch
from midepoch.loader.processes import compact, open_crew
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.plans import RemainingSteps, StepPlan, TokenPlan
from midepoch.pipeline.rows import Bundle, FirstPass, MadeRows, Sizes, make_good, most_rows
from midepoch.transforms import Batch
from midepoch.transforms.batch import Encoded

_Lane = tuple[int, int, Shard]  # leaf, epoch, lane

_BEFORE = 8
"""Bundles by which a lane may be opened again before those that are requested: rows of outputs that were made ahead."""


@dataclass
class _Asked:
    """A bundle that was requested: its worker, and its outputs once received."""

    bundle: Bundle
    worker: int
    made: MadeRows | None = None
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
        # Batches are made of the bundles in this process.
        needed = replace(options, collate_fn=None, device=None, planning=None, bunches=None)
        self.crew: Crew = open_crew(Job(_BundleWorker, tuple(leaves), needed))

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
            asked.made = made = MadeRows(stop, made, skipped)
            rows, engine = made.stop - bundle.row, self.engines[bundle.leaf]
            self._sizes.took(bundle.leaf, most_rows(engine, rows, made.batch), rows, seconds)

    def _forget(self, asked: deque[_Asked]) -> None:
        for one in asked:
            sent = self._sent[one.worker]
            if not one.is_done:
                sent[sent.index(one)] = None
        asked.clear()


def _initialize(function: Callable[[int], Any] | None, number: int) -> None:
    """Call ``worker_init_fn``. Errors that functions for torch's own workers have here get a hint."""
    if function is None:
        return
    try:
        function(number)
    except (AttributeError, TypeError) as problem:
        raise MapError(
            f"worker_init_fn failed: {type(problem).__name__}: {problem}. It is called with the number of the worker, "
            "and torch's get_worker_info() is None here."
        ) from problem


class _BundleWorker:
    """Makes the bundles that it is asked for, one after the other."""

    def __init__(self, link: WorkerLink, job: Job) -> None:
        self._link, self._job = link, job
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
                began = time.thread_time()  # not the time in which the pipe is full
                self._link.send((took, batch, None), slot)
                self._timings.transport += time.thread_time() - began
            except MainIsGone:
                raise
            except BaseException as problem:
                self._link.send((None, None, report(problem, self._link.number)), slot)

    def _make(self, bundle: Bundle) -> MadeRows:
        job, number = self._job, bundle.leaf
        if not self._engines:
            _initialize(job.options.worker_init_fn, self._link.number)
        if number not in self._engines:
            self._engines[number] = Engine(job.leaves[number], shared=True, timings=self._timings, drawing=job.drawing)
        return make_good(self._engines[number], bundle)


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


class WorkerPool:
    """Worker w of W makes the steps g ≡ w (mod W) of the last plan it received."""

    def __init__(self, leaf: Leaf, options: Options) -> None:
        self._run, self._timeout = 0, options.timeout
        self._plan: StepPlan
        self._untold: deque[int] = deque()
        # Waking a worker costs 60 µs: half of what it may make ahead is requested at a time.
        self._credit_step = max(1, options.prefetch // 2)
        self.crew: Crew = open_crew(Job(_BatchWorker, (leaf,), replace(options, device=None)))
        self._owed = [options.prefetch] * len(self.crew)

    @property
    def is_here(self) -> bool:
        """True if the workers belong to this process, not to one from which it was forked."""
        return self.crew.is_here

    def begin(self, plan: StepPlan) -> WorkerBatches:
        """Drop unfinished batches, and make those of this plan."""
        self._run += 1
        self._plan, self._untold = plan, deque(range(len(self.crew)))
        self._tell(cores())
        return WorkerBatches(self, plan)

    def _tell(self, workers: int) -> None:
        """Tell some more workers to begin. The first batch comes sooner if not all compete for the cores."""
        for _ in range(min(workers, len(self._untold))):
            number = self._untold.popleft()
            self.crew.tell(number, (self._run, _as_sent(self._plan), self._grants(number)))

    def step(self, step: int) -> MadeBatch:
        """Return a step. Steps are requested in order. Raises the errors of the worker, or WorkerError."""
        number = step % len(self.crew)
        while True:
            run, made, problem = receive_within(self.crew, number, self._timeout)
            self._owed[number] += problem is None
            if run == self._run:
                break
            self._grant(number)  # batches of the plan before may be in all of its slots
        self._tell(2)
        if problem is not None:
            self.crew.fail(number, problem)
        self._grant(number)
        return made  # type: ignore[no-any-return]

    def is_ready(self, step: int, seconds: float) -> bool:
        """Return True if something arrives from the worker of a step within a time."""
        return self.crew.is_ready(step % len(self.crew), seconds)

    def _grant(self, number: int) -> None:
        """Let a worker make more batches ahead, if it may make enough of them."""
        if self._owed[number] >= self._credit_step:
            self.crew.tell(number, SHORT + array("i", self._grants(number)).tobytes())

    def _grants(self, number: int) -> list[int]:
        owed, self._owed[number] = self._owed[number], 0
        return [self.crew.grant(number) for _ in range(owed)]

    def close(self) -> None:
        """Stop the workers."""
        self.crew.close()


class WorkerBatches:
    """The batches of a plan, made by a pool."""

    def __init__(self, pool: WorkerPool, plan: StepPlan) -> None:
        self._pool, self._plan, self._next = pool, plan, 0

    def next(self) -> MadeBatch | None:
        """Return the next batch and the cursor after it, or None at the end."""
        if not self._plan.has(self._next):
            return None
        made = self._pool.step(self._next)
        self._next += 1
        return made

    def is_ready(self, seconds: float) -> bool:
        """Return True if ``next`` does not have to wait, or after a wait of some seconds."""
        return not self._plan.has(self._next) or self._pool.is_ready(self._next, seconds)

    def close(self) -> bool:
        """Leave the workers to the pool."""
        return True


class _BatchWorker:
    """Makes its steps of the last plan it received."""

    def __init__(self, link: WorkerLink, job: Job) -> None:
        self._link, self._leaf, self._options, self._drawing = link, job.leaves[0], job.options, job.drawing
        self._run = 0
        self._slots: deque[int] = deque()
        self._plan: StepPlan | None = None
        self._reports: TimingReports

    def live(self) -> None:
        maker: BatchMaker | None = None
        while True:
            while self._plan is None:
                self._listen()
            run, plan, self._plan = self._run, self._plan, None
            try:
                if maker is None:
                    _initialize(self._options.worker_init_fn, self._link.number)
                    maker = BatchMaker(self._leaf, self._options, drawing=self._drawing)
                    self._reports = TimingReports(maker.timings)
                self._make(run, plan, maker)
            except MainIsGone:
                raise
            except BaseException as problem:
                self._link.send((run, None, report(problem, self._link.number)), None)

    def _make(self, run: int, plan: StepPlan, maker: BatchMaker) -> None:
        for chunk in maker.read(plan, self._link.number, self._options.num_workers):
            for read in chunk:
                # If a slot is free already, the batch is made in it, else it is copied there later.
                slot = self._slots[0] if self._slots else None
                made = maker.make(plan, read, None if slot is None else self._link.allocator(slot))
                if isinstance(made.value, pa.Table) and self._link.is_process:
                    made = made._replace(value=compact(made.value))
                while self._link.is_waiting() or not self._slots:
                    self._listen()
                    if self._run != run:
                        return
                if (timings := self._reports.take()) is not None:
                    made = made._replace(timings=timings)
                began = thread_time()
                self._link.send((run, made, None), self._slots[0])
                maker.timings.transport += thread_time() - began
                self._slots.popleft()

    def _listen(self) -> None:
        """Take note of one message of the main process: a plan, and slots."""
        message = self._link.hear()
        if isinstance(message, bytes):
            granted = array("i", message[len(SHORT) :]).tolist()
        else:
            self._run, plan, granted = message
            self._plan = self._as_planned(plan)
        self._slots.extend(map(self._link.accept, granted))

    def _as_planned(self, plan: Any) -> Any:
        """Return the plan that the main process has."""
        if isinstance(plan, RemainingSteps):
            return RemainingSteps(self._as_planned(plan.whole), plan.acked)
        if not isinstance(plan, tuple):
            return plan
        assert self._options.planning is not None
        begin, excluded = plan
        return TokenPlan.of(self._leaf, self._options.planning, begin, self._options.last_batch, excluded)


def _as_sent(plan: Any) -> Any:
    """Return a plan as it is sent: workers plan batches by tokens themselves, by the lengths that came with the job."""
    if isinstance(plan, RemainingSteps):
        return RemainingSteps(_as_sent(plan.whole), plan.acked)
    return (plan.begin, plan.batches.excluded) if isinstance(plan, TokenPlan) else plan
