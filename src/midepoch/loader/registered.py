"""Shared memory of workers that is page-locked in place, so that a GPU reads batches from there."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

from midepoch.loader import transport

_log = logging.getLogger("midepoch")


class Registered:
    """Page-locks the slots of batches, as far as they were used. It takes 1.5 ms for 38 MB, once.

    ``runtime``: the functions ``cudaHostRegister`` and ``cudaHostUnregister``.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._locked: dict[int, dict[int, int]] = {}
        """By address of a memory: the bytes of each slot that are locked, by address of the slot."""
        self._known: dict[int, int] = {}
        """Bytes from an address on that are locked, of tensors that were seen before."""
        self._failed = False

    def lock(self, tensors: Sequence[Any]) -> bool:
        """Lock the slots that contain tensors of a batch. Return True if all are in locked memory."""
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        if all(self._known.get(address, -1) >= size for address, size in places):
            return True
        ends: dict[int, tuple[transport.Mapped, int]] = {}
        all_locked = True
        for address, size in places:
            mapped = transport.mapped_at(address) if size and not self._failed else None
            all_locked &= mapped is not None or not size
            if mapped is not None:
                slot = mapped.slot_of(address)
                ends[slot] = mapped, max(address + size, ends.get(slot, (mapped, 0))[1])
        for slot, (mapped, end) in ends.items():
            size = -(-(end - slot) // mmap.PAGESIZE) * mmap.PAGESIZE
            if (locked := self._locked_of(mapped).get(slot, 0)) < size:
                all_locked &= self._lock(mapped, slot, size, locked)
        if all_locked:
            self._known.update(places)
        return all_locked

    def _locked_of(self, mapped: transport.Mapped) -> dict[int, int]:
        if mapped.address not in self._locked:
            locked = self._locked[mapped.address] = {}
            mapped.on_unmap(_Unlock(self._runtime, self._locked, self._known, mapped.address))
            return locked
        return self._locked[mapped.address]

    def _lock(self, mapped: transport.Mapped, slot: int, size: int, before: int) -> bool:
        locked = self._locked_of(mapped)
        if before:
            self._runtime.cudaHostUnregister(slot)
            del locked[slot]
        error = int(self._runtime.cudaHostRegister(slot, size, 0))
        if error:
            self._failed = True
            _log.warning("shared memory cannot be page-locked (CUDA error %d): batches are copied once more", error)
        else:
            locked[slot] = size
        return not error


class _Unlock:
    """Unlocks the slots of a memory before it is unmapped, in whichever thread that happens."""

    def __init__(self, runtime: Any, locked: dict[int, dict[int, int]], known: dict[int, int], address: int) -> None:
        self._runtime, self._locked, self._known, self._address = runtime, locked, known, address
        self._getpid, self._process = os.getpid, os.getpid()  # at exit, the module may be cleared before the memory

    def __call__(self, _: weakref.ref[Any]) -> None:
        if self._getpid() != self._process:
            return  # a fork, which must not use the GPU of its parent
        self._known.clear()
        for slot in self._locked.pop(self._address, {}):
            self._runtime.cudaHostUnregister(slot)
