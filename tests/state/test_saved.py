from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from data import Numbers, numbered, write_arrow, write_parquet
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.testing import same
from states import at_row


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def is_plain(value: Any) -> bool:
    """Return True for plain values of JSON, which everything that saves states takes."""
    if type(value) is dict:
        return all(type(key) is str and is_plain(inner) for key, inner in value.items())
    if type(value) is list:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def test_is_small_and_plain_json(ds: midepoch.Dataset) -> None:
    mapped = ds.shuffle(seed=2**63).map(lambda row: {"n": 1}).select(list(range(37)))
    for source in (mapped, ds.shuffle(seed=1).loader(4)):
        for _ in range(2):
            state = source.state_dict()
            text = json.dumps(state)
            assert len(text) < 1000
            assert json.loads(text) == state and is_plain(state)
            next(iter(source))


def test_states_with_lanes_are_plain_json(ds: midepoch.Dataset) -> None:
    kept = ds.shuffle(seed=1).filter(odd)
    for stream in (kept, kept.batch(2), midepoch.concat([kept, ds.filter(odd)]), midepoch.mix([kept, ds], seed=1)):
        loader = stream.loader(2)
        for _ in range(3):
            next(loader)
            state = loader.state_dict()
            assert json.loads(json.dumps(state)) == state and is_plain(state)


def streams(ds: midepoch.Dataset) -> dict[str, Callable[[], midepoch.Loader]]:
    def excluding() -> midepoch.Loader:
        loader = ds.shuffle(seed=1).loader(4)
        loader.exclude(rows=[3, 4])
        return loader

    return {
        "rows": lambda: ds.shuffle(seed=1).loader(4),
        "excluded": excluding,
        "filter": lambda: ds.shuffle(seed=1).filter(odd).loader(2),
        "mix": lambda: midepoch.mix([ds.shuffle(seed=1), ds.filter(odd)], [1, 2], seed=3).loader(2),
    }


def clear(value: Any) -> None:
    """Empty all that can be changed in a value."""
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            clear(inner)
        value.clear()


