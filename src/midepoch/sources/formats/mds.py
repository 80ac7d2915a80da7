"""MDS: the shards of MosaicML Streaming, plain or compressed. ``index.json`` names them.

A shard has the number of its samples, the offset of each (both uint32), its configuration, and the samples. A block is
a run of samples of about 8 MB, which is one range read; of a compressed shard, which can only be read as a whole, it is
the shard. The offsets are kept with the index.

Types follow the values of ``streaming``'s own reader. Some values are delivered as they are stored: images as files
that ``decode`` reads; JSON, and integers and decimals of any precision, as text, because Arrow has no type for all of
them; and pickles as bytes, because unpickling runs code, so that it is the user's step.

Shards of text are JSON, CSV, TSV and XSV. Each has two files: the lines, and the offsets of the lines. A value is text,
an integer or a float.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from midepoch.sources.formats.base import Block, Member, NoStatistics, Scanned
from midepoch.sources.formats.records import (
    BadSampleError,
    Bytes,
    Int64Array,
    ShardFile,
    Values,
    arrays,
    beginning,
    bytes_array,
    check_kind,
    columns_of,
    contents_of,
    cut,
    damaged_offset,
    first_true,
    fixed_arrays,
    footer_parts,
    gathered,
    image_file,
    integers,
    naming,
    numbers_array,
    offsets_in,
    packed_footer,
)
from midepoch.sources.manifests import files_beside, inside, read_manifest
from midepoch.storage.open_files import Entry
from midepoch.storage.stores import Store

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_CODES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""Numbers of dtypes in arrays that name their own."""


@dataclass(frozen=True)
class Encoding:
    """One encoding. ``kind`` is None if the values determine it: decode one to know it."""

    decode: Callable[[Values], pa.Array]
    kind: pa.DataType | None
    size: int | None = None


@lru_cache(maxsize=256)
def encoding_of(text: str) -> Encoding:
    """Return the encoding with a name, as in ``column_encodings``. Raise FormatError for an unknown one."""
    name, _, arguments = text.partition(":")
    if name == "ndarray":
        return _ndarray(arguments)
    if text in _SCALARS or text == "int":
        dtype = np.dtype("int64" if text == "int" else text)
        return Encoding(partial(scalars, dtype=dtype), pa.from_numpy_dtype(dtype), dtype.itemsize)
    if text in _PLAIN:
        return _PLAIN[text]
    raise FormatError(
        f"the encoding {text!r} is not one of MDS: {', '.join((*_PLAIN, 'int', *_SCALARS, 'ndarray'))}. Write the "
        "column in one of them."
    )


def scalars(values: Values, dtype: np.dtype[Any]) -> pa.Array:
    """Return values of a fixed size as numbers."""
    values.checked(dtype.itemsize, str(dtype))
    return numbers_array(gathered(values), dtype)


def _ndarray(arguments: str) -> Encoding:
    name, _, sizes = arguments.partition(":")
    if name and name not in _CODES.values():
        raise FormatError(f"the encoding 'ndarray:{arguments}' has an unknown dtype. Write the column in another one.")
    dtype = np.dtype(name) if name else None
    shape = tuple(map(int, sizes.split(","))) if sizes else None
    if dtype is None or shape is None:
        return Encoding(partial(_dynamic, dtype=dtype), None)
    kind = pa.from_numpy_dtype(dtype)
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return Encoding(partial(fixed_arrays, dtype=dtype, shape=shape), kind, int(np.prod(shape)) * dtype.itemsize)


