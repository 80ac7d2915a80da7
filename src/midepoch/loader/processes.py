"""Worker processes: whether workers are processes or threads, starting them, messages, and stopping them.

A pipeline is also sent to a process that is no fork, from a script without ``if __name__ == "__main__"``. Such a
process imports the main script to find the functions defined there, and would run a training script a second time. With
cloudpickle, functions of the script are sent by value, and the import is unnecessary. Without it, the script is
imported only if something in the pipeline is defined there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch._internal.processes import PREFIX
from midepoch.errors import MapError, MidepochError, WorkerError
from midepoch.iteration.state import unnamed_file
from midepoch.loader.collation import collated
from midepoch.loader.crew import SHORT, Crew, Job, MainIsGone, Message, ThreadCrew
from midepoch.loader.options import Options
from midepoch.loader.transport import Parcel, Receiver, Sender, held_per_worker
from midepoch.pipeline.engine import Engine
from midepoch.pipeline.leaf import Leaf
from midepoch.transforms.formats import ITEMS, Allocate
from midepoch.transforms.generators import GeneratorStates

_LARGE = 1 << 20
"""Bytes from which an array is sent in shared memory, once for all workers: the rows of a selection, for example."""

_QUIET = {"TOKENIZERS_PARALLELISM": "false"}
"""Environment variables of workers, unless already set. Tokenizers that the main process has used would otherwise print
a warning in forked workers."""


@contextmanager
def quiet_tokenizers() -> Iterator[None]:
    """Limit tokenizers to one thread while a worker is started."""
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@dataclass(frozen=True)
class PackedWorker:
    """The objects of a worker, pickled. ``needs_main``: the main script has to be imported to unpickle them.

    ``arrays``: large arrays, which are not in ``data``.
    """

    data: bytes
    needs_main: bool
    arrays: tuple[memoryview, ...] = ()

    @property
    def _sizes(self) -> list[int]:
        return [array.nbytes for array in self.arrays]

    @contextmanager
    def shared(self) -> Iterator[int | None]:
        """Provide an unnamed file with the arrays while workers are started, or None if there are none."""
        if not self.arrays:
            yield None
            return
        fd = unnamed_file(sum(map(_padded, self._sizes)))
        try:
            with open(fd, "wb", closefd=False) as file:
                for array in self.arrays:
                    file.write(array)
                    file.write(bytes(_padded(array.nbytes) - array.nbytes))
            yield fd
        finally:
            os.close(fd)

    def send(self, connection: Connection, fd: int | None, process: int) -> None:
        """Send the objects and the environment to a worker. Raise OSError if it has exited."""
        # Another thread that starts a worker may delete a variable in the meantime.
        environment = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
        connection.send_bytes(pickle.dumps((self._sizes, _QUIET | environment)))
        if fd is not None:
            send_handle(connection, fd, process)
        connection.send_bytes(self.data)


def _padded(size: int) -> int:
    """Return a size with padding, so that every array begins at a multiple of 64."""
    return -(-size // 64) * 64


def receive(connection: Connection) -> Any:
    """Return the objects that were sent to this worker. Raise EOFError if the main process has exited.

    The environment is replaced by that of the main process. Workers may be forked from a server whose environment is
    older, and lacks, for example, a token that was set later.
    """
    sizes, environment = pickle.loads(connection.recv_bytes())
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    buffers = []
    if sizes:
        fd = recv_handle(connection)
        try:
            # Writes stay in this process: pages that it writes are copied.
            memory = memoryview(mmap.mmap(fd, sum(map(_padded, sizes)), access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
        starts = accumulate(map(_padded, sizes), initial=0)
        buffers = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return pickle.loads(connection.recv_bytes(), buffers=buffers)


def packed(*what: Any) -> PackedWorker:
    """Pickle objects, by value if possible. Raises the errors of pickle."""
    arrays: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        arrays.append(raw)
        return False

    try:
        import cloudpickle
    except ImportError:
        data = pickle.dumps(what, protocol=5, buffer_callback=is_small)
        return PackedWorker(data, b"__main__" in data, tuple(arrays))
    return PackedWorker(cloudpickle.dumps(what, protocol=5, buffer_callback=is_small), False, tuple(arrays))


_USUAL = ("torch", "torchvision", "tokenizers", "transformers", "datasets")


def preload(context: Any, what: PackedWorker) -> None:
    """Let the server from which workers are forked import what they need, once. It has no effect if it is running.

    The server imports the main script unless other modules are set. A choice of the user is kept.
    """
    from multiprocessing.forkserver import _forkserver

    if getattr(_forkserver, "_preload_modules", ["__main__"]) == ["__main__"]:
        used = [name for name in _USUAL if name in sys.modules and name.encode() in what.data]
        context.set_forkserver_preload(["midepoch.loader.workers", "midepoch.loader.workers", *used])


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the main script while a process is started, so that it is not imported there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_ROWS = 8


def global_draws(leaves: Sequence[Leaf], options: Options) -> dict[Hashable, str]:
    """Run the functions on a few rows. Return those that draw from global generators.

    The value is the name of a generator that cannot be replaced by one of a thread, empty if there is none. torch's can
    be replaced in its random functions, but not inside of others, nor if a function seeds it.
    """
    found: dict[Hashable, str] = {}
    for leaf in leaves:
        if not leaf.has_functions and options.collate_fn is None:
            continue
        with _quiet():
            engine = Engine(leaf)
            _run(engine, leaf, options)
            drew = engine.generators.drew
            if not drew:
                continue
            before = GeneratorStates()
            _run(Engine(leaf, drawing=drew), leaf, options)
            left = before.drawn()
            before.restore()
        for function, names in drew.items():
            others = (names - {"torch"}) | (names & left)
            found[function] = min(others, default="")
    return found


def _run(engine: Engine, leaf: Leaf, options: Options) -> None:
    """Run all functions on the first rows, one by one. Errors are raised again in their turn, with the batch."""
    plain = options.collate_fn is None or options.collate_columns
    kind = leaf.format or ("torch" if plain else "python")
    for row in engine.chosen(0, np.arange(min(_ROWS, len(leaf.order)))):
        with contextlib.suppress(Exception, SystemExit, GeneratorExit):
            batch = engine.transform(0, engine.read(np.array([row])))
            if options.collate_fn is not None and len(batch):
                collated(batch, kind, options, engine.generators, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing of rows that are skipped: they are skipped again in their turn."""
    log = logging.getLogger("midepoch")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def open_crew(job: Job) -> Crew:
    """Start workers for a job: threads if they were requested, or if Python has no interpreter lock."""
    leaves, options = job.leaves, job.options
    if options.worker_type == "thread" or (options.worker_type == "auto" and _suits_threads(options)):
        if any(leaf.format in (None, "torch", ITEMS) for leaf in leaves):
            with contextlib.suppress(ImportError):  # not while threads run, which would see a part of it
                importlib.import_module("torch")
        drawn = global_draws(leaves, options)
        if not any(drawn.values()):
            return ThreadCrew(replace(job, drawing=tuple(drawn)), options.num_workers)
        if options.worker_type == "thread":
            function, generator = next((function, name) for function, name in drawn.items() if name)
            raise MidepochError(
                f"{getattr(function, 'call', function)} draws from the global generator of {generator}, which all "
                'threads share: its values would not be reproducible. Use with_generator=True (or "torch"), or '
                'worker_type="process".'
            )
    method = options.multiprocessing_context or _start_method(leaves)
    return ProcessCrew(job, options.num_workers, options.prefetch, method)


