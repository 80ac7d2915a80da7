"""Rows of every stage in the Python format are Python's own values, however they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import midepoch
from data import Numbers, dataset_of, write_arrow
from midepoch.errors import ColumnError, MapError

TABLE = pa.table(
    {
        "input_ids": pa.array([[i] * (i % 5) for i in range(40)], pa.list_(pa.int32())),
        "mask": pa.array([[True] * (i % 5) for i in range(40)], pa.list_(pa.bool_())),
        "text": pa.array([f"a b{' b' * (i % 3)}" for i in range(40)]),
    }
)


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


STAGES: dict[str, Callable[[midepoch.Dataset], Any]] = {
    "rows": lambda ds: ds,
    "pack": lambda ds: ds.pack(8, eos=9, cu_seqlens=True),
    "pack flags": lambda ds: ds.pack(8, extra={"mask": 0}),
    "best fit": lambda ds: ds.pack(8, strategy="best_fit", window=8, cu_seqlens=True),
    "tokenize": lambda ds: ds.tokenize(tokenizer()),
    "tokenize and pack": lambda ds: ds.tokenize(tokenizer(), output="ids").pack(4, "ids"),
    "batch": lambda ds: ds.batch(3),
    "batch of packs": lambda ds: ds.pack(8).batch(2),
    "unbatch": lambda ds: ds.unbatch("input_ids"),
    "unbatch packs": lambda ds: ds.pack(8).unbatch(["input_ids", "position_ids", "segment_ids"]),
    "shuffle": lambda ds: ds.pack(8).shuffle(seed=1, window=4),
}


@pytest.mark.parametrize("name", STAGES)
def test_python_rows_are_json(tmp_path: Path, name: str) -> None:
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", TABLE, 16))
    stream = STAGES[name](ds)
    rows = list(stream)
    assert json.loads(json.dumps(rows)) == rows
    assert list(stream.with_format("python")) == rows
    columns = list(stream.with_format("python").iter(3))
    assert json.loads(json.dumps(columns)) == columns
    assert [row[key] for row in rows for key in row] == [
        batch[key][i] for batch in columns for i in range(len(next(iter(batch.values())))) for key in batch
    ]
    batches = list(stream.with_format("python").loader(3))
    assert json.loads(json.dumps(batches)) == batches == columns
    assert [row for batch in stream.loader(3, collate_fn=list) for row in batch] == rows


def test_other_formats_keep_the_types_of_tokens(tmp_path: Path) -> None:
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", TABLE, 16))
    for strategy in ("concat", "best_fit"):
        packed = ds.pack(8, strategy=strategy, extra={"mask": 0}).with_format("numpy")
        row, batch = next(iter(packed)), next(iter(packed.loader(3)))
        assert row["input_ids"].dtype == batch["input_ids"].dtype == np.int32
        assert batch["input_ids"].shape == (3, 8)
        assert row["mask"].dtype == batch["mask"].dtype == np.bool_
        batch["input_ids"][0, 0] = 5  # it is the caller's
        assert next(iter(packed.with_format("arrow").loader(2)))["input_ids"].type == pa.list_(pa.int32(), 8)


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def naive_packs(documents: list[list[int]], length: int, eos: int | None) -> list[dict[str, list[int]]]:
    """Concat packing, token by token."""
    flat = [
        (token, number, k)
        for number, document in enumerate(documents)
        for k, token in enumerate([*document, *([eos] if eos is not None and document else [])])
    ]
    packs = []
    for at in range(0, len(flat), length):
        part = flat[at : at + length]
        pack: dict[str, list[int]] = {"tokens": [], "position_ids": [], "segment_ids": [], "cu_seqlens": [0]}
        last, position, segment = None, 0, 0
        for token, number, _ in part:
            if number != last:
                if last is not None:
                    pack["cu_seqlens"].append(len(pack["tokens"]))
                last, position, segment = number, 0, segment + 1
            pack["tokens"].append(token)
            pack["position_ids"].append(position)
            pack["segment_ids"].append(segment)
            position += 1
        pack["cu_seqlens"].append(len(part))
        for name in ("tokens", "position_ids", "segment_ids"):
            pack[name] += [0] * (length - len(part))
        packs.append(pack)
    return packs


@pytest.mark.parametrize("eos", [None, 5])
@pytest.mark.parametrize("length", [1, 7, 64, 1000, 100_000])
def test_concat_is_what_plain_python_packs(length: int, eos: int | None, docs: midepoch.Dataset) -> None:
    if length == 1 and eos is not None:
        pytest.skip("the same again")
    shuffled = docs.shuffle(seed=2)
    found = list(shuffled.pack(length, "tokens", eos=eos, cu_seqlens=True))
    expected = naive_packs([row["tokens"] or [] for row in shuffled], length, eos)
    assert [{name: np.asarray(value).tolist() for name, value in row.items()} for row in found] == expected


def test_best_fit_packs_every_piece_once(docs: midepoch.Dataset) -> None:
    found = list(docs.pack(64, "tokens", "best_fit", cu_seqlens=True, window=50).with_format("numpy"))
    pieces = []
    for row in found:
        segments = row["segment_ids"]
        full = int((segments > 0).sum())
        changes = (np.flatnonzero(np.diff(segments[:full])) + 1).tolist()
        assert row["cu_seqlens"].tolist() == [0, *changes, full]
        for a, b in pairwise(row["cu_seqlens"].tolist()):
            pieces.append(row["tokens"][a:b].tolist())
            assert len(set(segments[a:b].tolist())) == 1
            assert row["position_ids"][a:b].tolist() == list(range(b - a))
        assert not segments[row["cu_seqlens"][-1] :].any()
    expected = [
        document[at : at + 64]
        for row in docs
        for document in [row["tokens"] or []]
        for at in range(0, len(document), 64)
    ]
    assert sorted(pieces) == sorted(expected), "every piece once, none cut but those that do not fit"
    tokens = sum(map(len, expected))
    loader = docs.pack(64, "tokens", "best_fit", window=50).loader(4)
    list(loader)
    assert loader.packing_efficiency == tokens / (len(found) * 64) > 0.9
    assert docs.filter(odd).loader(4).packing_efficiency is None


def test_extra_columns_are_packed_alongside(docs: midepoch.Dataset) -> None:
    both = docs.map(lambda row: {"labels": [-1 - t for t in row["tokens"] or []]}).map(
        lambda row: {"tokens": row["tokens"] or []}
    )
    for row in both.pack(50, "tokens", eos=3, extra={"labels": -100}).with_format("numpy"):
        real = (row["segment_ids"] > 0) & (row["tokens"] != 3)
        assert (row["labels"][real] == -1 - row["tokens"][real]).all()
        assert (row["labels"][~real] == -100).all()
    with pytest.raises(MapError, match="'tokens' has 0 values in row 0 .*'labels' has 1"):
        list(docs.map(lambda row: {"labels": [1]}).pack(8, "tokens", extra={"labels": 0}))
    with pytest.raises(ColumnError, match="no column 'nothing'"):
        docs.pack(8, "nothing")
    with pytest.raises(ColumnError, match="not lists of numbers"):
        list(docs.pack(8, "text"))


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


def as_document(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [row["n"]] * (1 + row["n"] % 5)}


def test_packed_columns_keep_one_type(numbers: Numbers) -> None:
    stream = numbers(0, 3000).filter(lambda row: row["n"] % 5 == 0 or row["n"] % 64 > 50)
    packed = stream.map(lambda row: {"input_ids": np.full(row["n"] % 5, row["n"], np.int32)}).pack(16)
    loader = packed.with_format("numpy").loader(2)
    assert {batch["input_ids"].dtype for batch in loader} == {np.dtype(np.int32)}
    mixed = midepoch.concat(
        [numbers(0, 9).map(as_document), numbers(0, 9).map(lambda r: {"input_ids": np.ones(2, np.int32)})]
    )
    with pytest.raises(ColumnError, match="comes as int64 and as int32"):
        list(mixed.pack(4))
    packed = mixed.pack(4, dtype="int32").with_format("numpy")
    assert {row["input_ids"].dtype for row in packed} == {np.dtype(np.int32)}


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    short = dataset_of(tmp_path / "short", pa.table({"input_ids": pa.array([[1, 2], [3]], pa.list_(pa.uint16()))}))
    with pytest.raises(ColumnError, match="70000 does not fit"):
        list(short.pack(2, eos=70000))
    with pytest.raises(ColumnError, match="-1 does not fit"):
        list(short.pack(2, pad=-1))
    with pytest.raises(TypeError, match="an integer"):
        short.pack(2, pad=0.5)  # type: ignore[arg-type]
    nulls = dataset_of(tmp_path / "nulls", pa.table({"input_ids": [[1, 2], [3], [4, None]]}))
    assert [row["input_ids"] for row in nulls.take(2).pack(2)] == [[1, 2], [3, 0]]


def test_a_state_of_longer_documents_resumes_exactly(numbers: Numbers) -> None:
    def make(length: int, rows: int = 300) -> Any:
        return numbers(0, rows).map(lambda row: {"input_ids": [row["n"]] * length}).pack(16).loader(1, collate_fn=list)

    loader = make(20)
    list(islice(loader, 4))
    shorter = make(3)
    shorter.load_state_dict(loader.state_dict())
    passing = iter(shorter)
    next(passing)
    state = copied(shorter.state_dict())
    rest = [row["input_ids"] for batch in passing for row in batch]
    again = make(3)
    again.load_state_dict(state)
    assert [row["input_ids"] for batch in again for row in batch] == rest
    one = make(20, 1)
    next(iter(one))
    nothing = make(3, 1)
    nothing.load_state_dict(one.state_dict())
    list(nothing)


def test_types_that_differ_within_a_chunk_are_refused(numbers: Numbers) -> None:
    def typed(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.full(4, row["n"], np.int32 if row["n"] == 31 else np.int64)}

    with pytest.raises(ColumnError, match="comes as int32 and as int64"):
        list(numbers(0, 32).map(typed).pack(4))


def test_a_given_type_changes_no_large_value(numbers: Numbers) -> None:
    """Together, int64 and uint64 would be floats."""

    def typed(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.array([2**62 + 1 if row["n"] == 0 else 5], np.int64 if row["n"] == 0 else np.uint64)}

    assert [row["input_ids"] for row in numbers(0, 2).map(typed).pack(2, dtype="int64")] == [[2**62 + 1, 5]]
