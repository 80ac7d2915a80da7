"""What a format can do: find the blocks of a file, and decode one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from midepoch.sources.arrow_ipc import Chains
from midepoch.sources.stores import Entry, Store


@dataclass
class Scanned:
    """What looking through one file found."""

    schema: pa.Schema
    offsets: list[int] = field(default_factory=list)
    """Where each block begins: a byte, or the number of a row group or stripe."""
    rows: list[int] = field(default_factory=list)
    nullable: set[tuple[str, ...]] = field(default_factory=set)
    """Paths of columns, and of what is inside them, that hold a null."""
    fingerprint: str = ""
    footer: bytes = b""
    """What has to be known of the file to decode a block of it."""
    etag: str = ""
    dictionaries: Chains = ()
    decoded_bytes: float = 0.0
    """About how many bytes all rows take in memory, where the file tells."""
    inferred: bool = False
    """Whether the types were guessed from text, so that other files may make them wider."""
    complete: bool = True
    stop: int | None = None
    """The end of the last block, if that is not the end of the file."""
    broken_lines: list[int] = field(default_factory=list)
    """Numbers of the lines that cannot be read and are no part of the data."""

    def end(self, i: int) -> int | None:
        """Return the start of the block after the i-th; for the last one ``stop``."""
        return self.offsets[i + 1] if i + 1 < len(self.offsets) else self.stop


@dataclass(frozen=True)
class Scratch:
    """The folder that keeps contents of compressed files, and how many bytes. By default, the cache folder."""

    folder: str = ""
    limit: int = 4 << 30


@dataclass(frozen=True)
class Block:
    """A block to decode. ``end`` is where the next one begins, None for the last of a file."""

    entry: Entry
    offset: int
    end: int | None
    footer: bytes = b""
    dictionaries: Chains = ()
    scratch: Scratch = Scratch()


class Format(Protocol):
    """One file format."""

    def scan(self, store: Store, entry: Entry, *, skip_damage: bool) -> Scanned:
        """Find all blocks. May be called again after a failure of the store."""
        ...

    def decode(self, store: Store, block: Block, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
        """Those of the columns that the file has, as near to the types of ``schema`` as the file allows."""
        ...

    def excluded(
        self, block: Block, expression: Any, schema: pa.Schema, partition: Any, columns: Sequence[str]
    ) -> bool:
        """Return whether statistics prove that no row of the block passes the filter, which asks for these columns."""
        ...


class NoStatistics:
    """For formats that cannot tell anything about a block without reading it."""

    def excluded(self, *_about: Any) -> bool:
        return False
