"""Resolution of paths to files: a file, a list, a glob or a folder, in any store, in the same order on every host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as fs

from midepoch._internal.address import refuse_lost_slash
from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.addresses import resolve
from midepoch.sources.braces import spelled_out
from midepoch.sources.stores import Entry, Retry, Store

PathLike = str | os.PathLike[str]

FORMATS = ("arrow", "parquet", "orc", "csv", "jsonl", "tar")
_ALIASES = {"feather": "arrow", "ipc": "arrow", "json": "jsonl", "ndjson": "jsonl", "tsv": "csv"}
_ALIASES |= {"webdataset": "tar", "wds": "tar"}
_SUFFIXES = {
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
    ".orc": "orc",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".tar": "tar",
    ".tgz": "tar",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".tgz": "gzip"}
_MAGIC = {b"ARROW1": "arrow", b"PAR1": "parquet", b"ORC": "orc", b"\xff\xff\xff\xff": "arrow"}
_GLOB = re.compile(r"[*?\[]")
_FEW = 16
"""Number of paths up to which each is looked at, instead of the listing of their folder."""
_BUILDERS = {
    **dict.fromkeys((".txt", ".text"), "'text', data_files=…"),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"), "'imagefolder', data_dir=…"),
    **dict.fromkeys((".wav", ".flac", ".mp3", ".ogg"), "'audiofolder', data_dir=…"),
}
"""Files that are not tables: the arguments of ``load_dataset`` that read them."""


@dataclass(frozen=True)
class DataFiles:
    """Files in order, with their store and format."""

    store: Store
    format: str
    entries: tuple[Entry, ...]


def check_format(given: str | None) -> str | None:
    """Return the canonical name of a format. Raise ValueError for an unknown one."""
    if given is None:
        return None
    name = _ALIASES.get(str(given).lower(), str(given).lower())
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {given!r}")
    return name


def format_of(path: str) -> str | None:
    """Return the format that a file name indicates, or None."""
    stem, dot, suffix = path.lower().rpartition(".")
    if "." + suffix in COMPRESSIONS and "." + suffix not in _SUFFIXES:
        named = _SUFFIXES.get("." + stem.rpartition(".")[2])
        return named if named in ("csv", "jsonl", "tar") else None
    return _SUFFIXES.get(dot + suffix)


def find_files(
    paths: PathLike | Iterable[PathLike],
    *,
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    retry: Retry | None = None,
) -> DataFiles:
    """Return the files for ``paths``. Globs and folders are sorted; a list keeps its order."""
    given = paths_of(paths)
    wanted = check_format(format)
    store, entries = None, []
    for text in given:
        of, path = resolve(text, storage_options, filesystem, retry)
        if store is not None and of.identity != store.identity:
            raise ValueError(f"all files of a dataset must be in one store, {of.name(path)} is in another")
        if store is not None and of.secrets != store.secrets:
            raise ValueError(
                f"all files of a dataset must be opened with the same credentials, {of.name(path)} has others"
            )
        store = store or of
        entries += _expand(store, path, text, wanted)
    assert store is not None
    return DataFiles(store, wanted or _common_format(store, entries), tuple(entries))


def paths_of(paths: PathLike | Iterable[PathLike]) -> list[str]:
    """Return one or several paths as a list of strings."""
    if isinstance(paths, (str, os.PathLike)):
        return [check_path(paths)]
    package = type(paths).__module__.partition(".")[0]
    if isinstance(paths, (bytes, Mapping)) or package in _NO_PATHS or not isinstance(paths, Iterable):
        raise TypeError(_not_a_path(paths))
    listed = [check_path(path) for path in paths]
    if not listed:
        raise DataNotFoundError("no files given: the list of paths is empty.")
    return listed


_NO_PATHS = ("datasets", "midepoch", "pyarrow", "pandas", "polars", "torch")


def check_path(given: Any) -> str:
    """Return a path as a string. Raise TypeError for anything else."""
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(path, str):
        raise TypeError(_not_a_path(given))
    refuse_lost_slash(given)
    if path.startswith("pipe:"):
        raise ValueError(f"commands are not run, got {path[:60]!r}. Pass the address itself, for example s3://….")
    return path


def _not_a_path(given: Any) -> str:
    kind = f"{type(given).__module__}.{type(given).__name__}".removeprefix("builtins.")
    if kind.startswith("datasets."):
        return (
            f"paths of files are expected, got a {kind}. Call midepoch.load_dataset(name, split=…) with its source, "
            "or write it with save_to_disk(folder) and call midepoch.load_from_disk(folder)."
        )
    return f"paths of files are expected (a str, a pathlib.Path or a list of them), got {given!r:.60}. Pass its path."


def _expand(store: Store, path: str, given: str, wanted: str | None) -> list[Entry]:
    name = store.name(path)
    where = f" (looked in {os.getcwd()})" if store.local and "://" not in given else ""
    # In a store one listing finds a folder. Only a path with the name of a file is checked as a file first.
    named = store.local or format_of(path) is not None or path.startswith(("http://", "https://"))
    entry = _stat(store, path) if named else None
    if entry is not None:
        return [entry]
    if (spelled := spelled_out(path)) is not None:
        return _all_of(store, spelled, given, wanted)
    folder = _existing(store, path)
    if (glob := _GLOB.search(path, len(folder))) is not None:
        base = path[: glob.start()].rpartition("/")[0]
        matches = re.compile(re.escape(folder) + _translated(path[len(folder) :])).fullmatch
        found = [each for each in _below(store, base or "/") if matches(each.path) and _visible(each.path, base)]
        if not found:
            raise DataNotFoundError(f"no file matches {name!r}{where}. {_nearest(store, base)}")
        return sorted(found, key=lambda each: each.path)
    found = _below(store, path)
    if not found and not store.is_folder(path):
        entry = None if named else _stat(store, path)
        if entry is None:
            raise DataNotFoundError(f"{name!r} does not exist{where}. {_nearest(store, path)}")
        return [entry]
    visible = sorted(each for each in found if _visible(each.path, path))  # by path, which comes first
    formats = [format_of(each.path) for each in visible]
    typed = [each for each, kind in zip(visible, formats, strict=True) if kind is not None and wanted in (None, kind)]
    if not typed and wanted:
        typed = [each for each, kind in zip(visible, formats, strict=True) if kind is None]
    if not typed:
        others = ", ".join(sorted({os.path.splitext(each.path)[1] or each.path for each in visible})[:5])
        contents = f"it contains only {others}" if others else "it is empty"
        raise DataNotFoundError(
            f"no {wanted or 'Arrow, Parquet, ORC, CSV, JSON lines or tar'} files in {name}: {contents}."
            f"{_other_reader([each.path for each in visible]) or ' Check the path.'}"
        )
    return typed


def _all_of(store: Store, paths: list[str], given: str, wanted: str | None) -> list[Entry]:
    """Return the files of paths in order. Many of them are found by one listing of each folder."""
    listed: dict[str, Entry] = {}
    if len(paths) > _FEW and not _GLOB.search("".join(paths)) and not paths[0].startswith(("http://", "https://")):
        names = set(paths)
        for folder in dict.fromkeys(map(os.path.dirname, paths)):
            listed |= _in_folder(store, folder, names)
    if len(listed) == len(paths):
        return [listed[path] for path in paths]
    return [
        entry for path in paths for entry in ([listed[path]] if path in listed else _expand(store, path, given, wanted))
    ]


def _in_folder(store: Store, folder: str, wanted: set[str]) -> dict[str, Entry]:
    if not store.local:
        return {entry.path: entry for entry in store.list(folder) if entry.path in wanted}
    try:
        found = [entry for entry in os.scandir(folder) if entry.path in wanted and entry.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    stats = [(entry.path, entry.stat()) for entry in found]
    return {path: Entry(path, about.st_size, about.st_mtime_ns) for path, about in stats}


def _other_reader(paths: list[str]) -> str:
    """Return the call that reads such files, as the last sentence of a message. Empty for files of other kinds."""
    arguments = {_BUILDERS.get(os.path.splitext(path)[1].lower()) for path in paths} - {None}
    return f" Use midepoch.load_dataset({arguments.pop()}, split='train')." if len(arguments) == 1 else ""


def _nearest(store: Store, path: str) -> str:
    """Describe the nearest existing folder, for an error message."""
    if not store.local:
        if isinstance(store.given, fs.PyFileSystem):
            return "Check the address, and that the credentials may read it."
        return "Check the bucket and the key, and that the credentials may list them."
    folder = path
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    held = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"The folder {folder} exists and contains {held or 'nothing'}."


def _existing(store: Store, path: str) -> str:
    """Return the existing folders at the beginning of a path whose names look like globs: ``runs/run[1]``."""
    parts = path.split("/")
    signs = "*?[" if store.local else "["  # in other stores each check costs a request, and few keys contain stars
    for i in reversed(range(len(parts))):
        folder = "/".join(parts[: i + 1])
        if any(sign in parts[i] for sign in signs) and store.is_folder(folder):
            return folder
    return ""


def _stat(store: Store, path: str) -> Entry | None:
    if not store.local:
        globs = _GLOB.search(path) is not None and "[" not in path  # a key may contain a bracket
        return None if path.endswith("/") or globs else store.stat(path)
    if not os.path.isfile(path):
        return None
    stat = os.stat(path)
    return Entry(path, stat.st_size, stat.st_mtime_ns)


def _below(store: Store, folder: str) -> list[Entry]:
    return _walk(folder) if store.local else store.list(folder.rstrip("/"))


def _walk(folder: str) -> list[Entry]:
    """Return all files below a local folder, including linked folders, each folder once."""
    seen, found, todo = set(), [], [folder]
    links: list[str] = []
    while todo or links:
        # Folders before links to them, and links by name: the path of a file is the same on every host.
        here = todo.pop() if todo else links.pop(links.index(min(links)))
        try:
            stat = os.stat(here)
            entries = list(os.scandir(here))
        except (FileNotFoundError, NotADirectoryError):
            continue
        if (stat.st_dev, stat.st_ino) in seen:
            continue  # a link to a parent, or to a folder already visited
        seen.add((stat.st_dev, stat.st_ino))
        for entry in entries:
            if entry.is_dir():
                (links if entry.is_symlink() else todo).append(entry.path)
            elif entry.is_file():
                about = entry.stat()
                found.append(Entry(entry.path, about.st_size, about.st_mtime_ns))
    return found


def _visible(path: str, root: str) -> bool:
    """Return False for hidden files, markers (``_SUCCESS``, ``.crc``) and files in hidden folders.

    A folder like ``_year=2024`` is a partition, not hidden.
    """
    inner = path[len(root) :].strip("/")
    if inner.endswith(".crc"):
        return False
    if not inner.startswith((".", "_")) and "/." not in inner and "/_" not in inner:
        return True
    *folders, name = inner.split("/")
    return not name.startswith((".", "_")) and not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part) for part in folders
    )


def _translated(pattern: str) -> str:
    """Return a glob as a regular expression: ``**`` crosses folders, ``*`` and ``?`` do not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        wildcards.get(part)
        or (part.replace("[!", "[^") if part.startswith("[") and part.endswith("]") else re.escape(part))
        for part in parts
    )


def _common_format(store: Store, entries: list[Entry]) -> str:
    named: dict[str, str] = {}
    for path in {entry.path.rpartition(".")[2]: entry.path for entry in reversed(entries)}.values():
        kind = format_of(path)  # of one file for each suffix
        if kind is not None:
            named.setdefault(kind, path)
    if len(named) > 1:
        listed = ", ".join(f"{kind} ({store.name(path)})" for kind, path in named.items())
        raise FormatError(f"the files have different formats: {listed}. Choose one with format=….")
    if named:
        return next(iter(named))
    return _sniffed(store, entries[0])


def _sniffed(store: Store, entry: Entry) -> str:
    """Return the format that the first bytes indicate, for a file whose name does not."""

    def head() -> bytes:
        with store.open(entry) as file:
            return file.read_at(8, 0)

    start = store.persist(entry.path, "read", head) if entry.size else b""
    for magic, kind in _MAGIC.items():
        if start.startswith(magic):
            return kind
    raise FormatError(
        f"{store.name(entry.path)}: neither its name nor its first bytes ({start!r}) show its format. "
        f"Pass format=…: {', '.join(map(repr, FORMATS))}.{_other_reader([entry.path])}"
    )
