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
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from midepoch.sources.formats import Block, Format, Member, Scanned, records
from midepoch.sources.formats.records import BadSampleError, Bytes, Candidate, Decode, Int64Array, ShardFile, Values
from midepoch.sources.manifests import inside, read_manifest
from midepoch.storage.stores import Entry, Store

_CODES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""Numbers of dtypes in arrays that name their own."""


@lru_cache(maxsize=256)
def encoding_of(text: str) -> Decode:
    """Return the encoding with a name, as in ``column_encodings``. Raise FormatError for an unknown one."""
    name, _, arguments = text.partition(":")
    if name == "ndarray":
        return _ndarray(arguments)
    if text not in _ENCODINGS:
        known = ", ".join((*_ENCODINGS, "ndarray"))
        raise FormatError(f"the encoding {text!r} is not one of MDS: {known}. Write the column in one of them.")
    return _ENCODINGS[text]


def _ndarray(arguments: str) -> Decode:
    name, _, sizes = arguments.partition(":")
    if name and name not in _CODES.values():
        raise FormatError(f"the encoding 'ndarray:{arguments}' has an unknown dtype. Write the column in another one.")
    dtype = np.dtype(name) if name else None
    if dtype is None or not sizes:
        return partial(_dynamic, dtype=dtype)
    return partial(records.fixed_arrays, dtype=dtype, shape=tuple(map(int, sizes.split(","))))


def _dynamic(values: Values, dtype: np.dtype[Any] | None) -> pa.Array:
    """Return arrays that store their dtype, unless it is given, and their shape."""
    if not len(values):
        return pa.nulls(0)
    if dtype is None:
        codes = _first_bytes(values)
        records.first_true(
            codes != codes[0], lambda i: f"its array is {_dtype(codes[i])}, that of others {_dtype(codes[0])}"
        )
        dtype, values = np.dtype(_dtype(codes[0])), values.without(1)
    marks = _first_bytes(values)
    dimensions, widths = marks >> 2, 1 << (marks & 3)
    records.first_true(
        dimensions != dimensions[0],
        lambda i: f"its array has {dimensions[i]} dimensions, that of others {dimensions[0]}",
    )
    values = values.without(1)
    axes = int(dimensions[0])
    records.first_true(values.sizes < axes * widths, lambda _: "its array is shorter than its shape")
    shapes = np.zeros((len(values), axes), np.int64)
    for width in np.unique(widths).tolist():
        rows = widths == width
        shapes[rows] = records.integers(values.data, values.starts[rows], axes, f"<u{width}")
    records.first_true(shapes.min(axis=1, initial=0) < 0, lambda _: "its array has an impossible shape")
    return records.arrays(values.without(axes * widths), dtype, shapes)


def _first_bytes(values: Values) -> Int64Array:
    records.first_true(values.sizes < 1, lambda _: "its array is empty")
    return records.integers(values.data, values.starts, 1, "u1")[:, 0]


def _dtype(code: Any) -> str:
    if int(code) not in _CODES:
        raise BadSampleError(0, f"its array has the unknown dtype {int(code)}")
    return _CODES[int(code)]


def floats(values: Values) -> pa.Array:
    """Return floats that are stored as text."""
    texts, found = records.TEXT(values), []
    for number, text in enumerate(texts.to_pylist()):
        try:
            found.append(float(text))
        except ValueError:
            raise BadSampleError(number, f"{text!r:.60} is not a float") from None
    return pa.array(found, pa.float64())


_ENCODINGS: dict[str, Decode] = {
    "bytes": records.BINARY,
    "str": records.TEXT,
    "str_int": records.TEXT,
    "str_float": floats,
    "str_decimal": records.TEXT,
    "json": records.TEXT,
    "pil": records.images,
    "jpeg": records.BINARY,
    "png": records.BINARY,
    "jpeg_array": partial(records.image_lists, skipped=0),
    "jpegarray": partial(records.image_lists, skipped=0),
    "list[jpeg]": partial(records.image_lists, skipped=4),
    "list[png]": partial(records.image_lists, skipped=4),
    "list[pil]": partial(records.image_lists, skipped=4, convert=records.image_file),
    "pkl": records.BINARY,
    "int": partial(records.scalars, dtype=np.dtype("int64")),
    **{name: partial(records.scalars, dtype=np.dtype(name)) for name in _CODES.values()},
}


_TEXTS: dict[str, tuple[pa.DataType, Callable[[Any], Any], tuple[type, ...]]] = {
    "str": (pa.string(), str, (str,)),
    "int": (pa.int64(), int, (int,)),
    "float": (pa.float64(), float, (int, float)),
}
"""Encodings in shards of text: their type, the conversion of a value, and the types that it may have in JSON. Others
are refused, because a conversion could change values: ``int(1.7)``, ``str(None)``.
"""
_SEPARATORS = {"json": None, "csv": ",", "tsv": "\t", "xsv": ""}


def _rows(data: Bytes, offsets: Int64Array, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of lines. Raise BadSampleError for a line that cannot be read."""
    contents, bounds = data.tobytes(), offsets.tolist()
    separator, newline = about["text"]["separator"], about["text"]["newline"]
    rows: list[dict[str, Any]] = []
    for number in range(len(bounds) - 1):
        try:
            line = contents[bounds[number] : bounds[number + 1]].decode()
            if separator is None:
                rows.append(json.loads(line))
            elif line.endswith(newline):
                values = line.removesuffix(newline).split(separator)
                rows.append(dict(zip(about["names"], values, strict=True)))
            else:
                raise ValueError("it does not end with a newline")
        except ValueError as problem:
            raise BadSampleError(number, f"its line cannot be read: {problem}") from None
    return rows


