"""Rows of different lengths as arrays: padded, or one after the other, as plain Python lays them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
import native
from midepoch.errors import ColumnError, MapError
from midepoch.transforms.batch import Batch
from midepoch.transforms.formats import finish, present
from midepoch.transforms.layout import Layout


def batch_of(**columns: Any) -> Batch:
    count = len(next(iter(columns.values())))
    return Batch(columns, np.arange(100, 100 + count), np.arange(count), owned=True)


def in_the_middle(lists: Callable[[pa.DataType], pa.DataType]) -> Callable[[list[list[Any]], str], Any]:
    """An Arrow column that is a slice of a longer one."""

    def make(rows: list[list[Any]], dtype: str) -> pa.Array:
        around: list[list[Any]] = [[0] * 3, [1]]
        full = [np.array(row, dtype).tolist() for row in [*around, *rows, *around]]
        return pa.array(full, lists(pa.from_numpy_dtype(np.dtype(dtype)))).slice(2, len(rows))

    return make


def objects(rows: list[list[Any]], dtype: str) -> Any:
    out = np.empty(len(rows), object)
    out[:] = [np.array(row, dtype) for row in rows]
    return out


MAKERS: dict[str, Callable[[list[list[Any]], str], Any]] = {
    "list": in_the_middle(pa.list_),
    "large_list": in_the_middle(pa.large_list),
    "list_view": in_the_middle(pa.list_view),
    "arrays": lambda rows, dtype: [np.array(row, dtype) for row in rows],
    "objects": objects,
    "tensors": lambda rows, dtype: [torch.from_numpy(np.array(row, dtype)) for row in rows],
    "other byte order": lambda rows, dtype: [np.array(row, np.dtype(dtype).newbyteorder()) for row in rows],
}
DTYPES = ["bool", "uint8", "int16", "float16", "int32", "float32", "int64", "float64"]


@settings(max_examples=80)
@given(data=st.data(), maker=st.sampled_from(sorted(MAKERS)), dtype=st.sampled_from(DTYPES))
def test_arrays_are_those_of_plain_python(data: st.DataObject, maker: str, dtype: str) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    multiple = data.draw(st.integers(1, 5))
    top = 2 if dtype == "bool" else 90
    rows = [[(7 * i + j) % top for j in range(size)] for i, size in enumerate(sizes)]
    labels = [[-j for j in range(size)] for size in sizes]
    pad = 1 if dtype == "bool" else 3
    batch = batch_of(x=MAKERS[maker](rows, dtype), labels=labels, y=list(range(len(rows))))
    for by_kernel in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            native.use(monkeypatch, by_kernel)
            padded = Layout("padded", "x", multiple, (("x", pad),)).arrange(batch)
            varlen = Layout("varlen", "x", multiple, (("x", pad),)).arrange(batch)
        assert padded["x"].dtype == varlen["x"].dtype == np.dtype(dtype)
        width = -(-max(sizes) // multiple) * multiple
        assert padded["x"].tolist() == [row + [pad] * (width - len(row)) for row in rows]
        assert padded["labels"].tolist() == [row + [-100] * (width - len(row)) for row in labels]
        assert padded["attention_mask"].tolist() == [[1] * size + [0] * (width - size) for size in sizes]
        assert padded["attention_mask"].dtype == np.int64
        assert list(padded) == ["x", "labels", "y", "attention_mask"]

        tail = -sum(sizes) % multiple
        assert varlen["x"].tolist() == sum(rows, []) + [pad] * tail
        assert varlen["labels"].tolist() == sum(labels, []) + [-100] * tail
        assert varlen["position_ids"].tolist() == [j for size in sizes for j in range(size)] + [0] * tail
        assert varlen["segment_ids"].tolist() == [i for i, n in enumerate(sizes, 1) for _ in range(n)] + [0] * tail
        assert varlen["cu_seqlens"].tolist() == np.cumsum([0, *sizes]).tolist()
        assert varlen["max_seqlen"] == max(sizes)
        assert {varlen[name].dtype for name in ("position_ids", "segment_ids", "cu_seqlens")} == {np.dtype(np.int32)}
        assert padded["y"].tolist() == varlen["y"].tolist() == list(range(len(rows)))


@pytest.mark.parametrize("column", [np.arange(6).reshape(3, 2), torch.arange(6).reshape(3, 2)], ids=["numpy", "torch"])
def test_a_map_may_return_one_array_for_all_rows(column: Any) -> None:
    assert Layout("padded", "x", 4).arrange(batch_of(x=column))["x"].tolist() == [
        [0, 1, 0, 0],
        [2, 3, 0, 0],
        [4, 5, 0, 0],
    ]
    assert Layout("varlen", "x").arrange(batch_of(x=column))["x"].tolist() == list(range(6))


def test_lists_of_one_size_also_in_a_slice_and_with_nulls() -> None:
    column = pa.array([[9, 9], [1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)).slice(1)
    varlen = Layout("varlen", "x").arrange(batch_of(x=column))
    assert varlen["x"].tolist() == [1, 2, 3, 4]
    assert varlen["cu_seqlens"].tolist() == [0, 2, 2, 4]


def test_a_null_list_is_empty_whatever_is_stored_under_it() -> None:
    items = pa.array([1, 2, None, 4, 5], pa.int64())
    column = pa.ListArray.from_arrays(pa.array([0, 2, 4, 5], pa.int32()), items, mask=pa.array([False, True, False]))
    assert Layout("varlen", "x").arrange(batch_of(x=column))["x"].tolist() == [1, 2, 5]
    assert Layout("varlen", "x").arrange(batch_of(x=[[1, 2], None, [5]]))["x"].tolist() == [1, 2, 5]


@pytest.mark.parametrize(
    "column", [pa.array([[1], [2, None]]), [[1], [2, None]], [[1], [None, 2]], [[None, 1], [None, 2]]]
)
def test_a_null_among_numbers_is_an_error(column: Any) -> None:
    with pytest.raises(MapError, match=r"column 'x' has a null among the numbers of row 10[01] of the dataset"):
        Layout("padded", "x").arrange(batch_of(x=column))


@pytest.mark.parametrize("kind", ["padded", "varlen"])
def test_another_length_is_an_error_unless_the_column_is_named(kind: str) -> None:
    batch = batch_of(x=pa.array([[1], [2, 3]]), spans=pa.array([[0], [0, 3, 2]]))
    with pytest.raises(MapError, match=r"'spans' has 3 numbers in row 101 of the dataset, but 'x' has 2.*pad_values="):
        Layout(kind, "x").arrange(batch)
    arranged = Layout(kind, "x", other=("spans",)).arrange(batch)
    assert [row.tolist() for row in arranged["spans"]] == [[0], [0, 3, 2]]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_columns_without_tokens_are_as_the_format_gives_them(kind: str) -> None:
    columns = {
        "text": pa.array(["a", "b"]),
        "score": pa.array([0.5, 1.5]),
        "words": pa.array([["a"], ["b", "c"]]),
        "image": np.zeros((2, 3, 4)),
        "tags": [["a"], []],
        "scalar": torch.tensor([1, 2]),
        "volume": torch.zeros(2, 3, 4, dtype=torch.bfloat16 if kind == "torch" else torch.float32),
        "struct": pa.array([{"a": 1}, {"a": 2}]),
        "nothing": [None, None],
        "nested": pa.array([[[1, 2]], [[3], [4]]]),
    }
    batch = batch_of(x=pa.array([[1], [2, 3]]), **columns)
    arranged = Layout("padded", "x").arrange(batch, kind=kind)
    shown: Any = present(batch.with_columns(columns), kind)
    assert list(arranged) == ["x", *columns, "attention_mask"]
    for name in columns:
        assert repr(arranged[name]) == repr(shown[name]), name


def test_a_mask_of_the_data_is_kept_and_padded_with_0() -> None:
    batch = batch_of(x=[[1, 2, 3], [4]], attention_mask=[[1, 1, 0], [1]])
    assert Layout("padded", "x", pads=(("x", 9),)).arrange(batch)["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]


def test_columns_that_would_be_overwritten_are_an_error() -> None:
    for name in ("position_ids", "segment_ids", "cu_seqlens", "max_seqlen"):
        with pytest.raises(ColumnError, match=f"varlen layout: it adds '{name}', which the batch already has"):
            Layout("varlen", "x").arrange(batch_of(x=[[1]], **{name: [[0]]}))
    assert Layout("padded", "x").arrange(batch_of(x=[[1]], position_ids=[[0]]))["position_ids"].tolist() == [[0]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": pa.array(["a"])}, "'x' does not contain lists of numbers"),
        ({"x": [1]}, "'x' does not contain lists of numbers"),
        ({"x": [[2**70]]}, "'x' does not contain lists of numbers"),
        ({"x": [np.zeros((1, 1))]}, "'x' does not contain lists of numbers"),
        ({"y": [[1]]}, "padded layout: no column 'x'"),
        ({"x": [np.zeros(1, np.int32), np.zeros(1)]}, "'x' comes as float64 and as int32"),
        ({"x": torch.zeros(1, 2, dtype=torch.bfloat16)}, "'x' is torch.bfloat16, which numpy does not have"),
        ({"x": [[1]], "labels": np.zeros((1, 1), np.uint8)}, "padding of -100 does not fit into column 'labels'"),
    ],
)
def test_columns_that_cannot_be_laid_out(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        Layout("padded", "x").arrange(batch_of(**columns))


def test_a_column_with_numbers_in_some_rows_only_is_an_error() -> None:
    with pytest.raises(MapError, match="'y' has lists of numbers, but not in row 101"):
        Layout("padded", "x").arrange(batch_of(x=[[1], [2]], y=[[1], "b"]))


def test_values_for_padding_name_columns_that_are_padded() -> None:
    with pytest.raises(ColumnError, match="no column 'z'"):
        Layout("padded", "x", pads=(("z", 1),)).arrange(batch_of(x=[[1]]))
    with pytest.raises(ColumnError, match="a padding value is given for 'y', which is not laid out"):
        Layout("padded", "x", pads=(("y", 1),)).arrange(batch_of(x=[[1]], y=["a"]))


def test_settings_are_checked() -> None:
    ds = midepoch.from_dict({"x": [[1], [2]]})
    with pytest.raises(ValueError, match="layout must be one of 'padded', 'varlen', got 'ragged'"):
        ds.loader(2, layout="ragged", length="x")
    with pytest.raises(ValueError, match="pad_to_multiple_of=….: expected at least 1, got 0"):
        ds.loader(2, layout="padded", length="x", pad_to_multiple_of=0)
    with pytest.raises(ValueError, match="'x': None}: this is the column of tokens, which is always padded"):
        ds.loader(2, layout="padded", length="x", pad_values={"x": None})


@pytest.mark.parametrize("empty", [pa.array([], pa.list_(pa.int32())), [], pa.array([[]], pa.list_(pa.int32())), [[]]])
def test_no_rows_and_no_tokens(empty: Any) -> None:
    rows = len(empty)
    batch = batch_of(x=empty, labels=[[]] * rows, text=["a"] * rows)
    padded, varlen = (Layout(kind, "x", 8).arrange(batch) for kind in ("padded", "varlen"))
    assert padded["x"].shape == padded["attention_mask"].shape == (rows, 0)
    assert varlen["x"].shape == varlen["segment_ids"].shape == (0,)
    assert varlen["cu_seqlens"].tolist() == [0] * (rows + 1)
    assert varlen["max_seqlen"] == 0
    assert padded["text"] == varlen["text"] == ["a"] * rows


@pytest.mark.parametrize("kind", ["padded", "varlen"])
def test_arrays_are_written_to_the_given_memory_once(kind: str) -> None:
    given_arrays: list[Any] = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if len(given_arrays) == 3:
            return None  # no room
        given_arrays.append(np.full(shape, 77, dtype))
        return given_arrays[-1]

    batch = batch_of(x=pa.array([[1], [2, 3]]), labels=[[1], [2, 3]])
    plain = Layout(kind, "x", 4).arrange(batch)
    arranged = Layout(kind, "x", 4).arrange(batch, allocate)
    assert sum(any(each is array for array in given_arrays) for each in arranged.values()) == 3
    for name, values in plain.items():
        np.testing.assert_array_equal(arranged[name], values)


def test_arrays_become_tensors() -> None:
    batch = batch_of(x=pa.array([[1], [2, 3]], pa.list_(pa.int32())), y=pa.array([1.5, 2.5]))
    tensors = finish(Layout("varlen", "x").arrange(batch), "torch")
    assert tensors["x"].dtype == tensors["cu_seqlens"].dtype == torch.int32
    assert tensors["cu_seqlens"].tolist() == [0, 1, 3]
    assert tensors["y"].tolist() == [1.5, 2.5]
    tensors["x"][0] = 5  # writable, and not the memory of the file
    assert batch.columns["x"].to_pylist() == [[1], [2, 3]]
