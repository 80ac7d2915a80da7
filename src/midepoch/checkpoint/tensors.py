"""Arrays in a safetensors file: a length, a JSON header, and the bytes of one array after the other.

The format is simple enough to be written here, array by array, so that nothing is copied or held twice; any
safetensors library reads the files. Arrays lie in the order of their item sizes, so that each is aligned in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from midepoch.checkpoint.arrays import SAFE, Kind, bytes_of
from midepoch.checkpoint.files import Source, Summing
from midepoch.checkpoint.stored import Stored
from midepoch.errors import CheckpointDamagedError

_LARGEST_HEADER = 100_000_000  # as in the safetensors libraries


def write(sink: Summing, arrays: Mapping[str, tuple[Kind, Any]]) -> None:
    """Write arrays by name. Only one of them at a time is copied, and only if it has to be."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, Any] = {}
    at = 0
    for name, (kind, _) in ordered:
        dtype, shape = (SAFE[kind.dtype][0], list(kind.shape)) if kind.dtype in SAFE else ("U8", [kind.nbytes])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + kind.nbytes]}
        at += kind.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    sink.write(len(text).to_bytes(8, "little") + text)
    for name, (kind, value) in ordered:
        data = bytes_of(value)
        if len(data) != kind.nbytes:
            raise ValueError(f"{name} changed its size while it was saved")
        sink.write(data)


def find(source: Source, kinds: Iterable[tuple[str, Kind]]) -> dict[str, Stored]:
    """The arrays of these names and kinds in a file, not read yet; raises CheckpointDamagedError."""
    places, body = _header(source)
    found: dict[str, Stored] = {}
    for name, kind in kinds:
        first, stop = places.get(name, (0, -1))
        if stop - first != kind.nbytes:
            raise CheckpointDamagedError(f"the array {name!r:.80} has {stop - first} bytes, not {kind.nbytes}")
        found[name] = Stored(name, kind, source, body + first)
    return found


def _header(source: Source) -> tuple[dict[str, tuple[int, int]], int]:
    """The places of the arrays by name, counted from the returned byte."""
    size = int.from_bytes(_bytes(source, 0, min(8, source.size)), "little")
    body = 8 + size
    if source.size < 8 or size > min(_LARGEST_HEADER, source.size - 8):
        raise CheckpointDamagedError("this is not a safetensors file: its header is longer than the file")
    try:
        header = json.loads(_bytes(source, 8, size))
        places = {name: _place(entry, source.size - body) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointDamagedError(f"this is not a safetensors file: {problem!r:.200}") from None
    return places, body


def _bytes(source: Source, first: int, size: int) -> bytes:
    data = bytearray(size)
    source.read_into(memoryview(data), first)
    return bytes(data)


def _place(entry: Any, most: int) -> tuple[int, int]:
    first, stop = entry["data_offsets"]
    if type(first) is not int or type(stop) is not int or not 0 <= first <= stop <= most:
        raise ValueError(f"bytes {first!r:.40} to {stop!r:.40} of {most}")
    return first, stop
