"""Tokenised files beside np.memmap: `python -m benchmarks.tokens`.

Batches of shuffled rows, made in turn by a hand-written loop over np.memmap and by a loader without workers, best of
several rounds. Both copy every token once into arrays that the caller owns: documents of Megatron's `.bin` one array
each, sequences of a flat file one array for each batch. The bar: 0.9 × np.memmap. Then a blend of 100 prefixes is
opened without any file in the cache. The bar: 1 s.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import midepoch
from benchmarks.opening import write_megatron

BATCH, LENGTH = 64, 1024
BAR, SECONDS, PREFIXES = 0.9, 1.0, 100


def documents_by_memmap(prefix: Path, lengths: np.ndarray) -> Iterator[int]:
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r")
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    order = np.random.default_rng(1).permutation(len(lengths)).tolist()
    for first in range(0, len(order) - BATCH, BATCH):
        yield len([np.array(tokens[starts[row] : starts[row + 1]]) for row in order[first : first + BATCH]])


def sequences_by_memmap(path: Path) -> Iterator[int]:
    tokens = np.memmap(path, np.uint16, "r")
    order = np.random.default_rng(1).permutation(len(tokens) // LENGTH).tolist()
    for first in range(0, len(order) - BATCH, BATCH):
        yield len(np.stack([tokens[row * LENGTH : (row + 1) * LENGTH] for row in order[first : first + BATCH]]))


def by_midepoch(ds: midepoch.Dataset) -> Iterator[int]:
    for batch in ds.shuffle(seed=1).with_format("numpy").loader(BATCH):
        yield len(batch["input_ids"])


def rate(make: Callable[[], Iterator[int]], most: int) -> float:
    """The rows per second after the first batch."""
    batches, rows = make(), 0
    next(batches)
    began = time.perf_counter()
    for count in batches:
        rows += count
        if rows >= most:
            break
    return rows / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = np.random.default_rng(0).lognormal(6, 0.8, args.documents).astype(np.int64) + 1
        write_megatron(folder / "data", lengths)
        index = {"index_dir": folder / "index"}
        documents = midepoch.from_megatron(folder / "data", **index)
        sequences = midepoch.from_tokens(folder / "data.bin", LENGTH, dtype="uint16", **index)
        cases: dict[str, list[Callable[[], Iterator[int]]]] = {
            "documents of Megatron": [
                lambda: documents_by_memmap(folder / "data", lengths),
                lambda: by_midepoch(documents),
            ],
            f"sequences of {LENGTH}": [
                lambda: sequences_by_memmap(folder / "data.bin"),
                lambda: by_midepoch(sequences),
            ],
        }
        print(f"{'rows/s':24} {'np.memmap':>10} {'midepoch':>10} {'ratio':>6}")
        for case, makes in cases.items():
            rates = np.array([[rate(make, 50_000) for make in makes] for _ in range(args.rounds)]).max(axis=0)
            verdict = "passed" if rates[1] >= BAR * rates[0] else "LOST"
            print(f"{case:24} {rates[0]:10,.0f} {rates[1]:10,.0f} {rates[1] / rates[0]:6.2f}  {verdict}")
        for number in range(PREFIXES):
            write_megatron(folder / f"part_{number}", lengths[: args.documents // PREFIXES])
        blend = [each for number in range(PREFIXES) for each in ("1", str(folder / f"part_{number}"))]
        seconds = []
        for attempt in range(args.rounds):
            began = time.perf_counter()
            midepoch.from_megatron(blend, index_dir=folder / f"cold-{attempt}")
            seconds.append(time.perf_counter() - began)
        verdict = "passed" if min(seconds) <= SECONDS else "LOST"
        print(f"opening a blend of {PREFIXES} prefixes without a cache: {min(seconds):.3f} s  {verdict}")


if __name__ == "__main__":
    main()
