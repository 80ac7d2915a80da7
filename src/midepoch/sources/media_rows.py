"""Rows of images, sounds and videos: their labels or metadata, and their groups. Few of these files are opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.fingerprints import fingerprint, spaced
from midepoch.sources.folders import Listing, is_metadata
from midepoch.sources.formats import Scanned
from midepoch.sources.formats.media import FILE, LOCATED, SKIP
from midepoch.sources.stores import Entry, Store

BLOCK_BYTES = 4 << 20
BLOCK_FILES = 128
"""Limits of a block. A window of 64 blocks, the most that is shuffled together, is then at most 256 MB."""
_LARGEST = (1 << 31) - 1
_FEATURES = {"image": "Image", "audio": "Audio", "video": "Video"}


@dataclass(frozen=True)
class MediaTable:
    """All rows. Files are structs of type ``LOCATED``. ``sizes``: the bytes of the files of each row.

    ``digest`` identifies the rows by their files (``hash_files``), their labels and their metadata.
    """

    table: pa.Table
    sizes: npt.NDArray[np.int64]
    digest: str
    features: dict[str, Any]


def feature_of(kind: str) -> dict[str, str]:
    """Return the Hugging Face feature of a file, as JSON."""
    return {"_type": _FEATURES[kind]}


def scan_media(store: Store, listing: Listing, kind: str, *, skip_damage: bool) -> Scanned:
    """Return the blocks of a listing: a row for each row of its metadata, otherwise for each file."""
    described = [entry for entry in listing.files if is_metadata(entry.path)]
    if described:
        from midepoch.sources.media_metadata import described_rows

        rows = described_rows(store, listing, described, kind, skip_damage=skip_damage)
    else:
        rows = _labelled(store, listing, kind, skip_damage)
    if len(rows.sizes) and rows.sizes.max() > _LARGEST:
        row = int(rows.sizes.argmax())
        raise FormatError(
            f"{store.name(listing.root)}: the files of row {row} have {rows.sizes[row]} bytes, and a row may have "
            "2 GiB. Remove it."
        )
    return _grouped(rows, skip_damage)


def _labelled(store: Store, listing: Listing, kind: str, skip_damage: bool) -> MediaTable:
    """Return a row for each file, labelled by its folder if there are several folders, all of the same depth."""
    folders = [entry.path.rpartition("/")[0].rpartition("/")[2] for entry in listing.files]
    names = sorted(set(folders)) if len({name.count("/") for name in listing.names}) == 1 else []
    columns = {kind: located(listing.files, listing.names)}
    features: dict[str, Any] = {kind: feature_of(kind)}
    if len(names) > 1:
        numbers = {name: i for i, name in enumerate(names)}
        columns["label"] = pa.array([numbers[folder] for folder in folders], pa.int64())
        features["label"] = {"names": names, "_type": "ClassLabel"}
    sizes = np.array([entry.size for entry in listing.files], np.int64)
    digest = hashlib.blake2b(json.dumps(features).encode(), digest_size=16)
    hash_files(digest, store, listing.files, listing.names, skip_damage)
    return MediaTable(pa.table(columns), sizes, digest.hexdigest(), features)


def located(files: Sequence[Entry], names: Sequence[str]) -> pa.StructArray:
    """Return files with their names as an array."""
    fields = [[entry.path for entry in files], names, [entry.size for entry in files]]
    fields.append([entry.mtime_ns for entry in files])
    arrays = [pa.array(values, LOCATED.field(i).type) for i, values in enumerate(fields)]
    return pa.StructArray.from_arrays(arrays, fields=list(LOCATED))


def hash_files(digest: Any, store: Store, files: Sequence[Entry], names: Sequence[str], skip_damage: bool) -> None:
    """Add the names and sizes of files to a hash, and the fingerprints of some of them."""
    rows = [f"{name}\0{entry.size}\0" for name, entry in zip(names, files, strict=True)]
    digest.update("".join(rows).encode())
    for entry in [files[number] for number in spaced(len(files) - 1)] if files else ():
        digest.update(store.persist(entry.path, "indexed", partial(_sampled, store, entry, skip_damage)).encode())


def _sampled(store: Store, entry: Entry, skip_damage: bool) -> str:
    try:
        with store.open(entry) as file:
            return fingerprint(b"", file.read_at, file.size)
    except PermissionError:
        if not skip_damage:
            raise
        return ""


def _grouped(rows: MediaTable, skip_damage: bool) -> Scanned:
    """Divide rows into blocks. Each footer is a table of the rows of its block."""
    bounds = _bounds(rows.sizes)
    marked = rows.table.combine_chunks().replace_schema_metadata({SKIP: b""} if skip_damage else None)
    footers = []
    for start, stop in pairwise(bounds):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, marked.schema) as writer:
            writer.write_table(marked.slice(start, stop - start))
        footers.append(bytes(sink.getvalue()))
    metadata = {"huggingface": json.dumps({"info": {"features": rows.features}})}
    schema = pa.schema([field.with_type(_delivered(field.type)) for field in rows.table.schema], metadata=metadata)
    return Scanned(
        schema,
        offsets=bounds[:-1],
        rows=np.diff(bounds).tolist(),
        nullable=_nullable(rows.table, skip_damage),
        fingerprint=rows.digest,
        footers=footers,
        decoded_bytes=float(rows.sizes.sum()),
        stop=bounds[-1],
    )


def _bounds(sizes: npt.NDArray[np.int64]) -> list[int]:
    """Return the first row of each block, and the number of rows."""
    ends = np.cumsum(sizes)
    bounds = [0]
    while (start := bounds[-1]) < len(sizes):
        full = int(np.searchsorted(ends, ends[start] - sizes[start] + BLOCK_BYTES, side="right"))
        bounds.append(min(max(full, start + 1), start + BLOCK_FILES, len(sizes)))
    return bounds


def _delivered(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_delivered(kind.value_type))
    return FILE if kind == LOCATED else kind


def _nullable(table: pa.Table, skip_damage: bool) -> set[tuple[str, ...]]:
    """Return the paths with a null. With ``skip_damage``, the bytes of a file that cannot be read are null."""
    from midepoch.sources.formats.inferred import nulls

    found = {path for path in nulls(table) if not _is_located(table.schema.field(path[0]).type) or len(path) == 1}
    if skip_damage:
        found |= {(field.name, "bytes") for field in table.schema if field.type == LOCATED}
    return found


def _is_located(kind: pa.DataType) -> bool:
    return bool(kind == LOCATED or (pa.types.is_list(kind) and kind.value_type == LOCATED))
