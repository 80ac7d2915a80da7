"""from_dict, from_list, from_arrow, from_pandas: every type, written once by contents, clean after a kill."""

from __future__ import annotations

import datetime
import decimal
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import polars as pl
import pyarrow as pa
import pytest
import torch

import midepoch
from data import numbered
from forks import forked
from midepoch.dataset import parts
from midepoch.memory import tables
from midepoch.testing import assert_resumes_exactly

UTC = datetime.timezone.utc
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "null": (pa.null(), [None, None, None]),
    "bool": (pa.bool_(), [True, None, False]),
    "int8": (pa.int8(), [-128, None, 127]),
    "uint64": (pa.uint64(), [0, 2**64 - 1, None]),
    "half": (pa.float16(), [np.float16(0.5), None, np.float16(-1)]),
    "float": (pa.float32(), [0.5, None, float("inf")]),
    "string": (pa.string(), ["é", None, ""]),
    "large string": (pa.large_string(), ["a", None, "b" * 300]),
    "view": (pa.string_view(), ["a", None, "long enough to be outside of the view"]),
    "binary": (pa.binary(), [b"\0", None, b"xyz"]),
    "binary view": (pa.binary_view(), [b"\0", None, b"long enough to be outside of the view"]),
    "fixed binary": (pa.binary(2), [b"ab", None, b"cd"]),
    "decimal": (pa.decimal128(9, 2), [decimal.Decimal("1.25"), None, decimal.Decimal("-3.00")]),
    "date": (pa.date32(), [datetime.date(2020, 2, 29), None, datetime.date(1969, 1, 1)]),
    "time": (pa.time64("us"), [datetime.time(1, 2, 3, 4), None, datetime.time(0)]),
    "timestamp": (pa.timestamp("us", tz="UTC"), [datetime.datetime(2020, 1, 1, tzinfo=UTC), None, None]),
    "duration": (pa.duration("ms"), [datetime.timedelta(days=1), None, datetime.timedelta(0)]),
    "list": (pa.list_(pa.int32()), [[1, None], None, []]),
    "large list": (pa.large_list(pa.string()), [["a"], None, []]),
    "fixed list": (pa.list_(pa.float32(), 2), [[1.0, 2.0], None, [3.0, None]]),
    "struct": (
        pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}),
        [{"a": 1, "b": ["x"]}, None, {"a": None, "b": None}],
    ),
    "map": (pa.map_(pa.string(), pa.int32()), [[("a", 1)], None, []]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"]),
    "list of dictionary": (pa.list_(pa.dictionary(pa.int8(), pa.string())), [["a", "b"], None, ["a"]]),
}


def typed() -> pa.Table:
    return pa.table({name: pa.array(values, kind) for name, (kind, values) in VALUES.items()})


def rows_of(ds: midepoch.Dataset) -> list[Any]:
    return list(ds.with_format("python"))


def fingerprint(ds: midepoch.Dataset) -> str:
    return ds.pipeline.base.source.fingerprint


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("part-*.arrow"))


def test_every_type_of_arrow_comes_back(tmp_path: Path) -> None:
    table = typed()
    expected = [{name: values[i] for name, (_, values) in VALUES.items()} for i in range(3)]
    several = pa.concat_tables([table, table.slice(1, 1), table])
    for given, wanted in (
        (table, expected),
        (several, [*expected, expected[1], *expected]),
        (table.slice(2), expected[2:]),
    ):
        ds = midepoch.from_arrow(given, cache_dir=tmp_path)
        assert ds.column_names == list(VALUES)
        assert rows_of(ds) == wanted
        assert rows_of(ds.select([len(ds) - 1, 0])) == [wanted[-1], wanted[0]]


def test_equal_contents_are_one_file_however_they_were_made(tmp_path: Path) -> None:
    table = numbered(0, 2500)
    dicts = table.to_pylist()
    whole = midepoch.from_arrow(table, cache_dir=tmp_path)
    (written,) = files(tmp_path)
    stat = written.stat()
    chunks = [table.slice(start, 700) for start in range(0, 2500, 700)]
    padded = pa.concat_tables([numbered(90, 93), table, numbered(0, 9)]).slice(3, 2500)
    others: list[Callable[[], midepoch.Dataset]] = [
        lambda: midepoch.from_arrow(pa.concat_tables(chunks), cache_dir=tmp_path),
        lambda: midepoch.from_arrow([batch for each in chunks for batch in each.to_batches()], cache_dir=tmp_path),
        lambda: midepoch.from_arrow(
            pa.RecordBatchReader.from_batches(table.schema, table.to_batches(99)), cache_dir=tmp_path
        ),
        lambda: midepoch.from_arrow(padded, cache_dir=tmp_path),
        lambda: midepoch.from_dict({name: table.column(name) for name in table.column_names}, cache_dir=tmp_path),
        lambda: midepoch.from_list(dicts, schema=table.schema, cache_dir=tmp_path),
    ]
    for make in others:
        assert fingerprint(make()) == fingerprint(whole)
    assert files(tmp_path) == [written] and written.stat() == stat
    assert rows_of(whole) == dicts
    validity = pa.array([1, 2, 3], mask=np.zeros(3, bool)), pa.array([1, 2, 3])
    assert len({fingerprint(midepoch.from_dict({"a": each}, cache_dir=tmp_path)) for each in validity}) == 1


