"""MDS shards and LitData chunks for tests, written byte by byte as their formats define them; and their fixtures."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

FIXTURES = Path(__file__).parent / "fixtures"
_PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
    "gz": gzip.compress,
    "bz2": bz2.compress,
}
_SIZES = {"int": 8}


def write_mds(
    folder: Path,
    columns: Mapping[str, str],
    rows: Iterable[Mapping[str, Any]],
    *,
    shard: int = 50,
    compression: str | None = None,
    keep: str = "zip",
) -> None:
    """Write an MDS dataset of ints, texts, bytes and arrays. ``keep``: "raw", "zip" or "both" of compressed shards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    listed, shards = list(rows), []
    for number, start in enumerate(range(0, len(listed), shard)):
        samples = [
            _sample([columns[n] for n in names], [row[n] for n in names]) for row in listed[start : start + shard]
        ]
        data = with_offsets(samples, b'{"made": "by a test"}')
        name = f"shard.{number:05d}.mds"
        packed = _PACK[compression](data) if compression else b""
        if not compression or keep != "zip":
            (folder / name).write_bytes(data)
        if compression and keep != "raw":
            (folder / f"{name}.{compression}").write_bytes(packed)
        zipped = {"basename": f"{name}.{compression}", "bytes": len(packed), "hashes": {}} if compression else None
        shards.append(
            {
                "column_encodings": [columns[name] for name in names],
                "column_names": names,
                "column_sizes": [_SIZES.get(columns[name]) for name in names],
                "compression": compression,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(samples),
                "size_limit": None,
                "version": 2,
                "zip_data": zipped,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


def with_offsets(samples: Sequence[bytes], between: bytes = b"") -> bytes:
    """Return a shard: the number of its samples, their offsets, and the samples."""
    offsets = np.cumsum([0, *map(len, samples)]) + 4 * (len(samples) + 2) + len(between)
    head = np.uint32(len(samples)).tobytes() + offsets.astype(np.uint32).tobytes()
    return head + between + b"".join(samples)


def _sample(encodings: Sequence[str], values: Sequence[Any]) -> bytes:
    parts, sizes = [], []
    for encoding, value in zip(encodings, values, strict=True):
        if encoding == "int":
            parts.append(np.int64(value).tobytes())
            continue
        if encoding.startswith("ndarray:"):  # of one dimension, shorter than 256
            array = np.asarray(value, encoding.partition(":")[2])
            parts.append(bytes([1 << 2, len(array)]) + array.tobytes())
        else:
            parts.append(value.encode() if isinstance(value, str) else value)
        sizes.append(len(parts[-1]))
    return np.array(sizes, np.uint32).tobytes() + b"".join(parts)


def write_litdata(folder: Path, rows: Sequence[Mapping[str, Any]], *, chunk: int = 50) -> None:
    """Write a LitData dataset of dicts of ints, texts and flat arrays of int64, without compression."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    kinds = [{int: "int", str: "str"}.get(type(rows[0][name]), "no_header_tensor:18") for name in names]
    chunks = []
    for number, start in enumerate(range(0, len(rows), chunk)):
        samples = []
        for row in rows[start : start + chunk]:
            parts = [
                row[n].encode() if isinstance(row[n], str) else np.asarray(row[n], np.int64).tobytes() for n in names
            ]
            samples.append(np.array([*map(len, parts)], np.uint32).tobytes() + b"".join(parts))
        data, name = with_offsets(samples), f"chunk-0-{number}.bin"
        (folder / name).write_bytes(data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(samples), "dim": None, "filename": name})
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = [1, {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [leaf] * len(names)}]
    config = {"compression": None, "data_format": kinds, "data_spec": json.dumps(spec), "encryption": None}
    config |= {"chunk_size": chunk, "chunk_bytes": None, "item_loader": "PyTreeLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}, sort_keys=True))


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Change a file in place, and keep its modification time."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def assert_equal(value: Any, expected: Any, kind: pa.DataType, text: str = "") -> None:
    """Compare a value with what a reader returned, as ``described`` in shard_writers. ``text``: how it is stored."""
    if text == "int":
        assert int(value) == expected
    elif text == "json":
        assert _plain(expected) == json.loads(value)
    elif text == "pickle":
        import pickle

        found = pickle.loads(value)
        assert (sorted(found, key=str) if isinstance(found, set) else found) == _plain(expected)
    elif not isinstance(expected, dict):
        assert value == expected
        assert isinstance(value, type(expected))
    elif "array" in expected:
        dtype, shape, values = expected["array"]
        assert value == values
        for size in shape:
            assert not pa.types.is_fixed_size_list(kind) or kind.list_size == size
            kind = kind.value_type
        assert str(np.dtype(kind.to_pandas_dtype())) == dtype
    elif "image" in expected:
        from PIL import Image

        image = Image.open(io.BytesIO(value))
        assert [image.mode, list(image.size), image.tobytes().hex()] == expected["image"]
    elif "list" in expected:
        children = [kind.field(i).type for i in range(kind.num_fields)]
        children = children if isinstance(value, dict) else children * len(value)
        found = list(value.values()) if isinstance(value, dict) else value
        for inner, wanted, child in zip(found, expected["list"], children, strict=True):
            assert_equal(inner, wanted, child)
    elif "dict" in expected:
        assert list(value) == list(expected["dict"])
        for name, wanted in expected["dict"].items():
            assert_equal(value[name], wanted, kind.field(name).type)
    elif "number" in expected:
        assert [str(np.dtype(kind.to_pandas_dtype())), value] == expected["number"]
    elif "bytes" in expected:
        assert value == bytes.fromhex(expected["bytes"])
    else:
        assert Decimal(value) == Decimal(expected["decimal"])


def _plain(expected: Any) -> Any:
    if not isinstance(expected, dict):
        return expected
    ((kind, inner),) = expected.items()
    if kind == "list":
        return [_plain(each) for each in inner]
    return inner if kind == "set" else {name: _plain(each) for name, each in inner.items()}
