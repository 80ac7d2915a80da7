"""Batches in page-locked memory, from which a GPU copies while it computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from midepoch._internal.imports import loaded


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
