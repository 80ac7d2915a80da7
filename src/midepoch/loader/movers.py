"""Batches on their way to page-locked memory, a torch device, or JAX devices: sent before they are asked for."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from midepoch._internal.values import loaded
from midepoch.errors import MidepochError
from midepoch.loader import transport
from midepoch.loader.direct import MadeAhead
from midepoch.loader.options import Options
from midepoch.loader.plans import BatchSource, MadeBatch
from midepoch.transforms import finish
from midepoch.transforms.formats import check_fits_jax


def pinned(value: Any) -> Any:
    """Return the value with pinned tensors at any depth.

    Values with a ``pin_memory`` method use it, as in torch's DataLoader.
    """
    torch = loaded("torch")
    kind = () if torch is None else torch.Tensor
    return each_part(
        value,
        lambda part: callable(getattr(part, "pin_memory", None)),
        lambda part: pinned_tensor(part) if isinstance(part, kind) else part.pin_memory(),
    )


def pinned_tensor(tensor: Any) -> Any:
    """Return a tensor in page-locked memory.

    The copy is numpy's: torch's own uses a thread of each core, which workers need, and waits for all of them.
    """
    torch = sys.modules["torch"]
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.requires_grad or not tensor.is_contiguous():
        return tensor.pin_memory()
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(room.reshape(-1).view(torch.uint8).numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
    return room


def each_part(value: Any, is_part: Callable[[Any], bool], convert: Callable[[Any], Any]) -> Any:
    """Return the value with its parts converted, at any depth. Containers keep their types."""
    if is_part(value):
        return convert(value)
    if isinstance(value, Mapping):
        items = {name: each_part(inner, is_part, convert) for name, inner in value.items()}
        return items if type(value) is dict else _like(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each_part(inner, is_part, convert) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(each_part(inner, is_part, convert) for inner in value)
    return value


def is_movable(value: Any) -> bool:
    """Return True for a tensor, or for another object with a method ``to`` that is no container of tensors."""
    return callable(getattr(value, "to", None)) and not isinstance(value, (Mapping, list, tuple))


def _like(value: Any, found: dict[Any, Any]) -> Any:
    """Return a mapping of the same type if its type takes a dict, such as a tokenizer's encoding."""
    try:
        return type(value)(found)
    except TypeError:
        return found


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


_CHECK = 0.1
"""Seconds after which a thread that waits for a worker looks whether it has to stop."""


class Mover:
    """Moves batches, in order. ``depth``: batches that are under way beside the one that is delivered."""

    depth = 2

    def send(self, value: Any) -> Any:
        """Begin to move a batch, and return a ticket for it."""
        raise NotImplementedError

    def receive(self, ticket: Any) -> Any:
        """Return the batch of a ticket, ready for use in the caller's stream. By default, the ticket is the batch."""
        return ticket

    def close(self) -> None:
        """Wait for what is under way, and drop it. By default, nothing has to be waited for."""


class _Sent(NamedTuple):
    made: MadeBatch
    ticket: Any


class MovedBatches:
    """The batches of a source, moved ahead of delivery. The cursor of each stays with it.

    The source is asked in the caller's thread, where functions of the user may run: for one batch more than is
    delivered. Which it is does not depend on the time, since ranks may wait for each other in the source.
    """

    def __init__(self, source: BatchSource, mover: Mover, kind: str) -> None:
        self.source, self._mover, self._kind = source, mover, kind
        self._under_way: deque[_Sent] = deque()
        self._failure: Exception | None = None
        self._over = self._begun = False

    def next(self) -> MadeBatch | None:
        """Return the next batch and the cursor after it, or None at the end. Raises the errors of making it."""
        if not self._under_way:
            self._look_ahead()
        taken = self._under_way.popleft() if self._under_way else None
        if taken is not None and self._begun and not self._under_way:
            self._look_ahead()
        self._begun = True
        if taken is None:
            if self._failure is not None:
                raise self._failure
            return None
        return _delivered(taken, self._mover)

    def _look_ahead(self) -> None:
        """Ask for the next batch, and send it. An error is raised in its turn, after the batches before it."""
        if self._over:
            return
        try:
            sent = _send(self.source, self._mover, self._kind)
            self._over = sent is None
            self._under_way.extend([] if sent is None else [sent])
        except Exception as problem:
            self._over, self._failure = True, problem

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""
        self._under_way.clear()
        self._mover.close()
        return self.source.close()


