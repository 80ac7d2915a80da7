"""A state is refused after the data has changed, in every format, and a fingerprint costs the same for every size."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from PIL import Image

import midepoch
from data import write_arrow
from midepoch.errors import CheckpointMismatchError, MidepochError
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from shard_files import write_litdata, write_mds
from tar_files import write_tar
from token_files import write_megatron

ROWS = 80_000
Write = Callable[[Path, list[int]], Any]


def table(ids: list[int]) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def write_text(suffix: str, head: str, line: str) -> Write:
    return lambda folder, ids: (folder / f"a{suffix}").write_text(head + "".join(line.format(i) for i in ids))


def write_lance(folder: Path, ids: list[int]) -> None:
    pytest.importorskip("lance").write_dataset(table(ids), str(folder / "a.lance"))


def write_images(folder: Path, ids: list[int]) -> None:
    for number, i in enumerate(ids[:: ROWS // 200]):
        Image.fromarray(np.full((4, 4), i % 251, np.uint8)).save(folder / f"{number:05d}.bmp")


FORMATS: dict[str, tuple[Write, Callable[[Path], midepoch.Dataset]]] = {
    "arrow": (lambda folder, ids: write_arrow(folder / "a.arrow", table(ids), 1000), midepoch.from_files),
    "feather": (
        lambda folder, ids: write_arrow(
            folder / "a.feather", table(ids), 1000, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ),
        midepoch.from_files,
    ),
    "parquet": (
        lambda folder, ids: pq.write_table(table(ids), folder / "a.parquet", compression="none", use_dictionary=False),
        midepoch.from_files,
    ),
    "orc": (lambda folder, ids: orc.write_table(table(ids), folder / "a.orc"), midepoch.from_files),
    "csv": (write_text(".csv", "id\n", "{:06d}\n"), midepoch.from_files),
    "jsonl": (write_text(".jsonl", "", '{{"id": "{:06d}"}}\n'), midepoch.from_files),
    "text": (write_text(".txt", "", "{:06d}\n"), midepoch.from_files),
    "tar": (
        lambda folder, ids: write_tar(folder / "a.tar", [(f"{n}.x", b"%06d" % i) for n, i in enumerate(ids[::20])]),
        midepoch.from_files,
    ),
    "mds": (
        lambda folder, ids: write_mds(folder, {"id": "int"}, [{"id": i} for i in ids], shard=ROWS),
        midepoch.from_files,
    ),
    "litdata": (
        lambda folder, ids: write_litdata(folder, [{"id": i} for i in ids], chunk=ROWS),
        midepoch.from_files,
    ),
    "tokens": (
        lambda folder, ids: np.save(folder / "a.npy", np.array(ids, np.uint32)),
        lambda folder: midepoch.from_tokens(folder, 8),
    ),
    "megatron": (
        lambda folder, ids: write_megatron(folder / "a", [[ids[i : i + 8]] for i in range(0, ROWS, 8)]),
        midepoch.from_megatron,
    ),
    "images": (write_images, midepoch.from_files),
    "lance": (write_lance, lambda folder: midepoch.from_lance(folder / "a.lance")),
}


@pytest.mark.parametrize("name", list(FORMATS))
def test_another_order_of_the_same_values_is_other_data(name: str, tmp_path: Path) -> None:
    """The second half is permuted: all sizes, and what a file begins with, are the same."""
    write, opened = FORMATS[name]
    rng = np.random.default_rng(1)
    ids = rng.permutation(ROWS).tolist()
    folders = [tmp_path / each for each in ("first", "same", "changed")]
    for folder in folders:
        folder.mkdir()
        write(folder, ids)
        if folder.name == "same":
            ids[ROWS // 2 :] = rng.permutation(ids[ROWS // 2 :]).tolist()
    first, same, changed = (opened(folder).loader(10) for folder in folders)
    state = first.state_dict()
    same.load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="data"):
        changed.load_state_dict(state)


@pytest.mark.parametrize("suffix", ["arrow", "orc"])
def test_a_damaged_file_is_never_resumed(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    rows = table(np.random.default_rng(1).permutation(1000).tolist())
    if suffix == "orc":
        orc.write_table(rows, path, compression="zlib")
    else:
        with pa.ipc.new_stream(path, rows.schema) as writer:  # of which every byte but the last ones counts
            writer.write_table(rows)
    state = midepoch.from_files(path).loader(10).state_dict()
    intact = path.read_bytes()
    for place in np.linspace(3, len(intact) - 12, 26, dtype=int):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 4]) + intact[place + 1 :])
        with pytest.raises(MidepochError):
            midepoch.from_files(path, force_reindex=True).loader(10).load_state_dict(state)


@pytest.mark.parametrize("words", [2000, 200_000])
def test_another_order_of_a_dictionary_is_other_data(words: int, tmp_path: Path) -> None:
    """In front of a dictionary, and of large record batches, all headers are the same."""
    rng = np.random.default_rng(1)
    numbers, values = pa.array(rng.integers(0, words, 300_000), pa.int32()), [f"{i:06d}" for i in range(words)]
    states = []
    for name in ("first", "same", "changed"):
        if name == "changed":
            values[words // 5 : words // 4] = rng.permutation(values[words // 5 : words // 4]).tolist()
        rows = pa.table({"word": pa.DictionaryArray.from_arrays(numbers, values)})
        write_arrow(tmp_path / f"{name}.arrow", rows, 100_000)
        states.append(midepoch.from_files(tmp_path / f"{name}.arrow").loader(10).state_dict())
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize("size", [0, 1, BEGINNING, BEGINNING + 1, 3 << 20, 1 << 50])
def test_contents_of_any_size_take_few_reads_that_reach_both_ends(size: int) -> None:
    reads: list[tuple[int, int]] = []

    def read(length: int, start: int) -> bytes:
        reads.append((start, start + length))
        return bytes(1)

    fingerprint(b"", read, size)
    assert len(reads) <= 16 and sum(stop - start for start, stop in reads) == min(size, BEGINNING)
    assert reads == sorted(reads) and (reads[0][0], reads[-1][1]) == (0, size)
    longest = max((b[0] - a[1] for a, b in pairwise(reads)), default=0)
    assert longest <= size / 15


def test_a_damaged_image_of_200_is_noticed(tmp_path: Path) -> None:
    write_images(tmp_path, list(range(ROWS)))
    state = midepoch.from_files(tmp_path).loader(10).state_dict()
    for number in (0, 17, 101, 199):
        path = tmp_path / f"{number:05d}.bmp"
        intact = path.read_bytes()
        path.write_bytes(intact[:-3] + bytes([intact[-3] ^ 4]) + intact[-2:])
        with pytest.raises(CheckpointMismatchError, match="data"):
            midepoch.from_files(tmp_path, force_reindex=True).loader(10).load_state_dict(state)
        path.write_bytes(intact)


def test_the_same_bytes_in_another_syntax_are_other_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    for syntax, other in [("jsonl", "text"), ("text", "csv"), ("csv", "jsonl")]:
        state = midepoch.from_files(path, format=syntax).loader(1).state_dict()
        with pytest.raises(CheckpointMismatchError, match="data"):
            midepoch.from_files(path, format=other).loader(1).load_state_dict(state)
