"""File formats: the division of a file into blocks, and the decoding of a block to a table.

A format is imported when its first file is opened: most datasets use one format, and mapped Arrow files none.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from midepoch.sources.formats.base import Block, CacheSpec, Format, InPlace, Member, Scanned

_MODULES = {
    "arrow": ("formats.arrow_ipc", "ArrowFormat"),
    "parquet": ("formats.parquet", "ParquetFormat"),
    "orc": ("formats.orc", "OrcFormat"),
    "csv": ("formats.text", "CsvFormat"),
    "jsonl": ("formats.text", "JsonFormat"),
    "mds": ("formats.mds", "MdsFormat"),
    "litdata": ("formats.litdata", "LitDataFormat"),
    "text": ("formats.text", "TextFormat"),
    "image": ("formats.media", "MediaFormat"),
    "audio": ("formats.media", "MediaFormat"),
    "video": ("formats.media", "MediaFormat"),
    "megatron": ("formats.tokens", "MegatronFormat"),
    "tokens": ("formats.tokens", "TokensFormat"),
    "tar": ("formats.tar_shards", "TarFormat"),
    "table": ("formats.table_parquet", "TableFormat"),
    "lance": ("tables.lance", "LanceFormat"),
}


@lru_cache(maxsize=64)
def format_named(name: str) -> Format:
    """Return the format with a name of ``files.FORMATS``. Arguments follow after colons: ``tokens:uint16:1024``."""
    stem, *arguments = name.split(":")
    module, class_name = _MODULES[stem]
    format_: Format = getattr(import_module(f"midepoch.sources.{module}"), class_name)(*arguments)
    return format_


__all__ = ["Block", "CacheSpec", "Format", "InPlace", "Member", "Scanned", "format_named"]
