"""num_workers > 0: processes that each make complete batches, and exit with the main process."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pyarrow as pa

from midepoch._internal.timings import TimingReports
from midepoch.loader.batches import BatchMaker
from midepoch.loader.options import Options
from midepoch.loader.plans import Made, Plan
from midepoch.loader.pool import MainIsGone, Pool, Worker, compact, default_start_method
from midepoch.pipeline.leaf import Leaf

_MORE = b"+"


class WorkerPool(Pool):
    """Worker w of W makes the steps g ≡ w (mod W) of the last plan it received."""

    def __init__(self, leaf: Leaf, options: Options) -> None:
        self._run = 0
        # Waking a worker costs 60 µs: half of what it may make ahead is requested at a time.
        self._credit_step = max(1, options.prefetch // 2)
        self._owed = [0] * options.num_workers
        method = options.multiprocessing_context or default_start_method([leaf])
        super().__init__(_BatchJob(leaf, options), options.num_workers, method)

    def begin(self, plan: Plan) -> WorkerBatches:
        """Drop unfinished batches, and make those of this plan."""
        self._run += 1
        self._owed = [0] * len(self._mine)
        for number, unread in enumerate(self._unread):
            unread.clear()
            self._tell(number, pickle.dumps((self._run, plan)))
        return WorkerBatches(self, len(plan))

    def step(self, step: int) -> Made:
        """Return a step. Steps are requested in order. Raises the errors of the worker, or WorkerError."""
        number = step % len(self._mine)
        while True:
            run, made, problem = self._receive(number)
            if run == self._run:
                break
        if problem is not None:
            self._raise(number, problem)
        self._owed[number] += 1
        if self._owed[number] >= self._credit_step:
            self._tell(number, _MORE * self._owed[number])
            self._owed[number] = 0
        return made  # type: ignore[no-any-return]


class WorkerBatches:
    """The batches of a plan, made by a pool."""

    def __init__(self, pool: WorkerPool, steps: int) -> None:
        self._pool, self._steps, self._next = pool, steps, 0

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end."""
        if self._next >= self._steps:
            return None
        made = self._pool.step(self._next)
        self._next += 1
        return made

    def close(self) -> bool:
        """Leave the workers to the pool."""
        return True


@dataclass(frozen=True)
class _BatchJob:
    leaf: Leaf
    options: Options

    def run(self, connection: Connection, number: int) -> None:
        _Worker(connection, self.leaf, self.options, number).live()


class _Worker(Worker):
    def __init__(self, connection: Connection, leaf: Leaf, options: Options, number: int) -> None:
        super().__init__(connection, number, options.prefetch)
        self._leaf, self._options = leaf, options
        self._run, self._credit = 0, 0
        self._plan: Plan | None = None
        self._reports: TimingReports

    def live(self) -> None:
        maker: BatchMaker | None = None
        while True:
            while self._plan is None:
                self._listen()
            run, plan, self._plan = self._run, self._plan, None
            try:
                if maker is None:
                    maker = BatchMaker(self._leaf, self._options)
                    self._reports = TimingReports(maker.timings)
                self._make(run, plan, maker)
            except MainIsGone:
                raise
            except BaseException as problem:
                self._report(run, problem)

    def _make(self, run: int, plan: Plan, maker: BatchMaker) -> None:
        sent = 0
        for chunk in maker.read(plan, self._number, self._options.num_workers):
            for read in chunk:
                made = maker.make(plan, read)
                if isinstance(made.value, pa.Table):
                    made = made._replace(value=compact(made.value))
                while self._waiting() or not self._credit:
                    self._listen()
                    if self._run != run:
                        return
                if (timings := self._reports.take()) is not None:
                    made = made._replace(timings=timings)
                self._send((run, made, None), sent)
                self._credit, sent = self._credit - 1, sent + 1

    def _listen(self) -> None:
        """Receive one message from the main process, or notice that it has exited."""
        message = self._hear()
        if message.startswith(_MORE):  # always for the current run: the main process sends both in order
            self._credit += len(message)
        else:
            (self._run, self._plan), self._credit = pickle.loads(message), self._options.prefetch
