"""One list of sources, held to one set of rules. A new source is one more entry, and gets every case for free.

An entry writes rows 0 to 59, in several files where that is possible, and returns a function that opens them. ``key``
reads the number of a row from it.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from midepoch.sources import lake
from midepoch.testing import assert_resumes_exactly
from shard_files import write_litdata, write_mds
from tar_files import write_tar
from token_files import write_megatron

ROWS = 60
PARTS = [(0, 25), (25, 26), (26, ROWS)]
Open = Callable[[Path], midepoch.Dataset]


@dataclass(frozen=True)
class Entry:
    """How rows from ``start`` on are written to a folder, how the folder is opened, and the number of a row."""

    write: Callable[[Path, int], None]
    open: Open
    key: Callable[[dict[str, Any]], int]


def in_parts(write: Callable[[Path, range], None], suffix: str) -> Callable[[Path, int], None]:
    def write_all(folder: Path, first: int) -> None:
        for number, (start, stop) in enumerate(PARTS):
            write(folder / f"part-{number}{suffix}", range(first + start, first + stop))

    return write_all


def table(ids: range) -> pa.Table:
    return pa.table({"id": list(ids), "text": [f"row {i}" for i in ids]})


def by_id(row: dict[str, Any]) -> int:
    return int(row["id"])


def by_first_token(row: dict[str, Any]) -> int:
    return int(row["input_ids"][0])


def write_ids(folder: Path, first: int) -> None:
    (folder / "ids.json").write_text(json.dumps(list(range(first, first + ROWS))))


def read_ids(folder: Path) -> list[int]:
    return list(json.loads((folder / "ids.json").read_text()))


def generate(ids: list[int]) -> Iterator[dict[str, int]]:
    for i in ids:
        yield {"id": i}


def write_delta(folder: Path, first: int) -> None:
    deltalake = pytest.importorskip("deltalake")
    for start, stop in PARTS:
        deltalake.write_deltalake(str(folder / "table"), table(range(first + start, first + stop)), mode="append")


def write_lance(folder: Path, first: int) -> None:
    lance = pytest.importorskip("lance")
    for start, stop in PARTS:
        lance.write_dataset(table(range(first + start, first + stop)), str(folder / "table.lance"), mode="append")


def write_images(folder: Path, first: int) -> None:
    for i in range(first, first + ROWS):
        Image.fromarray(np.full((2, 2, 3), [i // 256, i % 256, 0], np.uint8)).save(folder / f"{i:05d}.png")


SOURCES: dict[str, Entry] = {
    "arrow": Entry(in_parts(lambda path, ids: write_arrow(path, table(ids), 7), ".arrow"), midepoch.from_files, by_id),
    "parquet": Entry(
        in_parts(lambda path, ids: pq.write_table(table(ids), path, row_group_size=7), ".parquet"),
        midepoch.from_files,
        by_id,
    ),
    "orc": Entry(in_parts(lambda path, ids: orc.write_table(table(ids), path), ".orc"), midepoch.from_files, by_id),
    "csv": Entry(
        in_parts(
            lambda path, ids: path.write_text("id,text\n" + "".join(f"{i},row {i}\n" for i in ids)) and None, ".csv"
        ),
        midepoch.from_files,
        by_id,
    ),
    "jsonl": Entry(
        in_parts(lambda path, ids: path.write_text("".join(f'{{"id": {i}}}\n' for i in ids)) and None, ".jsonl"),
        midepoch.from_files,
        by_id,
    ),
    "json array": Entry(
        in_parts(lambda path, ids: path.write_text(json.dumps([{"id": i} for i in ids], indent=1)) and None, ".json"),
        midepoch.from_files,
        by_id,
    ),
    "text": Entry(
        in_parts(lambda path, ids: path.write_text("".join(f"{i}\n" for i in ids)) and None, ".txt"),
        midepoch.from_files,
        lambda row: int(row["text"]),
    ),
    "tar": Entry(
        in_parts(lambda path, ids: write_tar(path, [(f"{i:05d}.txt", b"x") for i in ids]) and None, ".tar"),
        midepoch.from_files,
        lambda row: int(row["__key__"]),
    ),
    "tar.gz": Entry(
        in_parts(
            lambda path, ids: write_tar(path, [(f"{i:05d}.a", b"x") for i in ids], mode="w:gz") and None, ".tar.gz"
        ),
        midepoch.from_files,
        lambda row: int(row["__key__"]),
    ),
    "tokens": Entry(
        in_parts(lambda path, ids: np.save(path, np.repeat(np.array(ids, np.uint16), 8)), ".npy"),
        lambda folder: midepoch.from_tokens(folder, 8),
        by_first_token,
    ),
    "megatron": Entry(
        in_parts(lambda path, ids: write_megatron(path, [[[i, i + 1]] for i in ids], "int32") and None, ""),
        midepoch.from_megatron,
        by_first_token,
    ),
    "mds": Entry(
        lambda folder, first: write_mds(
            folder, {"id": "int"}, [{"id": i} for i in range(first, first + ROWS)], shard=25
        ),
        midepoch.from_files,
        by_id,
    ),
    "litdata": Entry(
        lambda folder, first: write_litdata(folder, [{"id": i} for i in range(first, first + ROWS)], chunk=25),
        midepoch.from_files,
        by_id,
    ),
    "images": Entry(
        write_images,
        lambda folder: midepoch.from_files(folder).decode("image"),
        lambda row: int(np.asarray(row["image"])[:, 0, 0] @ [256, 1, 0]),
    ),
    "dict": Entry(write_ids, lambda folder: midepoch.from_dict({"id": read_ids(folder)}), by_id),
    "generator": Entry(
        write_ids, lambda folder: midepoch.from_generator(generate, gen_kwargs={"ids": read_ids(folder)}), by_id
    ),
    "map style": Entry(
        write_ids,
        lambda folder: midepoch.from_map_style(list(generate(read_ids(folder))), fingerprint=str(read_ids(folder)[0])),
        by_id,
    ),
    "delta": Entry(write_delta, lambda folder: midepoch.from_delta(folder / "table"), by_id),
    "lance": Entry(write_lance, lambda folder: midepoch.from_lance(folder / "table.lance"), by_id),
}


@dataclass(frozen=True)
class Case:
    """A source that was written to a folder."""

    entry: Entry
    folder: Path

    def open(self, folder: Path | None = None) -> midepoch.Dataset:
        return self.entry.open(folder or self.folder)

    def keys(self, rows: Any) -> list[int]:
        return [self.entry.key(row) for row in rows]


@pytest.fixture(params=list(SOURCES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    entry = SOURCES[request.param]
    folder = tmp_path / "data"
    folder.mkdir()
    entry.write(folder, 0)
    return Case(entry, folder)


def test_rows_in_order_by_number_and_in_any_process(case: Case) -> None:
    ds = case.open()
    assert case.keys(ds) == list(range(ROWS))
    assert len(ds) == ROWS
    assert case.keys([ds[i] for i in (0, 24, 25, 26, 59, -1)]) == [0, 24, 25, 26, 59, 59]
    assert case.keys(ds.select([30, 2, 30])) == [30, 2, 30]
    assert case.keys(pickle.loads(pickle.dumps(ds)).slice(20, 30)) == list(range(20, 30))
    shuffled = ds.shuffle(seed=3, window=2)
    found = [
        [case.keys(batch) for batch in shuffled.loader(8, num_workers=workers, collate_fn=list)] for workers in (0, 1)
    ]
    assert found[0] == found[1] and sorted(sum(found[0], [])) == list(range(ROWS)) != sum(found[0], [])


# 10 is after the end of the first epoch.
@pytest.mark.parametrize("apart", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_resumes_exactly(case: Case, apart: int) -> None:
    moments_of = {"rows": [0, 1, 4, 8, 9, 10][::apart], "window": [10, 9, 8, 4, 1, 0][::apart]}
    for scope, moments in moments_of.items():
        ds = case.open().shuffle(seed=2, scope=scope, **({"window": 2} if scope == "window" else {}))
        assert_resumes_exactly(lambda ds=ds: ds.loader(7, collate_fn=list), epochs=1, steps=moments, tail=3)


def test_other_numbers_of_ranks_continue_the_same_global_batches(case: Case) -> None:
    def loaders(world: int) -> list[midepoch.Loader]:
        ds = case.open().shuffle(seed=5).with_lanes(8)
        return [ds.loader(8 // world, rank=rank, world_size=world, collate_fn=list) for rank in range(world)]

    def steps(ranks: list[midepoch.Loader], count: int) -> list[list[int]]:
        passes = [iter(loader) for loader in ranks]
        return [sorted(key for each in passes for key in case.keys(next(each))) for _ in range(count)]

    expected = steps(loaders(1), 7)
    found, state = [], None
    for world, count in ((4, 3), (2, 2), (8, 2)):
        ranks = loaders(world)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        found += steps(ranks, count)
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        assert len(json.dumps(state)) < 1024
    assert found == expected


def test_a_second_opening_scans_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprint = case.open().pipeline.leaf.source.fingerprint

    def scanned(*_: Any) -> None:
        raise AssertionError("a file was scanned again")

    monkeypatch.setattr(lake, "_scanned", scanned)
    ds = case.open()
    assert ds.pipeline.leaf.source.fingerprint == fingerprint
    assert case.keys(ds.slice(24, 27)) == [24, 25, 26]


def test_an_opening_sees_what_has_changed_since_the_last(case: Case) -> None:
    for _ in range(2):
        case.open()
    shutil.rmtree(case.folder)
    case.folder.mkdir()
    case.entry.write(case.folder, 1000)
    for _ in range(2):
        assert case.keys(case.open()) == list(range(1000, 1000 + ROWS))


def test_moved_data_resumes_and_other_data_is_refused(case: Case, tmp_path: Path) -> None:
    loader = case.open().shuffle(seed=1).loader(8, collate_fn=list)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    moved = tmp_path / "moved"
    shutil.copytree(case.folder, moved)
    other = case.open(moved).shuffle(seed=1).loader(8, collate_fn=list)
    other.load_state_dict(state)
    assert case.keys(next(iter(other))) == case.keys(next(batches))
    changed = tmp_path / "changed"
    changed.mkdir()
    case.entry.write(changed, 1000)
    with pytest.raises(midepoch.CheckpointMismatchError):
        case.open(changed).shuffle(seed=1).loader(8, collate_fn=list).load_state_dict(state)
