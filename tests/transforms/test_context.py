"""Parts of sequences for context-parallel ranks: as plain Python cuts them, and together the whole batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midepoch.errors import ColumnError, MapError
from midepoch.transforms.batch import Batch
from midepoch.transforms.context import CP_LAYOUTS, ContextSlice, whole
from midepoch.transforms.formats import finish, present
from midepoch.transforms.layout import Layout
from midepoch.transforms.packing import Documents, PackSpec, concatenated

KINDS = ("padded", "varlen", "packed")
PAD = 3


def batch_of(columns: dict[str, Any]) -> Batch:
    count = len(next(iter(columns.values())))
    return Batch(columns, np.arange(count), np.arange(count), owned=True)


def documents_of(sizes: list[int]) -> dict[str, Any]:
    """Documents whose tokens are all different, from 10."""
    ends = np.cumsum([10, *sizes]).tolist()
    rows = [list(range(a, b)) for a, b in pairwise(ends)]
    return {
        "input_ids": pa.array(rows, pa.list_(pa.int32())),
        "labels": pa.array([[-token for token in row] for row in rows], pa.list_(pa.int64())),
    }


def packed(sizes: list[int], length: int, cu_seqlens: bool) -> dict[str, Any]:
    """The documents in sequences of one length, as a loader presents them."""
    spec = PackSpec(length, pad=PAD, extra={"labels": -100}, cu_seqlens=cu_seqlens)
    columns = concatenated(
        [Documents.of(documents_of(sizes), spec, np.arange(len(sizes)))], spec, -(-sum(sizes) // length), length
    )
    shown: Any = present(batch_of(columns), "torch")
    return shown  # type: ignore[no-any-return]


def parts_of(kind: str, sizes: list[int], ways: int, layout: str, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The uncut batch, and the part of each rank."""
    slices = [ContextSlice(rank, ways, layout) for rank in range(ways)]
    if kind == "packed":
        columns = packed(sizes, 2 * ways * options.get("multiple", 1), options.get("cu_seqlens", False))
        return columns, [each.cut(columns, pads={"input_ids": PAD}) for each in slices]
    multiple, pads = options.get("multiple", 1), (("input_ids", PAD),)
    batch = batch_of({**documents_of(sizes), "score": list(range(len(sizes)))})
    layouts = [Layout(kind, "input_ids", multiple, pads, each) for each in slices]
    return Layout(kind, "input_ids", multiple, pads).arrange(batch), [each.arrange(batch) for each in layouts]


shapes = {
    "kind": st.sampled_from(KINDS),
    "sizes": st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    "ways": st.integers(1, 5),
    "layout": st.sampled_from(CP_LAYOUTS),
    "multiple": st.integers(1, 6),
}


@settings(max_examples=100)
@given(**shapes, cu_seqlens=st.booleans())
def test_the_parts_of_all_ranks_are_the_whole_batch(
    kind: str, sizes: list[int], ways: int, layout: str, multiple: int, cu_seqlens: bool
) -> None:
    uncut, parts = parts_of(kind, sizes, ways, layout, multiple=multiple, cu_seqlens=cu_seqlens)
    length = uncut["input_ids"].shape[-1]
    pads = {"input_ids": PAD, "labels": -100}
    for name in uncut.keys() & {"input_ids", "labels", "attention_mask", "position_ids", "segment_ids"}:
        each = [part[name] for part in parts]
        assert {part.dtype for part in each} == {uncut[name].dtype}
        assert len({part.shape for part in each}) == 1
        restored = whole(each, parts[0], layout, length=length, pad=pads.get(name, 0))
        np.testing.assert_array_equal(restored, uncut[name], err_msg=name)
        tensors = [finish(part, "torch") for part in parts]
        restored = whole([t[name] for t in tensors], tensors[-1], layout, length=length, pad=pads.get(name, 0))
        assert torch.equal(restored, torch.from_numpy(uncut[name]))
    if kind != "packed":
        assert [part["score"].tolist() for part in parts] == [list(range(len(sizes)))] * ways


def halves(tokens: list[int], rank: int, ways: int) -> list[int]:
    size = len(tokens) // (2 * ways)
    chunks = [tokens[i * size : (i + 1) * size] for i in range(2 * ways)]
    return chunks[rank] + chunks[2 * ways - 1 - rank]


