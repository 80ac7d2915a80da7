"""Sidecars of row lengths: made once, never those of other contents, and never in the way."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from data import write_arrow
from midepoch._internal.hints import forget_warnings
from midepoch.errors import DataChangedError, FormatError
from midepoch.sources import Source, lengths
from midepoch.sources import lengths as lengths_module
from midepoch.sources.lengths import lengths_of
from row_lengths import VALUES, everything, expected, sidecars, source_of
from s3 import Server, storage_options


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The columns whose lengths were computed."""
    columns: list[str] = []
    real = lengths_module.measured_blocks

    def counting(source: Source, column: str, **options: bool) -> Iterator[Any]:
        columns.append(column)
        return real(source, column, **options)

    monkeypatch.setattr(lengths_module, "measured_blocks", counting)
    return columns


def test_second_call_maps_the_file(tmp_path: Path, readings: list[str]) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"t": VALUES, "u": VALUES[::-1]}), 3)
    for column in ("t", "u", "t", "u"):
        lengths_of(source_of(path, tmp_path / "ix"), column)
    assert readings == ["t", "u"]
    for sidecar in sidecars(tmp_path / "ix"):
        assert sidecar.stat().st_mode & 0o777 == 0o600
    base: Any = lengths_of(source_of(path, tmp_path / "ix"), "t")._lengths
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(base).__name__ == "mmap"


def test_files_in_a_store(s3_server: Server, tmp_path: Path, readings: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="bucket-", dir=s3_server.folder))
    for number in range(3):
        pq.write_table(pa.table({"text": ["x" * (n + number) for n in range(50)]}), folder / f"{number}.parquet", 20)
    options = {"storage_options": storage_options(s3_server.endpoint), "index_dir": tmp_path}
    for _ in range(2):
        ds = midepoch.from_files(f"s3://{folder.name}/", **options)
        assert ds.lengths("text").tolist() == [n + number for number in range(3) for n in range(50)]
    assert readings == ["text"]
    pq.write_table(pa.table({"text": ["y" * (n + 7) for n in range(50)]}), folder / "1.parquet", 20)
    assert midepoch.from_files(f"s3://{folder.name}/", **options).lengths("text")[50:100].tolist() == [*range(7, 57)]


def test_pickles_to_its_path(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"t": ["x" * (n % 90) for n in range(5000)]}), 100)
    lengths = lengths_of(source_of(path, tmp_path / "ix"), "t")
    stored = pickle.dumps(lengths)
    assert len(stored) < 500
    assert everything(pickle.loads(stored)) == everything(lengths)
    (sidecar,) = sidecars(tmp_path / "ix")
    sidecar.unlink()
    with pytest.raises(FormatError, match="were changed or removed"):
        pickle.loads(stored)


@pytest.mark.parametrize("restore_time", [False, True])
def test_file_rewritten_in_place_with_other_lengths(tmp_path: Path, restore_time: bool) -> None:
    """The fingerprint samples the offsets: here it is the same for both contents."""
    first = np.full(20_000, 50, np.int64)
    second = first.copy()
    second[6_000:6_100] += 1
    second[6_100:6_200] -= 1  # the offsets change only here, between two samples
    path, folder = tmp_path / "a.arrow", tmp_path / "ix"

    def write(lengths: np.ndarray[Any, Any]) -> None:
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        column = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.zeros(ends[-1], np.int8)))
        write_arrow(path, pa.table({"ids": column}), 20_000)

    write(first)
    before = source_of(path, folder)
    stat = path.stat()
    assert everything(lengths_of(before, "ids")) == first.tolist()
    while True:
        write(second)
        if restore_time:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        now = path.stat()
        if now.st_ctime_ns != stat.st_ctime_ns:  # the clock of the file system has ticked
            break
    after = source_of(path, folder)
    assert now.st_size == stat.st_size
    assert after.fingerprint == before.fingerprint
    for source in (before, after):
        assert everything(lengths_of(source, "ids")) == second.tolist()


def test_file_of_other_contents_is_refused(tmp_path: Path) -> None:
    path, parquet = tmp_path / "a.arrow", tmp_path / "a.parquet"
    write_arrow(path, pa.table({"t": ["aaaa", "b"]}), 2)
    pq.write_table(pa.table({"t": ["aaaa", "b"]}), parquet)
    sources = [source_of(path, tmp_path / "ix"), source_of(parquet, tmp_path / "ix")]
    for source in sources:
        lengths_of(source, "t")
    write_arrow(path, pa.table({"t": ["a", "bbbb"]}), 2)
    pq.write_table(pa.table({"t": ["a", "bbbb"]}), parquet)
    for source, changed in zip(sources, (path, parquet), strict=True):
        os.utime(changed, ns=(0, 10**18))
        with pytest.raises(DataChangedError, match="has changed since it was indexed"):
            lengths_of(source, "t")


