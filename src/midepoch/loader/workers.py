"""num_workers > 0: workers that each make complete batches, and exit with the main process."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from time import perf_counter

import pyarrow as pa

from midepoch._internal.processes import cores
from midepoch._internal.timings import TimingReports
from midepoch.loader.batches import BatchMaker
from midepoch.loader.crew import SHORT, Crew, Job, Link, MainIsGone, receive_within, report
from midepoch.loader.crews import open_crew
from midepoch.loader.options import Options
from midepoch.loader.plans import Made
from midepoch.loader.processes import compact
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.plans import StepPlan, TokenPlan


class WorkerPool:
    """Worker w of W makes the steps g ≡ w (mod W) of the last plan it received."""

    def __init__(self, leaf: Leaf, options: Options) -> None:
        self._run, self._timeout = 0, options.timeout
        self._plan: StepPlan
        self._untold: deque[int] = deque()
        # Waking a worker costs 60 µs: half of what it may make ahead is requested at a time.
        self._credit_step = max(1, options.prefetch // 2)
        self.crew: Crew = open_crew(_BatchJob(leaf, replace(options, device=None)), [leaf], options)
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
            # Lengths and functions are sent once, with the job: workers plan batches by tokens themselves.
            plan = (self._plan.begin, self._plan.batches.excluded) if isinstance(self._plan, TokenPlan) else self._plan
            self.crew.tell(number, (self._run, plan, self._grants(number)))

    def step(self, step: int) -> Made:
        """Return a step. Steps are requested in order. Raises the errors of the worker, or WorkerError."""
        number = step % len(self.crew)
        while True:
            run, made, problem = receive_within(self.crew, number, self._timeout)
            self._owed[number] += problem is None
            if run == self._run:
                break
        self._tell(2)
        if problem is not None:
            self.crew.fail(number, problem)
        if self._owed[number] >= self._credit_step:
            self.crew.tell(number, SHORT + array("i", self._grants(number)).tobytes())
        return made  # type: ignore[no-any-return]

    def is_ready(self, step: int, seconds: float) -> bool:
        """Return True if something arrives from the worker of a step within a time."""
        return self.crew.is_ready(step % len(self.crew), seconds)

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

    def next(self) -> Made | None:
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


@dataclass(frozen=True)
class _BatchJob:
    leaf: Leaf
    options: Options
    drawing: tuple[Hashable, ...] | None = None

    def in_threads(self, drawing: tuple[Hashable, ...]) -> Job:
        return replace(self, drawing=drawing)

    def run(self, link: Link) -> None:
        _BatchWorker(link, self).live()


class _BatchWorker:
    def __init__(self, link: Link, job: _BatchJob) -> None:
        self._link, self._leaf, self._options, self._drawing = link, job.leaf, job.options, job.drawing
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
                    if self._options.worker_init_fn is not None:
                        self._options.worker_init_fn(self._link.number)
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
                began = perf_counter()
                self._link.send((run, made, None), self._slots[0])
                maker.timings.transport += perf_counter() - began
                self._slots.popleft()

    def _listen(self) -> None:
        """Take note of one message of the main process: a plan, and slots."""
        message = self._link.hear()
        if isinstance(message, bytes):
            granted = array("i", message[len(SHORT) :]).tolist()
        else:
            self._run, plan, granted = message
            if isinstance(plan, tuple):
                assert self._options.planning is not None
                begin, excluded = plan
                plan = TokenPlan.of(self._leaf, self._options.planning, begin, self._options.last_batch, excluded)
            self._plan = plan
        self._slots.extend(map(self._link.accept, granted))