class FedBatches:
    """The batches of a source that runs no function of the user in this process, made and moved by a thread."""

    def __init__(self, source: BatchSource, mover: Mover, kind: str) -> None:
        self.source, self._mover = source, mover
        is_ready = getattr(source, "is_ready", None)
        waits = None if is_ready is None else partial(is_ready, _CHECK)
        self._sent = MadeAhead(partial(_send, source, mover, kind), mover.depth + 1, waits)

    def next(self) -> MadeBatch | None:
        """Return the next batch and the cursor after it, or None at the end. Raises the errors of making it."""
        if (sent := self._sent.next()) is None:
            return None
        made = _delivered(sent, self._mover)
        self._sent.taken()  # at the end: the thread must not compete for the interpreter lock before
        return made

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""
        if not self._sent.close():
            return False
        self._mover.close()
        return self.source.close()


def _delivered(sent: _Sent, mover: Mover) -> MadeBatch:
    made, ticket = sent
    return made if made.empty else made._replace(value=mover.receive(ticket))


def _send(source: BatchSource, mover: Mover, kind: str) -> _Sent | None:
    made = source.next()
    if made is None:
        return None
    return _Sent(made._replace(value=None), None if made.empty else mover.send(finish(made.value, kind)))


def mover_for(options: Options) -> Mover | None:
    """Return the mover of a loader, or None if its batches stay where they are made."""
    device = options.device
    if is_of_jax(device):
        return JaxMover(device)
    if device is None or (device := _torch_for(device).device(device)).type == "cpu":
        return _pinner() if options.pin_memory else None
    return CudaMover(device) if device.type == "cuda" else TorchMover(device)


def check_device(device: Any, kind: str | None) -> None:
    """Raise MidepochError unless this is a device that is here, or None. ``kind``: the format of batches, if known."""
    if device is None:
        return
    if kind in ("python", "arrow") or (kind in ("numpy", "jax") and not is_of_jax(device)):
        what = "arrays" if is_of_jax(device) else "tensors"
        wanted = "jax" if is_of_jax(device) else "torch"
        raise MidepochError(
            f"device={str(device)!r} moves {what}, but the format of the batches is {kind!r}. Use "
            f'with_format("{wanted}"), or omit device.'
        )
    if is_of_jax(device):
        return
    torch = _torch_for(device)
    name, device = str(device), torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MidepochError(f'device={name!r}: torch finds no GPU. Use device=None, or device="cpu".')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MidepochError(f"device={name!r}: this process has only {torch.cuda.device_count()} GPUs, from cuda:0 on.")


def is_of_jax(device: Any) -> bool:
    """Return True for a device or sharding of JAX."""
    return type(device).__module__.partition(".")[0] in ("jax", "jaxlib")


def _torch_for(device: Any) -> Any:
    try:
        import torch

        torch.device(device)
    except ImportError:
        raise MidepochError(f"device={device!r} needs torch: `pip install midepoch[torch]`.") from None
    except (RuntimeError, TypeError) as problem:
        raise MidepochError(
            f'device must be the name of a torch device, such as "cuda" or "cuda:1", or a device or sharding of JAX, '
            f"got {device!r}: {str(problem).splitlines()[0]}"
        ) from None
    return torch


def _pinner() -> Mover | None:
    import torch

    if not torch.cuda.is_available():
        warnings.warn("pin_memory=True has no effect: no GPU was found", stacklevel=2)
        return None
    return Pinner()


