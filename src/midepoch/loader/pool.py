"""Worker processes: how they are started, told, heard and ended, whatever they make."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import pyarrow as pa

from midepoch.errors import MidepochError, WorkerError
from midepoch.loader.spawned import Packed, packed, without_main
from midepoch.loader.transport import Receiver, Sender
from midepoch.pipeline.leaf import Leaf

_CHECK = 2.0
"""Seconds between looks at whether the process at the other end is still there, for when its end of the pipe was
inherited by somebody else."""

_starting = threading.Lock()
"""Workers are started one after the other: whatever is forked meanwhile would hold their ends of the pipes open."""


def _start_anew() -> None:
    global _starting
    _starting = threading.Lock()  # a fork has it from the thread that forked, which holds it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class Job(Protocol):
    """What a worker does with its life, once it has come into the process that it runs in."""

    def run(self, connection: Connection, number: int) -> None: ...


class Pool:
    """Worker processes, each with a pipe to this one; they go when this process goes."""

    def __init__(self, job: Job, count: int, start_method: str | None) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._mine: list[Connection] = []
        self._receivers: list[Receiver] = []
        self._polls: list[select.poll] = []
        self._unread: list[deque[Any]] = [deque() for _ in range(count)]  # received while something was told
        self._processes: list[Any] = []
        self._owner, self._closed = os.getpid(), False
        what = None if context.get_start_method() == "fork" else _packed(job)
        try:
            with _starting:
                for number in range(count):
                    self._start(context, number, job, what)
            if what is not None:
                # Not as an argument, which would be written to whoever is born, for ever if that one dies.
                for number in range(count):
                    self._send(number, what.data)
        except BaseException:
            self.close()
            raise

    def _start(self, context: Any, number: int, job: Job, what: Packed | None) -> None:
        """Start a worker: a fork has the job, and ends of pipes that it must close; others are told later."""
        mine, theirs = context.Pipe()
        self._mine.append(mine)
        self._receivers.append(Receiver(mine))
        self._polls.append(select.poll())
        process = context.Process(
            target=_work,
            args=(theirs, list(self._mine), job, number) if what is None else (theirs, [], None, number),
            name=f"midepoch-worker-{number}",
            daemon=True,
        )
        needs_main = what is None or what.needs_main
        try:
            with contextlib.nullcontext() if needs_main else without_main(), _quiet_tokenizers():
                process.start()
        finally:
            theirs.close()
        self._processes.append(process)

    @property
    def is_here(self) -> bool:
        """Whether the workers are those of this process, not of one that it was forked from."""
        return self._owner == os.getpid()

    def _receive(self, number: int) -> Any:
        """The next message of a worker: the number of the run it belongs to, what was made, what went wrong."""
        return self._unread[number].popleft() if self._unread[number] else self._received(number)

    def _received(self, number: int) -> Any:
        try:
            self._wait(number, select.POLLIN)
            return self._receivers[number].receive()
        except (EOFError, OSError):
            raise WorkerError(self._obituary(number)) from None
        except TypeError:
            if not self._mine[number].closed:
                raise
            raise WorkerError(self._obituary(number)) from None  # by another thread, in the middle

    def _wait(self, number: int, what: int) -> int:
        """Until one of these things can be done with a pipe; EOFError if its worker has died without being heard."""
        if not self.is_here:
            raise MidepochError(
                "these workers belong to the process that this one was forked from: make a loader of its own here."
            )
        poll = self._polls[number]
        poll.register(self._mine[number].fileno(), what)
        while not (found := poll.poll(_CHECK * 1000)):
            if self._closed or (self._processes[number].exitcode is not None and not poll.poll(0)):
                raise EOFError
        return int(found[0][1])

    def _raise(self, number: int, problem: tuple[Exception, str]) -> None:
        error, text = problem
        raise error from WorkerError(f"in worker {number} (pid {self._processes[number].pid}):\n{text}")

    def _tell(self, number: int, message: bytes) -> None:
        """Send a worker something short. One that cannot send is not listening: what it has to say is taken first."""
        try:
            while not self._wait(number, select.POLLOUT | select.POLLIN) & select.POLLOUT:
                self._unread[number].append(self._receivers[number].receive())
        except (EOFError, OSError):
            raise WorkerError(self._obituary(number)) from None
        self._send(number, message)

    def _send(self, number: int, message: bytes) -> None:
        try:
            self._mine[number].send_bytes(message)
        except OSError:
            raise WorkerError(self._obituary(number)) from None

    def _obituary(self, number: int) -> str:
        if self._closed:
            return "the workers were ended, by close() in another thread, while a batch was waited for."
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
        if not self.is_here:
            return  # the workers are not its children
        self._closed = True
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


def default_start_method(leaves: Sequence[Leaf]) -> str | None:
    """The platform's, but never a fork of a process that runs JAX, or talks to an object store: the threads of either
    would deadlock the child.
    """
    accesses = [leaf.source.access for leaf in leaves]
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


def _work(connection: Connection, others: Sequence[Connection], job: Job | None, number: int) -> None:
    """The life of a worker: quiet on Ctrl-C (the main process tells it to go), gone when the pipe ends."""
    gc.freeze()  # what came with a fork is never garbage here: looking at it would copy its pages
    for number_ in signal.valid_signals():  # handlers of the training script are not for its workers
        if callable(signal.getsignal(number_)):
            signal.signal(number_, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the training script may ignore: it ends workers
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for other in others:  # or a worker would keep alive the pipe of a dead main process
        other.close()
    if job is None:
        try:
            (job,) = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
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
        while not self._waiting(_CHECK):
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
