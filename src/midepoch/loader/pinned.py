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
        value, "pin_memory", lambda part: pinned_tensor(part) if isinstance(part, kind) else part.pin_memory()
    )


def pinned_tensor(tensor: Any) -> Any:
    """Return a tensor in page-locked memory.

    The copy is numpy's: torch's own uses a thread of each core, which workers need, and waits for all of them.
    """
    torch = sys.modules["torch"]
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or not tensor.is_contiguous() or tensor.requires_grad:
        return tensor.pin_memory()
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(room.reshape(-1).view(torch.uint8).numpy(), tensor.reshape(-1).view(torch.uint8).numpy())
    return room


def each_part(value: Any, method: str, convert: Callable[[Any], Any]) -> Any:
    """Return the value with all parts converted that have a method: tensors, too. Containers keep their types."""
    if callable(getattr(value, method, None)):
        return convert(value)
    if isinstance(value, Mapping):
        items = {name: each_part(inner, method, convert) for name, inner in value.items()}
        return items if type(value) is dict else _like(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each_part(inner, method, convert) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(each_part(inner, method, convert) for inner in value)
    return value


def parts_of(value: Any, kind: type) -> list[Any]:
    """Return all parts of a type, at any depth."""
    if isinstance(value, kind):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [part for one in inner for part in parts_of(one, kind)]


def _like(value: Any, found: dict[Any, Any]) -> Any:
    """Return a mapping of the same type if its type takes a dict, such as a tokenizer's encoding."""
    try:
        return type(value)(found)
    except TypeError:
        return found
