from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch

import midepoch
from midepoch.errors import CheckpointMismatchError, ColumnError, MapError
from midepoch.testing import assert_resumes_exactly


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"double": row["id"] * 2}


def double_all(batch: dict[str, Any]) -> dict[str, Any]:
    return {"double": [i * 2 for i in batch["id"]]}


def test_rows_and_groups(ds: midepoch.Dataset) -> None:
    for mapped in (ds.map(double), ds.map(double_all, batched=True), ds.map(double_all, True, 5)):
        assert [row["double"] for row in mapped] == [2 * i for i in range(37)]
        assert mapped.column_names == ["id", "text", "score", "tokens", "double"]


def test_arguments(ds: midepoch.Dataset) -> None:
    assert ds.map(lambda i, k: {"n": i + k}, input_columns="id", with_indices=True)[36]["n"] == 72
    assert ds.map(lambda row, by: {"id": row["id"] + by}, fn_kwargs={"by": 5})[0]["id"] == 5
    assert ds.map(double, remove_columns=["text", "tokens"])[1] == {"id": 1, "score": 0.5, "double": 2}
    assert (
        ds.map(
            lambda ids, s: {"n": [a + b for a, b in zip(ids, s, strict=True)]},
            batched=True,
            input_columns=["id", "score"],
        )[4]["n"]
        == 6.0
    )
    assert ds.map(lambda row: None)[3] == ds[3]
    assert ds.map(double).map(lambda row: {"four": row["double"] * 2}).select_columns("four")[5] == {"four": 20}


