"""Samples whose values lie one after the other, each in a range of bytes: the layout of MDS shards and LitData chunks.

A column of a block is an array of ranges. It is gathered into one Arrow buffer, without a Python object per value.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._native.ranges import copy_ranges
from midepoch.errors import CorruptBlockError, DataNotFoundError, FormatError, MidepochError
from midepoch.sources.formats import Member, Scanned, table_of
from midepoch.sources.listing import files_at
from midepoch.sources.schemas import as_arrow
from midepoch.storage.damage import DamageError
from midepoch.storage.stores import Entry, OpenFile, Store

_PLAIN = {"L": (b"P5", 1), "RGB": (b"P6", 3)}
_CONVERTED = {"HSV": "RGB", "RGBa": "RGBA", "La": "LA"}
"""Modes that no file has, and the modes that Pillow converts them to."""


def image_file(value: bytes) -> bytes:
    """Return a raw image (width, height and length of the mode as uint32, the mode, the pixels) as a file.

    Greyscale and RGB become PNM: its header is followed by the same bytes. Other modes become TIFF, some of
    them converted.
    """
    if len(value) < 12:
        raise ValueError(f"a raw image of {len(value)} bytes has no header")
    width, height, size = np.frombuffer(value[:12], "<u4").tolist()
    mode, pixels = value[12 : 12 + size].decode("latin-1"), value[12 + size :]
    if mode in _PLAIN:
        magic, channels = _PLAIN[mode]
        if len(pixels) != width * height * channels or not pixels:
            raise ValueError(f"a raw image of {width} × {height} {mode} does not have {len(pixels)} bytes")
        return b"%s %d %d 255\n" % (magic, width, height) + pixels
    try:
        from PIL import Image
    except ImportError:
        raise MidepochError(
            f"raw images of mode {mode!r} need Pillow, which is not installed. Run: pip install midepoch[media]"
        ) from None
    out = io.BytesIO()
    try:
        image = Image.frombytes(mode.replace("I;16N", "I;16"), (width, height), pixels)  # the same bytes
        image.convert(_CONVERTED.get(mode, image.mode)).save(out, "TIFF")
    except (ValueError, OSError, KeyError, MemoryError) as problem:
        raise ValueError(f"a raw image of {width} × {height} {mode!r} cannot be read: {problem}") from None
    return out.getvalue()


_MARGIN = 2 << 20
"""Compressed bytes that may be needed for the first bytes of the contents: bz2 has blocks of 900 kB."""
_STREAMS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zstd": "zstd"}
_ALL = 1 << 62


class ShardFile:
    """Contents of an open shard. What was read of its beginning is kept: compressed ones can only be read from there.

    ``codec``: its compression, None for a plain one. ``size``: that of the contents, by default all that there are.
    """

    def __init__(self, file: OpenFile, name: str, codec: str | None, size: int | None = None) -> None:
        if codec not in (None, *_STREAMS, "snappy"):
            known = ", ".join((*_STREAMS, "snappy"))
            raise FormatError(f"{name}: the compression {codec!r} is unknown, expected one of {known}.")
        self.file, self.name, self.codec = file, name, codec
        self.size = file.size if codec is None else size or _ALL
        self._kept = b""

    def beginning(self, size: int = _ALL) -> bytes:
        """Return the first bytes: all of them if there are fewer than ``size``. After all, ``size`` is exact."""
        if len(self._kept) < min(size, self.size):
            if self.codec is None:
                self._kept = self.file.read_at(min(size, self.size), 0)
            else:
                self._kept = self._decompressed(size)[: self.size]
                self.size = len(self._kept) if size >= self.size else self.size
        return self._kept[:size]

    def read(self, begin: int, end: int) -> Bytes:
        """Return a range of the contents. Of a compressed shard, all before its end is decompressed."""
        is_elsewhere = self.codec is None and end > len(self._kept)
        data = self.file.read_at(end - begin, begin) if is_elsewhere else self.beginning(end)[begin:]
        if len(data) != end - begin:
            raise CorruptBlockError(f"{self.name}: its contents end {end - begin - len(data)} bytes too early.")
        return np.frombuffer(data, np.uint8)

    def _decompressed(self, size: int) -> bytes:
        partial = size < self.size and self.codec != "snappy"  # which is not a stream: there is no way to stop early
        packed = self.file.read_at(min(self.file.size, size + size // 64 + _MARGIN) if partial else self.file.size, 0)
        try:
            if self.codec == "snappy":
                return bytes(pa.decompress(packed, self.size, "snappy", asbytes=True))
            with pa.CompressedInputStream(pa.BufferReader(packed), _STREAMS[str(self.codec)]) as stream:
                return bytes(stream.read(size) if partial else stream.read())
        except (OSError, pa.ArrowException) as problem:
            raise CorruptBlockError(f"{self.name} cannot be decompressed: {problem}.") from None


class Candidate(NamedTuple):
    """A file that a shard may be in: its path, its size if a manifest knows it, and its compression."""

    path: str
    size: int | None
    codec: str | None


def shard_members(
    store: Store,
    manifest: Entry,
    what: str,
    entries: Sequence[Any],
    describe: Callable[[dict[str, Any]], tuple[dict[str, Any], list[list[Candidate]]]],
    *,
    padded: bool = False,
) -> list[Member]:
    """Return the shards that a manifest lists, each with its description, its compression and the files beside it.

    ``describe`` returns the description of an entry, and the candidates for each of its files. The plain one is used
    if it is complete, else the compressed one. ``padded``: files may be larger than their manifest says.
    """
    name = store.name(manifest.path)
    if not entries:
        raise DataNotFoundError(f"{name} names no {what}s. Check the program that wrote it.")
    described = []
    for number, each in enumerate(entries):
        try:
            described.append(describe(each))
        except (KeyError, TypeError, AttributeError, ValueError) as problem:
            text = f"{name}: the entry of {what} {number} is invalid: {problem!r}. Write it again."
            raise FormatError(text) from None
    present = files_at(store, [file.path for _, files in described for candidates in files for file in candidates])
    members = []
    for about, files in described:
        (entry, codec), *beside = (_chosen(store, name, present, candidates, padded) for candidates in files)
        members.append(Member(entry, {**about, "codec": codec, "beside": beside}))
    return members


def _chosen(
    store: Store, manifest: str, present: dict[str, Entry], candidates: Sequence[Candidate], padded: bool
) -> tuple[Entry, str | None]:
    there = [(present[path], size, codec) for path, size, codec in candidates if path in present]
    if not there:
        names = " and ".join(store.name(file.path) for file in candidates)
        raise DataNotFoundError(f"{names} does not exist, but {manifest} names it. Copy or download it.")
    for entry, size, codec in there:
        if size is None or entry.size == size or (padded and entry.size > size):
            return entry, codec
    entry, size, _ = there[0]
    raise FormatError(
        f"{store.name(entry.path)} has {entry.size} bytes, {manifest} says {size}: it is truncated or from another "
        "dataset. Copy or download it again."
    )


def offsets_in(head: bytes, samples: int, name: str, least: int | None = None) -> Int64Array:
    """Return the offsets of all samples, and the end of the last one, from the beginning of a shard.

    ``least``: the smallest possible offset; default: that of the end of the offsets.
    """
    table = 4 * (samples + 2)
    if len(head) < table:
        raise DamageError(f"{name}: it is too short for the offsets of {samples} samples. Copy or download it again.")
    count = int.from_bytes(head[:4], "little")
    if count != samples:
        raise DamageError(f"{name}: it has {count} samples, its index.json says {samples}. Copy or download it again.")
    offsets = np.frombuffer(head, "<u4", samples + 1, 4).astype(np.int64)
    wrong = np.flatnonzero(np.diff(offsets) < 0)
    if len(wrong) or offsets[0] < (table if least is None else least):
        raise damaged_offset(name, int(wrong[0]) if len(wrong) else 0)
    return offsets


def damaged_offset(name: str, sample: int) -> FormatError:
    """Return the error for an offset that cannot be right."""
    return DamageError(f"{name}: the offset of sample {sample} is damaged. Copy or download it again.")


def packed_footer(about: dict[str, Any], offsets: Int64Array) -> bytes:
    """Return all that the decoding of a block needs. Of the offsets their differences, which are often all the same."""
    text = json.dumps(about).encode()
    return len(text).to_bytes(4, "little") + text + np.diff(offsets, prepend=0).astype("<u4").tobytes()


def footer_parts(footer: bytes) -> tuple[dict[str, Any], Int64Array]:
    """Return the two arguments of ``packed_footer``."""
    start = 4 + int.from_bytes(footer[:4], "little")
    return json.loads(footer[4:start]), np.cumsum(np.frombuffer(footer, "<u4", offset=start), dtype=np.int64)


Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_MOST = np.iinfo(np.int32).max
BLOCK_BYTES = 8 << 20
_COMPRESSED_BLOCK = 256 << 20


class BadSampleError(ValueError):
    """A sample of a block that cannot be decoded. ``number`` counts from the first sample of the block."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self.number, self.reason = number, reason


