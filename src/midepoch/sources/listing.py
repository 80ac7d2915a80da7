"""Lookups of files in local folders and in stores, their visible files, and braces in paths, as in a shell."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product, repeat

import pyarrow.fs as fs

from midepoch._internal.version import __version__
from midepoch.sources.table_folders import refuse_part
from midepoch.storage.stores import Entry, Store

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?")
_MOST = 10_000_000


def spelled_out(path: str, folder: str = "") -> list[str] | None:
    """Return all paths that the braces stand for, in order. None if there are none: ``{x}`` is an ordinary name.

    ``folder``: the beginning of the path, in which braces are part of the names.
    """
    pieces = [[folder], *_pieces(path[len(folder) :])]
    count = 1
    for alternatives in pieces:
        count *= len(alternatives)
    if count > _MOST:
        raise ValueError(f"{path!r} expands to {count:,} paths. Check the numbers in its braces.")
    paths = list(map("".join, product(*pieces)))
    return None if paths == [path] else paths


def _pieces(path: str) -> list[list[str]]:
    """Return the alternatives for each part of a path, in order."""
    pieces: list[list[str]] = []
    at = 0
    while at < len(path):
        start = path.find("{", at)
        stop = _closing(path, start) if start >= 0 else -1
        if stop < 0:
            end = len(path) if start < 0 else start + 1
            pieces.append([path[at:end]])
            at = end
            continue
        if start > at:
            pieces.append([path[at:start]])
        pieces.append(_alternatives(path[start + 1 : stop]))
        at = stop + 1
    return pieces


def _closing(path: str, start: int) -> int:
    """Return the position of the brace that closes the one at ``start``, or -1."""
    depth = 0
    for position in range(start, len(path)):
        depth += {"{": 1, "}": -1}.get(path[position], 0)
        if not depth:
            return position
    return -1


def _alternatives(inner: str) -> list[str]:
    if match := _RANGE.fullmatch(inner):
        first, last, step = match[1], match[2], int(match[3] or 1)
        is_padded = any(re.match(r"-?0\d", number) for number in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        return [f"{number:0{width}d}" for number in _numbers(int(first), int(last), step)]
    if match := _LETTERS.fullmatch(inner):
        return [chr(number) for number in _numbers(ord(match[1]), ord(match[2]), int(match[3] or 1))]
    parts = _parts(inner)
    if len(parts) == 1:  # no list: the braces are part of the name, but there may be others inside
        return [f"{{{each}}}" for each in _all(inner)]
    return [each for part in parts for each in _all(part)]


def _numbers(first: int, last: int, step: int) -> range:
    step = max(1, abs(step))
    if abs(last - first) // step >= _MOST:
        raise ValueError(f"{{{first}..{last}}} expands to {abs(last - first) + 1:,} numbers. Check the path.")
    return range(first, last + 1, step) if first <= last else range(first, last - 1, -step)


def _all(text: str) -> list[str]:
    return list(map("".join, product(*_pieces(text))))


def _parts(inner: str) -> list[str]:
    """Return the parts between the commas outside of inner braces."""
    parts, depth = [""], 0
    for sign in inner:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


GLOB = re.compile(r"[*?\[]")


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
    return f"The folder {folder} exists and contains {held or 'nothing'}."


class Lookups:
    """Lookups of files and folders in a store. Those of a local disk are recorded.

    The choice of files depends on nothing else. Choosing takes longer than looking up: if the same lookups find the
    same, an index of the last choice is used without choosing again.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.folders: list[str] = []
        """The folders that were walked."""
        self._made: list[str] = []
        self._found = [__version__]  # another version may choose other files

    @property
    def digest(self) -> str:
        """Digest of everything that was found."""
        text = "\0".join(self._found)
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    @property
    def made(self) -> str:
        """The kinds and paths of all lookups, joined."""
        return "\0".join(self._made)

    def repeat(self, made: str) -> str:
        """Make the same lookups as another time, and return the digest of what is found."""
        kinds = {"stat": self.stat, "is_folder": self.is_folder, "walked": self._walked, "part": self.refuse_part}
        parts = iter(made.split("\0"))
        for kind in parts:
            kinds[kind](next(parts))
        return self.digest

    def _record(self, kind: str, path: str, *found: str) -> None:
        if self.store.local:
            self._made += (kind, path)
            self._found += (kind, path, *found)

    def stat(self, path: str) -> Entry | None:
        """Return the entry of a file, or None if the path is not a file."""
        if self.store.local:
            entry = _local_entry(path)
            self._record("stat", path, str(entry and entry[1:]))
            return entry
        globs = GLOB.search(path) is not None and "[" not in path  # a key may contain a bracket
        return None if path.endswith("/") or globs else self.store.stat(path)

    def stat_all(self, paths: Sequence[str]) -> dict[str, Entry]:
        """Return those of the files that exist."""
        if self.store.local:
            return {path: entry for path in paths if (entry := self.stat(path)) is not None}
        return stat_all(self.store, paths)

    def is_folder(self, path: str) -> bool:
        found = self.store.is_folder(path)
        self._record("is_folder", path, str(found))
        return found

    def below(self, folder: str) -> list[Entry]:
        """Return all files below a folder, at any depth."""
        if not self.store.local:
            return self.store.list(folder.rstrip("/"))
        # For 10,000 entries, this is 10 ms faster than one call for each.
        return list(map(Entry._make, zip(*self._walked(folder), repeat(""), strict=False)))

    def _walked(self, folder: str) -> tuple[list[str], list[int], list[int]]:
        folders: list[str] = []
        self.folders.append(folder)
        paths, sizes, times = walked(folder, folders)
        self._record("walked", folder, *folders, str(len(paths)), *paths, str(sizes), str(times))
        return paths, sizes, times

    def refuse_part(self, folder: str) -> None:
        """Raise FormatError for a folder inside of a table."""
        refuse_part(self.store, folder)
        self._record("part", folder)

    def existing(self, path: str) -> str:
        """Return the existing folders at the beginning of a path whose names look like patterns: ``runs/run[1]``."""
        parts = path.split("/")
        signs = "*?[{" if self.store.local else "["  # elsewhere each check costs a request, and few keys contain others
        for i in reversed(range(len(parts))):
            folder = "/".join(parts[: i + 1])
            if any(sign in parts[i] for sign in signs) and self.is_folder(folder):
                return folder
        return ""


