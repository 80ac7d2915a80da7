"""Blocks of mapped files: from the byte offset in the index to a record batch, without reading any other page."""

from __future__ import annotations

import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch.errors import DataChangedError
from midepoch.read.cache import bytes_of
from midepoch.read.columns import HeldBuffers, Memory
from midepoch.sources import Source
from midepoch.sources.formats.arrow_ipc import BatchReader
from midepoch.sources.index import IndexedFile
from midepoch.sources.schemas import holds_dictionary, plain_array, plain_schema
from midepoch.sources.source import fingerprint_of, in_place, view
from midepoch.storage.damage import changed, is_damage, removed, retried

HEAP_BYTES = 256 << 20
"""Bytes of decoded (compressed or dictionary-encoded) blocks that one process keeps."""
_MAPPED_BLOCKS = 512
_CHECK_PAUSE = 100
"""Pause after a check of all mapped files, in multiples of its duration: checks take 1 % of the time."""
_LONGEST_PAUSE = 1.0
_CHECKED_FILES = 1024  # at most, each time: 2 to 6 ms
_LEAST_FILES = 64
_SLAB_BYTES = 4 << 20


try:
    MOST_MAPPINGS = int(Path("/proc/sys/vm/max_map_count").read_text()) // 4
except (OSError, ValueError):
    MOST_MAPPINGS = 16_384
"""Maximum number of mapped files: a quarter of the kernel's limit, as other libraries map memory too."""
_mapping: weakref.WeakSet[Blocks] = weakref.WeakSet()


@dataclass
class _MappedFile:
    """A mapped file and its identity at the last check."""

    buffer: pa.Buffer
    identity: tuple[int, int]
    times: tuple[int, int]
    """Of the last change of the contents, and of the file: a copy may restore the first one."""


