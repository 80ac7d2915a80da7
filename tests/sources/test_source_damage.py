"""on_error="skip" passes over damage of rows and blocks, and over nothing else."""

from __future__ import annotations

import errno
import gzip
import io
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

import midepoch
from data import write_arrow
from forks import forked
from midepoch.errors import (
    CheckpointMismatchError,
    CorruptBlockError,
    DataChangedError,
    DataError,
    FetchError,
    FormatError,
    MapError,
    MidepochError,
)
from midepoch.storage.damage import is_damage
from midepoch.storage.stores import Store
from midepoch.testing import assert_resumes_exactly


def caused(problem: Exception, cause: Exception) -> Exception:
    problem.__cause__ = cause
    return problem


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "pointer of Git LFS.*git lfs pull",
        ),
        ("\n<!DOCTYPE html>\n<html><body>Sign in</body></html>\n", "HTML page, not the data. Download it again"),
    ],
    ids=["lfs", "html"],
)
def test_a_file_that_stands_for_the_data_is_named(contents: str, says: str, suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{suffix}").write_text(contents)
    with pytest.raises(midepoch.DataError, match=says):
        midepoch.from_files(tmp_path / f"a.{suffix}")


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (ValueError("x"), True),
        (NotImplementedError("a kind of row that a function does not know"), True),
        (pa.ArrowInvalid("x"), True),
        (OSError("zlib inflate failed"), True),
        (CorruptBlockError("x"), True),
        (MapError("x"), True),
        (ImportError("x"), False),
        (MemoryError(), False),
        (pa.ArrowMemoryError("x"), False),
        (pa.ArrowNotImplementedError("x"), False),
        (OSError(errno.ENOMEM, "x"), False),
        (OSError(errno.EMFILE, "x"), False),
        (OSError(f"Failed to open file: {os.strerror(errno.ENFILE)}"), False),
        (OSError(f"Memory mapping file failed: {os.strerror(errno.EIO)}"), False),
        (OSError("Arrow error: IOError: Error reading bytes from file. Detail: [errno 116] Stale file handle"), False),
        *((OSError(number, "x"), False) for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EINTR)),
        (OSError(errno.EINVAL, "an offset that cannot be"), True),
        (DataChangedError("x"), False),
        (MidepochError("x"), False),
        (caused(MapError("x"), ImportError("y")), False),
    ],
    ids=repr,
)
def test_what_is_damage(problem: Exception, expected: bool) -> None:
    assert is_damage(problem) is expected


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ECONNREFUSED])
def test_a_function_may_fail_for_what_its_row_names(number: int) -> None:
    assert is_damage(OSError(number, "x"), of_row=True)
    assert is_damage(caused(MapError("x"), OSError(number, "x")), of_row=True)
    assert not is_damage(OSError(errno.EIO, "x"), of_row=True)


