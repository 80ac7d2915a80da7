"""Reading of single record batches of Arrow IPC files, with the dictionaries that they need."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any

import pyarrow as pa

from midepoch.sources.arrow_ipc import Chains
from midepoch.sources.arrow_messages import DAMAGE, MAGIC, Bytes, Read, read_footer, whole_message


class BatchReader:
    """Record batches of one file, by offset, in any order.

    pyarrow reads a batch with dictionaries only as part of a stream. Therefore it gets a synthetic stream: the schema,
    then for each batch the dictionaries that differ from those of the last batch, and the batch. Even a file with new
    dictionaries for every batch is read in linear time. Not thread-safe.
    """

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size
        self._feed = _Feed()
        self._stream: pa.RecordBatchStreamReader | None = None
        self._loaded: list[tuple[int, ...]] = []

    def read(self, offset: int, end: int | None, dictionaries: Chains) -> pa.RecordBatch:
        """Return the record batch at an offset. ``end``: upper bound of its end. Raise ``pa.ArrowException``."""
        needed = [_version_at(versions, offset) for versions in dictionaries]
        try:
            if self._stream is None:
                self._feed.give(self._schema_message())
                self._stream = pa.ipc.open_stream(pa.PythonFile(self._feed, mode="r"))
                self._loaded = [()] * len(needed)
            changed = [new for new, old in zip(needed, self._loaded, strict=True) if new != old]
            # Before the first batch pyarrow expects one message of each dictionary, then the deltas.
            bases, deltas = [version[0] for version in changed], [at for version in changed for at in version[1:]]
            for at in (*bases, *deltas):
                self._feed.give(whole_message(self._read, at, self._size))
            self._feed.give(whole_message(self._read, offset, self._size, end))
            batch = self._stream.read_next_batch()
            batch.validate(full=True)  # later casts and takes trust its offsets
        except BaseException as problem:
            self._stream = None  # its dictionaries may be half loaded
            if isinstance(problem, (EOFError, StopIteration, *DAMAGE)):
                raise pa.ArrowInvalid(f"there is no complete record batch at byte {offset}: {problem}") from None
            raise
        finally:
            self._feed.clear()
        self._loaded = needed
        return batch

    def _schema_message(self) -> Bytes:
        if self._read(len(MAGIC), 0) == MAGIC:
            return read_footer(self._read, self._size).schema_message
        return whole_message(self._read, 0, self._size)


def _version_at(versions: tuple[tuple[int, ...], ...], offset: int) -> tuple[int, ...]:
    """Return the messages of a dictionary for the batch at an offset: all of its version. Those after the batch only
    add values that it does not use.
    """
    number = bisect_right(versions, offset, key=lambda version: version[0]) - 1
    return versions[max(0, number)]  # a file may keep its dictionaries after its batches


class _Feed:
    """Python file that returns the bytes it is given."""

    closed = False

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()

    def give(self, data: Bytes) -> None:
        self._parts.append(memoryview(data))

    def clear(self) -> None:
        self._parts.clear()

    def read(self, size: int = -1) -> Any:
        """Return the next bytes of one message. pyarrow never reads across messages."""
        if not self._parts:
            return b""
        part = self._parts.popleft()
        if 0 <= size < len(part):
            self._parts.appendleft(part[size:])
            part = part[:size]
        return part

    def close(self) -> None:
        """Do nothing: no file is open."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