@contextmanager
def naming(name: str, first: int, column: str | None = None) -> Iterator[None]:
    """Convert BadSampleError to CorruptBlockError with the file, the sample and the column."""
    try:
        yield
    except BadSampleError as problem:
        where = f"sample {first + problem.number}" + (f", column {column!r}" if column is not None else "")
        raise CorruptBlockError(f"{name}: {where}: {problem.reason}.") from None


def decoded(
    name: str,
    first: int,
    columns: Mapping[str, Callable[[], pa.Array]],
    rows: int,
    kinds: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return columns as a table. ``first`` is the number of its first sample.

    Raise CorruptBlockError for one that has another type than ``kinds``, those of the first sample of the file: a cast
    could change values.
    """
    arrays = []
    for column, decode in columns.items():
        with naming(name, first, column):
            array = decode()
        if kinds is not None and str(array.type) != kinds[column]:
            raise CorruptBlockError(
                f"{name}: sample {first}, column {column!r}: its array is {array.type}, that of sample 0 is "
                f"{kinds[column]}. Write arrays of one dtype and number of dimensions."
            )
        arrays.append(array)
    return table_of(list(columns), arrays, rows)


@dataclass(frozen=True, eq=False)
class Values:
    """One column of a block: the range of bytes of each value."""

    data: Bytes
    starts: Int64Array
    sizes: Int64Array

    def value(self, number: int) -> bytes:
        """Return the bytes of one value."""
        start = int(self.starts[number])
        return self.data[start : start + int(self.sizes[number])].tobytes()

    def __len__(self) -> int:
        return len(self.starts)

    def without(self, head: Int64Array | int) -> Values:
        """Return the values without their first bytes."""
        return Values(self.data, self.starts + head, self.sizes - head)

    def checked(self, sizes: Int64Array | int, what: str) -> None:
        """Raise BadSampleError if a value does not have the size that it needs."""
        first_true(self.sizes != sizes, lambda i: f"{what}: it cannot have {self.sizes[i]} bytes")


Decode = Callable[[Values], pa.Array]
"""Function that decodes all values of a column. Without values, its array has the type that they would have, or that of
nulls if only values determine it.
"""


def first_true(wrong: npt.NDArray[np.bool_], reason: Callable[[int], str]) -> None:
    """Raise BadSampleError for the first sample with ``wrong``. ``reason`` makes its text."""
    if wrong.any():
        number = int(np.argmax(wrong))
        raise BadSampleError(number, reason(number))


def columns_of(data: Bytes, offsets: Int64Array, fixed: Sequence[int | None]) -> list[Values]:
    """Return the ranges of all columns. A sample has the sizes of its variable columns (uint32), then all values.

    ``offsets``: the start of each sample in ``data``, and the end of the last one. ``fixed``: the size of each column,
    None for a variable one. Raise BadSampleError if the sizes do not add up.
    """
    begins, ends = offsets[:-1], offsets[1:]
    variable = sum(size is None for size in fixed)
    least = 4 * variable + sum(size or 0 for size in fixed)
    first_true(ends - begins < least, lambda i: f"it has {ends[i] - begins[i]} bytes, at least {least} are expected")
    heads = integers(data, begins, variable, "<u4")
    at, columns, number = begins + 4 * variable, [], 0
    for size in fixed:
        sizes = np.full(len(begins), size, np.int64) if size is not None else heads[:, number]
        number += size is None
        columns.append(Values(data, at, sizes))
        at = at + sizes
    first_true(
        at != ends, lambda i: f"its values have {at[i] - begins[i]} bytes in all, it has {ends[i] - begins[i]} bytes"
    )
    return columns


def integers(data: Bytes, starts: Int64Array, count: int, dtype: str) -> Int64Array:
    """Return ``count`` integers from each start on, one row for each start. The caller has checked the bounds."""
    size = np.dtype(dtype).itemsize * count
    if not size or not len(starts):
        return np.zeros((len(starts), count), np.int64)
    found: Int64Array = data[starts[:, None] + np.arange(size)].view(dtype).astype(np.int64)
    return found


def gathered(values: Values) -> Bytes:
    """Return the bytes of all values, one after the other. A view where they already are."""
    data, starts, sizes = values.data, values.starts, values.sizes
    if not len(starts):
        return np.empty(0, np.uint8)
    if (starts[1:] == starts[:-1] + sizes[:-1]).all():
        return data[int(starts[0]) : int(starts[-1] + sizes[-1])]
    size, steps = int(sizes[0]), np.diff(starts)
    if (sizes == size).all() and (steps == steps[0]).all():
        step = int(steps[0])
        rows = np.lib.stride_tricks.as_strided(data[int(starts[0]) :], (len(starts), size), (step, 1))
        return np.ascontiguousarray(rows).reshape(-1)
    targets = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    copy_ranges(data, starts, sizes, out, targets)
    return out


def bytes_array(values: Values, kind: pa.DataType) -> pa.Array:
    """Return values as binary or text. Raise BadSampleError for bytes that are not UTF-8."""
    total = int(values.sizes.sum())
    if total > _MOST:
        raise BadSampleError(int(np.argmax(values.sizes)), f"a block of {total} bytes of one column is too large")
    ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(values.sizes, dtype=np.int32)])
    array = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(ends), pa.py_buffer(gathered(values))])
    if pa.types.is_string(kind):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            raise BadSampleError(*_not_text(values)) from None
    return array


BINARY = partial(bytes_array, kind=pa.binary())
TEXT = partial(bytes_array, kind=pa.string())


def _not_text(values: Values) -> tuple[int, str]:
    for number in range(len(values)):
        try:
            values.value(number).decode()
        except UnicodeDecodeError as problem:
            return number, f"its text is not UTF-8: {problem.reason} at byte {problem.start}"
    raise AssertionError("Arrow refuses text that Python decodes")


def numbers_array(flat: Bytes, dtype: np.dtype[Any]) -> pa.Array:
    """Return bytes as an array of numbers, booleans, or pairs of floats for complex numbers."""
    if dtype.kind == "c":
        parts = numbers_array(flat, np.dtype(f"f{dtype.itemsize // 2}"))
        return pa.FixedSizeListArray.from_arrays(parts, 2)
    if dtype.kind == "b":
        return as_arrow(flat != 0)
    return as_arrow(flat.view(dtype).astype(dtype.newbyteorder("="), copy=False))


def arrays(values: Values, dtype: np.dtype[Any], shapes: Int64Array) -> pa.Array:
    """Return values as nested lists. ``shapes``: a row of dimensions for each value."""
    sizes = np.prod(shapes.astype(float), axis=1) * dtype.itemsize
    first_true(
        sizes != values.sizes,
        lambda i: f"an array of shape {tuple(shapes[i].tolist())} and {dtype} does not have {values.sizes[i]} bytes",
    )
    array = numbers_array(gathered(values), dtype)
    for axis in reversed(range(shapes.shape[1])):
        lengths = np.repeat(shapes[:, axis], np.prod(shapes[:, :axis], axis=1))
        ends = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        array = pa.ListArray.from_arrays(as_arrow(ends), array)
    return array


def fixed_arrays(values: Values, dtype: np.dtype[Any], shape: Sequence[int]) -> pa.Array:
    """Return values of one shape as nested lists of fixed sizes."""
    values.checked(int(np.prod(shape)) * dtype.itemsize, f"an array of shape {tuple(shape)} and {dtype}")
    array = numbers_array(gathered(values), dtype)
    for size in reversed(shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def scalars(values: Values, dtype: np.dtype[Any]) -> pa.Array:
    """Return values of a fixed size as numbers."""
    values.checked(dtype.itemsize, str(dtype))
    return numbers_array(gathered(values), dtype)


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


def block_starts(offsets: Int64Array, codec: str | None) -> list[int]:
    """Return the first sample of each block. Blocks have about 8 MB, compressed ones 256 MB."""
    if len(offsets) < 2:
        return []
    marks = np.arange(int(offsets[0]), int(offsets[-1]), BLOCK_BYTES if codec is None else _COMPRESSED_BLOCK)
    firsts = np.searchsorted(offsets[:-1], marks, side="right") - 1 if len(marks) else np.zeros(1, np.int64)
    return [int(first) for first in np.unique(firsts)]


def scanned(schema: pa.Schema, about: dict[str, Any], offsets: Int64Array, firsts: Sequence[int]) -> Scanned:
    """Return the scan of a shard: its schema, the offsets of its samples, and the first sample of each block."""
    samples = len(offsets) - 1
    found = Scanned(schema, list(firsts), np.diff([*firsts, samples]).tolist() if firsts else [], stop=samples)
    found.decoded_bytes = float(offsets[-1] - offsets[0])
    found.footer = packed_footer({**about, "kinds": {field.name: str(field.type) for field in schema}}, offsets)
    return found
