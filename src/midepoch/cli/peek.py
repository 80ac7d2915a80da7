"""``midepoch peek``: rows at a position, of a split, after a shuffle."""

from __future__ import annotations

from typing import Annotated, Any

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
    import numpy as np

    from midepoch.tools.contents import describe_media, feature_text, label_names

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
    features = {name: pipeline.source.features.get(pipeline.head.get(name, "")) for name in ds.column_names}
    shown = []
    for at, row, place, row_values in zip(positions, rows, places, values, strict=True):
        media = {name: describe_media(value, features.get(name)) for name, value in row_values.items()}
        labels = {name: label_names(value, features.get(name)) for name, value in row_values.items()}
        shown.append(
            {
                "position": int(at),
                "row": int(row),
                "place": place,
                "values": row_values,
                "media": {name: {"kind": one.kind, **one.details} for name, one in media.items() if one is not None},
                "labels": {name: names for name, names in labels.items() if names is not None},
                "texts": {name: f"{one.kind}: {one.text}" for name, one in media.items() if one is not None},
            }
        )
    if as_json:
        common.print_json([{name: part for name, part in one.items() if name != "texts"} for one in shown])
        return
    types = {field.name: feature_text(features.get(field.name)) or str(field.type) for field in ds.schema}
    for one in shown:
        _show(one, types)


def _show(row: dict[str, Any], types: dict[str, str]) -> None:
    table = Table(title=f"position {row['position']:,}: {row['place']}", title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", style="dim")
    for name, value in row["values"].items():
        text = row["texts"].get(name)
        if text is None:
            text = _short(value)
        elif (size := _size(value)) is not None:
            text = f"{text}, {common.bytes_text(size)}"
        if (names := row["labels"].get(name)) is not None:
            text = f"{text} ({_short(names)})"
        table.add_row(name, text, types.get(name, ""))
    common.console.print(table)


def _size(value: Any) -> int | None:
    """Return the bytes of a file in a column."""
    data = value.get("bytes") if isinstance(value, dict) else value
    return len(data) if isinstance(data, bytes) else None


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        most = value[:8]
        more = f", …] ({len(value):,} values)" if len(value) > len(most) else "]"
        return f"[{', '.join(map(_short, most))}{more}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_short(part)}" for name, part in value.items()) + "}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 4 * _TEXT else f"{text[: 4 * _TEXT]}… ({len(text):,} characters)"
