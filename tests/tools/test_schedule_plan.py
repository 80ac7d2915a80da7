"""The consumption of schedules, against a naive simulation that draws row after row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import midepoch
from midepoch import Phase, Schedule
from midepoch.errors import ColumnError, DataNotFoundError
from midepoch.order import Shard
from midepoch.order.schedule import OPEN
from midepoch.order.turns import Turns, count, draw_of
from midepoch.tools import schedule as tool
from midepoch.tools.schedule import drawn, estimated, plan_schedule

NAMES = ("a", "b", "c")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1 / 3, 0.123456, 2.0]), min_size=1, max_size=4).filter(any),
    st.none() | st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(0, 9),
)
def test_counts_are_those_of_the_labels(weights: list[float], rows: int | None, stop: int, number: int) -> None:
    turns = Turns(tuple(weights), rows, 3, 0, 1, number)
    stop = stop if rows is None else min(stop, rows)
    labels = turns.sources(0, stop)
    assert count(turns, stop).tolist() == np.bincount(labels, minlength=len(weights)).tolist()
    for source in range(len(weights)):
        places = np.flatnonzero(labels == source)
        for nth in {0, len(places) // 2, len(places) - 1} & set(range(len(places))):
            assert draw_of(turns, source, nth) == places[nth]
        if rows == stop or not weights[source]:
            assert draw_of(turns, source, len(places)) is None


def naive(schedule: Schedule, names: tuple[str, ...], rows: Mapping[str, int], ranks: int, seed: int) -> dict[str, Any]:
    """Rows by phase and source, where each source was first missed, and where the first lane ended: row after row."""
    taken: Counter[tuple[str, str]] = Counter()
    missed: dict[str, int] = {}
    ends = []
    for rank in range(ranks):
        lane = Shard(rank, ranks)
        left = {name: most * len(range(rank, rows[name], ranks)) for name, most in schedule.max_passes.items()}
        segments = schedule.segments(names, lane)
        gone: set[str] = set()
        at, before, changes, labels = 0, -1, 0, None
        while (segment := segments.at(at)) is not None:
            if segment != before:
                before, changes, labels = segment, 0, None
            if labels is None:
                weights = tuple(
                    0.0 if name in gone else w for name, w in zip(names, segments.weights[segment], strict=True)
                )
                if not any(weights):
                    ends.append(at * ranks)
                    break
                stop = segments.stops[segment]
                ahead = stop - at if stop < OPEN else None
                turns = Turns(weights, ahead, seed, 0, rank, (segment << 20) + changes)
                labels = iter(turns.sources(0, ahead if ahead is not None else 20_000).tolist())
            name = names[next(labels)]
            if left.get(name) == 0:
                gone.add(name)
                missed[name] = min(missed.get(name, OPEN), at * ranks)
                changes, labels = changes + 1, None
                continue
            if name in left:
                left[name] -= 1
            taken[schedule.plan[segments.phases[segment]].name, name] += 1
            at += 1
    return {"taken": taken, "missed": missed, "end": min(ends, default=None)}


weights = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from([0.2, 0.5, 1, 0.3333, 3]) for name in NAMES}
).filter(bool)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    phases = []
    for number in range(draw(st.integers(1, 3))):
        phases.append(
            Phase(
                f"phase {number}",
                draw(weights) if number == 0 else draw(st.none() | weights),
                rows=draw(st.integers(1, 250)),
                final_weights=draw(st.none() | weights),
                global_batch_size=draw(st.sampled_from([None, 4])) if number == 0 else None,
            )
        )
    used = Schedule(phases).names
    return Schedule(phases, max_passes=draw(st.dictionaries(st.sampled_from(used), st.integers(1, 3))))


@settings(max_examples=25, deadline=None)
@given(schedules(), st.lists(st.integers(1, 150), min_size=3, max_size=3), st.integers(1, 5), st.integers(0, 3))
@example(Schedule([Phase("all", {"a": 1, "b": 1}, rows=300)], {"a": 1, "b": 1}), [60, 60, 1], 1, 0)
@example(Schedule([Phase("all", {"a": 1, "b": 1})], {"a": 2, "b": 1}), [60, 60, 1], 3, 0)  # no length
def test_rows_are_those_of_the_run(schedule: Schedule, rows: list[int], ranks: int, seed: int) -> None:
    sizes = dict(zip(NAMES, rows, strict=True))
    names = schedule.names
    limits = [(schedule.max_passes[name], sizes[name]) if name in schedule.max_passes else None for name in names]
    run = drawn(schedule, names, limits, ranks, seed)
    wanted = naive(schedule, names, sizes, ranks, seed)
    assert run is not None
    for phase, found in zip(schedule.plan, run.rows.tolist(), strict=True):
        assert found == [wanted["taken"][phase.name, name] for name in names]
    assert {names[event.source]: event.position for event in run.events} == wanted["missed"]
    assert (run.end[1] if run.end else None) == wanted["end"]
    # By shares alone: rounding, and spans of up to 1,000 rows, make the difference.
    even = estimated(schedule, names, limits, [1.0] * len(names))
    if not schedule.max_passes:
        segments = len(schedule.segments(names, Shard()).stops)
        assert abs(even.rows - run.rows).max() <= 1 + ranks * segments


LENGTHS = {"a": (40, 10), "b": (30, 30), "c": (20, 5)}
"""Rows of each source, and the tokens of a row."""


@pytest.fixture
def datasets(tmp_path: Path) -> dict[str, Any]:
    found = {}
    for name, (rows, length) in LENGTHS.items():
        # Lengths alternate around their mean, and the last rows are empty.
        lengths = [length - 2, length + 2] * (rows // 2 - 1) + [2 * length, 0]
        table = pa.table({"input_ids": [[1] * one for one in lengths], "text": ["é" * one for one in lengths]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
        found[name] = midepoch.from_files(str(tmp_path / f"{name}.parquet"))
    return found


def test_the_report_of_a_schedule_in_rows(datasets: dict[str, Any]) -> None:
    schedule = Schedule(
        [
            Phase("first", {"a": 0.75, "b": 0.25}, rows=38, global_batch_size=4),
            Phase("second", {"a": 1, "c": 1}, steps=10, global_batch_size=8),
        ],
        max_passes={"c": 1},
    )
    plan = plan_schedule(schedule, datasets)
    assert (plan.unit, plan.exact, plan.steps, plan.problem, plan.notes) == ("rows", True, 20, None, ())
    first, second = plan.phases
    assert (first.rows, first.steps, first.global_batch_size, first.sequence_length) == (40, 10, 4, None)
    assert [(use.source, use.rows, use.tokens) for use in first.uses] == [("a", 30, 300), ("b", 10, 300), ("c", 0, 0)]
    assert (first.start, first.stop, second.start, second.stop) == (0, 40, 40, 120)
    assert [(use.rows, use.passes) for use in second.uses] == [(60, 1.5), (0, 0.0), (20, 1.0)]
    assert [(use.source, use.rows, use.passes) for use in plan.totals] == [
        ("a", 90, 2.25),
        ("b", 10, 1 / 3),
        ("c", 20, 1),
    ]
    (cap,) = plan.caps
    labels = Turns((0.5, 0, 0.5), 80, 0, 0, 0, 1 << 20).sources(0, 80)
    place = int(np.flatnonzero(labels == 2)[20])  # the first draw without a row
    assert (cap.source, cap.max_passes, cap.phase, cap.position) == ("c", 1, "second", 40 + place)
    assert cap.step == 10 + place // 8 and cap.shares == {"a": 1.0}


def simulated_tokens(
    schedule: Schedule, lengths: Mapping[str, int], rows: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Rows by phase and source: document after document, in the shares of the weights."""
    names = schedule.names
    left = {name: most * rows[name] for name, most in schedule.max_passes.items()}
    segments = schedule.segments(names, Shard())
    found = {phase.name: dict.fromkeys(names, 0.0) for phase in schedule.plan}
    owed = dict.fromkeys(names, 0.0)
    at = 0
    while (segment := segments.at(at)) is not None:
        shares = {
            name: w if left.get(name) != 0 else 0.0 for name, w in zip(names, segments.weights[segment], strict=True)
        }
        total = sum(shares.values())
        if not total:
            break
        for name in names:
            owed[name] = owed[name] + shares[name] / total if shares[name] else 0.0
        name = max(names, key=lambda one: owed[one])
        owed[name] -= 1
        if name in left:
            left[name] -= 1
        found[schedule.plan[segments.phases[segment]].name][name] += 1
        at += lengths[name]
    return found


