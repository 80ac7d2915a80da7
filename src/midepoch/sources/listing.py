"""Lookups of files in local folders and in stores, their visible files, and folders whose files must not be read one by
one: tables with logs, Zarr stores, TensorFlow datasets.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow.fs as fs

from midepoch._internal import hints
from midepoch.errors import FormatError
from midepoch.sources.names import GLOB
from midepoch.storage.address import advice_on
from midepoch.storage.stores import Entry, Store

_MOST_NAMES = 1000
"""Names of a folder among which the nearest is searched."""


def nearest(store: Store, path: str) -> str:
    """Describe the nearest existing folder, for an error message."""
    if not store.local:
        if store.scheme == "hf://" and path.startswith("buckets/"):
            return "Buckets are read by huggingface_hub. Update that package, and check the address and the token."
        if store.scheme == "hf://" and not path.startswith("datasets/"):  # the address of a model
            return "For a dataset, write hf://datasets/ORG/NAME/PATH. Otherwise check the address, and the token."
        if not isinstance(store.given, fs.FileSystem) or isinstance(store.given, fs.PyFileSystem):
            return "Check the address, and that the credentials may read it."
        return "Check the bucket and the key, and that the credentials may list them."
    folder = path
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    held = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    wanted = os.path.relpath(path, folder).split(os.sep)[0]
    meant = "" if GLOB.search(wanted) else hints.nearest(wanted, names[:_MOST_NAMES], "'{}'")
    hint = f" {advice_on(os.path.relpath(path))}".rstrip()
    if folder == os.getcwd() and re.fullmatch(r"[\w.-]+/[\w-]+", os.path.relpath(path)):
        hint = " For a dataset of the Hugging Face Hub, use midepoch.load_dataset(name, split=…)."
    return f"The folder {folder} exists and contains {held or 'nothing'}.{' ' * bool(meant)}{meant}{hint}"


_PARALLEL = 16


def file_at(store: Store, path: str) -> Entry | None:
    """Return the entry of a file, or None if the path is not a file."""
    if not store.local:
        globs = GLOB.search(path) is not None and "[" not in path  # a key may contain a bracket
        return None if path.endswith("/") or globs else store.stat(path)
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return Entry(path, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def files_at(store: Store, paths: Sequence[str], *, one_by_one: bool = False) -> dict[str, Entry]:
    """Return those of the files that exist. In a store, each of their folders is listed once, or with ``one_by_one``,
    each file is requested, several at a time.
    """
    look_up = partial(file_at, store)
    if store.local:
        return {path: entry for path in paths if (entry := look_up(path)) is not None}
    if one_by_one or any(map(is_web, paths[:1])):
        with ThreadPoolExecutor(_PARALLEL) as pool:
            entries = zip(paths, pool.map(look_up, paths), strict=True)
            return {path: entry for path, entry in entries if entry is not None}
    wanted, listed = set(paths), ""
    found: dict[str, Entry] = {}
    for folder in sorted(set(map(os.path.dirname, paths))):
        if not listed or not folder.startswith(f"{listed}/"):  # a listing includes the folders inside
            found |= {entry.path: entry for entry in store.list(folder) if entry.path in wanted}
            listed = folder
    return found


def is_web(path: str) -> bool:
    """Return True for a file of a web server, which has no listing."""
    return path.startswith(("http://", "https://"))


def existing_folder(store: Store, path: str) -> str:
    """Return the existing folders at the beginning of a path whose names look like patterns: ``runs/run[1]``."""
    parts = path.split("/")
    signs = "*?[{" if store.local else "["  # elsewhere each check costs a request, and few keys contain others
    for i in reversed(range(len(parts))):
        folder = "/".join(parts[: i + 1])
        if any(sign in parts[i] for sign in signs) and store.is_folder(folder):
            return folder
    return ""


def files_below(store: Store, folder: str) -> list[Entry]:
    """Return all files below a folder, at any depth. Local links are followed, and each folder counts once."""
    if not store.local:
        return store.list(folder.rstrip("/"))
    seen: set[tuple[int, int]] = set()
    files: list[Entry] = []
    todo = [folder]
    links: list[str] = []
    while todo or links:
        # Folders before links to them, and links by name: the path of a file is the same on every host.
        here = todo.pop() if todo else links.pop(links.index(min(links)))
        try:
            folder_fd = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            opened = os.stat(folder_fd)
            if (opened.st_dev, opened.st_ino) in seen:
                continue  # a link to a parent, or to a folder already visited
            seen.add((opened.st_dev, opened.st_ino))
            start = os.path.join(here, "")
            for entry in os.scandir(folder_fd):  # by names, not paths: 8 % faster
                try:
                    found = entry.stat() if entry.is_file() else None
                except OSError as problem:
                    if problem.errno in (errno.ENOENT, errno.ELOOP):
                        continue  # removed in the meantime, or a link to itself
                    raise
                if found is not None:
                    # Not Entry(…), which takes a third of a microsecond: there may be a million files.
                    files.append(tuple.__new__(Entry, (start + entry.name, found.st_size, found.st_mtime_ns, "")))
                elif entry.is_dir():
                    (links if entry.is_symlink() else todo).append(start + entry.name)
        finally:
            os.close(folder_fd)
    return files


_OWN = re.compile(r"/(?:step_\d+/(?:[0-9a-f]+/)?(?=manifest)|[0-9a-f]{32}/(?=complete))(manifest|complete)\.json$")
"""Files that only folders of checkpoints and of ``cache()`` have."""


def all_visible(found: list[Entry], root: str) -> list[Entry]:
    """Return the files that are not hidden, not markers (``_SUCCESS``, ``.crc``), not in hidden folders, and not in
    checkpoints or caches of midepoch.

    Usually these are all files, and one search confirms it.
    """
    start = len(root)
    names = "\n".join(["/" + entry[0][start:] for entry in found]) + "\n"
    if "/manifest.json\n" in names or "/complete.json\n" in names:
        own = tuple(entry[0][: match.start(1)] for entry in found if (match := _OWN.search(entry[0], start)))
        found = [entry for entry in found if not entry[0].startswith(own)]
    if not any(sign in names for sign in ("/.", "/_", ".crc\n")):
        return found
    return [entry for entry in found if _is_visible(entry.path[start:])]


def _is_visible(path: str) -> bool:
    """Return False for a hidden file or marker. A folder like ``_year=2024`` is a partition, not hidden."""
    *folders, name = path.strip("/").split("/")
    return not (name.startswith((".", "_")) or name.endswith(".crc")) and not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part) for part in folders
    )


def beginning(store: Store, entry: Entry, size: int | None = None) -> bytes:
    """Return the first bytes of a file, or all of them."""

    def read() -> bytes:
        with store.open(entry) as file:
            return file.read_at(file.size if size is None else min(size, file.size), 0)

    return store.persist(entry.path, "read", read)


_SHARDS = re.compile(r"(.*?)/[^/]+\.(?:tfrecord|array_record)-\d{5}-of-\d{5}")
_METADATA = re.compile(r"(.*?)/metadata/(?:v\d+|\d+-[0-9a-fA-F-]{36})(?:\.gz)?\.metadata\.json(?:\.gz)?")
_MARKS = (
    (("/_delta_log/",), re.compile(r"(.*?)/_delta_log/\d{20}\..*"), "a Delta table", "from_delta"),
    ((".manifest",), re.compile(r"(.*?)/_versions/\d+\.manifest"), "a Lance table", "from_lance"),
    ((".metadata.json",), _METADATA, "an Iceberg table", "from_iceberg"),
    (
        ("/zarr.json", "/.zarray", "/.zgroup"),
        re.compile(r"(.*?)/(?:zarr\.json|\.zarray|\.zgroup)"),
        "a Zarr store",
        "Open its arrays with zarr, and pass them to midepoch.from_map_style",
    ),
    (
        ("/.hoodie/",),
        re.compile(r"(.*?)/\.hoodie/hoodie\.properties"),
        "a Hudi table",
        "Write a snapshot of it as Parquet files",
    ),
    (
        (".tfrecord-", ".array_record-"),
        _SHARDS,
        "a TensorFlow dataset",
        "Open it with tfds.data_source, and pass that to midepoch.from_map_style",
    ),
)
"""Folders whose files (JSON, Parquet) must not be read one by one: texts of which one is in the paths of its files, the
files that show its root, what it is, and the function that opens it or another remedy.
"""
_VERSION = re.compile(r"\d{20}\.")


def refuse_tables(store: Store, folder: str, paths: Sequence[str], chosen: Sequence[str] | None = None) -> None:
    """Raise FormatError if a folder is a table or contains one: its files may hold deleted rows. So do Hudi tables; the
    JSON files of Zarr stores and TensorFlow datasets only describe the data.

    ``chosen``: the paths that match a glob. Other formats are refused only if some of these are in their folders.
    """
    names = "\n".join(paths)
    for signs, pattern, noun, remedy in _MARKS:
        if not any(sign in names for sign in signs):
            continue
        marks = [(match[1], path) for path in paths if (match := pattern.fullmatch(path)) is not None]
        is_table = remedy.startswith("from_")
        roots = {root for root, _ in marks}
        if pattern is _SHARDS:  # without such files, nothing would be read
            roots &= {path.rpartition("/")[0] for path in paths if path.endswith(".json")}
        if chosen is not None and not is_table:
            roots &= {path[: slash.start()] for path in chosen for slash in re.finditer("/", path)}
        if not roots:
            continue
        root = min(roots)
        what = f"{store.name(folder)} {'is' if root == folder.rstrip('/') else f'contains {store.name(root)},'} {noun}"
        if is_table:
            newest = max(path for each, path in marks if each == root)
            raise _refusal(what, remedy, store.name(newest if pattern is _METADATA else root))
        raise FormatError(
            f"{what}, which cannot be read in place. {remedy}, or list the files one by one to read them as they are."
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
        for i in range(len(above), 1, -1):
            root = "/".join(above[:i])
            log, metadata = f"{root}/_delta_log", f"{root}/metadata"
            if os.path.isdir(log) and any(map(_VERSION.match, os.listdir(log))):  # a failed write leaves an empty one
                raise _refusal(f"{folder} is part of the Delta table {root}", "from_delta", root)
            if f"{folder}/".startswith(f"{root}/data/") and os.path.isdir(metadata):
                refuse_tables(store, root, [f"{metadata}/{each}" for each in os.listdir(metadata)])
    elif "=" in name:
        while above and "=" in above[-1]:
            above.pop()
        root = "/".join(above)
        if store.is_folder(f"{root}/_delta_log"):
            raise _refusal(f"{store.name(folder)} is part of a Delta table", "from_delta", store.name(root))
