"""Batches in page-locked memory, from which a GPU copies while it computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def pinner() -> Callable[[Any], Any] | None:
    """Return a function that copies tensors into page-locked memory, or None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        warnings.warn("pin_memory=True has no effect: no GPU was found", stacklevel=3)
        return None
    return pinned


def pinned(value: Any) -> Any:
    """Return the value with pinned tensors at any depth.

    Values with a ``pin_memory`` method use it, as in torch's DataLoader.
    """
    if callable(own := getattr(value, "pin_memory", None)):  # tensors, too
        return own()
    if isinstance(value, Mapping):
        found = {name: pinned(inner) for name, inner in value.items()}
        return found if type(value) is dict else _like(value, found)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pinned, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(pinned, value))
    return value


def _like(value: Any, found: dict[Any, Any]) -> Any:
    """Return a mapping of the same type if its type takes a dict, such as a tokenizer's encoding."""
    try:
        return type(value)(found)
    except TypeError:
        return found
