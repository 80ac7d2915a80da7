"""File formats: the division of a file into blocks, and the decoding of a block to a table.

A format is imported when its first file is opened: most datasets use one format, and mapped Arrow files none.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from midepoch.sources.formats.base import Block, Format, ListedFormat, Member, Scanned, Scratch

_MODULES = {
    "arrow": ("ipc", "ArrowFormat"),
    "parquet": ("parquet", "ParquetFormat"),
    "orc": ("orc", "OrcFormat"),
    "csv": ("csv_lines", "CsvFormat"),
    "jsonl": ("json_lines", "JsonFormat"),
    "mds": ("mds", "MdsFormat"),
    "litdata": ("litdata", "LitDataFormat"),
}


@lru_cache(maxsize=64)
def format_named(name: str) -> Format:
    """Return the format with a name of ``files.FORMATS``, which may have a number as argument: ``litdata[2048]``."""
    base, _, argument = name.partition("[")
    module, class_name = _MODULES[base]
    make = getattr(import_module(f"{__name__}.{module}"), class_name)
    format_: Format = make(int(argument[:-1])) if argument else make()
    return format_


__all__ = ["Block", "Format", "ListedFormat", "Member", "Scanned", "Scratch", "format_named"]
