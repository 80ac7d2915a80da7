"""Text with a row a line: broken lines are left out alone, named and never delivered; healthy ones always are."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import midepoch
from data import calls_of
from forks import forked
from midepoch.errors import FormatError
from midepoch.sources.formats import compressed, lines
from midepoch.sources.formats.lines import is_closed, row_ends
from midepoch.testing import assert_resumes_exactly

ROWS = 60


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 200)
    monkeypatch.setattr(lines, "_READ", 90)


def json_line(i: int) -> str:
    return json.dumps({"id": i, "text": f"né {i}"}, ensure_ascii=False)


def quoted_line(i: int) -> str:
    return f'{i},"one, ""{i}""\nof two"'


BROKEN_JSON = [
    '{"id": 7',
    "garbage",
    '{"id":',
    '{"id": 7, "text": "x',
    '{"id": 1, "id": 2}',
    "[1]",
    "5",
    '{"id": 1},',
    "}",
    "\0",
]
BROKEN_CSV = ["7", "7,x,y", "7,x,", '7,"a\nb",c']


def damaged(line: Callable[[int], str], broken: dict[int, str], head: str = "", last_newline: bool = True) -> bytes:
    text = head + "\n".join(broken.get(i, line(i)) for i in range(ROWS))
    return (text + "\n" * last_newline).encode()


def check(path: Path, broken: list[int], numbers: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Exactly these rows are missing, these lines named, and all counts agree."""
    healthy = [i for i in range(ROWS) if i not in broken]
    with pytest.raises(FormatError, match=rf"(?s){path.name}: line {numbers[0]} cannot be read: .*on_error=\"skip\""):
        midepoch.from_files(path)
    for _ in range(2):  # made, then read
        caplog.clear()
        with caplog.at_level(logging.WARNING, "midepoch"):
            ds = midepoch.from_files(path, on_error="skip")
        named = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
        assert f"skipped {len(numbers)} line" in caplog.text
        assert f"cannot be read: {named}" in caplog.text
        assert len(ds) == len(healthy)
        assert [row["id"] for row in ds] == healthy
    assert sorted(i for batch in ds.shuffle(seed=1).loader(7) for i in batch["id"].tolist()) == healthy


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("bad", "places"), [*((bad, [0, 20, 21, 59]) for bad in BROKEN_JSON), *(("{", [place]) for place in (0, 30, 59))]
)
def test_json_is_read_without_its_broken_lines(
    bad: str, places: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if bad == "[1]" and 0 in places:
        places = [1, 21, 59]  # as a first line it is an array, which is refused
    path = tmp_path / "a.jsonl"
    path.write_bytes(damaged(json_line, dict.fromkeys(places, bad)))
    check(path, places, [i + 1 for i in places], caplog)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("bad", "places"), [*((bad, [0, 20, 21, 59]) for bad in BROKEN_CSV), *(("7", [place]) for place in (0, 30, 59))]
)
def test_csv_is_read_without_its_broken_rows(
    bad: str, places: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(damaged(quoted_line, dict.fromkeys(places, bad), "id,text\n"))
    height = 1 + bad.count("\n")
    numbers = [2 + sum(height if j in places else 2 for j in range(i)) for i in places]
    check(path, places, numbers, caplog)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "csv.gz"])
