"""The data of the training loops: Arrow files, made by several processes in less than a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks import machine
from benchmarks.feeding.codec import codec
from benchmarks.feeding.work import Scale, words

QUALITY = 90


@dataclass(frozen=True)
class Files:
    """Paths of the files of each dataset; ``index`` is a folder for midepoch's indexes."""

    tokens: tuple[str, ...] = ()
    web: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    index: str = ""

    def paths(self) -> tuple[str, ...]:
        return (*self.tokens, *self.web, *self.code, *self.images)


def make(folder: Path, scale: Scale, loops: tuple[str, ...]) -> Files:
    """Make the files of these loops: 1 GiB of tokens, 250 MB of text, 1.6 GB of JPEGs at full scale."""
    (folder / "index").mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Callable[..., str]] = {}
    if "tokens" in loops:
        wanted["tokens"] = _tokens
    if "text" in loops:
        wanted["web"] = wanted["code"] = _text
    if "images" in loops:
        wanted["images"] = _images
    paths: dict[str, list[Any]] = {}
    with ProcessPoolExecutor(min(scale.shards, machine.cores()), initializer=_one_thread) as pool:
        for name, function in wanted.items():
            shards = [(folder / f"{name}-{shard:02d}.arrow", scale, shard) for shard in range(scale.shards)]
            paths[name] = [pool.submit(function, *arguments) for arguments in shards]
        made = {name: tuple(future.result() for future in futures) for name, futures in paths.items()}
    return Files(**made, index=str(folder / "index"))


def warm(files: Files) -> int:
    """Read every file, so that no loader waits for the disk. Return the bytes."""
    total = 0
    for path in files.paths():
        with Path(path).open("rb", buffering=0) as file:
            while piece := file.read(1 << 22):
                total += len(piece)
    return total


def _one_thread() -> None:
    torch.set_num_threads(1)


def _write(path: Path, tables: Iterator[pa.Table]) -> str:
    first = next(tables)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table)
    return str(path)


def _tokens(path: Path, scale: Scale, shard: int) -> str:
    rng = np.random.default_rng((1, shard))

    def tables() -> Iterator[pa.Table]:
        left = scale.token_rows // scale.shards
        while left > 0:
            rows = min(left, 1_000)
            values = rng.integers(0, scale.vocabulary, rows * scale.length, dtype=np.int32)
            yield pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(values), scale.length)})
            left -= rows

    return _write(path, tables())


def _text(path: Path, scale: Scale, shard: int) -> str:
    rng = np.random.default_rng((2, shard, len(path.name)))  # "web" and "code" differ in length
    known = np.array(words(), dtype=object)

    def tables() -> Iterator[pa.Table]:
        left = scale.documents // scale.shards
        while left > 0:
            rows = min(left, 1_000)
            lengths = rng.gamma(2.0, 180.0, rows).astype(int) + 10
            # Most words are among the first few thousand; one in twenty is a rare one.
            numbers = (len(known) * rng.random(int(lengths.sum())) ** 4).astype(int)
            chosen = np.split(known[numbers], np.cumsum(lengths)[:-1])
            yield pa.table({"text": pa.array([" ".join(each) for each in chosen], pa.string())})
            left -= rows

    return _write(path, tables())


def picture(rng: np.random.Generator, size: tuple[int, int], noise: float) -> bytes:
    """Return a JPEG of a smooth random image with some noise."""
    coarse = torch.from_numpy(rng.integers(0, 256, (1, 3, 8, 8)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic")[0]
    grain = torch.from_numpy(rng.standard_normal((3, *size), dtype=np.float32))
    return codec().encode((smooth + noise * grain).clamp(0, 255).to(torch.uint8), QUALITY)


def noise_for(size: tuple[int, int], wanted: int) -> float:
    """Return the noise with which a JPEG has about this many bytes."""
    low, high = 0.0, 128.0
    for _ in range(10):
        middle = (low + high) / 2
        rng = np.random.default_rng(5)
        found = np.mean([len(picture(rng, size, middle)) for _ in range(3)])
        low, high = (middle, high) if found < wanted else (low, middle)
    return low


def _images(path: Path, scale: Scale, shard: int) -> str:
    rng = np.random.default_rng((3, shard))
    noise = noise_for(scale.image_size, scale.image_bytes)
    count = scale.distinct_images // scale.shards
    distinct = [picture(rng, scale.image_size, noise) for _ in range(count)]

    def tables() -> Iterator[pa.Table]:
        left = scale.images // scale.shards
        while left > 0:
            rows = min(left, 64)
            jpegs = [distinct[number] for number in rng.integers(0, count, rows)]
            labels = rng.integers(0, scale.classes, rows)
            yield pa.table({"jpeg": pa.array(jpegs, pa.binary()), "label": pa.array(labels, pa.int64())})
            left -= rows

    return _write(path, tables())