def test_views_are_the_same_data_as_text_at_any_depth(tmp_path: Path) -> None:
    words = ["a", None, "b" * 40]
    nested = [{"a": words}, None, {"a": []}]

    def opened(text: pa.DataType) -> midepoch.Dataset:
        arrays = {
            "flat": pa.array(words, text),
            "list": pa.array([words, None, []], pa.list_(text)),
            "struct": pa.array(nested, pa.struct({"a": pa.list_(text)})),
        }
        return midepoch.from_arrow(pa.table(arrays), cache_dir=tmp_path)

    view = opened(pa.string_view())
    assert fingerprint(view) == fingerprint(opened(pa.large_string()))
    assert [row["struct"] for row in rows_of(view)] == nested


def test_another_value_anywhere_is_other_data(tmp_path: Path) -> None:
    """Also where a fingerprint of files does not look: it is a sample."""
    values = np.arange(100_000)
    state = midepoch.from_dict({"a": values}, cache_dir=tmp_path).loader(8).state_dict()
    midepoch.from_dict({"a": values.copy()}, cache_dir=tmp_path).loader(8).load_state_dict(state)
    for row in (56_789, 7_777):
        changed = values.copy()
        changed[row] += 1
        with pytest.raises(midepoch.CheckpointMismatchError, match="data"):
            midepoch.from_dict({"a": changed}, cache_dir=tmp_path).loader(8).load_state_dict(state)
    renamed = midepoch.from_dict({"b": values}, cache_dir=tmp_path)
    assert fingerprint(renamed) != fingerprint(midepoch.from_dict({"a": values}, cache_dir=tmp_path))


def test_columns_and_rows_of_python(tmp_path: Path) -> None:
    ds = midepoch.from_dict(
        {
            "n": [1, 2],
            "x": np.ones((2, 3), np.float32),
            "t": torch.arange(4).reshape(2, 2),
            "s": ["a", None],
            "deep": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)[:, ::-1],
            "empty": np.zeros((2, 0)),
        },
        cache_dir=tmp_path,
    )
    assert ds.schema.types[:3] == [pa.int64(), pa.list_(pa.float32(), 3), pa.list_(pa.int64(), 2)]
    deep = [[9, 10, 11], [6, 7, 8]]
    assert rows_of(ds)[1] == {"n": 2, "x": [1.0] * 3, "t": [2, 3], "s": None, "deep": deep, "empty": []}
    (batch,) = ds.loader(2)
    assert batch["x"].shape == (2, 3) and batch["deep"].dtype == torch.uint8 and batch["deep"][1].tolist() == deep
    converted = midepoch.from_dict({"x": np.ones((2, 3))}, schema={"x": pa.list_(pa.float32())}, cache_dir=tmp_path)
    assert converted.schema.field("x").type == pa.list_(pa.float32())
    rows = midepoch.from_list([{"a": 1}, {"a": None, "b": [np.ones(2)]}], cache_dir=tmp_path)
    assert rows_of(rows) == [{"a": 1, "b": None}, {"a": None, "b": [[1.0, 1.0]]}]
    small = midepoch.from_list([{"a": 1}], schema={"a": "int8"}, cache_dir=tmp_path)
    assert small.schema.field("a").type == pa.int8()
    assert_resumes_exactly(lambda: ds.shuffle(seed=1).loader(1, num_workers=0))


