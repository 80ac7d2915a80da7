"""Seals: how the files of a request looked when it was last opened.

Choosing among the files of a folder takes longer than listing them. If everything on which the choice depends looks as
it did then, the choice is the same, and the index of the last opening is opened without it.
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
from midepoch.sources.braces import spelled_out
from midepoch.sources.files import DataFiles
from midepoch.sources.index import Index, read_index
from midepoch.sources.lake import Request, warn_of_broken_lines
from midepoch.sources.listing import GLOB, existing, walked
from midepoch.sources.manifests import NAME
from midepoch.sources.storage import atomic_write
from midepoch.sources.stores import Store
from midepoch.sources.table_folders import refuse_part

_DIFFICULT = (OSError, OverflowError, ValueError)
"""Errors of a look at what only the choice of files has to deal with: unreadable folders, odd names and times."""


class Seal:
    """The listing of the last opening, and the index that was opened. Only of local files.

    A seal without a listing says that looking is useless: choosing the files logs a warning, which every opening
    repeats, or they are named by a manifest, which is read instead of a listing.
    """

    def __init__(self, request: Request, index_dir: Path | None) -> None:
        self._path = request.index_path(index_dir).with_suffix(".midepoch-seal")
        self._request = request
        self._known: dict[str, Any] | None = None
        self._listing: tuple[Look, str] | None = None
        """The files and their digest. None if they were not looked at, or cannot be."""

    def opened(self, *, force: bool) -> Index | None:
        """Return the index of the last opening if everything looks as it did then, else None.

        The look is kept for ``keep``. ``force``: return None in any case.
        """
        if not self._request.store.local:
            return None
        known = self._known = _read(self._path)
        if known is not None and known["listing"] is None and not force:
            return None
        # Before files are chosen: if one changes in between, the listing differs next time.
        look = look_at(self._request.store, self._request.paths, self._path.parent)
        with suppress(*_DIFFICULT):
            self._listing = None if look is None else (look, look.digest)
        if force or known is None or self._listing is None or known["listing"] != self._listing[1]:
            return None
        index = read_index(self._path.with_name(known["index"]))
        if index is None or index.checksum != known["checksum"]:
            return None
        warn_of_broken_lines(self._request.store, index)
        return index

    def keep(self, index: Index) -> None:
        """Remember the look of ``opened`` for the index of the files that were found."""
        found = self._request.found
        if not self._request.store.local or index.path is None:
            return
        if found.warned or found.listed:
            listing = None
        elif self._known is not None and self._known["listing"] is None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # looking is useful from now on
            return
        elif self._listing is not None and self._listing[0].contains(found):
            listing = self._listing[1]
        else:
            return
        name = os.path.basename(index.path)
        seal = {"version": __version__, "listing": listing, "index": name, "checksum": index.checksum}
        with suppress(OSError):
            if seal != self._known:
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
        """Digest of all of these. Raise OverflowError for a time after the year 2262."""
        digest = hashlib.blake2b(digest_size=16)
        for texts in (self.folders, self.paths):
            digest.update("\0".join([str(len(texts)), *texts]).encode("utf-8", "surrogateescape"))
        digest.update(array("q", self.sizes))
        digest.update(array("q", self.times))
        return digest.hexdigest()

    def contains(self, found: DataFiles) -> bool:
        """Return True if all these files were looked at, and have not changed since."""
        entries = found.entries if found.listing is None else found.listing.files
        return {entry[:3] for entry in entries} <= set(zip(self.paths, self.sizes, self.times, strict=True))


def look_at(store: Store, paths: Sequence[str], index_dir: Path) -> Look | None:
    """Return the files below local folders and globs, those that are named, and what decides how they are read.

    None if a seal is of no use: a path that does not exist or cannot be listed, a folder with a manifest, or one that
    contains the folder of the index, which changes with every index. Raise FormatError for a part of a table.
    """
    look = Look()
    folders: dict[str, None] = {}  # each once, in order
    manifests: dict[str, None] = {}
    try:
        for path in [each for given in paths for each in _each(given)]:
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
    except _DIFFICULT:
        return None
    return look


def _each(given: str) -> list[str]:
    """Return the paths for which braces stand. A file may have braces in its name."""
    return [given] if "{" not in given or os.path.isfile(given) else spelled_out(given) or [given]


def _folder(store: Store, path: str, look: Look) -> str | None:
    """Return the folder to list for a path. None for a file, which is added to the look."""
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
