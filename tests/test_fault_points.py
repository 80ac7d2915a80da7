"""The n-th call of os, mmap and pyarrow fails, for every n: rows are right or an error says why not, and the next try works.

``tests/checkpoint/test_points.py`` refuses system calls that change a folder, in a process of its own. Here the calls of
Python fail: also those that only read, and for want of memory.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import itertools
import logging
import mmap
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from alarms import signal_after
from data import documents, write_arrow, write_parquet
from midepoch.audit import Ledger, read_run
from midepoch.errors import DataNotFoundError, MidepochError
from midepoch.storage.stores import Store

ROWS = 60
DOCUMENTED = (MidepochError, OSError, MemoryError)
SECONDS = 10
FEW = 5
"""Points of a default run, for each operation and kind of fault."""


@dataclass
class Faults:
    """Makes calls on some folders fail: the n-th, or all from the n-th on."""

    folders: Sequence[Path]
    first: int = sys.maxsize
    forever: bool = False
    error: Callable[[], BaseException] = MemoryError
    calls: int = 0
    refused: list[str] = field(default_factory=list)
    guard: Any = field(default_factory=threading.Lock)

    def call(self, name: str) -> None:
        with self.guard:
            self.calls += 1
            fails = self.calls == self.first or (self.forever and self.calls > self.first)
            if fails:
                self.refused.append(name)
        if fails:
            raise self.error()

    def holds(self, path: Any) -> bool:
        try:
            text = os.path.abspath(os.fspath(path))
        except TypeError:
            return False
        return any(text.startswith(str(folder)) for folder in self.folders)


_BY_PATH = (
    *((os, name) for name in ("open", "stat", "lstat", "listdir", "scandir", "mkdir", "rmdir", "unlink", "utime")),
    *((os, name) for name in ("replace", "rename", "access")),
    *((pa, name) for name in ("memory_map", "OSFile")),
    *((pq, name) for name in ("ParquetFile", "read_metadata")),
)
_BY_CALLER = (
    *((os, name) for name in ("pwrite", "pread", "fsync", "fstat", "ftruncate", "posix_fallocate")),
    *((fcntl, name) for name in ("lockf", "flock")),
    *((pa.ipc, name) for name in ("open_stream", "open_file", "new_stream", "new_file", "read_schema", "read_message")),
    *((pa, name) for name in ("compress", "decompress", "BufferOutputStream")),
    (mmap, "mmap"),
)


class _File:
    """An open file whose reads and writes may fail."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *problem: object) -> Any:
        return self._file.__exit__(*problem)

    def __iter__(self) -> Any:
        return iter(self._file)

    def write(self, data: Any) -> Any:
        self._faults.call("write")
        return self._file.write(data)

    def flush(self) -> None:
        self._faults.call("flush")
        self._file.flush()

    def read(self, *size: int) -> Any:
        self._faults.call("read")
        return self._file.read(*size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _FileSystem:
    """pyarrow's file system, whose calls may fail."""

    def __init__(self, given: Any, faults: Faults) -> None:
        self._given, self._faults = given, faults

    def get_file_info(self, place: Any) -> Any:
        self._faults.call("get_file_info")
        return self._given.get_file_info(place)

    def open_input_file(self, path: str) -> Any:
        self._faults.call("open_input_file")
        return self._given.open_input_file(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


@contextmanager
def failing(faults: Faults) -> Iterator[None]:
    """Count the calls on the folders, and make some of them fail."""

    def by_path(original: Any, name: str) -> Any:
        def call(path: Any = ".", *others: Any, **options: Any) -> Any:
            if faults.holds(path):
                faults.call(name)
            return original(path, *others, **options)

        return call

    def by_caller(original: Any, name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("midepoch"):
                faults.call(name)
            return original(*given, **options)

        return call

    def opening(path: Any, *others: Any, **options: Any) -> Any:
        of_file = isinstance(path, int) and sys._getframe(1).f_globals["__name__"].startswith("midepoch")
        if not of_file and not faults.holds(path):
            return open_file(path, *others, **options)
        try:
            faults.call("open")
        except BaseException:
            if of_file:
                os.close(path)
            raise
        return _File(open_file(path, *others, **options), faults)

    open_file, filesystem = builtins.open, Store.filesystem
    with pytest.MonkeyPatch.context() as patches:
        for make, functions in ((by_path, _BY_PATH), (by_caller, _BY_CALLER)):
            for module, name in functions:
                if hasattr(module, name):
                    patches.setattr(module, name, make(getattr(module, name), name))
        for module in (builtins, io):
            patches.setattr(module, "open", opening)
        patches.setattr(
            Store,
            "filesystem",
            property(lambda self: _FileSystem(filesystem.fget(self), faults)),  # type: ignore[attr-defined]
        )
        yield


def in_time(what: str) -> AbstractContextManager[None]:
    """Fail if something takes too long."""

    def late(*_: object) -> None:
        pytest.fail(f"{what}: not over after {SECONDS} s")

    return signal_after(SECONDS, late)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for module in ("damage", "stores"):
        monkeypatch.setattr(f"midepoch.storage.{module}.PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr("midepoch.dataset.parts.ROWS", 10)
    monkeypatch.setattr("midepoch.dataset.parts.PART_BYTES", 1)
    monkeypatch.setattr("midepoch.audit.ledger._MARK_SECONDS", 0.0)
    caplog.set_level(logging.CRITICAL, "midepoch")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files of 60 numbers, Arrow files of 60 documents, and indexes of both."""
    folder = tmp_path_factory.mktemp("fault-points")
    for part in range(2):
        write_parquet(folder / "numbers" / f"{part}.parquet", range(part * 30, part * 30 + 30), 10)
    (folder / "documents").mkdir()
    write_arrow(folder / "documents" / "a.arrow", documents(ROWS), 10, file_format=True)
    for name in ("numbers", "documents"):
        midepoch.from_files(folder / name, index_dir=folder / "index")
    return folder


Rows = list[int]


def new_index(data: Path, folder: Path) -> Rows:
    return [row["id"] for row in midepoch.from_files(data / "documents", index_dir=folder / "index")]


def saved_index(data: Path, folder: Path) -> Rows:
    return [row["id"] for row in midepoch.from_files(data / "documents", index_dir=data / "index")]


def block_cache(data: Path, folder: Path) -> Rows:
    ds = midepoch.from_files(data / "numbers", index_dir=data / "index", cache_dir=folder / "blocks")
    return sorted(row["id"] for row in ds.shuffle(1, scope="rows"))


def cache(data: Path, folder: Path) -> Rows:
    ds = midepoch.from_files(data / "documents", index_dir=data / "index").map(lambda row: {"id": row["id"]})
    return [row["id"] for row in ds.cache(folder / "cache")]


def written_parts(data: Path, folder: Path) -> Rows:
    made = midepoch.from_generator(lambda: ({"id": i} for i in range(ROWS)), key="rows", cache_dir=folder / "made")
    return [row["id"] for row in made]


OPERATIONS: list[Callable[[Path, Path], Rows]] = [new_index, saved_index, block_cache, cache, written_parts]
ERRORS: dict[str, Callable[[], BaseException]] = {
    "ENOSPC": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "memory": MemoryError,
}


def numbers_of_points(calls: int, every: bool) -> Iterator[int]:
    """The points of a run: all, until a run needs fewer calls, or some of those of a clean run."""
    return itertools.count(1) if every else iter(sorted({1 + calls * point // FEW for point in range(FEW)}))


def left_in(folder: Path) -> set[str]:
    """The names of all files in a folder. Those of ledgers are random, and those of indexes depend on the folder."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {re.sub(r"[^/.]*(\.ledger|\.midepoch-index(?:\.lock)?)$", r"*\1", name) for name in names}


def check_files(clean: set[str], folder: Path, faults: Faults, what: str) -> None:
    """A file that could not be removed may be left. It has a name by which it is known as temporary."""
    may_stay = faults.forever or {"unlink", "rmdir", "scandir", "listdir", "replace", "lstat"} & set(faults.refused)
    until = time.monotonic() + 2
    while more := left_in(folder) - clean:
        if may_stay:
            more = {
                name
                for name in more
                if not any(re.match(r"\..*\.tmp$|\.\w+\.order\.\w{8}$", part) for part in name.split("/"))
            }
        if not more or time.monotonic() > until or not _is_fetching():
            break
        time.sleep(0.01)  # a thread may still write a block ahead
    assert not more, f"{what}: {sorted(more)} left"


def _is_fetching() -> bool:
    return any(thread.name.startswith("midepoch-fetch") for thread in threading.enumerate())


class Points:
    """Runs of an operation with a fault at each of its points."""

    def __init__(self, data: Path, root: Path, error: str, forever: bool, every: bool) -> None:
        self.data, self.root, self.every = data, root, every
        self.error, self.forever, self.count = error, forever, 0

    def run(self, name: str, attempt: Callable[[Path, Faults, str], None]) -> None:
        """Attempt it cleanly, then with a fault at each point."""
        folder = self.root / "clean"
        folder.mkdir()
        clean = Faults([folder, self.data])
        attempt(folder, clean, f"{name}, clean")
        assert clean.calls >= 10
        files = left_in(folder)
        for point in numbers_of_points(clean.calls, self.every):
            folder = self.root / f"{point}"
            folder.mkdir()
            what = f"{name}, {self.error} at call {point}{' and later' if self.forever else ''}"
            faults = Faults([folder, self.data], point, self.forever, ERRORS[self.error])
            with in_time(what):
                attempt(folder, faults, what)
            if faults.calls < point:
                break
            assert faults.refused or not self.every
            check_files(files, folder, faults, what)
            shutil.rmtree(folder, ignore_errors=True)
            self.count += 1
        assert self.count >= (10 if self.every else 2)
        print(f"{name} {self.error} {'forever' if self.forever else 'once'}: {self.count} points")


MODES = [
    pytest.param(error, forever, every, id=f"{error}-{'on' if forever else 'once'}-{'all' if every else 'some'}",
                 marks=[pytest.mark.slow] if every else [])
    for every in (False, True) for error in ERRORS for forever in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("error", "forever", "every"), MODES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
def test_files(
    operation: Callable[[Path, Path], Rows], error: str, forever: bool, every: bool, data: Path, tmp_path: Path
) -> None:
    """What could not be written or read is found by an error, or done without. The next try has all rows."""

    def attempt(folder: Path, faults: Faults, what: str) -> None:
        try:
            with failing(faults):
                rows = operation(data, folder)
        except DOCUMENTED:
            assert faults.refused, what
        else:
            assert rows == list(range(ROWS)), what
        if faults.refused:
            assert operation(data, folder) == list(range(ROWS)), f"{what}: after it"

    Points(data, tmp_path, error, forever, every).run(operation.__name__, attempt)


def _plain(ds: midepoch.Dataset) -> midepoch.Dataset:
    return ds


def _filtered(ds: midepoch.Dataset) -> midepoch.Dataset:
    return ds.filter(lambda row: row["id"] % 7 != 3)


def _packed(ds: midepoch.Dataset) -> midepoch.Dataset:
    return ds.filter(lambda row: row["tokens"]).pack(16, column="tokens", pad=-1)


# A loader of the point before may be collected while writing fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("error", "forever", "every"), MODES)
@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "written"])
@pytest.mark.parametrize("steps", [_plain, _filtered, _packed], ids=lambda each: each.__name__)
def test_ledgers(
    steps: Callable[[midepoch.Dataset], midepoch.Dataset],
    is_mapped: bool,
    error: str,
    forever: bool,
    every: bool,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ledger counts no batch that was not delivered, and what it lost it says. The run continues where it was."""
    if not is_mapped:
        monkeypatch.delattr("os.posix_fallocate", raising=False)
    source = midepoch.from_files(data / "documents", index_dir=data / "index", columns=["id", "tokens"])
    made = steps(source.shuffle(seed=1)).with_format("arrow")
    expected = [batch.to_pydict() for batch in made.loader(4)]

    def attempt(folder: Path, faults: Faults, what: str) -> None:
        delivered, failed = [], False
        loader = made.loader(4, audit=Ledger(folder / "run", attempt="first"))
        try:
            with failing(faults):
                for batch in loader:
                    delivered.append(batch.to_pydict())
        except DOCUMENTED:
            failed = True
        assert delivered == (expected[: len(delivered)] if failed else expected), what
        is_mute = "pwrite" in faults.refused  # a counter that is not mapped keeps its last value in the file
        judge(folder / "run", len(delivered), len(expected), what, is_mute=is_mute)
        if failed and len(delivered) < len(expected):
            if faults.first % 2:  # another loader, as after a restart
                state = loader.state_dict()
                loader.close()
                loader = made.loader(4, audit=Ledger(folder / "run", attempt="second"))
                loader.load_state_dict(state)
            delivered += [batch.to_pydict() for batch in loader]
            assert delivered == expected, f"{what}: after it"
        loader.close()
        judge(folder / "run", len(delivered), len(expected), f"{what}: after it", is_mute=is_mute)

    name = f"ledger {steps.__name__} {'mapped' if is_mapped else 'written'}"
    Points(data, tmp_path, error, forever, every).run(name, attempt)


def judge(folder: Path, delivered: int, steps: int, what: str, *, is_mute: bool) -> None:
    """A ledger has what was delivered, or less and says so. ``is_mute``: the count could not be written."""
    try:
        run = read_run(folder)
    except DataNotFoundError:  # no step was recorded
        return
    assert run.steps <= delivered, f"{what}: {run.steps} steps of {delivered}"
    assert run.steps == delivered or run.problems or is_mute, f"{what}: {run.steps} steps of {delivered}, no problem"
    (epoch,) = run.epochs
    assert not epoch.repeated, f"{what}: {epoch}"
    assert not epoch.never or run.problems or is_mute, f"{what}: {epoch}"
    assert not epoch.complete or delivered == steps, f"{what}: {epoch}"
    if not run.problems and delivered == steps and not is_mute:
        assert epoch.complete or epoch.pending, f"{what}: {epoch}"
