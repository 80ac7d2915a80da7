"""Locks by block number between the threads of a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class BlockTurns:
    """Set of blocks that are locked by a thread."""

    def __init__(self) -> None:
        self._busy: set[int] = set()
        self._done = threading.Condition()

    @contextmanager
    def held(self, block: int, *, wait: bool) -> Iterator[bool]:
        """Lock a block. Yield True if this thread holds it, which is always so with ``wait``."""
        with self._done:
            while wait and block in self._busy:
                self._done.wait()
            mine = block not in self._busy
            if mine:
                self._busy.add(block)
        try:
            yield mine
        finally:
            if mine:
                with self._done:
                    self._busy.discard(block)
                    self._done.notify_all()
