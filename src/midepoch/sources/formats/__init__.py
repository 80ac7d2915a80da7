"""How each format is cut into blocks, and how a block becomes a table.

A format is imported when the first file of it is opened: most datasets have one, and mapped Arrow files need none.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from midepoch.sources.formats.base import Block, Format, Scanned, Scratch

_WHERE = {
    "arrow": ("ipc", "ArrowFormat"),
    "parquet": ("parquet", "ParquetFormat"),
    "orc": ("orc", "OrcFormat"),
    "csv": ("csv_lines", "CsvFormat"),
    "jsonl": ("json_lines", "JsonFormat"),
}


@lru_cache(maxsize=len(_WHERE))
def format_named(name: str) -> Format:
    """The format of a name in ``files.FORMATS``."""
    module, kind = _WHERE[name]
    found: Format = getattr(import_module(f"{__name__}.{module}"), kind)()
    return found


__all__ = ["Block", "Format", "Scanned", "Scratch", "format_named"]