def no_files_left(action: Callable[[], Any]) -> str:
    """The name of what is raised while no file can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        action()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return "nothing"


# Each waits for 2 s. Lines are read by the same code.
@pytest.mark.parametrize(
    "kind", ["parquet", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("csv", "jsonl"))]
)
def test_rows_are_not_skipped_for_want_of_open_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"x": range(100)}), path, row_group_size=10)
    else:
        path.write_text("x\n1\n2\n" if kind == "csv" else '{"x": 1}\n{"x": 2}\n')
    ds = midepoch.from_files(path, on_error="skip")
    assert forked(lambda: "FetchError" in no_files_left(lambda: list(ds))) == 0
    assert ds.pipeline.source.fetch(0, ["x"]).num_rows  # from here on what a block takes besides the file is known
    raised = f"FetchError: {path} could not be read (4 attempts in "
    assert forked(lambda: no_files_left(lambda: list(ds)).startswith(raised)) == 0


KINDS = ["arrow", "zstd.arrow", "parquet", "csv", "jsonl", "jsonl.gz", "orc"]


def written(folder: Path, kind: str, rows: int = 60) -> Path:
    """A file of this kind with the column x, in several blocks where the kind has blocks."""
    path, table = folder / f"a.{kind}", pa.table({"x": range(rows)})
    if kind.endswith("arrow"):
        options = pa.ipc.IpcWriteOptions(compression="zstd" if "zstd" in kind else None)
        write_arrow(path, table, 10, options=options)
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=10)
    elif kind == "orc":
        orc.write_table(table, path)
    else:
        lines = [f"{i}\n" if kind == "csv" else f'{{"x": {i}}}\n' for i in range(rows)]
        text = "".join(["x\n" * (kind == "csv"), *lines]).encode()
        path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    return path


@contextmanager
def no_files_for(seconds: float) -> Iterator[None]:
    """No file can be opened for so long."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_NOFILE, limits))
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("kind", KINDS)
def test_a_passing_shortage_of_open_files_costs_no_row(kind: str, tmp_path: Path) -> None:
    ds = midepoch.from_files(written(tmp_path, kind), on_error="skip")
    assert ds.pipeline.source.access is None or ds.pipeline.source.fetch(0, ["x"])  # imports what it needs

    def read() -> bool:
        with no_files_for(0.15):
            return [row["x"] for row in ds] == list(range(60))

    assert forked(read) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_must_not_be_read_is_not_skipped(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, kind)
    ds = midepoch.from_files(path, on_error="skip")
    assert ds.pipeline.source.access is None or ds.pipeline.source.fetch(0, ["x"])  # imports what it needs
    path.chmod(0)

    def read() -> bool:
        if not os.geteuid():
            os.seteuid(65534)  # nothing is refused to root
        try:
            list(ds)
        except (FetchError, PermissionError) as problem:
            return str(path) in str(problem)
        return False

    assert forked(read) == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EINTR])
