"""Tables of the members of a tar archive, one for each block, which together are the footer of the file in the index.

Each table is compressed separately: to read a block, only its own table is decompressed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.sources.formats.tar_headers import BLOCK

Int64Array = npt.NDArray[np.int64]
_SPARSE = 1 << 20
"""Added to the number of the column of a sparse member."""


@dataclass
class Sample:
    """A sample: its key, and for each member the number of its column, its offset and its size."""

    key: bytes
    columns: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sparse: list[bool] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    """Descriptions of the members for the fingerprint."""
    is_whole: bool = True

    @property
    def stop(self) -> int:
        return self.offsets[-1] + self.sizes[-1]


@dataclass(frozen=True, eq=False)
class MemberTable:
    """Samples of one block. Arrays have one entry for each member, in the order of the archive."""

    keys: pa.Array
    samples: Int64Array
    """Number of the sample in the block."""
    columns: Int64Array
    offsets: Int64Array
    sizes: Int64Array
    is_sparse: npt.NDArray[np.bool_]

    def only(self, chosen: npt.NDArray[np.bool_]) -> MemberTable:
        """Return the table of some members, and of all samples."""
        if chosen.all():
            return self
        return MemberTable(
            self.keys,
            self.samples[chosen],
            self.columns[chosen],
            self.offsets[chosen],
            self.sizes[chosen],
            self.is_sparse[chosen],
        )


def packed(samples: Sequence[Sample]) -> bytes:
    """Return the table of a block.

    Offsets are stored as their difference to the place where the next member usually is, which is mostly 0.
    """
    keys = [sample.key.decode(errors="backslashreplace").encode() for sample in samples]
    columns = [
        number + _SPARSE * sparse
        for sample in samples
        for number, sparse in zip(sample.columns, sample.sparse, strict=True)
    ]
    offsets = np.array([offset for sample in samples for offset in sample.offsets], np.int64)
    sizes = np.array([size for sample in samples for size in sample.sizes], np.int64)
    first = int(offsets[0])
    counts = [len(sample.columns) for sample in samples]
    numbers = [
        [len(samples), len(columns), first],
        counts,
        list(map(len, keys)),
        columns,
        sizes,
        offsets - _usual(first, sizes),
    ]
    data = np.concatenate([np.asarray(each, np.int64) for each in numbers]).tobytes() + b"".join(keys)
    return len(data).to_bytes(8, "little") + bytes(pa.compress(data, codec="zstd", asbytes=True))


def _usual(first: int, sizes: Int64Array) -> Int64Array:
    """Return the offsets of members with one header each and nothing between them, relative to their drift."""
    steps = -(-sizes // BLOCK) * BLOCK + BLOCK
    return first + np.concatenate([[0], np.cumsum(steps[:-1])])


def unpacked(data: bytes) -> MemberTable:
    """Return the table of a block from its bytes."""
    raw = pa.decompress(data[8:], int.from_bytes(data[:8], "little"), codec="zstd", asbytes=True)
    samples, members, first = np.frombuffer(raw, np.int64, 3).tolist()
    numbers = np.frombuffer(raw, np.int64, 2 * samples + 3 * members, 24)
    counts, lengths = numbers[:samples], numbers[samples : 2 * samples]
    columns, sizes, drift = numbers[2 * samples :].reshape(3, members)
    ends = np.zeros(samples + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    blob = pa.py_buffer(raw)[24 + numbers.nbytes :]
    keys = pa.Array.from_buffers(pa.string(), samples, [None, pa.py_buffer(ends), blob])
    return MemberTable(
        keys,
        np.repeat(np.arange(samples), counts),
        columns % _SPARSE,
        _usual(first, sizes) + drift,
        sizes,
        columns >= _SPARSE,
    )


def joined(names: Sequence[str], tables: Sequence[bytes]) -> bytes:
    """Return the footer of a file: the names of its columns, and the tables of its blocks."""
    head = json.dumps({"columns": list(names)}).encode()
    ends = np.cumsum([0, *map(len, tables)], dtype=np.int64).tobytes()
    return len(head).to_bytes(8, "little") + len(tables).to_bytes(8, "little") + head + ends + b"".join(tables)


def table_of(footer: bytes, number: int) -> tuple[list[str], MemberTable]:
    """Return the names of the columns of a file, and the table of one of its blocks."""
    length = int.from_bytes(footer[:8], "little")
    count = int.from_bytes(footer[8:16], "little")
    names: list[str] = json.loads(footer[16 : 16 + length])["columns"]
    first, stop = np.frombuffer(footer[16 + length + 8 * number : 16 + length + 8 * number + 16], np.int64).tolist()
    base = 16 + length + 8 * (count + 1)
    return names, unpacked(footer[base + first : base + stop])
