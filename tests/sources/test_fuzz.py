"""Damaged files: a clear error or the right rows; never a crash, a hang, or a wrong row."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc as po
import pyarrow.parquet as pq
import pytest

import midepoch
from data import scan
from midepoch.errors import DataChangedError, MidepochError
from shard_files import overwrite
from tar_files import write_tar

TABLE = pa.table(
    {
        "id": range(200),
        "text": [f"row {i} " + "é" * (i % 7) for i in range(200)],
        "list": [[i] * (i % 4) for i in range(200)],
        "maybe": [None if i % 5 == 0 else i / 3 for i in range(200)],
    }
)


def write(path: Path, kind: str) -> None:
    if kind == "parquet":
        pq.write_table(TABLE, path, row_group_size=40, write_page_checksum=True, compression="none")
    elif kind == "orc":
        po.write_table(TABLE, path)
    elif kind == "tar":
        files = [(f"{r['id']:03d}.{name}", str(r[name]).encode()) for r in TABLE.to_pylist() for name in ("id", "text")]
        write_tar(path, files)
    elif kind == "json":
        path.write_text(json.dumps(TABLE.to_pylist(), indent=1))
    elif kind == "txt":
        path.write_text("".join(f"{row['id']} {row['text']}\n" for row in TABLE.to_pylist()))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    else:
        path.write_text(
            "id,text,maybe\n" + "".join(f"{r['id']},{r['text']},{r['maybe'] or ''}\n" for r in TABLE.to_pylist())
        )


KINDS = ["parquet", "orc", "jsonl", "csv", "tar", "json", "txt"]
TEXT = ("jsonl", "csv", "tar", "txt")


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files(kind: str, tmp_path: Path) -> None:
    write(tmp_path / f"whole.{kind}", kind)
    data = (tmp_path / f"whole.{kind}").read_bytes()
    expected = list(midepoch.from_files(tmp_path / f"whole.{kind}"))
    for number, size in enumerate(np.linspace(0, len(data) - 1, 25).astype(int).tolist()):
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(data[:size])
        try:
            found = list(midepoch.from_files(path))
        except MidepochError as problem:
            named = path.name in str(problem) or "no rows" in str(problem)
        else:  # text that was cut behind a row is a shorter file, and nobody can know
            assert kind in TEXT
            rows, whole = ([next(iter(row.values())) for row in each] for each in (found, expected))
            named = rows[:-1] == whole[: len(rows) - 1]
        assert named


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits(kind: str, tmp_path: Path) -> None:
    """Before indexing. Parquet is written with checksums here; in the others a changed value cannot be told from it."""
    write(tmp_path / f"whole.{kind}", kind)
    data = (tmp_path / f"whole.{kind}").read_bytes()
    expected = list(midepoch.from_files(tmp_path / f"whole.{kind}"))
    draw = np.random.default_rng(5)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little") if kind == "parquet" else len(data)
    refused = 0
    for number in range(40):
        damaged = bytearray(data)
        at = int(draw.integers(0, len(data)))
        damaged[at] ^= 1 << int(draw.integers(0, 8))
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(damaged)
        try:
            found = list(midepoch.from_files(path))
        except MidepochError:
            refused += 1
        else:
            if kind == "parquet" and at < footer:
                assert found == expected
    assert refused or kind in TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_damage_behind_the_index_is_noticed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    write(path, kind)
    ds = midepoch.from_files(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    os.utime(path, ns=(1, 1))
    path.write_bytes(data)
    with pytest.raises(DataChangedError, match="has changed since it was indexed"):
        list(ds)


def test_damaged_row_groups_are_skipped_alike_on_every_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, "parquet")
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(2).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start + chunk.total_compressed_size // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(midepoch.CorruptBlockError, match=r'rows 80 to 119.*on_error="skip"'):
        list(midepoch.from_files(path))
    kept = [i for i in range(200) if not 80 <= i < 120]
    ds = midepoch.from_files(path, on_error="skip", columns=["id"])
    assert [row["id"] for row in ds] == kept
    loader = ds.shuffle(seed=1, window=2).loader(16)
    batches = [batch["id"].tolist() for batch in loader]
    assert sorted(sum(batches, [])) == kept
    for step in range(len(batches)):
        saved = ds.shuffle(seed=1, window=2).loader(16)
        iterator = iter(saved)
        for _ in range(step):
            next(iterator)
        resumed = ds.shuffle(seed=1, window=2).loader(16, num_workers=2 * (step == 4))
        resumed.load_state_dict(saved.state_dict())
        assert [batch["id"].tolist() for batch in resumed] == batches[step:]


@pytest.mark.parametrize("kind", ["stream", "file", "lz4", "dictionary", "fetched"])
def test_a_header_damaged_after_indexing_is_a_damaged_block(kind: str, tmp_path: Path) -> None:
    table = TABLE.append_column("word", pa.array([f"{i % 7}" for i in range(200)]))
    if kind == "dictionary":
        table = table.set_column(4, "word", table["word"].dictionary_encode())
    make = pa.ipc.new_stream if kind in ("stream", "dictionary") else pa.ipc.new_file
    path = tmp_path / "a.arrow"
    options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "lz4" else None)
    with make(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=50)
    filters = [("id", ">=", 0)] if kind == "fetched" else None
    whole, offset = path.read_bytes(), scan(path).offsets[1]
    strict, lenient = (midepoch.from_files(path, filters=filters, on_error=mode) for mode in ("raise", "skip"))
    others = [row for row in table.to_pylist() if not 50 <= row["id"] < 100]
    draw = np.random.default_rng(3)
    refused = 0
    flips = [(at, bytes([value]) * size) for at in range(0, 16, 4) for value in (0, 255) for size in (4, 16)]
    flips += [(at, bytes([int(draw.choice([0, 1, 127, 255]))])) for at in draw.integers(0, 700, 20).tolist()]
    for at, damage in flips:
        overwrite(path, offset + at, damage)
        found = list(lenient)
        try:
            list(strict)
        except midepoch.CorruptBlockError:
            refused += 1
        assert found[:50] == others[:50]
        assert found[-100:] == others[-100:]  # whatever is between them: the damage may be in a value
        overwrite(path, 0, whole)
    assert refused > 10


def test_lengths_that_no_memory_holds_are_a_damaged_block(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"id": range(4000)})
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=1000)
    ds, lenient = (midepoch.from_files(path, on_error=mode) for mode in ("raise", "skip"))
    offset = scan(path).offsets[2]
    length = path.read_bytes().index((8000).to_bytes(8, "little"), offset)  # before the compressed values
    overwrite(path, length, (1 << 62).to_bytes(8, "little"))
    with pytest.raises(midepoch.CorruptBlockError, match=r"a\.arrow"):
        list(ds)
    assert [row["id"] for row in lenient] == [*range(2000), *range(3000, 4000)]


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_text_that_is_not_utf8_names_the_row_in_every_format(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)
    overwrite(path, path.read_bytes().index(b"row 33 "), b"\xff")
    with pytest.raises(midepoch.CorruptBlockError, match=r"a\.arrow: column 'text' of row 33 "):
        list(midepoch.from_files(path).with_format(kind).loader(10))
