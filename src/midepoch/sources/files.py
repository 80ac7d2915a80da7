"""Which files a user means: a file, a list, a glob, or a folder, listed in one order on every host."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from midepoch.errors import DataNotFoundError, FormatError

ARROW_SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")
_LATER = {".parquet", ".pq", ".orc", ".csv", ".tsv", ".json", ".jsonl", ".gz", ".zst"}

PathLike = str | os.PathLike[str]


def list_files(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    """The Arrow files meant by ``paths``: each glob and folder sorted, a list kept in the order given."""
    if isinstance(paths, (str, os.PathLike)):
        return _expand(os.fspath(paths))
    listed = [path for each in paths for path in _expand(os.fspath(each))]
    if not listed:
        raise DataNotFoundError("no files given: the list of paths is empty.")
    return listed


def _expand(path: str) -> list[Path]:
    path = os.path.expanduser(path)
    if "://" in path:
        raise FormatError(f"{path}: object stores are not read yet; give a local path.")
    if os.path.isdir(path):
        found = _visible(_walk(path))
        arrow = sorted(name for name in found if name.endswith(ARROW_SUFFIXES))
        if not arrow:
            others = ", ".join(sorted({os.path.splitext(name)[1] or name for name in found})[:5])
            what = f"it holds only {others}" if others else "it is empty"
            raise DataNotFoundError(f"no Arrow files ({', '.join(ARROW_SUFFIXES)}) in the folder {path}: {what}.")
        return [Path(name) for name in arrow]
    if os.path.isfile(path):
        return [_readable(path)]
    if glob.has_magic(path):
        matched = sorted(_visible(name for name in glob.glob(path, recursive=True) if os.path.isfile(name)))
        if not matched:
            raise DataNotFoundError(f"no file matches {path!r} (in {os.getcwd()}).")
        return [_readable(name) for name in matched]
    raise DataNotFoundError(f"{path!r} does not exist (looked in {os.getcwd()}).")


def _walk(folder: str) -> Iterator[str]:
    """All files below a folder, through links to folders too, each folder once."""
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()  # a link that leads back up
            continue
        seen.add(real)
        yield from (os.path.join(root, name) for name in names)


def _visible(names: Iterable[str]) -> list[str]:
    """Without hidden and marker files (.crc, _SUCCESS)."""
    return [name for name in names if not os.path.basename(name).startswith((".", "_"))]


def _readable(path: str) -> Path:
    if os.path.splitext(path)[1].lower() in _LATER:
        raise FormatError(
            f"{path}: from_files reads Arrow IPC files. "
            "Load other formats with midepoch.load_dataset('parquet' | 'csv' | 'json', data_files=…)."
        )
    return Path(path)
