"""Batches from a worker to the main process: small parts through a pipe, arrays in slots of unnamed shared memory.

The main process grants slots to a worker, which writes a batch into each and sends their bounds. The main process wraps
the arrays without a copy. A slot is granted again when the last array or tensor over it is gone. Only a few slots per
worker can be in the hands of the user: if he keeps more batches, the next ones are copied out, and no batch is ever
overwritten. The same holds for a process that is forked while batches are in use: their slots get new memory.

Each slot is an unnamed file, which the worker creates when it knows the size of its batches. The kernel frees it with
the last process that maps it: nothing is left after a crash. It is independent of the size of ``/dev/shm``.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import pickle
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch._internal.values import loaded
from midepoch.errors import MidepochError
from midepoch.iteration.state import unnamed_file
from midepoch.transforms.formats import Allocate

_log = logging.getLogger("midepoch")
_ALIGN = 64
_INLINE = 16 << 10
"""Bytes below which a pipe is faster than shared memory."""
_HELD = 4
"""Number of batches of all workers that can be in use without a copy: two in a training loop, two on their way to a
GPU."""

Bytes = npt.NDArray[np.uint8]
Span = tuple[int, int]


def held_per_worker(workers: int) -> int:
    """Return the number of slots of a worker that can be in use while all others are granted to it."""
    return max(1, -(-_HELD // workers))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


def _tensor_of(array: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(array).view(getattr(torch, dtype)).reshape(shape)


class _Pickler(pickle.Pickler):
    """Pickler that sends the numpy arrays of tensors, so that their memory is transferred out of band."""

    def reducer_override(self, value: Any) -> Any:
        torch = loaded("torch")
        if torch is None or type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        try:
            return _tensor, (np.asarray(value.numpy(), order="C"),)
        except (TypeError, RuntimeError):
            pass
        try:  # types that numpy does not have, such as bfloat16
            plain = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor_of, (plain, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        except (TypeError, RuntimeError):  # sparse, quantized, …: left to torch
            return NotImplemented


_PARCEL = struct.Struct("<qqq")
_SPAN = struct.Struct("<qq")
_NONE = -1


class Parcel(NamedTuple):
    """A message on its way. ``head``: its pickle. ``memory`` and ``slot``: where its arrays are, if they are in shared
    memory; ``spans``: their bounds there. ``arrays``: their bytes otherwise.
    """

    head: bytes
    slot: int | None
    memory: int = 0
    spans: Sequence[Span] = ()
    arrays: Sequence[bytes] = ()

    def pack(self) -> bytes:
        """Return the bytes of the message. pickle would take several times as long to read them."""
        slot = _NONE if self.slot is None else self.slot
        spans = self.spans or [(0, len(raw)) for raw in self.arrays]
        parts = [_PARCEL.pack(self.memory, slot, len(spans)), *(_SPAN.pack(*span) for span in spans), *self.arrays]
        return b"".join([*parts, self.head])

    @staticmethod
    def of(data: bytes) -> Parcel:
        """Return the message of some bytes."""
        memory, slot, count = _PARCEL.unpack_from(data)
        at = _PARCEL.size + count * _SPAN.size
        spans = [_SPAN.unpack_from(data, _PARCEL.size + i * _SPAN.size) for i in range(count)]
        if memory > 0:
            return Parcel(data[at:], slot, memory, spans)
        arrays = []
        for _, size in spans:
            arrays.append(data[at : at + size])
            at += size
        return Parcel(data[at:], None if slot == _NONE else slot, 0, (), arrays)


def _announcement(number: int, slot_bytes: int, size: int) -> bytes:
    """Return the message that new memory follows. Its first number, unlike that of a parcel, is negative."""
    return _PARCEL.pack(-number, slot_bytes, size)


class _Memory:
    """Shared memory of a worker, with room for all its slots. Pages that are never written cost nothing."""

    def __init__(self, number: int, slots: int, slot_bytes: int) -> None:
        self.number, self.slot_bytes, size = number, slot_bytes, slots * slot_bytes
        self.fd = unnamed_file(size)
        try:
            self.bytes: Bytes = np.frombuffer(mmap.mmap(self.fd, size), dtype=np.uint8)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = self.bytes.ctypes.data

    def has(self, raw: Bytes) -> bool:
        return bool(self.address <= raw.ctypes.data < self.address + len(self.bytes))


class Sender:
    """The worker's end. A slot, of ``slots``, can be written when the main process has granted it."""

    def __init__(self, connection: Connection, slots: int) -> None:
        self._connection, self._slots = connection, slots
        self._newest: _Memory | None = None
        self._of: dict[int, _Memory] = {}
        """The memory of each slot: not always the newest."""
        self._used = 0  # bytes of the next batch that are in its slot already
        self._usual = 0  # bytes of the largest batch so far
        self._memories, self._warned = 0, False

    def renew(self, slot: int) -> None:
        """Give up the memory of a slot: another process still reads it."""
        if self._of.pop(slot, None) is self._newest:
            self._newest = None

    def allocator(self, slot: int) -> Allocate:
        """Begin a batch. Return a function that allocates parts of it in its slot."""
        self._used = 0
        return partial(self._allocate, slot)

    def _allocate(self, slot: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Return an uninitialised array in a slot, for a part of the next batch. None if there is no room."""
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if size <= _INLINE or dtype.hasobject or self._used + size > self._usual:
            return None
        try:
            memory = self._memory(slot, self._usual)
        except OSError:
            return None
        return self._room(memory, slot, size).view(dtype).reshape(shape)

    def send(self, message: tuple[Any, ...], slot: int | None) -> None:
        """Send a message. Without a slot, all of it is sent by the pipe."""
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(message)
        raws = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
        total = sum(_aligned(len(raw)) for raw in raws)
        head = stream.getvalue()
        if total <= _INLINE or slot is None:
            parcel = Parcel(head, slot, arrays=[raw.tobytes() for raw in raws])
        else:
            self._usual = max(self._usual, total)
            try:
                memory, spans = self._write(slot, raws, total)
                parcel = Parcel(head, slot, memory.number, spans)
            except OSError as problem:
                self._say_slow(total, problem)
                parcel = Parcel(head, slot, arrays=[raw.tobytes() for raw in raws])
        self._used = 0
        self._connection.send_bytes(parcel.pack())

    def _write(self, slot: int, raws: list[Bytes], total: int) -> tuple[_Memory, list[Span]]:
        """Copy arrays into a slot, but for those that are there already."""
        memory = self._memory(slot, total)
        there = [self._used > 0 and memory.has(raw) for raw in raws]
        rest = sum(_aligned(len(raw)) for raw, is_there in zip(raws, there, strict=True) if not is_there)
        if self._used + rest > memory.slot_bytes:
            memory, there = self._grown(slot, self._used + rest), [False] * len(raws)
        spans = []
        for raw, is_there in zip(raws, there, strict=True):
            room = raw if is_there else self._room(memory, slot, len(raw))
            if not is_there:
                room[:] = raw
            spans.append((room.ctypes.data - memory.address, len(raw)))
        return memory, spans

    def _room(self, memory: _Memory, slot: int, size: int) -> Bytes:
        at, self._used = slot * memory.slot_bytes + self._used, self._used + _aligned(size)
        return memory.bytes[at : at + size]

    def _memory(self, slot: int, total: int) -> _Memory:
        """Return the memory of a slot, with room for a batch."""
        found = self._of.get(slot, self._newest)
        if found is None or found.slot_bytes < total:
            return self._grown(slot, total)
        self._of[slot] = found
        return found

    def _grown(self, slot: int, total: int) -> _Memory:
        """Create memory for batches a quarter larger than this one, unless the newest has room."""
        self._used = 0
        if self._newest is None or self._newest.slot_bytes < total:
            pages = -(-(total + total // 4) // mmap.PAGESIZE)
            self._memories += 1
            memory = _Memory(self._memories, self._slots, pages * mmap.PAGESIZE)
            try:
                self._connection.send_bytes(_announcement(memory.number, memory.slot_bytes, len(memory.bytes)))
                send_handle(self._connection, memory.fd, os.getppid())
            finally:
                os.close(memory.fd)
            self._newest = memory
        self._of[slot] = self._newest
        return self._newest

    def _say_slow(self, total: int, problem: OSError) -> None:
        if isinstance(problem, ConnectionError):
            raise problem
        if not self._warned:
            self._warned = True
            _log.warning(
                "no shared memory for a batch of %s bytes (%s): batches are sent by a pipe, which is slower",
                f"{total:,}", problem,
            )  # fmt: skip


_forks = 0
"""Number of forks of this process: a child may still read what was in use at that moment."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_count_fork)


class Mapped:
    """Memory of a worker that is mapped here, as long as anything uses it."""

    def __init__(self, memory: Bytes, slot_bytes: int) -> None:
        self.address, self.size, self._slot_bytes = memory.ctypes.data, len(memory), slot_bytes
        self._watchers: list[weakref.ref[Bytes]] = []
        address, all_mapped = self.address, _mapped  # at exit, the module may be cleared before the memory
        self._memory = weakref.ref(memory, lambda _: all_mapped.pop(address, None))

    def slot_of(self, address: int) -> int:
        """Return the address of the slot in which an address is."""
        return address - (address - self.address) % self._slot_bytes

    def on_unmap(self, action: Callable[[weakref.ref[Bytes]], None]) -> None:
        """Call a function before the memory is unmapped."""
        memory = self._memory()
        if memory is not None:
            self._watchers.append(weakref.ref(memory, action))


_mapped: dict[int, Mapped] = {}


def mapped_at(address: int) -> Mapped | None:
    """Return the memory in which an address is."""
    for mapped in list(_mapped.values()):
        if mapped.address <= address < mapped.address + mapped.size:
            return mapped
    return None


def _map(fd: int, size: int, slot_bytes: int) -> Bytes:
    memory: Bytes = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    mapped = Mapped(memory, slot_bytes)
    _mapped[mapped.address] = mapped
    return memory


class Receiver:
    """The main process's end for one worker, with the account of its slots.

    ``granted``: slots that the worker may have to write at the same time. ``held``: slots beyond these, for batches
    that are in use.
    """

    def __init__(self, connection: Connection, granted: int, held: int) -> None:
        self._connection = connection
        self._granted, self._out = granted, 0
        self._memory: dict[int, Bytes] = {}
        self._of: dict[int, int] = {}  # the memory of each slot, as far as it was used
        self._free = list(reversed(range(granted + held)))
        self._leases: dict[int, weakref.ref[Bytes]] = {}
        self._released: deque[tuple[int, int]] = deque()  # filled by whichever thread drops the last array

    def grant(self) -> int:
        """Return a free slot for the worker to write. ``~slot``: it needs new memory."""
        self._collect()
        self._out += 1
        return self._free.pop()

    def receive(self) -> Parcel:
        """Return the next message, unopened. Raise EOFError or OSError if the worker has exited."""
        while True:
            data = self._connection.recv_bytes()
            number, slot_bytes, size = _PARCEL.unpack_from(data)
            if number >= 0:
                parcel = Parcel.of(data)
                if parcel.memory and parcel.slot is not None:
                    self._of[parcel.slot] = parcel.memory
                return parcel
            number = -number
            try:
                fd = recv_handle(self._connection)
            except RuntimeError as problem:
                raise MidepochError(
                    f"the shared memory of a worker cannot be received: {problem}. This process may have too many open "
                    "files: see `ulimit -n`."
                ) from problem
            try:
                needed = {number, *self._of.values()}
                self._memory = {key: memory for key, memory in self._memory.items() if key in needed}
                self._memory[number] = _map(fd, size, slot_bytes)
            except OSError as problem:
                raise MidepochError(f"the shared memory of a worker cannot be mapped: {problem}") from problem
            finally:
                os.close(fd)

    def open(self, parcel: Parcel) -> Any:
        """Return the message. Its arrays are in the slot if enough slots are left for the worker, else copies."""
        head, slot, memory, bounds, arrays = parcel
        self._out -= slot is not None
        if not memory or slot is None:
            self._free += [] if slot is None else [slot]
            return pickle.loads(head, buffers=[bytearray(raw) for raw in arrays])
        self._collect()
        first, last = min(at for at, _ in bounds), max(at + size for at, size in bounds)
        whole = self._memory[memory][first:last]
        if len(self._free) + self._out >= self._granted:
            released, forks = self._released, _forks
            self._leases[slot] = weakref.ref(whole, lambda _: released.append((slot, forks)))
        else:
            whole = whole.copy()
            self._free.append(slot)
        view = whole.data  # what is made of it keeps it: arrays of a view would keep only the memory
        return pickle.loads(head, buffers=[view[at - first : at - first + size] for at, size in bounds])

    def _collect(self) -> None:
        """Take back the slots whose last array is gone."""
        while self._released:
            slot, forks = self._released.popleft()
            del self._leases[slot]
            self._free.append(slot if forks == _forks else ~slot)