def _converted_text(rows: Sequence[Any], column: str, encoding: str, is_json: bool) -> pa.Array:
    kind, convert, allowed = _TEXTS[encoding]
    values = []
    for number, row in enumerate(rows):
        value = row.get(column) if isinstance(row, dict) else row
        try:
            if is_json and type(value) not in allowed:
                raise ValueError(value)
            values.append(pa.scalar(convert(value), kind).as_py())
        except (ValueError, OverflowError, pa.ArrowException):
            raise BadSampleError(number, f"it is {value!r:.60}, expected {encoding}") from None
    return pa.array(values, kind)


_VERSION = 2
_PROBE = 8 << 10
"""Bytes that are read after the header of a plain shard."""


class MdsFormat(Format):
    """Format whose blocks are runs of samples of a shard."""

    def members(self, store: Store, manifests: Sequence[Entry]) -> list[Member]:
        return [member for manifest in manifests for member in _members(store, manifest)]

    def scan_member(self, store: Store, member: Member) -> Scanned:
        entry, about = member.entry, member.about
        name, samples = store.name(entry.path), about["samples"]
        lines = None if about["text"] is None else _line_offsets(store, about)
        with store.open(entry) as file:
            shard = ShardFile(file, name, about["codec"], about["bytes"])
            probe = BEGINNING if about["packed"] else _PROBE
            head = shard.beginning((4 * (samples + 2) if lines is None else 0) + 2 * probe)
            offsets = records.offsets_in(head, samples, name) if lines is None else lines
            if offsets[-1] != shard.size:
                raise records.damaged_offset(name, samples - 1)
            found = records.scanned(
                _schema(shard, about, offsets), about, offsets, records.block_starts(offsets, shard.codec)
            )
            described = {key: about[key] for key in ("names", "encodings", "samples", "bytes", "hashes", "packed")}
            identity = json.dumps(described, sort_keys=True).encode() + shard.beginning(int(offsets[0]) + probe)
            found.etag = file.etag
            found.fingerprint = fingerprint(identity, file.read_at, 0 if about["packed"] else file.size)
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        assert block.end is not None
        about, offsets = records.footer_parts(block.footer)
        offsets = offsets[block.offset : block.end + 1]
        with store.open(block.entry) as file:
            shard = ShardFile(file, store.name(block.entry.path), about["codec"], about["bytes"])
            decodes = _columns(shard, block.offset, offsets, about)
        own = {column: decodes[column] for column in columns if column in decodes}
        return records.decoded(shard.name, block.offset, own, len(offsets) - 1, about["kinds"])


