"""Names of files and folders: the formats, splits and media that they indicate, the calls that read other kinds of
files, and globs and braces in paths, as in a shell.

Each file of a folder of images, sounds or videos is a row. Millions of files cannot be entries of their own: the index
has one entry for all of them, whose modification time is a digest of the listing.
"""

from __future__ import annotations

import hashlib
import logging
import os
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
from midepoch.storage.hub_paths import parse_hub_path
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
"""Formats whose rows are files: an index has one entry for all of them, and a footer for each block.

Each is also the name of its column.
"""
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
) -> tuple[list[Entry], str | None]:
    """Return the files of a folder that are the data: those of the requested format, else tables, media, or text.

    Files named ``metadata`` belong to the media beside them, which are then the data even if there are other tables.
    The second value is the kind of media, or None.
    """
    present = Counter(formats)
    media = [kind for kind in KINDS if present[kind]]
    tables = [kind for kind in present if kind not in (*KINDS, "text", None)]
    described = bool(tables) and bool(media) and any(is_metadata(entry[0]) for entry in visible)

    def of(kinds: Sequence[str]) -> list[Entry]:
        return [entry for entry, kind in zip(visible, formats, strict=True) if kind in kinds]

    if wanted in KINDS or (wanted is None and media and (not tables or described)):
        if wanted is None and len(media) > 1:
            raise FormatError(f"{name} contains {' and '.join(media)} files. Choose one kind with format=….")
        kind = wanted or media[0]
        if not described:
            return of([kind]), kind
        others = [entry[0] for entry in of(tables) if not is_metadata(entry[0])]
        if wanted is None and others:
            _log.warning(
                "%s is read as media with their metadata. Its other tables (%d, the first is %s) are not read. Pass "
                "format=%r to read tables instead.",
                name, len(others), posixpath.basename(others[0]), format_of(others[0]),
            )  # fmt: skip
        return list(visible), kind  # metadata may name any of them
    chosen = of([wanted] if wanted is not None else tables or ["text"])
    for kind in media if wanted is None else ():  # a table that only describes the files would otherwise hide them
        _log.warning(
            "%s contains %d %s file%s, which %s not read, because tables are read instead (the first is %s). Pass "
            "format=%r to read the %s files.",
            name, present[kind], kind, "s"[: present[kind] > 1], "are" if present[kind] > 1 else "is",
            posixpath.basename(chosen[0][0]), kind, kind,
        )  # fmt: skip
    return chosen, None


def warn_of_splits(name: str, folder: str, entries: Sequence[Entry]) -> None:
    """Warn about a folder that contains several splits, as folders or as files. ``entries`` are sorted by path."""
    splits: dict[str, str] = {}
    for word, split in SPLITS.items():
        start = f"{folder.rstrip('/')}/{word}"
        at = bisect_left(entries, start, key=itemgetter(0))
        rest = entries[at].path[len(start) :] if at < len(entries) and entries[at].path.startswith(start) else ""
        if rest and not rest[0].isalpha():
            pattern = word if "/" in rest else f"{word}*{posixpath.splitext(rest)[1] or rest}"
            splits.setdefault(split, f"{name.rstrip('/')}/{pattern}")
    _warn_of_several(name, splits)


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
    _warn_of_several(f"hf://{folder}", splits)
    return found


def _warn_of_several(name: str, splits: Mapping[str, str]) -> None:
    """Warn about several splits, with the address of one for each."""
    if len(splits) > 1:
        _log.warning(
            "%s contains the splits %s, and all of them are read as one dataset. For one split, pass its files: %s",
            name, ", ".join(splits), next(iter(splits.values())),
        )  # fmt: skip


