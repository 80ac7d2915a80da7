"""num_workers > 0: processes that each make whole batches, and go when the main process goes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import MidepochError, WorkerError
from midepoch.loader.batches import BatchMaker, Made, Plan
from midepoch.loader.options import Options
from midepoch.loader.spawned import Packed, packed, without_main
from midepoch.loader.transport import Receiver, Sender
from midepoch.order.keys import derive
from midepoch.pipeline import Pipeline

_MORE = b"+"
_PARENT_CHECK = 2.0
"""Seconds between looks at whether the main process is still there, for when its end of the pipe was inherited."""


class WorkerPool:
    """Worker w of W makes the steps g ≡ w (mod W) of the plan it was last given."""

    def __init__(self, pipeline: Pipeline, options: Options) -> None:
        context: Any = multiprocessing.get_context(options.multiprocessing_context or _default_start_method(pipeline))
        pipes = [context.Pipe() for _ in range(options.num_workers)]
        self._mine = [mine for mine, _ in pipes]
        self._receivers = [Receiver(mine) for mine in self._mine]
        self._processes: list[Any] = []
        self._owner = os.getpid()
        self._run = 0
        # Telling a worker to go on wakes it, which costs 60 µs: half of what it may make ahead is asked for at a time.
        self._credit_step = max(1, options.prefetch // 2)
        self._owed = [0] * options.num_workers
        forked = context.get_start_method() == "fork"
        what = (pipeline, options) if forked else _packed(pipeline, options)
        try:
            for number, (_, theirs) in enumerate(pipes):
                others = [end for pair in pipes for end in pair if end is not theirs] if forked else []
                process = context.Process(
                    target=_work,
                    args=(theirs, others, what, number),
                    name=f"midepoch-worker-{number}",
                    daemon=True,
                )
                with without_main(process):
                    process.start()
                self._processes.append(process)
        except BaseException:
            self.close()
            raise
        finally:
            for _, theirs in pipes:
                theirs.close()

    def begin(self, plan: Plan) -> None:
        """Drop whatever is under way and make this plan's batches."""
        self._run += 1
        self._owed = [0] * len(self._mine)
        for number, connection in enumerate(self._mine):
            self._tell(number, connection, pickle.dumps((self._run, plan)))

    def next(self, step: int) -> Made:
        """The given step; steps must be asked for in order. Raises what the worker raised, or WorkerError."""
        number = step % len(self._mine)
        while True:
            try:
                run, made, problem = self._receivers[number].receive()
            except (EOFError, OSError):
                raise WorkerError(self._obituary(number)) from None
            if run == self._run:
                break
        if problem is not None:
            error, text = problem
            raise error from WorkerError(f"in worker {number} (pid {self._processes[number].pid}):\n{text}")
        self._owed[number] += 1
        if self._owed[number] >= self._credit_step:
            self._tell(number, self._mine[number], _MORE * self._owed[number])
            self._owed[number] = 0
        return made  # type: ignore[no-any-return]

    def _tell(self, number: int, connection: Connection, message: bytes) -> None:
        try:
            connection.send_bytes(message)
        except OSError:
            raise WorkerError(self._obituary(number)) from None

    def _obituary(self, number: int) -> str:
        process = self._processes[number]
        process.join(timeout=5)
        code = process.exitcode
        how = f"exited with status {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}"
            how += " (the system may have run out of memory: see dmesg)" if name == "SIGKILL" else ""
        return (
            f"worker {number} of {len(self._mine)} (pid {process.pid}) {how}. "
            "The batches handed out so far are unaffected; load the last state to go on."
        )

    def close(self) -> None:
        """End the workers. They hear it as the end of their pipes; one that is busy is terminated."""
        if os.getpid() != self._owner:
            return  # a forked copy: the workers are not its children
        for connection in self._mine:
            connection.close()
        for process in self._processes:
            process.join(timeout=0.2)
        for process in self._processes:
            if process.is_alive():
                process.terminate()
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()
        self._processes = []


def _default_start_method(pipeline: Pipeline) -> str | None:
    """The platform's, but never a fork of a process that runs JAX, or talks to an object store: the threads of either
    would deadlock the child.
    """
    access = pipeline.source.access
    remote = access is not None and access.store.forked_is_fatal
    return "spawn" if remote or "jax" in sys.modules else None


