"""Parallel execution of an action over thousands of files: by threads of this process, or by a cluster.

An action is a module-level function with bound arguments (``functools.partial``), so that it can be sent to another
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_THREADS = 16


class Spread(Protocol):
    """Executor that returns the results of an action for all items in order, raises its errors and reports progress."""

    def __call__(self, action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]: ...


def threads(action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]:
    """Run an action in threads: footers are mostly waited for, and read without the interpreter lock."""
    results = []
    with ThreadPoolExecutor(max_workers=max(1, min(_THREADS, len(items)))) as pool:
        for number, result in enumerate(pool.map(action, items), 1):
            results.append(result)
            done(number)
    return results


_chosen: ContextVar[Spread] = ContextVar("spread", default=threads)


@contextmanager
def spread_over(spread: Spread) -> Iterator[None]:
    """Use an executor for the indexes that are created in this context."""
    token = _chosen.set(spread)
    try:
        yield
    finally:
        _chosen.reset(token)


def for_all(action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]:
    """Run an action for all items with the current executor."""
    return _chosen.get()(action, items, done)