def _suits_threads(options: Options) -> bool:
    """Return True if threads do not wait for each other. With an interpreter lock, more than four of them do."""
    return options.multiprocessing_context is None and not getattr(sys, "_is_gil_enabled", lambda: True)()


def _start_method(leaves: Sequence[Leaf]) -> str | None:
    """Return the platform's start method, but never "fork" if this process has threads of JAX or an object store.

    They would deadlock the child. A server that has imported midepoch once forks workers faster than each can import
    it: 8 workers in 0.9 s instead of 6.6 s, on 2 cores.
    """
    accesses = [leaf.source.access for leaf in leaves]
    remote = any(access is not None and access.store.forked_is_fatal for access in accesses)
    if not remote and "jax" not in sys.modules:
        return None
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


_FITS = getattr(select, "PIPE_BUF", 512) - 16
"""Bytes of a message that fit, with its head, into any pipe that can be written to."""
_PAUSE = 0.005
_CHECK = 2.0
"""Seconds between checks that the other process is alive, in case another process has inherited its end of the pipe."""

_starting = threading.Lock()
"""Lock of starts, one at a time: processes forked meanwhile would hold the workers' ends of the pipes open."""


def _start_anew() -> None:
    global _starting
    _starting = threading.Lock()  # a fork inherits it locked, by the thread that forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class ProcessCrew:
    """Worker processes, each with a pipe to this one. They stop when this process exits.

    ``granted``: messages that a worker may make before the first of them is received. Forks start when they are first
    told something: the first one works while the others are forked.
    """

    def __init__(self, job: Job, count: int, granted: int, start_method: str | None) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._mine: list[Connection] = []
        self._receivers: list[Receiver] = []
        self._polls: list[select.poll] = []
        self._unread: list[deque[Parcel]] = [deque() for _ in range(count)]  # received while others were sent
        self._processes: list[Any] = []
        # At exit, multiprocessing sends them SIGTERM and waits, also for one that is not ready to listen to it yet.
        Finalize(self, _kill, (self._processes,), exitpriority=0)
        self._owner, self._closed = os.getpid(), False
        self._slots = granted, held_per_worker(count)
        self._context, self._job, self._count = context, job, count
        self._what = None if context.get_start_method() == "fork" else _packed(job)
        if self._what is None:
            return
        if context.get_start_method() == "forkserver":
            preload(context, self._what)
        try:
            self._ensure(count - 1)
            # Not as an argument: writing it to a new process would block indefinitely if that one dies.
            with self._what.shared() as fd:
                for number in range(count):
                    self._send_job(number, self._what, fd)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._count

    def _ensure(self, number: int) -> None:
        """Start workers up to this one."""
        while len(self._processes) <= number:
            with _starting:
                self._start(len(self._processes))

    def _start(self, number: int) -> None:
        """Start a worker. A fork has the job, and pipe ends that it must close; others receive the job later."""
        context, job, what = self._context, self._job, self._what
        here, there = context.Pipe()
        self._mine.append(here)
        self._receivers.append(Receiver(here, *self._slots))
        self._polls.append(select.poll())
        slots = sum(self._slots)
        process = context.Process(
            target=_work,
            args=(there, list(self._mine), job, number, slots) if what is None else (there, [], None, number, slots),
            name=f"midepoch-worker-{number}",
            daemon=True,
        )
        needs_main = what is None or what.needs_main
        try:
            with contextlib.nullcontext() if needs_main else without_main(), quiet_tokenizers():
                process.start()
        finally:
            there.close()
        self._processes.append(process)

    @property
    def is_here(self) -> bool:
        """True if the workers belong to this process, not to one from which it was forked."""
        return self._owner == os.getpid()

    def grant(self, number: int) -> int:
        """Return a slot in which a worker may send one more message."""
        self._check_here()
        if not self._closed:
            self._ensure(number)
        return self._receivers[number].grant()

    def receive(self, number: int) -> Message:
        """Return the next message of a worker. Raises WorkerError if it has exited."""
        parcel = self._unread[number].popleft() if self._unread[number] else self._received(number)
        return self._receivers[number].open(parcel)  # type: ignore[no-any-return]

    def is_ready(self, number: int, seconds: float) -> bool:
        """Return True if a message of a worker can be received, or its error raised, within a time."""
        if self._unread[number] or self._closed or not self.is_here or number >= len(self._processes):
            return True
        if self._processes[number].exitcode is not None:
            return True
        self._polls[number].register(self._mine[number].fileno(), select.POLLIN)
        return bool(self._polls[number].poll(seconds * 1000))

    def _received(self, number: int) -> Parcel:
        try:
            self._wait(number, select.POLLIN)
            return self._receivers[number].receive()
        except (EOFError, OSError):
            raise WorkerError(self._obituary(number)) from None
        except TypeError:
            if not self._mine[number].closed:
                raise
            raise WorkerError(self._obituary(number)) from None  # by another thread, meanwhile

    def _wait(self, number: int, what: int) -> int:
        """Wait until a pipe is ready for one of these events. Raise EOFError if its worker exited without a message."""
        self._check_here()
        poll = self._polls[number]
        poll.register(self._mine[number].fileno(), what)
        while not (found := poll.poll(_CHECK * 1000)):
            if self._closed or (self._processes[number].exitcode is not None and not poll.poll(0)):
                raise EOFError
        return int(found[0][1])

    def _check_here(self) -> None:
        if not self.is_here:
            raise MidepochError(
                "these workers belong to the process from which this one was forked. Create a separate loader here."
            )

    def fail(self, number: int, problem: tuple[Exception, str]) -> None:
        """Raise the error of a worker."""
        error, text = problem
        raise error from WorkerError(f"in worker {number} (pid {self._processes[number].pid}):\n{text}")

    def tell(self, number: int, message: Any) -> None:
        """Send a message to a worker.

        A worker that is blocked in sending does not receive, so its messages are received first. A message that may
        not fit into the pipe is sent in a thread, while more of them are received.
        """
        content = message if isinstance(message, bytes) else pickle.dumps(message)
        try:
            while not self._wait(number, select.POLLOUT | select.POLLIN) & select.POLLOUT:
                self._unread[number].append(self._receivers[number].receive())
            if len(content) <= _FITS:
                self._mine[number].send_bytes(content)
                return
            thread = threading.Thread(target=self._send, args=(number, content), name=f"{PREFIX}send", daemon=True)
            thread.start()
            while thread.is_alive():
                self._polls[number].register(self._mine[number].fileno(), select.POLLIN)
                if self._polls[number].poll(_PAUSE * 1000):
                    self._unread[number].append(self._receivers[number].receive())
        except (EOFError, OSError):
            raise WorkerError(self._obituary(number)) from None

    def _send_job(self, number: int, what: PackedWorker, fd: int | None) -> None:
        try:
            what.send(self._mine[number], fd, self._processes[number].pid)
        except OSError:
            raise WorkerError(self._obituary(number)) from None

    def _send(self, number: int, message: bytes) -> None:
        with contextlib.suppress(OSError, TypeError):  # it exited, which is noticed when its next message is received
            self._mine[number].send_bytes(message)

    def _obituary(self, number: int) -> str:
        if self._closed:
            return "the workers were stopped by close() in another thread while a batch was requested."
        process = self._processes[number]
        process.join(timeout=5)
        code = process.exitcode
        how = f"exited with status {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}"
            how += " (the system may have run out of memory: see dmesg)" if name == "SIGKILL" else ""
        return (
            f"worker {number} of {self._count} (pid {process.pid}) {how}. The batches delivered so far are "
            "unaffected. Load the last state to resume."
        )

    def close(self) -> None:
        """Stop the workers by closing their pipes. A worker that is busy is terminated."""
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
        self._processes.clear()


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        process.kill()


