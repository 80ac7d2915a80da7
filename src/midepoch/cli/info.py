"""``midepoch info``: a summary of data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from midepoch.cli import common
from midepoch.cli.data import Config, Data, Format, Split, Storage, open_data

if TYPE_CHECKING:
    from midepoch.dataset import Dataset

_FILES = 20


def info(
    data: Data,
    split: Split = None,
    config: Config = None,
    storage: Storage = None,
    format: Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Show files, blocks, rows, bytes, columns, and the distribution of rows.

    [bold]midepoch info 'data/*.parquet'[/]

    [bold]midepoch info s3://bucket/lake/ --storage endpoint_override=http://127.0.0.1:9000[/]

    [bold]midepoch info HuggingFaceFW/fineweb-edu --config sample-10BT --split train[/]
    """
    ds = open_data(data, split, config, storage, format)
    about = tell(ds)
    if as_json:
        common.print_json(about)
    else:
        _show(about, ds.pipeline.files_text)


def tell(ds: Dataset) -> dict[str, Any]:
    """Return a summary of a dataset, JSON-able."""
    import numpy as np

    from midepoch.tools.contents import feature_text

    source = ds.pipeline.source
    blocks = np.diff(source.layout.block_starts)
    files = [
        {"path": source.name(file), "rows": file.rows, "blocks": file.blocks, "bytes": file.size}
        for file in source.files
    ]
    return {
        "rows": len(ds),
        "rows_in_files": source.rows,
        "files": len(files),
        "blocks": len(blocks),
        "bytes": sum(file.size for file in source.files),
        "bytes_per_row": source.bytes_per_row,
        "read": "decoded" if source.fetched else "mapped",
        "fingerprint": source.fingerprint,
        "columns": [
            {
                "name": field.name,
                "type": str(field.type),
                "feature": feature_text(source.features.get(name)),
                "nulls": bool(source.nullable[name]),
            }
            for field, name in zip(ds.schema, ds.pipeline.base.head.values(), strict=True)
        ],
        "balance": {
            "rows_per_file": _spread([file.rows for file in source.files]),
            "rows_per_block": _spread(blocks),
            "largest_file_share": max((file.rows for file in source.files), default=0) / max(1, source.rows),
        },
        "default_window": source.window,
        "list": files,
    }


def _spread(sizes: Any) -> dict[str, float]:
    import numpy as np

    counts = np.asarray(sizes, dtype=np.float64)
    if not len(counts):
        return {"least": 0, "median": 0, "most": 0}
    return {
        "least": float(counts.min()),
        "median": float(np.median(counts)),
        "most": float(counts.max()),
    }


def _show(about: dict[str, Any], files_text: str) -> None:
    say = common.console.print
    counted = common.counted
    chosen = "" if about["rows"] == about["rows_in_files"] else f" of {about['rows_in_files']:,} in the files"
    common.say(
        (counted(about["rows"], "row"), "bold"),
        f"{chosen} in {files_text}, {counted(about['blocks'], 'block')}, "
        f"{common.bytes_text(about['bytes'])}; "
        f"about {common.bytes_text(about['bytes_per_row'])} a row in memory; {about['read']}",
    )
    say(f"fingerprint {about['fingerprint']}")
    columns = Table("column", "type", "nulls", title="columns", title_justify="left")
    for column in about["columns"]:
        columns.add_row(column["name"], column["feature"] or column["type"], "yes" if column["nulls"] else "")
    say(columns)
    balance = Table("", title="balance", title_justify="left")
    for name in ("least", "median", "most"):
        balance.add_column(name, justify="right")
    for name in ("rows_per_file", "rows_per_block"):
        spread = about["balance"][name]
        balance.add_row(name.replace("_", " "), *(f"{spread[key]:,.0f}" for key in ("least", "median", "most")))
    say(balance)
    files = Table(title="files", title_justify="left")
    files.add_column("path", overflow="fold")
    for name in ("rows", "blocks", "bytes"):
        files.add_column(name, justify="right")
    for file in about["list"][:_FILES]:
        files.add_row(file["path"], f"{file['rows']:,}", f"{file['blocks']:,}", common.bytes_text(file["bytes"]))
    say(files)
    if len(about["list"]) > _FILES:
        say(f"… and {len(about['list']) - _FILES:,} more (all of them with --json)")
