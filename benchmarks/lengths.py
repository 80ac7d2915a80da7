"""Row lengths from Arrow offsets, beside reading the offsets alone: `python -m benchmarks.lengths`.

An Arrow file of 10⁸ lists of log-normal lengths (mean 600, at most `--longest`), in record batches of 1,000 rows as
`datasets` writes them, and in batches of 65,536. The items are nulls, which take no bytes: the file is its offsets. In
turn:

- read: one thread maps the file and adds up the offsets of each record batch (`np.add.reduce`)
- computed: all lengths, checked and compact, in the memory of a few blocks
- lengths: `lengths_of` without a sidecar: computed, written, synced to disk and mapped
- again: `lengths_of` with the sidecar

`--cold` drops the pages of the file before each. The bar is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks import machine
from benchmarks.ranks import Measured
from midepoch.sources import Source
from midepoch.sources.lake import open_index
from midepoch.sources.lengths import lengths_of, measured_blocks

ROWS, MEAN, SIGMA, LONGEST = 10**8, 600, 1.0, 1 << 15
BLOCKS = (1_000, 1 << 16)
RATIO, AGAIN_SECONDS, MEGABYTES = 2.0, 0.01, 64
_KIND = pa.list_(pa.null())


def write(path: Path, rows: int, block: int, longest: int) -> None:
    """Write lists in record batches of ``block`` rows."""
    random = np.random.default_rng(1)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.schema({"input_ids": _KIND})) as writer:
        for start in range(0, rows, block):
            count = min(block, rows - start)
            lengths = random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count).clip(1, longest).astype(np.int64)
            ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            items = [pa.nulls(int(ends[-1]))]
            column = pa.Array.from_buffers(_KIND, count, [None, pa.py_buffer(ends)], children=items)
            writer.write_batch(pa.record_batch([column], names=["input_ids"]))


def read(source: Source) -> None:
    """Add up the offsets of all record batches."""
    with pa.memory_map(source.files[0].path) as mapped:
        buffer = mapped.read_buffer()
    rows = np.diff(source.layout.block_starts).tolist()
    for offset, count in zip(source.offsets.tolist(), rows, strict=False):
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(buffer.slice(offset)), source.schema)
        np.add.reduce(np.frombuffer(batch.column(0).buffers()[1], np.int32, count + 1))


def compute(source: Source) -> None:
    """Compute all lengths, and keep none."""
    for _ in measured_blocks(source, "input_ids", skip_corrupt=False):
        pass


class Peak:
    """Largest anonymous memory of this process while it runs, above that at the start, in MB."""

    def __init__(self) -> None:
        self.megabytes, self._over = 0.0, threading.Event()

    def __enter__(self) -> Peak:
        first = _anonymous()

        def watch() -> None:
            while not self._over.wait(0.005):
                self.megabytes = max(self.megabytes, _anonymous() - first)

        self._thread = threading.Thread(target=watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _anonymous() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def timed(action: Callable[[], object], path: Path, cold: bool) -> float:
    with path.open("rb") as file:
        if cold:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(folder: Path, block: int, args: argparse.Namespace) -> list[Measured]:
    path, index = folder / "lists.arrow", folder / "index"
    write(path, args.rows, block, args.longest)
    source = Source(open_index([path], index_dir=index))
    seconds: dict[str, list[float]] = {"read": [], "computed": [], "lengths": [], "again": []}
    peak = 0.0
    for _ in range(args.repeats):
        for sidecar in index.glob("*.midepoch-lengths"):
            sidecar.unlink()
        seconds["read"].append(timed(lambda: read(source), path, args.cold))
        seconds["computed"].append(timed(lambda: compute(source), path, args.cold))
        with Peak() as memory:
            seconds["lengths"].append(timed(lambda: lengths_of(source, "input_ids"), path, args.cold))
        seconds["again"].append(timed(lambda: lengths_of(source, "input_ids"), path, False))
        peak = max(peak, memory.megabytes)
    ratios = {name: float(np.median(np.array(each) / np.array(seconds["read"]))) for name, each in seconds.items()}
    medians = ", ".join(f"{name} {np.median(each):.4f} s" for name, each in seconds.items())
    print(f"        {args.rows:,} rows in batches of {block:,}, {'cold' if args.cold else 'warm'}: {medians}")
    return [
        Measured("computed", ratios["computed"], RATIO, "× read"),
        Measured("lengths", ratios["lengths"], RATIO, "× read"),
        Measured("again", float(np.median(seconds["again"])), AGAIN_SECONDS, "s"),
        Measured("memory of lengths", peak, MEGABYTES, "MB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--longest", type=int, default=LONGEST, help="over 65,535, the sidecar takes 4 bytes per row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--dir", type=Path, help="folder for 500 MB of files, which are removed")
    args = parser.parse_args()
    print(machine.describe())
    for block in BLOCKS:
        folder = Path(tempfile.mkdtemp(dir=args.dir))
        try:
            for each in measure(folder, block, args):
                verdict = "passed" if each.passed else "LOST  "
                print(f"{verdict}  {each.name}: {each.measured:.4g} {each.unit} (at most {each.bar:g})")
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
