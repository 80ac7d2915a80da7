"""Who looks through thousands of files: the threads of this process, unless a cluster is asked to.

An action is a function at the top of a module with its arguments bound (``functools.partial``), so that it can be sent
to another process.
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
    """The results of an action for all items, in their order. Raises what it raised. Tells how many are done."""

    def __call__(self, action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]: ...


def threads(action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]:
    """By threads: footers are waited for, and most of reading them is done without the interpreter's lock."""
    results = []
    with ThreadPoolExecutor(max_workers=max(1, min(_THREADS, len(items)))) as pool:
        for number, result in enumerate(pool.map(action, items), 1):
            results.append(result)
            done(number)
    return results


_chosen: ContextVar[Spread] = ContextVar("spread", default=threads)


@contextmanager
def spread_over(spread: Spread) -> Iterator[None]:
    """Indexes that are made meanwhile are made there."""
    token = _chosen.set(spread)
    try:
        yield
    finally:
        _chosen.reset(token)


def for_all(action: Callable[[Any], T], items: Sequence[Any], done: Callable[[int], None]) -> list[T]:
    """An action for all items, by whoever was chosen."""
    return _chosen.get()(action, items, done)