def test_a_broken_last_line_without_a_newline(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line, head, bad = (json_line, "", '{"id": 59, "te') if "json" in kind else (lambda i: f"{i},x", "id,text\n", "59")
    data = damaged(line, {59: bad}, head, last_newline=False)
    path = tmp_path / f"a.{kind}"
    path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    check(path, [59], [60 + bool(head)], caplog)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bad", ['7,"x', '"7","x', '7,"x""'])
@pytest.mark.parametrize("kind", ["plain", "quoted"])
@pytest.mark.parametrize("place", [0, 30, 59])
def test_a_quote_that_never_ends_loses_its_own_line_only(
    bad: str, kind: str, place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = (lambda i: f"{i},x") if kind == "plain" else (lambda i: f'"{i}","x, y"')
    path = tmp_path / "a.csv"
    path.write_bytes(damaged(line, {place: bad}, "id,text\n"))
    check(path, [place], [place + 2], caplog)


def test_more_broken_lines_than_are_named_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    broken = list(range(5, 35))
    path.write_bytes(damaged(json_line, dict.fromkeys(broken, "{")))
    check(path, broken, [i + 1 for i in broken], caplog)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["jsonl", "csv.gz"])
def test_resumes_exactly_without_broken_lines(kind: str, tmp_path: Path) -> None:
    line, head, bad = (json_line, "", "{") if "json" in kind else (quoted_line, "id,text\n", "1,2,3")
    data = damaged(line, dict.fromkeys([0, 17, 18, 40], bad), head)
    path = tmp_path / f"a.{kind}"
    path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    ds = midepoch.from_files(path, on_error="skip").shuffle(seed=3)
    assert_resumes_exactly(lambda: ds.loader(5), steps=[0, 1, 3, 4, 7, 8, 9, 10], tail=4)
    expected = [batch["id"].tolist() for batch in ds.loader(5)]
    assert [batch["id"].tolist() for batch in ds.loader(5, num_workers=2)] == expected
    ranks = [list(ds.with_lanes(2).loader(5, rank=rank, world_size=2)) for rank in range(2)]
    delivered = sorted(i for rank in ranks for batch in rank for i in batch["id"].tolist())
    assert delivered == [i for i in range(ROWS) if i not in (0, 17, 18, 40)]


def test_a_line_that_is_not_utf8_is_broken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(damaged(json_line, {9: "{}"}).replace(b"{}", b'{"id": 9, "text": "\xff\xfe"}'))
    check(path, [9], [10], caplog)


@pytest.mark.parametrize("place", [0, 1])
def test_a_line_that_is_null_is_a_row_of_nulls(place: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(["null\n" if i == place else '{"id": 5}\n' for i in range(3)]))
    assert [row["id"] for row in midepoch.from_files(path)] == [None if i == place else 5 for i in range(3)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_lines_before_the_damage_of_a_compressed_file_are_read(kind: str, tmp_path: Path) -> None:
    line, head = (json_line, "") if kind == "jsonl" else (lambda i: f"{i},x{i}", "id,text\n")
    data = gzip.compress(damaged(line, {}, head))
    path = tmp_path / f"a.{kind}.gz"
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(FormatError, match=r"truncated or damaged.*on_error=\"skip\""):
        midepoch.from_files(path)
    ds = midepoch.from_files(path, on_error="skip")
    assert len(ds) > 5
    assert [row["id"] for row in ds] == list(range(len(ds)))


def test_types_that_are_mixed_are_an_error_that_names_what_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join('{"a": %s}\n' % ("1" if i % 2 else '"x"') for i in range(40)))
    for size in (lines.BLOCK_BYTES, 10):
        monkeypatch.setattr(lines, "BLOCK_BYTES", size)
        monkeypatch.setattr(lines, "_READ", size)
        for on_error in ("raise", "skip"):
            with pytest.raises(FormatError, match=r"column 'a' contains .*load_dataset\(\"json\""):
                midepoch.from_files(path, on_error=on_error)
    pytest.importorskip("datasets")
    ds = midepoch.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "hub"))
    assert [row["a"] for row in ds][:2] == ["x", 1]