def _packed(job: Job) -> PackedWorker:
    try:
        return packed(job)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise MidepochError(
            f"the dataset cannot be sent to a worker process: {problem}. With the 'spawn' start method, define map "
            "and collate functions at the top level of a module (no lambda, no nested function), or install "
            "cloudpickle: `pip install cloudpickle`. Create locks, open files and connections of a dataset class where "
            "they are first used, or leave them out with __getstate__."
        ) from problem


def _work(connection: Connection, others: Sequence[Connection], job: Job | None, number: int, slots: int) -> None:
    """Run a worker: it ignores Ctrl-C (the main process stops it), and exits when the pipe is closed."""
    gc.freeze()  # inherited objects are never garbage here, and visiting them would copy their pages
    for number_ in signal.valid_signals():  # handlers of the training script are not meant for workers
        if callable(signal.getsignal(number_)):
            signal.signal(number_, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the training script may ignore: it stops workers
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for other in others:  # else a worker would keep the pipe of a dead main process open
        other.close()
    if job is None:
        try:
            (job,) = receive(connection)
        except EOFError:
            return
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    with contextlib.suppress(MainIsGone):
        job.run(PipeLink(connection, number, slots))


class PipeLink:
    """The worker's end of the pipe."""

    is_process = True

    def __init__(self, connection: Connection, number: int, slots: int) -> None:
        self._connection, self.number = connection, number
        self._sender = Sender(connection, slots)
        self._parent = os.getppid()
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def hear(self) -> Any:
        """Return the next message of the main process. Raise MainIsGone if it has exited."""
        while not self._polled(_CHECK):
            if os.getppid() != self._parent:
                raise MainIsGone
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise MainIsGone from None
        return data if data.startswith(SHORT) else pickle.loads(data)

    def is_waiting(self) -> bool:
        """Return True if there is a message."""
        return self._polled(0.0)

    def _polled(self, seconds: float) -> bool:
        return bool(self._poll.poll(seconds * 1000))  # Connection.poll creates a selector on every call: 15 µs

    def accept(self, granted: int) -> int:
        """Return the slot of a grant. Its memory is renewed if another process still reads it."""
        if granted >= 0:
            return granted
        self._sender.renew(~granted)
        return ~granted

    def send(self, message: Message, slot: int | None) -> None:
        """Send a message in a slot that was granted, or a short one without."""
        about, result, problem = message
        if problem is not None:
            try:
                pickle.loads(pickle.dumps(problem))
            except Exception:
                problem = WorkerError(f"{type(problem[0]).__name__}: {problem[0]}"), problem[1]
        try:
            self._sender.send((about, result, problem), slot)
        except (BrokenPipeError, ConnectionError):
            raise MainIsGone from None
        except (TypeError, AttributeError, pickle.PicklingError) as unsendable:
            raise MapError(
                f"a batch cannot be sent by a worker process: {unsendable}. Let functions return lists, arrays or "
                "tensors, or use worker_type='thread'."
            ) from unsendable

    def allocator(self, slot: int) -> Allocate:
        """Return a function that allocates parts of the next batch in its slot."""
        return self._sender.allocator(slot)


def compact(table: pa.Table) -> pa.Table:
    """Return only the rows of the table: a slice of a block would be sent with the complete block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()
