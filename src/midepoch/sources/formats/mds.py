"""MDS: the shards of MosaicML Streaming, plain or compressed. ``index.json`` names them. Shards of text: mds_text.py.

A shard has the number of its samples, the offset of each (both uint32), its configuration, and the samples. A block is
a run of samples of about 8 MB, which is one range read; of a compressed shard, which can only be read as a whole, it is
the shard. The offsets are kept with the index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.fingerprints import BEGINNING, fingerprint
from midepoch.sources.formats import mds_text
from midepoch.sources.formats.base import Block, Member, NoStatistics, Scanned
from midepoch.sources.formats.mds_encodings import Encoding, encoding_of
from midepoch.sources.formats.records import Int64Array, Values, check_kind, columns_of, cut, naming
from midepoch.sources.formats.shards import (
    ShardFile,
    beginning,
    contents_of,
    damaged_offset,
    footer_parts,
    offsets_in,
    packed_footer,
)
from midepoch.sources.manifests import files_beside, inside, read_manifest
from midepoch.sources.stores import Entry, Store

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
            schema = _schema(name, about, offsets, head) if text is None else mds_text.schema_of(about)
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
                return mds_text.table_of(data, offsets[first : stop + 1] - begin, about, own)
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
    if form not in ("mds", *mds_text.FORMATS):
        raise ValueError(f"the format {form!r} is not one of mds, {', '.join(mds_text.FORMATS)}")
    packed = shard.get("zip_data")
    about = {"samples": int(shard["samples"]), "bytes": int(raw["bytes"]), "hashes": raw.get("hashes") or {}}
    about["packed"] = int(packed["bytes"]) if packed else None
    files = _candidates(store, manifest, shard, "data")
    if form != "mds":
        about |= {**mds_text.described(shard), "meta": int(shard["raw_meta"]["bytes"])}
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
