"""What has to be known of each file to decode its blocks, kept beside the index and read only when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from midepoch.errors import FormatError
from midepoch.sources.storage import atomic_write

_SUFFIX = ".midepoch-footers"


@dataclass(frozen=True, eq=False)
class Footers:
    """One for each file: in memory, or in a file that is mapped when the first is asked for."""

    kept: tuple[bytes, ...] = ()
    path: str | None = None
    name: str = ""
    """Names the contents, so that an index and the footers of another one cannot be taken for each other."""

    def __getitem__(self, number: int) -> bytes:
        if self.path is None:
            return self.kept[number]
        return bytes(pa.decompress(*self._at(number), codec="zstd", asbytes=True))

    def _at(self, number: int) -> tuple[bytes, int]:
        stored = self._column[number].as_py()
        return stored[8:], int.from_bytes(stored[:8], "little")

    @cached_property
    def _column(self) -> pa.ChunkedArray:
        try:
            with pa.memory_map(self.path) as mapped:
                table = pa.ipc.open_file(mapped).read_all()
        except (OSError, pa.ArrowException) as problem:
            raise FormatError(
                f"{self.path} cannot be read ({problem}): open the dataset with force_reindex=True."
            ) from None
        if (table.schema.metadata or {}).get(b"midepoch") != self.name.encode():
            raise FormatError(f"{self.path} belongs to another index: make the dataset again.")
        return table.column(0)

    def save(self, index: Path) -> Footers:
        """Written beside the index; the caller holds its lock."""
        path = index.with_suffix(_SUFFIX)
        stored = [len(one).to_bytes(8, "little") + pa.compress(one, codec="zstd", asbytes=True) for one in self.kept]
        table = pa.table({"footer": pa.array(stored, pa.binary())}).replace_schema_metadata({"midepoch": self.name})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        atomic_write(path, bytes(sink.getvalue()))
        return Footers((), str(path), self.name)
