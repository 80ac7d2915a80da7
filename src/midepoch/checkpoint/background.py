"""Saving behind the training loop's back: a copy in memory now, the rest in a thread."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import Bytes, Kind, bytes_of
from midepoch.checkpoint.helpers import in_threads
from midepoch.checkpoint.tree import Encoded
from midepoch.imports import loaded
from midepoch.reasons import reason

_log = logging.getLogger("midepoch")
_COPIERS = min(4, os.cpu_count() or 1)
_ALONE = 8 << 20
_LINE = 64
_LOOK = 0.1
"""Seconds after which a waiting thread looks again."""


class Snapshots:
    """Memory for the arrays of one save, used again by the next: filling fresh memory costs three times a copy."""

    def __init__(self) -> None:
        self._free: dict[str, Bytes] = {}

    def give_back(self, memory: dict[str, Bytes]) -> None:
        """Memory of a save that has ended, for the next one."""
        self._free.update(memory)

    def take(self, parts: dict[str, Encoded]) -> tuple[dict[str, Encoded], dict[str, Bytes]]:
        """The same trees with copies of their arrays, and the memory of those: nobody else's until it is given back."""
        memory: dict[str, Bytes] = {}
        copies: list[tuple[Bytes, Any]] = []
        taken = {name: self._place(name, encoded, copies, memory) for name, encoded in parts.items()}
        # torch copies a large tensor with all cores; the others are copied by several threads.
        others = [(target, value) for target, value in copies if not _copied_by_torch(target, value)]
        if sum(len(target) for target, _ in others) < _ALONE:
            for target, value in others:
                np.copyto(target, bytes_of(value))
        else:
            in_threads(_COPIERS, lambda pair: np.copyto(pair[0], bytes_of(pair[1])), others)
        return taken, memory

    def _place(self, part: str, encoded: Encoded, copies: list[tuple[Bytes, Any]], taken: dict[str, Bytes]) -> Encoded:
        size = sum(_aligned(kind.nbytes) for kind, _ in encoded.arrays.values())
        memory = self._free.pop(part, None)
        if memory is None or len(memory) != size:
            memory = _aligned_memory(size)
        if size:
            taken[part] = memory
        arrays: dict[str, tuple[Kind, Any]] = {}
        at = 0
        for name, (kind, value) in encoded.arrays.items():
            target = memory[at : at + kind.nbytes]
            at += _aligned(kind.nbytes)
            arrays[name] = (kind, target)
            copies.append((target, value))
        return Encoded(encoded.json, arrays)


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _aligned_memory(size: int) -> Bytes:
    """Memory that begins with a cache line: a copy to anywhere else takes a third longer."""
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size]


def _copied_by_torch(target: Bytes, value: Any) -> bool:
    """Copy a tensor of torch, from wherever it is, however it lies; False if it is none."""
    torch: Any = loaded("torch")
    if torch is None or not isinstance(value, torch.Tensor) or not value.numel():
        return False
    torch.from_numpy(target).view(value.dtype).reshape(value.shape).copy_(value.detach())
    return True


class Background:
    """At most one thing done at a time, in a thread. What went wrong is raised at the next call, or told at the end.

    May be called by several threads, and by a signal handler in the middle of a call. A wait that is interrupted
    changes nothing: the next one waits again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._task: _Task | None = None

    def start(self, what: str, action: Callable[[], None]) -> None:
        """Begin, when what was begun before has ended; raises what went wrong with that."""
        with self._lock:
            while self._task is not None:
                self.wait()
            _unfinished.add(self)
            self._task = task = _Task(what, action)
            try:
                # Not a daemon: the interpreter waits for it before it ends.
                threading.Thread(target=task.run, name="midepoch-save").start()
            except BaseException:  # no thread could be started, or Ctrl-C: then it may be running all the same
                if task.prevent():
                    self._forget()
                raise

    def wait(self) -> None:
        """Wait for the end; raises what went wrong, once."""
        if (problem := self.ended()) is not None:
            raise problem

    def ended(self) -> BaseException | None:
        """Wait for the end; what went wrong, once."""
        task = self._task
        if task is None or task.thread == threading.get_ident():
            return None
        task.wait()
        with self._lock:
            if self._task is not task:  # another caller was here first
                return None
            self._forget()
        return task.problem

    def report(self) -> bool:
        """Wait for the end, and log what nobody has asked for. False if something went wrong."""
        what = self._task.what if self._task is not None else ""
        if (problem := self.ended()) is not None:
            _log.error("%s failed, and the program ended without a wait(): %s", what, reason(problem))
        return problem is None

    def _forget(self) -> None:
        self._task = None
        _unfinished.discard(self)

    def _after_fork(self) -> None:
        """The thread is the parent's: nothing of it is here."""
        self._lock, self._task = threading.RLock(), None


class _Task:
    """An action in a thread, and its end.

    Neither ``Thread.join`` nor an Event: the first takes a thread for ended if Ctrl-C interrupts it (before Python
    3.13), the other deadlocks if a signal handler waits in the middle of a wait.
    """

    def __init__(self, what: str, action: Callable[[], None]) -> None:
        self.what, self._action = what, action
        self.problem: BaseException | None = None
        self.thread: int | None = None
        self._claim, self._running, self._is_done = threading.Lock(), threading.Lock(), False
        self._running.acquire()

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        self.thread = threading.get_ident()
        try:
            self._action()
        except BaseException as problem:
            self.problem = problem
        finally:
            self._is_done = True
            self._running.release()

    def prevent(self) -> bool:
        """Keep it from running; False if it runs already."""
        return self._claim.acquire(blocking=False)

    def wait(self) -> None:
        while not self._is_done:  # also for who finds the lock held by a wait that was interrupted
            if self._running.acquire(timeout=_LOOK):
                self._running.release()


_unfinished: set[Background] = set()  # kept alive until somebody has heard how it ended


def _at_exit() -> None:
    outcomes = [_reported(background) for background in list(_unfinished)]
    if not all(outcomes):
        sys.stderr = _FailingStderr(sys.stderr)


def _reported(background: Background) -> bool:
    """Report at the end of the program. The first Ctrl-C does not lose the save, a second one ends the process."""
    try:
        return background.report()
    except KeyboardInterrupt:
        _log.warning("waiting for a checkpoint to be saved. Interrupt again to exit without it.")
    try:
        return background.report()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        return False


class _FailingStderr:
    """Standard error that cannot be flushed when Python ends: the one way to an exit status other than 0 (120, or 1
    of a process of ``multiprocessing``) that skips nobody's exit handlers.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        processes: Any = loaded("multiprocessing.process")
        if sys.is_finalizing() or (processes is not None and processes.parent_process() is not None):
            raise OSError("a checkpoint was not saved")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _after_fork() -> None:
    for background in _unfinished:
        background._after_fork()
    _unfinished.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
# Before the interpreter forbids new threads to all executors, which is before it waits for threads: a save needs them.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
