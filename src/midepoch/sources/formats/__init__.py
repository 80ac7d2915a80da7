"""File formats: the division of a file into blocks, and the decoding of a block to a table.

A format is imported when its first file is opened: most datasets use one format, and mapped Arrow files none.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from midepoch.sources.formats.base import Block, CacheSpec, Format, InPlace, Member, Scanned

_MODULES = {
    "arrow": ("arrow_ipc", "ArrowFormat"),
    "parquet": ("parquet", "ParquetFormat"),
    "orc": ("orc", "OrcFormat"),
    "csv": ("csv_lines", "CsvFormat"),
    "jsonl": ("json_lines", "JsonFormat"),
    "mds": ("mds", "MdsFormat"),
    "litdata": ("litdata", "LitDataFormat"),
    "text": ("csv_lines", "TextFormat"),
    "image": ("media", "MediaFormat"),
    "audio": ("media", "MediaFormat"),
    "video": ("media", "MediaFormat"),
    "megatron": ("tokens", "MegatronFormat"),
    "tokens": ("tokens", "TokensFormat"),
    "tar": ("tar_shards", "TarFormat"),
    "table": ("table_parquet", "TableFormat"),
    "lance": ("lance_rows", "LanceFormat"),
}


@lru_cache(maxsize=64)
def format_named(name: str) -> Format:
    """Return the format with a name of ``files.FORMATS``. Arguments follow after colons: ``tokens:uint16:1024``."""
    stem, *arguments = name.split(":")
    module, class_name = _MODULES[stem]
    format_: Format = getattr(import_module(f"{__name__}.{module}"), class_name)(*arguments)
    return format_


__all__ = ["Block", "CacheSpec", "Format", "InPlace", "Member", "Scanned", "format_named"]
