"""Saving in the background: a copy in memory now, the rest in a thread."""

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

from midepoch._internal.values import loaded, reason
from midepoch.checkpoint.arrays import bytes_of
from midepoch.checkpoint.files import Bytes, run_in_threads
from midepoch.checkpoint.tree import EncodedTree

_log = logging.getLogger("midepoch")
_COPIERS = min(4, os.cpu_count() or 1)
_SMALL = 8 << 20
"""Bytes up to which one thread copies."""
_CACHE_LINE = 64
_POLL_INTERVAL = 0.1
"""Seconds after which a waiting thread checks again."""


class Snapshots:
    """Memory for the arrays of one save, reused by the next: filling new memory takes three times as long as a copy."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, str], Bytes] = {}  # by part and array

    def release(self, memory: dict[tuple[str, str], Bytes]) -> None:
        """Return the memory of a finished save, for the next one."""
        self._free.update(memory)

    def copy(self, parts: dict[str, EncodedTree]) -> tuple[dict[str, EncodedTree], dict[tuple[str, str], Bytes]]:
        """Return the same trees with copies of their arrays, and the memory of the copies, to be released."""
        memory: dict[tuple[str, str], Bytes] = {}
        copied: dict[str, EncodedTree] = {}
        others: list[tuple[Bytes, Any]] = []
        for part, encoded in parts.items():
            copied[part] = EncodedTree(encoded.json)
            for name, (spec, value) in encoded.arrays.items():
                target = self._free.pop((part, name), None)
                if target is None or len(target) != spec.nbytes:
                    target = _aligned_memory(spec.nbytes)
                memory[part, name] = target
                copied[part].arrays[name] = (spec, target)
                # torch copies a large tensor with all cores; other arrays are copied by several threads.
                if not _copied_by_torch(target, value):
                    others.append((target, value))
        threads = _COPIERS if sum(len(target) for target, _ in others) >= _SMALL else 1
        run_in_threads(threads, lambda pair: np.copyto(pair[0], bytes_of(pair[1])), others)
        return copied, memory


def _aligned_memory(size: int) -> Bytes:
    """Return memory aligned to a cache line: a copy to any other address takes a third longer."""
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + size]


def _copied_by_torch(target: Bytes, value: Any) -> bool:
    """Copy a torch tensor from any device and of any layout; False if it is none."""
    torch: Any = loaded("torch")
    if torch is None or not isinstance(value, torch.Tensor) or not value.numel():
        return False
    torch.from_numpy(target).view(value.dtype).reshape(value.shape).copy_(value.detach())
    return True


class Background:
    """Thread for one action at a time. Its error is raised by the next call, or logged at exit.

    May be called by several threads, and by a signal handler in the middle of a call. An interrupted wait changes
    nothing: the next one waits again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._task: _Task | None = None

    def start(self, description: str, action: Callable[[], None]) -> None:
        """Start an action when the previous one has finished; raises the error of that one."""
        with self._lock:
            while self._task is not None:
                self.wait()
            _unfinished.add(self)
            self._task = task = _Task(description, action)
            try:
                # Not a daemon: the interpreter waits for it before it exits.
                threading.Thread(target=task.run, name="midepoch-save").start()
            except BaseException:  # no thread could be started, or Ctrl-C: then it may run nevertheless
                if task.prevent():
                    self._forget()
                raise

    def wait(self) -> None:
        """Wait until the action has finished; raises its error, once."""
        if (problem := self.finish()) is not None:
            raise problem

    def finish(self) -> BaseException | None:
        """Wait until the action has finished; return its error, once."""
        task = self._task
        if task is None or task.thread == threading.get_ident():
            return None
        task.wait()
        with self._lock:
            if self._task is not task:  # another caller was here first
                return None
            self._forget()
        return task.problem

    def log_error(self) -> bool:
        """Wait until the action has finished, and log its error if nothing has raised it. False if it failed."""
        description = self._task.description if self._task is not None else ""
        if (problem := self.finish()) is not None:
            _log.error("%s failed, and the program ended without a wait(): %s", description, reason(problem))
        return problem is None

    def _forget(self) -> None:
        self._task = None
        _unfinished.discard(self)

    def _after_fork(self) -> None:
        """Reset: the thread runs in the parent only."""
        self._lock, self._task = threading.RLock(), None


class _Task:
    """Action in a thread that can be waited for.

    Neither ``Thread.join`` nor an Event: the first considers a thread finished if Ctrl-C interrupts it (before Python
    3.13), the other deadlocks if a signal handler waits in the middle of a wait.
    """

    def __init__(self, description: str, action: Callable[[], None]) -> None:
        self.description, self._action = description, action
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
        """Prevent it from running; False if it runs already."""
        return self._claim.acquire(blocking=False)

    def wait(self) -> None:
        while not self._is_done:  # an interrupted wait may hold the lock
            if self._running.acquire(timeout=_POLL_INTERVAL):
                self._running.release()


_unfinished: set[Background] = set()  # referenced until their result was raised or logged


def _at_exit() -> None:
    outcomes = [_finish_at_exit(background) for background in list(_unfinished)]
    if not all(outcomes):
        sys.stderr = _FailingStderr(sys.stderr)


def _finish_at_exit(background: Background) -> bool:
    """Wait at exit. The first Ctrl-C does not lose the save, a second one ends the process."""
    for is_last in (False, True):
        try:
            return background.log_error()
        except KeyboardInterrupt:
            if is_last:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            _log.warning("waiting for a checkpoint to be saved. Interrupt again to exit without it.")
    return False


class _FailingStderr:
    """Standard error that cannot be flushed when Python exits: the only way to an exit status other than 0 (120, or 1
    in a ``multiprocessing`` process) that skips no exit handlers.
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


os.register_at_fork(after_in_child=_after_fork)
# Runs before the interpreter forbids new threads to executors, which is before it waits for threads: a save needs them.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