def _columns(
    shard: ShardFile, first: int, offsets: Int64Array, about: dict[str, Any]
) -> dict[str, Callable[[], pa.Array]]:
    """Return functions that decode the columns of some samples, which have these offsets."""
    data, offsets = shard.read(int(offsets[0]), int(offsets[-1])), offsets - offsets[0]
    pairs = list(zip(about["names"], about["encodings"], strict=True))
    with records.naming(shard.name, first):
        if about["text"] is not None:
            rows, is_json = _rows(data, offsets, about), about["text"]["separator"] is None
            return {column: partial(_converted_text, rows, column, encoding, is_json) for column, encoding in pairs}
        values = records.columns_of(data, offsets, about["sizes"])
    return {
        column: partial(encoding_of(encoding), each) for (column, encoding), each in zip(pairs, values, strict=True)
    }


def _schema(shard: ShardFile, about: dict[str, Any], offsets: Int64Array) -> pa.Schema:
    """Return the types: those of the first sample where the encodings do not determine them."""
    schema = records.decoded(shard.name, 0, _columns(shard, 0, offsets[:1], about), 0).schema
    if about["samples"] and pa.null() in schema.types:
        first = _columns(shard, 0, offsets[:2], about)
        unknown = {field.name: first[field.name] for field in schema if field.type == pa.null()}
        types = {field.name: field.type for field in records.decoded(shard.name, 0, unknown, 1).schema}
        schema = pa.schema([field.with_type(types.get(field.name, field.type)) for field in schema])
    return schema


def _members(store: Store, manifest: Entry) -> list[Member]:
    contents = read_manifest(store, manifest)
    if contents.get("version") != _VERSION:
        raise FormatError(
            f"{store.name(manifest.path)}: version 2 of MDS is expected, found {contents.get('version')!r}. Copy or "
            "download it again, or write the shards with a current version of mosaicml-streaming."
        )

    def describe(shard: dict[str, Any]) -> tuple[dict[str, Any], list[list[Candidate]]]:
        about = _about(shard)
        parts = ("data",) if about["text"] is None else ("data", "meta")
        return about, [_candidates(store, manifest, shard, part) for part in parts]

    return records.shard_members(store, manifest, "shard", contents["shards"], describe)


def _about(shard: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a shard, from its entry in a manifest. Raise KeyError or ValueError."""
    form, raw, packed = shard["format"], shard["raw_data"], shard.get("zip_data")
    if form not in ("mds", *_SEPARATORS):
        raise ValueError(f"the format {form!r} is not one of mds, {', '.join(_SEPARATORS)}")
    columns = (
        shard["columns"] if form == "json" else dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    )
    about = {
        "names": list(columns),
        "encodings": list(columns.values()),
        "samples": int(shard["samples"]),
        "bytes": int(raw["bytes"]),
        "hashes": raw.get("hashes") or {},
        "packed": int(packed["bytes"]) if packed else None,
    }
    if form == "mds":
        sizes = [size or None for size in shard["column_sizes"]]
        if len(sizes) != len(columns):
            raise ValueError(f"it has {len(columns)} columns, and the sizes of {len(sizes)}")
        return {**about, "sizes": sizes, "text": None}
    for encoding in columns.values():
        if encoding not in _TEXTS:
            raise ValueError(f"the encoding {encoding!r} is not one of {', '.join(_TEXTS)}")
    separator = _SEPARATORS[form] if form != "xsv" else shard["separator"]
    text = {"separator": separator, "newline": shard["newline"]}
    return {**about, "sizes": None, "text": text, "meta_bytes": int(shard["raw_meta"]["bytes"])}


def _candidates(store: Store, manifest: Entry, shard: dict[str, Any], part: str) -> list[Candidate]:
    raw, packed = shard[f"raw_{part}"], shard.get(f"zip_{part}")
    codec = str(shard.get("compression") or "").partition(":")[0] or None
    files = [Candidate(inside(store, manifest, raw["basename"]), int(raw["bytes"]), None)]
    if packed:
        files.append(Candidate(inside(store, manifest, packed["basename"]), int(packed["bytes"]), codec))
    return files


def _line_offsets(store: Store, about: dict[str, Any]) -> Int64Array:
    """Return the offsets of the lines of a shard, from the file beside it."""
    ((entry, codec),) = about["beside"]
    samples, name = about["samples"], store.name(entry.path)
    with store.open(entry) as file:
        shard = ShardFile(file, name, codec, about["meta_bytes"])
        return records.offsets_in(shard.beginning(4 * (samples + 2)), samples, name, least=0)