def test_frames(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "a": [1, 2, 3],
            "c": pd.Categorical(["x", "y", "x"]),
            "t": pd.to_datetime(["2020-01-01", None, "2021-01-01"]),
            "n": pd.array([1, None, 3], dtype="Int32"),
            "o": [[1], None, [2, 3]],
        }
    )
    expected = pa.Table.from_pandas(frame).to_pylist()
    assert rows_of(midepoch.from_pandas(frame, cache_dir=tmp_path)) == expected
    indexed = frame.set_index(pd.Index(["p", "q", "r"], name="key"))
    assert rows_of(midepoch.from_pandas(indexed, cache_dir=tmp_path))[1]["key"] == "q"
    assert "key" not in midepoch.from_pandas(indexed, preserve_index=False, cache_dir=tmp_path).column_names
    kept = midepoch.from_pandas(frame, preserve_index=True, schema={"a": "int16"}, cache_dir=tmp_path)
    assert kept.column_names[-1] == "__index_level_0__" and kept.schema.field("a").type == pa.int16()
    assert b"pandas" not in (kept.schema.metadata or {})  # its versions would be part of the fingerprint

    other = pl.DataFrame(
        {"a": [1, None, 3], "s": ["x", "y", None], "l": [["a"], None, []], "d": [datetime.date(2020, 1, 1)] * 3}
    ).with_columns(pl.col("s").cast(pl.Categorical).alias("c"), pl.struct("a", "s").alias("st"))
    made = [midepoch.from_pandas(other, cache_dir=tmp_path), midepoch.from_arrow(other, cache_dir=tmp_path)]
    for ds in made:
        assert rows_of(ds) == other.to_dicts()
    assert fingerprint(made[0]) == fingerprint(made[1])

    class Stream:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return other.__arrow_c_stream__(requested_schema)

    assert rows_of(midepoch.from_arrow(Stream(), cache_dir=tmp_path)) == other.to_dicts()
    objects = pl.DataFrame({"o": pl.Series([object()], dtype=pl.Object)})  # would become addresses in memory
    for call in (midepoch.from_pandas, midepoch.from_arrow):
        with pytest.raises(midepoch.ColumnError, match="'o' contains Python objects.*from_map_style"):
            call(objects)
    with pytest.raises(TypeError, match=r"LazyFrame.*collect\(\)"):
        midepoch.from_pandas(other.lazy())
    with pytest.raises(midepoch.ColumnError, match="astype"):
        midepoch.from_pandas(pd.DataFrame({"a": [1, "x"]}))


def test_a_reader_may_be_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_SPOOL_BYTES", 1000)
    monkeypatch.setattr(tables, "_BATCH_BYTES", 3000)
    monkeypatch.setattr(parts, "PART_BYTES", 9000)
    table = numbered(0, 2500)
    reader = pa.RecordBatchReader.from_batches(table.schema, iter(table.to_batches(max_chunksize=100)))
    ds = midepoch.from_arrow(reader, cache_dir=tmp_path)
    assert rows_of(ds) == table.to_pylist() and ds.num_files > 5
    assert not list(tmp_path.rglob("*.tmp"))


def test_wrong_objects_name_the_function_to_call() -> None:
    frame, table = pd.DataFrame({"a": [1]}), pa.table({"a": [1]})
    cases: list[tuple[Callable[..., Any], Any, str]] = [
        (midepoch.from_dict, [{"a": 1}], r"from_list\(rows\)"),
        (midepoch.from_dict, frame, r"from_pandas\(frame\)"),
        (midepoch.from_list, {"a": [1]}, r"from_dict\(columns\)"),
        (midepoch.from_list, [1, 2], r"from_map_style\(items\)"),
        (midepoch.from_list, (row for row in [{"a": 1}]), "from_generator"),
        (midepoch.from_list, table, r"from_arrow\(table\)"),
        (midepoch.from_arrow, {"a": [1]}, r"from_dict\(columns\)"),
        (midepoch.from_pandas, table, r"from_arrow\(table\)"),
        (midepoch.from_pandas, frame["a"], "DataFrame"),
        (midepoch.from_arrow, "x.arrow", "from_files"),
        (midepoch.from_files, frame, r"from_pandas\(frame\)"),
        (midepoch.from_files, pl.DataFrame({"a": [1]}), r"from_pandas\(frame\)"),
        (midepoch.from_files, table, r"from_arrow\(table\)"),
        (midepoch.from_files, {"a": [1]}, r"from_dict\(columns\)"),
        (midepoch.from_files, [{"a": 1}], r"from_list\(rows\)"),
        (midepoch.from_files, ({"a": 1} for _ in range(2)), "from_generator"),
        (midepoch.from_files, torch.utils.data.TensorDataset(torch.ones(2)), r"from_map_style\(ds\)"),
        (midepoch.from_files, lambda: [{"a": 1}], "from_generator"),
        (midepoch.from_files, np.arange(3), "from_dict"),
        (midepoch.from_files, [np.arange(3)], "from_map_style"),
        (midepoch.from_files, frame["a"], "from_dict"),
        (midepoch.from_files, midepoch.from_dict({"a": [1]}), "a dataset already"),
        (midepoch.from_dict, np.arange(3), r"Call midepoch.from_dict\("),
        (midepoch.from_arrow, frame["a"], "from_dict"),
        (midepoch.from_arrow, pl.Series([1]), "from_dict"),
        (midepoch.from_arrow, table.column("a"), "from_dict"),
        (midepoch.from_map_style, frame["a"], "from_dict"),
    ]
    for function, given, text in cases:
        with pytest.raises(TypeError, match=text):
            function(given)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (midepoch.DataNotFoundError, "no rows", lambda: midepoch.from_dict({"a": []})),
        (midepoch.DataNotFoundError, "no columns", lambda: midepoch.from_dict({})),
        (midepoch.DataNotFoundError, "no columns", lambda: midepoch.from_list([])),
        (midepoch.ColumnError, "different lengths", lambda: midepoch.from_dict({"a": [1], "b": [1, 2]})),
        (midepoch.ColumnError, "column 'a'.*schema=", lambda: midepoch.from_dict({"a": [1, "x"]})),
        (midepoch.ColumnError, "from_map_style", lambda: midepoch.from_dict({"a": [object()]})),
        (midepoch.ColumnError, "a column 'b'", lambda: midepoch.from_dict({"a": [1]}, schema={"b": "int8"})),
        (
            midepoch.ColumnError,
            "column .a. cannot become",
            lambda: midepoch.from_dict({"a": [999]}, schema={"a": "int8"}),
        ),
        (midepoch.ColumnError, "int8", lambda: midepoch.from_pandas(pd.DataFrame({"a": [999]}), schema={"a": "int8"})),
        (midepoch.ColumnError, "several columns", lambda: midepoch.from_dict({1: [1], "1": [2]})),
        (midepoch.ColumnError, "several columns", lambda: midepoch.from_pandas(pd.concat([frame, frame], axis=1))),
        (midepoch.DataNotFoundError, "no paths.*from_generator", lambda: midepoch.from_files(row for row in [])),
        (midepoch.ColumnError, "several columns", lambda: midepoch.from_arrow(pa.table([[1], [2]], names=["a", "a"]))),
        (TypeError, "value for each row", lambda: midepoch.from_dict({"a": "text"})),
        (AttributeError, "midepoch.from_dict", lambda: midepoch.Dataset.from_dict({"a": [1]})),
        (AttributeError, "from_pandas", lambda: midepoch.from_polars),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()


