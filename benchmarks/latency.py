"""What is not throughput: import, second open, resume, the cost of a state. `python -m benchmarks.latency`.

Each bar is measured in fresh processes where start-up matters, best of several, and printed as passed or LOST.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import data, huge, machine
from benchmarks.contenders.common import BATCH

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 7

# midepoch imports its parts when they are first used: named here, so that they count as imports and not as opening.
IMPORTS = "import numpy, pyarrow, midepoch, midepoch.open, midepoch.loader\n"


@dataclass(frozen=True)
class Measured:
    """One bar: at most `allowed` of `unit`."""

    bar: str
    unit: str
    allowed: float
    measured: float

    @property
    def passed(self) -> bool:
        return self.measured <= self.allowed


def _seconds_inside(code: str, *, setup: str = "") -> float:
    """Best time of `code` in fresh processes, timed inside them after `setup`."""
    return min(_seconds_once(code, setup) for _ in range(REPEATS))


def _seconds_once(code: str, setup: str) -> float:
    program = f"import time\n{setup}\nstart = time.perf_counter()\n{code}\nprint(time.perf_counter() - start)"
    return float(_python(program))


def _seconds_outside(code: str) -> float:
    """Best time of whole processes that run `code`."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        _python(code)
        best = min(best, time.perf_counter() - start)
    return best


def _python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def import_time(dataset: data.Data) -> list[Measured]:
    """`import midepoch`, beyond what a bare interpreter takes to start and end."""
    bare = _seconds_outside("pass")
    whole = _seconds_outside("import midepoch")
    return [Measured("import midepoch, beyond a bare interpreter", "ms", 100, (whole - bare) * 1_000)]


def second_open(dataset: data.Data) -> list[Measured]:
    """Open an indexed dataset and read its first row, beyond imports."""
    measured = []
    for name, files in (("text", dataset.text), ("tokens", dataset.tokens)):
        code = f"row = next(iter(midepoch.from_files({list(files.arrow)!r})))"
        _python(IMPORTS + code)  # the first open builds the index
        seconds = _seconds_inside(code, setup=IMPORTS)
        measured.append(Measured(f"second open of {name} to first row, beyond imports", "ms", 50, seconds * 1_000))
    return measured


def resume(dataset: data.Data) -> list[Measured]:
    """First batch after a resume at 90 % against first batch of a fresh start, same process age."""
    import midepoch

    measured = []
    paths = list(dataset.tokens.arrow)
    batches = dataset.tokens.rows // BATCH
    for workers in (0, 2):
        make = (
            f"loader = midepoch.from_files({paths!r}).select_columns(['tokens']).shuffle(seed=1, scope='rows')"
            f".with_format('torch').loader(batch_size={BATCH}, num_workers={workers})\n"
        )
        tokens = midepoch.from_files(paths).select_columns(["tokens"]).shuffle(seed=1, scope="rows")
        loader = tokens.with_format("torch").loader(batch_size=BATCH, num_workers=workers)
        state = _state_at(loader, batches * 9 // 10)
        setup = IMPORTS + "import json, torch\n" + f"state = json.loads({json.dumps(json.dumps(state))})\n"
        start = make + "first = next(iter(loader))"
        again = make + "loader.load_state_dict(state)\nfirst = next(iter(loader))"
        # In turn, so that a slow moment of the machine hits both.
        pairs = [(_seconds_once(start, setup), _seconds_once(again, setup)) for _ in range(REPEATS)]
        fresh, resumed = (min(seconds) for seconds in zip(*pairs, strict=True))
        bar = f"resume at 90 %, {workers} workers: first batch ÷ fresh start's ({fresh * 1_000:.1f} ms)"
        measured.append(Measured(bar, "×", 1.2, resumed / fresh))
    return measured


def _state_at(loader: Any, batch: int) -> Any:
    for number, _ in enumerate(loader, 1):
        if number == batch:
            return loader.state_dict()
    raise RuntimeError(f"expected more than {batch} batches")


def state_cost(dataset: data.Data) -> list[Measured]:
    """`loader.state_dict()` in the middle of an epoch, and its size as JSON."""
    import midepoch

    tokens = midepoch.from_files(list(dataset.tokens.arrow)).select_columns(["tokens"]).shuffle(seed=1, scope="rows")
    loader = tokens.with_format("torch").loader(batch_size=BATCH, num_workers=0)
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(1_000):
            state = loader.state_dict()
        best = min(best, (time.perf_counter() - start) / 1_000)
    return [
        Measured("loader.state_dict()", "µs", 20, best * 1e6),
        Measured("its size as JSON", "bytes", 1_023, len(json.dumps(state).encode())),
    ]


def billion_rows(dataset: data.Data) -> list[Measured]:
    """10⁶ blocks and 10⁹ rows shuffled by rows: the first batch of an indexed file, beyond imports."""
    found = huge.measure(dataset.folder / "huge")
    what = f"10⁶ blocks, {found['rows']:,} rows (indexed in {found['indexing']:.0f} s)"
    return [
        Measured(f"{what}: first shuffled batch", "s", 0.3, found["seconds"]),
        Measured(f"{what}: resident memory then", "MB", 150, found["megabytes"]),
    ]


MEASUREMENTS: tuple[Callable[[data.Data], list[Measured]], ...] = (
    import_time,
    second_open,
    resume,
    state_cost,
    billion_rows,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    dataset = data.load(options.data_dir, options.scale)
    print(", ".join(f"{key} {value}" for key, value in machine.describe().items()))
    found: list[Measured] = []
    failed: dict[str, str] = {}
    for measurement in MEASUREMENTS:
        try:
            found += measurement(dataset)
        except (ImportError, RuntimeError, AttributeError) as error:
            failed[measurement.__name__] = str(error)
    for one in found:
        print(f"{'passed' if one.passed else 'LOST  '}  {one.bar}: {one.measured:.2f} {one.unit} (≤ {one.allowed:g})")
    for name, reason in failed.items():
        print(f"FAILED  {name}: {reason}")
    if options.json:
        report = {
            "machine": machine.describe(),
            "measured": [{**asdict(one), "passed": one.passed} for one in found],
            "failed": failed,
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
