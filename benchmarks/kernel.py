"""Packing by the native kernel, by numpy, and by bare C calls on prepared arrays.

`python -m benchmarks.kernel`. Documents of log-normal lengths (mean 600 tokens, int32) are packed to 2,048. Processes
with the kernel and with numpy run in turn, and the best of each counts. `--before SRC` also runs the sources of an
older version. Three measures:

- stage: the pack stage as it runs in a pipeline, over documents in memory
- loader: `ds.pack(…).loader(64)` over an Arrow file, in order and shuffled, in this process
- bare C: the same functions of the kernel over the same documents, on arrays that exist
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import machine
from benchmarks.ranks import Measured

ROOT = Path(__file__).resolve().parent.parent
LENGTH, MEAN, SIGMA = 2048, 600, 1.0
DOCUMENTS = 40_000
CHUNKS, SIZES = 4, (1024, 4096)  # chunks of documents: rows of a source come in the larger, outputs of maps in fewer
STRATEGIES = ("concat", "best_fit")


def documents(count: int, seed: int) -> pa.Array:
    random = np.random.default_rng(seed)
    lengths = np.maximum(1, random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count).astype(np.int64))
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(random.integers(0, 50_000, ends[-1], dtype=np.int32)))


def write(path: Path) -> None:
    table = pa.table({"input_ids": documents(DOCUMENTS, 1)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


def best(run: Callable[[], int], repeats: int) -> float:
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        sequences = run()
        rates.append(sequences / (time.perf_counter() - start))
    return max(rates)


class Ready:
    """A flow of documents that are in memory."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = iter(parts)

    def pull(self) -> Any:
        return next(self._parts, None)


def staged(strategy: str, eos: int | None, parts: list[Any]) -> int:
    from midepoch.pipeline.stages import Packing, stage
    from midepoch.transforms.packing import PackSpec

    run: Any = None  # only functions need a context
    spec = PackSpec(LENGTH, eos=eos, strategy=strategy)
    flow, sequences = stage(spec, lambda _: Ready(parts), [[0, 0], 0], run, Packing()), 0
    while (chunk := flow.pull()) is not None:
        sequences += len(chunk.items)
    return sequences


