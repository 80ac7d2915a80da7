"""LitData: chunks of samples that ``optimize`` wrote. ``index.json`` names and describes them.

A chunk has the number of its samples, the offset of each (both uint32), and the samples. It may be compressed as a
whole, in frames of samples, or sample by sample. Rows of plain values are stored as an Arrow file at the end of a
chunk. Chunks of tokens (``TokensLoader``) are one stream of numbers.

A sample is a tree of dicts, lists and tuples, whose leaves have one encoding each. The keys of the outermost dict are
columns; an outermost list or tuple has the columns "0", "1", …, and a sample that is one value has the column "item".
Inner dicts are structs, inner lists of equal types are lists, others structs.

Media are delivered as the files that were stored, nested values as JSON text, and pickles as bytes: unpickling runs
code, so that it is the user's step. A serializer of the user's own is unknown here: its values are bytes, too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import CorruptBlockError, FormatError
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from midepoch.sources.formats import Block, FileContents, Format, Member, Scanned, records
from midepoch.sources.formats.arrow_ipc import BatchReader, plain_table, walk
from midepoch.sources.formats.records import BadSampleError, Bytes, Candidate, Decode, Int64Array, ShardFile, Values
from midepoch.sources.formats.tokens import COLUMN
from midepoch.sources.manifests import inside, read_manifest
from midepoch.sources.schemas import as_arrow
from midepoch.storage.stores import Entry, Store

_ARROW_MAGIC = b"LDARW01\0"
_ARROW_TAIL = 4 + len(_ARROW_MAGIC)
"""The length of the rows, and the magic number, at the end of a chunk."""
_FRAMED_MAGIC = b"LDFZ01\0\0"
_PREFIX = struct.Struct("<8sHHIII")
_FRAME = struct.Struct("<IIQII")
_TOKENS = "TokensLoader"


class LitDataFormat(Format):
    """Format whose blocks are runs of samples of a chunk. ``block_size``: rows of so many tokens, from chunks of
    tokens.
    """

    def __init__(self, block_size: str = "") -> None:
        self._block_size = int(block_size) if block_size else None

    def members(self, store: Store, manifests: Sequence[Entry]) -> list[Member]:
        return [member for manifest in manifests for member in _members(store, manifest, self._block_size)]

    def scan_member(self, store: Store, member: Member) -> Scanned:
        about, name = member.about, store.name(member.entry.path)
        described = {key: about[key] for key in ("leaves", "spec", "samples", "dim", "bytes", "block")}
        with store.open(member.entry) as file:
            chunk = ShardFile(file, name, about["codec"])
            head = chunk.beginning(4 * (about["samples"] + 2) + BEGINNING)
            framed = head.startswith(_FRAMED_MAGIC)
            if framed != (about["level"] == "batch"):
                raise FormatError(f"{name}: its first bytes do not match its index.json. Copy or download it again.")
            if framed:
                found = _scan_frames(chunk, about, head)
            elif (rows := _arrow_file(chunk, about)) is not None:
                found = _scan_arrow(chunk, about, rows)
                described["arrow"] = found.fingerprint
            else:
                found = _scan_samples(chunk, about, head)
            found.etag = file.etag
            identity = json.dumps(described, sort_keys=True).encode() + head
            found.fingerprint = fingerprint(identity, file.read_at, 0 if about["packed"] else file.size)
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        about, offsets = records.footer_parts(block.footer)
        with store.open(block.entry) as file:
            chunk = ShardFile(file, store.name(block.entry.path), about["codec"])
            if about["layout"] == "arrow":
                rows = _arrow_file(chunk, about)
                if rows is None:
                    raise CorruptBlockError(f"{chunk.name}: it does not end with {_ARROW_MAGIC!r}.")
                return _arrow_rows(rows, block, about["batches"], offsets, columns)
            assert block.end is not None
            decodes = _columns(chunk, about, offsets, block.offset, block.end)
        own = {name: decodes[name] for name in columns if name in decodes}
        return records.decoded(chunk.name, block.offset, own, block.end - block.offset, about["kinds"])


def _scan_samples(chunk: ShardFile, about: dict[str, Any], head: bytes) -> Scanned:
    offsets = records.offsets_in(head, about["samples"], chunk.name)
    if chunk.codec is None and offsets[-1] > chunk.size:
        raise records.damaged_offset(chunk.name, about["samples"] - 1)
    if about["layout"] == "tokens" and about["block"] is not None:
        offsets = _token_blocks(chunk.name, about, int(offsets[0]), int(offsets[-1]))
    return records.scanned(_schema(chunk, about, offsets), about, offsets, records.block_starts(offsets, chunk.codec))


def _token_blocks(name: str, about: dict[str, Any], start: int, end: int) -> Int64Array:
    """Return the offsets of blocks of tokens, whose documents are between two offsets."""
    width = _token_type(name, about).itemsize
    if (about["dim"] or 0) * width != end - start:
        raise FormatError(f"{name}: it does not have the {about['dim']} tokens of its index.json.")
    step = about["block"] * width
    blocks: Int64Array = start + step * np.arange((end - start) // step + 1, dtype=np.int64)
    return blocks


def _token_type(name: str, about: dict[str, Any]) -> np.dtype[Any]:
    kind, _, number = about["leaves"][0].partition(":")
    if len(about["leaves"]) != 1 or not kind.startswith("no_header_"):
        raise FormatError(f"{name}: tokens are expected, found {about['leaves']}. Write them again.")
    return dtype_of(kind, int(number))


def _scan_frames(chunk: ShardFile, about: dict[str, Any], head: bytes) -> Scanned:
    """Scan samples that are compressed in frames. Their offsets are those in the decompressed frames."""
    if len(head) < _PREFIX.size:
        raise FormatError(f"{chunk.name}: it has no complete header. Copy or download it again.")
    _, version, _, samples, _, count = _PREFIX.unpack(head[: _PREFIX.size])
    table = _PREFIX.size + 4 * (samples + 1)
    end = table + _FRAME.size * count
    if version != 1 or samples != about["samples"] or end > chunk.size:
        raise FormatError(f"{chunk.name}: its header does not match its index.json. Copy or download it again.")
    directory = chunk.beginning(end)
    offsets = np.frombuffer(directory, "<u4", samples + 1, _PREFIX.size).astype(np.int64)
    frames = [_FRAME.unpack_from(directory, table + _FRAME.size * i) for i in range(count)]
    sample = 0
    for first, size, at, packed, length in frames:
        right = first == sample and size > 0 and at >= end and at + packed <= chunk.size
        if not right or first + size >= len(offsets) or length != offsets[first + size] - offsets[first]:
            raise FormatError(f"{chunk.name}: the frame of sample {sample} is damaged. Copy or download it again.")
        sample, end = first + size, at + packed
    if sample != samples or (np.diff(offsets) < 0).any():
        raise records.damaged_offset(chunk.name, sample)
    groups = records.block_starts(offsets[[frame[0] for frame in frames] + [samples]], None)
    about = {**about, "layout": "framed", "frames": frames}
    return records.scanned(_schema(chunk, about, offsets), about, offsets, [frames[group][0] for group in groups])


def _schema(chunk: ShardFile, about: dict[str, Any], offsets: Int64Array) -> pa.Schema:
    """Return the types of the first sample."""
    rows = min(1, len(offsets) - 1)
    return records.decoded(chunk.name, 0, _columns(chunk, about, offsets, 0, rows), rows).schema


def _read_samples(chunk: ShardFile, about: dict[str, Any], offsets: Int64Array, first: int, stop: int) -> Bytes:
    """Return the bytes of some samples."""
    if first == stop:
        return np.empty(0, np.uint8)
    if about["layout"] != "framed":
        return chunk.read(int(offsets[first]), int(offsets[stop]))
    frames = [frame for frame in about["frames"] if frame[0] < stop and frame[0] + frame[1] > first]
    begin, end = frames[0][2], frames[-1][2] + frames[-1][3]
    data, parts = memoryview(chunk.file.read_at(end - begin, begin)), []
    for number, _, at, size, length in frames:
        try:
            parts.append(pa.decompress(data[at - begin : at - begin + size], length, "zstd"))
            if len(parts[-1]) != length:
                raise OSError(f"it has {len(parts[-1])} bytes, expected {length}")
        except (OSError, pa.ArrowException) as problem:
            text = f"{chunk.name}: the frame of sample {number} cannot be decompressed: {problem}."
            raise CorruptBlockError(text) from None
    base = int(offsets[frames[0][0]])
    return np.frombuffer(b"".join(parts), np.uint8)[int(offsets[first]) - base : int(offsets[stop]) - base]


def _columns(
    chunk: ShardFile, about: dict[str, Any], offsets: Int64Array, first: int, stop: int
) -> dict[str, Callable[[], pa.Array]]:
    """Return functions that decode the columns of some samples."""
    encodings = [leaf_encoding(text) for text in about["leaves"]]
    data, offsets = _read_samples(chunk, about, offsets, first, stop), offsets[first : stop + 1] - offsets[first]
    if about["layout"] == "tokens":
        values, block = Values(data, offsets[:-1], np.diff(offsets)), about["block"]
        if block is None:
            return {COLUMN: partial(encodings[0], values)}
        return {COLUMN: partial(records.fixed_arrays, values, _token_type(chunk.name, about), (block,))}
    tree = parsed_tree(about["spec"], len(encodings), chunk.name).columns()
    if about["level"] == "sample":
        data, offsets = _decompressed(chunk.name, data, offsets, first)
    with records.naming(chunk.name, first):
        leaves = records.columns_of(data, offsets, [None] * len(encodings))
    decodes = [partial(encoding, values) for encoding, values in zip(encodings, leaves, strict=True)]
    return {column: partial(node.array, decodes, len(offsets) - 1) for column, node in tree.items()}


def _decompressed(name: str, data: Bytes, offsets: Int64Array, first: int) -> tuple[Bytes, Int64Array]:
    """Return samples that are compressed one by one."""
    parts = []
    for number in range(len(offsets) - 1):
        frame = data[int(offsets[number]) : int(offsets[number + 1])]
        try:
            parts.append(pa.CompressedInputStream(pa.BufferReader(frame), "zstd").read())
        except OSError as problem:
            text = f"{name}: sample {first + number} cannot be decompressed: {problem}."
            raise CorruptBlockError(text) from None
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return np.frombuffer(b"".join(parts), np.uint8), ends


def _arrow_file(chunk: ShardFile, about: dict[str, Any]) -> FileContents | None:
    """Return the Arrow file before the last 12 bytes of a chunk, None if there is none."""
    if chunk.codec is not None:
        if not about["arrow"]:  # it need not be decompressed
            return None
        chunk.beginning()
    if chunk.size <= _ARROW_TAIL:
        return None
    tail = chunk.read(chunk.size - _ARROW_TAIL, chunk.size).tobytes()
    if not tail.endswith(_ARROW_MAGIC):
        return None
    length = int.from_bytes(tail[:4], "little")
    start = chunk.size - _ARROW_TAIL - length
    if start < 0:
        raise FormatError(f"{chunk.name}: the length of its rows is damaged. Copy or download it again.")

    def read(size: int, at: int) -> bytes:
        stop = min(at + size, length)
        return chunk.read(start + at, start + stop).tobytes() if stop > at else b""

    return FileContents(read, length)


def _scan_arrow(chunk: ShardFile, about: dict[str, Any], rows: FileContents) -> Scanned:
    """Scan the Arrow file in a chunk. Blocks are runs of its record batches, each of which is one range."""
    found = walk(chunk.name, *rows, skip_damage=False)
    if sum(found.rows) != about["samples"]:
        raise FormatError(
            f"{chunk.name}: it has {sum(found.rows)} rows, its index.json says {about['samples']}. Copy or download it "
            "again."
        )
    found.decoded_bytes = float(rows.size)
    ends = np.array([*found.offsets, rows.size], np.int64)
    numbers = [0, *np.cumsum(found.rows).tolist()]
    firsts = [numbers[batch] for batch in records.block_starts(ends, chunk.codec)]
    found.offsets, found.rows, found.stop = firsts, np.diff([*firsts, numbers[-1]]).tolist(), numbers[-1]
    found.footer = records.packed_footer({**about, "layout": "arrow", "batches": numbers}, ends)
    return found


def _arrow_rows(
    rows: FileContents, block: Block, batches: list[int], ends: Int64Array, columns: Sequence[str]
) -> pa.Table:
    """Return columns of a block. ``batches``: the first row of each record batch, ``ends``: its first byte."""
    first, stop = batches.index(block.offset), batches.index(block.end or 0)
    begin, end = int(ends[first]), int(ends[stop])
    data: bytes = rows.read(end - begin, begin)

    def read(size: int, at: int) -> bytes:
        if begin <= at and at + size <= end:
            return data[at - begin : at - begin + size]
        outside: bytes = rows.read(size, at)
        return outside

    reader = BatchReader(read, rows.size)
    read_batches = (reader.read(int(ends[i]), int(ends[i + 1]), block.dictionaries) for i in range(first, stop))
    return pa.concat_tables([plain_table(batch, columns) for batch in read_batches])


def _members(store: Store, manifest: Entry, block_size: int | None) -> list[Member]:
    contents, name = read_manifest(store, manifest), store.name(manifest.path)
    config, chunks = contents.get("config"), contents["chunks"]
    if not isinstance(config, dict):
        raise FormatError(f"{name}: it has no 'config'. Copy or download it again.")
    if wrong := [number for number, chunk in enumerate(chunks) if not isinstance(chunk, dict)]:
        text = f"{name}: the entry of chunk {wrong[0]} is not a dict: {chunks[wrong[0]]!r:.60}. Write it again."
        raise FormatError(text)
    common = _common(name, config, chunks, block_size)
    codec = str(config.get("compression") or "") or None

    def describe(chunk: dict[str, Any]) -> tuple[dict[str, Any], list[list[Candidate]]]:
        filename, dim, size = chunk["filename"], chunk["dim"], int(chunk["chunk_bytes"])
        packed = codec is not None and f".{codec}." in str(filename)
        about = {"samples": int(chunk["chunk_size"]), "bytes": size, "dim": None if dim is None else int(dim)}
        plain = filename.replace(f".{codec}", "") if packed else filename
        files = [Candidate(inside(store, manifest, plain), size, None)]
        if codec is not None and packed:
            files.append(Candidate(inside(store, manifest, filename), None, codec.partition(":")[0]))
        return {**common, **about, "packed": packed}, [files]

    return records.shard_members(store, manifest, "chunk", chunks, describe, padded=True)


def _common(name: str, config: dict[str, Any], chunks: Sequence[Any], block_size: int | None) -> dict[str, Any]:
    """Return what is true for all chunks. Raise FormatError for data that cannot be read."""
    if config.get("encryption"):
        raise FormatError(f"{name}: its chunks are encrypted. Decrypt them: write them again without encryption.")
    loader = config.get("item_loader")
    if loader not in (None, "PyTreeLoader", _TOKENS):
        raise FormatError(f"{name}: chunks of {loader} cannot be read. Write them with PyTreeLoader or {_TOKENS}.")
    leaves, spec = config.get("data_format"), config.get("data_spec")
    if not isinstance(leaves, list) or not isinstance(spec, str):
        raise FormatError(f"{name}: its config has no data_format and data_spec. Write the index again.")
    tokens = loader == _TOKENS or (loader is None and all(chunk.get("dim") for chunk in chunks))
    if block_size is not None and not tokens:
        raise FormatError(f"{name}: its chunks have samples, not the tokens of {_TOKENS}. Use midepoch.from_files.")
    return {
        "leaves": leaves,
        "spec": spec,
        "level": config.get("compression_level") or "chunk",
        "arrow": config.get("types") is not None,
        "layout": "tokens" if tokens else "samples",
        "block": block_size,
    }


SINGLE = "item"


@dataclass(frozen=True)
class Tree:
    """A node, and the names of its children. A leaf has neither, and the number of its encoding."""

    names: tuple[str, ...] = ()
    children: tuple[Tree, ...] = ()
    leaf: int = -1
    is_list: bool = False

    def columns(self) -> dict[str, Tree]:
        """Return the outermost children by name."""
        return {SINGLE: self} if self.leaf >= 0 else dict(zip(self.names, self.children, strict=True))

    def array(self, leaves: Sequence[Callable[[], pa.Array]], rows: int) -> pa.Array:
        """Return the array of a column. ``leaves`` return the arrays of all leaves."""
        if self.leaf >= 0:
            return leaves[self.leaf]()
        if not self.children:
            empty: Any = [] if self.is_list else {}
            return pa.array([empty] * rows, pa.list_(pa.null()) if self.is_list else pa.struct([]))
        parts = [child.array(leaves, rows) for child in self.children]
        if self.is_list and len({part.type for part in parts}) == 1:
            places = np.arange(rows * len(parts)).reshape(len(parts), rows).T.reshape(-1)
            values = pa.concat_arrays(parts).take(as_arrow(places))
            return pa.FixedSizeListArray.from_arrays(values, len(parts))
        return pa.StructArray.from_arrays(parts, names=list(self.names))


def parsed_tree(text: str, leaves: int, name: str) -> Tree:
    """Return the tree of a ``data_spec``. Raise FormatError if it does not have this number of leaves."""
    try:
        return _parsed(text, leaves)
    except (ValueError, TypeError, KeyError) as problem:
        raise FormatError(f"{name}: its data_spec cannot be read: {problem}. Write the index again.") from None


@lru_cache(maxsize=64)
def _parsed(text: str, leaves: int) -> Tree:
    _protocol, node = json.loads(text)
    tree, count = _node(node, 0)
    if not tree.columns() or count != leaves:
        raise ValueError(f"it has {count} leaves, data_format has {leaves}")
    return tree


def _node(node: dict[str, Any], leaf: int) -> tuple[Tree, int]:
    if node["type"] is None:
        return Tree(leaf=leaf), leaf + 1
    children = []
    for child in node["children_spec"]:
        tree, leaf = _node(child, leaf)
        children.append(tree)
    names = _names(node, len(children))
    is_list = node["type"] in ("builtins.list", "builtins.tuple", "collections.deque")
    return Tree(names, tuple(children), is_list=is_list), leaf


def _names(node: dict[str, Any], count: int) -> tuple[str, ...]:
    """Return the keys of a dict, and numbers for other nodes."""
    context: Any = node["context"]
    if isinstance(context, str) and node["type"].lower().endswith("dict"):
        context = json.loads(context)
    if isinstance(context, dict):  # of a defaultdict
        context = context.get("dict_context")
    keys: Sequence[Any] = context if isinstance(context, list) and len(context) == count else range(count)
    return tuple(map(str, keys))


_NUMPY = (
    "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?",
)  # fmt: skip
_TORCH = (
    "f4", "f4", "f8", "f8", "c8", "c8", "c16", "c16", "f2", "f2", "", "u1", "i1", "i2", "i2", "i4", "i4", "i8", "i8",
    "?", "u2",
)  # fmt: skip
"""Dtypes by their numbers in LitData. Number 10 of torch is bfloat16, which it cannot write."""


@lru_cache(maxsize=256)
def leaf_encoding(text: str) -> Decode:
    """Return the encoding of a leaf, by its entry in ``data_format``."""
    name, _, argument = text.partition(":")
    if name in ("no_header_numpy", "no_header_tensor"):
        return partial(_flat, dtype=dtype_of(name, int(argument)))
    return _LEAVES.get(name, records.BINARY)


def dtype_of(name: str, number: int) -> np.dtype[Any]:
    """Return a dtype by its number. Raise BadSampleError for an unknown one."""
    known = _TORCH if name.endswith("tensor") else _NUMPY
    if not 0 <= number < len(known) or not known[number]:
        raise BadSampleError(0, f"its array has the unknown dtype {number}")
    return np.dtype(known[number])


def _flat(values: Values, dtype: np.dtype[Any]) -> pa.Array:
    """Return arrays of one dimension, which are stored without a header."""
    records.first_true(
        values.sizes % dtype.itemsize != 0, lambda i: f"an array of {dtype} does not have {values.sizes[i]} bytes"
    )
    return records.arrays(values, dtype, (values.sizes // dtype.itemsize)[:, None])


def _with_header(values: Values, name: str, order: str) -> pa.Array:
    """Return arrays after a header of uint32: their dtype, the number of their dimensions, and the dimensions."""
    if not len(values):
        return pa.nulls(0)
    records.first_true(values.sizes < 8, lambda _: "its array has no header")
    heads = records.integers(values.data, values.starts, 2, f"{order}u4")
    records.first_true((heads != heads[0]).any(axis=1), lambda _: "its array has another dtype or number of dimensions")
    number, axes = heads[0].tolist()
    records.first_true(values.sizes < 8 + 4 * axes, lambda _: f"its array has no room for {axes} dimensions")
    shapes = records.integers(values.data, values.starts + 8, axes, f"{order}u4")
    return records.arrays(values.without(8 + 4 * axes), dtype_of(name, number), shapes)


def _nested(values: Values) -> pa.Array:
    texts = []
    for number in range(len(values)):
        value = values.value(number)
        try:
            texts.append(json.dumps(_nested_value(value), ensure_ascii=False))
        except (ValueError, RecursionError) as problem:
            raise BadSampleError(number, f"its nested value cannot be read: {problem}") from None
    return pa.array(texts, pa.string())


def _nested_value(raw: bytes) -> Any:
    """Return a nested value: JSON, or the compact form that begins with a tag."""
    return json.loads(raw) if not raw or raw[0] > 32 else _Tagged(raw).value()


class _Tagged:
    """Reader of values in the compact form: each has a tag, and most a count."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def value(self) -> Any:
        tag = self._number("<B")
        if tag > 6:
            return self._scalar(tag)
        count = self._number("<I")
        if tag == 0:
            return json.loads(self._bytes(count))
        if tag == 1:
            return [self._text() for _ in self._times(count)]
        if tag in (2, 3):
            return np.frombuffer(self._bytes(8 * count), "<i8" if tag == 2 else "<f8").tolist()
        if tag == 4:
            return [bool(byte) for byte in self._bytes(count)]
        if tag == 5:
            return {self._text(): self.value() for _ in self._times(count)}
        keys = [self._text() for _ in self._times(self._number("<I"))]  # dicts with the same keys
        return [{key: self._scalar(_OF_DICTS.get(self._number("<B"), -1)) for key in keys} for _ in self._times(count)]

    def _scalar(self, tag: int) -> Any:
        if tag == 7:
            return self._text()
        if tag in (8, 9):
            return self._number("<q" if tag == 8 else "<d")
        if tag == 10:
            return bool(self._number("<B"))
        if tag == 11:
            return None
        raise ValueError(f"the tag {tag} is unknown")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _text(self) -> str:
        return self._bytes(self._number("<I")).decode()

    def _bytes(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._raw):
            raise ValueError("it is truncated")
        return self._raw[start : self._at]

    def _times(self, count: int) -> range:
        """Return a range for a count that may be damaged: no value takes less than a byte."""
        if count > len(self._raw):
            raise ValueError("it is truncated")
        return range(count)


_OF_DICTS = {0x10: 11, 0x11: 7, 0x12: 8, 0x13: 9, 0x14: 10}
"""Tags of scalars in lists of dicts, as tags of values."""


_LEAVES: dict[str, Decode] = {
    "str": records.TEXT,
    "text": records.TEXT,
    "bool": partial(records.scalars, dtype=np.dtype("?")),
    "int": partial(records.scalars, dtype=np.dtype("i8")),
    "float": partial(records.scalars, dtype=np.dtype("f8")),
    "numpy": partial(_with_header, name="numpy", order="<"),
    "tensor": partial(_with_header, name="tensor", order=">"),
    "pil": records.images,
    "jpeg_array": partial(records.image_lists, skipped=0),
    "json": _nested,
}
