"""Resuming, beside the peers: `python -m benchmarks.resume`.

Rows: the shuffled text rows of `benchmarks.data`. Ranks are real processes, connected by torch.distributed.

- **Rows lost and repeated** after a resume with other workers, another batch size, other ranks (`resuming/cases.py`).
- **State**: pickled bytes of all ranks, in mid-epoch.
- **First batch** after a resume at 90 % of an epoch and after a fresh start, from opening the data, in fresh processes
  that have imported everything, all contenders in turn. It is compared with the batch that the first run delivered.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import data, machine, resuming, speed
from benchmarks.resuming import Topology, cases
from benchmarks.resuming.launch import Data, LegError, run_leg

PARTS = ("cases", "first")
FIRST_ROWS = 49_152
QUICK_FIRST_ROWS = 2_304
FIRST_BATCH = 48


@dataclass
class First:
    """Seconds to the first batch of one contender, with a fixed number of workers."""

    fresh: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    state_bytes: int = 0
    same_rows: bool = True
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return self.error.partition(":")[0]
        fresh, resumed = statistics.median(self.fresh), statistics.median(self.resumed)
        return f"{resumed:.2f} s (fresh {fresh:.2f} s)" + ("" if self.same_rows else ", other rows")


def prepare(dataset: Data, contenders: list[str]) -> dict[str, dict[str, Any]]:
    """Convert the data for every contender, and return the versions."""
    options = argparse.Namespace(**asdict(dataset), seconds=1.0, only=contenders)
    return speed.prepare(options, Console(file=sys.stderr))


def measure_cases(key: str, dataset: Data, rows: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Lost and repeated rows of one contender, and the size of its state."""
    sizes: list[int] = []

    def run(topology: Topology, states: list[bytes], steps: int | None) -> Any:
        leg = run_leg(key, dataset, topology, states=states, steps=steps, save=steps is not None)
        if steps is not None and not states:
            sizes.append(sum(map(len, leg.states)))
        return leg

    outcomes = cases.measure(run, rows)
    for name, outcome in outcomes.items():
        say(f"{key} · {name}: {outcome.error or outcome}")
    return {"state_bytes": sizes[0] if sizes else None, "outcomes": outcomes}


def measure_first(
    keys: list[str], dataset: Data, rows: int, workers: int, repeats: int, say: Callable[[str], None]
) -> dict[str, First]:
    """Time to the first batch of all contenders, in turn."""
    topology = Topology(world_size=1, workers=workers, batch_size=FIRST_BATCH)
    # An even number of steps, so that two workers have delivered equally many batches: LanceDB saves only then.
    steps = rows * 9 // 10 // FIRST_BATCH // 2 * 2
    results, saved, expected = {key: First() for key in keys}, {}, {}
    for key in keys:
        try:
            leg = run_leg(key, dataset, topology, states=[], steps=steps, save=True, following=True, timeout=600)
        except LegError as error:
            results[key].error = str(error)
            say(f"{key} · until 90 %: {error}")
            continue
        saved[key], expected[key] = leg.states, leg.following
        results[key].state_bytes = len(leg.states[0])
    for _ in range(repeats):
        for key in saved:
            result = results[key]
            start = partial(run_leg, key, dataset, topology, steps=1)
            try:
                result.fresh.append(start(states=[]).first)
                resumed = start(states=saved[key])
            except LegError as error:
                result.error = str(error)
                say(f"{key} · {workers} workers: {error}")
                continue
            result.resumed.append(resumed.first)
            result.same_rows &= resumed.batches[0] == [expected[key]]
            say(f"{key} · {workers} workers: fresh {result.fresh[-1]:.2f} s, at 90 % {resumed.first:.2f} s")
    return results


def show(report: dict[str, Any], console: Console) -> None:
    """Print versions, the machine and both tables."""
    console.print(f"{report['date']}: " + ", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    names = {key: f"{found['name']} {found['version']}" for key, found in report["versions"].items()}
    for key, found in report["versions"].items():
        if "error" in found:
            console.print(f"{key} was not measured: {found['error']}", markup=False)
    if report["cases"]:
        console.print(_cases_table(report, names))
    if report["first"]:
        console.print(_first_table(report, names))


def _cases_table(report: dict[str, Any], names: dict[str, str]) -> Table:
    columns = [cases.UNINTERRUPTED, *(case.name for case in cases.CASES)]
    table = Table(title=f"lost / repeated rows of {report['rows']:,}; state of two ranks with two workers")
    for column in ("contender", *columns, "state, bytes"):
        table.add_column(column)
    for key, found in report["cases"].items():
        cells = [escape(str(found["outcomes"].get(column, "–"))) for column in columns]
        table.add_row(names[key], *cells, f"{found['state_bytes'] or '–'}")
    return table


def _first_table(report: dict[str, Any], names: dict[str, str]) -> Table:
    table = Table(title=f"first batch after a resume at 90 % of {report['first_rows']:,} rows, medians")
    for column in ("contender", *(f"{workers} workers" for workers in report["first"]), "state, bytes"):
        table.add_column(column)
    for key, name in names.items():
        firsts = [found[key] for found in report["first"].values() if key in found]
        if firsts:
            table.add_row(name, *(escape(str(first)) for first in firsts), str(firsts[-1].state_bytes))
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR)
    parser.add_argument("--only", default=",".join(resuming.MODULES), help="contenders, comma-separated")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="cases (rows lost and repeated), first (the first batch)"
    )
    parser.add_argument("--workers", default="0,2", help="workers for the time to the first batch, comma-separated")
    parser.add_argument("--repeats", type=int, default=5, help="of the time to the first batch")
    parser.add_argument("--quick", action="store_true", help="few rows; its times mean nothing")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    options.only, options.parts = options.only.split(","), options.parts.split(",")
    for words, known in ((options.only, resuming.MODULES), (options.parts, PARTS)):
        if unknown := sorted(set(words) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(known)}")
    options.workers = [int(word) for word in options.workers.split(",")]
    return options


def main() -> None:
    options = parse()
    console = Console(width=220 if not sys.stdout.isatty() else None)

    def say(line: str) -> None:
        console.print(line, style="dim", markup=False)

    rows, first_rows = (cases.QUICK_ROWS, QUICK_FIRST_ROWS) if options.quick else (cases.ROWS, FIRST_ROWS)
    small, large = (Data(options.data_dir, number / data.TEXT_ROWS) for number in (rows, first_rows))
    versions = prepare(small, options.only)
    usable = [key for key, found in versions.items() if "error" not in found]
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "versions": versions,
        "rows": rows,
        "first_rows": first_rows,
        "cases": {},
        "first": {},
    }
    if "cases" in options.parts:
        report["cases"] = {key: measure_cases(key, small, rows, say) for key in usable}
    if "first" in options.parts:
        prepare(large, usable)
        for workers in options.workers:
            report["first"][workers] = measure_first(usable, large, first_rows, workers, options.repeats, say)
    show(report, console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, default=asdict) + "\n")


if __name__ == "__main__":
    main()
