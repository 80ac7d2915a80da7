"""Plain iteration: a dataset and its shards, resumed in other numbers of them, with a step that fails now and then.

A walk is drawn from the seed of a history. It needs no cluster: what it takes does not depend on time.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np

import midepoch
from compositions import DRAWN, PIPELINES
from midepoch.errors import MapError
from midepoch.order import Shard

_MAKE = {**PIPELINES, **DRAWN}
_MOST = 1000


class FailsOnce:
    """A step that raises an error at some of its calls, which are as good as any if they are made again."""

    def __init__(self, first: int, calls: int) -> None:
        self._first, self._stop, self._calls = first, first + calls, 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        if self._first <= self._calls < self._stop:
            raise ValueError("once")
        return row


def walk(pipeline: str, draws: random.Random) -> str:
    """Iterate over an epoch in several legs, and return the rule that is broken, or ""."""
    try:
        return _walk(pipeline, draws)
    except Exception as problem:
        return f"plain iteration of {pipeline!r}: {type(problem).__name__}: {problem}"


def _walk(pipeline: str, draws: random.Random) -> str:
    pipeline, epoch = pipeline if pipeline in _MAKE else "rows", draws.randrange(2)
    found: list[Any] = []
    states: list[Any] = []
    alone, is_over = True, False
    while not is_over:
        shards, size = draws.choice((1, 1, 1, 2, 3)), draws.choice((0, 0, 1, 2, 5))
        alone = alone and shards == 1
        walkers = [_Walker(pipeline, Shard(index, shards), epoch, states, size, draws) for index in range(shards)]
        count = draws.choice((1, 2, 3, 5, 8, 40))
        has_more = [one.take(count) for one in walkers]
        is_over = not all(has_more)
        for one in walkers:
            if is_over:
                one.take(_MOST)
            found += one.rows
        states = [one.dataset.state_dict() for one in walkers]
        if walkers[0].dataset.state_is_global and not is_over:
            if len({state["position"] for state in states}) > 1:  # rows that a filter leaves out may come next
                return f"after {count} rows, the shards of {pipeline!r} have the states {states}"
            states = states[:1]
        if len(found) > _MOST:
            break
    expected = _whole(pipeline, epoch)
    if Counter(found) != Counter(expected) or (alone and found != list(expected)):
        return f"plain iteration of {pipeline!r} in epoch {epoch} gave {found}, not {list(expected)}"
    return ""


class _Walker:
    """A shard from a state on."""

    def __init__(
        self, pipeline: str, shard: Shard, epoch: int, states: list[Any], size: int, draws: random.Random
    ) -> None:
        made = _made(pipeline).map(FailsOnce(draws.randint(1, 30), draws.choice((0, 0, 1, 4))))
        self.dataset = made if shard.count == 1 else made.shard(shard.count, shard.index)
        self.dataset.set_epoch(epoch)
        if states:
            self.dataset.load_state_dict(states[0] if len(states) == 1 else states)
        self.rows: list[Any] = []
        self._items = self.dataset.iter(size) if size else iter(self.dataset)
        self._in_batches = bool(size)

    def take(self, count: int) -> bool:
        """Take rows, at least so many. Returns False at the end of the epoch."""
        before = len(self.rows)
        while len(self.rows) - before < count:
            try:
                item = next(self._items)
            except StopIteration:
                return False
            except MapError:
                continue
            values = item["id" if "id" in item else "input_ids"]
            self.rows += [_row(value) for value in (values if self._in_batches else [values])]
        return True


def _row(value: Any) -> Any:
    """Return a value that identifies a row: its number, or the tokens of a packed sequence without padding."""
    numbers = np.asarray(value).reshape(-1).tolist()
    return tuple(number for number in numbers if number >= 0)


@lru_cache
def _made(pipeline: str) -> midepoch.Dataset:
    return _MAKE[pipeline]().with_format("numpy")


@lru_cache
def _whole(pipeline: str, epoch: int) -> tuple[Any, ...]:
    dataset = _made(pipeline).map(FailsOnce(0, 0))
    dataset.set_epoch(epoch)
    return tuple(_row(row["id"] if "id" in row else row["input_ids"]) for row in dataset)
