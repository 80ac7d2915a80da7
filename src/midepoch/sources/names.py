"""Names of files: the format that a name indicates, and the calls that read other kinds of files."""

from __future__ import annotations

import os
import re

from midepoch.sources.folders import MEDIA

FORMATS = ("arrow", "parquet", "orc", "csv", "jsonl", "text", "tar", "mds", "litdata", "image", "audio", "video")
_ALIASES = {
    "feather": "arrow",
    "ipc": "arrow",
    "json": "jsonl",
    "ndjson": "jsonl",
    "tsv": "csv",
    "txt": "text",
    "webdataset": "tar",
    "wds": "tar",
    "imagefolder": "image",
    "audiofolder": "audio",
    "videofolder": "video",
}
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
    ".txt": "text",
    ".text": "text",
    **MEDIA,
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
    plain = {suffix: "." + suffix.lower() not in COMPRESSIONS for suffix in set(suffixes)}
    known = {suffix: format_of("x." + suffix, wanted) for suffix in plain}
    return [
        known[suffix] if plain[suffix] and "/" not in suffix else format_of(path, wanted)
        for path, suffix in zip(paths, suffixes, strict=True)
    ]


def format_of_bytes(start: bytes) -> str | None:
    """Return the format that the first bytes of a file indicate, or None."""
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


def not_the_data(start: bytes) -> str | None:
    """Return the sentence about a file that stands for the data, from its first bytes. None if it may be the data."""
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, not the data. Run `git lfs pull`"
    if start.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "it is an HTML page, not the data. Download it again, with a login if it needs one"
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
    if any(".mds" in path for path in paths):
        return " Shards of MDS are read by their index.json: pass the folder that has it."
    suffixes = {os.path.splitext(path)[1].lower() for path in paths}
    reader = next((call for suffix, call in _TOKEN_READERS.items() if suffix in suffixes), None)
    return "" if reader is None else f" For tokens, use {reader}."
