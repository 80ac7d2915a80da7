"""Arrays in safetensors files: a length, a JSON header, and the bytes of all arrays.

The format is simple enough to be written here, one array at a time, so that nothing is copied or held twice; any
safetensors library reads the files. Arrays are ordered by item size, so that each is aligned in memory. When a model
is restored they are read one at a time, so that memory never holds a second copy of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import SAFETENSORS, ArraySpec, Bytes, bytes_of, flat_bytes, is_array, make_array
from midepoch.checkpoint.files import FileSource, Sink, run_in_threads
from midepoch.checkpoint.tree import decode
from midepoch.errors import CheckpointDamagedError

_LARGEST_HEADER = 100_000_000  # as in the safetensors libraries
_READERS = 4
_CHUNK = 8 << 20


def write_arrays(sink: Sink, arrays: Mapping[str, tuple[ArraySpec, Any]]) -> None:
    """Write arrays by name. At most one of them is copied at a time, and only if necessary."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, Any] = {}
    offset = 0
    for name, (spec, _) in ordered:
        known = spec.dtype in SAFETENSORS
        dtype, shape = (SAFETENSORS[spec.dtype][0], list(spec.shape)) if known else ("U8", [spec.nbytes])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    sink.write(memoryview(len(text).to_bytes(8, "little") + text))
    for name, (spec, value) in ordered:
        data = bytes_of(value)
        if len(data) != spec.nbytes:
            raise ValueError(f"{name} changed its size while it was saved")
        sink.write(data.data)


def find_arrays(source: FileSource, specs: Iterable[tuple[str, ArraySpec]]) -> dict[str, StoredArray]:
    """Return the arrays of these names and specifications in a file, not read yet; raises CheckpointDamagedError."""
    offsets, body = _read_header(source)
    arrays: dict[str, StoredArray] = {}
    for name, spec in specs:
        start, stop = offsets.get(name, (0, -1))
        if stop - start != spec.nbytes:
            raise CheckpointDamagedError(f"the array {name!r:.80} has {stop - start} bytes, not {spec.nbytes}")
        arrays[name] = StoredArray(name, spec, source, body + start)
    return arrays


def _read_header(source: FileSource) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the first and last byte of each array, and the offset that they count from."""
    size = int.from_bytes(_read_bytes(source, 0, min(8, source.size)), "little")
    body = 8 + size
    if source.size < 8 or size > min(_LARGEST_HEADER, source.size - 8):
        raise CheckpointDamagedError("this is not a safetensors file: its header is longer than the file")
    try:
        header = json.loads(_read_bytes(source, 8, size))
        length = source.size - body
        offsets = {name: _parse_offsets(entry, length) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointDamagedError(f"this is not a safetensors file: {problem!r:.200}") from None
    return offsets, body


def _read_bytes(source: FileSource, start: int, size: int) -> bytes:
    data = bytearray(size)
    source.read_into(memoryview(data), start)
    return bytes(data)


def _parse_offsets(entry: Any, length: int) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= length:
        raise ValueError(f"bytes {start!r:.40} to {stop!r:.40} of {length}")
    return start, stop


@dataclass(frozen=True, eq=False)
class StoredArray:
    """Array in a verified file."""

    name: str
    spec: ArraySpec
    source: FileSource
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    def __getitem__(self, index: tuple[()]) -> StoredArray:
        """Return the scalar of an array without axes: the array itself."""
        return self

    def read(self) -> Any:
        """Return the array in new memory."""
        data = np.empty(self.spec.nbytes, np.uint8)
        self._fill(data)
        return make_array(self.spec, data)

    def read_into(self, target: Any) -> Any:
        """Fill a torch or numpy array of the same specification, and return it."""
        if self.spec.library == "numpy":
            self._fill(target.reshape(-1).view(np.uint8))
        elif not target.is_contiguous():
            target.detach().copy_(self.read())
        elif target.numel():
            flat = flat_bytes(target)
            if target.device.type == "cpu":
                self._fill(flat.numpy())
            else:
                self._fill_device(flat)
        return target

    def _fill(self, data: Bytes) -> None:
        starts = range(0, len(data), _CHUNK)
        threads = _READERS if len(starts) > 1 else 1
        run_in_threads(threads, lambda start: self._read(data[start : start + _CHUNK], start), starts)

    def _fill_device(self, flat: Any) -> None:
        torch: Any = sys.modules["torch"]
        chunk = np.empty(min(_CHUNK, len(flat)), np.uint8)
        for start in range(0, len(flat), _CHUNK):
            part = chunk[: len(flat) - start]
            self._read(part, start)
            flat[start : start + len(part)].copy_(torch.from_numpy(part))

    def _read(self, data: Bytes, start: int) -> None:
        if self.source.read_into(data.data, self.offset + start) != len(data):
            raise CheckpointDamagedError(f"the array {self.name!r:.80} ends too early")


@dataclass(frozen=True)
class StoredTree:
    """Tree of values whose arrays have not been read."""

    json: Any
    arrays: Mapping[str, StoredArray]
    allow_pickle: bool = False

    def outline(self) -> Any:
        """Return the tree with a ``StoredArray`` for each array, to check whether it fits."""
        return decode(self.json, self.arrays, allow_pickle=self.allow_pickle)

    def read(self, targets: Mapping[str, Any] | None = None) -> Any:
        """Return the tree, its arrays read into the targets of their names, or into new memory."""
        targets = targets or {}
        arrays = {
            name: stored.read_into(targets[name]) if name in targets else stored.read()
            for name, stored in self.arrays.items()
        }
        return decode(self.json, arrays, allow_pickle=self.allow_pickle)


def is_array_or_stored(value: Any) -> bool:
    """Return True for an array of any library, read or not."""
    return isinstance(value, StoredArray) or is_array(value)
