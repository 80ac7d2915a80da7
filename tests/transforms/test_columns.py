"""What a column looks like follows from its type and from where the source has nulls, never from the batch."""

from __future__ import annotations

import datetime as dt
import uuid
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import midepoch
from data import write_arrow
from midepoch.errors import ColumnError
from midepoch.testing import assert_resumes_exactly

ROWS = 12
UTC = dt.timezone.utc
LARGE = (1 << 53) + 1


def holes(values: list[Any], *places: int) -> list[Any]:
    return [None if i in places else value for i, value in enumerate(values)]


def tensors(kind: pa.DataType, values: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


NUMBERS = list(range(ROWS))
LISTS = [[i, LARGE] for i in NUMBERS]
RAGGED = [[i] * (i % 3) for i in NUMBERS]
SIXES = [[6 * i + j for j in range(6)] for i in NUMBERS]
TIMES = [dt.datetime(2020, 1, 1 + i, 3, tzinfo=UTC) for i in NUMBERS]
STRUCT = pa.struct(
    [
        ("n", pa.int64()),
        ("zoned", pa.timestamp("us", "Europe/Berlin")),
        ("nano", pa.timestamp("ns")),
        ("day", pa.date32()),
        ("year", pa.timestamp("s")),
        ("took", pa.duration("ms")),
        ("words", pa.list_(pa.string())),
    ]
)
STRUCTS = [
    {
        "n": LARGE + i,
        "zoned": TIMES[i],
        "nano": i * 10**9 + 7,
        "day": dt.date(2020, 1, 1 + i),
        "year": -(10**10),
        "took": dt.timedelta(seconds=i),
        "words": ["a"] * (i % 2),
    }
    for i in NUMBERS
]

COLUMNS: dict[str, pa.Array] = {
    "int": pa.array(NUMBERS, pa.int32()),
    "int with nulls": pa.array(holes(NUMBERS, 5), pa.int32()),
    "float with nulls": pa.array(holes([i / 2 for i in NUMBERS], 5), pa.float32()),
    "bool": pa.array([i % 2 == 0 for i in NUMBERS]),
    "bool with nulls": pa.array(holes([i % 2 == 0 for i in NUMBERS], 0)),
    "text with nulls": pa.array(holes([str(i) for i in NUMBERS], 3)),
    "lists": pa.array(LISTS, pa.list_(pa.int64())),
    "lists with nulls": pa.array(holes(LISTS, 4), pa.list_(pa.int64())),
    "lists with null values": pa.array([[i, None if i == 7 else i] for i in NUMBERS], pa.list_(pa.int64())),
    "ragged": pa.array(RAGGED, pa.list_(pa.int16())),
    "ragged with nulls": pa.array(holes(RAGGED, 2, 3), pa.list_(pa.int16())),
    "fixed": pa.array(SIXES, pa.list_(pa.int32(), 6)),
    "fixed with nulls": pa.array(holes(SIXES, 6), pa.list_(pa.int32(), 6)),
    "deep": pa.array([[row, row] for row in LISTS], pa.list_(pa.list_(pa.int64()))),
    "deep with nulls": pa.array(holes([[row, row] for row in LISTS], 1), pa.list_(pa.list_(pa.int64()))),
    "times": pa.array(TIMES, pa.timestamp("us", "UTC")),
    "times with nulls": pa.array(holes(TIMES, 8), pa.timestamp("us", "UTC")),
    "structs": pa.array(STRUCTS, STRUCT),
    "structs with null children": pa.array([{**s, "n": None if s["n"] % 5 == 0 else 1} for s in STRUCTS], STRUCT),
    "structs with nulls": pa.array(holes(STRUCTS, 9), STRUCT),
    "tensors": tensors(pa.fixed_shape_tensor(pa.int32(), [2, 3]), SIXES),
    "tensors with nulls": tensors(pa.fixed_shape_tensor(pa.int32(), [2, 3]), holes(SIXES, 10)),
    "transposed": tensors(pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0]), SIXES),
    "uuid": tensors(pa.uuid(), [uuid.UUID(int=i).bytes for i in NUMBERS]),
    "uuid with nulls": tensors(pa.uuid(), holes([uuid.UUID(int=i).bytes for i in NUMBERS], 1)),
    "bool8": tensors(pa.bool8(), [i % 3 for i in NUMBERS]),
    "bool8 with nulls": tensors(pa.bool8(), holes([i % 3 for i in NUMBERS], 11)),
}


