"""Leases: the cost of an acknowledgement, of a state with 1,000 leases out, and of delivering leases.

`python -m benchmarks.leases`. Rates are measured in turn with the same loader without leases, best of several.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import midepoch
from benchmarks.ranks import Measured

ROWS = 200_000
OUT = 1_000


def write(folder: Path) -> str:
    """A file of prompts: rows of 16 tokens."""
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 16, dtype=np.int32)), 16)
    path = folder / "prompts.arrow"
    table = pa.table({"id": np.arange(ROWS), "tokens": tokens})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1024)
    return str(path)


def keep(ids: Any) -> list[bool]:
    return [bool(i % 10) for i in ids["id"]]


def pipelines(path: str) -> dict[str, Callable[[], midepoch.Dataset]]:
    def rows() -> midepoch.Dataset:
        return midepoch.from_files(path).shuffle(seed=1).with_format("numpy")

    return {"rows": rows, "filter": lambda: rows().filter(keep, batched=True)}


def acknowledged(make: Callable[[], midepoch.Dataset], repeats: int) -> float:
    """Nanoseconds of an `ack`, in a random order, with 1,000 leases out."""
    best = float("inf")
    draw = random.Random(1)
    for _ in range(repeats):
        loader = make().loader(8)
        with loader.lease() as items:
            for _ in range(8):
                leases = [next(items) for _ in range(OUT)]
                draw.shuffle(leases)
                start = time.perf_counter_ns()
                for lease in leases:
                    lease.ack()
                best = min(best, (time.perf_counter_ns() - start) / OUT)
    return best


def state(make: Callable[[], midepoch.Dataset], repeats: int, **options: Any) -> tuple[int, float]:
    """Bytes of a state with 1,000 scattered leases out, and milliseconds to make it after 100 acknowledgements."""
    draw, size, best = random.Random(2), 0, float("inf")
    loader = make().loader(1, **options)
    with loader.lease() as items:
        held: list[midepoch.Lease] = []
        for number, lease in enumerate(items):
            held.append(lease)
            if len(held) > OUT:
                held.pop(draw.randrange(len(held))).ack()
            if number > 3 * OUT and number % 100 == 0:
                start = time.perf_counter()
                found = loader.state_dict()
                best = min(best, time.perf_counter() - start)
                size = max(size, len(json.dumps(found)))
            if number > 3 * OUT + 100 * repeats:
                break
    return size, best * 1_000


def rate(make: Callable[[], midepoch.Dataset], leased: bool) -> float:
    """Rows a second in batches of 64."""
    loader = make().loader(64)
    rows, start = 0, time.perf_counter()
    if leased:
        with loader.lease() as items:
            for lease in items:
                rows += len(lease.batch["id"])
                lease.ack()
    else:
        for batch in loader:
            rows += len(batch["id"])
    return rows / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        for name, make in pipelines(path).items():
            found = [Measured(f"{name}: ack", acknowledged(make, repeats), 2_000, "ns")]
            size, milliseconds = state(make, 20 * repeats)
            found.append(Measured(f"{name}: state with {OUT:,} leases out", size, 4_096, "bytes"))
            found.append(Measured(f"{name}: state_dict() with {OUT:,} leases out", milliseconds, 5, "ms"))
            size, milliseconds = state(make, 20 * repeats, rank=1, world_size=8, last_batch="uneven")
            found.append(Measured(f"{name}: state of rank 1 of 8", size, 4_096, "bytes"))
            found.append(Measured(f"{name}: state_dict() of rank 1 of 8", milliseconds, 5, "ms"))
            pairs = [(rate(make, False), rate(make, True)) for _ in range(repeats)]
            plain, leased = (max(rates) for rates in zip(*pairs, strict=True))
            for one in found:
                print(f"{'passed' if one.passed else 'LOST':7}{one.name}: {one.measured:,.2f} {one.unit}")
            print(f"       {name}: {plain:,.0f} rows/s without leases, {leased:,.0f} with ({leased / plain:.2f} ×)")


if __name__ == "__main__":
    main()
