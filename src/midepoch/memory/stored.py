"""Folders of rows in the cache: written once by one process, complete or absent, and removed when unused for long."""

from __future__ import annotations

import os
import shutil
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from midepoch._internal.progress import Progress, shown
from midepoch.dataset import Dataset, parts
from midepoch.dataset.parts import PartWriter
from midepoch.errors import MidepochError
from midepoch.order import Order, Selection
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources import Source
from midepoch.storage.cache_files import LockFile, default_index_dir, make_private, sweep, temporary_path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

KEPT_SECONDS = 60 * 24 * 3600.0
"""Time after which rows of memory that nobody has opened are removed. A generator's rows are kept."""
_ROOM = "Make room, or choose another folder with cache_dir=… or the variable MIDEPOCH_CACHE."

Write = Callable[[PartWriter, Progress], int]
"""Writes all parts and returns the number of rows."""


def folder_for(kind: str, given: str | os.PathLike[str] | None) -> Path:
    """Return the folder for rows of a kind: that of the user, or one in the cache."""
    if given is None:
        return default_index_dir() / kind
    if not os.fspath(given):
        raise ValueError("cache_dir: the name of the folder is empty.")
    return Path(os.path.expanduser(given)).absolute()


def stored(root: Path, name: str, what: str, write: Write, *, expires: bool) -> Source:
    """Return the rows of the folder ``name``, which ``write`` writes unless it is there.

    ``name`` is a digest in hexadecimal. ``what``: the function of the user, for messages.
    """
    folder = root / name
    if (folder / parts.COMPLETE).exists():
        try:
            return _opened(folder)
        except MidepochError as problem:  # damaged, or another process has just removed it
            if not expires:  # what a function computed for hours is the user's to delete
                raise MidepochError(
                    f"{what}: {str(problem).rstrip('.')}. To compute it again, delete {folder}."
                ) from None
            _remove(folder)
    _written(root, name, what, write)
    if expires:
        _remove_unused(root, folder)
    return _opened(folder)


def _opened(folder: Path) -> Source:
    with suppress(OSError):
        os.utime(folder / parts.COMPLETE)  # files of data keep their times, by which changes are detected
    source = parts.open_parts(folder)
    if source is None:
        raise MidepochError(f"the cache {folder} has no rows. Delete this folder.")
    if fcntl is not None:  # while this process uses the rows, nobody removes them
        with suppress(OSError):
            file = os.open(folder / parts.COMPLETE, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(source, os.close, file).atexit = False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return source


def dataset_of(source: Source) -> Dataset:
    """Return all rows of a source."""
    return Dataset(PipelineSpec.of(Leaf(source, Order(Selection.of_ranges([(0, source.rows)])))))


def _written(root: Path, name: str, what: str, write: Write) -> None:
    folder, temporary = root / name, temporary_path(root / name)
    writer = PartWriter(temporary, what, _ROOM)
    with writer.writing():
        make_private(root)
        sweep(root, ".*.tmp")
        lock = LockFile(root / "lock")
    with closing(lock), parts.held(lock, f"writing {folder}", int(name[:12], 16)):
        if (folder / parts.COMPLETE).exists():  # by another process, meanwhile
            return
        try:
            with writer.writing():
                temporary.mkdir(mode=0o700)
            with shown(what, "rows") as report:
                rows = write(writer, report)
            writer.complete({"rows": rows})
            with writer.writing():
                try:
                    os.rename(temporary, folder)
                except OSError:  # another process may have been faster, without the lock
                    if not (folder / parts.COMPLETE).exists():
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_unused(root: Path, kept: Path) -> None:
    for folder in root.iterdir():
        with suppress(OSError):
            unused = time.time() - (folder / parts.COMPLETE).stat().st_mtime
            if folder != kept and unused > KEPT_SECONDS and not _in_use(folder):
                _remove(folder)


def _in_use(folder: Path) -> bool:
    """Return True if a process of this machine has opened the rows."""
    with open(folder / parts.COMPLETE, "rb") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _remove(folder: Path) -> None:
    """Rename a folder, so that nobody opens it any more, and remove it."""
    hidden = temporary_path(folder)
    with suppress(OSError):
        os.rename(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