@pytest.mark.parametrize("max_passes", [{}, {"b": 4}, {"a": 8, "c": 3}])
def test_tokens_are_estimated_by_mean_lengths(datasets: dict[str, Any], max_passes: dict[str, int]) -> None:
    schedule = Schedule(
        [
            Phase("first", {"a": 1}, steps=20, global_batch_size=4, sequence_length=16),
            Phase("second", {"a": 0.7, "b": 0.3}, tokens=6000, sequence_length=32),
            Phase("third", steps=40, final_weights={"a": 0.2, "b": 0.2, "c": 0.6}),
        ],
        max_passes=max_passes,
    )
    plan = plan_schedule(schedule, datasets)
    wanted = simulated_tokens(
        schedule,
        {name: length for name, (_, length) in LENGTHS.items()},
        {name: rows for name, (rows, _) in LENGTHS.items()},
    )
    assert (plan.unit, plan.exact, plan.problem) == ("tokens", False, None)
    for phase in plan.phases:
        for use in phase.uses:
            assert use.rows is not None and use.passes is not None
            assert abs(use.rows - wanted[phase.name][use.source]) <= 4, (phase.name, use, wanted)
            assert use.passes == pytest.approx(use.rows / LENGTHS[use.source][0], abs=0.03)
    assert [phase.tokens for phase in plan.phases] == pytest.approx([20 * 4 * 16, 47 * 4 * 32, 40 * 4 * 32], abs=1)
    assert {cap.source for cap in plan.caps} == set(max_passes)
    for use in plan.totals:
        if use.source in max_passes:
            assert use.passes == pytest.approx(max_passes[use.source])


