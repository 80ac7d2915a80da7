"""Saving behind the training loop's back: a copy in memory now, the rest in a thread."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import Bytes, Kind, bytes_of
from midepoch.checkpoint.helpers import in_threads
from midepoch.checkpoint.tree import Encoded

_log = logging.getLogger("midepoch")
_COPIERS = min(4, os.cpu_count() or 1)
_ALONE = 8 << 20
_LINE = 64


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
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or not value.numel():
        return False
    torch.from_numpy(target).view(value.dtype).reshape(value.shape).copy_(value.detach())
    return True


class Background:
    """At most one thing done at a time, in a thread. What went wrong is raised at the next call, or told at the end.

    May be called by several threads, and by a signal handler in the middle of a call.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._what = ""

    def start(self, what: str, action: Callable[[], None]) -> None:
        """Begin, when what was begun before has ended; raises what went wrong with that."""

        def run() -> None:
            try:
                action()
            except BaseException as problem:
                self._problem = problem

        with self._lock:
            while self._thread is not None:
                self.wait()
            # Not a daemon: the interpreter waits for it before it ends.
            self._what, self._thread = what, threading.Thread(target=run, name="midepoch-save")
            _unfinished.add(self)
            self._thread.start()

    def wait(self) -> None:
        """Wait for the end; raises what went wrong, once."""
        if (problem := self.ended()) is not None:
            raise problem

    def ended(self) -> BaseException | None:
        """Wait for the end; what went wrong, once."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return None
        thread.join()
        with self._lock:
            if self._thread is not thread:  # another caller was here first
                return None
            problem, self._thread, self._problem = self._problem, None, None
            _unfinished.discard(self)
        return problem

    def report(self) -> None:
        """Wait for the end, and log what nobody has asked for."""
        try:
            self.wait()
        except BaseException as problem:
            _log.error("%s failed, and the program ended without a wait(): %s", self._what, problem)


_unfinished: set[Background] = set()  # kept alive until somebody has heard how it ended


def _at_exit() -> None:
    for background in list(_unfinished):
        background.report()


# Before the interpreter forbids new threads to all executors, which is before it waits for threads: a save needs them.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
