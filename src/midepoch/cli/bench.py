"""``midepoch bench``: measurements of this data on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from midepoch.cli import common
from midepoch.cli.data import DATA, Config, Format, Made, Split, Storage, made_by, open_data

if TYPE_CHECKING:
    from midepoch.tools.bench import Advice, Limit, Trial


def bench(
    data: Annotated[list[str] | None, DATA] = None,
    split: Split = None,
    config: Config = None,
    batch_sizes: Annotated[str, typer.Option("--batch-size", help="Rows per batch; several, with commas.")] = "64,256",
    workers: Annotated[
        str | None, typer.Option(help="Workers; several, with commas. [default: 0, 1, 2, 4 … cores]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for each setting.")] = 2.0,
    columns: Annotated[str | None, typer.Option(help="Only these columns, separated by commas.")] = None,
    shuffle: Annotated[bool, typer.Option(help="Shuffle, as for training.")] = True,
    scope: Annotated[str | None, typer.Option(help="Scope of the shuffle: rows, window or files.")] = None,
    dataset: Made = None,
    storage: Storage = None,
    format: Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Measure rows/s and GB/s by workers and batch size, beside the limit of the machine, and recommend a setting.

    [bold]midepoch bench 'data/*.parquet' --columns tokens[/]

    [bold]midepoch bench --dataset train.py:make_dataset --workers 0,2,4,8 --batch-size 32[/]
    """
    from midepoch._internal.progress import shown
    from midepoch.dataset import Dataset
    from midepoch.tools.bench import advise, find_limit, try_settings

    if (dataset is None) == (not data):
        raise ValueError("pass the data, or --dataset with a function that returns it")
    ds: Any = made_by(dataset) if dataset is not None else open_data(data or [], split, config, storage, format)
    if not isinstance(ds, Dataset):
        raise TypeError(f"{dataset} must return a dataset, not a loader: bench tries workers and batch sizes itself")
    if dataset is None:
        ds = ds.select_columns([name.strip() for name in columns.split(",")]) if columns else ds
        ds = ds.shuffle(0, scope) if shuffle else ds
    counts = _numbers(workers, "--workers", 0) if workers else _some_workers()
    with shown("trying", "settings") as report:
        trials = try_settings(
            ds, batch_sizes=_numbers(batch_sizes, "--batch-size", 1), workers=counts, seconds=seconds, report=report
        )
    limit = None if ds.pipeline.numbered is None else find_limit(ds, seconds)
    advice = advise(trials)
    if as_json:
        measured = [{**asdict(one), **_rates(one)} for one in trials]
        best = {"num_workers": advice.best.num_workers, "batch_size": advice.best.batch_size, "why": advice.why}
        common.print_json({"trials": measured, "limit": None if limit is None else asdict(limit), "recommended": best})
    else:
        _show(trials, limit, advice)


def _rates(one: Trial) -> dict[str, float]:
    return {"rows_per_second": one.stats.rows_per_second, "bytes_per_second": one.stats.bytes_per_second}


def _some_workers() -> list[int]:
    from midepoch._internal.processes import cores

    counts = [0, 1]
    while 2 * counts[-1] <= cores():
        counts.append(2 * counts[-1])
    return counts


def _numbers(text: str, name: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ValueError(f"{name} takes integers of at least {least}, separated by commas, got {text!r}")
    return numbers


def _show(trials: list[Trial], limit: Limit | None, advice: Advice) -> None:
    table = Table()
    names = ["workers", "batch size", "rows/s", "GB/s", "first batch"]
    for name in [*names, "of the limit"] if limit is not None else names:
        table.add_column(name, justify="right")
    for one in trials:
        cells = [
            str(one.num_workers),
            f"{one.batch_size:,}",
            f"{one.stats.rows_per_second:,.0f}",
            f"{one.stats.bytes_per_second / 1e9:,.3f}",
            f"{1000 * one.stats.first_batch:,.0f} ms",
        ]
        if limit is not None:
            cells.append(f"{one.stats.rows_per_second / max(limit.rows_per_second, 1e-9):.2f} ×")
        table.add_row(*cells, style="bold green" if one is advice.best else None)
    common.console.print(table)
    if limit is not None:
        common.console.print(
            f"limit: {limit.rows_per_second:,.0f} rows/s, {limit.bytes_per_second / 1e9:,.3f} GB/s ({limit.how})"
        )
    best = advice.best
    chosen = f"recommended: loader(batch_size={best.batch_size}, num_workers={best.num_workers})"
    common.say((chosen, "bold"), f": {advice.why}")
