"""LitData: chunks of samples that ``optimize`` wrote. ``index.json`` names and describes them.

A chunk has the number of its samples, the offset of each (both uint32), and the samples. It may be compressed as a
whole, in frames of samples, or sample by sample. Rows of plain values are stored as an Arrow file at the end of a
chunk. Chunks of tokens (``TokensLoader``) are one stream of numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataNotFoundError, FormatError
from midepoch.sources.arrow_ipc import BatchReader, walk
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from midepoch.sources.formats.base import Block, Member, NoStatistics, Scanned
from midepoch.sources.formats.litdata_leaves import Tree, dtype_of, leaf_encoding, parsed_tree
from midepoch.sources.formats.mds import Encoding
from midepoch.sources.formats.records import (
    Bytes,
    Int64Array,
    ShardFile,
    Values,
    beginning,
    check_kind,
    columns_of,
    contents_of,
    cut,
    damaged_offset,
    fixed_arrays,
    footer_parts,
    naming,
    offsets_in,
)
from midepoch.sources.formats.records import packed_footer as packed
from midepoch.sources.formats.tokens import COLUMN
from midepoch.sources.manifests import files_beside, inside, read_manifest
from midepoch.storage.open_files import Entry
from midepoch.storage.stores import OpenFile, Store

ARROW_MAGIC = b"LDARW01\0"
FRAMED_MAGIC = b"LDFZ01\0\0"
_PREFIX = struct.Struct("<8sHHIII")
_FRAME = struct.Struct("<IIQII")
_COMPRESSED_BLOCK = 256 << 20
_ALL = 1 << 62


class LitdataChunk:
    """An open chunk: samples with their offsets, or tokens. The whole file may be compressed."""

    def __init__(self, file: OpenFile, about: dict[str, Any], name: str) -> None:
        self.file, self.about, self.name = file, about, name
        size = file.size if about["codec"] is None else _ALL
        self._shard = ShardFile(Entry("", file.size, 0), about["codec"], size)

    @staticmethod
    def of_footer(file: OpenFile, footer: bytes, name: str) -> tuple[LitdataChunk, Int64Array]:
        about, offsets = footer_parts(footer)
        return LitdataChunk(file, about, name), offsets

    @cached_property
    def whole(self) -> bytes:
        """The contents of a compressed chunk."""
        return beginning(self.file, self._shard, _ALL, self.name)

    def read(self, begin: int, end: int) -> Bytes:
        """Return a range of the contents."""
        if "whole" in self.__dict__:
            return np.frombuffer(self.whole[begin:end], np.uint8)
        return contents_of(self.file, self._shard, begin, end, self.name)

    def read_beginning(self, size: int) -> bytes:
        return beginning(self.file, self._shard, size, self.name)

    @property
    def size(self) -> int:
        """Size of the contents. A compressed chunk is decompressed."""
        return self.file.size if self._shard.codec is None else len(self.whole)

    def ends_with(self, magic: bytes) -> bool:
        """Return True if the chunk ends with these bytes. Without Arrow rows in a compressed chunk, it is not read."""
        if self._shard.codec is not None and not self.about["arrow"]:
            return False
        return self.size > len(magic) and self.read(self.size - len(magic), self.size).tobytes() == magic

    def scanned(self, head: bytes) -> Scanned:
        """Find the blocks, from the beginning of the chunk."""
        about, samples = self.about, self.about["samples"]
        offsets = offsets_in(head, samples, self.name)
        if self._shard.codec is None and offsets[-1] > self.file.size:
            raise damaged_offset(self.name, samples - 1)
        if about["layout"] == "tokens" and about["block"] is not None:
            offsets = self._token_blocks(int(offsets[0]), int(offsets[-1]))
        return self.described(offsets, cut(offsets, None if self._shard.codec is None else _COMPRESSED_BLOCK))

    def _token_blocks(self, start: int, end: int) -> Int64Array:
        step = self.about["block"] * self._token_type.itemsize
        if (self.about["dim"] or 0) * self._token_type.itemsize != end - start:
            raise FormatError(f"{self.name}: it does not have the {self.about['dim']} tokens of its index.json.")
        blocks: Int64Array = start + step * np.arange((end - start) // step + 1, dtype=np.int64)
        return blocks

    def described(self, offsets: Int64Array, firsts: Sequence[int], **kept: Any) -> Scanned:
        """Return the scan of blocks that begin with these samples."""
        rows = len(offsets) - 1
        about = {key: self.about[key] for key in ("leaves", "spec", "level", "codec", "layout", "block", "arrow")}
        schema = self._schema(offsets)
        about = {**about, "samples": rows, "kinds": {each.name: str(each.type) for each in schema}, **kept}
        found = Scanned(schema, decoded_bytes=float(offsets[-1] - offsets[0]))
        found.offsets = list(firsts)
        found.rows = np.diff([*firsts, rows]).tolist() if firsts else []
        found.stop = rows
        found.footer = packed(about, offsets)
        return found

    def _schema(self, offsets: Int64Array) -> pa.Schema:
        """Return the types: those of the first sample where the manifest does not determine them."""
        if len(offsets) < 2 and self.about["layout"] == "tokens":
            return pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(self._token_type), self.about["block"] or -1))])
        if len(offsets) < 2:
            return pa.schema([(name, pa.null()) for name in self.names])
        first = self.samples(0, 1, offsets)
        return self._table(first, offsets[:2] - offsets[0], 0, self.names).schema

    def samples(self, first: int, stop: int, offsets: Int64Array) -> Bytes:
        """Return the bytes of some samples."""
        return self.read(int(offsets[first]), int(offsets[stop]))

    def decoded(self, block: Block, offsets: Int64Array, columns: Sequence[str]) -> pa.Table:
        """Return these columns of a block."""
        first, stop = block.offset, self.about["samples"] if block.end is None else block.end
        data, own = self.samples(first, stop, offsets), [name for name in columns if name in self.names]
        table = self._table(data, offsets[first : stop + 1] - offsets[first], first, own)
        for name in own:
            check_kind(self.name, first, name, table.column(name), self.about["kinds"][name])
        return table

    @cached_property
    def _tree(self) -> dict[str, Tree]:
        return parsed_tree(self.about["spec"], len(self.about["leaves"]), self.name).columns()

    @cached_property
    def names(self) -> list[str]:
        return [COLUMN] if self.about["layout"] == "tokens" else list(self._tree)

    @property
    def _token_type(self) -> np.dtype[Any]:
        name, _, number = self.about["leaves"][0].partition(":")
        if len(self.about["leaves"]) != 1 or not name.startswith("no_header_"):
            raise FormatError(f"{self.name}: tokens are expected, found {self.about['leaves']}. Write them again.")
        return dtype_of(name, int(number))

    def _table(self, data: Bytes, offsets: Int64Array, first: int, columns: Sequence[str]) -> pa.Table:
        if self.about["layout"] == "tokens":
            values = Values(data, offsets[:-1], np.diff(offsets))
            with naming(self.name, first):
                return pa.table({name: self._tokens(values) for name in columns})
        if self.about["level"] == "sample":
            data, offsets = self._decompressed(data, offsets, first)
        with naming(self.name, first):
            leaves = columns_of(data, offsets, [None] * len(self.about["leaves"]))
        encodings = [leaf_encoding(text) for text in self.about["leaves"]]
        arrays, rows = {}, len(offsets) - 1
        for name in columns:
            with naming(self.name, first, name):
                arrays[name] = self._tree[name].array(lambda leaf: encodings[leaf].decode(leaves[leaf]), rows)
        return pa.table(arrays)

    def _tokens(self, values: Values) -> pa.Array:
        encoding: Encoding = leaf_encoding(self.about["leaves"][0])
        block = self.about["block"]
        return encoding.decode(values) if block is None else fixed_arrays(values, self._token_type, (block,))

    def _decompressed(self, data: Bytes, offsets: Int64Array, first: int) -> tuple[Bytes, Int64Array]:
        """Return samples that are compressed one by one."""
        parts = []
        for number in range(len(offsets) - 1):
            frame = data[int(offsets[number]) : int(offsets[number + 1])]
            try:
                parts.append(pa.CompressedInputStream(pa.BufferReader(frame), "zstd").read())
            except OSError as problem:
                text = f"{self.name}: sample {first + number} cannot be decompressed: {problem}."
                raise CorruptBlockError(text) from None
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return np.frombuffer(b"".join(parts), np.uint8), ends


class FramedChunk(LitdataChunk):
    """A chunk whose samples are compressed in frames. Their offsets are those in the decompressed frames."""

    def __init__(self, chunk: LitdataChunk) -> None:
        super().__init__(chunk.file, chunk.about, chunk.name)

    def scanned(self, head: bytes) -> Scanned:
        prefix = head[: _PREFIX.size]
        if len(prefix) < _PREFIX.size:
            raise FormatError(f"{self.name}: it has no complete header. Copy or download it again.")
        _, version, _, samples, _, count = _PREFIX.unpack(prefix)
        table = _PREFIX.size + 4 * (samples + 1)
        end = table + _FRAME.size * count
        if version != 1 or samples != self.about["samples"] or end > self.file.size:
            raise FormatError(f"{self.name}: its header does not match its index.json. Copy or download it again.")
        directory = head if len(head) >= end else self.file.read_at(end, 0)
        offsets = np.frombuffer(directory, "<u4", samples + 1, _PREFIX.size).astype(np.int64)
        frames = [_FRAME.unpack_from(directory, table + _FRAME.size * i) for i in range(count)]
        self._check(offsets, frames, end)
        self.about = {**self.about, "frames": frames}
        groups = cut(offsets[[frame[0] for frame in frames] + [samples]])
        return self.described(offsets, [frames[group][0] for group in groups], frames=frames, layout="framed")

    def _check(self, offsets: Int64Array, frames: Sequence[tuple[int, ...]], end: int) -> None:
        sample = 0
        for first, count, at, size, length in frames:
            right = first == sample and count > 0 and at >= end and at + size <= self.file.size
            if not right or first + count >= len(offsets) or length != offsets[first + count] - offsets[first]:
                raise FormatError(f"{self.name}: the frame of sample {sample} is damaged. Copy or download it again.")
            sample, end = first + count, at + size
        if sample != len(offsets) - 1 or (np.diff(offsets) < 0).any():
            raise damaged_offset(self.name, sample)

    def samples(self, first: int, stop: int, offsets: Int64Array) -> Bytes:
        frames = [frame for frame in self.about["frames"] if frame[0] < stop and frame[0] + frame[1] > first]
        begin, end = frames[0][2], frames[-1][2] + frames[-1][3]
        data, parts = memoryview(self.file.read_at(end - begin, begin)), []
        for number, _, at, size, length in frames:
            try:
                parts.append(pa.decompress(data[at - begin : at - begin + size], length, "zstd"))
                if len(parts[-1]) != length:
                    raise OSError(f"it has {len(parts[-1])} bytes, expected {length}")
            except (OSError, pa.ArrowException) as problem:
                text = f"{self.name}: the frame of sample {number} cannot be decompressed: {problem}."
                raise CorruptBlockError(text) from None
        joined = np.frombuffer(b"".join(parts), np.uint8)
        base = int(offsets[frames[0][0]])
        return joined[int(offsets[first]) - base : int(offsets[stop]) - base]


class ArrowChunk:
    """A chunk whose rows are an Arrow file between its offsets and its last 12 bytes."""

    def __init__(self, chunk: LitdataChunk) -> None:
        self._chunk = chunk
        tail = chunk.read(chunk.size - 12, chunk.size).tobytes()
        self._length = int.from_bytes(tail[:4], "little")
        self._start = chunk.size - 12 - self._length
        if self._start < 0:
            raise FormatError(f"{chunk.name}: the length of its rows is damaged. Copy or download it again.")

    def _read(self, size: int, at: int) -> bytes:
        stop = min(at + size, self._length)
        return self._chunk.read(self._start + at, self._start + stop).tobytes() if stop > at else b""

    def scanned(self) -> Scanned:
        """Find the blocks: runs of record batches."""
        found = walk(self._chunk.name, self._read, self._length, skip_damage=False)
        if sum(found.rows) != self._chunk.about["samples"]:
            raise FormatError(
                f"{self._chunk.name}: it has {sum(found.rows)} rows, its index.json says "
                f"{self._chunk.about['samples']}. Copy or download it again."
            )
        ends = np.array([*found.offsets, self._length], dtype=np.int64)
        numbers = cut(ends, None if self._chunk.about["codec"] is None else _COMPRESSED_BLOCK)
        rows = np.concatenate([[0], np.cumsum(found.rows)])
        scan = Scanned(found.schema, nullable=found.nullable, dictionaries=found.dictionaries)
        scan.offsets, scan.stop = [int(rows[i]) for i in numbers], int(rows[-1])
        scan.rows = np.diff([*scan.offsets, scan.stop]).tolist()
        scan.fingerprint, scan.decoded_bytes = found.fingerprint, float(self._length)
        about = {key: self._chunk.about[key] for key in ("codec", "arrow", "leaves", "spec")}
        scan.footer = packed({**about, "layout": "arrow", "batches": rows.tolist(), "samples": len(found.rows)}, ends)
        return scan

    def decoded(self, block: Block, ends: Int64Array, columns: Sequence[str]) -> pa.Table:
        """Return these columns of a block, which is one range read."""
        rows = self._chunk.about["batches"]
        first = rows.index(block.offset)
        stop = len(rows) - 1 if block.end is None else rows.index(block.end)
        begin, end = int(ends[first]), int(ends[stop])
        data = self._read(end - begin, begin)

        def read(size: int, at: int) -> bytes:
            return data[at - begin : at - begin + size] if begin <= at and at + size <= end else self._read(size, at)

        reader = BatchReader(read, self._length)
        batches = [reader.read(int(ends[i]), int(ends[i + 1]), block.dictionaries) for i in range(first, stop)]
        table = pa.Table.from_batches(batches)
        return table.select([name for name in columns if name in table.schema.names])


_TOKENS = "TokensLoader"


class LitDataFormat(NoStatistics):
    """Format whose blocks are runs of samples of a chunk. ``block_size``: rows of so many tokens, from chunks of
    tokens.
    """

    def __init__(self, block_size: str = "") -> None:
        self._block_size = int(block_size) if block_size else None

    def members(self, store: Store, manifests: Sequence[Entry]) -> list[Member]:
        return [member for manifest in manifests for member in _members(store, manifest, self._block_size)]

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:  # noqa: ARG002
        raise FormatError(f"{store.name(entry.path)}: pass the folder of this chunk, which has its index.json.")

    def scan_member(self, store: Store, member: Member) -> Scanned:
        about, name = member.about, store.name(member.entry.path)
        described = {key: about[key] for key in ("leaves", "spec", "samples", "dim", "bytes", "block")}
        with store.open(member.entry) as file:
            chunk = LitdataChunk(file, about, name)
            head = chunk.read_beginning(4 * (about["samples"] + 2) + BEGINNING)
            framed = head.startswith(FRAMED_MAGIC)
            if framed != (about["level"] == "batch"):
                raise FormatError(f"{name}: its first bytes do not match its index.json. Copy or download it again.")
            if framed:
                found = FramedChunk(chunk).scanned(head)
            elif chunk.ends_with(ARROW_MAGIC):
                found = ArrowChunk(chunk).scanned()
                described["arrow"] = found.fingerprint
            else:
                found = chunk.scanned(head)
            found.etag = file.etag
            identity = json.dumps(described, sort_keys=True).encode() + head
            found.fingerprint = fingerprint(identity, file.read_at, 0 if about["packed"] else file.size)
        return found

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:  # noqa: ARG002
        name = store.name(block.entry.path)
        with store.open(block.entry) as file:
            chunk, offsets = LitdataChunk.of_footer(file, block.footer, name)
            if chunk.about["layout"] == "arrow":
                return ArrowChunk(chunk).decoded(block, offsets, columns)
            data = FramedChunk(chunk) if chunk.about["layout"] == "framed" else chunk
            return data.decoded(block, offsets, columns)


def _members(store: Store, manifest: Entry, block_size: int | None) -> list[Member]:
    contents, name = read_manifest(store, manifest), store.name(manifest.path)
    config, chunks = contents.get("config"), contents["chunks"]
    if not isinstance(config, dict):
        raise FormatError(f"{name}: it has no 'config'. Copy or download it again.")
    if not chunks:
        raise DataNotFoundError(f"{name} names no chunks. Check the program that wrote it.")
    if wrong := [number for number, chunk in enumerate(chunks) if not isinstance(chunk, dict)]:
        text = f"{name}: the entry of chunk {wrong[0]} is not a dict: {chunks[wrong[0]]!r:.60}. Write it again."
        raise FormatError(text)
    common = _common(name, config, chunks, block_size)
    codec = str(config.get("compression") or "") or None
    described, paths = [], []
    for number, chunk in enumerate(chunks):
        try:
            filename, samples, size, dim = chunk["filename"], chunk["chunk_size"], chunk["chunk_bytes"], chunk["dim"]
            about = {**common, "samples": int(samples), "bytes": int(size), "dim": None if dim is None else int(dim)}
        except (KeyError, TypeError, ValueError) as problem:
            text = f"{name}: the entry of chunk {number} is invalid: {problem!r}. Write it again."
            raise FormatError(text) from None
        packed = codec is not None and f".{codec}." in str(filename)
        plain = filename.replace(f".{codec}", "") if packed else filename
        files: list[tuple[str, str | None]] = [(inside(store, manifest, plain), None)]
        if packed and codec is not None:
            files.append((inside(store, manifest, filename), codec.partition(":")[0]))
        about["packed"] = packed
        described.append((about, files))
        paths += [path for path, _ in files]
    present = files_beside(store, manifest, paths)
    members = []
    for about, files in described:
        there = [(present[path], packing) for path, packing in files if path in present]
        if not there:
            names = " and ".join(store.name(path) for path, _ in files)
            raise DataNotFoundError(f"{names} does not exist, but {name} names it. Copy or download the chunk.")
        entry, packing = there[0]
        if packing is None and entry.size < about["bytes"]:
            raise FormatError(
                f"{store.name(entry.path)} has {entry.size} bytes, {name} says {about['bytes']}: it is truncated. Copy "
                "or download it again."
            )
        members.append(Member(entry, {**about, "codec": packing}))
    return members


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
