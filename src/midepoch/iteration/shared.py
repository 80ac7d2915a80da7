"""Shared memory between a dataset and its copies in DataLoader workers.

torch's workers get a copy of the dataset and no further messages from the main process. Two facts must reach them all
the same: ``set_epoch``, for persistent workers, and whether all workers that resume are at the end of an epoch. Under
fork an anonymous mapping shares them. Under spawn it moves into an unnamed file whose descriptor is sent with the
pickle. The file has no name, so that nothing remains however a process dies.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from multiprocessing import context, reduction
from typing import Any, NamedTuple

from midepoch._internal.threads import silent_at_exit
from midepoch.order import Shard

_SIZE = 16384
_EPOCH, _NAMED, _SEEDED, _SEED, _NOTES = 0, 8, 9, 16, 24
_NOTE = struct.Struct("<qqq")


class Note(NamedTuple):
    """Position of a worker: the epochs it has begun since it resumed, and 1 if it is at the end of one."""

    round: int
    at_end: int
    epoch: int


class SharedCell:
    """Shared values: the epoch, True if ``set_epoch`` requested it, the seed of the global generators once drawn, and
    the position of each worker when it began.
    """

    def __init__(
        self, epoch: int = 0, named: bool = False, global_seed: int | None = None, *, fd: int | None = None
    ) -> None:
        self._fd = fd
        self._memory = mmap.mmap(-1 if fd is None else fd, _SIZE)
        if fd is None:
            self.epoch, self.named, self.global_seed = epoch, named, global_seed

    @property
    def epoch(self) -> int:
        return int(struct.unpack_from("<q", self._memory, _EPOCH)[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        struct.pack_into("<q", self._memory, _EPOCH, value)

    @property
    def named(self) -> bool:
        return bool(self._memory[_NAMED])

    @named.setter
    def named(self, value: bool) -> None:
        self._memory[_NAMED] = int(value)

    @property
    def global_seed(self) -> int | None:
        return int(struct.unpack_from("<Q", self._memory, _SEED)[0]) if self._memory[_SEEDED] else None

    @global_seed.setter
    def global_seed(self, value: int | None) -> None:
        struct.pack_into("<Q", self._memory, _SEED, value or 0)
        self._memory[_SEEDED] = int(value is not None)

    def note(self, worker: int, note: Note) -> None:
        at = _NOTES + worker * _NOTE.size
        if at + _NOTE.size > _SIZE:
            raise ValueError(f"more than {(_SIZE - _NOTES) // _NOTE.size} DataLoader workers are not supported")
        _NOTE.pack_into(self._memory, at, *note)

    def notes(self, workers: int) -> list[Note]:
        return [Note(*_NOTE.unpack_from(self._memory, _NOTES + i * _NOTE.size)) for i in range(workers)]

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:  # pickled without starting a process: copy the values
            return SharedCell, (self.epoch, self.named, self.global_seed)
        if self._fd is None:
            self._move_to_file()
        assert self._fd is not None
        return _rebuild, (reduction.DupFd(self._fd),)

    def _move_to_file(self) -> None:
        content = self._memory[:]
        fd = unnamed_file(_SIZE)
        self._memory, self._fd = mmap.mmap(fd, _SIZE), fd
        self._memory[:] = content

    @silent_at_exit
    def __del__(self) -> None:
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)


def worker_share(shard: Shard) -> tuple[Shard, tuple[int, int, int] | None]:
    """Return the shard of this process. In a DataLoader worker, its part of it and (worker, workers, shards)."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is None:
        return shard, None
    return shard.within(Shard(info.id, info.num_workers)), (info.id, info.num_workers, shard.count)


def _rebuild(handle: Any) -> SharedCell:
    return SharedCell(fd=handle.detach())


def unnamed_file(size: int) -> int:
    """Return a descriptor of memory without a name. It is freed with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("midepoch", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