def plain_part(row: list[int], segments: list[int] | None, rank: int, ways: int, layout: str) -> list[int]:
    """A rank's part of a sequence. By document, padding at the end of the sequence is dropped."""
    if layout == "contiguous":
        return row[rank * len(row) // ways : (rank + 1) * len(row) // ways]
    if layout == "head_tail" or segments is None:
        return halves(row, rank, ways)
    part = []
    for segment in range(1, max(segments) + 1):
        document = [token for token, each in zip(row, segments, strict=True) if each == segment]
        part += halves(document + [PAD] * (-len(document) % (2 * ways)), rank, ways)
    return part


@settings(max_examples=100)
@given(**shapes)
def test_every_part_is_the_one_that_plain_python_cuts(
    kind: str, sizes: list[int], ways: int, layout: str, multiple: int
) -> None:
    uncut, parts = parts_of(kind, sizes, ways, layout, multiple=multiple)
    for rank, part in enumerate(parts):
        rows = np.atleast_2d(part["input_ids"]).tolist()
        before = np.atleast_2d(uncut["input_ids"]).tolist()
        segments = np.atleast_2d(uncut["segment_ids"]).tolist() if "segment_ids" in uncut else [None] * len(rows)
        for row, old, ids in zip(rows, before, segments, strict=True):
            if kind != "packed" and (layout != "per_document" or ids is None):
                need = ways if layout == "contiguous" else 2 * ways
                old = old + [PAD] * (-len(old) % np.lcm(need, multiple))
            expected = plain_part(old, ids, rank, ways, layout)
            assert row[: len(expected)] == expected
            assert set(row[len(expected) :]) <= {PAD}
        if kind == "varlen":
            assert part["input_ids"].shape[0] * ways % multiple == 0


@settings(max_examples=100)
@given(**shapes)
def test_labels_are_shifted_before_the_sequence_is_cut(
    kind: str, sizes: list[int], ways: int, layout: str, multiple: int
) -> None:
    _, parts = parts_of(kind, sizes, ways, layout, multiple=multiple)
    restored = whole([part["shift_labels"] for part in parts], parts[0], layout, pad=-100)
    ids = whole([part["input_ids"] for part in parts], parts[0], layout)
    segments = [part.get("segment_ids", part.get("attention_mask")) for part in parts]
    segments = whole(segments, parts[0], layout)
    for row, tokens, each in zip(*map(np.atleast_2d, (restored, ids, segments)), strict=True):
        for i, (label, segment) in enumerate(zip(row, each, strict=True)):
            follows = segment > 0 and i + 1 < len(row) and each[i + 1] == segment
            assert label == (-tokens[i + 1] if follows else -100)


@settings(max_examples=100)
@given(**shapes)
def test_bounds_are_those_of_the_documents_in_the_part(
    kind: str, sizes: list[int], ways: int, layout: str, multiple: int
) -> None:
    uncut, parts = parts_of(kind, sizes, ways, layout, multiple=multiple, cu_seqlens=True)
    if kind == "padded":
        assert all("cu_seqlens" not in part for part in parts)
        return
    for part in parts:
        local, before, segments = (
            [columns[name]] if kind == "varlen" else list(columns[name])
            for columns, name in ((part, "cu_seqlens"), (uncut, "cu_seqlens"), (part, "segment_ids"))
        )
        for bounds, old, ids in zip(local, before, segments, strict=True):
            assert len(bounds) == len(old)
            for number in range(1, len(bounds)):
                inside = ids[bounds[number - 1] : bounds[number]]
                assert set(inside.tolist()) <= ({number, 0} if layout == "per_document" else {number})
            assert not ids[bounds[-1] :].any()
            if layout == "per_document":
                padded = -(-np.diff(old) // (2 * ways)) * 2 * ways
                np.testing.assert_array_equal(np.diff(bounds) * ways, padded)
        if kind == "varlen":
            np.testing.assert_array_equal(part["cu_seqlens_global"], uncut["cu_seqlens"])
            assert part["max_seqlen"] == np.diff(part["cu_seqlens"]).max(initial=0)
            padded = part.get("cu_seqlens_padded", uncut["cu_seqlens"])
            assert part["max_seqlen_global"] == np.diff(padded).max(initial=0)


def test_positions_are_those_of_the_whole_sequence() -> None:
    _, parts = parts_of("padded", [8, 5], 2, "head_tail")
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 6, 7]] * 2, [[2, 3, 4, 5]] * 2]
    _, parts = parts_of("varlen", [8, 5], 2, "per_document")
    assert parts[0]["position_ids"].tolist() == [0, 1, 6, 7, 0, 1, 0, 0]
    assert parts[1]["position_ids"].tolist() == [2, 3, 4, 5, 2, 3, 4, 0]
    assert parts[1]["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]


def test_labels_that_are_shifted_already_are_kept() -> None:
    batch = batch_of({"x": [[1, 2, 3, 4]], "labels": [[1, 2, 3, 4]], "shift_labels": [[5, 6, 7, 8]]})
    part = Layout("padded", "x", context=ContextSlice(1, 2)).arrange(batch)
    assert part["shift_labels"].tolist() == [[7, 8]]
    ignored = Layout("padded", "x", pads=(("labels", -1),), context=ContextSlice(1, 2)).arrange(
        batch_of({"x": [[1, 2, 3]], "labels": [[1, 2, 3]]})
    )
    assert (ignored["labels"].tolist(), ignored["shift_labels"].tolist()) == ([[3, -1]], [[-1, -1]])


def test_causal_work_is_equal_on_all_ranks() -> None:
    """The number of keys that the queries of a rank attend to."""
    sizes, ways = [64, 16, 48], 4

    def work(layout: str, kind: str) -> list[int]:
        _, parts = parts_of(kind, sizes, ways, layout)
        return [int((part["position_ids"] + 1).sum()) for part in parts]

    assert len(set(work("per_document", "varlen"))) == 1
    assert len(set(work("head_tail", "padded"))) == 1
    assert len(set(work("contiguous", "padded"))) == ways


def test_the_parts_of_arranged_columns_are_found_without_their_names() -> None:
    for kind in ("padded", "varlen"):
        uncut, parts = parts_of(kind, [8, 8], 2, "contiguous")
        cut = ContextSlice(1, 2).cut(uncut)
        assert {name: np.asarray(column).tolist() for name, column in cut.items()} == {
            name: np.asarray(column).tolist() for name, column in parts[1].items()
        }
    one_each = Layout("varlen", "input_ids").arrange(batch_of(documents_of([1, 1])))
    with pytest.raises(ValueError, match="pass tokens="):
        ContextSlice(0, 2).cut(one_each)


def test_other_columns_keep_all_their_values() -> None:
    batch = batch_of({"x": pa.array([[1, 2], [3, 4]]), "vector": pa.array([[5, 6], [7, 8]])})
    part = Layout("padded", "x", other=("vector",), context=ContextSlice(0, 2)).arrange(batch)
    assert part["x"].tolist() == [[1], [3]]
    assert part["vector"].tolist() == [[5, 6], [7, 8]]


def test_no_rows() -> None:
    for layout in CP_LAYOUTS:
        context = ContextSlice(1, 2, layout)
        columns = {"x": pa.array([], pa.list_(pa.int64()))}
        assert Layout("padded", "x", context=context).arrange(batch_of(columns))["x"].shape == (0, 0)
        varlen = Layout("varlen", "x", context=context).arrange(batch_of(columns))
        assert varlen["x"].shape == (0,)
        assert varlen["cu_seqlens"].tolist() == varlen["cu_seqlens_global"].tolist() == [0]


def test_parts_are_written_to_the_given_memory() -> None:
    made: list[Any] = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        made.append(np.full(shape, 77, dtype))
        return made[-1]

    batch = batch_of(documents_of([5, 9, 2]))
    for kind in ("padded", "varlen"):
        for layout in CP_LAYOUTS:
            made.clear()
            settings_ = Layout(kind, "input_ids", context=ContextSlice(1, 2, layout))
            part = settings_.arrange(batch, allocate)
            names = [name for name, column in part.items() if np.ndim(column) and "cu_seqlens" not in name]
            assert len(made) == len(names)
            assert all(any(part[name] is array for array in made) for name in names)
            for name, values in settings_.arrange(batch).items():
                np.testing.assert_array_equal(part[name], values)


def test_lengths_that_cannot_be_cut() -> None:
    columns = packed([10, 20], 10, cu_seqlens=False)
    with pytest.raises(
        ValueError, match=r"over 2 ranks with the layout 'head_tail' needs .* multiple of 4 tokens, got 10"
    ):
        ContextSlice(0, 2, "head_tail").cut(columns)
    with pytest.raises(ColumnError, match=r"one length, got 'a' \[1, 4\], 'b' \[1, 2\]"):
        ContextSlice(0, 2).cut({"a": np.zeros((1, 4)), "b": np.zeros((1, 2))})
    with pytest.raises(ColumnError, match="no column of sequences. There are: a"):
        ContextSlice(0, 2).cut({"a": np.zeros(4)})
    with pytest.raises(MapError, match="segment_ids of row 0 of the batch must be 1, 2, … in ascending order"):
        ContextSlice(0, 2, "per_document").cut({"segment_ids": np.array([[1, 0, 2, 2]])})
    with pytest.raises(ColumnError, match="it adds 'cu_seqlens_global'"):
        batch = batch_of({"x": [[1]], "cu_seqlens_global": [1]})
        Layout("padded", "x", context=ContextSlice(0, 2)).arrange(batch)
    with pytest.raises(ValueError, match="the parts must have one shape"):
        whole([np.zeros(2), np.zeros(3)], {"position_ids": np.zeros(2)}, "contiguous")


def test_settings_are_checked() -> None:
    assert ContextSlice.of((1, 4), "head_tail") == ContextSlice(1, 4, "head_tail")
    assert [ContextSlice(0, 3, layout).multiple() for layout in CP_LAYOUTS] == [3, 6, 6]
    for make in (lambda: ContextSlice.of((4, 4)), lambda: ContextSlice(4, 4)):
        with pytest.raises(ValueError, match=r"a rank from 0 to size - 1, got \(4, 4\)"):
            make()
    for layout in (lambda: ContextSlice(0, 1, "zigzag"), lambda: whole([np.zeros(2)], {}, "zigzag")):
        with pytest.raises(ValueError, match="cp_layout must be one of 'contiguous', .* got 'zigzag'"):
            layout()
    for given_ in ("cp", 3, (0, 1, 2), (0.5, 2), (True, 2)):
        with pytest.raises(TypeError, match=r"context_parallel takes \(rank, size\), a torch process group, a Dev"):
            ContextSlice.of(given_)