def _dynamic(values: Values, dtype: np.dtype[Any] | None) -> pa.Array:
    """Return arrays that store their dtype, unless it is given, and their shape."""
    if dtype is None:
        codes = _head(values, 1)[:, 0]
        first_true(codes != codes[0], lambda i: f"its array is {_dtype(codes[i])}, that of others {_dtype(codes[0])}")
        dtype, values = np.dtype(_dtype(codes[0])), values.without(1)
    marks = _head(values, 1)[:, 0]
    dimensions, widths = marks >> 2, 1 << (marks & 3)
    first_true(
        dimensions != dimensions[0],
        lambda i: f"its array has {dimensions[i]} dimensions, that of others {dimensions[0]}",
    )
    values = values.without(1)
    axes = int(dimensions[0])
    first_true(values.sizes < axes * widths, lambda _: "its array is shorter than its shape")
    shapes = np.zeros((len(values), axes), np.int64)
    for width in np.unique(widths).tolist():
        rows = widths == width
        shapes[rows] = integers(values.data, values.starts[rows], axes, f"<u{width}")
    first_true(shapes.min(axis=1, initial=0) < 0, lambda _: "its array has an impossible shape")
    return arrays(values.without(axes * widths), dtype, shapes)


def _head(values: Values, count: int) -> Int64Array:
    first_true(values.sizes < count, lambda _: "its array is empty")
    return integers(values.data, values.starts, count, "u1")


def _dtype(code: Any) -> str:
    if int(code) not in _CODES:
        raise BadSampleError(0, f"its array has the unknown dtype {int(code)}")
    return _CODES[int(code)]


def floats(values: Values) -> pa.Array:
    """Return floats that are stored as text."""
    texts, found = bytes_array(values, pa.string()), []
    for number, text in enumerate(texts.to_pylist()):
        try:
            found.append(float(text))
        except ValueError:
            raise BadSampleError(number, f"{text!r:.60} is not a float") from None
    return pa.array(found, pa.float64())


def image_lists(values: Values, skipped: int, convert: Callable[[bytes], bytes] = bytes) -> pa.Array:
    """Return lists of files: after ``skipped`` bytes their number, their sizes (all uint32), and their contents."""
    found = []
    for number in range(len(values)):
        value = values.value(number)
        count = int.from_bytes(value[skipped : skipped + 4], "little")
        at = skipped + 4 + 4 * count
        sizes = np.frombuffer(value[skipped + 4 : at], "<u4").tolist() if at <= len(value) else []
        if len(sizes) != count or at + sum(sizes) != len(value):
            raise BadSampleError(number, f"its list of images does not have {len(value)} bytes")
        files = []
        for size in sizes:
            files.append(_converted(convert, value[at : at + size], number))
            at += size
        found.append(files)
    return pa.array(found, pa.list_(pa.binary()))


def _converted(convert: Callable[[bytes], bytes], value: bytes, number: int) -> bytes:
    try:
        return convert(value)
    except ValueError as problem:
        raise BadSampleError(number, str(problem)) from None


def images(values: Values) -> pa.Array:
    """Return raw images as files."""
    return pa.array([_converted(image_file, values.value(i), i) for i in range(len(values))], pa.binary())


_BINARY = Encoding(partial(bytes_array, kind=pa.binary()), pa.binary())
_TEXT = Encoding(partial(bytes_array, kind=pa.string()), pa.string())
_FILES = pa.list_(pa.binary())
_PLAIN = {
    "bytes": _BINARY,
    "str": _TEXT,
    "str_int": _TEXT,
    "str_float": Encoding(floats, pa.float64()),
    "str_decimal": _TEXT,
    "json": _TEXT,
    "pil": Encoding(images, pa.binary()),
    "jpeg": _BINARY,
    "png": _BINARY,
    "jpeg_array": Encoding(partial(image_lists, skipped=0), _FILES),
    "jpegarray": Encoding(partial(image_lists, skipped=0), _FILES),
    "list[jpeg]": Encoding(partial(image_lists, skipped=4), _FILES),
    "list[png]": Encoding(partial(image_lists, skipped=4), _FILES),
    "list[pil]": Encoding(partial(image_lists, skipped=4, convert=image_file), _FILES),
    "pkl": _BINARY,
}


