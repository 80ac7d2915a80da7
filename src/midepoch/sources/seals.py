"""Seals: the listing of a request's files when it was last opened.

Choosing among the files of a folder takes longer than listing them. If nothing that the choice depends on has changed
since, the choice is the same, and the index of the last opening is used without choosing again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midepoch._internal.version import __version__
from midepoch.sources.files import DataFiles
from midepoch.sources.index import Index, read_index
from midepoch.sources.lake import Request, warn_of_damage
from midepoch.sources.listing import GLOB, existing, spelled_out, walked
from midepoch.sources.manifests import NAME
from midepoch.sources.table_folders import refuse_part
from midepoch.storage.cache_files import atomic_write
from midepoch.storage.stores import Store

_UNLISTABLE = (OSError, OverflowError, ValueError)
"""Errors of a look at what only the choice of files has to deal with: unreadable folders, odd names and times."""


class Seal:
    """The listing of the last opening, and the index that was opened. Only local files have one.

    A seal without a listing means that comparing listings is useless: either choosing the files logs a warning, which
    every opening repeats, or a manifest names the files and is read instead of a listing.
    """

    def __init__(self, request: Request, index_dir: Path | None) -> None:
        self._path = request.index_path(index_dir).with_suffix(".midepoch-seal")
        self._request = request
        self._previous: dict[str, Any] | None = None
        self._listing: tuple[Look, str] | None = None
        """The files and their digest. None if they were not listed, or cannot be."""

    def opened(self, *, force: bool) -> Index | None:
        """Return the index of the last opening if nothing has changed since, else None.

        The listing is stored for ``keep``. ``force``: return None in any case.
        """
        if not self._request.store.local:
            return None
        previous = self._previous = _read(self._path)
        if previous is not None and previous["listing"] is None and not force:
            return None
        # List before files are chosen: if one changes in between, the next listing differs.
        look = look_at(self._request.store, self._request.paths, self._path.parent)
        with suppress(*_UNLISTABLE):
            self._listing = None if look is None else (look, look.digest)
        if force or previous is None or self._listing is None or previous["listing"] != self._listing[1]:
            return None
        index = read_index(self._path.with_name(previous["index"]))
        if index is None or index.checksum != previous["checksum"]:
            return None
        warn_of_damage(self._request.store, index)
        return index

    def keep(self, index: Index) -> None:
        """Save the listing of ``opened`` with the index of the files that were found."""
        found = self._request.found
        if not self._request.store.local or index.path is None:
            return
        if found.warned or found.listed:
            listing = None
        elif self._previous is not None and self._previous["listing"] is None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # a listing is useful from now on
            return
        elif self._listing is not None and self._listing[0].contains(found):
            listing = self._listing[1]
        else:
            return
        name = os.path.basename(index.path)
        seal = {"version": __version__, "listing": listing, "index": name, "checksum": index.checksum}
        with suppress(OSError):
            if seal != self._previous:
                atomic_write(self._path, json.dumps(seal).encode())


@dataclass
class Look:
    """Everything on which the choice of files depends, in the order in which it was listed.

    ``folders``: those that were listed, with the times at which files were added or removed. The files include
    manifests beside those that were given by name.
    """

    folders: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def add(self, paths: list[str], sizes: list[int], times: list[int]) -> None:
        self.paths += paths
        self.sizes += sizes
        self.times += times

    @property
    def digest(self) -> str:
        """Digest of all fields. Raise OverflowError for a time that does not fit in 64 bits."""
        digest = hashlib.blake2b(digest_size=16)
        for texts in (self.folders, self.paths):
            digest.update("\0".join([str(len(texts)), *texts]).encode("utf-8", "surrogateescape"))
        digest.update(array("q", self.sizes))
        digest.update(array("q", self.times))
        return digest.hexdigest()

    def contains(self, found: DataFiles) -> bool:
        """Return True if all these files were listed and have not changed since."""
        entries = found.entries if found.listing is None else found.listing.files
        return {entry[:3] for entry in entries} <= set(zip(self.paths, self.sizes, self.times, strict=True))


def look_at(store: Store, paths: Sequence[str], index_dir: Path) -> Look | None:
    """Return local files, those below folders and globs or given by name, and everything that decides how to read them.

    Return None if a seal is of no use: a path does not exist or cannot be listed, a folder has a manifest, or a folder
    contains the folder of the index, which changes with every index. Raise FormatError for a part of a table.
    """
    look = Look()
    folders: dict[str, None] = {}  # each once, in order
    manifests: dict[str, None] = {}
    try:
        for path in [each for given in paths for each in _without_braces(store, given)]:
            folder = _folder(store, path, look)
            if folder is None:
                manifests[os.path.join(os.path.dirname(path), NAME)] = None  # it may say what the file contains
            else:
                folders[folder] = None
        for manifest in filter(os.path.exists, manifests):
            _folder(store, manifest, look)
        for folder in folders:
            if os.path.exists(os.path.join(folder, NAME)) or _is_below(index_dir, folder):
                return None
            refuse_part(store, folder)
            look.add(*walked(folder, look.folders))
    except _UNLISTABLE:
        return None
    return look


def _without_braces(store: Store, given: str) -> list[str]:
    """Return the paths that the braces in a path expand to. A file or a folder may have braces in its name."""
    literal = "{" not in given or os.path.isfile(given)
    return [given] if literal else spelled_out(given, existing(store, given)) or [given]


def _folder(store: Store, path: str, look: Look) -> str | None:
    """Return the folder to list for a path. None for a file, which is added to ``look``."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        start = existing(store, path)
        glob = GLOB.search(path, len(start))
        if glob is None:
            raise
        return path[: glob.start()].rpartition("/")[0] or "/"
    if stat.S_ISDIR(found.st_mode):
        return path
    look.add([path], [found.st_size], [found.st_mtime_ns])
    return None


def _is_below(folder: Path, other: str) -> bool:
    inner, outer = os.path.realpath(folder), os.path.realpath(other)
    return os.path.commonpath([inner, outer]) == outer


def _read(path: Path) -> dict[str, Any] | None:
    try:
        seal = json.loads(path.read_bytes())
        # Another version may choose other files.
        is_known = seal["version"] == __version__ and bool(path.with_name(seal["index"]))
        return seal if is_known and seal.keys() >= {"listing", "checksum"} else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