FORMATS = ("arrow", "parquet", "orc", "csv", "jsonl", "text", "tar", "mds", "litdata", "image", "audio", "video")
_SUFFIXES = {
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".parquet", ".parq", ".pq"), "parquet"),
    ".orc": "orc",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".tar", ".tgz"), "tar"),
    **dict.fromkeys((".txt", ".text"), "text"),
    **MEDIA,
}
_ALIASES = {
    **{suffix[1:]: form for suffix, form in _SUFFIXES.items() if suffix not in MEDIA},
    **dict.fromkeys(("webdataset", "wds"), "tar"),
    **{f"{kind}folder": kind for kind in KINDS},
}
OF_TOKENS = {"tokens": (".npy", ".bin", ".ds"), "megatron": (".idx", ".bin")}
"""Suffixes of files that have readers of their own: ``from_tokens`` and ``from_megatron``."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".tgz": "gzip"}
_COMPRESSED = ("csv", "jsonl", "text", "tar")
_MAGIC = {b"ARROW1": "arrow", b"PAR1": "parquet", b"ORC": "orc", b"\xff\xff\xff\xff": "arrow"}
_WITH_NUMBER = re.compile(r"litdata:[1-9][0-9]*")
_TOKEN_READERS = {
    ".idx": "midepoch.from_megatron(prefix)",
    ".bin": "midepoch.from_tokens(path, length, dtype='uint16'), or midepoch.from_megatron(prefix) if it has an .idx",
    **dict.fromkeys((".npy", ".ds"), "midepoch.from_tokens(path, length)"),
}
"""Files that are not tables: the calls that read them."""
_GENERATED = "and pass a function that yields rows to midepoch.from_generator, which stores them once"
_NOT_READ = {
    ".tfrecord": ("TFRecord", f"Read the records with TensorFlow, {_GENERATED}"),
    ".array_record": ("ArrayRecord", "Call midepoch.from_map_style(source) with array_record's ArrayRecordDataSource"),
    ".vortex": ("Vortex", "Call midepoch.from_arrow(table) with the Arrow table that vortex reads"),
    **dict.fromkeys((".h5", ".hdf5"), ("HDF5", f"Read the rows with h5py, {_GENERATED}")),
    ".npy": (
        "NumPy",
        "Call midepoch.from_dict({'x': numpy.load(path)}), or midepoch.from_tokens(path, length) for tokens",
    ),
    ".npz": ("NumPy archive", "Call midepoch.from_dict(dict(numpy.load(path)))"),
    ".safetensors": ("safetensors", "Call midepoch.from_dict(safetensors.numpy.load_file(path))"),
    ".avro": ("Avro", "Call midepoch.from_pandas(polars.read_avro(path))"),
    **dict.fromkeys(
        (".pkl", ".pickle"), ("pickle", "Load the object, and call midepoch.from_list(rows) or from_pandas")
    ),
    **dict.fromkeys((".pt", ".pth"), ("torch", "Call torch.load, then midepoch.from_dict or from_map_style")),
    **dict.fromkeys((".xlsx", ".xls"), ("Excel", "Call midepoch.from_pandas(pandas.read_excel(path))")),
    **dict.fromkeys((".db", ".sqlite"), ("SQLite", "Call midepoch.from_pandas(pandas.read_sql(query, connection))")),
    ".zip": ("ZIP", "Extract the files, or pass the address zip://**::path, which fsspec reads"),
}
"""Formats that are not read, and the way to their rows."""


def check_format(given: str | None) -> str | None:
    """Return the canonical name of a format. Raise ValueError for an unknown one."""
    if given is None:
        return None
    name = _ALIASES.get(str(given).lower(), str(given).lower())
    if name not in FORMATS and not _WITH_NUMBER.fullmatch(name):
        remedy = f". {reason}" if (reason := not_read(["." + name])) else ""
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {given!r}{remedy}")
    return name


def with_delimiter(format: str | None, delimiter: str | None) -> str | None:
    """Return the format with the character code of a delimiter, if one is given: ``csv:59``."""
    if delimiter is None:
        return format
    if format not in (None, "csv"):
        raise ValueError(f"delimiter is for CSV files, but format is {format!r}. Omit one of the two.")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0':
        raise ValueError(
            f"delimiter must be one ASCII character, and no quote or line end, got {delimiter!r}. Pass ';' or '\\t'."
        )
    return f"csv:{ord(delimiter)}"


def format_of(path: str, wanted: str | None = None) -> str | None:
    """Return the format that a file name indicates, or None. That of tokens only if it is ``wanted``."""
    if wanted in OF_TOKENS:
        return wanted if os.path.splitext(path)[1].lower() in OF_TOKENS[wanted] else None
    stem, dot, suffix = path.lower().rpartition(".")
    if "." + suffix in COMPRESSIONS and "." + suffix not in _SUFFIXES:
        named = _SUFFIXES.get("." + stem.rpartition(".")[2])
        return named if named in _COMPRESSED else None
    return _SUFFIXES.get(dot + suffix)


def formats_of(paths: list[str], wanted: str | None) -> list[str | None]:
    """Return the format of each path. Ten thousand files usually have one suffix, which is resolved a single time."""
    suffixes = [path.rpartition(".")[2] for path in paths]
    formats = {suffix: format_of("x." + suffix, wanted) for suffix in set(suffixes)}
    unclear = {suffix for suffix in formats if "/" in suffix or "." + suffix.lower() in COMPRESSIONS}
    return [
        format_of(path, wanted) if suffix in unclear else formats[suffix]
        for path, suffix in zip(paths, suffixes, strict=True)
    ]


def format_of_bytes(start: bytes) -> str | None:
    """Return the format that the first bytes of a file indicate, or None."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


