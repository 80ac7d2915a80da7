"""Mixes: where they end, exact counts in every lane, and sources that are paused."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from data import Numbers
from midepoch.order.turns import spans
from midepoch.testing import assert_resumes_exactly
from pairs import covering


def always(row: dict[str, Any]) -> bool:
    return True


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    filtered=st.booleans(),
)
@settings(max_examples=80)
def test_stop_all_ends_with_the_last_output_of_the_last_source(
    numbers: Numbers, sizes: list[int], weights: list[int], filtered: bool
) -> None:
    sources: list[Any] = [numbers(1000 * i, 1000 * i + size) for i, size in enumerate(sizes)]
    if filtered:
        sources = [source.filter(lambda row: row["n"] % 1000 % 3 == 0) for source in sources]
        sizes = [-(-size // 3) for size in sizes]
    mixed = midepoch.mix(sources, weights[: len(sizes)], seed=1, stop="all")
    found = [row["n"] // 1000 for row in mixed]
    done = Counter(found)
    assert all(done[source] >= size for source, size in enumerate(sizes))
    before = Counter(found[:-1])
    assert any(before[source] < size for source, size in enumerate(sizes)), "nothing comes after that"
    if len(set(sizes)) == 1 and len(set(weights[: len(sizes)])) == 1:
        assert len(found) == sum(sizes)


@pytest.mark.parametrize(
    ("lanes", "shuffled", "stop"),
    [
        *covering([1, 8, 16], [False, True], ["all", "never"]),
        *(
            pytest.param(32, shuffled, stop, marks=pytest.mark.slow)
            for shuffled in (False, True)
            for stop in ("all", "never")
        ),
    ],
)
def test_counts_are_exact_in_every_lane_of_a_source_with_fewer_rows(
    numbers: Numbers, lanes: int, shuffled: bool, stop: str
) -> None:
    small, large = numbers(0, 10), numbers(1000, 1000 + 40 * lanes)
    if shuffled:
        small, large = small.shuffle(seed=1), large.shuffle(seed=2)
    mixed = midepoch.mix([small.filter(always), large.filter(always)], seed=3, stop=stop).with_lanes(lanes)
    used: Counter[int] = Counter()
    for lane in range(lanes):
        found = [row["n"] for row in islice(mixed.shard(lanes, lane), 60)]
        assert [sum(n < 1000 for n in found[at : at + 2]) for at in range(0, 60, 2)] == [1] * 30
        used.update(n for n in found if n < 1000)
    assert set(used) == set(range(10))
    assert max(used.values()) <= 2 * min(used.values()), "all rows of the small source about as often"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_source_with_fewer_rows_than_lanes_resumes_exactly(numbers: Numbers, ranks: int) -> None:
    def make(rank: int = 0, stop: str = "all") -> Any:
        small = numbers(0, 3).shuffle(seed=1).map(lambda row: {"n": row["n"]}, one_to_one=False, batched=True)
        mixed = midepoch.mix([small, numbers(1000, 1024).filter(always)], [1, 2], seed=3, stop=stop)
        return mixed.with_lanes(6).loader(4, rank=rank, world_size=ranks, last_batch="uneven")

    for rank in range(ranks):
        assert_resumes_exactly(lambda rank=rank: make(rank), epochs=1, steps=[1, 4, 7])


def test_every_row_of_a_small_source_comes_before_the_mix_ends(numbers: Numbers) -> None:
    mixed = midepoch.mix([numbers(0, 5).filter(always), numbers(1000, 1064).filter(always)], seed=3, stop="all")
    found = Counter(row["n"] for row in mixed.with_lanes(8))
    assert set(found) == {*range(5), *range(1000, 1064)}
    assert all(found[n] == 1 for n in range(1000, 1064)), (
        "the larger one has ended once in every lane, and not begun again"
    )


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_source_of_which_nothing_comes_leaves_its_positions_empty(numbers: Numbers, lanes: int) -> None:
    nothing = numbers(0, 20).filter(lambda row: row["n"] < 0)
    mixed = midepoch.mix([nothing, numbers(1000, 1012).filter(always)], seed=3, stop="all").with_lanes(lanes)
    assert sorted(row["n"] for row in mixed) == list(range(1000, 1012))
    alone = midepoch.mix([nothing, nothing], seed=3, stop="never").with_lanes(lanes)
    assert list(alone) == []


def test_one_output_of_a_source_is_found_from_every_lane(numbers: Numbers) -> None:
    rare = numbers(0, 40).shuffle(seed=5).filter(lambda row: row["n"] == 17)
    mixed = midepoch.mix([rare, numbers(1000, 1400).filter(always)], seed=3, stop="never").with_lanes(5)
    for lane in range(5):
        found = [row["n"] for row in islice(mixed.shard(5, lane), 80)]
        assert found.count(17) == 40


def test_weights_of_zero_are_spans_of_the_others() -> None:
    assert spans([0, 1, 3]) == (0, 1, 3)
    assert spans([0.5, 0, 0.5]) == (1, 0, 1)
    assert spans([0, 2]) == (0, 1)


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1]])
def test_a_mix_needs_a_weight_above_zero(numbers: Numbers, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="0 or more, and at least one above 0"):
        midepoch.mix([numbers(0, 5), numbers(10, 15)], weights)


@pytest.mark.parametrize("stop", ["first", "all"])
def test_a_source_of_weight_zero_never_comes_and_ends_nothing(numbers: Numbers, stop: str) -> None:
    mixed = midepoch.mix([numbers(0, 3), numbers(1000, 1020)], [0, 1], seed=1, stop=stop)
    assert [row["n"] for row in mixed] == list(range(1000, 1020))
    loader = mixed.filter(always).loader(4)
    assert len(list(loader)) == 5
    assert loader.estimated_len == 5


@pytest.mark.parametrize("filtered", [False, True])
def test_a_paused_source_continues_where_it_was(numbers: Numbers, filtered: bool) -> None:
    """Weights 1:1, then 1:0, then 1:1 again: every row of both once."""

    def make(weights: list[float]) -> Any:
        sources: Any = {"a": numbers(0, 60).shuffle(seed=1), "b": numbers(1000, 1040).shuffle(seed=2)}
        if filtered:
            sources = {name: source.filter(always) for name, source in sources.items()}
        return midepoch.mix(sources, weights, seed=3, stop="all").loader(1)

    seen: list[int] = []
    state = None
    for weights, steps in (([1, 1], 20), ([1, 0], 20), ([1, 1], 60)):
        loader = make(weights)
        if state is not None:
            loader.load_state_dict(state)
        passing = iter(loader)
        part = [int(next(passing)["n"][0]) for _ in range(steps)]
        if weights == [1, 0]:
            assert all(n < 1000 for n in part)
        seen += part
        state = loader.state_dict()
    assert sorted(seen) == [*range(60), *range(1000, 1040)]
    assert loader.changes == (
        "mix: weights [1.0, 1.0] became [1.0, 0.0]",
        "mix: weights [1.0, 0.0] became [1.0, 1.0]",
    )


def test_a_source_that_is_left_out_is_told_how_to_keep_its_place(
    numbers: Numbers, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = numbers(0, 40), numbers(1000, 1040)
    loader = midepoch.mix({"a": a, "b": b}).loader(2)
    next(iter(loader))
    state = loader.state_dict()
    midepoch.mix({"a": a}).loader(2).load_state_dict(state)
    assert "a weight of 0 would keep it" in caplog.text


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_counts_are_exact_in_every_span(docs: midepoch.Dataset) -> None:
    parts = [
        docs.slice(0, 100).shuffle(seed=1),
        docs.slice(100, 200).shuffle(seed=2),
        docs.slice(200, 300).shuffle(seed=3),
    ]
    mixed = midepoch.mix(parts, weights=[0.5, 0.3, 0.2], seed=7)
    found = [row["id"] // 100 for row in mixed]
    for at in range(0, len(found) // 10 * 10, 10):
        assert Counter(found[at : at + 10]) == {0: 5, 1: 3, 2: 2}
    assert 200 <= len(found) < 210, "until the first has nothing left"
    assert found[:12] == [0, 0, 1, 1, 2, 1, 2, 0, 0, 0, 0, 1], "pinned: an order is for ever"
    for number, part in enumerate(parts):
        mine = [row["id"] for row in mixed if row["id"] // 100 == number]
        assert mine == ids(part)[: len(mine)], "each source in its own order"


def test_maps_after_a_mix_are_run_by_its_sources(docs: midepoch.Dataset) -> None:
    mixed = midepoch.mix([docs.take(50), docs.skip(250).filter(odd)], seed=1)
    mapped = mixed.map(lambda row: {"double": row["id"] * 2}).select_columns(["id", "double"])
    assert not mapped.pipeline.node.stages
    assert [(row["id"], row["double"]) for row in mapped] == [(i, 2 * i) for i in ids(mixed)]
    assert mixed.filter(odd).pipeline.node.stages, "what drops rows would change the proportions"
    assert ids(mixed.filter(odd)) == [i for i in ids(mixed) if i % 2]
    assert mixed.select_columns("id").rename_columns({"id": "n"}).column_names == ["n"]


@pytest.mark.parametrize("stop", ["all", "never"])
def test_sources_begin_again_until_the_mix_stops(stop: str, docs: midepoch.Dataset) -> None:
    small, large = docs.slice(0, 10).shuffle(seed=1), docs.slice(100, 200).shuffle(seed=2)
    mixed = midepoch.mix([small, large], weights=[1, 1], seed=7, stop=stop)
    found = ids(islice(mixed, 260))
    if stop == "all":
        assert 199 <= len(found) <= 202
        assert sorted(i for i in found if i >= 100) == list(range(100, 200))
    else:
        assert len(found) == 260
    again = [i for i in found if i < 10]
    for at in range(0, len(again) // 10 * 10, 10):
        assert sorted(again[at : at + 10]) == list(range(10)), "every pass has every row"
    assert again[:10] != again[10:20], "shuffled anew"
    assert again[:10] == ids(small)
