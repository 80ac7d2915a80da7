"""MDS shards and LitData chunks, written and read by the packages that define them.

    python tests/shard_writers.py

writes tests/fixtures/mds and tests/fixtures/litdata: small datasets, and what the packages' own readers return for them
(``expected.json``). It needs mosaicml-streaming and litdata, which the tests of the fixtures do not.
"""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parent / "fixtures"
ROWS = 12
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
PLAIN_MDS = {"id": "int", "text": "str", "tokens": "ndarray:uint16:4", "data": "bytes"}
ALL_MDS = {
    **PLAIN_MDS,
    **{name: name for name in DTYPES},
    **{f"array_{name}": f"ndarray:{name}" for name in DTYPES},
    "array": "ndarray",
    "matrix": "ndarray:float32:2,3",
    "str_int": "str_int",
    "str_float": "str_float",
    "str_decimal": "str_decimal",
    "json": "json",
    "pkl": "pkl",
    **{name: name for name in ("pil", "jpeg", "png", "jpegarray", "list[pil]", "list[jpeg]", "list[png]")},
}
TEXT_MDS = {"id": "int", "text": "str", "str_float": "float"}
TEXTS: dict[str, dict[str, Any]] = {
    "json": {"writer": "JSONWriter"},
    "csv-gz": {"writer": "CSVWriter", "compression": "gz"},
    "tsv": {"writer": "TSVWriter", "newline": "\r\n"},
    "xsv-zstd": {"writer": "XSVWriter", "separator": "||", "compression": "zstd"},
}
COMPRESSIONS = {"br": "br:5", "bz2": "bz2", "gz": "gz:1", "snappy": "snappy", "zstd": "zstd:7"}


def described(value: Any) -> Any:
    """Return a value of a reader as JSON that says all of it: types, shapes, pixels."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, memoryview)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, dict):
        return {"dict": {key: described(inner) for key, inner in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"list": [described(inner) for inner in value]}
    if isinstance(value, np.generic):
        return {"number": [str(value.dtype), value.item()]}
    if hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of Pillow
        return {"image": [value.mode, list(value.size), value.tobytes().hex()]}
    if isinstance(value, set):
        return {"set": sorted(value, key=str)}
    array = np.asarray(value)
    return {"array": [str(array.dtype), list(array.shape), array.tolist()]}


def _image(number: int, mode: str = "RGB") -> Any:
    from PIL import Image

    shape = (4 + number % 2, 5, 3) if mode == "RGB" else (4, 5)
    pixels = np.random.default_rng(number).integers(0, 256, shape).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def _file(number: int, form: str) -> bytes:
    out = io.BytesIO()
    _image(number).save(out, form)
    return out.getvalue()


def mds_row(i: int) -> dict[str, Any]:
    """Return a sample with a value for each encoding."""
    rng = np.random.default_rng(i)
    numbers = {name: np.dtype(name).type(i * 3 % 100) for name in DTYPES}
    sizes = {name: 1 + (i * 97) % 300 if name == "uint8" else 1 + i % 4 for name in DTYPES}
    arrays = {f"array_{name}": rng.integers(0, 100, sizes[name]).astype(name) for name in DTYPES}
    return {
        "id": i - 5,
        "text": f"row {i} " + "é" * (i % 3),
        "tokens": rng.integers(0, 60_000, 4).astype(np.uint16),
        "data": rng.bytes(i % 4),
        **numbers,
        **arrays,
        "array": rng.random((1 + i % 3, 2)),
        "matrix": rng.random((2, 3)).astype(np.float32),
        "str_int": (-1) ** i * 10**i,
        "str_float": [0.1, -1e300, 1e-9, 3.0, float("inf")][i % 5],
        "str_decimal": Decimal(i) / Decimal(7) if i % 2 else Decimal("12345678901234567890.10"),
        "json": [{"a": i, "b": [None, 1.5]}, [i], "x", None][i % 4],
        "pkl": {i, "x"} if i % 2 else [i],
        "pil": _image(i, ["RGB", "L", "RGBA", "1"][i % 4]),
        "jpeg": _image(i),
        "png": _image(i, ["RGB", "L"][i % 2]),
        "jpegarray": [_file(i + k, "JPEG") for k in range(1 + i % 2)],
        "list[pil]": [_image(i + k) for k in range(i % 3)],
        "list[jpeg]": [_image(i + k) for k in range(i % 3)],
        "list[png]": [_image(i + k) for k in range(i % 3)],
    }


def write_mds(
    folder: Path, columns: dict[str, str], rows: Iterator[dict[str, Any]], writer: str = "MDSWriter", **options: Any
) -> None:
    import streaming

    with getattr(streaming, writer)(out=str(folder), columns=columns, **options) as shards:
        for row in rows:
            shards.write({name: row[name] for name in columns})


def read_mds(folder: Path) -> list[dict[str, Any]]:
    """Return all samples as streaming's own reader decodes them."""
    from streaming.base.format import reader_from_json

    index = json.loads((folder / "index.json").read_text())
    rows = []
    for shard in index["shards"]:
        reader = reader_from_json(str(folder), None, shard)
        for part in ("data", "meta"):
            if shard.get(f"zip_{part}"):
                from streaming.base.compression import decompress

                packed = (folder / shard[f"zip_{part}"]["basename"]).read_bytes()
                (folder / shard[f"raw_{part}"]["basename"]).write_bytes(decompress(shard["compression"], packed))
        rows += [reader[i] for i in range(shard["samples"])]
    return rows