FORMATS = ("json", "csv", "tsv", "xsv")
_KINDS: dict[str, tuple[pa.DataType, type[str] | type[int] | type[float]]] = {
    "str": (pa.string(), str),
    "int": (pa.int64(), int),
    "float": (pa.float64(), float),
}


def described(shard: dict[str, Any]) -> dict[str, Any]:
    """Return the columns and the syntax of a shard, from its entry in a manifest. Raise KeyError or ValueError."""
    form = shard["format"]
    columns = (
        shard["columns"] if form == "json" else dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    )
    for encoding in columns.values():
        if encoding not in _KINDS:
            raise ValueError(f"the encoding {encoding!r} is not one of {', '.join(_KINDS)}")
    separator = {"csv": ",", "tsv": "\t", "json": None}.get(form, shard.get("separator"))
    return {
        "names": list(columns),
        "encodings": list(columns.values()),
        "text": {"separator": separator, "newline": shard["newline"]},
    }


def schema_of(about: dict[str, Any]) -> pa.Schema:
    """Return the types of a shard."""
    kinds = (_KINDS[encoding][0] for encoding in about["encodings"])
    return pa.schema(list(zip(about["names"], kinds, strict=True)))


def table_of(data: Bytes, offsets: Int64Array, about: dict[str, Any], columns: Sequence[str]) -> pa.Table:
    """Return these columns of some lines. Raise BadSampleError for a line that cannot be read."""
    encodings = dict(zip(about["names"], about["encodings"], strict=True))
    contents, bounds = data.tobytes(), offsets.tolist()
    found: dict[str, list[Any]] = {name: [] for name in columns}
    for number in range(len(bounds) - 1):
        try:
            row = _row(contents[bounds[number] : bounds[number + 1]].decode(), about)
            for name, values in found.items():
                kind, convert = _KINDS[encodings[name]]
                if about["text"]["separator"] is None:
                    _check(name, encodings[name], row[name])
                values.append(pa.scalar(convert(row[name]), kind).as_py())
        except (ValueError, KeyError, TypeError, OverflowError, pa.ArrowException) as problem:
            raise BadSampleError(number, f"its line cannot be read: {problem!r}") from None
    return pa.table({name: pa.array(values, _KINDS[encodings[name]][0]) for name, values in found.items()})


def _check(name: str, encoding: str, value: Any) -> None:
    """Raise ValueError for a JSON value of another type. A conversion could change it: ``int(1.7)``, ``str(None)``."""
    allowed = (int, float) if encoding == "float" else _KINDS[encoding][1]
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise ValueError(f"column {name!r} is {value!r:.60}, expected {encoding}")


def _row(line: str, about: dict[str, Any]) -> dict[str, Any]:
    separator, newline = about["text"]["separator"], about["text"]["newline"]
    if separator is None:
        row: dict[str, Any] = json.loads(line)
        return row
    if not line.endswith(newline):
        raise ValueError("it does not end with a newline")
    return dict(zip(about["names"], line.removesuffix(newline).split(separator), strict=True))


_VERSION = 2
_COMPRESSED_BLOCK = 256 << 20
_PROBE = 8 << 10
"""Bytes that are read after the header of a plain shard."""


