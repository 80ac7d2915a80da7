"""All contenders, all routes, interleaved: `python -m benchmarks.speed`.

Every measurement runs in a fresh process. Repetitions go round all routes in turn, so that a slow minute of the machine
hits everybody, and the best of them counts. Prints a table per workload, then every bar as passed or LOST.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import contenders, data, machine
from benchmarks.bars import OURS, Verdict, speed_bars

WORKLOADS = (
    "text_in_order",
    "text_shuffled",
    "tokens_shuffled_w0",
    "tokens_shuffled_w2",
    "tokens_map1ms_w0",
    "tokens_map1ms_w2",
    "parquet_window_w0",
    "parquet_window_w2",
)
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Result:
    """The measurements of one route, or why there are none."""

    contender: str
    workload: str
    route: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def rate(self) -> float:
        return max((run["rows_per_second"] for run in self.runs), default=0.0)

    @property
    def first_item(self) -> float | None:
        return min((run["first_item_seconds"] for run in self.runs), default=None)


def interpreter(contender: str) -> str:
    """Python of the contender's own environment (`peers/NAME` in this one) where it has one, else this Python."""
    own = Path(sys.prefix) / "peers" / contender / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def run_one(contender: str, *words: str, options: argparse.Namespace, timeout: float) -> dict[str, Any]:
    """One call of `benchmarks.one`; raises RuntimeError with the last line of what it complained about."""
    command = [interpreter(contender), "-m", "benchmarks.one", contender, *words]
    command += ["--data-dir", str(options.data_dir), "--scale", str(options.scale), "--seconds", str(options.seconds)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, complaint = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its session holds nothing but it and its workers
        process.communicate()
        raise RuntimeError(f"no result within {timeout:.0f} s") from None
    # A loader that fails to shut down after the result was printed has still been measured.
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    raise RuntimeError(lines[-1][:200] if lines else f"exit status {process.returncode}")


def prepare(options: argparse.Namespace, console: Console) -> dict[str, dict[str, Any]]:
    """Convert for every contender; a contender that cannot be used has only an `error`."""
    data.load(options.data_dir, options.scale)
    prepared: dict[str, dict[str, Any]] = {}
    for key in options.only:
        start = time.perf_counter()
        try:
            prepared[key] = run_one(key, "prepare", options=options, timeout=1_800)
        except RuntimeError as error:
            prepared[key] = {"name": key, "version": "-", "routes": {}, "error": str(error)}
        outcome = prepared[key].get("error", prepared[key]["version"])
        console.print(f"prepared {key}: {outcome} ({time.perf_counter() - start:.0f} s)", style="dim", markup=False)
    return prepared


def measure(prepared: dict[str, dict[str, Any]], options: argparse.Namespace, console: Console) -> list[Result]:
    """All routes of all workloads, interleaved."""
    results = []
    for workload in options.workload:
        group = [Result(k, workload, r) for k, p in prepared.items() for r in p["routes"].get(workload, ())]
        for repeat in range(options.repeats):
            for result in group if repeat == 0 or not options.narrow else narrowed(group):
                if result.error:
                    continue
                try:
                    run = run_one(
                        result.contender, workload, result.route, options=options, timeout=options.seconds * 6 + 60
                    )
                    result.runs.append(run)
                    outcome = f"{run['rows_per_second']:,.0f} rows/s"
                except RuntimeError as error:
                    result.error = "" if result.runs else str(error)
                    outcome = str(error)
                what = f"{repeat + 1}/{options.repeats} {workload} {result.contender} · {result.route}: {outcome}"
                console.print(what, style="dim", markup=False)
        results += group
    return results


def narrowed(group: list[Result]) -> list[Result]:
    """The plain and the so far fastest route of each contender."""
    best = {
        contender: max(r.rate for r in group if r.contender == contender) for contender in {r.contender for r in group}
    }
    return [result for result in group if result.route == "plain" or 0 < result.rate == best[result.contender]]


def rates(results: list[Result], *, plain: bool) -> dict[str, dict[str, float]]:
    """Workload → contender → rows/s of its plain or of its fastest route."""
    found: dict[str, dict[str, float]] = {}
    for result in results:
        if result.rate and (not plain or result.route == "plain"):
            of_workload = found.setdefault(result.workload, {})
            of_workload[result.contender] = max(result.rate, of_workload.get(result.contender, 0.0))
    return found


def show(prepared: dict[str, dict[str, Any]], results: list[Result], verdicts: list[Verdict], console: Console) -> None:
    """Hardware, versions and conversion, a table per workload, the bars."""
    facts = ", ".join(f"{key} {value}" for key, value in machine.describe().items())
    console.print(f"{datetime.date.today().isoformat()}: {facts}")
    versions = Table(title="contenders")
    for column in ("contender", "version", "conversion", "extra bytes"):
        versions.add_column(column)
    for found in prepared.values():
        cost = escape(found.get("error", "")) or f"{found['seconds']:.1f} s"
        versions.add_row(found["name"], found["version"], cost, f"{found.get('bytes', 0) / 2**20:,.0f} MiB")
    console.print(versions)
    best, plain = rates(results, plain=False), rates(results, plain=True)
    for workload in dict.fromkeys(result.workload for result in results):
        console.print(_table(workload, results, best.get(workload, {}), plain, prepared))
    for verdict in verdicts:
        if verdict.passed is None:
            console.print(f"[yellow]not measured[/yellow]  {verdict.bar}")
        else:
            word = "[green]passed[/green]" if verdict.passed else "[bold red]LOST[/bold red]  "
            console.print(f"{word}  {verdict.bar}: {verdict.measured:.2f} ×")


def _table(
    workload: str,
    results: list[Result],
    best: dict[str, float],
    plain: dict[str, dict[str, float]],
    prepared: dict[str, dict[str, Any]],
) -> Table:
    limit, ours = best.get("limit"), plain.get(workload, {}).get(OURS)
    table = Table(title=f"{workload}, rows/s (bold: the fastest route)")
    table.add_column("contender")
    table.add_column("route")
    for column in ("rows/s", "first item, ms", "× limit", "midepoch ÷ this"):
        table.add_column(column, justify="right")
    for result in results:
        if result.workload != workload:
            continue
        name = prepared[result.contender]["name"]
        if not result.rate:
            table.add_row(name, escape(result.route), f"[red]failed: {escape(result.error)}[/red]", "", "", "")
            continue
        style = "bold" if result.rate == best[result.contender] else None
        first = result.first_item
        table.add_row(
            name,
            escape(result.route),
            f"{result.rate:,.0f}",
            "" if first is None else f"{first * 1_000:,.1f}",
            f"{result.rate / limit:.2f}" if limit else "-",
            f"{ours / result.rate:.2f}" if ours else "-",
            style=style,
        )
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=data.DEFAULT_DIR)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full number of rows")
    parser.add_argument("--seconds", type=float, default=4.0, help="longest measurement of one route")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--narrow", action="store_true", help="repeat only the plain and the fastest routes")
    parser.add_argument("--only", default=",".join(contenders.MODULES), help="contenders, comma-separated")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="workloads, comma-separated")
    parser.add_argument("--quick", action="store_true", help="smoke run, too short for its rates to mean anything")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args()
    if options.quick:
        options.scale, options.seconds, options.repeats = 0.05, 1.0, 1
    options.only = options.only.split(",")
    options.workload = options.workload.split(",")
    for word, known in ((options.only, contenders.MODULES), (options.workload, WORKLOADS)):
        unknown = sorted(set(word) - set(known))
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)}; expected some of {', '.join(known)}")
    return options


def main() -> None:
    options = parse()
    console = Console(width=150 if not sys.stdout.isatty() else None)
    prepared = prepare(options, console)
    results = measure(prepared, options, console)
    peers = tuple(key for key in options.only if key in contenders.PEERS)
    verdicts = speed_bars(rates(results, plain=False), rates(results, plain=True), peers)
    show(prepared, results, verdicts, console)
    if options.json:
        report = {
            "machine": machine.describe(),
            "scale": options.scale,
            "contenders": prepared,
            "results": [{**vars(result), "rate": result.rate} for result in results],
            "bars": [{**vars(verdict), "passed": verdict.passed} for verdict in verdicts],
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
