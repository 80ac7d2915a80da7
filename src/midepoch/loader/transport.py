"""Batches from a worker to the main process: small parts through a pipe, arrays through unnamed shared memory.

The shared memory is an unnamed file. The worker creates it once it knows the size of its batches, and sends its
descriptor. The kernel frees it with the last process that has it open: nothing is left after a crash.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

from midepoch.iteration.shared import unnamed_file

_ALIGN = 64
_INLINE = 16 << 10
"""Bytes below which a pipe is faster than shared memory."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


class _Pickler(pickle.Pickler):
    """Pickler that sends the numpy arrays of tensors, so that their memory is transferred out of band."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        try:
            return _tensor, (np.asarray(value.numpy(), order="C"),)
        except (TypeError, RuntimeError):  # bfloat16, sparse, …: left to torch
            return NotImplemented


class Sender:
    """The worker's end. At most ``slots`` batches may be unreceived at the same time: the caller counts them."""

    def __init__(self, connection: Connection, slots: int) -> None:
        self._connection, self._slots = connection, slots
        self._memory: mmap.mmap | None = None
        self._slot_bytes = 0

    def send(self, message: tuple[Any, ...], slot: int = 0) -> None:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(message)
        raws = [buffer.raw() for buffer in buffers]
        total = sum(_aligned(raw.nbytes) for raw in raws)
        if total <= _INLINE:
            self._put((stream.getvalue(), [bytes(raw) for raw in raws]))
            return
        if total > self._slot_bytes or self._memory is None:
            self._grow(total)
        assert self._memory is not None
        at, spans = slot % self._slots * self._slot_bytes, []
        for raw in raws:
            self._memory[at : at + raw.nbytes] = raw
            spans.append((at, raw.nbytes))
            at += _aligned(raw.nbytes)
        self._put((stream.getvalue(), spans))

    def _put(self, message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message, protocol=5))

    def _grow(self, total: int) -> None:
        """Create shared memory with room for batches a quarter larger than this one."""
        self._slot_bytes = _aligned(total + total // 4)
        size = self._slot_bytes * self._slots
        fd = unnamed_file(size)
        try:
            self._memory = mmap.mmap(fd, size)
            self._put(("memory", size))
            send_handle(self._connection, fd, os.getppid())
        finally:
            os.close(fd)


class Receiver:
    """The main process's end. It returns copies: the slot can be written again."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._memory: Any = None

    def receive(self) -> Any:
        """Return the next message. Raise EOFError or OSError if the worker has exited."""
        while True:
            head, spans = pickle.loads(self._connection.recv_bytes())
            if head != "memory":
                break
            fd = recv_handle(self._connection)
            try:
                self._memory = np.frombuffer(mmap.mmap(fd, spans), dtype=np.uint8)
            finally:
                os.close(fd)
        if not spans or isinstance(spans[0], bytes):
            return pickle.loads(head, buffers=[bytearray(raw) for raw in spans])
        first, last = spans[0][0], spans[-1][0] + spans[-1][1]
        whole = self._memory[first:last].copy()
        return pickle.loads(head, buffers=[whole[at - first : at - first + size] for at, size in spans])
