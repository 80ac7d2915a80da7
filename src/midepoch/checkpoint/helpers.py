"""Threads that help, where there can still be any: at the end of a program Python starts none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Helper:
    """One thread beside the caller's, started when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = f"midepoch-{name}"
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, action: Callable[..., T], *arguments: Any) -> Future[T]:
        """Do something in the thread; here and now if that cannot be."""
        try:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix=self._name)
            return self._pool.submit(action, *arguments)
        except RuntimeError:
            done: Future[T] = Future()
            try:
                done.set_result(action(*arguments))
            except BaseException as problem:
                done.set_exception(problem)
            return done

    def end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def in_threads(count: int, action: Callable[[Any], Any], values: Iterable[Any]) -> None:
    """Do something with each value, several at a time; raises the first error."""
    values = list(values)
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="midepoch-many") as pool:
            futures = [pool.submit(action, value) for value in values]
    except RuntimeError:
        for value in values:
            action(value)
        return
    for future in futures:
        future.result()
