"""``midepoch peek``: rows at a position, of a split, after a shuffle."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from midepoch.cli import common
from midepoch.cli.data import Config, Data, Format, Split, Storage, open_data

_TEXT = 60


def peek(
    data: Data,
    position: Annotated[int, typer.Option(min=0, help="The first position to show.")] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of rows.")] = 5,
    split: Split = None,
    config: Config = None,
    columns: Annotated[str | None, typer.Option(help="Only these columns, separated by commas.")] = None,
    shuffle: Annotated[int | None, typer.Option(help="Shuffle with this seed first.")] = None,
    scope: Annotated[str | None, typer.Option(help="Scope of the shuffle: rows, window or files.")] = None,
    window: Annotated[int | None, typer.Option(help="Blocks per window of the shuffle.")] = None,
    epoch: Annotated[int, typer.Option(min=0, help="The epoch of the order.")] = 0,
    storage: Storage = None,
    format: Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Show rows at a position, as a training run would get them, and their files.

    [bold]midepoch peek 'data/*.parquet' --position 1000000 -n 3[/]

    [bold]midepoch peek data/ --split 'train[90%:]' --columns text[/]

    [bold]midepoch peek data/ --shuffle 42 --epoch 2 --json[/]
    """
    if shuffle is None and (scope is not None or window is not None):
        raise ValueError("--scope and --window are settings of a shuffle. Pass its seed with --shuffle.")
    ds = open_data(data, split, config, storage, format)
    if columns is not None:
        ds = ds.select_columns([name.strip() for name in columns.split(",")])
    if shuffle is not None:
        ds = ds.shuffle(shuffle, scope, window)
    if epoch:
        ds.set_epoch(epoch)
    if position >= len(ds):
        raise ValueError(f"there is no position {position:,}: there are {len(ds):,} rows")
    positions = np.arange(position, min(position + count, len(ds)))
    pipeline = ds.pipeline.leaf
    rows = pipeline.order.at(epoch, pipeline.source.layout).chosen(positions)
    places = [pipeline.source.place(int(row)) for row in pipeline.order.selection.source_rows(rows)]
    values = ds.with_format("arrow")[position : position + len(positions)].to_pylist()
    found = [
        {"position": int(at), "row": int(row), "place": place, "values": value}
        for at, row, place, value in zip(positions, rows, places, values, strict=True)
    ]
    if as_json:
        common.print_json(found)
    else:
        _show(found)


def _show(found: list[dict[str, Any]]) -> None:
    for one in found:
        title = f"position {one['position']:,}: {one['place']}"
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in one["values"].items():
            table.add_row(name, _short(value))
        common.console.print(table)


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"[{', '.join(map(_short, value[:8]))}, …] ({len(value):,} values)"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 4 * _TEXT else f"{text[: 4 * _TEXT]}… ({len(text):,} characters)"
