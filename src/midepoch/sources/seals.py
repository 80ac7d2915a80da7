"""Seals: how the files of a request looked when it was last opened.

Choosing among the files of a folder takes longer than listing them. The choice follows from the listing, so that it is
made once for each listing: if all files look as they did then, the same index is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from midepoch._internal.version import __version__
from midepoch.sources.braces import spelled_out
from midepoch.sources.files import DataFiles
from midepoch.sources.index import Index, read_index
from midepoch.sources.lake import Request, warn_of_broken_lines
from midepoch.sources.listing import GLOB, walked
from midepoch.sources.storage import atomic_write


class Seal:
    """The listing of the last opening, and the index that was opened. Only of local files.

    Paths whose choice has to be made every time have a seal without a listing: those that cause a warning, and
    manifests, whose files are not listed.
    """

    def __init__(self, request: Request, index_dir: Path | None) -> None:
        self._path = request.index_path(index_dir).with_suffix(".midepoch-seal")
        self._request = request
        self._known: dict[str, Any] | None = None
        self._look: Look | None = None
        self._looked = False

    def opened(self, *, force: bool) -> Index | None:
        """Return the index of the last opening if all files look as they did then. ``force``: only look at them."""
        if not self._request.store.local:
            return None
        known = self._known = _read(self._path)
        if known is not None and known["listing"] is None and not force:
            return None
        # Before files are chosen: if one changes in between, the listing differs next time.
        self._look, self._looked = look_at(self._request.paths, os.path.abspath(self._path.parent)), True
        if force or known is None or self._look is None or known["listing"] != self._look.digest:
            return None
        index = read_index(self._path.with_name(known["index"]))
        if index is None or index.checksum != known["checksum"]:
            return None
        warn_of_broken_lines(self._request.store, index)
        return index

    def keep(self, index: Index) -> None:
        """Remember the listing for the index of the files that were found."""
        if not self._request.store.local or index.path is None:
            return
        found, look = self._request.found, self._look
        can_be_sealed = not (found.warned or found.listed)
        with suppress(OSError):
            if can_be_sealed and not self._looked:
                self._path.unlink(missing_ok=True)  # a listing can be kept from now on
            elif look is not None:
                listing = look.digest if can_be_sealed and look.contains(found) else None
                name = os.path.basename(index.path)
                seal = {"version": __version__, "listing": listing, "index": name, "checksum": index.checksum}
                if seal != self._known:
                    atomic_write(self._path, json.dumps(seal).encode())


@dataclass(frozen=True)
class Look:
    """The files that paths can mean, in the order in which they were listed."""

    paths: list[str]
    sizes: list[int]
    times: list[int]

    def add(self, paths: list[str], sizes: list[int], times: list[int]) -> None:
        self.paths.extend(paths)
        self.sizes.extend(sizes)
        self.times.extend(times)

    def without(self, folder: str) -> Look:
        """Return the files that are not in a folder."""
        kept = [i for i, path in enumerate(self.paths) if not path.startswith(f"{folder}/")]
        return Look([self.paths[i] for i in kept], [self.sizes[i] for i in kept], [self.times[i] for i in kept])

    @cached_property
    def digest(self) -> str:
        digest = hashlib.blake2b("\0".join(self.paths).encode("utf-8", "surrogateescape"), digest_size=16)
        digest.update(array("q", self.sizes))
        digest.update(array("q", self.times))
        return digest.hexdigest()

    def contains(self, found: DataFiles) -> bool:
        """Return True if all these files were looked at, and have not changed since."""
        entries = found.entries if found.listing is None else found.listing.files
        return {entry[:3] for entry in entries} <= set(zip(self.paths, self.sizes, self.times, strict=True))


def look_at(paths: Sequence[str], index_dir: str = "") -> Look | None:
    """Return the files below local folders and globs, and those that are named. None if a path does not exist.

    The folder of the index may be among them. It changes with every index.
    """
    files, folders = Look([], [], []), set[str]()
    for path in [each for given in paths for each in (spelled_out(given) if "{" in given else None) or [given]]:
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            glob = GLOB.search(path)
            if glob is None:
                return None
            folders.add(path[: glob.start()].rpartition("/")[0] or "/")
        else:
            if stat.S_ISDIR(found.st_mode):
                folders.add(path)
            else:
                files.add([path], [found.st_size], [found.st_mtime_ns])
    for folder in sorted(folders):
        files.add(*walked(folder))
    return files.without(index_dir) if any(map(index_dir.startswith, folders)) else files


def _read(path: Path) -> dict[str, Any] | None:
    try:
        seal = json.loads(path.read_bytes())
        # Another version may choose other files.
        return seal if seal["version"] == __version__ and seal.keys() >= {"listing", "index", "checksum"} else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
