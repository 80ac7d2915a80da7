"""Gathering strings by address: the same as pyarrow's own take."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midepoch.read.memory import gather_bytes

TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def ranges(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    wide = str(column.type).startswith("large")
    ends = np.frombuffer(column.buffers()[1], np.int64 if wide else np.int32, len(column) + 1).astype(np.int64)
    return ends[:-1] + column.buffers()[2].address, ends[1:] - ends[:-1]


@pytest.mark.parametrize("kind", TYPES, ids=str)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=20), st.data())
def test_gathers_what_take_gives(kind: pa.DataType, texts: list[str], data: st.DataObject) -> None:
    column = pa.array([*(text.encode() for text in texts), b"at least one byte"], pa.large_binary()).cast(kind)
    order = data.draw(st.lists(st.integers(0, len(texts)), min_size=1, max_size=40))
    starts, lengths = ranges(column)
    found = gather_bytes(starts[order], lengths[order], None, kind)
    assert found is not None
    found.validate(full=True)
    assert found.equals(column.take(pa.array(order)))


def test_nulls_and_many_windows_of_memory() -> None:
    """Arrays far apart in memory lie in other windows of 1 GiB: the views name them right."""
    far = [pa.array([f"{i} " + "x" * (1 << 20)]) for i in range(3)]
    spread = [pa.allocate_buffer(1 << 31) for _ in range(2)]  # never touched: address space only
    near = pa.array(["near", "text that is not short"])
    parts = [ranges(column) for column in (*far, near)]
    starts, lengths = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    found = gather_bytes(starts, lengths, pa.py_buffer(np.packbits([1, 1, 0, 1, 1], bitorder="little")), pa.string())
    assert found is not None
    wanted = [column[0].as_py() for column in far]
    assert found.to_pylist() == [*wanted[:2], None, "near", "text that is not short"]
    del spread


def test_empty_texts_need_no_memory() -> None:
    found = gather_bytes(np.zeros(3, np.int64), np.zeros(3, np.int64), None, pa.string())
    assert found is not None
    assert found.to_pylist() == ["", "", ""]
