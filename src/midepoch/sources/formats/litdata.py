"""LitData: chunks of samples that ``optimize`` wrote. ``index.json`` names and describes them.

A chunk has the number of its samples, the offset of each (both uint32), and the samples. It may be compressed as a
whole, in frames of samples, or sample by sample. Rows of plain values are stored as an Arrow file at the end of a
chunk. Chunks of tokens (``TokensLoader``) are one stream of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from midepoch.sources.formats.base import Block, Member, NoStatistics, Scanned
from midepoch.sources.formats.litdata_chunks import ARROW_MAGIC, FRAMED_MAGIC, ArrowChunk, FramedChunk, LitdataChunk
from midepoch.sources.manifests import files_beside, inside, read_manifest
from midepoch.sources.stores import Entry, Store

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
