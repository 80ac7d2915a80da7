"""``midepoch audit``: what a run's ledger proves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from midepoch.audit import Delivery, Run, read_run
from midepoch.cli import common
from midepoch.progress import shown

_LISTED = 20


def audit(
    run: Annotated[Path, typer.Argument(help="The folder given to loader(audit=…).", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Which rows fed this step (counted from 1).")] = None,
    row: Annotated[int | None, typer.Option(help="Which steps saw this row.")] = None,
    against: Annotated[Path | None, typer.Option(help="How many rows this run and another one have both seen.")] = None,
    stream: Annotated[str | None, typer.Option(help="Which of several loaders that recorded there.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Prove from its ledger what a run has seen: rows delivered once, more than once, never.

    Ends with 1 if a row of a finished part of an epoch was lost or repeated.

    [bold]midepoch audit runs/7[/]

    [bold]midepoch audit runs/7 --step 1000[/]

    [bold]midepoch audit runs/7 --row 123456 --json[/]

    [bold]midepoch audit runs/7 --against runs/8[/]
    """
    found = read_run(run, stream)
    if step is not None:
        _deliveries(found, found.rows_of_step(step), f"step {step}", as_json)
    elif row is not None:
        _deliveries(found, found.steps_of_row(row), f"row {row}", as_json)
    elif against is not None:
        _overlap(found, read_run(against), as_json)
    else:
        _proof(found, as_json)


def _proof(run: Run, as_json: bool) -> None:
    if as_json:
        epochs = [{**asdict(one), "exact": one.exact, "complete": one.complete} for one in run.epochs]
        common.print_json(
            {
                "exact": run.exact,
                "steps": run.steps,
                "starts": run.attempts,
                "world_sizes": run.worlds,
                "stream": run.stream,
                "streams": run.streams,
                "gaps": run.gaps,
                "epochs": epochs,
            }
        )
    else:
        _show_proof(run)
    if not run.exact:
        raise typer.Exit(1)


def _show_proof(run: Run) -> None:
    table = Table(title=f"{run.folder}: {run.steps:,} steps", title_justify="left")
    names = {
        "epoch": "epoch",
        "rows": "rows",
        "once": "once",
        "repeated": "repeated",
        "never": "never",
        "steps": "steps",
    }
    rare = {"dropped": "dropped", "pending": "to come", "skipped": "skipped", "again": "again"}
    names |= {name: title for name, title in rare.items() if any(getattr(one, name) for one in run.epochs)}
    for title in names.values():
        table.add_column(title, justify="right")
    table.add_column(no_wrap=True)
    for one in run.epochs:
        cells = [f"{getattr(one, name):,}" for name in names]
        cells = [f"[red]{cell}[/]" if i in (3, 4) and cell != "0" else cell for i, cell in enumerate(cells)]
        so_far = "complete" if one.complete else "exact so far"
        table.add_row(*cells, f"[green]{so_far}[/]" if one.exact else "[red]not exact[/]")
    common.console.print(table)
    worlds = " → ".join(map(str, run.worlds))
    common.console.print(f"{run.attempts} start{'s' * (run.attempts != 1)}; ranks: {worlds}")
    for one in run.epochs:
        if one.examples and not one.exact:
            common.console.print(
                f"epoch {one.epoch}: lost or repeated at positions {', '.join(map(str, one.examples))}, …"
            )
    for gap in run.gaps:
        common.console.print(f"[yellow]{gap}[/]")
    if len(run.streams) > 1:
        others = ", ".join(name for name in run.streams if name != run.stream)
        common.console.print(f"Other loaders recorded here as well: --stream {others}")


def _deliveries(run: Run, found: list[Delivery], what: str, as_json: bool) -> None:
    if as_json:
        common.print_json([{**one._asdict(), "place": run.order.place(one.row)} for one in found])
        return
    if not found:
        common.console.print(f"{what}: not delivered so far")
        return
    table = Table(title=what, title_justify="left")
    for name in ("step", "epoch", "position", "rank", "row"):
        table.add_column(name, justify="right")
    table.add_column("where it lies")
    for one in found[:_LISTED]:
        table.add_row(*(f"{number:,}" for number in one), run.order.place(one.row))
    common.console.print(table)
    if len(found) > _LISTED:
        common.console.print(f"… and {len(found) - _LISTED:,} more (all of them with --json)")


def _overlap(first: Run, second: Run, as_json: bool) -> None:
    with shown("comparing", "rows") as report:
        found = first.overlap(second, report)
    if as_json:
        common.print_json(found._asdict())
        return
    numbers: dict[str, Any] = {str(first.folder): found.first, str(second.folder): found.second, "both": found.both}
    table = Table(title="rows of the files that were seen at least once", title_justify="left")
    table.add_column("run")
    table.add_column("rows", justify="right")
    for name, number in numbers.items():
        table.add_row(name, f"{number:,}")
    common.console.print(table)