def test_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"t": VALUES}), 3)
    source, real = source_of(path, tmp_path / "ix"), lengths_module.measured_blocks

    def changing(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield from real(*arguments, **options)
        os.utime(path, ns=(0, 10**18))

    monkeypatch.setattr(lengths_module, "measured_blocks", changing)
    with pytest.raises(DataChangedError, match="while the lengths of its rows were read"):
        lengths_of(source, "t")
    assert not sidecars(tmp_path / "ix")


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut", "longer", "header", "numbers", "other", "folder"])
def test_unusable_sidecar_is_made_again(damage: str, tmp_path: Path, readings: list[str]) -> None:
    folder = tmp_path / "ix"
    values = ["x" * (n % 300) for n in range(3000)]
    source = source_of(write_arrow(tmp_path / "a.arrow", pa.table({"t": values, "u": values[::-1]}), 100), folder)
    lengths_of(source, "t")
    (sidecar,) = sidecars(folder)
    data = sidecar.read_bytes()
    if damage == "folder":
        sidecar.unlink()
        sidecar.mkdir()
    elif damage == "other":
        lengths_of(source, "u")
        (other,) = set(sidecars(folder)) - {sidecar}
        sidecar.write_bytes(other.read_bytes())
        readings.remove("u")
    else:
        flipped = bytearray(data)
        flipped[20] ^= 1
        zeros = data[:4096] + bytes(len(data) - 4096)
        contents = {"empty": b"", "garbage": b"x" * len(data), "cut": data[:-7], "longer": data + b"x"}
        sidecar.write_bytes({**contents, "header": bytes(flipped), "numbers": zeros}[damage])
    for _ in range(2):
        assert everything(lengths_of(source, "t")) == expected(values)
    if damage != "folder":  # which cannot be replaced
        assert readings == ["t", "t"]
        assert sidecar.read_bytes() == data


def test_sidecar_of_another_version_is_made_again(
    tmp_path: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(write_arrow(tmp_path / "a.arrow", pa.table({"t": VALUES}), 3), tmp_path / "ix")
    lengths_of(source, "t")
    monkeypatch.setattr(lengths, "VERSION", 99)
    assert everything(lengths_of(source, "t")) == expected(VALUES)
    assert readings == ["t", "t"]


def test_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"t": VALUES}), 3)
    (tmp_path / "cache").write_text("a file, no folder")
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))
    source = source_of(path)
    forget_warnings()
    with caplog.at_level(logging.WARNING, "midepoch"):
        lengths = lengths_of(source, "t")
    assert everything(lengths) == everything(pickle.loads(pickle.dumps(lengths))) == expected(VALUES)
    assert "the row lengths cannot be saved in" in caplog.text


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")
    values = ["x" * (n % 300) for n in range(9000)]
    source = source_of(write_arrow(tmp_path / "a.arrow", pa.table({"t": values}), 100), tmp_path / "ix")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))  # bytes: less than the sidecar
        lengths = lengths_of(source, "t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert everything(lengths) == expected(values)
    assert "the row lengths cannot be saved in" in caplog.text
    assert not [*sidecars(tmp_path / "ix"), *(tmp_path / "ix").glob(".*.tmp")]


KILLED = """
import os, signal, sys
from pathlib import Path
import midepoch
from midepoch.sources import lengths
real, left = lengths._put, int(sys.argv[3])
def put(file, numbers):
    global left
    left -= 1
    real(file, numbers[: len(numbers) // 2] if not left else numbers)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
lengths._put = put
lengths.lengths_of(midepoch.from_files(sys.argv[1], index_dir=sys.argv[2]).pipeline.source, "t")
"""


def test_killed_while_writing(tmp_path: Path) -> None:
    values, folder = ["x" * (n % 300) for n in range(300_000)], tmp_path / "ix"
    path = write_arrow(tmp_path / "a.arrow", pa.table({"t": values}), 1000)
    command = [sys.executable, "-c", KILLED, str(path), str(folder), "2"]
    assert subprocess.run(command, check=False, timeout=300).returncode == -signal.SIGKILL
    assert not sidecars(folder)
    assert list(folder.glob(".*.tmp"))
    source = source_of(path, folder)
    for _ in range(2):
        assert everything(lengths_of(source, "t")) == expected(values)
    assert not list(folder.glob(".*.tmp"))


def test_several_at_the_same_time(tmp_path: Path) -> None:
    values = ["x" * (n % 300) for n in range(50_000)]
    path = write_arrow(tmp_path / "a.arrow", pa.table({"t": values}), 100)
    script = "import sys, midepoch\nprint(midepoch.from_files(sys.argv[1], index_dir=sys.argv[2]).lengths('t').sum())\n"
    command = [sys.executable, "-c", script, str(path), str(tmp_path / "ix")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    source = source_of(path, tmp_path / "ix")
    with ThreadPoolExecutor(3) as pool:
        totals = [pool.submit(lambda: sum(everything(lengths_of(source, "t")))) for _ in range(3)]
    assert [int(process.communicate()[0]) for process in processes] == [sum(expected(values))] * 2
    assert {each.result() for each in totals} == {sum(expected(values))}
    assert len(sidecars(tmp_path / "ix")) == 1


def test_sidecars_of_earlier_contents_are_removed_after_a_week(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.arrow", tmp_path / "ix"
    kept = []
    for number, age in enumerate((0, 8 * 24 * 3600, 0)):
        write_arrow(path, pa.table({"t": ["x" * number] * 4, "u": ["y"] * 4}), 2)
        source = source_of(path, folder)
        for column in ("t", "u") if number == 1 else ("t",):
            lengths_of(source, column)
        for made in set(sidecars(folder)) - set(kept):
            kept.append(made)
            os.utime(made, (made.stat().st_atime, made.stat().st_mtime - age))
    first, *old, last = kept
    (other,) = [each for each in old if each.exists()]
    assert len(old) == 2
    assert sidecars(folder) == sorted([first, other, last])
    assert other.name.split(".")[1] != first.name.split(".")[1]  # that of the other column is none of its business
