"""The kernel and numpy give the same results, and refuse the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import native
from midepoch import _native
from midepoch._native import library

TYPES = [np.bool_, np.int8, np.uint8, np.int16, np.float16, np.int32, np.float32, np.int64, np.uint64, np.float64]


def both(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """The result of both paths."""
    with monkeypatch.context() as patch:
        native.use(patch, True)
        ours = run()
    with monkeypatch.context() as patch:
        native.use(patch, False)
        theirs = run()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    return ours


def values(count: int, dtype: Any, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_ranges_are_copied_and_filled_alike(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    source = np.zeros(500, dtype) if dtype is np.bool_ else values(500, dtype)
    source[::3] = 1
    sizes = random.integers(0, 40, 30)
    starts, targets = random.integers(0, 460, 30), np.cumsum(sizes) - sizes

    def run() -> list[Any]:
        out = np.zeros(int(sizes.sum()) + 5, dtype)
        _native.copy_ranges(source, starts, sizes, out, targets)
        copied = out.copy()
        _native.fill_ranges(out, 1, targets[::2], sizes[::2])
        return [copied.view(np.uint8), out.view(np.uint8)]

    copied, _ = both(monkeypatch, run)
    expected = np.concatenate([source[a : a + n] for a, n in zip(starts, sizes, strict=True)]).view(np.uint8)
    assert (copied[: len(expected)] == expected).all() and not copied[len(expected) :].any()


def test_sources_may_be_unaligned_strided_or_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = values(801, np.uint8)
    starts, sizes, targets = np.array([0, 40]), np.array([30, 50]), np.array([5, 40])

    def run() -> list[Any]:
        unaligned, strided, out = raw[1:].view(np.int64), values(200, np.int64)[::2], np.zeros(100, np.int64)
        _native.copy_ranges(unaligned, starts, sizes, out, targets)
        first = out.copy()
        _native.copy_ranges(strided, starts, sizes, out, targets)
        second = out.copy()
        _native.copy_ranges(out, np.array([0]), np.array([60]), out, np.array([20]))
        return [first, second, out]

    first, *_ = both(monkeypatch, run)
    np.testing.assert_array_equal(first[5:35], raw[1:].view(np.int64)[:30])


def test_wider_items_are_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    native.use(monkeypatch, True)
    out = np.zeros(4, np.complex128)
    _native.copy_ranges(np.arange(4) + 1j, np.array([1]), np.array([2]), out, np.array([0]))
    _native.fill_ranges(out, 7j, np.array([3]), np.array([1]))
    assert out.tolist() == [1 + 1j, 2 + 1j, 0, 7j]


def no(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


FAR = 2**62
WRONG: dict[str, Callable[[Any, Any], None]] = {
    "start before": lambda a, b: _native.copy_ranges(a, no(-1), no(2), b, no(0)),
    "start after": lambda a, b: _native.copy_ranges(a, no(9), no(2), b, no(0)),
    "size below 0": lambda a, b: _native.copy_ranges(a, no(5), no(-2), b, no(5)),
    "size too large": lambda a, b: _native.copy_ranges(a, no(0), no(11), b, no(0)),
    "overflow": lambda a, b: _native.copy_ranges(a, no(FAR), no(FAR), b, no(FAR)),
    "target before": lambda a, b: _native.copy_ranges(a, no(0), no(2), b, no(-1)),
    "target after": lambda a, b: _native.copy_ranges(a, no(0, 0), no(2, 2), b, no(0, 9)),
    "other lengths": lambda a, b: _native.copy_ranges(a, no(0, 1), no(2), b, no(0)),
    "other type": lambda a, b: _native.copy_ranges(a.astype(np.int64), no(0), no(2), b, no(0)),
    "two dimensions": lambda a, b: _native.copy_ranges(a.reshape(2, 5), no(0), no(2), b, no(0)),
    "strided output": lambda a, b: _native.copy_ranges(a, no(0), no(2), b[::2], no(0)),
    "read-only output": lambda a, b: _native.copy_ranges(a, no(0), no(2), np.broadcast_to(b[:1], 10), no(0)),
    "fill outside": lambda a, b: _native.fill_ranges(b, 1, no(8), no(3)),
    "numbers outside": lambda a, b: _native.number_ranges(b, b.copy(), no(8), no(3), no(1)),
    "number too large": lambda a, b: _native.number_ranges(b, b.copy(), no(0), no(3), no(2**31)),
    "number below 0": lambda a, b: _native.number_ranges(b, b.copy(), no(0), no(3), no(-1)),
    "wide ids": lambda a, b: _native.number_ranges(b.astype(np.int64), b, no(0), no(3), no(1)),
    "unequal ids": lambda a, b: _native.number_ranges(b, b[:5].copy(), no(0), no(3), no(1)),
    "too few tokens": lambda a, b: _native.number_concatenated(b, b.copy(), no(4, 5), 3),
    "no documents": lambda a, b: _native.number_concatenated(b, b.copy(), no(), 3),
    "length below 0": lambda a, b: _native.number_concatenated(b, b.copy(), no(-4, 20), 3),
    "no length": lambda a, b: _native.number_concatenated(b, b.copy(), no(10), 0),
    "piece of nothing": lambda a, b: void(_native.best_fit(no(3, 0), 4)),
    "piece too large": lambda a, b: void(_native.best_fit(no(3, 5), 4)),
    "bins of nothing": lambda a, b: void(_native.best_fit(no(3), 0)),
}


def void(_: Any) -> None:
    """For expressions."""


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "numpy"])
def test_bad_arguments_are_refused_and_nothing_is_written(
    name: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.use(monkeypatch, by_kernel)
    source, out = np.arange(10, dtype=np.int32) + 1, np.zeros(10, np.int32)
    with pytest.raises(ValueError):
        WRONG[name](source, out)
    assert not out.any()


def test_the_kernel_itself_refuses_bad_pointers_and_item_sizes() -> None:
    kernel = native.compiled()
    if kernel is None:
        pytest.skip("no C compiler")
    memory = np.zeros(64, np.uint8)
    at = memory.__array_interface__["data"][0]
    at += -at % 8
    assert kernel.midepoch_copy_ranges(at, 4, at, 4, 3, at, at, at, 1) == -2, "item size"
    assert kernel.midepoch_copy_ranges(None, 4, at, 4, 4, at, at, at, 1) == -2, "no source"
    assert kernel.midepoch_copy_ranges(at, 4, at, 4, 4, at + 1, at, at, 1) == -2, "unaligned numbers"
    assert kernel.midepoch_copy_ranges(at, 4, at, 4, 4, at, at, at, -1) == -2, "count"
    assert kernel.midepoch_copy_ranges(at, 2**62, at, 4, 4, at, at, at, 1) == -2, "extent"
    assert kernel.midepoch_fill_ranges(at, 4, None, 4, at, at, 1) == -2
    assert kernel.midepoch_number_ranges(at + 1, at, 4, at, at, at, 1) == -2
    assert kernel.midepoch_number_concatenated(at, None, 4, at, 1, 2) == -2
    assert kernel.midepoch_best_fit(at, 1, 2**40, at, at, at, at) == -2


@settings(max_examples=150)
@given(documents=st.lists(st.integers(0, 40), max_size=30), length=st.integers(1, 50), part=st.floats(0, 1))
def test_ids_of_concatenated_documents(documents: list[int], length: int, part: float) -> None:
    lengths, total = np.array(documents, np.int64), int(sum(documents) * part)
    monkeypatch = pytest.MonkeyPatch()

    def run() -> list[Any]:
        positions, segments = np.full(total, -1, np.int32), np.full(total, -1, np.int32)
        _native.number_concatenated(positions, segments, lengths, length)
        return [positions, segments]

    positions, segments = both(monkeypatch, run)
    expected, owner = [], np.repeat(np.arange(len(lengths)), lengths)[:total].tolist()
    for at in range(total):
        new = at % length == 0 or owner[at] != owner[at - 1]
        before = expected[-1] if expected else (0, 0)
        number = 1 if at % length == 0 else before[1] + new
        expected.append((0 if new else before[0] + 1, number))
    assert list(zip(positions.tolist(), segments.tolist(), strict=True)) == expected


@settings(max_examples=200)
@given(data=st.data(), length=st.sampled_from([1, 2, 7, 63, 64, 65, 4096, 5000]))
def test_best_fit_has_the_same_bins(data: st.DataObject, length: int) -> None:
    few = st.integers(1, min(length, 9))  # many equal ones: ties
    sizes = data.draw(st.lists(st.one_of(few, st.integers(1, length)), max_size=120))
    monkeypatch = pytest.MonkeyPatch()
    bins, offsets, numbers, rooms = both(monkeypatch, lambda: _native.best_fit(np.array(sizes, np.int64), length))
    assert (np.bincount(bins, sizes, len(rooms)) + rooms == length).all() and (rooms >= 0).all()
    firsts = [np.flatnonzero(bins == number)[0] for number in range(len(rooms))]
    assert firsts == sorted(firsts), "bins are numbered by their first piece"
    for number in range(len(rooms)):
        own = np.flatnonzero(bins == number)
        assert numbers[own].tolist() == list(range(1, len(own) + 1))
        assert offsets[own].tolist() == np.cumsum([0, *(sizes[i] for i in own[:-1])]).tolist()


def test_best_fit_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    for sizes in (random.integers(1, 300, 20_000), np.minimum(random.lognormal(6, 1, 20_000).astype(int) + 1, 100_000)):
        both(monkeypatch, lambda sizes=sizes: _native.best_fit(sizes, max(300, int(sizes.max()))))


def test_the_switch_and_missing_or_foreign_libraries_select_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.load(tmp_path / "missing.so") is None
    (tmp_path / "text.so").write_text("not a library")
    assert library.load(tmp_path / "text.so") is None
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.is_switched_off() and library.kernel.__wrapped__() is None
    monkeypatch.setenv(library.SWITCH, "1")
    assert not library.is_switched_off()


def test_a_library_of_another_version_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / library.NAME
    if not native.hook().build(path):
        pytest.skip("no C compiler")
    assert library.load(path) is not None
    monkeypatch.setattr(library, "_VERSION", 0)
    assert library.load(path) is None
    monkeypatch.setattr(library, "_FUNCTIONS", {"midepoch_unknown": []})
    assert library.load(path) is None
