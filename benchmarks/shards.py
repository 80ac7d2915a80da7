"""MDS shards and LitData chunks beside the loaders of their own packages: `python -m benchmarks.shards`.

The same folder is read by its own loader and by midepoch, in turn, with rows shuffled, equal batches and 0 and 2
workers; rows per second from the second batch on, best of several rounds. Data: sequences of tokens, and files of 20 kB
with a label, as images are. The bar: not slower than the own loader. Then a loader is resumed at 90 % of the rows, and
from the beginning: seconds to the first batch. The bar: 1.2 ×.

Needs mosaicml-streaming or litdata; the one that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import midepoch

BATCH = 64
BAR, RESUME_BAR = 1.0, 1.2
Make = Callable[[int], Iterator[int]]


def tokens(rows: int) -> Iterator[dict[str, Any]]:
    for i in range(rows):
        yield {"id": i, "tokens": np.random.default_rng(i).integers(0, 50_000, 1024).astype(np.uint16)}


def images(rows: int) -> Iterator[dict[str, Any]]:
    for i in range(rows):
        yield {"label": i, "image": np.random.default_rng(i).bytes(15_000 + i * 37 % 10_000)}


def write_mds(folder: Path, rows: Iterator[dict[str, Any]], compression: str | None) -> None:
    from streaming import MDSWriter

    kinds = {"id": "int", "label": "int", "tokens": "ndarray:uint16", "image": "bytes"}
    first = next(rows)
    columns = {name: kinds[name] for name in first}
    with MDSWriter(out=str(folder), columns=columns, compression=compression, size_limit=16 << 20) as writer:
        writer.write(first)
        for row in rows:
            writer.write(row)


def write_litdata(folder: Path, rows: Iterator[dict[str, Any]], compression: str | None) -> None:
    import torch
    from litdata.streaming.writer import BinaryWriter
    from litdata.types import File

    writer = BinaryWriter(str(folder), chunk_bytes=16 << 20, compression=compression)
    for i, row in enumerate(rows):
        if "tokens" in row:
            row["tokens"] = torch.from_numpy(row["tokens"])
        else:
            row["image"] = File(bytes=row["image"])
        writer[i] = row
    writer.done()
    writer.merge()


def by_mosaic(folder: Path) -> Make:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    def make(workers: int) -> Iterator[int]:
        dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=1, batch_size=BATCH)
        for batch in DataLoader(dataset, batch_size=BATCH, num_workers=workers):
            yield len(next(iter(batch.values())))

    return make


def by_litdata(folder: Path) -> Make:
    from litdata import StreamingDataLoader, StreamingDataset

    def make(workers: int) -> Iterator[int]:
        dataset = StreamingDataset(str(folder), shuffle=True, seed=1)
        for batch in StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers):
            yield len(next(iter(batch.values())))

    return make


def by_midepoch(folder: Path) -> Make:
    def make(workers: int) -> Iterator[int]:
        ds = midepoch.from_files(folder).shuffle(seed=1)
        for batch in ds.loader(BATCH, num_workers=workers):
            yield len(next(iter(batch.values())))

    return make


def rate(batches: Iterator[int]) -> float:
    """The rows per second after the first batch."""
    next(batches)
    began, rows = time.perf_counter(), sum(batches)
    return rows / (time.perf_counter() - began)


def first_batch(folder: Path, position: float) -> float:
    """The seconds from opening to the first batch, resumed at a share of the rows."""
    ds = midepoch.from_files(folder).shuffle(seed=1)
    loader = ds.loader(BATCH)
    state = {**loader.state_dict(), "position": int(len(ds) * position) // BATCH * BATCH}
    began = time.perf_counter()
    resumed = midepoch.from_files(folder).shuffle(seed=1).loader(BATCH)
    resumed.load_state_dict(state)
    next(iter(resumed))
    return time.perf_counter() - began


PEERS: dict[str, tuple[str, Any, Any, str | None]] = {
    "MDS": ("streaming", write_mds, by_mosaic, "zstd"),
    "LitData": ("litdata", write_litdata, by_litdata, "zstd"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000, help="of tokens; a quarter of them for files")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{'rows/s':34} {'own loader':>10} {'midepoch':>10} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as name:
        os.environ["MIDEPOCH_CACHE"] = f"{name}/cache"
        for peer, (package, write, own, codec) in PEERS.items():
            if importlib.util.find_spec(package) is None:
                print(f"{peer}: {package} is not installed")
                continue
            for data, rows in ((tokens, args.rows), (images, args.rows // 4)):
                for compression in (None, codec) if data is tokens else (None,):
                    folder = Path(name) / "data"
                    write(folder, data(rows), compression)
                    compare(f"{peer}, {data.__name__}{', ' * bool(compression)}{compression or ''}", folder, own, args)
                    shutil.rmtree(folder)


def compare(case: str, folder: Path, own: Callable[[Path], Make], args: argparse.Namespace) -> None:
    theirs = folder.with_name("theirs")
    shutil.copytree(folder, theirs)  # their readers decompress and replace files
    for workers in (0, 2):
        makes = own(theirs), by_midepoch(folder)
        rates = np.array([[rate(make(workers)) for make in makes] for _ in range(args.rounds)]).max(axis=0)
        verdict = "passed" if rates[1] >= BAR * rates[0] else "LOST"
        label = f"{case}, {workers} workers"
        print(f"{label:34} {rates[0]:10,.0f} {rates[1]:10,.0f} {rates[1] / rates[0]:6.2f}  {verdict}", flush=True)
    shutil.rmtree(theirs)
    times = np.array([[first_batch(folder, share) for share in (0.0, 0.9)] for _ in range(args.rounds + 2)])
    fresh, resumed = np.median(times, axis=0)
    verdict = "passed" if resumed <= RESUME_BAR * fresh else "LOST"
    print(
        f"{case + ', first batch':34} {fresh * 1e3:7.0f} ms {resumed * 1e3:7.0f} ms {resumed / fresh:6.2f}  {verdict}"
    )


if __name__ == "__main__":
    main()
