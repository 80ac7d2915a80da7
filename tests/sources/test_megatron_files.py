"""Megatron's indexed datasets: the documents that were written, mapped or fetched, and blends as Megatron lists them."""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import midepoch
from midepoch.errors import CorruptBlockError, DataChangedError, DataNotFoundError, FormatError, MidepochError
from midepoch.sources.formats import tokens as token_formats
from midepoch.testing import assert_resumes_exactly
from s3 import Server, storage_options
from token_files import CODES, random_documents, write_megatron


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_formats, "BLOCK_BYTES", 200)


def tokens(ds: midepoch.Dataset) -> list[list[float]]:
    return [row["input_ids"] for row in ds]


@pytest.mark.parametrize("dtype", list(CODES))
def test_documents_of_every_type_are_what_was_written(dtype: str, tmp_path: Path) -> None:
    documents = random_documents(60, dtype)
    ds = midepoch.from_megatron(write_megatron(tmp_path / "data", documents, dtype))
    assert tokens(ds) == [document[0].tolist() for document in documents]
    assert str(ds.schema.field("input_ids").type.value_type) == {"float64": "double", "float32": "float"}.get(
        dtype, dtype
    )
    shuffled = ds.shuffle(seed=1).with_format("numpy")
    found = [tuple(row) for batch in shuffled.loader(7, num_workers=2) for row in batch["input_ids"]]
    assert sorted(found) == sorted(tuple(document[0].tolist()) for document in documents)


def test_equal_to_megatrons_own_reader(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core")
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "own.bin"), dtype=np.uint16)
    for _ in range(50):
        lengths = rng.integers(0, 9, rng.integers(1, 4)).tolist()
        builder.add_document(torch.from_numpy(rng.integers(0, 60_000, sum(lengths)).astype(np.int32)), lengths)
    builder.finalize(str(tmp_path / "own.idx"))
    own = indexed.IndexedDataset(str(tmp_path / "own"))
    bounds = own.document_indices
    expected = [np.concatenate([own[i] for i in range(a, b)]).tolist() for a, b in pairwise(bounds)]
    ds = midepoch.from_megatron(tmp_path / "own")
    assert tokens(ds) == expected
    assert [n for row in ds for n in row["sequence_lengths"]] == own.sequence_lengths.tolist()


def test_documents_of_several_sequences_keep_their_lengths_and_modes(tmp_path: Path) -> None:
    documents = [[[1, 2], [3]], [[4]], [], [[5, 6, 7], [], [8]]]
    prefix = write_megatron(tmp_path / "data", documents, "int16", modes=[0, 1, 0, 1, 0, 1])
    rows = list(midepoch.from_megatron(prefix))
    assert [row["input_ids"] for row in rows] == [[1, 2, 3], [4], [], [5, 6, 7, 8]]
    assert [row["sequence_lengths"] for row in rows] == [[2, 1], [1], [], [3, 0, 1]]
    assert [row["modes"] for row in rows] == [[0, 1], [0], [], [1, 0, 1]]


