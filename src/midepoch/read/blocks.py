"""Opening blocks: from the index's byte offset to a record batch, without touching another page of the file."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import pyarrow as pa

from midepoch.errors import CorruptBlockError, DataChangedError, DataNotFoundError
from midepoch.read.sizes import bytes_of
from midepoch.sources import Source
from midepoch.sources.arrow_ipc import message_block, scan

HEAP_BYTES = 256 << 20
"""How much of decoded (compressed or dictionary-encoded) blocks one process keeps."""
_MAPPED_BLOCKS = 512


class Blocks:
    """Record batches of a source by number. Not thread-safe: each reading thread has its own."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._maps: dict[int, pa.Buffer] = {}
        self._open: OrderedDict[int, tuple[pa.RecordBatch, bool]] = OrderedDict()  # and whether it is mapped
        self._heap_bytes = 0
        self._file_blocks = source.file_blocks
        self._has_dictionaries = any(pa.types.is_dictionary(field.type) for field in source.schema)

    def _file(self, number: int) -> pa.Buffer:
        buffer = self._maps.get(number)
        if buffer is None:
            file = self._source.files[number]
            try:
                touched = os.stat(file.path).st_mtime_ns != file.mtime_ns
                buffer = pa.memory_map(file.path).read_buffer()
            except FileNotFoundError:
                raise DataNotFoundError(f"{file.path} has gone since the dataset was opened.") from None
            except OSError as problem:
                raise CorruptBlockError(f"{file.path} cannot be read: {problem}") from None
            if buffer.size != file.size:
                raise CorruptBlockError(
                    f"{file.path} has {buffer.size} bytes but had {file.size} when it was indexed: "
                    "the data has changed. Open the dataset again."
                )
            if touched and scan(Path(file.path), skip_damage=True).fingerprint != file.fingerprint:
                raise DataChangedError(
                    f"{file.path} has changed since it was indexed (it has other contents). Open the dataset again to "
                    "use them; a state saved before will then be refused."
                )
            self._maps[number] = buffer
        return buffer

    def get(self, block: int) -> tuple[pa.RecordBatch, bool]:
        """The block as a record batch, zero-copy where the file allows it, and whether it did: then its addresses hold
        for as long as the file is mapped. Raises CorruptBlockError.
        """
        found = self._open.get(block)
        if found is not None:
            self._open.move_to_end(block)
            return found
        number = int(self._file_blocks.searchsorted(block, side="right")) - 1
        file = self._file(number)
        offset = int(self._source.offsets[block])
        starts = self._source.layout.block_starts
        try:
            batch = self._decode(file, number, offset)
            batch.validate()
            if batch.num_rows != int(starts[block + 1] - starts[block]):
                raise pa.ArrowInvalid(f"{batch.num_rows} rows where the index says {starts[block + 1] - starts[block]}")
        except (pa.ArrowException, OSError, ValueError) as problem:
            path = self._source.files[number].path
            raise CorruptBlockError(
                f"the record batch at byte {offset} of {path} (rows {starts[block]} to {starts[block + 1] - 1} of the "
                f'data) cannot be read: {problem}. Restore the file, or pass on_error="skip" to go on without it.'
            ) from None
        mapped = _is_mapped(batch, file.address, file.address + file.size)
        self._keep(block, batch, mapped)
        return batch, mapped

    def _decode(self, file: pa.Buffer, number: int, offset: int) -> pa.RecordBatch:
        if not self._has_dictionaries:
            return pa.ipc.read_record_batch(pa.ipc.read_message(file.slice(offset)), self._source.schema)
        read = lambda size, at: file.slice(at, min(size, file.size - at)).to_pybytes()  # noqa: E731
        batch = message_block(read, file.size, offset, None, self._source.files[number].dictionaries)
        columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
        return pa.RecordBatch.from_arrays(columns, schema=plain_schema(self._source.schema))

    def _keep(self, block: int, batch: pa.RecordBatch, mapped: bool) -> None:
        self._open[block] = (batch, mapped)
        self._heap_bytes += 0 if mapped else bytes_of(batch)
        while len(self._open) > 1 and (self._heap_bytes > HEAP_BYTES or len(self._open) > _MAPPED_BLOCKS):
            _, (old, was_mapped) = self._open.popitem(last=False)
            self._heap_bytes -= 0 if was_mapped else bytes_of(old)


def _is_mapped(batch: pa.RecordBatch, start: int, stop: int) -> bool:
    """Whether every buffer lies in the mapping."""
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is not None and buffer.size:
                address = buffer.address
                if address < start or address + buffer.size > stop:
                    return False
    return True


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with dictionary-encoded columns as the values they stand for."""
    for i, field in enumerate(schema):
        if pa.types.is_dictionary(field.type):
            schema = schema.set(i, field.with_type(field.type.value_type))
    return schema
