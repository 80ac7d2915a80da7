"""One thread of a process at a time for each block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Who is at which block."""

    def __init__(self) -> None:
        self._busy: set[int] = set()
        self._done = threading.Condition()

    @contextmanager
    def held(self, block: int, *, wait: bool) -> Iterator[bool]:
        """Yields whether the block is this thread's: always, if it waits for its turn."""
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