def test_a_token_for_the_end_of_each_document(datasets: dict[str, Any]) -> None:
    schedule = Schedule([Phase("all", {"a": 1}, tokens=4390)])
    sources = {"a": datasets["a"]}
    without, added = plan_schedule(schedule, sources), plan_schedule(schedule, sources, eos=True)
    assert without.sizes["a"].tokens == 400 and added.sizes["a"].tokens == 439  # one document is empty
    assert without.totals[0].rows == 439 and added.totals[0].rows == 400
    with pytest.raises(ColumnError, match="nothing"):
        plan_schedule(schedule, sources, column="nothing")
    with pytest.raises(ColumnError, match="column 'text' is text, and its characters are not tokens.*tokenizer"):
        plan_schedule(schedule, sources, column="text")


class Words:
    """A tokenizer with a token for each word."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


def test_text_is_tokenized_and_a_sample_has_an_error(datasets: dict[str, Any], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 200, 5000)
    pq.write_table(pa.table({"body": ["word " * count for count in counts]}), tmp_path / "big.parquet")
    sources = {"big": midepoch.from_files(str(tmp_path / "big.parquet")), "b": datasets["b"]}
    schedule = Schedule([Phase("all", {"big": 1, "b": 1}, tokens=100_000)], {"big": 1})
    plan = plan_schedule(schedule, sources, column={"big": "body"}, tokenizer=Words())
    true, error = int(counts.sum()), plan.errors["big"]
    assert plan.sizes["b"].tokens == 900 and set(plan.errors) == {"big"} and 0.01 < error < 0.1
    assert plan.sizes["big"].tokens != true and plan.sizes["big"].tokens == pytest.approx(true, rel=error)
    assert plan.unchecked == () and any(f"big within {100 * error:.1f} %" in note for note in plan.notes)
    ended = plan_schedule(schedule, sources, column={"big": "body"}, tokenizer=Words(), eos=True)
    assert ended.sizes["big"].tokens > plan.sizes["big"].tokens  # type: ignore[operator]
    small = midepoch.from_dict({"text": ["a b c"] * 10 + [""] * 10})
    plan = plan_schedule(Schedule([Phase("all", {"a": 1}, tokens=60)]), {"a": small}, tokenizer=Words(), eos=True)
    assert plan.sizes["a"].tokens == 40 and plan.totals[0].passes == 1.5 and not plan.errors
    plan = plan_schedule(Schedule([Phase("all", {"a": 1}, tokens=60)], {"a": 1}), {"a": small})
    assert plan.unchecked == ("a",) and plan.totals[0].passes is None
    assert plan.notes == (
        "the tokens of a are not known, so rows and passes are not counted: there is no column 'input_ids'. Pass a "
        "tokenizer for text (--tokenizer), or the column with the tokens (--column).",
        "max_passes of a cannot be checked without the number of tokens.",
    )
    with pytest.raises(ValueError, match="column of 'z': the sources are a"):
        plan_schedule(Schedule([Phase("all", {"a": 1}, tokens=60)]), {"a": small}, column={"z": "text"})


def test_without_paths_only_weights_are_known(datasets: dict[str, Any], tmp_path: Path) -> None:
    rows = Schedule([Phase("all", {"a": 3, "b": 1}, rows=100)], {"b": 1})
    plan = plan_schedule(rows)
    assert [(use.rows, use.tokens, use.passes, use.share) for use in plan.totals] == [
        (75, None, None, 0.75),
        (25, None, None, 0.25),
    ]
    assert not plan.caps
    assert plan.notes == (
        "max_passes of b cannot be checked without the data.",
        "passes over a, b are not counted. Name the paths of these sources.",
    )
    tokens = Schedule([Phase("all", {"a": 3, "b": 1}, tokens=1000)])
    plan = plan_schedule(tokens)
    assert [(use.rows, use.tokens, use.passes) for use in plan.totals] == [(None, 750, None), (None, 250, None)]
    assert "no lengths of documents are known" in plan.notes[0]
    plan = plan_schedule(tokens, {"a": datasets["a"]})
    assert [(use.rows, use.tokens, use.passes) for use in plan.totals] == [(75, 750, 1.875), (25, 250, None)]
    assert "the lengths of documents of b are not known" in plan.notes[0]
    assert plan.notes[1] == "passes over b are not counted. Name the paths of these sources."
    plan = plan_schedule(Schedule(tokens.phases, sources={"b": str(tmp_path / "b.parquet"), "other": "nowhere"}))
    assert set(plan.sizes) == {"b"}
    with pytest.raises(ValueError, match="source 'z' has no weight in any phase. The sources are a, b"):
        plan_schedule(tokens, {"z": datasets["a"]})
    with pytest.raises(TypeError, match="a source is a dataset or its paths, got 3"):
        plan_schedule(tokens, {"a": 3})
    with pytest.raises(DataNotFoundError):
        plan_schedule(tokens, {"a": str(tmp_path / "nothing.parquet")})


def test_phases_that_cannot_be_filled_and_phases_without_an_end(datasets: dict[str, Any]) -> None:
    short = Schedule([Phase("one", {"a": 1}, rows=50), Phase("two", rows=100, global_batch_size=2)], {"a": 3})
    plan = plan_schedule(short, {"a": datasets["a"]})
    assert plan.problem == (
        "phase 'two' cannot be filled: all of its sources have reached max_passes at 120 rows. The run ends there. "
        "Raise max_passes, or shorten the run."
    )
    assert [phase.rows for phase in plan.phases] == [50, 70] and plan.caps[0].shares == {}
    open_end = Schedule([Phase("one", {"a": 1}, rows=50), Phase("two", {"a": 1, "b": 1})], {"a": 3, "b": 1})
    plan = plan_schedule(open_end, {name: datasets[name] for name in ("a", "b")})
    assert plan.problem is None and plan.notes == ("the run ends at 150 rows: all passes are used up.",)
    assert [use.rows for use in plan.totals] == [120, 30] and plan.phases[-1].stop is None
    endless = Schedule([Phase("one", {"a": 1, "b": 3})], {"a": 1})
    plan = plan_schedule(endless, {name: datasets[name] for name in ("a", "b")})
    assert "phase 'one' has no end" in plan.notes[0] and plan.problem is None
    assert [(use.rows, use.passes, use.share) for use in plan.totals] == [(40, 1.0, 0.0), (None, None, 1.0)]
    assert plan.phases[-1].stop is None and plan.phases[0].rows is None


def test_many_rows_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule([Phase("all", {"a": 2, "b": 1}, rows=10**12)])
    plan = plan_schedule(schedule)
    assert not plan.exact and plan.totals[0].rows == round(10**12 * 2 / 3)
    with monkeypatch.context() as patch:
        patch.setattr(tool, "_EXACT_STRETCHES", 3)
        assert plan_schedule(Schedule([Phase("all", {"a": 1}, rows=8)]), ranks=3).exact
        assert not plan_schedule(Schedule([Phase("all", {"a": 1}, rows=8)]), ranks=4).exact


def test_the_order_of_the_sources_is_that_of_the_mix(datasets: dict[str, Any]) -> None:
    """Counts that cannot be exact are rounded by the order of the sources."""
    schedule = Schedule([Phase("all", {"a": 0.4567, "b": 0.5433}, rows=777)])
    for names in (("a", "b"), ("b", "a")):
        plan = plan_schedule(schedule, {name: datasets[name] for name in names}, seed=5)
        share = schedule.segments(names, Shard()).weights[0]
        labels = Turns(share, 777, 5, 0, 0, 0).sources(0, 777)
        assert [use.source for use in plan.totals] == list(names)
        assert [use.rows for use in plan.totals] == np.bincount(labels).tolist()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule([Phase("one", {"a": 0.7, "b": 0.3}, rows=50), Phase("two", rows=70, final_weights={"b": 1, "c": 2})]),
        Schedule([Phase("one", {"a": 0.4567, "b": 0.5433}, rows=90), Phase("two", {"b": 1, "c": 1}, rows=60)], {"b": 1, "c": 1}),
        Schedule([Phase("one", {"a": 1, "b": 1, "c": 1}, rows=200)], {"a": 1, "b": 1, "c": 2}),
    ],
)  # fmt: skip
def test_the_plan_is_that_of_a_real_run(datasets: dict[str, Any], schedule: Schedule, ranks: int) -> None:
    sources = {name: datasets[name].map(Named(name)) for name in schedule.names}
    mixed = midepoch.mix(sources, schedule, seed=4).with_lanes(ranks).with_format("python")
    seen = Counter(name for batch in mixed.loader(ranks) for name in batch["of"])
    plan = plan_schedule(schedule, {name: datasets[name] for name in schedule.names}, ranks=ranks, seed=4)
    assert {use.source: use.rows for use in plan.totals} == {name: seen[name] for name in schedule.names}
    assert (plan.problem is not None) is (sum(seen.values()) < schedule.total)


class Named:
    """Adds the name of the source to a row."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"of": self.name}