def test_a_local_file_is_tried_again_and_then_the_error_is_what_it_is(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midepoch.storage.stores.PAUSES", (0.0, 0.0))
    store, failures = Store(pa.fs.LocalFileSystem()), [2]

    def action() -> str:
        if failures[0]:
            failures[0] -= 1
            raise OSError(number, os.strerror(number))
        return "read"

    assert store.persist("a", "read", action) == "read"
    failures[0] = 3
    with pytest.raises(FetchError, match=rf"a could not be read \(3 attempts .*{os.strerror(number)}"):
        store.persist("a", "read", action)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_image_is_not_skipped_for_want_of_a_package(
    on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (2, 2)).save(file, "PNG")
    images = [{"bytes": data, "path": None} for data in (file.getvalue(), b"no image", file.getvalue())]
    features = datasets.Features({"image": datasets.Image(), "x": datasets.Value("int64")})
    datasets.Dataset.from_dict({"image": images, "x": [0, 1, 2]}, features=features).save_to_disk(tmp_path / "a")
    ds = midepoch.load_from_disk(tmp_path / "a", on_error=on_error)
    assert [row["x"] for row in midepoch.load_from_disk(tmp_path / "a", on_error="skip")] == [0, 2]
    monkeypatch.setattr(datasets.config, "PIL_AVAILABLE", False)
    with pytest.raises(MidepochError, match="column 'image' cannot be decoded.*install 'Pillow'") as caught:
        list(ds)
    assert not isinstance(caught.value, CorruptBlockError)
    assert [row["x"] for row in ds.remove_columns(["image"])] == [0, 1, 2]


def import_missing(row: Any) -> Any:
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def out_of_memory(row: Any) -> Any:
    raise MemoryError


def out_of_files(row: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def unsupported(row: Any) -> Any:
    pc.equal(pa.array(["a"], pa.string_view()), "a")


@pytest.mark.parametrize("function", [import_missing, out_of_memory, out_of_files, unsupported])
def test_functions_that_cannot_run_skip_no_rows(function: Callable[[Any], Any], tmp_path: Path) -> None:
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", pa.table({"x": range(6)}), 2))
    for made in (
        ds.map(function, on_error="skip"),
        ds.map(function, batched=True, on_error="skip"),
        ds.filter(function, on_error="skip"),
        ds.filter(function, batched=True, on_error="skip"),
        ds.flat_map(function, on_error="skip"),
    ):
        with pytest.raises(MapError, match="failed on row 0"):
            list(made)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_rows_with_views_are_filtered(kind: pa.DataType, suffix: str, on_error: str, tmp_path: Path) -> None:
    table = pa.table({"x": range(20), "view": pa.array([str(i) for i in range(20)]).cast(kind)})
    path = tmp_path / f"a.{suffix}"
    if suffix == "arrow":
        write_arrow(path, table, 6)
    else:
        pq.write_table(table, path, row_group_size=6)
    expected = table.to_pylist()[11:]
    ds = midepoch.from_files(path, on_error=on_error)
    assert list(midepoch.from_files(path, on_error=on_error, filters=[("x", ">", 10)])) == expected
    assert list(ds.filter(pc.field("x") > 10)) == expected
    assert list(ds.filter(lambda row: row["x"] > 10)) == expected
    shuffled = list(ds.shuffle(seed=1).filter(pc.field("x") > 10))
    assert sorted(shuffled, key=lambda row: row["x"]) == expected
    with pytest.raises(midepoch.ColumnError, match="cannot be used"):
        midepoch.from_files(path, on_error=on_error, filters=[("view", "==", "7")])


def emptied(data: bytes) -> bytes:
    return data[:0]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


def write_part(path: Path, ids: range) -> None:
    table = pa.table({"id": list(ids)})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".orc":
        orc.write_table(table, path)
    elif path.suffix in (".arrow", ".feather"):
        compression = "zstd" if path.suffix == ".feather" else None
        write_arrow(path, table, 10, options=pa.ipc.IpcWriteOptions(compression=compression))
    elif ".csv" in path.name:
        text = "id\n" + "".join(f"{i}\n" for i in ids)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    else:
        path.write_bytes(gzip.compress("".join(f'{{"id": {i}}}\n' for i in ids).encode()))


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        *((suffix, emptied) for suffix in (".parquet", ".orc", ".arrow", ".feather", ".csv", ".csv.gz")),
        *((suffix, truncated) for suffix in (".parquet", ".orc")),
        *((suffix, flipped) for suffix in (".csv.gz", ".jsonl.gz")),
    ],
)
def test_a_file_without_a_readable_row_is_left_out(
    suffix: str, damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are read and resumed. A state is refused when other files are left out."""
    files = [tmp_path / f"{number}{suffix}" for number in range(3)]
    for number, file in enumerate(files):
        write_part(file, range(100 * number, 100 * number + 100))
    intact = files[0].read_bytes()
    files[0].write_bytes(damage(intact))  # the first: its columns are unknown
    with pytest.raises(DataError, match=f"0{suffix}"):
        midepoch.from_files(tmp_path)

    def opened() -> midepoch.Dataset:
        return midepoch.from_files(tmp_path, on_error="skip")

    for _ in range(2):  # with and without an index
        caplog.clear()
        assert [row["id"] for row in opened()] == list(range(100, 300))
        assert f"0{suffix} is damaged: all of its rows are left out" in caplog.text
        assert f"1{suffix}" not in caplog.text
    assert_resumes_exactly(lambda: opened().shuffle(seed=1).loader(7), epochs=1, steps=[3, 20])
    state = opened().loader(7).state_dict()
    files[1].write_bytes(damage(files[1].read_bytes()))
    with pytest.raises(CheckpointMismatchError, match="data"):
        opened().loader(7).load_state_dict(state)
    write_part(files[1], range(100, 200))
    opened().loader(7).load_state_dict(state)
    files[0].write_bytes(intact)
    with pytest.raises(CheckpointMismatchError, match="data"):
        opened().loader(7).load_state_dict(state)
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=f"0{suffix}"):
        opened()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_files_that_are_not_damaged_are_not_left_out(on_error: str, tmp_path: Path) -> None:
    """Columns of one name, and types that no column can have, are mistakes of a program, which are named."""
    write_part(tmp_path / "0.parquet", range(3))
    pq.write_table(pa.table([[1], [2]], ["id", "id"]), tmp_path / "1.parquet")
    with pytest.raises(FormatError, match="several columns are named 'id'"):
        midepoch.from_files(tmp_path, on_error=on_error)
    pq.write_table(pa.table({"id": [[1, 2]]}), tmp_path / "1.parquet")
    with pytest.raises(FormatError, match="the files do not have one schema"):
        midepoch.from_files(tmp_path, on_error=on_error)