def litdata_cases() -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Return the samples and the options of the writer of each case."""
    import torch
    from litdata import TokensLoader
    from litdata.types import File, Image, Jpeg, JpegArray, Pil, Text

    def leaves(i: int) -> dict[str, Any]:
        rng = np.random.default_rng(i)
        return {
            "id": i,
            "flag": bool(i % 2),
            "score": i / 3,
            "name": f"é{i}",
            "raw": rng.bytes(i % 4 + 1),
            "flat": torch.arange(i % 5),
            "matrix": torch.rand(2, 1 + i % 3, generator=torch.Generator().manual_seed(i)),
            "scalar": torch.tensor(i, dtype=torch.int16),
            "mask": torch.tensor([[True, i % 2 == 0]]),
            "numbers": rng.integers(0, 9, i % 3).astype(np.uint8),
            "cube": rng.random((1, 2, 1 + i % 2)).astype(np.float16),
            "pair": (i, -i),
            "mixed": [i, "x"],
            "inner": {"a": i, "b": f"{i}"},
            "nested": [{"k": i, "v": None}, {"k": 1, "v": "u"}],
            "words": ["a", "b"][: i % 3],
            "any": [[1.5, None], {"z": [True, False], "n": [1, 2], "m": {}, "f": [0.5]}, 1, "é"] if i % 2 else [],
            "text": Text(text=f"text {i}"),
            "file": File(bytes=rng.bytes(5)),
            "pil": Pil(image=_image(i)),
            "jpeg": Jpeg(bytes=_file(i, "JPEG")),
            "image": Image(bytes=_file(i, "PNG")),
            "images": JpegArray(images=[Jpeg(bytes=_file(i + k, "JPEG")) for k in range(1 + i % 2)]),
            "pickled": {i, "x"},
        }

    full = [leaves(i) for i in range(ROWS)]
    rows = [{"id": i, "text": f"é{i}" * (i % 4), "score": i / 3, "tags": ["a"] * (i % 3)} for i in range(ROWS)]
    few = [{"id": i, "x": torch.arange(i % 4 + 1) * i, "name": f"n{i}"} for i in range(ROWS)]
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 50_000, (7 + 3 * i,), generator=generator).to(torch.int32) for i in range(ROWS)]
    return {
        "leaves": (full, {"chunk_size": 5}),
        "rows": (rows, {"chunk_size": 5}),
        "rows-zstd": (rows, {"chunk_size": 5, "compression": "zstd"}),
        "plain": (few, {"chunk_size": 5}),
        "chunk": (few, {"chunk_size": 5, "compression": "zstd", "compression_level": "chunk"}),
        "batch": (few, {"chunk_size": 8, "compression": "zstd", "compression_batch_size": 3}),
        "sample": (few, {"chunk_size": 5, "compression": "zstd:9", "compression_level": "sample"}),
        "tuple": ([(torch.arange(i), f"{i}") for i in range(ROWS)], {"chunk_size": 5}),
        "leaf": ([np.arange(i, dtype=np.int32) for i in range(ROWS)], {"chunk_size": 5}),
        "tokens": (tokens, {"chunk_size": 120, "item_loader": TokensLoader()}),
    }


def write_litdata(folder: Path, items: list[Any], **options: Any) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), **options)
    for i, item in enumerate(items):
        writer[i] = item
    writer.done()
    writer.merge()


def read_litdata(folder: Path, block_size: int | None = None) -> list[Any]:
    """Return all samples as LitData's own reader decodes them. Files of images are the bytes that it decodes."""
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming.serializers import ImageSerializer, JPEGArraySerializer, JPEGSerializer

    class Jpeg(JPEGSerializer):
        def deserialize(self, data: Any) -> Any:
            return bytes(data)

    class Image(ImageSerializer):
        def deserialize(self, data: Any) -> Any:
            return bytes(data)

    class Images(JPEGArraySerializer):
        def __init__(self) -> None:
            self._jpeg_serializer = Jpeg()

    loader = TokensLoader(block_size) if block_size is not None else None
    chosen = {"jpeg": Jpeg(), "image": Image(), "jpeg_array": Images()}
    dataset = StreamingDataset(str(folder), item_loader=loader, shuffle=False, serializers=chosen)
    return [dataset[i] for i in range(len(dataset))]


def save(folder: Path, rows: list[Any], name: str = "expected.json") -> None:
    (folder / name).write_text(json.dumps([described(row) for row in rows]))


def write_all(root: Path) -> None:
    """Write all datasets and what the readers return."""
    rows = [mds_row(i) for i in range(ROWS)]
    write_mds(root / "mds/all", ALL_MDS, iter(rows), size_limit=16_000, hashes=["sha1", "xxh64"])
    save(root / "mds/all", read_mds(root / "mds/all"))
    cases: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        **{name: (PLAIN_MDS, {"compression": each, "size_limit": 550}) for name, each in COMPRESSIONS.items()},
        **{name: (TEXT_MDS, {**each, "size_limit": 200}) for name, each in TEXTS.items()},
    }
    for name, (columns, options) in cases.items():
        folder = root / "mds" / name
        write_mds(folder, columns, iter(rows), **options)
        shutil.copytree(folder, root / "copy")
        save(folder, read_mds(root / "copy"))
        shutil.rmtree(root / "copy")
    for name, (items, options) in litdata_cases().items():
        folder = root / "litdata" / name
        write_litdata(folder, items, **options)
        shutil.copytree(folder, root / "copy")  # its reader replaces compressed chunks
        block = 16 if name == "tokens" else None
        save(folder, read_litdata(root / "copy", block))
        if name == "tokens":
            save(folder, items, "documents.json")
        shutil.rmtree(root / "copy")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for part in ("mds", "litdata"):
        shutil.rmtree(FIXTURES / part, ignore_errors=True)
    write_all(FIXTURES)
