"""Shards of text with an ``index.json`` of MosaicML Streaming: JSON, CSV, TSV and XSV.

Each has two files: the lines, and the offsets of the lines. A value is text, an integer or a float.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from midepoch.sources.formats.records import BadSampleError, Bytes, Int64Array

FORMATS = ("json", "csv", "tsv", "xsv")
_KINDS: dict[str, tuple[pa.DataType, type[str] | type[int] | type[float]]] = {
    "str": (pa.string(), str),
    "int": (pa.int64(), int),
    "float": (pa.float64(), float),
}


def described(shard: dict[str, Any]) -> dict[str, Any]:
    """Return the columns and the syntax of a shard, from its entry in a manifest. Raise KeyError or ValueError."""
    form = shard["format"]
    columns = (
        shard["columns"] if form == "json" else dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    )
    for encoding in columns.values():
        if encoding not in _KINDS:
            raise ValueError(f"the encoding {encoding!r} is not one of {', '.join(_KINDS)}")
    separator = {"csv": ",", "tsv": "\t", "json": None}.get(form, shard.get("separator"))
    return {
        "names": list(columns),
        "encodings": list(columns.values()),
        "text": {"separator": separator, "newline": shard["newline"]},
    }


def schema_of(about: dict[str, Any]) -> pa.Schema:
    """Return the types of a shard."""
    kinds = (_KINDS[encoding][0] for encoding in about["encodings"])
    return pa.schema(list(zip(about["names"], kinds, strict=True)))


def table_of(data: Bytes, offsets: Int64Array, about: dict[str, Any], columns: Sequence[str]) -> pa.Table:
    """Return these columns of some lines. Raise BadSampleError for a line that cannot be read."""
    encodings = dict(zip(about["names"], about["encodings"], strict=True))
    contents, bounds = data.tobytes(), offsets.tolist()
    found: dict[str, list[Any]] = {name: [] for name in columns}
    for number in range(len(bounds) - 1):
        try:
            row = _row(contents[bounds[number] : bounds[number + 1]].decode(), about)
            for name, values in found.items():
                kind, convert = _KINDS[encodings[name]]
                if about["text"]["separator"] is None:
                    _check(name, encodings[name], row[name])
                values.append(pa.scalar(convert(row[name]), kind).as_py())
        except (ValueError, KeyError, TypeError, OverflowError, pa.ArrowException) as problem:
            raise BadSampleError(number, f"its line cannot be read: {problem!r}") from None
    return pa.table({name: pa.array(values, _KINDS[encodings[name]][0]) for name, values in found.items()})


def _check(name: str, encoding: str, value: Any) -> None:
    """Raise ValueError for a JSON value of another type. A conversion could change it: ``int(1.7)``, ``str(None)``."""
    allowed = (int, float) if encoding == "float" else _KINDS[encoding][1]
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise ValueError(f"column {name!r} is {value!r:.60}, expected {encoding}")


def _row(line: str, about: dict[str, Any]) -> dict[str, Any]:
    separator, newline = about["text"]["separator"], about["text"]["newline"]
    if separator is None:
        row: dict[str, Any] = json.loads(line)
        return row
    if not line.endswith(newline):
        raise ValueError("it does not end with a newline")
    return dict(zip(about["names"], line.removesuffix(newline).split(separator), strict=True))