def test_rows_that_nobody_has_opened_for_long_are_removed(tmp_path: Path) -> None:
    def make(value: int) -> midepoch.Dataset:
        return midepoch.from_dict({"a": [value]}, cache_dir=tmp_path)

    used = make(0)
    for value in (1, 2):
        make(value)
    folders = {path.parent for path in files(tmp_path)}
    long_ago = time.time() - tables.KEPT_SECONDS - 60
    for folder in folders:
        os.utime(folder / "complete.json", (long_ago, long_ago))
    gc.collect()
    data = make(1).pipeline.base.source.files[0].path  # opened: not written, and not unused any more
    make(9)
    left = files(tmp_path)
    assert len(left) == 3 and Path(data) in left
    assert rows_of(used) == [{"a": 0}]  # a process that runs for months
    assert rows_of(make(2)) == [{"a": 2}]
    Path(data).unlink()  # damaged: written again
    assert rows_of(make(1)) == [{"a": 1}]
    (tmp_path / "full").touch()
    with pytest.raises(midepoch.MidepochError, match=r"cannot be written.*cache_dir.*MIDEPOCH_CACHE"):
        midepoch.from_dict({"a": [1]}, cache_dir=tmp_path / "full" / "x")


def generate() -> Iterator[dict[str, Any]]:
    for i in range(2500):
        yield {"a": i}


MAKERS: dict[str, Callable[[Path], midepoch.Dataset]] = {
    "dict": lambda folder: midepoch.from_dict({"a": np.arange(2500)}, cache_dir=folder),
    "generator": lambda folder: midepoch.from_generator(generate, cache_dir=folder),
    "items": lambda folder: midepoch.from_map_style(range(2500), cache_dir=folder),
}


@pytest.mark.parametrize(
    ("kind", "first", "step"),
    [
        *((kind, 1 + number, 3) for number, kind in enumerate(MAKERS)),
        *(pytest.param(kind, 1, 1, marks=pytest.mark.slow) for kind in MAKERS),
    ],
)
def test_a_kill_while_rows_are_written_leaves_nothing_in_the_way(
    kind: str, first: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every system call that makes something visible, or every third: the next process starts again, cleanly."""
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    calls = 0

    def complete(folder: Path) -> bool:
        ds = MAKERS[kind](folder)
        return len(ds) == 2500 and (ds[1234] == 1234 or ds[1234] == {"a": 1234})

    def killed_at(call: int) -> Callable[[], bool]:
        def run() -> bool:
            for name in ("fsync", "replace", "rename", "mkdir", "open"):
                setattr(os, name, counted(getattr(os, name), call))
            return complete(tmp_path / "killed")

        return run

    def counted(real: Callable[..., Any], call: int) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return function

    call, status = first, forked(killed_at(first))
    while status == -signal.SIGKILL:
        call += step
        status = forked(killed_at(call))
    assert status == 0 and call > 6
    assert complete(tmp_path / "killed")
    assert len([path for path in (tmp_path / "killed").iterdir() if path.name != "lock"]) == 1