class MdsFormat(NoStatistics):
    """Format whose blocks are runs of samples of a shard."""

    def members(self, store: Store, manifests: Sequence[Entry]) -> list[Member]:
        return [member for manifest in manifests for member in _members(store, manifest)]

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:  # noqa: ARG002
        raise FormatError(f"{store.name(entry.path)}: pass the folder of this shard, which has its index.json.")

    def scan_member(self, store: Store, member: Member) -> Scanned:
        entry, about = member.entry, member.about
        name, shard = store.name(entry.path), ShardFile(entry, about["codec"], about["bytes"])
        samples, text = about["samples"], about.get("text")
        table = 4 * (samples + 2)
        lines = None if text is None else _line_offsets(store, about)
        with store.open(entry) as file:
            probe = BEGINNING if about["packed"] else _PROBE
            head = beginning(file, shard, (table if lines is None else 0) + 2 * probe, name)
            offsets = offsets_in(head, samples, name) if lines is None else lines
            if offsets[-1] != shard.size:
                raise damaged_offset(name, samples - 1)
            probe += int(offsets[0])
            open_types = text is None and any(encoding_of(each).kind is None for each in about["encodings"])
            whole = int(offsets[min(1, samples)]) if open_types else 0
            if len(head) < min(max(probe, whole), shard.size):
                head = beginning(file, shard, max(probe, whole), name)
            schema = _schema(name, about, offsets, head) if text is None else schema_of(about)
            described = {key: about[key] for key in ("names", "encodings", "samples", "bytes", "hashes", "packed")}
            identity = json.dumps(described, sort_keys=True).encode() + head[:probe]
            size = 0 if about["packed"] else file.size
            found = Scanned(schema, etag=file.etag, fingerprint=fingerprint(identity, file.read_at, size))
        if samples:
            found.offsets = cut(offsets) if shard.codec is None else cut(offsets, _COMPRESSED_BLOCK)
            found.rows = np.diff([*found.offsets, samples]).tolist()
            found.stop = samples
        found.decoded_bytes = float(shard.size)
        kept = {key: about.get(key) for key in ("names", "encodings", "sizes", "samples", "bytes", "codec", "text")}
        kept["kinds"] = [str(kind) for kind in schema.types]
        found.footer = packed_footer(kept, offsets)
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:  # noqa: ARG002
        about, offsets = footer_parts(block.footer)
        first, stop = block.offset, about["samples"] if block.end is None else block.end
        begin, end = int(offsets[first]), int(offsets[stop])
        shard = ShardFile(block.entry, about["codec"], about["bytes"])
        name = store.name(block.entry.path)
        with store.open(block.entry) as file:
            data = contents_of(file, shard, begin, end, name)
        own = [column for column in columns if column in about["names"]]
        if about["text"] is not None:
            with naming(name, first):
                return table_of(data, offsets[first : stop + 1] - begin, about, own)
        encodings = dict(zip(about["names"], map(encoding_of, about["encodings"]), strict=True))
        with naming(name, first):
            values = dict(
                zip(encodings, columns_of(data, offsets[first : stop + 1] - begin, about["sizes"]), strict=True)
            )
        arrays = [_decoded(name, first, each, encodings[each], values[each]) for each in own]
        kinds = dict(zip(about["names"], about["kinds"], strict=True))
        for column, array in zip(own, arrays, strict=True):
            check_kind(name, first, column, array, kinds[column])
        return pa.table(arrays, names=own)


def _decoded(name: str, first: int, column: str, encoding: Encoding, values: Values) -> pa.Array:
    with naming(name, first, column):
        return encoding.decode(values)


def _members(store: Store, manifest: Entry) -> list[Member]:
    contents, name = read_manifest(store, manifest), store.name(manifest.path)
    if contents.get("version") != _VERSION:
        raise FormatError(
            f"{name}: version 2 of MDS is expected, found {contents.get('version')!r}. Copy or download it again, or "
            "write the shards with a current version of mosaicml-streaming."
        )
    shards = contents["shards"]
    if not shards:
        raise DataNotFoundError(f"{name} names no shards. Check the program that wrote it.")
    abouts = []
    for number, shard in enumerate(shards):
        try:
            abouts.append(_about(store, manifest, shard))
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            text = f"{name}: the entry of shard {number} is invalid: {problem!r}. Write it again."
            raise FormatError(text) from None
    pairs = [each for _, *pair in abouts for each in pair]
    present = files_beside(store, manifest, [path for files in pairs for path, _, _ in files])
    members = []
    for about, files, meta in abouts:
        beside = _chosen(store, name, present, {"bytes": about["meta"]}, meta) if meta else None
        members.append(_chosen(store, name, present, {**about, "meta": beside}, files))
    return members


Candidate = tuple[str, int, str | None]
"""A file that a shard may be in: its path, its size, and its compression."""


