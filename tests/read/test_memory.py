"""Reads at addresses: the same as pyarrow's own take, for any address, width and alignment, inside the buffers alone."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
import native
from characters import ENCODABLE
from data import write_arrow
from midepoch.read import columns as memory_module
from midepoch.read.columns import HeldBuffers, Memory, _Group, gatherer, grouped

TYPES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
BASES = (4096, 1 << 46, (1 << 47) - 4096, (1 << 48) - (1 << 20), 1 << 52, 1 << 56, (1 << 57) - 4096)


def gathered(columns: list[pa.Array], blocks: list[int], rows: list[int]) -> pa.Array:
    """Rows of some blocks of one column."""
    column = gatherer(columns[0].type, len(columns))
    assert column is not None
    assert all(column.open(number, block) for number, block in enumerate(columns))
    memory = Memory([buffer for block in columns for buffer in block.buffers() if buffer])
    found = column.gather(memory, np.array(blocks, np.int64), np.array(rows, np.int64))
    found.validate(full=True)
    return found


@pytest.mark.parametrize("many", [0, 256])
@pytest.mark.parametrize("kind", TYPES, ids=str)
@given(st.lists(st.none() | st.text(ENCODABLE, max_size=30), min_size=1, max_size=20), st.data())
@settings(max_examples=40)
def test_gathers_what_take_gives(kind: pa.DataType, many: int, texts: list[str | None], data: st.DataObject) -> None:
    column = pa.array([text and text.encode() for text in texts], pa.large_binary()).cast(kind)
    order = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "_MANY", many)
        found = gathered([column], [0] * len(order), order)
    assert found.equals(column.take(pa.array(order)))


def test_texts_of_many_buffers_and_nulls() -> None:
    far = [pa.array([f"{i} " + "x" * (1 << 20)]) for i in range(3)]
    spread = [pa.allocate_buffer(1 << 31) for _ in range(2)]  # never touched: address space only
    near = pa.array(["near", None, "text that is not short"])
    found = gathered([*far, near], [2, 0, 3, 3, 3], [0, 0, 2, 1, 0])
    assert found.to_pylist() == [far[2][0].as_py(), far[0][0].as_py(), "text that is not short", None, "near"]
    del spread


@pytest.mark.parametrize("many", [0, 256])
def test_texts_in_a_buffer_of_more_than_2_gib(many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is sparse."""
    monkeypatch.setattr(memory_module, "_MANY", many)
    path = tmp_path / "sparse"
    places = [5, (1 << 30) - 10, (1 << 31) - 7, (1 << 31) + (1 << 30) - 3, 5 << 29]
    with path.open("wb") as file:
        file.truncate((3 << 30) + 4096)
        for i, place in enumerate(places):
            file.seek(place)
            file.write(f"text number {i}".encode())
    buffer = pa.memory_map(str(path)).read_buffer()
    found = Memory([buffer]).join(np.array(places) + buffer.address, np.arange(len(places) + 1) * 13)
    assert bytes(found).decode() == "".join(f"text number {i}" for i in range(5))


