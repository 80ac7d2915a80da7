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


class Snapshots:
    """Memory for the arrays of one save, used again by the next: filling fresh memory costs three times a copy."""

    def __init__(self) -> None:
        self._memory: dict[str, Bytes] = {}

    def take(self, parts: dict[str, Encoded]) -> dict[str, Encoded]:
        """The same trees, with copies of their arrays."""
        copies: list[tuple[Bytes, Any]] = []
        taken = {name: self._place(name, encoded, copies) for name, encoded in parts.items()}
        if sum(len(target) for target, _ in copies) < _ALONE:
            for target, value in copies:
                _copy(target, value)
        else:
            with ThreadPoolExecutor(_COPIERS, thread_name_prefix="midepoch-copy") as copiers:
                for _ in copiers.map(lambda pair: _copy(*pair), copies):
                    pass
        return taken

    def _place(self, part: str, encoded: Encoded, copies: list[tuple[Bytes, Any]]) -> Encoded:
        memory = self._memory.get(part)
        if memory is None or len(memory) != encoded.nbytes:
            memory = self._memory[part] = np.empty(encoded.nbytes, np.uint8)
        arrays: dict[str, tuple[Kind, Any]] = {}
        at = 0
        for name, (kind, value) in encoded.arrays.items():
            target = memory[at : at + kind.nbytes]
            at += kind.nbytes
            arrays[name] = (kind, target)
            copies.append((target, value))
        return Encoded(encoded.json, arrays)


def _copy(target: Bytes, value: Any) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.numel():
        # One copy from wherever it is, however it lies.
        torch.from_numpy(target).view(value.dtype).reshape(value.shape).copy_(value.detach())
    else:
        np.copyto(target, bytes_of(value))


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
