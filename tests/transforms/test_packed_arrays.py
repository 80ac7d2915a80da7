"""Packed columns, by the kernel and by numpy, are those that plain Python packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import native
from midepoch.transforms.packing import Documents, PackSpec, best_fit, concatenated

TYPES = ["bool", "int8", "uint16", "float16", "int32", "float32", "int64", "uint64", "float64"]
PADS = {"tokens": 1, "labels": -100}


def pieces_of(sizes: list[int], spec: PackSpec, packs: int) -> list[list[tuple[int, int, int]]]:
    """Of each sequence its pieces: document, first token, tokens."""
    if spec.strategy == "concat":
        rows: list[list[tuple[int, int, int]]] = [[] for _ in range(packs)]
        at = 0
        for number, size in enumerate(sizes):
            done = 0
            while done < size and at < packs * spec.length:
                step = min(size - done, spec.length - at % spec.length)
                rows[at // spec.length].append((number, done, step))
                at, done = at + step, done + step
        return rows
    split = [
        (number, at, min(spec.length, size - at))
        for number, size in enumerate(sizes)
        for at in range(0, size, spec.length)
    ]
    bins: list[tuple[int, list[int]]] = []  # (room, pieces), from the oldest
    for i in sorted(range(len(split)), key=lambda i: -split[i][2]):
        fitting = [(room, b) for b, (room, _) in enumerate(bins) if room >= split[i][2]]
        if fitting:
            room, b = min(fitting)
            bins[b] = (room - split[i][2], [*bins[b][1], i])
        else:
            bins.append((spec.length - split[i][2], [i]))
    kept = [sorted(each) for room, each in bins if not (spec.drop_remainder and room)]
    return [[split[i] for i in each] for each in sorted(kept)]


def expected(documents: dict[str, list[list[Any]]], spec: PackSpec, packs: int) -> dict[str, list[list[Any]]]:
    ends = {"tokens": spec.eos, **spec.extra}
    full = {
        name: [[*each, *([ends[name]] if spec.eos is not None and each else [])] for each in rows]
        for name, rows in documents.items()
    }
    rows = pieces_of([len(each) for each in full["tokens"]], spec, packs)
    columns: dict[str, list[list[Any]]] = {name: [] for name in spec.columns}
    for row in rows:
        room = spec.length - sum(size for _, _, size in row)
        for name, each in full.items():
            columns[name].append([v for d, at, n in row for v in each[d][at : at + n]] + [spec.pads[name]] * room)
        columns["position_ids"].append([k for _, _, n in row for k in range(n)] + [0] * room)
        columns["segment_ids"].append([k for k, (_, _, n) in enumerate(row, 1) for _ in range(n)] + [0] * room)
        if spec.cu_seqlens:
            columns["cu_seqlens"].append(np.cumsum([0, *(n for _, _, n in row)]).tolist())
    return columns


@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(TYPES), strategy=st.sampled_from(["concat", "best_fit"]))
def test_packed_columns(data: st.DataObject, dtype: str, strategy: str) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=25))
    eos = data.draw(st.sampled_from([None, 1]))
    extra = data.draw(st.sampled_from([{}, {"labels": -100}]))
    drop, bounds = data.draw(st.booleans()), data.draw(st.booleans())
    length = data.draw(st.integers(1, 40))
    pad = 0 if dtype == "bool" else 3
    spec = PackSpec(length, "tokens", strategy, eos, pad, extra, drop, bounds)
    random = np.random.default_rng(len(sizes))
    documents = {"tokens": [random.integers(0, 2 if dtype == "bool" else 100, n).astype(dtype).tolist() for n in sizes]}
    kinds = {"tokens": pa.from_numpy_dtype(np.dtype(dtype)), "labels": pa.int16()}
    if extra:
        documents["labels"] = [[-k for k in range(n)] for n in sizes]
    split = data.draw(st.integers(0, len(sizes))) if strategy == "concat" else 0
    skip = data.draw(st.integers(0, 8)) if strategy == "concat" and not split else 0
    for by_kernel in (True, False):
        with pytest.MonkeyPatch.context() as monkeypatch:
            native.use(monkeypatch, by_kernel)
            parts = [
                Documents.of(
                    {n: pa.array(rows[a:b], pa.list_(kinds[n])) for n, rows in documents.items()},
                    spec,
                    np.arange(b - a),
                )
                for a, b in ((0, split), (split, len(sizes)))
                if b > a
            ]
            if skip:
                parts[0] = parts[0].cut_first(skip)
            total = sum(part.tokens for part in parts)
            packs = total // length if drop else -(-total // length)
            if strategy == "best_fit":
                columns, first, tokens, _ = best_fit(parts[0], spec)
            elif packs:
                columns, tokens = concatenated(parts, spec, packs, length), min(total, packs * length)
            else:
                continue
        found = {name: column.to_pylist() for name, column in columns.items()}
        made = len(found["tokens"])
        wanted = expected_after(documents, spec, made, skip) if skip else expected(documents, spec, made)
        assert found == {name: rows[:made] for name, rows in wanted.items()}
        if strategy == "best_fit":
            rows = pieces_of([n + (eos is not None and n > 0) for n in sizes], spec, 0)
            assert first.tolist() == [row[0][0] for row in rows]
            assert tokens == sum(n for row in rows for _, _, n in row)
        assert columns["tokens"].type == pa.list_(kinds["tokens"], length)


def expected_after(
    documents: dict[str, list[list[Any]]], spec: PackSpec, packs: int, skip: int
) -> dict[str, list[list[Any]]]:
    """Without the first tokens of the first document, its end of sequence included."""
    ends = {"tokens": spec.eos, **spec.extra}
    cut = {}
    for name, rows in documents.items():
        first = [*rows[0], *([ends[name]] if spec.eos is not None and rows[0] else [])][skip:]
        cut[name] = [first, *([*r, *([ends[name]] if spec.eos is not None and r else [])] for r in rows[1:])]
    plain = PackSpec(
        spec.length, spec.column, spec.strategy, None, spec.pad, spec.extra, spec.drop_remainder, spec.cu_seqlens
    )
    return expected(cut, plain, packs)


@pytest.mark.parametrize("eos", [None, 7])
def test_the_rest_of_documents_has_all_tokens_that_were_not_dropped(eos: int | None) -> None:
    column = pa.array([[1, 2, 3], [], [4], [5, 6]], pa.list_(pa.int32()))
    spec = PackSpec(4, "tokens", eos=eos)
    documents = Documents.of({"tokens": column}, spec, np.arange(len(column)))
    whole = np.zeros(documents.tokens, np.int32)
    documents.copy("tokens", whole)
    for tokens in range(documents.tokens):
        rest, dropped = documents.without(tokens)
        left = np.zeros(rest.tokens, np.int32)
        rest.copy("tokens", left)
        assert left.tolist() == whole[tokens:].tolist()
        assert dropped == sum(np.cumsum(documents.lengths) <= tokens)
        for count in range(rest.tokens):
            some = np.zeros(count, np.int32)
            rest.copy("tokens", some)
            assert some.tolist() == left[:count].tolist()