@pytest.mark.parametrize("name", ["ＩＤ", "ﻻ", "\uf8ff", "é"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_a_header_may_begin_with_any_letter(name: str, bom: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{bom}\n{name},b\n1,2\n" if bom else f"{name},b\n1,2\n", encoding="utf-8")
    assert list(midepoch.from_files(path)) == [{name: 1, "b": 2}]


def test_a_header_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,"text\n1,2\n')
    with pytest.raises(FormatError, match="its header has no end"):
        midepoch.from_files(tmp_path / "a.csv")


def slow_row_ends(data: bytes) -> tuple[list[int], bool]:
    """Row ends, and whether all quotes are closed, letter by letter."""
    ends, quoted, value_begins, i = [], False, True, 0
    while i < len(data):
        letter = data[i : i + 1]
        if quoted:
            if letter == b'"' and data[i + 1 : i + 2] == b'"':
                i += 1
            elif letter == b'"':
                quoted = False
        elif letter == b'"' and value_begins:
            quoted = True
        elif letter == b"\n":
            ends.append(i + 1)
        value_begins = not quoted and letter in (b",", b"\n", b"\r")
        i += 1
    return ends, not quoted


@given(st.text(alphabet='a,"\n\r', max_size=40))
def test_rows_end_where_reading_letter_by_letter_says(text: str) -> None:
    data = text.encode()
    assert (row_ends(data, b",").tolist(), is_closed(data, b",")) == slow_row_ends(data)


@given(st.lists(st.lists(st.text(alphabet='a,"\n', max_size=4), min_size=2, max_size=2), min_size=1, max_size=8))
def test_rows_written_by_python_end_where_it_ended_them(rows: list[list[str]]) -> None:
    parts = []
    for row in rows:
        file = io.StringIO()
        csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL).writerow(row)
        parts.append(file.getvalue().encode())
    expected = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    assert row_ends(b"".join(parts), b",").tolist() == expected


def test_cutting_quoted_rows_takes_no_step_for_each_value() -> None:
    data = b"".join(b'"%d","a ""b"", c\n"\n' % i for i in range(20_000))
    assert len(row_ends(data, b",")) == 20_000
    assert calls_of(lambda: row_ends(data, b",")) < 100


def compressed_file(folder: Path, kind: str, rows: int = 2000) -> Path:
    import pyarrow as pa

    path = folder / f"a.jsonl.{kind}"
    codec = {"gz": "gzip", "zst": "zstd", "bz2": "bz2", "lz4": "lz4"}[kind]
    with pa.CompressedOutputStream(str(path), codec) as file:
        for i in range(rows):
            file.write(json_line(i).encode() + b"\n")
    return path


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of about 100 rows; one entry for each time that decompressing begins."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", 3000)
    monkeypatch.setattr(lines, "_READ", 1000)
    monkeypatch.setattr(compressed, "_READ", 700)
    found: list[int] = []
    rewind = compressed._Decompressed._rewind
    monkeypatch.setattr(compressed._Decompressed, "_rewind", lambda self: (found.append(1), rewind(self))[1])
    return found


@pytest.mark.parametrize("kind", ["gz", "zst", "bz2", "lz4"])
def test_a_compressed_file_is_decompressed_once_in_any_order(kind: str, tmp_path: Path, openings: list[int]) -> None:
    ds = midepoch.from_files(compressed_file(tmp_path, kind), cache_bytes=200_000)
    assert len(ds.pipeline.source.layout.block_starts) > 15
    blocks = list(range(len(ds.pipeline.source.layout.block_starts) - 1))
    random.Random(1).shuffle(blocks)
    for block in blocks:
        start, stop = ds.pipeline.source.layout.block_starts[block : block + 2].tolist()
        assert ds.pipeline.source.fetch(block, ["id"]).column("id").to_pylist() == list(range(start, stop))
    assert len(openings) == 1
    assert sorted(i for batch in ds.shuffle(seed=1).loader(64) for i in batch["id"].tolist()) == list(range(2000))
    assert len(openings) == 1


@pytest.mark.parametrize("limit", [1, 20_000])
def test_contents_that_do_not_fit_are_read_all_the_same(limit: int, tmp_path: Path, openings: list[int]) -> None:
    ds = midepoch.from_files(compressed_file(tmp_path, "gz"), cache_bytes=limit)
    assert [row["id"] for row in ds] == list(range(2000))
    assert len(openings) <= 2 + 4  # in order: once, and again for what threads ask for out of turn
    for block in (15, 3, 9, 0):
        start, stop = ds.pipeline.source.layout.block_starts[block : block + 2].tolist()
        assert ds.pipeline.source.fetch(block, ["id"]).column("id").to_pylist() == list(range(start, stop))


def test_contents_that_fit_only_partly_on_the_disk(tmp_path: Path, openings: list[int]) -> None:
    ds = midepoch.from_files(compressed_file(tmp_path, "gz"))
    starts, fetch = ds.pipeline.source.layout.block_starts.tolist(), ds.pipeline.source.fetch
    most, limits = int(ds.pipeline.source.offsets[5]) - 10, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))  # the last write of block 4 is cut
    try:
        fetch(4, ["id"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for block in (8, 0, 1, 2, 3, 4):
        assert fetch(block, ["id"]).column("id").to_pylist() == list(range(starts[block], starts[block + 1]))


KILLED = """
import os, signal, sys
import midepoch
from midepoch.sources.formats import lines
lines.BLOCK_BYTES, lines._READ = 3000, 1000
ds = midepoch.from_files(sys.argv[1], cache_dir=sys.argv[2], index_dir=sys.argv[2])
assert ds.pipeline.source.fetch(9, ["id"]).num_rows
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_decompressed_contents(tmp_path: Path) -> None:
    path, cache = compressed_file(tmp_path, "gz"), tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(cache)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    left = [name for _, _, names in os.walk(cache) for name in names]
    assert all("midepoch-" in name for name in left), left
    assert len(midepoch.from_files(path, cache_dir=cache)) == 2000


def test_a_fork_decompresses_for_itself(tmp_path: Path, openings: list[int]) -> None:
    ds = midepoch.from_files(compressed_file(tmp_path, "gz"))
    first = ds.pipeline.source.fetch(2, ["id"]).column("id").to_pylist()
    assert forked(lambda: ds.pipeline.source.fetch(2, ["id"]).column("id").to_pylist() == first) == 0
    assert ds.pipeline.source.fetch(9, ["id"]).num_rows
    batches = [batch["id"].tolist() for batch in ds.shuffle(seed=2).loader(32)]
    assert [batch["id"].tolist() for batch in ds.shuffle(seed=2).loader(32, num_workers=2)] == batches
