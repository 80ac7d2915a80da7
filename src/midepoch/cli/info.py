"""``midepoch info`` and ``midepoch peek``: a summary of data, and rows at a position."""

from __future__ import annotations

import ast
import functools
import operator
import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midepoch.cli import common
from midepoch.cli.common import Answer
from midepoch.cli.data import Columns, Config, Data, Format, Scope, Split, Storage, Window, open_data, shuffled
from midepoch.errors import ColumnError

if TYPE_CHECKING:
    from midepoch.dataset import Dataset
    from midepoch.tools.contents import Media


_FILES = 20


def info(
    data: Data, split: Split = None, config: Config = None, storage: Storage = None, format: Format = None
) -> Answer:
    """Show files, blocks, rows, bytes, columns, and the distribution of rows.

    midepoch info 'data/*.parquet'

    midepoch info s3://bucket/lake/ --storage endpoint_override=http://127.0.0.1:9000

    midepoch info HuggingFaceFW/fineweb-edu --config sample-10BT --split train
    """
    import numpy as np

    from midepoch.tools.contents import feature_text

    ds = open_data(data, split, config, storage, format)
    source = ds.pipeline.source
    blocks, rows_of_files = np.diff(source.layout.block_starts), np.asarray(source.files.rows)
    balance: dict[str, Any] = {}
    for name, sizes in (("rows_per_file", rows_of_files), ("rows_per_block", blocks)):
        counts = sizes if len(sizes) else np.zeros(1)
        spread = {"least": counts.min(), "median": np.median(counts), "most": counts.max()}
        balance[name] = {key: float(count) for key, count in spread.items()}
    about: dict[str, Any] = {
        "rows": len(ds),
        "rows_in_files": source.rows,
        "files": len(source.files),
        "blocks": len(blocks),
        "bytes": int(source.files.size.sum()),
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
        "balance": {**balance, "largest_file_share": balance["rows_per_file"]["most"] / max(1, source.rows)},
        "default_window": source.window,
        "list": [
            {"path": source.name(file), "rows": file.rows, "blocks": file.blocks, "bytes": file.size}
            for file in source.files
        ],
    }

    def show() -> None:
        chosen = "" if len(ds) == source.rows else f" of {source.rows:,} in the files"
        common.say(
            (common.counted(len(ds), "row"), "bold"),
            f"{chosen} in {ds.pipeline.files_text}, {common.counted(len(blocks), 'block')}, "
            f"{common.bytes_text(about['bytes'])}; "
            f"about {common.bytes_text(source.bytes_per_row)} a row in memory; {about['read']}",
        )
        common.say(f"fingerprint {source.fingerprint}")
        columns = (
            {"column": one["name"], "type": one["feature"] or one["type"], "nulls": "yes" if one["nulls"] else ""}
            for one in about["columns"]
        )
        common.print_table(columns, title="columns")
        spreads = (
            {"": name.replace("_", " "), **{key: round(size) for key, size in spread.items()}}
            for name, spread in balance.items()
        )
        common.print_table(spreads, title="balance")
        files = ({**file, "bytes": common.bytes_text(file["bytes"])} for file in about["list"])
        common.print_table(files, title="files", right=["bytes"], most=_FILES)

    return Answer(about, show)


_TEXT = 240


def peek(
    data: Data,
    position: Annotated[int, typer.Option(min=0, help="The first position to show.")] = 0,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Number of rows.  [default: 5]")] = None,
    row: Annotated[
        list[int] | None, typer.Option(min=0, help="This row, by its number before a shuffle. Repeatable.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="The first rows with these values: \"id = 'a-1'\", \"n > 3 and meta.lang = 'en'\"."),
    ] = None,
    split: Split = None,
    config: Config = None,
    columns: Columns = None,
    shuffle: Annotated[int | None, typer.Option(help="Shuffle with this seed first.")] = None,
    scope: Scope = None,
    window: Window = None,
    epoch: Annotated[int, typer.Option(min=0, help="The epoch of the order.")] = 0,
    storage: Storage = None,
    format: Format = None,
) -> Answer:
    """Show rows at a position, as a training run would get them, and their files.

    midepoch peek 'data/*.parquet' --position 1000000 -n 3

    midepoch peek data/ --split 'train[90%:]' --columns text

    midepoch peek data/ --row 372

    midepoch peek data/ --where "id = 'doc-17'"

    midepoch peek data/ --shuffle 42 --epoch 2 --json
    """
    import numpy as np

    from midepoch.tools.contents import describe_media, feature_text, label_names
    from midepoch.transforms.batch import check_columns

    chosen = [name for name, value in (("--position", position), ("--row", row), ("--where", where)) if value]
    if len(chosen) > 1 or (chosen[:1] not in ([], ["--position"]) and shuffle is not None):
        raise ValueError(
            f"use only one of --position, --row and --where{', without --shuffle' * (shuffle is not None)}"
        )
    if row and count is not None:
        raise ValueError("-n is for --position and --where. Name each row, as in --row 3 --row 4.")
    count = count or 5
    if data[1:] and data[-1].isdecimal() and not os.path.exists(data[-1]):
        raise ValueError(f"{data[-1]!r} is not a file. For row {data[-1]}, pass --row {data[-1]}.")
    if columns is not None and (stray := [one for one in data[1:] if one.isidentifier() and not os.path.exists(one)]):
        raise ValueError(f"columns are separated by commas: --columns {','.join([columns, *stray])}")
    ds = open_data(data, split, config, storage, format)
    found = row if row else None if where is None else rows_where(ds, where, count)
    if columns is not None:
        names = [name.strip() for name in columns.split(",")]
        if ds.column_names and not {*names} <= {*ds.column_names} and {*columns.split()} <= {*ds.column_names}:
            names = columns.split()  # with spaces between them
        check_columns(names, ds.column_names, "--columns")
        ds = ds.select_columns(names)
    ds = shuffled(ds, shuffle, scope, window)
    if epoch:
        ds.set_epoch(epoch)
    positions = np.arange(position, min(position + count, len(ds))) if found is None else np.array(found, np.int64)
    if found != [] and (last := max([position, *(found or ())])) >= len(ds):
        raise ValueError(f"there is no {'row' if row else 'position'} {last:,}: there are {len(ds):,} rows")
    pipeline = ds.pipeline.leaf
    rows = pipeline.order.at(epoch, pipeline.source.layout).chosen(positions)
    places = [pipeline.source.place(int(row)) for row in pipeline.order.selection.source_rows(rows)]
    values = ds.with_format("arrow")[positions].to_pylist()
    features = {name: pipeline.source.features.get(pipeline.head.get(name, "")) for name in ds.column_names}
    types = {field.name: feature_text(features.get(field.name)) or str(field.type) for field in ds.schema}
    records, media_of = [], []
    for at, number, place, row_values in zip(positions, rows, places, values, strict=True):
        given = [(name, value, features.get(name)) for name, value in row_values.items()]
        media = {name: one for name, value, feature in given if (one := describe_media(value, feature)) is not None}
        labels = {name: names for name, value, of in given if (names := label_names(value, of)) is not None}
        about = {"position": int(at), "row": int(number), "place": place, "values": row_values}
        details = {name: {"kind": one.kind, **one.details} for name, one in media.items()}
        records.append({**about, "media": details, "labels": labels})
        media_of.append(media)

    def show() -> None:
        if not records:
            common.say(f"no row of {len(ds):,} has {where}")
            raise typer.Exit(1)
        for record, media in zip(records, media_of, strict=True):
            lines = (
                {
                    "name": name,
                    "value": _text(value, media.get(name), record["labels"].get(name)),
                    "type": (types.get(name, ""), "dim"),
                }
                for name, value in record["values"].items()
            )
            common.print_table(lines, title=f"position {record['position']:,}: {record['place']}", header=False)

    return Answer(records, show)


