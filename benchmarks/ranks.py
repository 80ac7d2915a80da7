"""Several ranks: an elastic resume at 10⁸ rows, what the ledger costs, two ranks on one machine, indexing on Ray.

`python -m benchmarks.ranks`. Each bar is a ratio or a limit, measured in turn in one run, best of several. With
``--mosaic PYTHON`` (an environment of requirements-mosaic.txt) what Mosaic Streaming does on every start and resume for
as many rows is measured beside the first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from benchmarks import data, huge, machine

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = 100_000  # of 1,000 rows


class Measured(NamedTuple):
    """One bar: at most (or, of a ratio, at least) ``bar`` of ``unit``."""

    name: str
    measured: float
    bar: float
    unit: str
    least: bool = False

    @property
    def passed(self) -> bool:
        return self.measured >= self.bar if self.least else self.measured <= self.bar


ELASTIC = """
import json, sys, time
import numpy, pyarrow
import midepoch.open, midepoch.loader.make
path, index, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
def open_loader(rank, world):
    ds = midepoch.from_files(path, index_dir=index).shuffle(seed=1, scope="rows").with_format("numpy")
    return ds.loader(64, rank=rank, world_size=world)
state = {**open_loader(0, 8).state_dict(), "position": 8 * 64 * 150_000}  # of 8 ranks, at three quarters
start = time.perf_counter()
loader = open_loader(rank, 6)
loader.load_state_dict(state)
batch = next(iter(loader))
seconds = time.perf_counter() - start
resident = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
print(json.dumps([seconds, resident]))
"""

MOSAIC = """
import json, sys, time
import numpy as np
from streaming.base.partition import get_partitions
from streaming.base.shuffle import get_shuffle
rows, shards = int(sys.argv[1]), 1000
start = time.perf_counter()
ids = get_partitions("relaxed", rows, 8, 1, 6, 1, 64, rows // 4 * 3 // 64 * 64, 8)
order = get_shuffle("py1e", np.full(shards, rows // shards, np.int64), 8, 9176, 0, 1 << 18)
ids = np.where(ids != -1, order[ids], -1)
seconds = time.perf_counter() - start
resident = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
print(json.dumps([seconds, resident]))
"""


def _run(python: str, program: str, *arguments: Any) -> Any:
    command = [python, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def elastic(folder: Path, repeats: int, mosaic: str | None) -> list[Measured]:
    """From 8 ranks to 6: opening, loading the state, the first batch, in fresh processes."""
    path = huge.make(folder / "elastic", BLOCKS)
    index = folder / "elastic" / "index"
    runs = [_run(sys.executable, ELASTIC, path, index, rank % 6) for rank in range(repeats + 1)][1:]
    if mosaic:
        seconds, megabytes = _run(mosaic, MOSAIC, BLOCKS * huge.ROWS)
        print(f"Mosaic Streaming, order of as many rows for 6 ranks: {seconds:.1f} s, {megabytes:,.0f} MB at its peak")
    return [
        Measured("resume at another world size, 10⁸ rows shuffled", min(run[0] for run in runs), 0.5, "s"),
        Measured("memory of a rank that did, at its peak", max(run[1] for run in runs), 200, "MB"),
    ]


def ledger(files: data.Files, repeats: int) -> Measured:
    """Two loaders of the tokens, with and without, in turn for 50 batches each: the cheapest batches there are, so that
    the ledger shows most. The medians of those slices are compared: whole passes differ by more than it costs.
    """
    slices: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        ds = midepoch.from_files(files.arrow).shuffle(seed=1).with_format("numpy")
        loaders = {audited: ds.loader(64, last_batch="drop", audit=folder if audited else None) for audited in slices}
        for turn in range(4 * repeats):
            passing = {audited: iter(loader) for audited, loader in loaders.items()}
            for number in range(files.rows // 64 // 50):
                for audited in (False, True) if (number + turn) % 2 else (True, False):
                    start = time.perf_counter()
                    for _ in range(50):
                        next(passing[audited])
                    slices[audited].append(time.perf_counter() - start)
    return Measured(
        "ledger on beside off, tokens", float(np.median(slices[False]) / np.median(slices[True])), 0.97, "x", least=True
    )


RANK = """
import sys, time
import midepoch
rank, world, batches = map(int, sys.argv[1:4])
loader = midepoch.from_files(sys.argv[4:]).shuffle(seed=1).loader(64, 2, rank=rank, world_size=world, last_batch="drop")
for _ in range(2):
    passing = iter(loader)
    next(passing)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    for _ in range(batches):
        next(passing)
    print(batches * 64 / (time.perf_counter() - start), flush=True)
"""


def _together(shapes: list[tuple[int, int]], batches: int, files: data.Files) -> float:
    """Rows a second over all processes, which begin at once; the better of two passes."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(batches), *files.arrow],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank, world in shapes
    ]
    best = 0.0
    for _ in range(2):
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("go\n")
            program.stdin.flush()
        best = max(best, sum(float(program.stdout.readline()) for program in programs if program.stdout))
    for program in programs:
        program.communicate()
    return best


def two_ranks(files: data.Files, repeats: int) -> Measured:
    """Beside two processes that each read for themselves, on the same cores."""
    batches = files.rows // 64 // 2 - 2
    best = [0.0, 0.0]
    for _ in range(repeats):
        for number, shapes in enumerate(([(0, 1), (0, 1)], [(0, 2), (1, 2)])):
            best[number] = max(best[number], _together(shapes, batches, files))
    return Measured("2 ranks x 2 workers beside 2 processes without ranks, tokens", best[1] / best[0], 0.9, "x", True)


def indexing(folder: Path, repeats: int, count: int = 2000) -> Measured:
    """2,000 Parquet files: Ray with two workers beside local threads. Ray itself is running already."""
    import ray

    from midepoch.integrations.ray import build_index

    files = folder / "indexing"
    if not files.exists():
        files.mkdir(parents=True)
        draw = np.random.default_rng(0)
        for number in range(count):
            columns = {f"c{i}": draw.random(2000) for i in range(8)}
            pq.write_table(pa.table(columns), files / f"{number:05}.parquet", row_group_size=250)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as index:
            start = time.perf_counter()
            midepoch.from_files(files, index_dir=Path(index) / "threads")
            best[0] = min(best[0], time.perf_counter() - start)
            start = time.perf_counter()
            build_index(files, index_dir=Path(index) / "ray")
            best[1] = min(best[1], time.perf_counter() - start)
    ray.shutdown()
    return Measured("indexing 2,000 Parquet files, Ray beside threads", best[0] / best[1], 0.8, "x", least=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mosaic", help="a Python with Mosaic Streaming")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(machine.describe())
    tokens = data.load(args.data_dir).tokens
    found = [
        *elastic(args.data_dir, args.repeats, args.mosaic),
        ledger(tokens, args.repeats),
        two_ranks(tokens, max(2, args.repeats // 2)),
        indexing(args.data_dir, args.repeats),
    ]
    for one in found:
        verdict = "passed" if one.passed else "LOST  "
        print(
            f"{verdict}  {one.name}: {one.measured:.3f} {one.unit} (at {'least' if one.least else 'most'} {one.bar:g})"
        )
    if args.json:
        args.json.write_text(json.dumps([{**one._asdict(), "passed": one.passed} for one in found], indent=1))


if __name__ == "__main__":
    main()
