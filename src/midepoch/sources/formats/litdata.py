"""LitData: chunks of samples that ``optimize`` wrote. ``index.json`` names and describes them.

A chunk has the number of its samples, the offset of each (both uint32), and the samples. It may be compressed as a
whole, in frames of samples, or sample by sample. Rows of plain values are stored as an Arrow file at the end of a
chunk. Chunks of tokens (``TokensLoader``) are one stream of numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import CorruptBlockError, FormatError
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from midepoch.sources.formats import Block, FileContents, Format, Member, Scanned
from midepoch.sources.formats.arrow_ipc import decoded_batch, walk
from midepoch.sources.formats.litdata_leaves import dtype_of, leaf_encoding, parsed_tree
from midepoch.sources.formats.records import (
    Bytes,
    Candidate,
    Int64Array,
    ShardFile,
    Values,
    block_starts,
    columns_of,
    damaged_offset,
    decoded,
    fixed_arrays,
    footer_parts,
    naming,
    offsets_in,
    packed_footer,
    scanned,
    shard_members,
)
from midepoch.sources.formats.tokens import COLUMN
from midepoch.sources.manifests import inside, read_manifest
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
        about, offsets = footer_parts(block.footer)
        with store.open(block.entry) as file:
            chunk = ShardFile(file, store.name(block.entry.path), about["codec"])
            if about["layout"] == "arrow":
                rows = _arrow_file(chunk, about)
                if rows is None:
                    raise CorruptBlockError(f"{chunk.name}: it does not end with {_ARROW_MAGIC!r}.")
                return decoded_batch(rows, block, columns)
            assert block.end is not None
            decodes = _columns(chunk, about, offsets, block.offset, block.end)
        own = {name: decodes[name] for name in columns if name in decodes}
        return decoded(chunk.name, block.offset, own, block.end - block.offset, about["kinds"])


def _scan_samples(chunk: ShardFile, about: dict[str, Any], head: bytes) -> Scanned:
    offsets = offsets_in(head, about["samples"], chunk.name)
    if chunk.codec is None and offsets[-1] > chunk.size:
        raise damaged_offset(chunk.name, about["samples"] - 1)
    if about["layout"] == "tokens" and about["block"] is not None:
        offsets = _token_blocks(chunk.name, about, int(offsets[0]), int(offsets[-1]))
    return scanned(_schema(chunk, about, offsets), about, offsets, block_starts(offsets, chunk.codec))


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
        raise damaged_offset(chunk.name, sample)
    groups = block_starts(offsets[[frame[0] for frame in frames] + [samples]], None)
    about = {**about, "layout": "framed", "frames": frames}
    return scanned(_schema(chunk, about, offsets), about, offsets, [frames[group][0] for group in groups])


def _schema(chunk: ShardFile, about: dict[str, Any], offsets: Int64Array) -> pa.Schema:
    """Return the types of the first sample."""
    rows = min(1, len(offsets) - 1)
    return decoded(chunk.name, 0, _columns(chunk, about, offsets, 0, rows), rows).schema


def _read_samples(chunk: ShardFile, about: dict[str, Any], offsets: Int64Array, first: int, stop: int) -> Bytes:
    """Return the bytes of some samples."""
    if about["layout"] != "framed" or first == stop:
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
        return {COLUMN: partial(fixed_arrays, values, _token_type(chunk.name, about), (block,))}
    tree = parsed_tree(about["spec"], len(encodings), chunk.name).columns()
    if about["level"] == "sample":
        data, offsets = _decompressed(chunk.name, data, offsets, first)
    with naming(chunk.name, first):
        leaves = columns_of(data, offsets, [None] * len(encodings))
    arrays = [partial(encoding, values) for encoding, values in zip(encodings, leaves, strict=True)]
    return {column: partial(node.array, arrays, len(offsets) - 1) for column, node in tree.items()}


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
    """Scan the Arrow file in a chunk. Blocks are its record batches."""
    found = walk(chunk.name, *rows, skip_damage=False)
    if sum(found.rows) != about["samples"]:
        raise FormatError(
            f"{chunk.name}: it has {sum(found.rows)} rows, its index.json says {about['samples']}. Copy or download it "
            "again."
        )
    found.decoded_bytes = float(rows.size)
    found.footer = packed_footer({**about, "layout": "arrow"}, np.empty(0, np.int64))
    return found


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

    return shard_members(store, manifest, "chunk", chunks, describe, padded=True)


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