class Pinner(Mover):
    """Copies tensors into page-locked memory: 3 to 20 ms for 38 MB.

    The memory is torch's, which knows when a GPU has read it: it may be dropped as soon as a copy has been started.
    """

    def send(self, value: Any) -> Any:
        """Copy a batch."""
        return pinned(value)


class TorchMover(Mover):
    """Copies tensors to a device of torch, which keeps what is under way."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def send(self, value: Any) -> Any:
        """Begin to copy a batch."""
        return each_part(value, is_movable, lambda part: part.to(self._device, non_blocking=True))


class CudaMover(Mover):
    """Copies tensors to a GPU on a stream of its own, while the model computes on others.

    Shared memory of workers is page-locked in place, so that the GPU reads from there and nothing is copied here. Other
    tensors are copied into page-locked memory first. A batch is delivered when the caller's stream waits for its copy,
    and its memory on the GPU is used again when the work of that stream is done.

    Objects that are no tensors, but have a method ``to``, are copied when they are delivered: which memory they read,
    and when, is not known.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        self._stream = torch.cuda.Stream(self._device)
        self._registered = Registered(torch.cuda.cudart())
        self._read: deque[tuple[Any, Any]] = deque()
        """Events of copies, and the memory from which the GPU reads until then."""

    def send(self, value: Any) -> Any:
        """Begin to copy a batch."""
        while self._read and self._read[0][0].query():
            self._read.popleft()
        on_host: list[Any] = []
        each_part(value, self._is_on_host, on_host.append)
        locked = self._registered.lock(on_host)
        moved: list[Any] = []
        sources: list[Any] = []

        def copied(part: Any) -> Any:
            if self._is_on_host(part) and not locked and not part.is_pinned():
                part = pinned_tensor(part)
            sources.append(part)
            moved.append(part.to(self._device, non_blocking=True))
            return moved[-1]

        with self._torch.cuda.stream(self._stream):
            result = each_part(value, self._is_tensor, copied)
            event = self._stream.record_event()
        self._read.append((event, sources))
        return result, moved, event

    def _is_tensor(self, part: Any) -> bool:
        return isinstance(part, self._torch.Tensor)

    def _is_on_host(self, part: Any) -> bool:
        return self._is_tensor(part) and part.is_cpu and part.layout is self._torch.strided

    def receive(self, ticket: Any) -> Any:
        """Let the caller's stream wait for the copy, and return the batch."""
        result, moved, event = ticket
        stream = self._torch.cuda.current_stream(self._index)
        stream.wait_event(event)
        for tensor in moved:
            tensor.record_stream(stream)
        return each_part(result, self._is_other, lambda part: part.to(self._device))

    def _is_other(self, part: Any) -> bool:
        return is_movable(part) and not self._is_tensor(part)

    def close(self) -> None:
        """Wait for what is under way: its memory is used again, or given back."""
        while self._read:
            self._read.popleft()[0].synchronize()


class JaxMover(Mover):
    """Copies arrays to a device of JAX, or to the devices of a sharding. JAX copies in the background.

    If a sharding has devices of other processes, the batch is this process's part of the global array.
    """

    def __init__(self, device: Any) -> None:
        import jax

        self._jax, self._device = jax, device
        is_sharding = isinstance(device, jax.sharding.Sharding)
        self._is_global = is_sharding and not device.is_fully_addressable

    def send(self, value: Any) -> Any:
        """Begin to copy a batch."""
        return each_part(value, self._is_array, self._copied)

    def _is_array(self, part: Any) -> bool:
        torch = loaded("torch")
        if torch is not None and isinstance(part, torch.Tensor):
            return True
        return isinstance(part, self._jax.Array) or (isinstance(part, np.ndarray) and part.dtype.kind in "biufc")

    def _copied(self, part: Any) -> Any:
        if isinstance(part, self._jax.Array):
            return self._jax.device_put(part, self._device)
        array = np.asarray(part)
        check_fits_jax(array)
        if self._is_global:
            return self._jax.make_array_from_process_local_data(self._device, array)
        return self._jax.device_put(array, self._device)