def not_the_data(start: bytes, expected: str = "") -> str | None:
    """Return the sentence about a file that is no data of this format, from its first bytes. None if it may be."""
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the data. Run `git lfs pull`"
    if start.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "it is an HTML page, not the data. Download it again, with a login if it needs one"
    for magic, kind in ((b"\x1f\x8b", "gz"), (b"\x28\xb5\x2f\xfd", "zst"), (b"BZh91AY&SY", "bz2")):
        if start.startswith(magic):
            return f"it is compressed. Rename it so that its name ends with .{kind}"
    for magic, kind in ((b"PAR1\x15", "parquet"), (b"ARROW1\0", "arrow"), (b'{"', "jsonl")):
        if start.startswith(magic) and kind != expected:
            return f"its format is {kind}. Pass format={kind!r}, or rename it"
    return None


def not_read(paths: list[str]) -> str | None:
    """Return the sentences about files of a format that is not read, or None. Shards may have a number at the end."""
    names = [path.lower().rpartition("/")[2] for path in paths]
    for suffix, (format_, remedy) in _NOT_READ.items():
        if any(re.search(rf"{re.escape(suffix)}s?(-\d+.*|\.[a-z0-9]+)?$", name) for name in names):
            return f"{format_} files are not read. {remedy}."
    return None


def other_reader(paths: list[str]) -> str:
    """Return the call that reads such files, as the last sentence of a message. Empty for files of other kinds."""
    if (reason := not_read(paths)) is not None:
        return f" {reason}"
    if any(path.endswith(".ledger") for path in paths):
        return " It is the ledger of a run, which `midepoch audit` reads. Pass the folder of the data."
    if any(".mds" in path for path in paths):
        return " Shards of MDS are read by their index.json: pass the folder that has it."
    suffixes = {os.path.splitext(path)[1].lower() for path in paths}
    reader = next((call for suffix, call in _TOKEN_READERS.items() if suffix in suffixes), None)
    return "" if reader is None else f" For tokens, use {reader}."


_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")
_MOST = 10_000_000


def spelled_out(path: str, folder: str = "") -> list[str] | None:
    """Return all paths that the braces stand for, in order. None if there are none: ``{x}`` is an ordinary name.

    ``folder``: the beginning of the path, in which braces are part of the names.
    """
    paths = [folder + each for each in _spelled(path[len(folder) :])]
    return None if paths == [path] else paths


def _spelled(text: str) -> list[str]:
    """Return all texts that the braces in a text stand for, in order, as a shell does."""
    start = stop = text.find("{")
    if start < 0:
        return [text]
    depth, parts = 0, [""]
    for stop in range(start, len(text)):
        sign = text[stop]
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if not depth:
            break
        if sign == "," and depth == 1:
            parts.append("")
        elif stop > start:
            parts[-1] += sign
    if depth:  # nothing closes the brace
        return [text[: start + 1] + rest for rest in _spelled(text[start + 1 :])]
    if len(parts) > 1:
        alternatives = [each for part in parts for each in _spelled(part)]
    else:  # a range; else the braces are part of the name, but there may be others inside
        alternatives = _range(parts[0]) or [f"{{{each}}}" for each in _spelled(parts[0])]
    rests = _spelled(text[stop + 1 :])
    if (count := len(alternatives) * len(rests)) > _MOST:
        raise ValueError(f"{text!r} expands to {count:,} paths. Check the numbers in its braces.")
    return [text[:start] + each + rest for each in alternatives for rest in rests]


def _range(inner: str) -> list[str] | None:
    """Return the numbers or letters of a range ``first..last..step``, or None if it is none."""
    match = _RANGE.fullmatch(inner)
    if match is None or match[1].isalpha() != match[2].isalpha():
        return None
    are_letters, ends = match[1].isalpha(), match.group(1, 2)
    first, last = map(ord if are_letters else int, ends)
    step = max(1, abs(int(match[3] or 1)))
    if abs(last - first) // step >= _MOST:
        raise ValueError(f"{{{inner}}} expands to {abs(last - first) + 1:,} numbers. Check the path.")
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    width = max(map(len, ends)) if any(re.match(r"-?0\d", end) for end in ends) else 0
    return [chr(number) if are_letters else f"{number:0{width}d}" for number in numbers]


GLOB = re.compile(r"[*?\[]")


def translated(pattern: str) -> str:
    """Return a glob as a regular expression: ``**`` crosses folders, ``*`` and ``?`` do not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        wildcards.get(part)
        or (part.replace("[!", "[^") if part.startswith("[") and part.endswith("]") else re.escape(part))
        for part in parts
    )
