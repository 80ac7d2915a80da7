"""Folders whose files must not be read one by one: tables with logs, Zarr stores, TensorFlow datasets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from midepoch.errors import DataNotFoundError, FormatError, MidepochError
from midepoch.storage.stores import Store

_MARKS = (
    ("/_delta_log/", re.compile(r"(.*?)/_delta_log/\d{20}\..*"), "Delta table", "from_delta"),
    (".manifest", re.compile(r"(.*?)/_versions/\d+\.manifest"), "Lance table", "from_lance"),
    (
        ".metadata.json",
        re.compile(r"(.*?)/metadata/(?:v\d+|\d+-[0-9a-fA-F-]{36})(?:\.gz)?\.metadata\.json(?:\.gz)?"),
        "Iceberg table",
        "from_iceberg",
    ),
)
_SHARDS = re.compile(r"(.*?)/[^/]+\.(?:tfrecord|array_record)-\d{5}-of-\d{5}")
_OTHERS = (
    (
        re.compile(r"(.*?)/(?:zarr\.json|\.zarray|\.zgroup)"),
        "a Zarr store",
        "Open its arrays with zarr, and pass them to midepoch.from_map_style",
    ),
    (re.compile(r"(.*?)/\.hoodie/hoodie\.properties"), "a Hudi table", "Write a snapshot of it as Parquet files"),
    (
        _SHARDS,
        "a TensorFlow dataset",
        "Open it with tfds.data_source, and pass that to midepoch.from_map_style",
    ),
)
"""Formats that cannot be read, in folders with files (JSON, Parquet) that can be, but are not the data."""
_SIGNS = re.compile(r"/zarr\.json$|/\.z(?:array|group)$|/\.hoodie/|-of-\d{5}$", re.MULTILINE)
_VERSION = re.compile(r"\d{20}\.")


def refuse_tables(store: Store, folder: str, paths: Sequence[str], chosen: Sequence[str] | None = None) -> None:
    """Raise FormatError if a folder is a table or contains one: its files may hold deleted rows. So do Hudi tables; the
    JSON files of Zarr stores and TensorFlow datasets only describe the data.

    ``chosen``: the paths that match a glob. Other formats are refused only if some of these are in their folders.
    """
    names = "\n".join(paths)
    for text, pattern, noun, function in _MARKS:
        if text not in names:
            continue
        matches = {path: match[1] for path in paths if text in path and (match := pattern.fullmatch(path)) is not None}
        if matches:
            marks = [path for path, root in matches.items() if root == min(matches.values())]
            root = matches[marks[0]]
            article = "an" if noun.startswith("I") else "a"
            which = f"is {article}" if root == folder.rstrip("/") else f"contains {store.name(root)}, {article}"
            opened = store.name(max(marks) if noun.startswith("I") else root)
            raise _refusal(f"{store.name(folder)} {which} {noun}", function, opened)
    for pattern, noun, remedy in _OTHERS if _SIGNS.search(names) else ():
        roots = {match[1] for path in paths if (match := pattern.fullmatch(path)) is not None}
        if pattern is _SHARDS:  # without such files, nothing would be read
            roots &= {path.rpartition("/")[0] for path in paths if path.endswith(".json")}
        if chosen is not None:
            roots &= {path[: slash.start()] for path in chosen for slash in re.finditer("/", path)}
        if roots:
            root = min(roots)
            which = "is" if root == folder.rstrip("/") else f"contains {store.name(root)},"
            raise FormatError(
                f"{store.name(folder)} {which} {noun}, which cannot be read in place. {remedy}, or list the files one "
                "by one to read them as they are."
            )


def _refusal(what: str, function: str, opened: str) -> FormatError:
    return FormatError(
        f"{what}. Its files contain rows that were deleted or replaced. Use midepoch.{function}({opened!r}), or list "
        "the files one by one to read all of them."
    )


def refuse_part(store: Store, folder: str) -> None:
    """Raise FormatError for a folder inside of a table. In a store, where it is a request, only of partitions."""
    *above, name = folder.split("/")
    if store.local:
        roots = ["/".join(above[:i]) for i in range(len(above), 1, -1)]
        for root in roots:
            if _has_log(f"{root}/_delta_log"):
                raise _refusal(f"{folder} is part of the Delta table {root}", "from_delta", root)
            metadata = f"{root}/metadata"
            if f"{folder}/".startswith(f"{root}/data/") and os.path.isdir(metadata):
                refuse_tables(store, root, [f"{metadata}/{each}" for each in os.listdir(metadata)])
    elif "=" in name:
        while above and "=" in above[-1]:
            above.pop()
        root = "/".join(above)
        if store.is_folder(f"{root}/_delta_log"):
            raise _refusal(f"{store.name(folder)} is part of a Delta table", "from_delta", store.name(root))


def _has_log(folder: str) -> bool:
    """Return True for a local folder with versions of a Delta table. An empty one is what a failed write leaves."""
    try:
        with os.scandir(folder) as entries:
            return any(_VERSION.match(entry.name) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def refusals(clean: Callable[[str], str], failure: Callable[[BaseException, str], MidepochError]) -> Iterator[None]:
    """Convert errors of a library that reads tables to those of this package. ``failure`` returns the error for one of
    the library, and its text without credentials, which ``clean`` removes.
    """
    try:
        yield
        return
    except MidepochError:
        raise
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":  # of lance
            raise
        converted = failure(problem, clean(str(problem)))
    raise converted from None  # outside of the handler: a chained error would be shown with its credentials


def expired(name: str) -> DataNotFoundError:
    """Return the error for a file of a snapshot that no longer exists."""
    return DataNotFoundError(
        f"{name} does not exist. A snapshot of a table needs it: a cleanup of the table (VACUUM, expire_snapshots) has "
        "removed it, or the table was not copied completely. Open a newer version, or restore the file."
    )
