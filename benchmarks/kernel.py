"""Packing by the native kernel, by numpy, and by bare C calls on prepared arrays.

`python -m benchmarks.kernel`. Documents of log-normal lengths (mean 600 tokens, int32) are packed to 2,048. Processes
with the kernel and with numpy run in turn, and the best of each counts. `--before SRC` also runs the sources of an
older version. Three measures:

- stage: the pack stage as it runs in a pipeline, over documents in memory
- loader: `ds.pack(…).loader(64)` over an Arrow file, in order and shuffled, in this process
- bare C: the same functions of the kernel, on arrays that exist, in memory that was used before
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
DOCUMENTS, TOGETHER = 40_000, 1024
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


def bare_concat(lengths: Any, tokens: Any) -> Callable[[], int]:
    from midepoch import _native

    packs = len(tokens) // LENGTH
    size = packs * LENGTH
    out, positions, segments = (np.zeros(size, np.int32) for _ in range(3))
    zero, all_of = np.zeros(1, np.int64), np.array([size])

    def run() -> int:
        _native.copy_ranges(tokens, zero, all_of, out, zero)
        _native.number_concatenated(positions, segments, lengths, LENGTH)
        return packs

    return run


def bare_best_fit(lengths: Any, tokens: Any) -> Callable[[], int]:
    from midepoch import _native

    pieces = np.concatenate([[*[LENGTH] * (n // LENGTH), *[n % LENGTH] * (n % LENGTH > 0)] for n in lengths.tolist()])
    pieces = pieces.astype(np.int64)
    starts = np.cumsum(pieces) - pieces
    bins, offsets, numbers, rooms = _native.best_fit(pieces, LENGTH)
    targets, packs = bins * LENGTH + offsets, len(rooms)
    out, positions, segments = (np.zeros(packs * LENGTH, np.int32) for _ in range(3))
    padding = np.arange(1, packs + 1) * LENGTH - rooms

    def run() -> int:
        _native.best_fit(pieces, LENGTH)
        _native.copy_ranges(tokens, starts, pieces, out, targets)
        _native.number_ranges(positions, segments, targets, pieces, numbers)
        for array in (out, positions, segments):
            _native.fill_ranges(array, 0, padding, rooms)
        return packs

    return run


def rates(path: str, repeats: int) -> dict[str, float]:
    """Sequences a second of the midepoch that is imported here."""
    import midepoch
    from midepoch.pipeline.chunk import Chunk
    from midepoch.transforms import Batch

    parts = []
    for number in range(8):
        rows = np.arange(TOGETHER)
        batch = Batch({"input_ids": documents(TOGETHER, number)}, rows, rows, True)
        parts.append(Chunk(batch, lambda outputs: [outputs, 0]))
    found = {}
    for strategy, eos in product(STRATEGIES, (None, 1)):
        name = f"{strategy}{'' if eos is None else ' eos'}"
        found[f"stage {name}"] = best(lambda s=strategy, e=eos: staged(s, e, parts), 3 * repeats)  # type: ignore[misc]
    ds = midepoch.from_files(path)
    for strategy, shuffled in product(STRATEGIES, (False, True)):
        packed = (ds.shuffle(seed=1) if shuffled else ds).pack(LENGTH, strategy=strategy, eos=1).with_format("numpy")

        def load(packed: Any = packed) -> int:
            return sum(len(batch["input_ids"]) for batch in packed.loader(64))

        found[f"loader {strategy}{' shuffled' * shuffled}"] = best(load, repeats)
    return found


def bare_rates(repeats: int) -> dict[str, float]:
    column = documents(TOGETHER, 0)
    lengths, tokens = np.diff(column.offsets.to_numpy()).astype(np.int64), column.values.to_numpy()
    runs = {"concat": bare_concat(lengths, tokens), "best_fit": bare_best_fit(lengths, tokens)}
    return {f"bare C {name}": best(run, 30 * repeats) for name, run in runs.items()}


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
    for strategy in STRATEGIES:
        ratio = ours[f"stage {strategy}"] / ours[f"bare C {strategy}"]
        bars.append(Measured(f"stage {strategy}: kernel / bare C", ratio, 0.5, "x", least=True))
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
