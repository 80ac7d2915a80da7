from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from data import write_parquet
from states import at_row


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_indexing_is_iteration(ds: midepoch.Dataset) -> None:
    for each in (ds, ds.shuffle(seed=1), ds.shuffle(seed=1, scope="files").shard(3, 2)):
        rows = list(each)
        assert [each[i] for i in range(len(each))] == rows
        assert each[-1] == rows[-1]
        assert each[np.int64(2)] == rows[2]
        assert each[2:9:3]["id"] == [rows[i]["id"] for i in (2, 5, 8)]
        assert each[[5, 0, 5, -1]]["id"] == [rows[i]["id"] for i in (5, 0, 5, -1)]
        assert each[np.array([1, 2])]["id"] == [rows[1]["id"], rows[2]["id"]]
        assert each[range(3)]["id"] == ids(rows[:3])
        assert each[[]]["id"] == []
    for bad in (37, -38):
        with pytest.raises(IndexError, match="37 rows"):
            ds[bad]
    for each in (ds, ds.shuffle(seed=3), ds.shard(2, 1)):
        column, expected = each["id"], ids(each)
        assert list(column) == column[:] == expected and len(column) == len(expected)
        assert (column[0], column[-1], column[2:9:3], column[[5, 0]]) == (
            expected[0], expected[-1], expected[2:9:3], [expected[5], expected[0]],
        )  # fmt: skip


def test_slices(ds: midepoch.Dataset) -> None:
    assert ids(ds.take(3)) == [0, 1, 2]
    assert ids(ds.skip(35)) == [35, 36]
    assert ids(ds.slice(5, 20, 7)) == [5, 12, 19]
    assert ids(ds.slice(-3)) == [34, 35, 36]
    assert ids(ds.select([3, -1, 3])) == [3, 36, 3]
    assert ids(ds.skip(10).take(5).select(range(1, 3))) == [11, 12]
    assert sorted(ids(ds.shuffle(seed=1).take(5))) == [0, 1, 2, 3, 4]  # chosen before the order, whenever it is said
    assert len(ds.take(0)) == 0
    assert list(ds.take(0)) == []
    for wrong in (lambda: ds.take(-1), lambda: ds.select([37]), lambda: ds.select([0.5])):
        with pytest.raises((ValueError, IndexError, TypeError)):
            wrong()
    with pytest.raises(TypeError, match="flatnonzero"):
        ds.select(np.ones(37, bool))


def test_a_shuffle_moves_no_row_into_another_slice(ds: midepoch.Dataset) -> None:
    for scope in ("rows", "window", "files"):
        train, test = ds.slice(0, 30).shuffle(seed=1, scope=scope), ds.slice(30).shuffle(seed=1, scope=scope)
        for epoch in range(3):
            train.set_epoch(epoch)
            assert sorted(ids(train)) == list(range(30))
        assert sorted(ids(test)) == list(range(30, 37))


def test_epochs_reshuffle(ds: midepoch.Dataset) -> None:
    shuffled = ds.shuffle(seed=1)
    orders = []
    for epoch in range(4):
        shuffled.set_epoch(epoch)
        orders.append(tuple(ids(shuffled)))
        assert sorted(orders[-1]) == list(range(37))
    assert len(set(orders)) == 4
    assert tuple(ids(shuffled)) == orders[3]  # it does not advance by itself: torch's workers could not follow
    shuffled.set_epoch(0)
    assert tuple(ids(shuffled)) == orders[0]


def test_methods_return_new_datasets(ds: midepoch.Dataset) -> None:
    before = ids(ds)
    for made in (ds.shuffle(seed=1), ds.take(3), ds.shard(2, 0), ds.map(lambda row: {}), ds.with_format("numpy")):
        assert made is not ds
    assert ids(ds) == before