def _packed(pipeline: Pipeline, options: Options) -> Packed:
    try:
        return packed(pipeline, options)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise MidepochError(
            f"the dataset cannot be sent to a worker process: {problem}. With the 'spawn' start method, map and "
            "collate functions must be defined at the top level of a module (no lambda, no function in a function), "
            "or cloudpickle be installed: `pip install cloudpickle`."
        ) from problem


def _work(connection: Connection, others: Sequence[Connection], what: Any, number: int) -> None:
    """The life of a worker: quiet on Ctrl-C (the main process tells it to go), gone when the pipe ends."""
    for number_ in signal.valid_signals():  # handlers of the training script are not for its workers
        if callable(signal.getsignal(number_)):
            signal.signal(number_, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:  # or a worker would keep alive the pipe of a dead main process
        other.close()
    pipeline, options = what.unpacked() if isinstance(what, Packed) else what
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    with contextlib.suppress(_MainIsGone):
        _Worker(connection, pipeline, options, number).live()


class _MainIsGone(BaseException):
    """The pipe to the main process has ended. Not an Exception, so that no map can be blamed for it."""


class _Worker:
    def __init__(self, connection: Connection, pipeline: Pipeline, options: Options, number: int) -> None:
        self._connection, self._pipeline, self._options, self._number = connection, pipeline, options, number
        self._sender = Sender(connection, options.prefetch)
        self._parent = os.getppid()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)
        self._run, self._credit = 0, 0
        self._plan: Plan | None = None

    def live(self) -> None:
        maker: BatchMaker | None = None
        while True:
            while self._plan is None:
                self._listen()
            run, plan, self._plan = self._run, self._plan, None
            try:
                maker = maker or BatchMaker(self._pipeline, self._options)
                self._make(run, plan, maker)
            except _MainIsGone:
                raise
            except BaseException as problem:
                self._report(run, problem)

    def _make(self, run: int, plan: Plan, maker: BatchMaker) -> None:
        _seed_globals(self._pipeline, plan, self._number)
        sent = 0
        for chunk in maker.read(plan, self._number, self._options.num_workers):
            for read in chunk:
                made = maker.make(plan, read)
                if isinstance(made.value, pa.Table):
                    made = made._replace(value=_compact(made.value))
                while self._waiting() or not self._credit:
                    self._listen()
                    if self._run != run:
                        return
                self._send((run, made, None), sent)
                self._credit, sent = self._credit - 1, sent + 1

    def _listen(self) -> None:
        """Take one message from the main process, or notice that it is gone."""
        while not self._waiting(_PARENT_CHECK):
            if os.getppid() != self._parent:
                raise _MainIsGone
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise _MainIsGone from None
        if message.startswith(_MORE):  # always for the run last begun: the main process sends both in order
            self._credit += len(message)
        else:
            (self._run, self._plan), self._credit = pickle.loads(message), self._options.prefetch

    def _waiting(self, seconds: float = 0.0) -> bool:
        return bool(self._poll.poll(seconds * 1000))  # Connection.poll makes a selector each time: 15 µs

    def _send(self, message: tuple[Any, ...], slot: int = 0) -> None:
        try:
            self._sender.send(message, slot)
        except (BrokenPipeError, ConnectionError):
            raise _MainIsGone from None

    def _report(self, run: int, problem: BaseException) -> None:
        text = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))
        if isinstance(problem, Exception):
            try:
                pickle.loads(pickle.dumps(problem))
            except Exception:
                problem = WorkerError(f"{type(problem).__name__}: {problem}")
        else:  # a sys.exit() in a map must not end the training as if all were well
            problem = WorkerError(f"worker {self._number} was ended by {type(problem).__name__}({problem})")
        self._send((run, None, (problem, text)))


def _compact(table: pa.Table) -> pa.Table:
    """Just the rows of the table: as a slice of a block it would be sent with all of the block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _seed_globals(pipeline: Pipeline, plan: Plan, number: int) -> None:
    """Other random numbers in every worker and epoch, for maps that use the global generators.

    They depend on the number of workers; a map that must not asks for ``with_generator=True``.
    """
    shuffle = pipeline.order.shuffle
    key = derive(shuffle.seed if shuffle else 0, plan.epoch, "map", number, words=2)
    random.seed(int(key[0]))
    np.random.seed(int(key[0]) & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(key[1]) >> 1)