def test_a_function_that_forgets_to_return_is_logged_once(
    ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    def forgets(row: dict[str, Any]) -> None:
        row["text"] = "changed"

    assert list(ds.map(forgets)) == list(ds)
    assert caplog.text.count("map(forgets) returned None, and the row stays as it is") == 1


def test_indices_are_those_before_the_shuffle(ds: midepoch.Dataset) -> None:
    mapped = ds.skip(5).shuffle(seed=1).map(lambda row, i: {"at": i}, with_indices=True)
    assert all(row["at"] == row["id"] - 5 for row in mapped)


def test_the_function_gets_the_format_chosen_before(ds: midepoch.Dataset) -> None:
    kinds: list[type] = []

    def see(batch: dict[str, Any]) -> dict[str, Any]:
        kinds.append(type(batch["score"]))
        return {"score": batch["score"] * 2}

    for kind in ("python", "numpy", "torch"):
        ds.with_format(kind).map(see if kind != "python" else lambda b: kinds.append(type(b["score"])), batched=True)[
            :3
        ]
    assert kinds == [list, np.ndarray, torch.Tensor]


def test_generators_depend_on_seed_epoch_and_row_only(ds: midepoch.Dataset) -> None:
    def noise(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": float(generator.random())}

    def noises(batch: dict[str, Any], generators: list[np.random.Generator]) -> dict[str, Any]:
        return {"noise": [float(g.random()) for g in generators]}

    def by_row(dataset: Any) -> dict[int, float]:
        return {row["id"]: row["noise"] for row in dataset}

    shuffled = ds.shuffle(seed=1)
    alone = by_row(shuffled.map(noise, with_generator=True))
    assert len(set(alone.values())) == 37
    assert by_row(shuffled.map(noises, batched=True, batch_size=4, with_generator=True)) == alone
    for shard in range(3):
        part = by_row(shuffled.shard(3, shard).map(noise, with_generator=True))
        assert part == {row: alone[row] for row in part}
    batches = list(shuffled.map(noise, with_generator=True).loader(5, num_workers=2))
    assert {int(i): float(x) for b in batches for i, x in zip(b["id"], b["noise"], strict=True)} == alone
    other = shuffled.map(noise, with_generator=True)
    other.set_epoch(1)
    assert not set(by_row(other).values()) & set(alone.values())
    two = shuffled.map(noise, with_generator=True).map(
        lambda row, g: {"second": float(g.random())}, with_generator=True
    )
    assert all(row["noise"] != row["second"] for row in two)


def fail_on_seven(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] % 10 == 7:
        raise ValueError("seven!")
    return {"ok": row["id"]}


def test_error_names_the_row(ds: midepoch.Dataset) -> None:
    with pytest.raises(MapError, match=r"fail_on_seven.* row 7 of the dataset \(row 7 of .*part-000.arrow\).*seven!"):
        list(ds.map(fail_on_seven))
    with pytest.raises(MapError, match=r"row 7 .*row 7 of .*part-002"):
        list(ds.skip(10).map(fail_on_seven))
    with pytest.raises(MapError, match="row 7 "):
        list(ds.map(fail_on_seven).loader(4, num_workers=2))


def test_skipping_failures(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    good = [i for i in range(37) if i % 10 != 7]
    with caplog.at_level(logging.WARNING, "midepoch"):
        assert [row["ok"] for row in ds.map(fail_on_seven, on_error="skip")] == good
    assert sum("seven!" in record.message for record in caplog.records) == 4 - 1

    def batch_fails(batch: dict[str, Any]) -> dict[str, Any]:
        return {"ok": [fail_on_seven({"id": i})["ok"] for i in batch["id"]]}

    assert [row["ok"] for row in ds.map(batch_fails, batched=True, batch_size=6, on_error="skip")] == good
    for workers in (0, 2):
        loader = ds.map(fail_on_seven, on_error="skip").loader(4, num_workers=workers)
        assert [int(i) for batch in loader for i in batch["ok"]] == good
        assert loader.skipped == 3


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        (lambda row: 5, {}, "dict of columns or None, it returned int"),
        (lambda row: {"a": 1} if row["id"] % 2 else {"b": 1}, {}, "columns .* for a row before"),
        (lambda b: {"x": [1, 2]}, {"batched": True}, "2 values for 37 rows.*one value for each row"),
        (lambda b: {"x": 3}, {"batched": True}, "must be a sequence"),
    ],
)
def test_unusable_results(ds: midepoch.Dataset, function: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(MapError, match=text):
        ds.map(function, **options)[:]


def test_wrong_columns_are_errors_at_once(ds: midepoch.Dataset) -> None:
    for make in (
        lambda: ds.select_columns("nope"),
        lambda: ds.remove_columns(["id", "nope"]),
        lambda: ds.rename_columns({"nope": "x"}),
        lambda: ds.map(double, input_columns=["nope"]),
        lambda: ds.map(double, remove_columns=["nope"]),
    ):
        with pytest.raises(ColumnError, match="no column 'nope'. There are: id, text, score, tokens"):
            make()
    with pytest.raises(ColumnError, match="two columns would be named 'id'"):
        ds.rename_columns({"text": "id"})
    with pytest.raises(ColumnError, match="nope"):
        ds.map(double).select_columns("nope")[0]


def test_bad_arguments(ds: midepoch.Dataset) -> None:
    with pytest.raises(TypeError, match="function"):
        ds.map("double")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size"):
        ds.map(double, batched=True, batch_size=0)
    with pytest.raises(ValueError, match="on_error"):
        ds.map(double, on_error="ignore")


def test_columns_that_are_not_needed_are_not_read(ds: midepoch.Dataset) -> None:
    assert ds.select_columns(["id"]).pipeline.base.head == {"id": "id"}
    assert ds.rename_columns({"id": "n"}).remove_columns(["text", "tokens"]).pipeline.base.head == {
        "n": "id",
        "score": "score",
    }
    assert list(ds.map(double).select_columns("double").pipeline.base.head) == ["id", "text", "score", "tokens"]
    assert ds.rename_columns({"id": "n"}).schema.names == ["n", "text", "score", "tokens"]
    assert [row["n"] for row in ds.rename_columns({"id": "n", "score": "id"}).select_columns(["n"])] == list(range(37))


def test_none_for_some_rows_names_filter(ds: midepoch.Dataset) -> None:
    def some(row: dict[str, Any]) -> dict[str, Any] | None:
        return {"x": 1} if row["id"] % 3 else None

    def some_groups(rows: dict[str, Any]) -> dict[str, Any] | None:
        return None if 4 in rows["id"] else {"x": rows["id"]}

    for mapped in (ds.map(some), ds.skip(1).map(some), ds.map(some_groups, batched=True, batch_size=4)):
        with pytest.raises(MapError, match=r"None \(no columns\) for .* leave rows out with filter\(\)"):
            list(mapped.loader(16))


def test_a_last_group_that_is_not_full_can_be_left_out(ds: midepoch.Dataset) -> None:
    def make(source: Any = ds) -> Any:
        return source.map(double_all, batched=True, batch_size=5, drop_last_batch=True)

    assert [row["double"] for row in make()] == [2 * i for i in range(35)]
    assert "text" in next(iter(make()))
    odd = make(ds.filter(lambda row: row["id"] % 2))
    assert [row["id"] for row in odd] == list(range(1, 31, 2)), "only the last one of all"
    assert [row["id"] for row in make(ds.batch(2).unbatch())] == list(range(35))
    assert [row["id"] for row in make(make())] == list(range(35))
    for workers in (0, 2):
        assert [int(i) for batch in make().loader(4, workers) for i in batch["id"]] == list(range(35))
    assert_resumes_exactly(lambda: make(ds.filter(lambda row: row["id"] % 2)).loader(4, collate_fn=list), tail=2)
    with pytest.raises(ValueError, match="requires batched=True"):
        ds.map(double, drop_last_batch=True)
    with pytest.raises(CheckpointMismatchError):
        ds.map(double_all, True, 5, one_to_one=False).load_state_dict(make().state_dict())


def test_arrow_tables_in_and_out(ds: midepoch.Dataset) -> None:
    def more(table: pa.Table) -> pa.Table:
        assert isinstance(table, pa.Table)
        return table.select(["id"]).append_column("twice", pc.multiply(table["id"], 2).cast(pa.int16()))

    arrow = ds.with_format("arrow")
    for mapped in (arrow.map(more, batched=True, batch_size=4), arrow.map(more)):
        assert list(mapped.with_format("python")) == [{"id": i, "twice": 2 * i} for i in range(37)]
        assert mapped.column_names == ["id", "twice"]
    batches = list(arrow.map(more, batched=True).loader(8, 2))
    assert batches[0].schema == pa.schema({"id": pa.int64(), "twice": pa.int16()})
    halved = arrow.map(lambda table: table.slice(0, len(table) // 2), batched=True, batch_size=4, one_to_one=False)
    assert pa.concat_tables(halved.iter(100))["id"].to_pylist() == [i for i in range(36) if i % 4 < 2]
    with pytest.raises(MapError, match="3 values for 4 rows"):
        list(arrow.map(lambda table: table.slice(1), batched=True, batch_size=4))
    with pytest.raises(
        MapError, match=r"returned a table of columns .* but columns|returned columns .* but a table of columns"
    ):
        list(arrow.map(lambda t: t if t["id"][0].as_py() < 8 else t.to_pydict(), batched=True, batch_size=4).loader(16))


def ids(batches: Any, name: str = "id") -> list[Any]:
    return [value for batch in batches for value in batch[name].tolist()]


def test_what_a_map_writes_into_its_input_shows_nowhere(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(12)}), tmp_path / "a.parquet")

    def made(batch: Any) -> Any:
        return {"y": batch["x"] * 10}

    def writes(batch: Any) -> Any:
        batch["y"] += 1
        if (batch["y"] >= 100).any():
            raise ValueError("too large")
        return {"z": batch["y"].copy()}

    ds = midepoch.from_files(tmp_path / "a.parquet").with_format("numpy").map(made, batched=True)
    for size in (4, 6, 12):
        mapped = ds.map(writes, batched=True, on_error="skip", batch_size=size)
        batches = list(mapped.loader(size))
        assert ids(batches, "z") == [10 * i + 1 for i in range(10)], size
        assert ids(batches, "y") == [10 * i for i in range(10)], size

    def appends(row: Any) -> bool:
        row["words"].append(0)
        if row["x"] == 11:
            raise ValueError("the last one")
        return len(row["words"]) == 2

    rows = midepoch.from_files(tmp_path / "a.parquet").with_format("python").map(lambda row: {"words": [row["x"]]})
    kept = rows.filter(appends, on_error="skip")
    assert [(row["x"], row["words"]) for row in kept] == [(i, [i]) for i in range(11)]