def described(value: Any) -> Any:
    """A value with its types and shapes, to be compared."""
    if isinstance(value, dict):
        return {name: described(inner) for name, inner in value.items()}
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype == object:
            return [described(inner) for inner in np.asarray(value).reshape(-1)]
        return "array", str(value.dtype), value.shape, repr(value.tolist())
    if isinstance(value, (list, tuple)):
        return [described(inner) for inner in value]
    if isinstance(value, pa.Table):
        return [(str(column.type), repr(column.to_pylist())) for column in value.columns]
    return type(value).__name__, repr(value)


def rows_of(batch: Any, count: int) -> list[Any]:
    if isinstance(batch, pa.Table):
        return [described(batch.slice(i, 1)) for i in range(count)]
    return [described(_at(batch["x"], i)) for i in range(count)]


def _at(column: Any, i: int) -> Any:
    return {name: _at(inner, i) for name, inner in column.items()} if isinstance(column, dict) else column[i]


@pytest.mark.parametrize("kind", ["python", "numpy", "torch", "arrow"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_row_does_not_depend_on_its_batch(tmp_path: Path, name: str, kind: str) -> None:
    table = pa.table({"x": COLUMNS[name]})
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", table, 5)).with_format(kind)
    whole = rows_of(ds[:], ROWS)
    for size in (1, 2, 5, 7):
        cut = [
            row for start in range(0, ROWS, size) for row in rows_of(ds[start : start + size], min(size, ROWS - start))
        ]
        assert cut == whole, size
    order = [7, 3, 11, 0]
    assert rows_of(ds[order], 4) == [whole[i] for i in order]
    for workers in (0, 2) if kind in ("numpy", "torch") and name in ("tensors", "deep with nulls") else (0,):
        batches = list(ds.loader(5, workers))
        assert [row for batch in batches for row in rows_of(batch, _length(batch))] == whole


def _length(batch: Any) -> int:
    if isinstance(batch, pa.Table):
        return batch.num_rows
    column = batch["x"]
    while isinstance(column, dict):
        column = next(iter(column.values()))
    return len(column)


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_extension_types_are_what_they_say(tmp_path: Path, kind: str, suffix: str) -> None:
    table = pa.table({name: COLUMNS[name] for name in COLUMNS if name.split()[0] in _EXTENSIONS})
    path = tmp_path / f"a.{suffix}"
    pq.write_table(table, path) if suffix == "parquet" else write_arrow(path, table, 5)
    batch = midepoch.from_files(path).with_format(kind)[:3]
    expected = np.array(SIXES[:3]).reshape(3, 2, 3)
    for name, values in (("tensors", expected), ("transposed", expected.transpose(0, 2, 1))):
        assert np.array_equal(np.asarray(batch[name]), values)
        assert kind == "python" or batch[name].dtype in (np.int32, torch.int32)
    own = COLUMNS["transposed"].slice(0, 3).to_numpy_ndarray()
    assert np.array_equal(np.asarray(batch["transposed"]), own)
    assert list(batch["uuid"]) == [uuid.UUID(int=i) for i in range(3)]
    assert [bool(value) for value in batch["bool8"]] == [False, True, True]
    assert kind == "python" or batch["bool8"].dtype in (np.bool_, torch.bool)


_EXTENSIONS = ("tensors", "transposed", "uuid", "bool8")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_times_in_a_struct_are_those_of_a_column(tmp_path: Path, kind: str) -> None:
    table = pa.table({"x": COLUMNS["structs"], **dict(zip(STRUCT.names, COLUMNS["structs"].flatten(), strict=True))})
    batch = midepoch.from_files(write_arrow(tmp_path / "a.arrow", table, 5)).with_format(kind)[:]
    for name in STRUCT.names:
        assert described(batch["x"][name]) == described(batch[name]), name


def test_years_that_python_cannot_hold_are_refused_not_wrapped(tmp_path: Path) -> None:
    kind = pa.struct([("year", pa.timestamp("s"))])
    for name, column in (("plain", pa.array([10**17], pa.timestamp("s"))), ("x", pa.array([{"year": 10**17}], kind))):
        ds = midepoch.from_files(write_arrow(tmp_path / f"{name}.arrow", pa.table({name: column}), 5))
        for way in ("python", "torch"):
            with pytest.raises(ColumnError, match=f"column '{name}' has a time .* with_format"):
                ds.with_format(way)[:]
        found = ds.with_format("numpy")[:][name]
        assert (found["year"] if name == "x" else found).dtype == "datetime64[s]"


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_arrays_of_datasets_keep_their_values_beside_a_null(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "square": datasets.Array2D((2, 2), "int64"),
            "long": datasets.Array2D((None, 2), "float32"),
            "cube": datasets.Array3D((1, 2, 2), "uint8"),
        }
    )
    rows = [
        {
            "square": None if i == 5 else [[(1 << 24) + 1 + i, 1], [2, 3]],
            "long": None if i == 3 else [[i, 0.5]] * (1 + i % 2),
            "cube": [[[i, 1], [2, 3]]],
        }
        for i in range(8)
    ]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "d"))
    ds = midepoch.load_from_disk(tmp_path / "d").with_format(kind)
    for name, dtype in (("square", "int64"), ("long", "float32"), ("cube", "uint8")):
        whole = ds[:][name]
        for i, row in enumerate(rows):
            (alone,) = ds[[i]][name]
            assert described(whole[i]) == described(alone)
            if row[name] is None:
                assert alone is None
            else:
                assert np.array_equal(np.asarray(alone), np.array(row[name], dtype))
                assert kind == "python" or str(alone.dtype).split(".")[-1] == dtype