def _about(
    store: Store, manifest: Entry, shard: dict[str, Any]
) -> tuple[dict[str, Any], list[Candidate], list[Candidate]]:
    """Return the description of a shard, the files that it may be in, and those of the offsets of lines."""
    form, raw = shard["format"], shard["raw_data"]
    if form not in ("mds", *FORMATS):
        raise ValueError(f"the format {form!r} is not one of mds, {', '.join(FORMATS)}")
    packed = shard.get("zip_data")
    about = {"samples": int(shard["samples"]), "bytes": int(raw["bytes"]), "hashes": raw.get("hashes") or {}}
    about["packed"] = int(packed["bytes"]) if packed else None
    files = _candidates(store, manifest, shard, "data")
    if form != "mds":
        about |= {**described(shard), "meta": int(shard["raw_meta"]["bytes"])}
        return about, files, _candidates(store, manifest, shard, "meta")
    names, encodings, sizes = shard["column_names"], shard["column_encodings"], shard["column_sizes"]
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError("its columns, encodings and sizes differ in number")
    for encoding, size in zip(encodings, sizes, strict=True):
        if size and encoding_of(encoding).size not in (None, size):
            raise ValueError(f"the encoding {encoding!r} does not have {size} bytes")
    about |= {"names": list(names), "encodings": list(encodings), "sizes": [size or None for size in sizes]}
    return about, files, []


def _candidates(store: Store, manifest: Entry, shard: dict[str, Any], part: str) -> list[Candidate]:
    raw, packed = shard[f"raw_{part}"], shard.get(f"zip_{part}")
    codec = str(shard.get("compression") or "").partition(":")[0] or None
    files: list[Candidate] = [(inside(store, manifest, raw["basename"]), int(raw["bytes"]), None)]
    if packed:
        files.append((inside(store, manifest, packed["basename"]), int(packed["bytes"]), codec))
    return files


def _line_offsets(store: Store, about: dict[str, Any]) -> Int64Array:
    """Return the offsets of the lines of a shard, from the file beside it."""
    meta: Member = about["meta"]
    shard = ShardFile(meta.entry, meta.about["codec"], meta.about["bytes"])
    name = store.name(meta.entry.path)
    with store.open(meta.entry) as file:
        return offsets_in(beginning(file, shard, 4 * (about["samples"] + 2), name), about["samples"], name, least=0)


def _chosen(
    store: Store, manifest: str, present: dict[str, Entry], about: dict[str, Any], files: list[Candidate]
) -> Member:
    """Return the file of a shard: the plain one if it is complete, else the compressed one."""
    there = [(present[path], size, codec) for path, size, codec in files if path in present]
    for entry, size, codec in there:
        if entry.size == size:
            return Member(entry, {**about, "codec": codec})
    if there:
        entry, size, _ = there[0]
        raise FormatError(
            f"{store.name(entry.path)} has {entry.size} bytes, {manifest} says {size}: it is truncated or from another "
            "dataset. Copy or download it again."
        )
    names = " and ".join(store.name(path) for path, _, _ in files)
    raise DataNotFoundError(f"{names} does not exist, but {manifest} names it. Copy or download the shard.")


def _schema(name: str, about: dict[str, Any], offsets: Int64Array, head: bytes) -> pa.Schema:
    encodings = [encoding_of(encoding) for encoding in about["encodings"]]
    kinds = [encoding.kind for encoding in encodings]
    if about["samples"] and None in kinds:
        data = np.frombuffer(head, np.uint8)[int(offsets[0]) : int(offsets[1])]
        with naming(name, 0):
            values = columns_of(data, offsets[:2] - offsets[0], about["sizes"])
        for i, encoding in enumerate(encodings):
            kinds[i] = kinds[i] or _decoded(name, 0, about["names"][i], encoding, values[i]).type
    return pa.schema(list(zip(about["names"], (kind or pa.null() for kind in kinds), strict=True)))