@pytest.mark.parametrize("name", ["rows", "excluded", "filter", "mix"])
def test_a_state_shares_nothing_with_its_loader(ds: midepoch.Dataset, name: str) -> None:
    """Whoever changes a state that was saved or loaded, as torch's distributed checkpoints do, changes no loader."""
    loader = streams(ds)[name]()
    next(loader), next(loader)
    state = loader.state_dict()
    text = json.dumps(state)
    clear(state)
    assert json.dumps(loader.state_dict()) == text
    state, resumed = json.loads(text), streams(ds)[name]()
    resumed.load_state_dict(state)
    clear(state)
    assert json.dumps(resumed.state_dict()) == text
    assert same(list(resumed), list(loader.current_pass()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["rows", "filter", "mix"])
def test_a_loader_is_an_item_of_torchs_distributed_checkpoints(ds: midepoch.Dataset, name: str, tmp_path: Path) -> None:
    """They load only fields that a new loader has, and write them into the dict that it returns."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    loader, resumed = streams(ds)[name](), streams(ds)[name]()
    next(loader), next(loader)
    dcp.save({"data": loader}, checkpoint_id=str(tmp_path), no_dist=True)
    dcp.load({"data": resumed}, checkpoint_id=str(tmp_path), no_dist=True)
    assert same(list(resumed), list(loader.current_pass()))


@pytest.mark.filterwarnings("ignore")
def test_torchs_distributed_checkpoints_load_what_a_new_loader_does_not_have(
    ds: midepoch.Dataset, tmp_path: Path
) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    loader, resumed = (ds.shuffle(seed=1).loader(4) for _ in range(2))
    next(loader)
    loader.exclude(rows=[3, 4])
    loader.exclude(steps=[4])
    dcp.save({"data": loader}, checkpoint_id=str(tmp_path), no_dist=True)
    dcp.load({"data": resumed}, checkpoint_id=str(tmp_path), no_dist=True)
    assert resumed.state_dict() == loader.state_dict()
    assert same(list(resumed), list(loader.current_pass()))


@pytest.mark.parametrize("name", ["rows", "excluded", "filter", "mix"])
def test_keys_are_constant_and_values_are_no_dicts(ds: midepoch.Dataset, name: str) -> None:
    def holds_dict(value: Any) -> bool:
        return isinstance(value, dict) or (isinstance(value, list) and any(map(holds_dict, value)))

    loader = streams(ds)[name]()
    before = loader.state_dict()
    for _ in range(2):
        for _ in loader:
            state = loader.state_dict()
            assert list(state) == list(before)
            assert not any(map(holds_dict, state.values()))


def mismatches(ds: midepoch.Dataset, tmp_path: Path) -> dict[str, tuple[midepoch.Dataset, str]]:
    other = midepoch.from_files(write_arrow(tmp_path / "other.arrow", numbered(1000, 1037), 4))
    return {
        "data": (other.shuffle(seed=1), "contents"),
        "rows": (ds.take(36).shuffle(seed=1), "slice"),
        "selection": (ds.select(list(range(37))[::-1]).shuffle(seed=1), "select"),
        "scope": (ds, "scope"),
        "seed": (ds.shuffle(seed=2), "another seed"),
        "pipeline": (ds.shuffle(seed=1).map(len), "a map or another step was added"),
    }


@pytest.mark.parametrize("field", ["data", "rows", "selection", "scope", "seed", "pipeline"])
@pytest.mark.parametrize("loader", [False, True])
def test_what_does_not_belong_is_refused(ds: midepoch.Dataset, tmp_path: Path, field: str, loader: bool) -> None:
    saved = ds.shuffle(seed=1)
    state = at_row(saved.state_dict(), 8)
    target, cause = mismatches(ds, tmp_path)[field]
    found: Any = target.loader(4) if loader else target
    before = found.state_dict()
    with pytest.raises(CheckpointMismatchError, match=cause) as raised:
        found.load_state_dict(state)
    assert raised.value.field == field
    assert raised.value.saved == state[field]
    assert raised.value.current == before[field]
    assert found.state_dict() == before  # unchanged


def test_windows_must_agree(ds: midepoch.Dataset) -> None:
    with pytest.raises(CheckpointMismatchError, match="window"):
        ds.shuffle(seed=1, scope="window", window=3).load_state_dict(
            ds.shuffle(seed=1, scope="window", window=2).state_dict()
        )


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1},
        {"position": "3"},
        {"position": 1.5},
        {"position": True},
        {"position": None},
        {"position": 3},
        {"cursor": [[0, 3]]},
        {"position": 38, "cursor": [[0, 38]]},
        {"cursor": [[0, -1]]},
        {"position": 3, "cursor": [[0, "3"]]},
        {"position": 1, "cursor": [[0, 1.5]]},
        {"position": 1, "cursor": [[0, True]]},
        {"cursor": [[0]]},
        {"cursor": [[]]},
        {"position": 3, "cursor": [[1, 3]]},
        {"position": 3, "cursor": [["x", 3]]},
        {"position": 3, "cursor": [["0", 3]]},
        {"position": 3, "cursor": [[False, 3]]},
        {"position": 6, "cursor": [[0, 3], [0, 3]]},
        {"position": 3, "cursor": [[0, 3, [3, 0]]]},
        {"position": 3, "cursor": [[0, 3, None, "", "", "no"]]},
        {"position": 3, "cursor": [[0, 3, None, 5]]},
        {"position": 3, "cursor": [[0, 3, None, "", "x"]]},
        {"position": 3, "cursor": [[0, 3, None, "", "", 0, [["0"]]]]},
        {"position": 3, "cursor": [[0, 3, None, "", "", 0, [["0", 3]]]]},
        {"position": 3, "cursor": [[0, 3, None, "", "", 0, [], 0]]},
        {"position": 3, "cursor": [3]},
        {"position": 3, "cursor": {"0": {"taken": 3}}},
        {"cursor": None},
        {"first": -1},
        {"first": 1},
        {"first": None},
        {"more": None},
        {"more": {}},
        {"more": [["changes"]]},
        {"more": [[["changes"], []]]},
        {"more": [["changes", "x"]]},
        {"more": [["position", 0]]},
        {"unit": "bytes"},
        {"unit": None},
        {"steps": -1},
        {"epoch": None},
        {"lanes": 0},
        {"data": 5},
        {"rows": "37"},
        {"midepoch": None},
        {"midepoch": "1"},
    ],
)
def test_damaged_fields(ds: midepoch.Dataset, change: dict[str, Any]) -> None:
    before = ds.state_dict()
    with pytest.raises(StateError):
        ds.load_state_dict({**before, **change})
    assert ds.state_dict() == before


@pytest.mark.parametrize("name", ["position", "epoch", "cursor", "unit", "data", "seed", "lanes", "pipeline"])
def test_missing_fields(ds: midepoch.Dataset, name: str) -> None:
    state = ds.state_dict()
    del state[name]
    with pytest.raises(StateError, match=f"{name!r} is missing"):
        ds.load_state_dict(state)


@pytest.mark.parametrize("garbage", [None, 5, "state", [], b"x", {}, {"epoch": 1}, {"model": 1, "step": 2}])
def test_garbage(ds: midepoch.Dataset, garbage: Any) -> None:
    for target in (ds, ds.loader(4)):
        with pytest.raises(StateError):
            target.load_state_dict(garbage)


def test_newer_version(ds: midepoch.Dataset) -> None:
    with pytest.raises(StateError, match="version 2.*Upgrade"):
        ds.load_state_dict({**ds.state_dict(), "midepoch": 2})


def test_unknown_fields_are_no_obstacle(ds: midepoch.Dataset) -> None:
    ds.load_state_dict(at_row(ds.state_dict(), 3, comment="mine"))
    assert ds[3] == next(iter(ds))


def test_moved_data_is_not_other_data(ds: midepoch.Dataset, small_files: list[str], tmp_path: Path) -> None:
    import shutil

    moved = [shutil.copy(path, tmp_path / f"x{i}.arrow") for i, path in enumerate(small_files)]
    target = midepoch.from_files(moved).shuffle(seed=1)
    target.load_state_dict(at_row(ds.shuffle(seed=1).state_dict(), 30))
    assert list(target) == list(ds.shuffle(seed=1))[30:]


@pytest.mark.parametrize("stream", [False, True])
def test_settings_that_were_not_given_are_taken_over(tmp_path: Path, stream: bool) -> None:
    """The default scope and window depend on the format and the cache: a resume keeps those of the run."""
    table = pa.table({"id": range(600)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)

    def make(**options: Any) -> Any:
        shuffle = {name: options.pop(name) for name in ("scope", "window", "seed") if name in options}
        ds = midepoch.from_files(tmp_path / "a.parquet", index_dir=tmp_path / "ix", **options)
        ds = ds.shuffle(**{"seed": 1, **shuffle})
        return (ds.filter(lambda row: True) if stream else ds).loader(16)

    first = make(cache_bytes=2000)
    iterator = iter(first)
    seen = [next(iterator)["id"].tolist() for _ in range(5)]
    state, rest = first.state_dict(), [batch["id"].tolist() for batch in iterator]
    assert state["window"] != make().state_dict()["window"]
    for others in ({}, {"scope": "window"}, {"window": state["window"]}):
        again = make(**others)
        again.load_state_dict(state)
        assert [batch["id"].tolist() for batch in again] == rest
    assert sorted(sum(seen + rest, [])) == list(range(600))
    for others in ({"window": 3}, {"scope": "rows"}, {"seed": 2}):
        with pytest.raises(CheckpointMismatchError, match="window|scope|seed"):
            make(**others).load_state_dict(state)


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def test_states_with_lanes_are_small(docs: midepoch.Dataset) -> None:
    wide = docs.shuffle(seed=1).filter(odd).pack(8, "tokens").shuffle(seed=2, window=3).with_lanes(64).loader(16)
    passing = iter(wide)
    for _ in range(5):
        next(passing)
        assert len(json.dumps(wide.state_dict())) < 4096
    parts = [docs.slice(i * 30, i * 30 + 30).shuffle(seed=i).filter(odd) for i in range(8)]
    nested = midepoch.mix([midepoch.mix(parts[:4]), midepoch.mix(parts[4:], stop="all")], [0.9, 0.1], stop="all")
    loader = nested.pack(16, "tokens").with_lanes(4).loader(4)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 8192


def test_a_state_of_other_stages_is_refused(docs: midepoch.Dataset) -> None:
    shuffled = docs.shuffle(seed=1)
    stream = shuffled.filter(odd).pack(16, "tokens")
    loader = stream.loader(3)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    others: dict[str, Any] = {
        "pipeline": shuffled.pack(16, "tokens"),
        "seed": docs.shuffle(seed=2).filter(odd).pack(16, "tokens"),
        "rows": docs.take(100).shuffle(seed=1).filter(odd).pack(16, "tokens"),
        "scope": docs.filter(odd).pack(16, "tokens"),
    }
    for field, other in others.items():
        with pytest.raises(CheckpointMismatchError) as raised:
            other.loader(3).load_state_dict(state)
        assert raised.value.field == field
    for other in (
        shuffled.filter(odd).pack(17, "tokens"),
        shuffled.filter(odd).pack(16, "tokens", eos=1),
        shuffled.filter(odd).pack(16, "tokens", "best_fit"),
        shuffled.filter(odd).shuffle(seed=1),
        shuffled.filter(odd).filter(odd).pack(16, "tokens"),
        midepoch.mix([shuffled.filter(odd), docs]).pack(16, "tokens"),
    ):
        with pytest.raises(CheckpointMismatchError, match="pipeline"):
            other.load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="pipeline"):
        docs.shuffle(seed=1).load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="pipeline"):
        stream.load_state_dict(docs.shuffle(seed=1).state_dict())
    shuffled.filter(lambda row: row["id"] % 2 == 1).pack(16, "tokens").load_state_dict(state)  # other code, same kind


def test_what_is_allowed_to_differ_is_recorded(docs: midepoch.Dataset) -> None:
    loader = docs.shuffle(seed=1).filter(odd).pack(16, "tokens").loader(3)
    next(iter(loader))
    state = loader.state_dict()
    longer = docs.shuffle(seed=1).filter(odd).pack(20, "tokens").loader(3)
    longer.load_state_dict(state, allow=["pipeline"])
    assert longer.changes == ("pipeline: 'filter,pack[16 concat tokens]' became 'filter,pack[20 concat tokens]'",)
    assert dict(longer.state_dict()["more"])["changes"] == list(longer.changes)
    next(iter(longer))
    with pytest.raises(ValueError, match="allow takes a list"):
        longer.load_state_dict(state, allow="pipeline")
    for other in (docs.shuffle(seed=1).filter(odd), docs.shuffle(seed=1).filter(odd).batch(3)):
        with pytest.raises(CheckpointMismatchError, match="the stages have changed"):
            other.loader(3).load_state_dict(state, allow=["pipeline"])
    plain = docs.shuffle(seed=1).loader(3)
    next(iter(plain))
    mapped = docs.shuffle(seed=1).map(lambda row: {"x": 1}).loader(3)
    mapped.load_state_dict(plain.state_dict(), allow=["pipeline"])
    assert mapped.position == 3 and mapped.changes == ("pipeline: 'none' became 'map'",)
    again = docs.shuffle(seed=1).map(lambda row: {"x": 1}).loader(3)
    again.load_state_dict(mapped.state_dict())
    assert again.changes == mapped.changes


@pytest.mark.parametrize(
    "damage",
    [
        {"cursor": "["},
        {"cursor": [1]},
        {"cursor": [[0, [1]]]},
        {"cursor": [[0, 1]]},
        {"cursor": [[0, 1, [1]]]},
        {"cursor": [[0, 1, [[1], 0, 0]]]},
        {"cursor": [[0, 1, {"rows": {"taken": 1}}]]},
        {"cursor": [[0, 1, [[5, 0], -1]]]},
        {"cursor": [[0, 1, [[99999, 0], 0]]]},
        {"cursor": [[0, 1, [[5, 0], 0], "", "", 2]]},
        {"cursor": [[0, 1, [[5, 0], 0], "x"]]},
        {"cursor": [[0, 1, [[5, 0], 0], "", ["0"]]]},
        {"cursor": [[9, 1, [[5, 0], 0]]]},
        {"cursor": [["x", 1, [[5, 0], 0]]]},
        {"more": [["changes", "{"]]},
        {"cursor": 3},
    ],
)
def test_damaged_lanes_are_refused(damage: dict[str, Any], docs: midepoch.Dataset) -> None:
    stream = docs.filter(odd).pack(16, "tokens")
    next(iter(stream))
    state = {**stream.state_dict(), **damage}
    fresh = docs.filter(odd).pack(16, "tokens")
    with pytest.raises(StateError, match="damaged"):
        fresh.load_state_dict(state)
    assert fresh.position == 0


def test_the_state_of_one_of_several_ranks_is_not_enough(docs: midepoch.Dataset) -> None:
    loaders = [docs.filter(odd).loader(4, rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    assert not loaders[0].state_is_global
    with pytest.raises(CheckpointMismatchError, match="the list of the states of all ranks"):
        docs.filter(odd).loader(4).load_state_dict(states[0])
    with pytest.raises(CheckpointMismatchError, match="the list of the states of all ranks"):
        docs.filter(odd).loader(4, rank=1, world_size=2).load_state_dict(states[0])
    with pytest.raises(CheckpointMismatchError, match="the states of all ranks"):
        docs.filter(odd).loader(4).load_state_dict([states[0], states[0]])
    next(iter(loaders[0]))
    passing = iter(loaders[0])
    next(passing), next(passing)
    with pytest.raises(CheckpointMismatchError, match="not at the same step"):
        docs.filter(odd).loader(4).load_state_dict([loaders[0].state_dict(), states[1]])


def test_ranks_with_lanes_of_unequal_length_resume_in_later_epochs(numbers: Numbers) -> None:
    """With last_batch="uneven", one rank has more batches than the other in every epoch."""

    def make(rank: int, ranks: int) -> midepoch.Loader:
        kept = numbers(0, 60).filter(lambda row: row["n"] % 2 == 0 or row["n"] < 20)
        return kept.loader(4, rank=rank, world_size=ranks, last_batch="uneven")

    loaders = [make(rank, 2) for rank in range(2)]
    assert [len(list(loader)) for loader in loaders] == [7, 4]
    seen = [row for loader in loaders for row in next(loader)["n"].tolist()]
    states = [loader.state_dict() for loader in loaders]
    for ranks in (1, 2, 3):
        rest = []
        for rank in range(ranks):
            resumed = make(rank, ranks)
            resumed.load_state_dict(states)
            rest += [row for batch in resumed for row in batch["n"].tolist()]
        assert sorted(seen + rest) == [n for n in range(60) if n % 2 == 0 or n < 20]


def test_a_checkpoint_keeps_the_lanes(docs: midepoch.Dataset, tmp_path: Path) -> None:
    """A stream in PipelineCheckpoint: one process, exactly."""
    make: Callable[[], Any] = lambda: docs.shuffle(seed=1).filter(odd).pack(16, "tokens").loader(3)  # noqa: E731
    loader = make()
    passing = iter(loader)
    next(passing), next(passing)
    midepoch.PipelineCheckpoint(tmp_path).save(loader, step=2)
    rest = list(passing)
    other = make()
    assert midepoch.PipelineCheckpoint(tmp_path).restore_latest(other) == 2
    assert same(list(other), rest)


def always(row: dict[str, Any]) -> bool:
    return True


def deep() -> list[Any]:
    """Return lists in lists, deeper than functions can call themselves."""
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


MIX = [["pipeline", "mix[first seed=1]"], ["weights", [1.0, 1.0]]]


@pytest.mark.parametrize(
    "damage",
    [
        {"parts": [*MIX, ["parts", 5]]},
        {"parts": [*MIX, ["parts", ["x", 3]]]},
        {"parts": [*MIX, ["parts", [[], {}]]]},
        {"parts": {"pipeline": "mix[first seed=1]"}},
        {"parts": "[" * 100_000},
        {"cursor": "[" * 100_000},
        {"more": [["changes", "[" * 100_000]]},
        {"more": deep()},
        {"parts": deep()},
        {"parts": [*MIX, ["parts", deep()]]},
        {"parts": [*MIX, [7, 1]]},
        {"cursor": [[0, deep()]]},
        {"cursor": [[0, 1, deep()]]},
        {"cursor": [[10**4000, 1]]},
        {"cursor": [["9" * 5000, 1]]},
        {"cursor": [["²", 1]]},
        {"lanes": 2**31 - 1},
        {"lanes": 10**6, "cursor": [], "position": 0},
        {"unit": "rows"},
        {"more": [["leased", [["rank", 5], ["ranks", 2], ["turn", 0], ["turns", ""]]]]},
        {"more": [["leased", [["rank", 0], ["ranks", 2], ["outputs", deep()]]]]},
        {"more": [["leased", [["rank", 0], ["ranks", 2], ["outputs", [["9" * 5000, ""]]]]]]},
        {"more": [["excluded", [[0, deep()]]]]},
        {"more": [["excluded", [["9" * 5000, ""]]]]},
        {"more": [["excluded", [[10**4000, ""]]]]},
    ],
)
def test_hostile_states(damage: dict[str, Any], numbers: Numbers) -> None:
    make = lambda: midepoch.mix([numbers(0, 9), numbers(100, 109)], seed=1)  # noqa: E731
    stream = make()
    next(iter(stream))
    with pytest.raises(StateError):
        make().load_state_dict({**stream.state_dict(), **damage})


def test_one_state_is_enough_where_every_process_runs_all_lanes(numbers: Numbers) -> None:
    stream = numbers(0, 30).filter(always)
    assert not stream.shard(3, 0).state_is_global
    assert stream.with_lanes(1).shard(3, 0).state_is_global
    assert stream.with_lanes(2).shard(3, 0).state_is_global, "three shards run both lanes, each for all of them"
    assert stream.with_lanes(2).loader(2, rank=0, world_size=3).state_is_global


def test_check_state_says_what_loading_would(numbers: Numbers) -> None:
    loader = numbers(0, 30).filter(always).loader(2, rank=0, world_size=2)
    next(iter(loader))
    with pytest.raises(CheckpointMismatchError, match="one of several ranks"):
        numbers(0, 30).filter(always).check_state(loader.state_dict())


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    (tmp_path / "lake").mkdir()
    write_parquet(tmp_path / "lake" / "x.parquet", np.arange(60), 5)
    return tmp_path / "lake"


def fails_on(*bad: int) -> Any:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] in bad:
            raise ValueError("bad")
        return {}

    return check


def test_a_dataset_keeps_the_lanes_of_a_state_at_the_beginning_of_an_epoch(lake: Path) -> None:
    make = lambda: midepoch.from_files(lake).shuffle(seed=1)  # noqa: E731
    before = make().loader(5, rank=0, world_size=4)
    list(before)
    before.set_epoch(1)
    state = before.state_dict()
    assert (state["epoch"], state["position"], state["lanes"]) == (1, 0, 4)
    rows = []
    for way in ("dataset", "loader", "shard"):
        ds = make()
        if way != "loader":
            ds.load_state_dict(state)
        loader = ds.shard(2, 1).loader(10) if way == "shard" else ds.loader(10, rank=1, world_size=2)
        if way == "loader":
            loader.load_state_dict(state)
        rows.append([batch["id"].tolist() for batch in loader])
    assert rows[0] == rows[1] == rows[2]


def test_lists_of_states(small_files: list[str]) -> None:
    loader = midepoch.from_files(small_files).shuffle(seed=1).loader(4)
    state = loader.state_dict()
    over, begun = at_row(state, 37), {**state, "epoch": 1}
    loader.load_state_dict([over, begun])  # one place: the end of an epoch is the beginning of the next
    assert (loader.epoch, loader.position) == (1, 0)
    with pytest.raises(midepoch.CheckpointMismatchError, match="rank 0: epoch 0, position 0; rank 1: epoch 0, posit"):
        loader.load_state_dict([state, at_row(state, 4)])
    with pytest.raises(midepoch.CheckpointMismatchError, match="states of different runs: seed is 1 on rank 0 and 2"):
        loader.load_state_dict([state, {**state, "seed": 2}])
    with pytest.raises(midepoch.StateError, match="is empty"):
        loader.load_state_dict([])
    with pytest.raises(midepoch.StateError, match="got None"):
        loader.load_state_dict([state, None])
    assert (loader.epoch, loader.position) == (1, 0)


def test_states_of_shards_that_skip_are_for_those_shards(small_files: list[str]) -> None:
    make = lambda: midepoch.from_files(small_files).map(fails_on(3), on_error="skip")  # noqa: E731
    states = []
    for shard, rows in enumerate((8, 3)):
        ds = make().shard(2, shard)
        passing = iter(ds)
        for _ in range(rows):
            next(passing)
        states.append(ds.state_dict())
    second = make().shard(2, 1)
    second.load_state_dict(states)
    assert second.state_dict()["position"] == states[1]["position"]
    with pytest.raises(midepoch.CheckpointMismatchError, match="each shard has its own position"):
        make().loader(4, rank=1, world_size=2).load_state_dict(states)
    with pytest.raises(midepoch.CheckpointMismatchError, match="states of different runs"):
        second.load_state_dict([states[0], {**states[1], "data": "x"}])