def test_sequences_in_any_place_of_the_file(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "data", [[[1, 2]], [[3, 4]], [[5, 6]]])
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[34 + 12 : 34 + 12 + 24] = np.array([16, 0, 8], "<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(bytes(index))
    ds = midepoch.from_megatron(prefix)
    assert tokens(ds) == [[5, 6], [1, 2], [3, 4]]
    assert tokens(ds.select([2, 0, 1])) == [[3, 4], [5, 6], [1, 2]]


def test_resumes_exactly_and_in_an_object_store(tmp_path: Path, s3_server: Server) -> None:
    bucket = Path(tempfile.mkdtemp(prefix="bucket-", dir=s3_server.folder))
    documents = random_documents(60, "uint16")
    write_megatron(bucket / "data", documents, "uint16")
    local = midepoch.from_megatron(bucket / "data")
    remote = midepoch.from_megatron(f"s3://{bucket.name}/data", storage_options=storage_options(s3_server.endpoint))
    assert tokens(remote) == tokens(local) == [document[0].tolist() for document in documents]
    folder = midepoch.from_megatron(f"s3://{bucket.name}/", storage_options=storage_options(s3_server.endpoint))
    assert tokens(folder) == tokens(local)
    for scope in ("rows", "window"):
        first, second = (ds.shuffle(seed=1, scope=scope, window=2) for ds in (local, remote))
        assert tokens(first) == tokens(second)
    assert_resumes_exactly(lambda: local.shuffle(seed=2).loader(7), steps=[0, 1, 4, 8, 9], tail=3)
    state = remote.shuffle(seed=2).loader(7)
    batches = iter(state)
    next(batches), next(batches)
    loader = local.shuffle(seed=2).loader(7)
    loader.load_state_dict(state.state_dict())  # the copy on disk is the same data
    assert [row.tolist() for row in next(iter(loader))["input_ids"]] == [
        row.tolist() for row in next(batches)["input_ids"]
    ]


BLENDS = ["flat strings", "flat numbers", "flat tuple", "pair", "weights"]


@pytest.mark.parametrize("form", BLENDS)
def test_blends_as_the_framework_lists_them(form: str, tmp_path: Path) -> None:
    web, code = (
        write_megatron(tmp_path / name, [[[number] * 3] for number in range(start, start + 40)], "int32")
        for name, start in (("web_text_document", 0), ("code_text_document", 100))
    )
    blend, weights = {
        "flat strings": (["0.75", web, "0.25", code], None),
        "flat numbers": ([0.75, web, 0.25, code], None),
        "flat tuple": ((3, Path(web), 1, Path(code)), None),
        "pair": (([web, code], [0.75, 0.25]), None),
        "weights": ([web, code], [3, 1]),
    }[form]
    ds = midepoch.from_megatron(blend, weights, seed=1)
    of_code = [row[0] >= 100 for row in tokens(ds)]
    assert [sum(of_code[i : i + 4]) for i in range(0, 40, 4)] == [1] * 10
    assert {row[0] for row in tokens(ds)} == {*range(40), *range(100, 140)}  # every document, small sources again
    assert ds.pipeline.node.base.names == ("web_text_document", "code_text_document")


def test_prefixes_without_weights_follow_each_other(tmp_path: Path) -> None:
    for name, start in (("b", 10), ("a", 0)):
        write_megatron(tmp_path / name, [[[number]] for number in range(start, start + 3)])
    expected = [[0], [1], [2], [10], [11], [12]]
    assert tokens(midepoch.from_megatron([tmp_path / "a", tmp_path / "b.bin"])) == expected
    assert tokens(midepoch.from_megatron(tmp_path)) == expected
    assert tokens(midepoch.from_megatron(f"{tmp_path}/*.idx")) == expected
    assert tokens(midepoch.from_megatron((tmp_path / "a", tmp_path / "b"))) == expected
    (tmp_path / "README.md").write_text("not a prefix")
    assert tokens(midepoch.from_megatron(f"{tmp_path}/*")) == expected


def test_files_of_different_types_get_the_wider_one(tmp_path: Path) -> None:
    small = write_megatron(tmp_path / "a", [[[1, 60_000]]], "uint16")
    large = write_megatron(tmp_path / "b", [[[1_000_000], [2]]], "int32")
    rows = list(midepoch.from_megatron([small, large]))
    assert [row["input_ids"] for row in rows] == [[1, 60_000], [1_000_000, 2]]
    assert [row["sequence_lengths"] for row in rows] == [None, [1, 1]]


def test_opening_writes_one_index_for_a_blend(tmp_path: Path) -> None:
    prefixes = [write_megatron(tmp_path / f"part_{i}", [[[i]], [[i]]]) for i in range(30)]
    blend = [each for prefix in prefixes for each in ("1", prefix)]
    index_dir = tmp_path / "index"
    first = midepoch.from_megatron(blend, index_dir=index_dir)
    assert len(list(index_dir.glob("*.midepoch-index"))) == 1
    assert tokens(midepoch.from_megatron(blend, index_dir=index_dir)) == tokens(first)


def test_each_part_of_a_blend_knows_the_size_of_its_own_rows(tmp_path: Path) -> None:
    short = write_megatron(tmp_path / "short", [[[1]]] * 100)
    long = write_megatron(tmp_path / "long", [[[1] * 1000]] * 100)
    sizes = [leaf.source.bytes_per_row for leaf in midepoch.from_megatron([1, short, 1, long]).pipeline.leaves]
    assert sizes[0] < 100 and sizes[1] > 3000


def test_damage_names_the_file_and_the_document(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "data", [[[i] * 10] for i in range(30)])
    whole = Path(f"{prefix}.idx").read_bytes()
    damaged = bytearray(whole)
    damaged[34 + 4 * 12 : 34 + 4 * 13] = np.array([10_000], "<i4").tobytes()
    Path(f"{prefix}.idx").write_bytes(damaged)
    with pytest.raises(CorruptBlockError, match=r"data\.bin.*document 12 ends at byte"):
        tokens(midepoch.from_megatron(prefix))
    kept = tokens(midepoch.from_megatron(prefix, on_error="skip"))
    assert 0 < len(kept) < 30 and [12] * 10 not in kept
    Path(f"{prefix}.idx").write_bytes(whole[:-1])
    with pytest.raises(FormatError, match=r"data\.idx has \d+ bytes, its header promises"):
        midepoch.from_megatron(prefix)
    Path(f"{prefix}.idx").write_bytes(b"PAR1" + whole)
    with pytest.raises(FormatError, match="is not an index of Megatron"):
        midepoch.from_megatron(prefix)
    os.remove(f"{prefix}.idx")
    with pytest.raises(DataNotFoundError, match=r"data\.idx does not exist.*two files"):
        midepoch.from_megatron(prefix)


def test_any_damage_is_an_error_or_leaves_the_rows_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = random_documents(20, "uint16", longest=6)
    whole = Path(write_megatron(tmp_path / "whole", documents, "uint16") + ".idx").read_bytes()
    for trial in range(60):
        damaged = bytearray(whole)
        place = int(rng.integers(len(whole)))
        damaged[place] ^= int(rng.integers(1, 256))
        prefix = tmp_path / f"trial_{trial}"
        shutil.copy(tmp_path / "whole.bin", f"{prefix}.bin")
        Path(f"{prefix}.idx").write_bytes(damaged)
        try:
            named, rows = True, tokens(midepoch.from_megatron(prefix).shuffle(seed=1))
        except MidepochError as problem:
            named, rows = prefix.name in str(problem), []
        assert named and len(rows) <= 20 * 256


def test_changed_files_are_noticed(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "data", [[[i]] for i in range(20)])
    loader = midepoch.from_megatron(prefix).shuffle(seed=1).loader(4)
    next(iter(loader))
    state = loader.state_dict()
    moved = tmp_path / "moved"
    moved.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{prefix}{suffix}", moved / f"other{suffix}")
    midepoch.from_megatron(moved / "other").shuffle(seed=1).loader(4).load_state_dict(state)
    opened = midepoch.from_megatron(prefix)
    write_megatron(tmp_path / "data", [[[i + 1]] for i in range(20)])
    with pytest.raises(DataChangedError, match="contents differ"):
        list(opened)
    with pytest.raises(midepoch.CheckpointMismatchError):
        midepoch.from_megatron(prefix).shuffle(seed=1).loader(4).load_state_dict(state)


def test_mistakes_are_named(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "data", [[[1]]])
    with pytest.raises(ValueError, match="alternates"):
        midepoch.from_megatron(["0.5", prefix, prefix])
    with pytest.raises(ValueError, match="2 weights for 1 prefixes"):
        midepoch.from_megatron([prefix], [1, 2])
    with pytest.raises(ValueError, match="a prefix twice"):
        midepoch.from_megatron([1, prefix, 2, prefix])
    with pytest.raises(TypeError, match="one for each prefix"):
        midepoch.from_megatron([prefix], 0.5)
    with pytest.raises(TypeError, match="given twice"):
        midepoch.from_megatron(([prefix], [1]), [1])
    with pytest.raises(FormatError, match="from_megatron"):
        midepoch.from_files(f"{prefix}.idx")
    with pytest.raises(DataNotFoundError, match="from_megatron"):
        midepoch.from_files(tmp_path)
    os.remove(f"{prefix}.idx")
    with pytest.raises(DataNotFoundError, match="use midepoch.from_tokens for a .bin without an .idx"):
        midepoch.from_megatron(prefix)
    with pytest.raises(DataNotFoundError, match="check the path"):
        midepoch.from_megatron(tmp_path / "gone")
