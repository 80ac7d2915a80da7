"""Worker processes: how they are started, told, heard and ended, whatever they make."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from midepoch.errors import MidepochError, WorkerError
from midepoch.loader.spawned import Packed, packed, without_main
from midepoch.loader.transport import Receiver, Sender
from midepoch.order.keys import derive
from midepoch.pipeline import Pipeline

_PARENT_CHECK = 2.0
"""Seconds between looks at whether the main process is still there, for when its end of the pipe was inherited."""


class Job(Protocol):
    """What a worker does with its life, once it has come into the process that it runs in."""

    def run(self, connection: Connection, number: int) -> None: ...


class Pool:
    """Worker processes, each with a pipe to this one; they go when this process goes."""

    def __init__(self, job: Job, count: int, start_method: str | None) -> None:
        context: Any = multiprocessing.get_context(start_method)
        pipes = [context.Pipe() for _ in range(count)]
        self._mine = [mine for mine, _ in pipes]
        self._receivers = [Receiver(mine) for mine in self._mine]
        self._processes: list[Any] = []
        self._owner = os.getpid()
        forked = context.get_start_method() == "fork"
        what = job if forked else _packed(job)
        try:
            for number, (_, theirs) in enumerate(pipes):
                others = [end for pair in pipes for end in pair if end is not theirs] if forked else []
                process = context.Process(
                    target=_work,
                    args=(theirs, others, what, number),
                    name=f"midepoch-worker-{number}",
                    daemon=True,
                )
                with without_main(process), _quiet_tokenizers():
                    process.start()
                self._processes.append(process)
        except BaseException:
            self.close()
            raise
        finally:
            for _, theirs in pipes:
                theirs.close()

    def _receive(self, number: int) -> Any:
        """The next message of a worker: the number of the run it belongs to, what was made, what went wrong."""
        try:
            return self._receivers[number].receive()
        except (EOFError, OSError):
            raise WorkerError(self._obituary(number)) from None

    def _raise(self, number: int, problem: tuple[Exception, str]) -> None:
        error, text = problem
        raise error from WorkerError(f"in worker {number} (pid {self._processes[number].pid}):\n{text}")

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


def default_start_method(pipelines: Sequence[Pipeline]) -> str | None:
    """The platform's, but never a fork of a process that runs JAX, or talks to an object store: the threads of either
    would deadlock the child.
    """
    accesses = [pipeline.source.access for pipeline in pipelines]
    remote = any(access is not None and access.store.forked_is_fatal for access in accesses)
    return "spawn" if remote or "jax" in sys.modules else None


@contextlib.contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Tokenizers that were used in this process would warn in every fork of it, unless they are told what to do there:
    a worker is one of several, and tokenizes with one thread.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]


def _packed(job: Job) -> Packed:
    try:
        return packed(job)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise MidepochError(
            f"the dataset cannot be sent to a worker process: {problem}. With the 'spawn' start method, map and "
            "collate functions must be defined at the top level of a module (no lambda, no function in a function), "
            "or cloudpickle be installed: `pip install cloudpickle`."
        ) from problem


def _work(connection: Connection, others: Sequence[Connection], what: Any, number: int) -> None:
    """The life of a worker: quiet on Ctrl-C (the main process tells it to go), gone when the pipe ends."""
    gc.freeze()  # what came with a fork is never garbage here: looking at it would copy its pages
    for number_ in signal.valid_signals():  # handlers of the training script are not for its workers
        if callable(signal.getsignal(number_)):
            signal.signal(number_, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:  # or a worker would keep alive the pipe of a dead main process
        other.close()
    job: Job = what.unpacked()[0] if isinstance(what, Packed) else what
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    with contextlib.suppress(MainIsGone):
        job.run(connection, number)


class MainIsGone(BaseException):
    """The pipe to the main process has ended. Not an Exception, so that no map can be blamed for it."""


class Worker:
    """The worker's end of the pipe. ``slots``: so many of its messages may be on their way."""

    def __init__(self, connection: Connection, number: int, slots: int) -> None:
        self._connection, self._number = connection, number
        self._sender = Sender(connection, slots)
        self._parent = os.getppid()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def _hear(self) -> bytes:
        """The next message from the main process; MainIsGone if it is."""
        while not self._waiting(_PARENT_CHECK):
            if os.getppid() != self._parent:
                raise MainIsGone
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise MainIsGone from None

    def _waiting(self, seconds: float = 0.0) -> bool:
        return bool(self._poll.poll(seconds * 1000))  # Connection.poll makes a selector each time: 15 µs

    def _send(self, message: tuple[Any, ...], slot: int = 0) -> None:
        try:
            self._sender.send(message, slot)
        except (BrokenPipeError, ConnectionError):
            raise MainIsGone from None

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


def compact(table: pa.Table) -> pa.Table:
    """Just the rows of the table: as a slice of a block it would be sent with all of the block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def seed_globals(seed: int, epoch: int, number: int) -> None:
    """Other random numbers in every worker and epoch, for maps that use the global generators.

    They depend on the number of workers; a map that must not asks for ``with_generator=True``.
    """
    key = derive(seed, epoch, "map", number, words=2)
    random.seed(int(key[0]))
    np.random.seed(int(key[0]) & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(int(key[1]) >> 1)