class Blocks:
    """Record batches of a source by number. Not thread-safe: each reading thread has its own instance."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files: OrderedDict[int, _MappedFile] = OrderedDict()  # the most recently used last
        self._held = HeldBuffers()
        self._open: OrderedDict[int, tuple[pa.RecordBatch, bool]] = OrderedDict()  # and True if it is mapped
        self._heap_bytes = 0
        self._file_blocks = source.file_blocks
        self._has_dictionaries = any(holds_dictionary(field.type) for field in source.schema)
        self._readers: dict[int, BatchReader] = {}
        self._format = in_place(source)
        self._slabs: OrderedDict[int, _Slab] = OrderedDict()
        self._next_check, self._stat_seconds = 0.0, 2e-6
        _mapping.add(self)

    @property
    def memory(self) -> Memory:
        """Memory of the mapped files."""
        return self._held.memory

    def _file(self, number: int) -> pa.Buffer:
        mapped = self._files.get(number)
        if mapped is None:
            file = self._source.files[number]
            try:
                stat = os.stat(file.path)
                buffer = retried(lambda: pa.memory_map(file.path).read_buffer(), file.path)
            except FileNotFoundError:
                raise removed(file.path) from None
            if buffer.size != file.size:
                raise changed(file.path, f"it has {buffer.size} bytes and had {file.size}")
            if stat.st_mtime_ns != file.mtime_ns:
                self._same_contents(file)
            mapped = self._files[number] = _MappedFile(buffer, (stat.st_dev, stat.st_ino), _times(stat))
            self._held.add(number, [buffer])
        else:
            self._files.move_to_end(number)
            self._compare(number, mapped)
        return mapped.buffer

    def check(self, *, last: bool = False) -> None:
        """Raise DataChangedError if a mapped file was truncated, which could crash the process, or rewritten.

        A check takes 2 to 6 µs per file. Most calls return immediately, so that checks take 1 % of the time, except
        the ``last`` one of an epoch.
        """
        now = time.monotonic()
        if now < self._next_check and not last:
            return
        numbers = list(islice(reversed(self._files) if last else self._files, _CHECKED_FILES))
        for number in numbers:
            self._compare(number, self._files[number])
            if len(self._files) > _CHECKED_FILES:
                self._files.move_to_end(number)  # check the others next time
        if numbers:  # a check during which the process had to wait does not postpone the next one for long
            self._stat_seconds = min((time.monotonic() - now) / len(numbers), 2 * self._stat_seconds)
        self._next_check = now + min(_LONGEST_PAUSE, _CHECK_PAUSE * len(numbers) * self._stat_seconds)

    def _compare(self, number: int, mapped: _MappedFile) -> None:
        path = self._source.files.paths[number]
        try:
            stat = os.stat(path)
        except OSError:
            return  # the mapping of a removed file is unchanged
        if (stat.st_dev, stat.st_ino) != mapped.identity:
            return  # as is that of a replaced file
        if stat.st_size < mapped.buffer.size:
            raise DataChangedError(
                f"{path} was truncated to {stat.st_size} bytes while it was read (it had {mapped.buffer.size}). "
                "Restore it. Replace files of a running job by renaming, never by writing into them."
            )
        if _times(stat) != mapped.times:
            self._same_contents(self._source.files[number])
            mapped.times = _times(stat)

    def trim(self) -> list[int]:
        """Release the least recently used files if too many are mapped. Return their blocks."""
        most = max(_LEAST_FILES, MOST_MAPPINGS // max(1, len(_mapping)))
        dropped: list[int] = []
        if len(self._files) > most:
            for number in list(islice(self._files, len(self._files) - most * 3 // 4)):
                del self._files[number]
                self._readers.pop(number, None)
                self._held.remove(number)
                dropped += range(self._file_blocks[number], self._file_blocks[number + 1])
        while sum(len(slab.room) for slab in self._slabs.values()) > HEAP_BYTES and len(self._slabs) > 1:
            number, slab = self._slabs.popitem(last=False)
            self._held.remove(("slab", number))
            dropped += slab.blocks
        if dropped:  # most calls release nothing
            for block in self._open.keys() & dropped:
                self._forget(block)
        return dropped

    def _room(self, block: int, size: int) -> npt.NDArray[np.uint8]:
        """Return memory for the offsets of a block, which is held like the mapped files."""
        number = next(reversed(self._slabs), -1)
        slab = self._slabs.get(number)
        if slab is None or slab.filled + size > len(slab.room):
            number += 1
            slab = self._slabs[number] = _Slab(np.empty(max(size, _SLAB_BYTES), np.uint8))
            self._held.add(("slab", number), [pa.py_buffer(slab.room)])
        start = slab.filled
        slab.filled = -(-(start + size) // 8) * 8
        slab.blocks.append(block)
        return slab.room[start : start + size]

    def get(self, block: int) -> tuple[pa.RecordBatch, bool]:
        """Return the block as a record batch, and True if it is zero-copy: its addresses are then valid while the file
        is mapped. Raise CorruptBlockError if it cannot be read.
        """
        opened = self._open.get(block)
        if opened is not None:
            self._open.move_to_end(block)
            return opened
        number = int(self._file_blocks.searchsorted(block, side="right")) - 1
        file = self._file(number)
        offset = int(self._source.offsets[block])
        starts = self._source.layout.block_starts
        try:
            if self._format is None:
                batch = self._decode(file, number, offset)
            else:
                batch = view(self._source, self._format, block, self._file, partial(self._room, block))
            batch.validate()
            if batch.num_rows != int(starts[block + 1] - starts[block]):
                raise pa.ArrowInvalid(f"{batch.num_rows} rows where the index says {starts[block + 1] - starts[block]}")
        except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError) as problem:
            if not is_damage(problem, file.size):
                raise
            raise self._source.unreadable(block, problem) from None
        mapped = _is_mapped(batch, [file, *(pa.py_buffer(slab.room) for slab in list(self._slabs.values())[-2:])])
        self._keep(block, batch, mapped)
        return batch, mapped

    def _decode(self, file: pa.Buffer, number: int, offset: int) -> pa.RecordBatch:
        if not self._has_dictionaries:
            return pa.ipc.read_record_batch(pa.ipc.read_message(file.slice(offset)), self._source.schema)
        reader = self._readers.get(number)
        if reader is None:
            view = memoryview(file)
            reader = self._readers[number] = BatchReader(lambda size, at: view[at : at + size], file.size)
        batch = reader.read(offset, None, self._source.files[number].dictionaries)
        columns = [plain_array(column) for column in batch.columns]
        return pa.RecordBatch.from_arrays(columns, schema=plain_schema(self._source.schema))

    def _keep(self, block: int, batch: pa.RecordBatch, mapped: bool) -> None:
        self._open[block] = (batch, mapped)
        self._heap_bytes += 0 if mapped else bytes_of(batch)
        while len(self._open) > 1 and (self._heap_bytes > HEAP_BYTES or len(self._open) > _MAPPED_BLOCKS):
            self._forget(next(iter(self._open)))

    def _forget(self, block: int) -> None:
        batch, mapped = self._open.pop(block)
        self._heap_bytes -= 0 if mapped else bytes_of(batch)

    def _same_contents(self, file: IndexedFile) -> None:
        """Raise DataChangedError for a file with other times unless its contents are the same."""
        if fingerprint_of(self._source, file) != file.fingerprint:
            raise changed(file.path, "its contents differ")


def _times(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_mtime_ns, stat.st_ctime_ns


@dataclass
class _Slab:
    """Memory for the offsets of many blocks: one buffer to hold instead of thousands."""

    room: npt.NDArray[np.uint8]
    filled: int = 0
    blocks: list[int] = field(default_factory=list)


def _is_mapped(batch: pa.RecordBatch, held: Sequence[pa.Buffer]) -> bool:
    """Return True if every buffer is inside one of these."""
    spans = [(buffer.address, buffer.address + buffer.size) for buffer in held]
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is not None and buffer.size:
                address, end = buffer.address, buffer.address + buffer.size
                if not any(start <= address and end <= stop for start, stop in spans):
                    return False
    return True
