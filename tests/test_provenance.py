"""Provenance: batches name the rows, and the documents, that they are made of. For every pipeline of the conformance list."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
import native
from data import dataset_of, documents
from midepoch.loader.movers import each_part
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.spec import PipelineSpec
from midepoch.testing import assert_resumes_exactly, same
from midepoch.transforms.provenance import concatenated_pieces
from test_conformance import PACKED, PIPELINES, REFUSED, unrepeated


@pytest.fixture
def open_ds(small_files: list[str]) -> Callable[[], midepoch.Dataset]:
    """A new dataset of the files, which are opened once: that is a fifth of the time of a resume."""
    pipeline = midepoch.from_files(small_files).pipeline
    return lambda: midepoch.Dataset(pipeline)


def without(batch: Any) -> Any:
    if isinstance(batch, pa.Table):
        return batch.drop_columns([name for name in ["doc_ids"] if name in batch.column_names])
    return {name: column for name, column in batch.items() if name != "doc_ids"}


def as_read(loader: midepoch.Loader) -> list[midepoch.Dataset]:
    """The sources of a loader, in the order of their rows and before any step."""

    def unshuffled(leaf: Leaf) -> midepoch.Dataset:
        return midepoch.Dataset(PipelineSpec.of(replace(leaf, order=replace(leaf.order, shuffle=None), steps=())))

    return [unshuffled(leaf) for leaf in loader.pipeline.node.leaves]


@pytest.mark.parametrize("name", unrepeated())
def test_provenance_changes_no_other_column_and_depends_on_no_worker(
    name: str, open_ds: Callable[[], midepoch.Dataset]
) -> None:
    def batches(workers: int = 0, kind: str = "thread", **options: Any) -> list[Any]:
        kind = "process" if name in REFUSED else kind
        return list(PIPELINES[name](open_ds()).loader(4, num_workers=workers, worker_type=kind, **options))

    found = batches(provenance=True)
    assert same([without(batch) for batch in found], batches())
    assert "doc_ids" in (found[0].column_names if name == "arrow" else found[0])
    assert same(batches(3, provenance=True), found)
    if name in ("in order", "map", "batched map", "arrow", "mix", "packed mix"):
        assert same(batches(2, "process", provenance=True), found)


@pytest.mark.parametrize("name", unrepeated(besides=["skipping filter"]))
def test_provenance_is_the_same_after_a_resume(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    def make(workers: int = 0) -> midepoch.Loader:
        kind = "process" if name in REFUSED else "thread"
        ds = PIPELINES[name](open_ds())
        return ds.loader(3, num_workers=workers, worker_type=kind, provenance=True)

    assert assert_resumes_exactly(make, epochs=1, resume_with=[lambda: make(2)], steps=[1, 4], tail=4) > 4


def rows_of(documents: Any) -> list[Any]:
    """The sources and the rows of the documents of a batch, in any format."""
    names = ("source", "row")
    return [documents[name] if isinstance(documents, Mapping) else [each[name] for each in documents] for name in names]


@pytest.mark.parametrize("name", unrepeated(name for name in PIPELINES if name not in PACKED))
def test_rows_are_those_of_the_unshuffled_source(name: str, open_ds: Callable[[], midepoch.Dataset]) -> None:
    loader = PIPELINES[name](open_ds()).loader(4, provenance=True)
    sources, seen = as_read(loader), 0
    for _ in range(2):
        for batch in loader:
            values = batch.to_pydict() if isinstance(batch, pa.Table) else batch
            column = values["n" if name == "columns" else "id"]
            for value, source, row in zip(column, *rows_of(values["doc_ids"]), strict=True):
                expected = int(value[0] if name == "batch" else value)
                if name == "to any":  # the first row of the group that the function got
                    expected = expected // 4 * 4
                read = sources[int(source)][int(row)]
                assert (int(row) if name == "map style" else read["id"]) == expected  # whose items are in no file
                seen += 1
    assert seen > 10
    assert len(loader.sources) == len(sources)


def pieces(batch: Any, column: str) -> Iterator[tuple[int, int, int, list[int]]]:
    """The documents of a batch: source, row, first token, and the tokens of it that the sequence has."""
    docs = {name: np.asarray(values) for name, values in batch["doc_ids"].items()}
    bounds = docs["cu_docs"]
    for k, segments in enumerate(np.asarray(batch["segment_ids"])):
        count = int(bounds[k + 1] - bounds[k])
        assert count == segments.max()
        for number in range(count):
            at = int(bounds[k]) + number
            tokens = np.asarray(batch[column])[k][segments == number + 1]
            yield int(docs["source"][at]), int(docs["row"][at]), int(docs["start"][at]), tokens.tolist()


def check_documents(loader: midepoch.Loader, column: str, eos: int | None = None) -> int:
    """Read every document by its number, and compare its tokens. Return the number of pieces."""
    sources, seen = as_read(loader), 0
    for batch in loader:
        for source, row, start, tokens in pieces(batch, column):
            document = [int(token) for token in sources[source][row][column]] + ([] if eos is None else [eos])
            assert document[start : start + len(tokens)] == tokens
            seen += 1
    return seen


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("name", PACKED)
def test_documents_of_sequences_are_the_true_ones(
    name: str, by_kernel: bool, open_ds: Callable[[], midepoch.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    native.use(monkeypatch, by_kernel)
    assert check_documents(PIPELINES[name](open_ds()).loader(3, provenance=True), "tokens") > 10


def keeps(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3)


RAGGED: dict[str, Callable[[midepoch.Dataset, midepoch.Dataset], midepoch.Dataset]] = {
    "concat": lambda a, b: a.shuffle(seed=1).pack(32, column="tokens", eos=999),
    "dropped": lambda a, b: a.shuffle(seed=1).pack(64, column="tokens", eos=999, drop_remainder=True),
    "best fit": lambda a, b: a.shuffle(seed=1).pack(48, column="tokens", eos=999, strategy="best_fit", window=40),
    "best fit, dropped": lambda a, b: a.pack(
        48, column="tokens", eos=999, strategy="best_fit", window=60, drop_remainder=True
    ),
    "mix": lambda a, b: midepoch.mix(
        {"a": a.shuffle(seed=1).filter(keeps), "b": b.shuffle(seed=2)}, [3, 1], seed=5, stop="all"
    ).pack(32, column="tokens", eos=999),
    "mix of packed": lambda a, b: midepoch.mix(
        {"a": a.pack(32, column="tokens", eos=999), "b": b.filter(keeps).pack(32, column="tokens", eos=999)}, seed=5
    ),
    "shuffled again": lambda a, b: a.pack(32, column="tokens", eos=999).shuffle(seed=3, window=20),
    "lanes": lambda a, b: midepoch.concat([a, b]).shuffle(seed=3, window=9).with_lanes(3).pack(32, "tokens", eos=999),
}


@pytest.mark.parametrize("name", RAGGED)
def test_documents_of_any_length(name: str, tmp_path: Path) -> None:
    """Empty and null documents, one longer than many sequences, filters, mixes, and an end of sequence."""
    a, b = (dataset_of(tmp_path / str(rows), documents(rows)) for rows in (120, 70))

    def make(workers: int = 0) -> midepoch.Loader:
        return RAGGED[name](a, b).loader(3, num_workers=workers, worker_type="thread", provenance=True)

    assert check_documents(make(), "tokens", eos=999) > 60
    assert_resumes_exactly(make, resume_with=[lambda: make(2)], steps=[0, 1, 5, 11], tail=6)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    length=st.integers(1, 12),
    before=st.integers(0, 5),
    drop=st.booleans(),
)
@settings(max_examples=200)
def test_pieces_tile_the_documents(lengths: list[int], length: int, before: int, drop: bool) -> None:
    ends = np.cumsum(np.array(lengths))
    total = int(ends[-1])
    packs = total // length if drop else -(-total // length)
    if not packs:
        return
    tokens = [(i, k + (before if i == 0 else 0)) for i, size in enumerate(lengths) for k in range(size)]
    found = concatenated_pieces(ends, np.arange(packs + 1) * length, before)
    made = [
        [(int(found.documents[i]), int(found.starts[i]) + k) for k in range(int(found.lengths[i]))]
        for i in range(len(found.documents))
    ]
    for number in range(packs):
        first, stop = int(found.bounds[number]), int(found.bounds[number + 1])
        assert sum(made[first:stop], []) == tokens[number * length : (number + 1) * length]


def test_names_of_sources(tmp_path: Path) -> None:
    a, b, c = (dataset_of(tmp_path / name, documents(30)) for name in "abc")
    assert midepoch.mix({"web": a, "code": b}).loader(2).sources == ("web", "code")
    inner = midepoch.mix({"web": a, "rest": midepoch.mix({"code": b, "math": c})})
    assert inner.loader(2).sources == ("web", "rest/code", "rest/math")
    assert midepoch.mix({"web": a, "rest": midepoch.concat([b, c])}).loader(2).sources == ("web", "rest/0", "rest/1")
    paths = tuple(str(tmp_path / name / "a.arrow") for name in "ab")
    assert midepoch.mix([a, b]).loader(2).sources == paths
    assert a.filter(keeps).loader(2).sources == paths[:1]
    assert midepoch.mix([a, a.filter(keeps)]).loader(2).sources == ("0", "1")
    assert midepoch.from_files([*paths]).loader(2).sources == (str(tmp_path),)


def test_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    ds = dataset_of(tmp_path, documents(30))
    with pytest.raises(midepoch.ColumnError, match="adds the column 'doc_ids'"):
        ds.rename_columns({"text": "doc_ids"}).loader(2, provenance=True)
    for made in (ds.select_columns("id"), ds.pack(8, "tokens")):
        for kind in ("torch", "python"):
            named = made.map(lambda row: {"doc_ids": 1}).with_format(kind)
            with pytest.raises(midepoch.ColumnError, match="adds the column 'doc_ids'"):
                next(iter(named.loader(2, provenance=True)))
    with pytest.raises(TypeError, match="takes True or False"):
        ds.loader(2, provenance="rows")  # type: ignore[arg-type]


def test_rows_of_collate_fn_have_provenance(tmp_path: Path) -> None:
    ds = dataset_of(tmp_path, documents(60)).shuffle(seed=1)
    for row in next(iter(ds.loader(4, collate_fn=list, provenance=True))):
        assert row["doc_ids"] == {"source": 0, "row": row["id"]}
    assert next(iter(ds.loader(None, provenance=True)))["doc_ids"]["row"] >= 0
    columns = next(iter(ds.loader(4, collate_fn=dict, collate_columns=True, provenance=True)))
    assert columns["doc_ids"]["row"].tolist() == columns["id"].tolist()
    packed = ds.pack(16, "tokens")
    expected = next(iter(packed.loader(3, provenance=True)))["doc_ids"]
    rows = next(iter(packed.loader(3, collate_fn=list, provenance=True)))
    listed = [piece for row in rows for piece in row["doc_ids"]]
    assert [piece["row"] for piece in listed] == expected["row"].tolist()
    assert [piece["start"] for piece in listed] == expected["start"].tolist()
    table = next(iter(packed.with_format("arrow").loader(3, provenance=True)))
    assert table["doc_ids"].to_pylist() == [row["doc_ids"] for row in rows]
    assert [len(row["doc_ids"]) for row in rows] == np.diff(expected["cu_docs"]).tolist()


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("layout", ["padded", "varlen"])
def test_batches_by_tokens_have_provenance(layout: str, filtered: bool, tmp_path: Path) -> None:
    ds = dataset_of(tmp_path, documents(80)).select_columns(["id", "tokens"]).shuffle(seed=1)
    ds = ds.filter(keeps) if filtered else ds
    loader = ds.loader(max_tokens=600, length="tokens", layout=layout, provenance=True, last_batch="pad")
    seen = 0
    for batch in loader:
        assert batch["doc_ids"]["row"].tolist() == batch["id"].tolist()
        assert set(batch["doc_ids"]["source"].tolist()) == {0}
        seen += len(batch["doc_ids"]["row"])
    assert seen >= 50


def test_every_rank_of_a_sequence_gets_all_of_its_documents(tmp_path: Path) -> None:
    packed = dataset_of(tmp_path, documents(80)).pack(32, "tokens")
    whole = list(packed.loader(2, provenance=True))
    parts = [list(packed.loader(2, provenance=True, context_parallel=(rank, 2))) for rank in range(2)]
    for batch, *cut in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([part["tokens"] for part in cut], 1), batch["tokens"])
        assert all(same(part["doc_ids"], batch["doc_ids"]) for part in cut)


def test_documents_of_a_batch_are_used_like_a_dict(tmp_path: Path) -> None:
    packed = dataset_of(tmp_path, documents(80)).pack(32, "tokens")
    expected = [batch["doc_ids"] for batch in packed.with_format("numpy").loader(3, provenance=True)]
    moved = each_part(next(iter(packed.loader(3, provenance=True)))["doc_ids"], torch.is_tensor, lambda part: part + 0)
    for found, arrays in zip((batch["doc_ids"] for batch in packed.loader(3, provenance=True)), expected, strict=True):
        again = pickle.loads(pickle.dumps(found))
        assert list(found) == list(arrays) == ["source", "row", "start", "cu_docs"]
        for each in (found, {**found}, dict(found), again, copy.deepcopy(found)):
            assert len(each) == 4
            assert all(isinstance(each[name], torch.Tensor) for name in each)
            assert same({name: values.numpy() for name, values in each.items()}, arrays)
        with pytest.raises(KeyError):
            found["length"]
    assert same({name: values.numpy() for name, values in moved.items()}, expected[0])
    assert torch.utils.data.default_collate([moved, moved])["row"].shape == (2, len(expected[0]["row"]))


def test_writes_to_a_batch_change_no_other(tmp_path: Path) -> None:
    ds = dataset_of(tmp_path, documents(80)).shuffle(seed=1)
    for made in (ds.pack(32, "tokens"), ds, ds.filter(keeps), midepoch.mix([ds, ds], stop="all")):
        expected = list(made.loader(3, provenance=True, last_batch="pad"))
        for batch, plain in zip(made.loader(3, provenance=True, last_batch="pad"), expected, strict=True):
            assert same(batch["doc_ids"], plain["doc_ids"])
            for column in batch["doc_ids"].values():
                column.zero_()


def test_documents_take_16_bytes_at_most(tmp_path: Path) -> None:
    batch = next(iter(dataset_of(tmp_path, documents(300)).pack(128, "tokens").loader(8, provenance=True)))
    docs = batch["doc_ids"]
    assert sum(values.nbytes for values in docs.values()) <= 16 * len(docs["row"])


def test_loss_by_source(tmp_path: Path) -> None:
    """The documented way from tokens to sources."""
    a, b = (dataset_of(tmp_path / name, documents(120)) for name in "ab")
    b = b.map(lambda row: {"tokens": None if row["tokens"] is None else [-token - 1 for token in row["tokens"]]})
    loader = midepoch.mix({"a": a, "b": b}, seed=1).pack(64, column="tokens", pad=0).loader(4, provenance=True)
    for batch in loader:
        docs, segments = batch["doc_ids"], batch["segment_ids"]
        document = (docs["cu_docs"][:-1, None] + segments - 1).clamp(min=0)
        source = docs["source"].long()[document]
        is_token = segments > 0
        assert torch.equal(source[is_token] == 1, batch["tokens"][is_token] < 0)