@pytest.mark.parametrize("many", [0, 256])
def test_empty_texts_need_no_memory(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_MANY", many)
    assert gathered([pa.array(["", "", ""])], [0, 0], [2, 1]).to_pylist() == ["", ""]


@given(st.data(), st.sampled_from([1, 3, 7, 64, 1000, (1 << 15) - 1, 1 << 15, 70_001]))
def test_any_width_and_alignment(data: st.DataObject, width: int) -> None:
    raw = np.random.default_rng(width).integers(0, 256, width + 5000, dtype=np.uint8)
    buffers = [pa.py_buffer(raw), pa.py_buffer(raw[::-1].copy())]
    places = data.draw(st.lists(st.integers(0, 5000), max_size=20))
    which = data.draw(st.lists(st.integers(0, 1), min_size=len(places), max_size=len(places)))
    addresses = np.array([buffers[w].address + p for w, p in zip(which, places, strict=True)], dtype=np.int64)
    wanted = [np.frombuffer(buffers[w], np.uint8)[p : p + width] for w, p in zip(which, places, strict=True)]
    for reach in (0, 1 << 30, 1 << 60):  # every buffer a group, neighbours, all in one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory_module.grouped, "__defaults__", (reach,))
            memory = Memory(buffers)
        found = memory.gather(addresses, width)
        assert found.shape == (len(places), width)
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
        for by_kernel in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                native.use(patch, by_kernel)
                patch.setattr(memory_module, "_MANY", 0)
                joined = memory.join(addresses, np.arange(len(addresses) + 1) * width)
            assert bytes(joined) == b"".join(part.tobytes() for part in wanted)


def test_the_kernel_does_not_copy_from_outside_of_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    native.use(monkeypatch, True)
    monkeypatch.setattr(memory_module, "_MANY", 0)
    buffer = pa.py_buffer(bytes(100))
    for start, stop in ((-1, 5), (90, 101), (101, 102)):
        with pytest.raises(ValueError, match="out of bounds"):
            Memory([buffer]).join(np.array([buffer.address + start]), np.array([0, stop - start]))


@pytest.mark.parametrize("base", BASES, ids=hex)
def test_views_are_relative_to_their_base(base: int) -> None:
    """The arithmetic of addresses that this machine may not have: a view is made and aimed, never read."""
    group = _Group(base, base + (1 << 40), ())
    for width in (1, 4096, memory_module._WIDE - 1):
        view = group.view(width)
        assert view.shape == ((1 << 40) - width + 1, width)
        for offset in (0, 12_345, (1 << 40) - width):
            assert view[offset:].ctypes.data == base + offset


@pytest.mark.parametrize("base", BASES, ids=hex)
def test_neighbours_share_a_group(base: int) -> None:
    starts = base + np.array([0, 100, 1 << 20, (1 << 20) + (1 << 31)])
    stops = starts + np.array([100, 50, 4096, 10])
    firsts, ends = grouped(starts, stops)
    assert firsts.tolist() == [starts[0], starts[3]]
    assert ends.tolist() == [stops[2], stops[3]]
    assert (firsts.searchsorted(starts, side="right") - 1).tolist() == [0, 0, 0, 1]
    assert grouped(starts, stops, reach=0)[0].tolist() == starts[[0, 2, 3]].tolist()


def test_no_view_reaches_past_its_buffers() -> None:
    raw = pa.py_buffer(bytes(range(100)))
    memory = Memory([raw])
    assert memory.gather(np.array([raw.address + 90]), 10).tobytes() == bytes(range(90, 100))
    with pytest.raises(IndexError):
        memory.gather(np.array([raw.address + 91]), 10)


def test_buffers_inside_others_add_nothing() -> None:
    raw = pa.py_buffer(bytes(range(100)))
    for parts in ([raw, raw.slice(0, 10), raw.slice(50)], [raw.slice(0, 10), raw.slice(0, 99), raw, raw]):
        grown = HeldBuffers()
        for number, part in enumerate(parts):
            grown.add(number, [part])
            assert grown.memory.gather(np.array([part.address + 7]), 3).tobytes() == bytes(part)[7:10]
        for memory in (Memory(parts), grown.memory, Memory.union([Memory([part]) for part in parts])):
            assert memory.gather(np.array([raw.address]), 100).tobytes() == bytes(raw)
            with pytest.raises(IndexError):
                memory.gather(np.array([raw.address + 1]), 100)


def test_what_was_gathered_from_stays_mapped(tmp_path: Path) -> None:
    """A released file is unmapped only when nothing can read from it any more."""

    class Tracked(np.ndarray):
        pass

    raw = np.arange(100, dtype=np.uint8).view(Tracked)
    gone = weakref.ref(raw)
    held = HeldBuffers()
    held.add(0, [pa.py_buffer(raw)])
    address, memory = raw.ctypes.data, held.memory
    del raw
    held.remove(0)
    assert not held.memory.buffers
    assert memory.gather(np.array([address + 7]), 1)[0, 0] == 7
    view = memory._groups[0].view(4)
    del memory
    gc.collect()
    assert view[3].tolist() == [3, 4, 5, 6]
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("width", [mmap.PAGESIZE, 1 << 14, 1 << 16, 3 << 16], ids=str)
@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_wide_rows_are_read_in_any_order(tmp_path: Path, width: int, format: str) -> None:
    """Rows of 64 KiB and more: 16,384 tokens, an image, a matrix."""
    values = np.arange(12 * width // 4, dtype=np.int32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values), width // 4)
    table = pa.table({"id": pa.array(range(12)), "tokens": lists})
    if format == "arrow":
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    else:
        pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    ds = (
        midepoch.from_files(str(tmp_path), index_dir=tmp_path / "ix").shuffle(seed=3, scope="rows").with_format("numpy")
    )
    seen = list(ds.loader(5))
    ids = np.concatenate([batch["id"] for batch in seen])
    assert sorted(ids.tolist()) == list(range(12))
    assert np.array_equal(np.concatenate([batch["tokens"] for batch in seen]), values.reshape(12, -1)[ids])


def ids(batches: Any, name: str = "id") -> list[Any]:
    return [value for batch in batches for value in batch[name].tolist()]


def test_a_mapped_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"id": range(40)}), 10)
    ds = midepoch.from_files(path).with_format("numpy")
    other = write_arrow(tmp_path / "b.arrow", pa.table({"id": range(7000, 7040)}), 10)
    assert other.stat().st_size == path.stat().st_size
    os.utime(other, ns=(1, 1))
    os.replace(other, path)
    with pytest.raises(midepoch.DataChangedError, match="its contents differ"):
        list(ds.loader(4))
    write_arrow(path, pa.table({"id": range(40)}), 10)
    os.utime(path, ns=(2, 2))  # copied, or touched: the same data
    assert ids(ds.loader(4)) == list(range(40))