_PARALLEL = 16


def stat_all(store: Store, paths: Sequence[str]) -> dict[str, Entry]:
    """Return those of the files that exist. In a store, each of their folders is listed once."""
    if store.local:
        return {path: entry for path in paths if (entry := _local_entry(path)) is not None}
    if any(path.startswith(("http://", "https://")) for path in paths[:1]):  # a web server has no listing
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return {entry.path: entry for entry in pool.map(store.stat, paths) if entry is not None}
    wanted, listed = set(paths), ""
    found: dict[str, Entry] = {}
    for folder in sorted(set(map(os.path.dirname, paths))):
        if not listed or not folder.startswith(f"{listed}/"):  # a listing includes the folders inside
            found |= {entry.path: entry for entry in store.list(folder) if entry.path in wanted}
            listed = folder
    return found


def _local_entry(path: str) -> Entry | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return Entry(path, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def walked(folder: str, visited: list[str]) -> tuple[list[str], list[int], list[int]]:
    """Return the paths, sizes and times of files below a local folder. Links are followed. Each folder counts once.

    The folders are added to ``visited``, with the times of their last changes.
    """
    seen: set[tuple[int, int]] = set()
    paths: list[str] = []
    sizes: list[int] = []
    times: list[int] = []
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
            visited.append(f"{here} {opened.st_mtime_ns}")
            start = os.path.join(here, "")
            for entry in os.scandir(folder_fd):  # by names, not paths: 8 % faster
                try:
                    found = entry.stat() if entry.is_file() else None
                except OSError as problem:
                    if problem.errno in (errno.ENOENT, errno.ELOOP):
                        continue  # removed in the meantime, or a link to itself
                    raise
                if found is not None:
                    paths.append(start + entry.name)
                    sizes.append(found.st_size)
                    times.append(found.st_mtime_ns)
                elif entry.is_dir():
                    (links if entry.is_symlink() else todo).append(start + entry.name)
        finally:
            os.close(folder_fd)
    return paths, sizes, times


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


def translated(pattern: str) -> str:
    """Return a glob as a regular expression: ``**`` crosses folders, ``*`` and ``?`` do not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        wildcards.get(part)
        or (part.replace("[!", "[^") if part.startswith("[") and part.endswith("]") else re.escape(part))
        for part in parts
    )
