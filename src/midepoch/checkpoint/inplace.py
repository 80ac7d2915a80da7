"""Arrays of a model, an optimizer or a tree that the saved ones can be read into, without a copy between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from midepoch.checkpoint import parts
from midepoch.checkpoint.arrays import Kind
from midepoch.checkpoint.tree import array_kinds, array_paths, encode

_LITTLE = sys.byteorder == "little"
_MODULE_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_OPTIMIZER_HOOKS = (
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
)


def targets(thing: Any, json: Any) -> dict[str, Any]:
    """The arrays of a thing to read saved ones into, by the names of those: of the same kind, at the same place.

    None of a thing with a way of its own to load its state: that may leave some of it out, or change it.
    """
    thing = parts.unwrapped(thing)
    if not _loads_as_it_is(thing):
        return {}
    try:
        current = encode(parts.tree_of(thing), "", inline=0)
    except (TypeError, ValueError):  # something that needs pickle: all of it is given as new arrays
        return {}
    kinds = array_kinds(json)
    places = {path: name for name, paths in array_paths(current.json).items() for path in paths}
    found: dict[str, Any] = {}
    free = set(current.arrays)  # tied weights are one array: it is read into once
    for name, paths in array_paths(json).items():
        place = places.get(paths[0], "")
        if place in free and current.arrays[place][0] == kinds[name] and _is_writable(*current.arrays[place]):
            found[name] = current.arrays[place][1]
            free.discard(place)
    return found


def _loads_as_it_is(thing: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):
        return all(_is_torchs_own(module, torch.nn.Module, _MODULE_HOOKS) for module in thing.modules())
    if torch is not None and isinstance(thing, torch.optim.Optimizer):
        return _is_torchs_own(thing, torch.optim.Optimizer, _OPTIMIZER_HOOKS)
    return parts.is_tree(thing)


def _is_torchs_own(thing: Any, base: type, hooks: tuple[str, ...]) -> bool:
    """Check that nobody but torch has a say in the state dict of a module or optimizer."""
    if any(getattr(thing, name, None) for name in hooks):
        return False
    own = ("state_dict", "load_state_dict")
    inner = ("_load_from_state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
    return all(_is_of_torch(type(thing), base, name) for name in (*own, *inner))


def _is_of_torch(kind: type, base: type, method: str) -> bool:
    found = getattr(kind, method, None)
    return found is getattr(base, method, None) or str(getattr(found, "__module__", "")).startswith("torch.")


def _is_writable(kind: Kind, value: Any) -> bool:
    if kind.library == "numpy":
        own = type(value) is np.ndarray and value.dtype.isnative  # the bytes on disk are little-endian, as this machine
        return own and _LITTLE and bool(value.flags.writeable and value.flags.c_contiguous)
    torch: Any = sys.modules.get("torch")
    if torch is None or kind.library != "torch" or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return not value.is_conj() and not value.is_neg() and not any(_repeated_axes(value))


def _repeated_axes(tensor: Any) -> Iterator[bool]:
    return (length > 1 and not stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
