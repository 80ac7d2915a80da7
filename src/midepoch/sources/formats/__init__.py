"""How each format is cut into blocks, and how a block becomes a table."""

from __future__ import annotations

from midepoch.sources.formats.base import Block, Format, Scanned
from midepoch.sources.formats.csv_lines import CsvFormat
from midepoch.sources.formats.ipc import ArrowFormat
from midepoch.sources.formats.json_lines import JsonFormat
from midepoch.sources.formats.orc import OrcFormat
from midepoch.sources.formats.parquet import ParquetFormat

FORMATS: dict[str, Format] = {
    "arrow": ArrowFormat(),
    "parquet": ParquetFormat(),
    "orc": OrcFormat(),
    "csv": CsvFormat(),
    "jsonl": JsonFormat(),
}

__all__ = ["FORMATS", "Block", "Format", "Scanned"]
