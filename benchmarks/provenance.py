"""The cost of provenance in batches, in time and in bytes: `python -m benchmarks.provenance`.

Two loaders of the same data, with and without ``provenance=True``, run in turn in slices of some batches: rows copied
from mapped files (the cheapest batches there are, so that it shows most), a mix, a filtered mix, and packed sequences
of both strategies. Three overheads: of batches that are only delivered; of batches whose documents are all looked at;
and with a ledger. Each is the mean over all slices: the work for many batches at a time is in a few of them. The bars:
2 % and 16 bytes for a document.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import midepoch

BAR, BYTES = 0.02, 16
LENGTH = 2048
SLICE = 20
Make = Callable[..., midepoch.Loader]
Look = Callable[[Any], None]
Seconds = npt.NDArray[np.float64]


def write(path: Path, table: pa.Table) -> str:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1024)
    return str(path)


def rows(path: Path, count: int, seed: int) -> str:
    """Rows of 1,024 tokens."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, count * 1024, dtype=np.int32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), 1024)
    return write(path, pa.table({"id": np.arange(count), "input_ids": column}))


def documents(path: Path, count: int, seed: int) -> str:
    """Documents with a mean of about 600 tokens."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(6, 0.9, count), 8, 20_000).astype(np.int64)
    ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
    tokens = generator.integers(0, 50_000, int(ends[-1]), dtype=np.int32)
    column = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens))
    return write(path, pa.table({"id": np.arange(count), "input_ids": column}))


def keeps(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 10)


def cases(folder: Path) -> dict[str, Make]:
    """The pipelines that are measured, by name."""
    of_rows = [midepoch.from_files(rows(folder / f"r{i}.arrow", 8_000, i)).shuffle(seed=i) for i in range(3)]
    of_docs = [midepoch.from_files(documents(folder / f"d{i}.arrow", 8_000, i)).shuffle(seed=i) for i in range(3)]
    names = ("web", "code", "math")

    def mixed(parts: list[midepoch.Dataset]) -> midepoch.Dataset:
        return midepoch.mix(dict(zip(names, parts, strict=True)), [0.6, 0.3, 0.1], seed=1, stop="never")

    filtered = [ds.filter(keeps) for ds in of_docs]
    return {
        "rows, 64 of 1,024 tokens": lambda **kw: of_rows[0].loader(64, **kw),
        "mix of rows, 64 of 1,024": lambda **kw: mixed(of_rows).loader(64, **kw),
        "packed, 8 of 2,048": lambda **kw: of_docs[0].pack(LENGTH).loader(8, **kw),
        "packed mix, 8 of 2,048": lambda **kw: mixed(of_docs).pack(LENGTH).loader(8, **kw),
        "packed, filtered mix, 8 of 2,048": lambda **kw: mixed(filtered).pack(LENGTH).loader(8, **kw),
        "best fit, 8 of 2,048": lambda **kw: of_docs[0].pack(LENGTH, strategy="best_fit").loader(8, **kw),
    }


def forever(loader: midepoch.Loader) -> Iterator[Any]:
    return chain.from_iterable(map(iter, repeat(loader)))


def sliced(batches: Iterator[Any], look: Look | None = None) -> float:
    """The processor seconds of a batch, over a slice of some. (Other processes would disturb the clock.)"""
    start = time.process_time()
    for _ in range(SLICE):
        batch = next(batches)
        if look is not None:
            look(batch)
    return (time.process_time() - start) / SLICE


def in_turn(loaders: Iterable[Iterator[Any]], slices: int, warmup: int, look: Look | None = None) -> Seconds:
    """The processor seconds of a batch by loader and slice. Loaders take turns, and every other time in reverse."""
    loaders = list(loaders)
    for batches in loaders:
        for _ in range(warmup):
            sliced(batches)
    seconds = np.empty((len(loaders), slices))
    numbers = range(len(loaders))
    for each in range(slices):
        for number in numbers if each % 2 else reversed(numbers):
            seconds[number, each] = sliced(loaders[number], look)
    return seconds


def delivered(batch: Any) -> None:
    """Look at nothing of a batch."""


def read(batch: Any) -> None:
    """Look at all of the provenance of a batch."""
    dict(batch.get("doc_ids", ()))


def overhead(make: Make, slices: int, folders: tuple[Path, Path] | None, look: Look = delivered) -> tuple[float, float]:
    """The seconds of a batch without provenance, and the share by which it takes longer with it."""
    options: list[dict[str, Any]] = [{}, {"provenance": True}]
    for each, folder in zip(options, folders or (), strict=False):
        each["audit"] = folder
    before, after = in_turn((forever(make(**each)) for each in options), slices, 20, look)
    return float(before.mean()), float(after.mean() / before.mean() - 1)


def bytes_of(make: Make, batches: int = 50) -> tuple[float, int]:
    """The bytes of provenance for a document in batches, and the number of documents of a batch."""
    size = count = 0
    for _, batch in zip(range(batches), forever(make(provenance=True)), strict=False):
        found = batch["doc_ids"]
        size += sum(values.nbytes for values in found.values())
        count += len(found["row"])
    return size / count, count // batches


def recorded_bytes(make: Make, folder: Path, batches: int = 4000) -> float | None:
    """The bytes for a document beside the ledger, or None if positions tell the rows."""
    loader = make(provenance=True, audit=folder)
    count = 0
    for _, batch in zip(range(batches), forever(loader), strict=False):
        count += len(batch["doc_ids"]["row"])
    loader.close()
    found = list(folder.glob("*.documents"))
    return found[0].stat().st_size / count if found else None


def arguments(about: str | None, slices: int) -> argparse.Namespace:
    """The arguments of a command that measures pairs of slices: how many, and of which cases."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=slices, help=f"pairs of slices of {SLICE} batches")
    parser.add_argument("--only", default="", help="only the cases with this in their names")
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__, 200)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = ("a batch", "delivered", "read", "with ledger", "documents", "bytes", "ledger")
        print(f"{'':34} {columns[0]:>10} {' '.join(f'{column:>11}' for column in columns[1:])}")
        for case, make in cases(folder).items():
            if args.only not in case:
                continue
            seconds, share = overhead(make, args.slices, None)
            _, looked = overhead(make, args.slices, None, read)
            _, audited = overhead(make, args.slices, (folder / f"{case}-a", folder / f"{case}-b"))
            size, count = bytes_of(make)
            beside = recorded_bytes(make, folder / f"{case}-c")
            good = share <= BAR and size <= BYTES and (beside or 0) <= BYTES
            shares = " ".join(f"{100 * each:+9.2f} %" for each in (share, looked, audited))
            print(
                f"{case:34} {1e6 * seconds:7.0f} µs {shares}"
                f" {count:11} {size:11.1f} {'none' if beside is None else f'{beside:.1f}':>11}  "
                f"{'passed' if good else 'LOST'}"
            )


if __name__ == "__main__":
    main()
