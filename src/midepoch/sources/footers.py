"""Footers of files, which are needed to decode their blocks. They are stored beside the index and read on demand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from midepoch.errors import CorruptBlockError, FormatError
from midepoch.storage.cache_files import atomic_write
from midepoch.storage.damage import is_damage, refusal, retried

_SUFFIX = ".midepoch-footers"
_KEPT_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, eq=False)
class Footers:
    """One footer for each file: in memory, or in a file that is mapped on first use."""

    kept: tuple[bytes, ...] = ()
    path: str | None = None
    name: str = ""
    """Hash of the contents, so that an index is never used with the footers of another one."""

    @staticmethod
    def of(footers: Iterable[bytes]) -> Footers:
        kept = tuple(footers)
        digest = hashlib.blake2b(digest_size=8)
        for one in kept:
            digest.update(hashlib.blake2b(one, digest_size=16).digest())
        return Footers(kept, None, digest.hexdigest())

    def __getitem__(self, number: int) -> bytes:
        if self.path is None:
            return self.kept[number]
        return bytes(pa.decompress(*self._at(number), codec="zstd", asbytes=True))

    def _at(self, number: int) -> tuple[bytes, int]:
        stored = self._column[number].as_py()
        return stored[8:], int.from_bytes(stored[:8], "little")

    @cached_property
    def _column(self) -> pa.ChunkedArray:
        assert self.path is not None
        try:
            table = retried(self._table, self.path)
        except (OSError, CorruptBlockError, pa.ArrowException) as problem:
            if not is_damage(problem):
                raise refusal(problem, f"{self.path} could not be read: {problem}") from None
            raise FormatError(
                f"{self.path} cannot be read ({problem}). Open the dataset with force_reindex=True."
            ) from None
        if (table.schema.metadata or {}).get(b"midepoch") != self.name.encode():
            raise FormatError(f"{self.path} belongs to another index. Create the dataset again.")
        return table.column(0)

    def _table(self) -> pa.Table:
        with pa.memory_map(self.path) as mapped:
            return pa.ipc.open_file(mapped).read_all()

    def save(self, index: Path) -> Footers:
        """Save the footers beside the index, under their own name: an index in use keeps its footers."""
        path = index.with_name(f"{index.stem}.{self.name}{_SUFFIX}")
        if not path.exists():
            atomic_write(path, self._serialised())
        for old in index.parent.glob(f"{index.stem}.*{_SUFFIX}"):
            if old != path and old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                old.unlink(missing_ok=True)
        return Footers((), str(path), self.name)

    def _serialised(self) -> bytes:
        stored = [len(one).to_bytes(8, "little") + pa.compress(one, codec="zstd", asbytes=True) for one in self.kept]
        table = pa.table({"footer": pa.array(stored, pa.binary())}).replace_schema_metadata({"midepoch": self.name})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())
