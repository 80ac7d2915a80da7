"""A mix that is changed on resume: sources resume where they were, and what was begun is finished as it was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest

import midepoch
from data import Numbers
from midepoch.errors import CheckpointMismatchError


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_sources_of_a_changed_mix_resume_where_they_were(
    docs: midepoch.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {i: docs.slice(i * 60, i * 60 + 60).shuffle(seed=i).filter(lambda row: row["id"] % 5 > 0) for i in range(4)}

    def loader(chosen: list[int], weights: list[float]) -> Any:
        return midepoch.mix([parts[i] for i in chosen], weights=weights, stop="never").loader(6, collate_fn=ids)

    before = loader([0, 1, 2], [0.5, 0.3, 0.2])
    seen = [i for batch in islice(before, 7) for i in batch]
    assert before.changes == ()
    after = loader([3, 2, 0], [0.2, 0.6, 0.2])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert "weights [0.5, 0.3, 0.2] became [0.2, 0.6, 0.2]" in after.changes[0]
    assert "sources [1] left" in after.changes[0] and "sources [0] joined" in after.changes[0]
    assert "another mix" in caplog.text
    passing = iter(after)
    seen += [i for batch in islice(passing, 9) for i in batch]
    for number in (0, 2, 3):
        mine = [i for i in seen if i // 60 == number]
        whole = ids(parts[number])
        assert mine[: len(whole)] == whole[: len(mine)], f"source {number} goes on where it was"
    # The change is part of the state, and going on from there is exact.
    again = loader([3, 2, 0], [0.2, 0.6, 0.2])
    again.load_state_dict(json.loads(json.dumps(after.state_dict())))
    assert again.changes == after.changes
    assert list(islice(again, 5)) == list(islice(passing, 5))
    same_mix = loader([0, 1, 2], [0.5, 0.3, 0.2])
    same_mix.load_state_dict(before.state_dict())
    assert same_mix.changes == ()


def always(row: dict[str, Any]) -> bool:
    return True


def ns(rows: Any) -> list[int]:
    return [row["n"] for row in rows]


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


def as_document(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [row["n"]] * (1 + row["n"] % 5)}


BEHIND: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "nothing": lambda mixed: mixed,
    "map": lambda mixed: mixed.map(lambda row: {"n": row["n"]}, with_indices=False),
    "filter": lambda mixed: mixed.filter(lambda row: row["n"] % 3 > 0),
    "flat_map": lambda mixed: mixed.flat_map(lambda row: [row] * (row["n"] % 3)),
    "shuffle": lambda mixed: mixed.shuffle(seed=1, window=10),
    "batched": lambda mixed: mixed.map(lambda b: {"s": b["n"]}, True, 6),
    "pack": lambda mixed: mixed.map(as_document).pack(7),
    "filter and pack": lambda mixed: mixed.filter(lambda row: row["n"] % 3 > 0).map(as_document).pack(7),
    "best fit": lambda mixed: mixed.map(as_document).pack(25, strategy="best_fit", window=8),
}


def values(row: dict[str, Any]) -> list[int]:
    if "input_ids" not in row:
        return [row["n"]]
    return [int(token) for token in np.asarray(row["input_ids"])[np.asarray(row["segment_ids"]) > 0]]


def check_goes_on(name: str, seen: list[int], bounds: tuple[int, int]) -> None:
    """Of a source, what was seen are its first numbers (of those that the steps leave), each as often as it should be."""
    mine = Counter(n for n in seen if bounds[0] <= n < bounds[1])
    assert mine, "it goes on"
    times = {"flat_map": lambda n: n % 3, "filter": lambda n: int(n % 3 > 0)}
    packed = {"pack": lambda n: 1 + n % 5, "best fit": lambda n: 1 + n % 5}
    packed["filter and pack"] = lambda n: (1 + n % 5) * (n % 3 > 0)
    expected = {**times, **packed}.get(name, lambda n: 1)
    last = max(mine)
    for n in range(bounds[0], last - 25):  # the last ones may not be out yet: windows, sequences
        assert mine[n] == expected(n), f"{n} came {mine[n]} times, not {expected(n)}"
    assert all(count <= expected(n) for n, count in mine.items())


def alternating(names: Iterable[str]) -> list[Any]:
    """Names and numbers of steps: each name with every second number, and the next one with the others."""
    return [
        pytest.param(name, steps, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, name in enumerate(names)
        for j, steps in enumerate((30, 31, 33, 34, 36))
    ]


@pytest.mark.parametrize(("name", "steps"), alternating(BEHIND))
def test_changed_weights_lose_and_repeat_nothing(name: str, steps: int, numbers: Numbers) -> None:
    a, b = numbers(0, 1000), numbers(10000, 11000)

    def make(weights: list[float]) -> Any:
        return BEHIND[name](midepoch.mix([a, b], weights=weights, seed=1, stop="all")).loader(1, collate_fn=list)

    loader = make([1, 1])
    seen = [value for batch in islice(loader, steps) for row in batch for value in values(row)]
    state = copied(loader.state_dict())
    for _ in range(2):  # changed, and then again
        loader = make([3, 1])
        loader.load_state_dict(state)
        seen += [value for batch in islice(loader, 60) for row in batch for value in values(row)]
        state = copied(loader.state_dict())
    for bounds in ((0, 1000), (10000, 11000)):
        check_goes_on(name, seen, bounds)


@pytest.mark.parametrize(("name", "steps"), alternating(["nothing", "filter", "flat_map", "pack", "filter and pack"]))
def test_removed_and_added_sources_lose_and_repeat_nothing(name: str, steps: int, numbers: Numbers) -> None:
    parts = {i: numbers(10_000 * i, 10_000 * i + 1000) for i in range(4)}

    def make(chosen: list[int], weights: list[float]) -> Any:
        mixed = midepoch.mix([parts[i] for i in chosen], weights=weights, seed=1, stop="all")
        return BEHIND[name](mixed).loader(1, collate_fn=list)

    loader = make([0, 1, 2], [1, 1, 1])
    seen = [value for batch in islice(loader, steps) for row in batch for value in values(row)]
    state = copied(loader.state_dict())
    loader = make([2, 0, 3], [1, 2, 1])
    loader.load_state_dict(state)
    assert "sources [1] left" in loader.changes[0]
    seen += [value for batch in islice(loader, 90) for row in batch for value in values(row)]
    for i in (0, 2, 3):
        check_goes_on(name, seen, (10_000 * i, 10_000 * i + 1000))


def test_a_source_cannot_be_removed_in_the_middle_of_a_window(numbers: Numbers) -> None:
    a, b = numbers(0, 100), numbers(1000, 1100)
    loader = midepoch.mix([a, b], seed=1).shuffle(seed=1, window=20).loader(1, collate_fn=ns)
    list(islice(loader, 5))
    other = midepoch.mix([a], seed=1).shuffle(seed=1, window=20).loader(1, collate_fn=ns)
    with pytest.raises(CheckpointMismatchError, match="delivered only a part of their results"):
        other.load_state_dict(loader.state_dict())


def test_a_source_is_removed_after_some_lanes_have_ended(numbers: Numbers) -> None:
    a, b = numbers(0, 40), numbers(100, 140)

    def make(parts: list[Any]) -> Any:
        return midepoch.mix(parts, seed=1).with_lanes(2).loader(1, collate_fn=ns)

    loader = make([a.filter(always), b.filter(lambda row: row["n"] >= 118)])
    seen = [n for batch in islice(loader, 20) for n in batch]
    after = make([a.filter(always)])
    after.load_state_dict(copied(loader.state_dict()))
    seen += [n for batch in after for n in batch]
    assert sorted(n for n in seen if n < 100) == list(range(40))


def counted(rows: list[int]) -> set[int]:
    return set(Counter(rows).values())


@pytest.mark.parametrize("order", [["b", "a"], ["c", "a", "b"]])
def test_a_window_is_finished_where_sources_were_reordered(order: list[str], numbers: Numbers) -> None:
    parts = {"a": numbers(0, 60), "b": numbers(1000, 1060), "c": numbers(2000, 2060)}

    def make(names: list[str]) -> midepoch.Dataset:
        return midepoch.mix({name: parts[name] for name in names}, seed=1, stop="all").shuffle(seed=1, window=10)

    before = make(["a", "b"])
    passing = iter(before)
    seen = ns(islice(passing, 13))
    after = make(order)
    after.load_state_dict(copied(before.state_dict()))
    rest = iter(after)
    window = ns(islice(rest, 7))
    assert window == ns(islice(passing, 7)), "the window that was begun is ended as it was"
    seen += window + ns(islice(rest, 60))
    assert counted([n for n in seen if n < 2000]) == {1}


def test_a_mix_is_not_changed_where_some_ranks_have_ended(numbers: Numbers) -> None:
    a, b = numbers(0, 40), numbers(100, 140)

    def make(weights: list[float], rank: int) -> Any:
        mixed = midepoch.mix([a.filter(lambda row: row["n"] % 4 > 0), b], weights, seed=1).with_lanes(2)
        return mixed.loader(1, collate_fn=ns, rank=rank, world_size=2, last_batch="uneven")

    loaders = [make([1, 1], rank) for rank in range(2)]
    assert list(loaders[1])
    next(iter(loaders[0]))
    states = [loader.state_dict() for loader in loaders]
    assert {state["epoch"] for state in states} == {0}
    with pytest.raises(CheckpointMismatchError, match="others had not"):
        make([3, 1], 0).load_state_dict(states)
    again = make([1, 1], 1)
    again.load_state_dict(states)
    assert list(again) == []


@pytest.mark.parametrize("kind", ["mix", "zip"])
@pytest.mark.parametrize("cut", range(3, 34, 3))
def test_a_document_of_an_inner_mix_is_finished(kind: str, cut: int, numbers: Numbers) -> None:
    a, b, c = numbers(0, 400), numbers(10_000, 10_400), numbers(20_000, 20_400)

    def make(weights: list[float]) -> Any:
        inner = midepoch.mix({"a": a, "b": b}, weights, seed=4).filter(lambda row: row["n"] % 4 == 0)
        if kind == "mix":
            outer = midepoch.mix({"i": inner, "c": c}, [3, 1], seed=3)
        else:
            outer = midepoch.zip([inner, c.rename_columns({"n": "m"})])
        nine = outer.map(lambda row: {"input_ids": [row["n"]] * 9}).select_columns("input_ids")
        return nine.pack(7).loader(1, collate_fn=list)

    loader = make([1, 1])
    seen = [value for batch in islice(loader, cut) for row in batch for value in values(row)]
    after = make([1, 5])
    after.load_state_dict(copied(loader.state_dict()))
    seen += [value for batch in islice(after, 40) for row in batch for value in values(row)]
    last = seen[-1]
    assert counted([n for n in seen if n != last]) == {9}


@pytest.mark.parametrize("cut", range(2, 37, 2))
def test_a_source_of_an_inner_mix_is_removed(cut: int, numbers: Numbers) -> None:
    a, b, c = numbers(0, 400), numbers(10_000, 10_400), numbers(20_000, 20_400)

    def make(chosen: dict[str, Any]) -> Any:
        inner = midepoch.mix(chosen, seed=5, stop="never")
        return (
            midepoch.mix({"x": inner, "c": c}, seed=2, stop="all").map(as_document).pack(7).loader(1, collate_fn=list)
        )

    loader = make({"a": a, "b": b})
    seen = [value for batch in islice(loader, cut) for row in batch for value in values(row)]
    after = make({"a": a})
    after.load_state_dict(copied(loader.state_dict()))
    seen += [value for batch in islice(after, 40) for row in batch for value in values(row)]
    found, last = Counter(seen), seen[-1]
    for n, count in found.items():
        if n != last and not 10_000 <= n < 20_000:
            assert count == 1 + n % 5, n


def test_a_mix_below_a_window_that_was_begun_is_not_changed(numbers: Numbers) -> None:
    a, b, c = numbers(0, 100), numbers(1000, 1100), numbers(5000, 5015)

    def behind(weights: list[float]) -> Any:
        return midepoch.concat([c, midepoch.mix([a, b], weights, seed=1)]).shuffle(seed=1, window=10)

    def inside(weights: list[float]) -> Any:
        inner = midepoch.mix({"p": numbers(0, 30), "q": numbers(1000, 1030)}, weights, seed=1)
        return midepoch.mix({"i": inner, "c": c}, seed=2, stop="all").shuffle(seed=1, window=50)

    for make, cut in ((behind, 14), (inside, 20)):
        stream = make([1, 1])
        passing = iter(stream)
        for _ in range(cut):
            next(passing)
        state = copied(stream.state_dict())
        with pytest.raises(CheckpointMismatchError, match="delivered only a part of their results"):
            make([1, 9]).load_state_dict(state)
        make([1, 1]).load_state_dict(state)
