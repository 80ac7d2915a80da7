"""What is done after a position is not delivered, for every pipeline, on every cluster size, after any resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order.intervals import Intervals
from midepoch.testing import same
from states import lanes_of, with_lane, with_more
from test_conformance import IN_LANES, PIPELINES, REPEATED, SHARDS

ALONE = [*SHARDS, "take", "skip", "zip"]  # one lane only
Make = Callable[..., midepoch.Loader]
Key = tuple[int, int]
REASONS = ("excluded", "ahead")


@pytest.fixture
def open_ds(small_files: list[str]) -> Callable[[], midepoch.Dataset]:
    """A new dataset of the files, which are opened once: that is a fifth of the time of a resume."""
    pipeline = midepoch.from_files(small_files).pipeline
    return lambda: midepoch.Dataset(pipeline)


def outputs_by_lane(state: dict[str, Any]) -> dict[int, int]:
    return {lane: cursor["taken"] for lane, cursor in lanes_of(state).items()}


def numbered(make: Make) -> tuple[list[Key], list[Any], dict[str, Any]]:
    """Return the lane and number of each output of an epoch, the outputs, and the state after the first."""
    loader = make(1)
    keys: list[Key] = []
    values, states = [], []
    before: dict[int, int] = {}
    for batch in loader:
        states.append(loader.state_dict())
        now = outputs_by_lane(states[-1])
        lane = next(lane for lane in now if now[lane] > before.get(lane, 0))
        keys.append((lane, now[lane] - 1))
        values.append(batch)
        before = now
    return keys, values, states[0]


def with_done(state: dict[str, Any], keys: list[Key], reasons: tuple[str, ...] = REASONS) -> dict[str, Any]:
    """Return a state with outputs that are done, for each of the reasons in turn."""
    for place, reason in enumerate(reasons):
        mine = keys[place :: len(reasons)]
        for lane in {lane for lane, _ in mine}:
            done = Intervals.from_positions([number for at, number in mine if at == lane])
            state = with_lane(state, lane, **{reason: done.encode()})
    return state


def rest(make: Make, state: Any, size: int = 1, **options: Any) -> list[Any]:
    loader = make(size, **options)
    loader.load_state_dict(state)
    return list(loader)


def rows_in(batch: Any) -> int:
    return batch.num_rows if hasattr(batch, "num_rows") else len(next(iter(batch.values())))


def chosen(keys: list[Key], seed: int) -> list[Key]:
    """A run, some scattered ones, and the last two."""
    rng = np.random.default_rng(seed)
    later = keys[1:]
    run = later[len(later) // 4 : len(later) // 2]
    return sorted({*run, *(key for key in later if rng.random() < 0.2), *later[-2:]})


IN_ONE = [(name, 1) for name in PIPELINES if name not in SHARDS]
IN_THREE = [(name, 3) for name in IN_LANES if name not in ALONE]
SPARED = {*REPEATED} - {"pack", "filter in order"}  # these take branches of their own here
SLOW = {(name, lanes) for name in SPARED for lanes in (1, 3)}
# Pipelines with lanes have one and three of them in turn, but for two whose branches no other takes.
IN_TURN = [name for name, lanes in IN_THREE if (name, lanes) not in SLOW]
SLOW |= {(name, (1, 3)[number % 2]) for number, name in enumerate(IN_TURN) if name not in ("pack", "best fit")}


@pytest.mark.parametrize(
    ("name", "lanes"),
    [
        pytest.param(name, lanes, marks=pytest.mark.slow if (name, lanes) in SLOW else ())
        for name, lanes in (*IN_ONE, *IN_THREE)
    ],
)
def test_what_is_done_is_not_delivered(name: str, lanes: int, open_ds: Callable[[], midepoch.Dataset]) -> None:
    def make(size: int, **options: Any) -> midepoch.Loader:
        ds = PIPELINES[name](open_ds())
        return (ds.with_lanes(lanes) if name in IN_LANES else ds).loader(size, **options)

    keys, values, state = numbered(make)
    done = chosen(keys, seed=len(name))
    kept = [value for key, value in zip(keys[1:], values[1:], strict=True) if key not in done]
    assert 0 < len(kept) < len(values) - 1 - len(done) // 2
    state = with_done(state, done)
    assert same(rest(make, state), kept)

    # Resumed with the same and with another batch size. Of the next epoch, nothing is done.
    loader = make(3)
    loader.load_state_dict(state)
    saved, batches, delivered = [loader.state_dict()], [], [0]
    for batch in loader:
        batches.append(batch)
        saved.append(loader.state_dict())
        delivered.append(delivered[-1] + rows_in(batch))
    last = len(batches) - 1
    for number, size in ((0, 1), (last // 3, 3), (last // 2, 1), (last, 3)):
        assert same(rest(make, saved[number], size), batches[number:] if size == 3 else kept[delivered[number] :])
    again, fresh = make(3), make(3)
    again.load_state_dict(saved[len(saved) // 2])
    again.set_epoch(1)
    fresh.set_epoch(1)
    assert same(list(again), list(fresh))


@pytest.mark.parametrize("name", ["rows", "filter"])
def test_a_state_has_what_is_done_for_each_reason(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    """Until it is passed. Where nothing is done, there is no such field."""
    loader = PIPELINES[name](open_ds()).loader(1)
    next(loader)
    state = loader.state_dict()
    assert not {*REASONS} & {*lanes_of(state)[0]}
    given = with_done(state, [(0, 3), (0, 5)])
    loader.load_state_dict(given)
    assert loader.state_dict()["cursor"] == given["cursor"]
    for taken in (2, 3, 5, 7):  # or more, where those that are done are passed at once
        next(loader)
        lane = lanes_of(loader.state_dict())[0]
        assert taken <= lane["taken"] <= taken + 1
        for reason, number in zip(REASONS, (3, 5), strict=True):
            assert bool(lane.get(reason)) == (number >= lane["taken"])
            assert not lane.get(reason) or Intervals.decode(lane[reason]).positions().tolist() == [number]
    assert not {*REASONS} & {*lane}


@pytest.mark.parametrize("value", ["x", "{", 1, None, {"0": ""}, []], ids=repr)
@pytest.mark.parametrize("field", REASONS)
@pytest.mark.parametrize("name", ["rows", "filter"])
def test_a_damaged_field_is_refused(name: str, field: str, value: Any, open_ds: Callable[[], midepoch.Dataset]) -> None:
    loader = PIPELINES[name](open_ds()).loader(4)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateError, match="damaged"):
        loader.load_state_dict(with_lane(state, 0, **{field: value}))


def test_another_mix_is_refused_while_outputs_are_done(open_ds: Callable[[], midepoch.Dataset]) -> None:
    def mixed(weights: list[float]) -> midepoch.Loader:
        parts = [open_ds().shuffle(seed=1).filter(lambda row: row["id"] > 3), open_ds().slice(0, 20)]
        return midepoch.mix(parts, weights, seed=5).loader(2)

    loader = mixed([1, 2])
    next(iter(loader))
    state = loader.state_dict()
    mixed([2, 1]).load_state_dict(state)
    for reason in REASONS:
        with pytest.raises(CheckpointMismatchError, match="another mix"):
            mixed([2, 1]).load_state_dict(with_done(state, [(0, 5)], (reason,)))


@pytest.mark.parametrize("name", ["rows", "filter"])
@pytest.mark.parametrize(
    "value", [[[0, 0]], [[0, None]], [[0, []]], [[0, "x"]], [[9, ""]], [["x", ""]], [[0]], {"0": ""}, "{}"], ids=repr
)
def test_damaged_exclusions_are_refused(name: str, value: Any, open_ds: Callable[[], midepoch.Dataset]) -> None:
    loader = PIPELINES[name](open_ds()).loader(4)
    loader.exclude(rows=[3, 5])
    next(iter(loader))
    with pytest.raises(StateError, match="damaged"):
        loader.load_state_dict(with_more(loader.state_dict(), excluded=value))


@pytest.mark.parametrize("at", [0, 3, None])
@pytest.mark.parametrize("names", ["ab", "cab", "ba", "b"])
def test_excluded_rows_stay_excluded_in_another_mix(names: str, at: int | None) -> None:
    """Their numbers are those of their sources, wherever these are in the mix."""
    rows = {"a": range(100), "b": range(1000, 1100), "c": range(2000, 2050)}
    sources = {name: midepoch.from_dict({"id": list(ids)}).shuffle(seed=1) for name, ids in rows.items()}

    def mixed(names: str, first: float) -> midepoch.Loader:
        weights = {name: first if name == names[0] else 1.0 for name in names}
        return midepoch.mix({name: sources[name] for name in names}, weights, seed=3, stop="all").loader(10)

    loader = mixed("ab", 1.0)
    loader.exclude(rows={"a": [5], "b": [7, 8]})
    seen: set[int] = set()
    for _ in range(at or 0):
        seen.update(next(loader)["id"].tolist())
    if at is None:  # the next epoch
        list(loader)
    resumed = mixed(names, 2.0)
    resumed.load_state_dict(loader.state_dict())
    for batch in resumed:
        seen.update(batch["id"].tolist())
    expected = {row for name in names for row in rows[name]} - {5, 1007, 1008}
    assert seen >= expected
    assert not seen & {5, 1007, 1008}
