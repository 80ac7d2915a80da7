"""Folders of images, sounds and videos: their recognition, and their listing as one entry of an index.

Each file is a row. Millions of files cannot be entries of their own: the index has one entry for all of them, whose
modification time is a digest of the listing.
"""

from __future__ import annotations

import hashlib
import logging
import posixpath
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from midepoch.errors import FormatError
from midepoch.storage.hub_api import parse_hub_path
from midepoch.storage.stores import Entry

_log = logging.getLogger("midepoch")

_IMAGES = ".apng .bmp .dib .gif .ico .j2c .j2k .jfif .jp2 .jpc .jpe .jpeg .jpf .jpg .jpx .pbm .pgm .png .pnm .ppm .tga"
_SOUNDS = ".aac .aiff .au .caf .flac .m4a .mp3 .ogg .opus .rf64 .w64 .wav .wma"
_VIDEOS = ".avi .m4v .mkv .mov .mp4 .webm"
MEDIA: dict[str, str] = {
    **dict.fromkeys([*_IMAGES.split(), ".tif", ".tiff", ".webp"], "image"),
    **dict.fromkeys(_SOUNDS.split(), "audio"),
    **dict.fromkeys(_VIDEOS.split(), "video"),
}
KINDS = ("image", "audio", "video")
"""Formats whose rows are files (``formats.GROUPED``). Each is also the name of its column."""
SPLITS: dict[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The split that a folder or file with such a name belongs to."""
_SPLIT = re.compile(rf"(?:^|[-._ 0-9/])({'|'.join(SPLITS)})(?=[-._ 0-9/]|$)")
_DESCRIPTIONS = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


@dataclass(frozen=True)
class Listing:
    """All files of a dataset of media, in order, with their paths relative to the folders that were given."""

    root: str
    files: tuple[Entry, ...]
    names: tuple[str, ...]

    @property
    def entry(self) -> Entry:
        """All files as one entry. Its modification time is a digest of their names, sizes and times."""
        sizes, times = [entry.size for entry in self.files], [entry.mtime_ns for entry in self.files]
        digest = hashlib.blake2b("\0".join(self.names).encode("utf-8", "surrogateescape"), digest_size=7)
        digest.update(array("q", [len(sizes), *sizes, *times]).tobytes())
        return Entry(self.root, sum(sizes), int.from_bytes(digest.digest(), "little"))


class Expanded(NamedTuple):
    """The files that a path means."""

    root: str
    """The folder in which they were searched, empty for the path of a file."""
    entries: list[Entry]
    kind: str | None = None
    """The only format in a folder, or the format of a manifest. None if unknown."""
    warned: bool = False
    """True if a warning about the choice of files was logged. Every opening repeats it."""


def is_metadata(path: str) -> bool:
    """Return True for a file that describes the files beside it."""
    return path.endswith(_METADATA) and posixpath.basename(path) in _METADATA


def listing_of(given: Sequence[Expanded]) -> Listing:
    """Return the listing of several paths. Names of files are relative to the folder in which they were searched."""
    files: list[Entry] = []
    names: list[str] = []
    alone = [posixpath.dirname(each.entries[0].path) for each in given if not each.root]
    common = posixpath.commonpath(alone) if alone else ""
    for root, entries, *_ in given:
        start = len((root or common).rstrip("/")) + 1
        files += entries
        names += [entry[0][start:] for entry in entries]
    roots = [root.rstrip("/") or "/" for root, *_ in given if root] + [common] * bool(alone)
    return Listing(posixpath.commonpath(roots), tuple(files), tuple(names))


def choose(
    name: str, visible: Sequence[Entry], formats: Sequence[str | None], wanted: str | None
) -> tuple[list[Entry], str | None, bool]:
    """Return the files of a folder that are the data: those of the requested format, else tables, media, or text.

    Files named ``metadata`` belong to the media beside them, which are then the data even if there are other tables.
    The second value is the kind of media, the third is True if a warning was logged.
    """
    present = Counter(kind for kind in formats if kind is not None)
    media = [kind for kind in KINDS if present[kind]]
    tables = [kind for kind in present if kind not in KINDS and kind != "text"]
    described = bool(tables) and bool(media) and any(is_metadata(entry[0]) for entry in visible)
    if wanted in KINDS or (wanted is None and media and (not tables or described)):
        if wanted is None and len(media) > 1:
            raise FormatError(f"{name} contains {' and '.join(media)} files. Choose one kind with format=….")
        if described:
            warned = wanted is None and _warn_of_tables(name, visible, formats, tables)
            return list(visible), wanted or media[0], warned  # metadata may name any of them
        kind = wanted or media[0]
        return [entry for entry, each in zip(visible, formats, strict=True) if each == kind], kind, False
    accepted = [wanted] if wanted is not None else tables or ["text"]
    chosen = [entry for entry, kind in zip(visible, formats, strict=True) if kind in accepted]
    if wanted is None and media:
        _warn_of_media(name, present, media, chosen[0])
    return chosen, None, wanted is None and bool(media)


def _warn_of_tables(name: str, visible: Sequence[Entry], formats: Sequence[str | None], tables: Sequence[str]) -> bool:
    """Warn about tables beside media and their metadata. Return True if there are any."""
    others = [
        (entry[0], kind)
        for entry, kind in zip(visible, formats, strict=True)
        if kind in tables and not is_metadata(entry[0])
    ]
    if others:
        path, kind = others[0]
        _log.warning(
            "%s is read as media with their metadata. Its other tables (%d, the first is %s) are not read. Pass "
            "format=%r to read tables instead.",
            name, len(others), posixpath.basename(path), kind,
        )  # fmt: skip
    return bool(others)


def _warn_of_media(name: str, present: Counter[str], media: Sequence[str], table: Entry) -> None:
    """Warn about media beside tables. A table that only describes the files would otherwise hide all of them."""
    for kind in media:
        _log.warning(
            "%s contains %d %s file%s, which %s not read, because tables are read instead (the first is %s). Pass "
            "format=%r to read the %s files.",
            name, present[kind], kind, "s"[: present[kind] > 1], "are" if present[kind] > 1 else "is",
            posixpath.basename(table[0]), kind, kind,
        )  # fmt: skip


def warn_of_splits(name: str, folder: str, entries: Sequence[Entry]) -> bool:
    """Warn about a folder that contains several splits, as folders or as files. Return True if it does.

    ``entries`` are sorted by path.
    """
    splits: dict[str, str] = {}
    for word, split in SPLITS.items():
        start = f"{folder.rstrip('/')}/{word}"
        at = bisect_left(entries, start, key=itemgetter(0))
        rest = entries[at].path[len(start) :] if at < len(entries) and entries[at].path.startswith(start) else ""
        if rest and not rest[0].isalpha():
            pattern = word if "/" in rest else f"{word}*{posixpath.splitext(rest)[1] or rest}"
            splits.setdefault(split, f"{name.rstrip('/')}/{pattern}")
    return _warned(name, splits)


def files_of_repository(folder: str, files: Sequence[Entry], *, parquet_only: bool) -> list[Entry]:
    """Return the data files in a folder of the Hub, without descriptions of them: with ``parquet_only`` those of
    Parquet, if there are any. Warn if they belong to several splits.
    """
    found = [file for file in files if posixpath.basename(file.path) not in _DESCRIPTIONS]
    if parquet_only:
        found = [file for file in found if file.path.lower().endswith((".parquet", ".pq", ".parq"))] or found
    splits: dict[str, str] = {}
    for file in found:
        at = parse_hub_path(file.path)
        if (match := _SPLIT.search(at.path.lower())) is not None:
            start, rest = at.path[: match.end(1)], at.path[match.end(1) :]
            pattern = f"{start}/**" if "/" in rest else f"{start}*{posixpath.splitext(rest)[1]}"
            splits.setdefault(SPLITS[match[1]], f"hf://{at.root}/{pattern}")
    _warned(f"hf://{folder}", splits)
    return found


def _warned(name: str, splits: Mapping[str, str]) -> bool:
    """Warn about several splits, with the address of one for each. Return True if there are several."""
    if len(splits) > 1:
        _log.warning(
            "%s contains the splits %s, and all of them are read as one dataset. For one split, pass its files: %s",
            name, ", ".join(splits), next(iter(splits.values())),
        )  # fmt: skip
    return len(splits) > 1
