"""File formats: the division of a file into blocks, and the decoding of a block to a table.

A format is imported when its first file is opened: most datasets use one format, and mapped Arrow files none.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from midepoch.sources.formats.base import Block, Format, Scanned, Scratch

_MODULES = {
    "arrow": ("ipc", "ArrowFormat"),
    "parquet": ("parquet", "ParquetFormat"),
    "orc": ("orc", "OrcFormat"),
    "csv": ("csv_lines", "CsvFormat"),
    "jsonl": ("json_lines", "JsonFormat"),
    "table": ("table_parquet", "TableFormat"),
    "lance": ("lance_rows", "LanceFormat"),
}


@lru_cache(maxsize=len(_MODULES))
def format_named(name: str) -> Format:
    """Return the format with a name of ``files.FORMATS``."""
    module, class_name = _MODULES[name]
    format_: Format = getattr(import_module(f"{__name__}.{module}"), class_name)()
    return format_


__all__ = ["Block", "Format", "Scanned", "Scratch", "format_named"]