def test_shards(ds: midepoch.Dataset) -> None:
    for mode in ("auto", "file", "example"):
        for count in (1, 2, 5, 6, 37):
            parts = [ids(ds.shuffle(seed=1, scope="files").shard(count, i, mode=mode)) for i in range(count)]
            assert sorted(sum(parts, [])) == list(range(37))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert [len(ds.shard(count, i, mode=mode)) for i in range(count)] == list(map(len, parts))
    with pytest.raises(ValueError, match="37 rows cannot be split into 38 shards"):
        ds.shard(38, 0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        ds.shard(2, 2)
    with pytest.raises(ValueError, match="mode"):
        ds.shard(2, 0, mode="row")
    with pytest.raises(ValueError, match="already shard 0 of 2"):
        ds.shard(2, 0).shard(2, 1)


def test_files_of_equal_size_go_whole_to_shards(make_files: Callable[..., list[str]]) -> None:
    ds = midepoch.from_files(make_files([5] * 6)).shuffle(seed=3, scope="files")
    for index in range(3):
        assert len({row["id"] // 5 for row in ds.shard(3, index)}) == 2


def test_state_follows_delivery(ds: midepoch.Dataset) -> None:
    iterator = iter(ds.shuffle(seed=1))
    owner = ds.shuffle(seed=1)
    rows = []
    for row in owner:
        rows.append(row)
        if len(rows) == 10:
            break
    state = owner.state_dict()  # after the break, the iterator being gone
    assert state["position"] == 10
    other = ds.shuffle(seed=1)
    other.load_state_dict(state)
    assert ids(rows) + ids(other) == ids(iterator)


def test_loading_and_then_mapping_keeps_the_place(ds: midepoch.Dataset) -> None:
    source = ds.shuffle(seed=1)
    next(iter(source))
    whole = ids(source)
    state = at_row(source.state_dict(), 20)
    source.load_state_dict(state)
    assert ids(source.map(lambda row: {}).with_format("python").select_columns(["id"])) == whole[20:]


def test_set_epoch_after_loading(ds: midepoch.Dataset) -> None:
    source = ds.shuffle(seed=1)
    source.set_epoch(3)
    whole = ids(source)
    iterator = iter(source)
    for _ in range(12):
        next(iterator)
    state = source.state_dict()
    same_epoch, next_epoch = ds.shuffle(seed=1), ds.shuffle(seed=1)
    same_epoch.load_state_dict(state)
    same_epoch.set_epoch(3)
    assert ids(same_epoch) == whole[12:]
    next_epoch.load_state_dict(state)
    next_epoch.set_epoch(4)
    assert len(ids(next_epoch)) == 37  # not the tail of it
    assert len(ids(next_epoch)) == 37


def test_peeking_after_loading_loses_nothing(ds: midepoch.Dataset) -> None:
    source = ds.shuffle(seed=1)
    whole = ids(source)
    source.load_state_dict(at_row(source.state_dict(), 30))
    next(iter(source))
    assert ids(source) == whole[30:]
    assert ids(source) == whole  # then a whole epoch


def test_end_of_epoch(ds: midepoch.Dataset) -> None:
    """Saved behind the last row: going on is a new epoch; asking for the finished epoch by name gives nothing more."""
    source = ds.shuffle(seed=1)
    whole = ids(source)
    state = source.state_dict()
    assert state["position"] == 37
    again = ds.shuffle(seed=1)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert ids(again) == whole
    loop = ds.shuffle(seed=1)
    loop.load_state_dict(state)
    loop.set_epoch(0)
    assert ids(loop) == []
    loop.set_epoch(1)
    assert len(ids(loop)) == 37


def test_batches(ds: midepoch.Dataset) -> None:
    batches = list(ds.iter(10))
    assert [len(batch["id"]) for batch in batches] == [10, 10, 10, 7]
    assert [len(batch["id"]) for batch in ds.iter(10, drop_last_batch=True)] == [10, 10, 10]
    source = ds.shuffle(seed=1)
    iterator = source.iter(10)
    next(iterator)
    state = source.state_dict()
    rest = [i for batch in iterator for i in batch["id"]]
    other = ds.shuffle(seed=1)
    other.load_state_dict(state)
    assert [i for batch in other.iter(4) for i in batch["id"]] == rest


def test_drawn_seed(ds: midepoch.Dataset) -> None:
    first, second = ds.shuffle(), ds.shuffle()
    seed = first.state_dict()["seed"]
    assert seed != second.state_dict()["seed"]
    iterator = iter(first)
    head = [next(iterator)["id"] for _ in range(9)]
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["seed"] == seed
    assert sorted(head + ids(second)) == list(range(37))
    loader = ds.shuffle().loader(4)
    loader.load_state_dict(first.state_dict())
    assert [i for batch in loader for i in batch["id"].tolist()] == ids(first)[9:]
    with pytest.raises(ValueError, match="each process has drawn its own seed"):
        ds.shuffle().shard(2, 0)
    with pytest.raises(ValueError, match="Pass a seed"):
        ds.shuffle().loader(4, rank=0, world_size=2)


def test_repr_is_honest(ds: midepoch.Dataset) -> None:
    assert repr(ds) == "Dataset(37 rows; 5 files; columns: id, text, score, tokens)"
    other = ds.shuffle(seed=7, scope="window", window=2).map(ids).with_format("torch").shard(2, 1)
    assert repr(other) == (
        "Dataset(18 rows; 5 files; shuffled by window (seed=7, window=2); shard 1 of 2; maps: ids; "
        "columns: from a map; format=torch)"
    )
    next(iter(ds))
    ds.load_state_dict(at_row(ds.state_dict(), 5))
    assert "at epoch 0, position 5 of 37" in repr(ds)


def test_pickles_small_and_with_its_place(make_files: Callable[..., list[str]]) -> None:
    ds = midepoch.from_files(make_files([3000], block=1)).shuffle(seed=1)
    whole = ids(ds)
    ds.load_state_dict(at_row(ds.state_dict(), 2990))
    data = pickle.dumps(ds)
    assert len(data) < 1500
    assert ids(pickle.loads(data)) == whole[2990:]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"drop_last": True},
    {"last_batch": "drop"},
    {"last_batch": "pad"},
    {"rank": 1, "world_size": 2, "last_batch": "pad"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_empty_dataset_has_empty_epochs(
    ds: midepoch.Dataset, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for empty in (ds.take(0), ds.take(0).shuffle(seed=1), ds.take(0).map(lambda row: {"x": 1})):
        assert len(empty) == len(list(empty)) == len(list(empty.iter(2))) == 0
        loader = empty.loader(4, **options)
        assert [list(loader) for _ in range(3)] == [[], [], []]
        assert len(loader) == 0
        assert loader.state_dict()["epoch"] == 3
        again = empty.loader(4, **options)
        again.load_state_dict(loader.state_dict())
        assert list(again) == []
    assert "no rows to load" in caplog.text
    assert len(ds.take(0).shard(2, 1)) == len(list(ds.take(0).shard(2, 1))) == 0


def test_schema_and_columns(ds: midepoch.Dataset) -> None:
    assert ds.schema.names == ds.column_names == ["id", "text", "score", "tokens"]
    assert ds.select_columns(["score"]).schema.names == ["score"]
    assert ds.map(lambda row: {"x": 1}, remove_columns=["text"]).column_names == ["id", "score", "tokens", "x"]
    assert ds.features["score"].dtype == "float64"


def test_slices_by_percentages(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files)
    ids = lambda part: [row["id"] for row in part]  # noqa: E731
    first, rest = ds.slice(None, "80%"), ds.slice("80%")
    assert ids(first) + ids(rest) == list(range(37))
    assert len(first) == 30
    assert ids(ds.slice("10%", "12.5%")) == [4]
    assert ids(ds.slice("-10%")) == ids(ds.slice(-4))
    assert ids(ds.skip(17).slice("50%", None, 2)) == list(range(27, 37, 2))
    assert first.state_dict()["selection"] == ds.take(30).state_dict()["selection"]
    for wrong in ("80", "x%", "101%", ":80%"):
        with pytest.raises(ValueError, match="percentage like '80%'"):
            ds.slice(wrong)


@pytest.mark.parametrize("bad", [0, 1, 20, 36])
def test_rows_before_one_that_fails_are_delivered(small_files: list[str], bad: int) -> None:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == bad:
            raise ValueError("bad")
        return {}

    ds = midepoch.from_files(small_files).map(check)
    seen: list[int] = []
    rows = iter(ds)
    with pytest.raises(midepoch.MapError):
        for row in rows:
            seen.append(row["id"])
    assert seen == list(range(bad))
    assert ds.state_dict()["position"] == bad


def test_a_loaded_position_is_not_lost_by_a_later_step(ds: midepoch.Dataset) -> None:
    source = ds.shuffle(seed=1)
    whole = [row["id"] for row in source]
    source.load_state_dict(at_row(source.state_dict(), 10))
    with pytest.raises(ValueError, match="then load the state"):
        source.take(5)
    assert sorted(row["id"] for i in range(2) for row in source.shard(2, i)) == sorted(whole[10:])


def test_a_shard_has_the_same_rows_iterated_indexed_and_loaded(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", range(12), 3)
    for shuffled in (False, True):
        ds = midepoch.from_files(tmp_path / "a.parquet").with_format("numpy")
        ds = ds.shuffle(seed=1) if shuffled else ds
        for index in range(3):
            shard = ds.shard(3, index, mode="example")
            rows = [int(row["id"]) for row in shard]
            assert shard[:]["id"].tolist() == rows
            assert [i for batch in shard.loader(2, last_batch="uneven") for i in batch["id"].tolist()] == rows


def test_a_path_is_opened_with_from_files() -> None:
    with pytest.raises(TypeError, match="from_files"):
        midepoch.Dataset("data/train.parquet")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, "numpy", "torch", "arrow"])
def test_fields_of_structs_are_columns(name: str | None, tmp_path: Path) -> None:
    rows = [{"lang": "de" if number % 2 else "en", "of": {"n": number}} for number in range(2500)]
    pq.write_table(pa.table({"meta": rows, "lists": [[row] for row in rows]}), tmp_path / "rows.parquet")
    ds = midepoch.from_files(tmp_path / "rows.parquet").shuffle(seed=1).with_format(name)
    order = [int(row["meta"]["of"]["n"]) for row in midepoch.from_files(tmp_path / "rows.parquet").shuffle(seed=1)]

    def plain(values: Any) -> Any:
        return (
            values.to_pylist()
            if name == "arrow"
            else [each.item() if hasattr(each, "item") else each for each in values]
        )

    numbers = ds["meta"]["of"]["n"]
    assert plain(numbers[:3]) == order[:3] and plain(ds["meta"]["lang"][[5]]) == [rows[order[5]]["lang"]]
    assert len(numbers) == 2500 and [int(getattr(each, "as_py", lambda each=each: each)()) for each in numbers] == order
    assert "['meta']['of']['n']" in repr(numbers)
    if name != "arrow":
        assert [row["lang"] for row in ds["meta"]] == [rows[number]["lang"] for number in order]
        assert int(ds["meta"][7]["of"]["n"]) == int(numbers[7]) == order[7]
    with pytest.raises(midepoch.ColumnError, match="no column 'language'.*lang, of"):
        ds["meta"]["language"]
    with pytest.raises(TypeError, match="has no fields"):
        ds["lists"]["lang"]


def test_structs_that_are_null(tmp_path: Path) -> None:
    pq.write_table(pa.table({"meta": [{"lang": "en"}, None]}), tmp_path / "rows.parquet")
    assert list(midepoch.from_files(tmp_path / "rows.parquet")["meta"]["lang"]) == ["en", None]
    assert midepoch.from_files(tmp_path / "rows.parquet")["meta"]["lang"][1] is None


@pytest.mark.parametrize(("short", "name"), [("np", "numpy"), ("pt", "torch"), ("pyarrow", "arrow")])
def test_short_names_of_formats(short: str, name: str, small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files)
    assert type(ds.with_format(short)[:2]) is type(ds.with_format(name)[:2])
    assert ds.with_format(short).pipeline.format == name
