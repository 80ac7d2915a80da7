"""What comes out in each format, nulls included. tests/loader/test_jax.py has JAX."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch

import midepoch
from data import write_arrow
from midepoch.testing import same

TABLE = pa.table(
    {
        "i": pa.array([1, 2, 3, 4], pa.int32()),
        "holes": pa.array([1, None, 3, 4], pa.int64()),
        "f": pa.array([0.5, None, 2.5, 3.5], pa.float32()),
        "b": pa.array([True, False, True, True]),
        "maybe": pa.array([True, None, False, True]),
        "s": ["a", None, "ccc", ""],
        "same": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.int64())),
        "ragged": pa.array([[1], [], [2, 3], [4]], pa.list_(pa.int16())),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float64(), 2)),
        "gone": pa.array([[1], None, [2], [3]], pa.list_(pa.int16())),
        "pair": pa.array([{"x": i, "y": str(i)} for i in range(4)]),
        "day": pa.array([datetime.date(2026, 1, i + 1) for i in range(4)]),
        "words": pa.array([["a"], ["b", "c"], [], ["d"]]),
    }
)


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    return midepoch.from_files(write_arrow(tmp_path / "a.arrow", TABLE, 3))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2], [1]])
def test_python(ds: midepoch.Dataset, order: list[int]) -> None:
    expected = TABLE.take(order).to_pylist()
    assert list(ds.select(order)) == expected
    assert ds[order] == TABLE.take(order).to_pydict()


def expected_numpy(rows: list[int]) -> dict[str, Any]:
    nan = np.nan
    pick = lambda values: [values[row] for row in rows]  # noqa: E731
    return {
        "i": np.array(pick([1, 2, 3, 4]), np.int32),
        "holes": np.array(pick([1, nan, 3, 4]), np.float64),
        "f": np.array(pick([0.5, nan, 2.5, 3.5]), np.float32),
        "b": np.array(pick([True, False, True, True])),
        "maybe": np.array(pick([1, nan, 0, 1]), np.float64),
        "same": np.array(pick([[1, 2], [3, 4], [5, 6], [7, 8]]), np.int64),
        "fixed": np.array(pick([[1, 2], [3, 4], [5, 6], [7, 8]]), np.float64),
    }


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 0, 2], [2, 3], [0]])
def test_numpy_dtypes_do_not_depend_on_the_batch(ds: midepoch.Dataset, rows: list[int]) -> None:
    found = ds.with_format("numpy")[rows]
    for name, values in expected_numpy(rows).items():
        assert same(found[name], values), name
        assert found[name].flags.writeable
    assert found["s"].dtype == object
    assert found["s"].tolist() == [TABLE["s"][row].as_py() for row in rows]
    assert found["day"].dtype == "datetime64[D]"
    assert [None if v is None else v.tolist() for v in found["gone"]] == [TABLE["gone"][row].as_py() for row in rows]
    assert found["pair"]["x"].tolist() == rows


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 0, 2]])
def test_torch(ds: midepoch.Dataset, rows: list[int]) -> None:
    found = ds.with_format("torch")[rows]
    for name, values in expected_numpy(rows).items():
        assert isinstance(found[name], torch.Tensor)
        assert same(found[name].numpy(), values), name
    assert found["s"] == [TABLE["s"][row].as_py() for row in rows]
    assert [t.tolist() for t in found["ragged"]] == [TABLE["ragged"][row].as_py() for row in rows]
    assert found["words"] == [TABLE["words"][row].as_py() for row in rows]
    first = next(iter(ds.with_format("torch")))
    assert first["i"] == torch.tensor(1)
    assert first["fixed"].tolist() == [1.0, 2.0]


def test_arrow(ds: midepoch.Dataset) -> None:
    assert ds.with_format("arrow")[[3, 0]].equals(TABLE.take([3, 0]).combine_chunks())
    assert next(iter(ds.with_format("arrow"))).to_pylist() == TABLE.slice(0, 1).to_pylist()
    made = ds.map(lambda row: {"t": row["i"] * 2, "v": [1, 2]}).with_format("arrow")[:]
    assert made.column("t").to_pylist() == [2, 4, 6, 8]
    assert made.column("v").to_pylist() == [[1, 2]] * 4


def test_unknown_format(ds: midepoch.Dataset) -> None:
    with pytest.raises(ValueError, match="'python', 'numpy', 'torch', 'arrow', 'jax'"):
        ds.with_format("pandas")


def test_writing_to_what_was_handed_out_changes_nothing_else(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(64), "y": np.arange(64.0)})
    for codec in (None, "zstd"):
        options = pa.ipc.IpcWriteOptions(compression=codec)
        ds = midepoch.from_files(write_arrow(tmp_path / f"{codec}.arrow", table, 64, options=options))
        for make in (lambda d=ds: d, lambda d=ds: d.shuffle(seed=1)):
            reader = make().with_format("numpy")
            expected = [batch["x"].copy() for batch in reader.iter(8)]
            for batch in reader.iter(8):
                batch["x"][:] = -1
            assert all(map(np.array_equal, (batch["x"] for batch in reader.iter(8)), expected))
            loader = make().loader(8)
            for batch, values in zip(loader, expected, strict=True):
                assert batch["x"].tolist() == values.tolist()
                batch["x"].zero_()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_empty_list_of_lists_has_nothing_in_it(kind: str, tmp_path: Path) -> None:
    values = [[], [[1, 2]], [[]], None, [[3], []]]
    pq.write_table(pa.table({"x": pa.array(values, pa.list_(pa.list_(pa.int64())))}), tmp_path / "a.parquet")
    ds = midepoch.from_files(tmp_path / "a.parquet").with_format(kind)
    found = [None if row["x"] is None else [list(map(int, inner)) for inner in row["x"]] for row in ds]
    assert found == values


def test_empty_lists_of_a_map_are_arrays(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(4)}), tmp_path / "a.parquet")
    ds = midepoch.from_files(tmp_path / "a.parquet").map(lambda row: {"y": [1.5] * (row["x"] % 3)})
    assert [value.tolist() for value in next(iter(ds.loader(4)))["y"]] == [[], [1.5], [1.5, 1.5], []]
    assert ds.with_format("numpy")[0]["y"].shape == (0,)


def test_integers_that_no_array_holds_stay(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(2)}), tmp_path / "a.parquet")
    ds = midepoch.from_files(tmp_path / "a.parquet").with_format("numpy").map(lambda row: {"y": [2**63 + 1, -1]})
    assert [list(row["y"]) for row in ds] == [[2**63 + 1, -1]] * 2


def test_transposed_tensors_of_a_map_are_stacked(ds: midepoch.Dataset) -> None:
    def image(row: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        return {"image": (torch.arange(24).reshape(2, 4, 3) + row["i"]).to(dtype).permute(2, 0, 1)}

    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        batch = next(ds.map(image, fn_kwargs={"dtype": dtype}).loader(4))["image"]
        expected = torch.stack([image({"i": i}, dtype)["image"] for i in (1, 2, 3, 4)])
        assert batch.dtype == dtype and batch.is_contiguous() and torch.equal(batch, expected)


def test_sparse_tensors_of_a_map_are_stacked(ds: midepoch.Dataset) -> None:
    batch = ds.with_format("torch").map(lambda row: {"sparse": torch.eye(3).to_sparse() * row["i"]})[:4]["sparse"]
    assert batch.is_sparse and torch.equal(batch.to_dense(), torch.stack([torch.eye(3) * i for i in (1, 2, 3, 4)]))