class Bare:
    """The calls of the kernel that pack some documents, with everything prepared that is not their work."""

    def __init__(self, column: pa.Array, strategy: str, outputs: list[Any]) -> None:
        from midepoch import _native

        lengths = np.diff(column.offsets.to_numpy()).astype(np.int64)
        self.tokens, self.lengths, self.strategy = column.values.to_numpy(), lengths, strategy
        counts = -(-lengths // LENGTH)
        owners = np.repeat(np.arange(len(lengths)), counts)
        into = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * LENGTH
        self.pieces = np.minimum(lengths[owners] - into, LENGTH)
        self.starts = np.cumsum(self.pieces) - self.pieces
        bins, offsets, self.numbers, self.rooms = _native.best_fit(self.pieces, LENGTH)
        self.targets = bins * LENGTH + offsets
        self.packs = len(self.rooms) if strategy == "best_fit" else len(self.tokens) // LENGTH
        self.padding = np.arange(1, len(self.rooms) + 1) * LENGTH - self.rooms
        self.arrays = [array[: self.packs * LENGTH] for array in outputs]

    def run(self) -> int:
        from midepoch import _native

        out, positions, segments = self.arrays
        if self.strategy == "concat":
            zero = np.zeros(1, np.int64)
            _native.copy_ranges(self.tokens, zero, np.array([len(out)]), out, zero)
            _native.number_concatenated(positions, segments, self.lengths, LENGTH)
            return self.packs
        _native.best_fit(self.pieces, LENGTH)
        _native.copy_ranges(self.tokens, self.starts, self.pieces, out, self.targets)
        _native.number_ranges(positions, segments, self.targets, self.pieces, self.numbers)
        for array in self.arrays:
            _native.fill_ranges(array, 0, self.padding, self.rooms)
        return self.packs


def rates(path: str, repeats: int) -> dict[str, float]:
    """Sequences a second of the midepoch that is imported here."""
    import midepoch
    from midepoch.pipeline.chunk import Chunk
    from midepoch.transforms import Batch

    found = {}
    for size in SIZES:
        rows, parts = np.arange(size), []
        for number in range(CHUNKS):
            batch = Batch({"input_ids": documents(size, number)}, rows, rows, True)
            parts.append(Chunk(batch, lambda outputs: [outputs, 0]))
        for strategy, eos in product(STRATEGIES, (None, 1)):

            def run(strategy: str = strategy, eos: int | None = eos, parts: list[Any] = parts) -> int:
                return staged(strategy, eos, parts)

            found[f"stage {strategy} {size}{'' if eos is None else ' eos'}"] = best(run, 3 * repeats)
    ds = midepoch.from_files(path)
    for strategy, shuffled in product(STRATEGIES, (False, True)):
        packed = (ds.shuffle(seed=1) if shuffled else ds).pack(LENGTH, strategy=strategy, eos=1).with_format("numpy")

        def load(packed: Any = packed) -> int:
            return sum(len(batch["input_ids"]) for batch in packed.loader(64))

        found[f"loader {strategy}{' shuffled' * shuffled}"] = best(load, repeats)
    return found


def bare_rates(repeats: int) -> dict[str, float]:
    """Of the same documents, in two sets of arrays: what is delivered exists while the next is made."""
    found = {}
    for size, strategy in product(SIZES, STRATEGIES):
        outputs = [[np.zeros(size * MEAN * 2, np.int32) for _ in range(3)] for _ in range(2)]
        calls = [Bare(documents(size, number), strategy, outputs[number % 2]) for number in range(CHUNKS)]

        def run(calls: list[Bare] = calls) -> int:
            return sum(each.run() for each in calls)

        found[f"bare C {strategy} {size}"] = best(run, 3 * repeats)
    return found


def child(path: Path, sources: Path, native: bool, bare: bool) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": f"{sources}:{ROOT}", "MIDEPOCH_NATIVE": str(int(native))}
    command = [sys.executable, "-m", "benchmarks.kernel", "--measure", str(path), *["--bare"] * bare]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(repeats: int, before: Path | None) -> list[Measured]:
    contenders = {"kernel": (ROOT / "src", True), "numpy": (ROOT / "src", False)}
    if before is not None:
        contenders["before"] = (before, False)
    found: dict[str, dict[str, float]] = {name: {} for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "documents.arrow")
        write(path)
        for _ in range(repeats):
            for name, (sources, native) in contenders.items():
                for measure, rate in child(path, sources, native, name == "kernel").items():
                    found[name][measure] = max(rate, found[name].get(measure, 0.0))
    print(f"{'sequences/s':28}" + "".join(f"{name:>14}" for name in contenders))
    for measure in found["kernel"]:
        rates_of = [found[name].get(measure) for name in contenders]
        print(f"{measure:28}" + "".join(f"{'' if rate is None else f'{rate:,.0f}':>14}" for rate in rates_of))
    reference, ours = found["before" if before is not None else "numpy"], found["kernel"]
    bars = [
        Measured(f"{measure}: kernel / numpy path", rate / reference[measure], 5, "x", least=True)
        for measure, rate in ours.items()
        if measure in reference
    ]
    for strategy, size in product(STRATEGIES, SIZES):
        ratio = ours[f"stage {strategy} {size}"] / ours[f"bare C {strategy} {size}"]
        bars.append(Measured(f"stage {strategy} {size}: kernel / bare C", ratio, 0.5, "x", least=True))
    if before is not None:
        for measure, rate in found["numpy"].items():
            bars.append(Measured(f"{measure}: numpy / before", rate / reference[measure], 0.97, "x", least=True))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, help="the folder src of an older version")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps({**rates(options.measure, 3), **(bare_rates(3) if options.bare else {})}))
        return
    print(json.dumps(machine.describe()))
    for each in compare(options.repeats, options.before):
        mark = "ok  " if each.passed else "LOST"
        print(f"{mark} {each.name:48} {each.measured:8.2f} {each.unit} (bar >= {each.bar:g})")


if __name__ == "__main__":
    main()