def test_extension_types_of_datasets_are_the_same_in_every_batch(tmp_path: Path) -> None:
    """Their arrays give their storage when they are indexed: pieces of blocks are sliced instead."""
    features = datasets.Features({"id": datasets.Value("int64"), "a": datasets.Array2D((2, 2), "int64")})
    rows = {"id": list(range(60)), "a": [[[i, 1], [2, 3]] for i in range(60)]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    ds = midepoch.load_from_disk(tmp_path / "saved", index_dir=tmp_path / "ix").with_format("arrow")
    whole = list(ds.loader(4))
    assert {str(table.schema.field("a").type) for table in whole} == {str(ds.schema.field("a").type)}
    assert_resumes_exactly(lambda: ds.loader(4), tail=3)
    streamed = list(ds.filter(lambda row: True).loader(4))
    assert {str(table.schema.field("a").type) for table in streamed} == {str(ds.schema.field("a").type)}


def test_a_null_list_of_a_fixed_size_changes_no_other_value(tmp_path: Path) -> None:
    big = 2**53 + 1
    lists = pa.array([None if i == 30 else [big, i] for i in range(40)], pa.list_(pa.int64(), 2))
    path = write_arrow(tmp_path / "a.arrow", pa.table({"a": lists}), 8)
    for batch in midepoch.from_files(path, index_dir=tmp_path / "ix").with_format("numpy").loader(4):
        assert all(row is None or (row.dtype == np.int64 and row[0] == big) for row in batch["a"])