_TERM = re.compile(
    r"""\s*([\w.-]+)(?:\s*(==|=|!=|<>|<=|>=|<|>)\s*('[^']*'|"[^"]*"|[^\s'"]+)|\s+is\s+(not\s+)?null)\s*""",
    re.IGNORECASE,
)
_CHUNK = 65_536


def rows_where(ds: Dataset, where: str, count: int) -> list[int]:
    """Return the numbers of the first rows that fulfil a condition: comparisons with "and" between them."""
    import pyarrow as pa

    from midepoch._internal.progress import shown

    condition, names = _condition(where, ds)
    read, found = ds.select_columns(names).with_format("arrow"), list[int]()
    with shown("searching", "rows") as report:
        for first in range(0, len(ds), _CHUNK):
            table = read[first : first + _CHUNK]
            numbers = pa.array(range(first, first + len(table)), pa.int64())
            try:
                found += table.append_column(_NUMBER, numbers).filter(condition)[_NUMBER].to_pylist()
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
                types = ", ".join(f"{name} is {ds.schema.field(name).type}" for name in names)
                raise ValueError(f"--where {where} does not fit the columns: {types}.") from None
            report(first + len(table), len(ds))
            if len(found) >= count:
                break
    return found[:count]


_NUMBER = "midepoch row"


def _condition(where: str, ds: Dataset) -> tuple[Any, list[str]]:
    """Return an expression of pyarrow, and the columns that it reads."""
    import pyarrow.compute as pc
    from pyarrow.parquet import filters_to_expression

    terms, names = list[Any](), list[str]()
    for part in re.split(r"""\s+and\s+(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""", where, flags=re.IGNORECASE):
        if (term := _TERM.fullmatch(part)) is None:
            raise ValueError(
                f'--where takes comparisons such as "id = \'a-1\' and score > 0.5", and "text is null", got {where!r}'
            )
        name, sign, text, negated = term.groups()
        path = (name,) if name in ds.column_names else tuple(name.split("."))
        if path[0] not in ds.column_names:
            raise ColumnError(f"--where: there is no column {path[0]!r}. There are: {', '.join(ds.column_names)}.")
        names.append(path[0])
        if sign is None:
            terms.append(pc.field(*path).is_valid() if negated else pc.field(*path).is_null())
            continue
        try:
            value = {"true": True, "false": False}.get(text.lower()) if text.isalpha() else ast.literal_eval(text)
            assert value is not None
        except (ValueError, SyntaxError, AssertionError):
            if text.lower() in ("null", "none"):
                raise ValueError(f"--where: a comparison with {text} is never true. Use: {name} is null") from None
            raise ValueError(f"--where: {text} is no number, and a text has quotes: {name} {sign} '{text}'") from None
        terms.append(filters_to_expression([[(path, "!=" if sign == "<>" else sign, value)]]))
    return functools.reduce(operator.and_, terms), list(dict.fromkeys(names))


def _text(value: Any, media: Media | None, labels: Any) -> str:
    """Return a value in words: that of a file with its size, that of a label with its name."""
    text = _short(value) if media is None else f"{media.kind}: {media.text}"
    data = value.get("bytes") if isinstance(value, dict) else value
    if media is not None and isinstance(data, bytes):
        text += f", {common.bytes_text(len(data))}"
    return text if labels is None else f"{text} ({_short(labels)})"


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        most = value[:8]
        more = f", …] ({len(value):,} values)" if len(value) > len(most) else "]"
        return f"[{', '.join(map(_short, most))}{more}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_short(part)}" for name, part in value.items()) + "}"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    return common.short(value if isinstance(value, str) else repr(value), _TEXT)
