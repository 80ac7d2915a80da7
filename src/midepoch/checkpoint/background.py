"""Saving behind the training loop's back: a copy in memory now, the rest in a thread."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import Bytes, Kind, bytes_of
from midepoch.checkpoint.tree import Encoded

_log = logging.getLogger("midepoch")
_COPIERS = min(4, os.cpu_count() or 1)
_ALONE = 8 << 20
_LINE = 64


class Snapshots:
    """Memory for the arrays of one save, used again by the next: filling fresh memory costs three times a copy."""

    def __init__(self) -> None:
        self._memory: dict[str, Bytes] = {}

    def take(self, parts: dict[str, Encoded]) -> dict[str, Encoded]:
        """The same trees, with copies of their arrays."""
        copies: list[tuple[Bytes, Any]] = []
        taken = {name: self._place(name, encoded, copies) for name, encoded in parts.items()}
        # torch copies a large tensor with all cores; the others are copied by several threads.
        others = [(target, value) for target, value in copies if not _copied_by_torch(target, value)]
        if sum(len(target) for target, _ in others) < _ALONE:
            for target, value in others:
                np.copyto(target, bytes_of(value))
        else:
            with ThreadPoolExecutor(_COPIERS, thread_name_prefix="midepoch-copy") as copiers:
                for _ in copiers.map(lambda pair: np.copyto(pair[0], bytes_of(pair[1])), others):
                    pass
        return taken

    def _place(self, part: str, encoded: Encoded, copies: list[tuple[Bytes, Any]]) -> Encoded:
        size = sum(_aligned(kind.nbytes) for kind, _ in encoded.arrays.values())
        memory = self._memory.get(part)
        if memory is None or len(memory) != size:
            memory = self._memory[part] = _aligned_memory(size)
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
    """At most one thing done at a time, in a thread. What went wrong is raised at the next call, or told at the end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._what = ""
        _alive.add(self)

    def start(self, what: str, action: Callable[[], None]) -> None:
        """Begin, when the one before has ended well."""
        self.wait()
        self._what = what

        def run() -> None:
            try:
                action()
            except BaseException as problem:
                self._problem = problem

        # Not a daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=run, name="midepoch-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end; raises what went wrong, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def report(self) -> None:
        """Wait for the end, and log what nobody has asked for."""
        try:
            self.wait()
        except BaseException as problem:
            _log.error("%s failed, and the program ended without a wait(): %s", self._what, problem)


_alive: weakref.WeakSet[Background] = weakref.WeakSet()


def _at_exit() -> None:
    for background in list(_alive):
        background.report()


atexit.register(_at_exit)
