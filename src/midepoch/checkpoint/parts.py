"""What users hand over to be saved and restored: pipelines, models, optimizers, anything with a state, trees.

Each kind knows its tree of values, whether another tree fits it, and how to take one over.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from midepoch.checkpoint.arrays import is_array, kind_of
from midepoch.checkpoint.like import imposed
from midepoch.errors import CheckpointMismatchError
from midepoch.typing import Stateful


def tree_of(thing: Any) -> Any:
    """The values to save of a pipeline, model, optimizer, stateful or tree."""
    thing = unwrapped(thing)
    if _has(thing, "get_state", "set_state"):
        return thing.get_state()
    if isinstance(thing, Stateful):
        return thing.state_dict()
    if (nnx := _nnx_of(thing)) is not None:
        state = thing if isinstance(thing, nnx.State) else nnx.state(thing)
        return nnx.to_pure_dict(state)
    return thing


def check(thing: Any, tree: Any, name: str) -> None:
    """Raise CheckpointMismatchError if this tree cannot be restored into that thing. Changes nothing."""
    thing = unwrapped(thing)
    if _has(thing, "check_state"):
        thing.check_state(tree)
    elif _has(getattr(thing, "dataset", None), "check_state"):
        for inner in _states_in(tree):  # a StatefulDataLoader, which would complain only at its first batch
            thing.dataset.check_state(inner)
    elif _is_torch(thing, "nn.Module"):
        _check_arrays(thing.state_dict(), tree, name)
    elif _is_torch(thing, "optim.Optimizer"):
        _check_optimizer(thing, tree, name)
    elif not _has(thing, "get_state", "set_state") and not isinstance(thing, Stateful):
        imposed(tree_of(thing), tree, name)
        if _nnx_of(thing) is None and not isinstance(thing, (MutableMapping, list)) and not _is_mutable_array(thing):
            raise TypeError(
                f"{name}: a {type(thing).__qualname__} cannot be changed in place. Pass something with "
                f"load_state_dict, a dict or a list, or take its value from PipelineCheckpoint.read(step, {name!r}, "
                "like=…)."
            )


def give(thing: Any, tree: Any, name: str) -> None:
    """Restore a tree into a thing that it fits."""
    thing = unwrapped(thing)
    if _has(thing, "get_state", "set_state"):
        thing.set_state(tree)
    elif isinstance(thing, Stateful):
        thing.load_state_dict(tree)
    elif (nnx := _nnx_of(thing)) is not None:
        state = thing if isinstance(thing, nnx.State) else nnx.state(thing)
        nnx.replace_by_pure_dict(state, imposed(nnx.to_pure_dict(state), tree, name))
        if state is not thing:
            nnx.update(thing, state)
    else:
        imposed(thing, tree, name, in_place=True)


def unwrapped(thing: Any) -> Any:
    """A model without what wraps it for several processes or compiles it, so that it restores with and without."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(thing, torch.nn.Module):
        return thing
    while True:
        if isinstance(thing, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            thing = thing.module
        elif "_orig_mod" in thing._modules:
            thing = thing._orig_mod
        else:
            return thing


def class_of(thing: Any) -> str:
    kind = type(unwrapped(thing))
    return f"{kind.__module__}.{kind.__qualname__}"


def is_global(pipeline: Any, state: Any) -> bool:
    """Whether one rank's state of a pipeline restores every rank."""
    return bool(getattr(pipeline, "state_is_global", False)) and isinstance(state, Mapping)


def _has(thing: Any, *names: str) -> bool:
    return not isinstance(thing, type) and all(callable(getattr(thing, name, None)) for name in names)


def _is_torch(thing: Any, kind: str) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    room, name = kind.split(".")
    return isinstance(thing, getattr(getattr(torch, room), name))


def _is_mutable_array(thing: Any) -> bool:
    return is_array(thing) and kind_of(thing).library in ("torch", "numpy")


def _nnx_of(thing: Any) -> Any:
    """flax.nnx if this is a module, optimizer or state of it."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    kinds = tuple(getattr(nnx, name) for name in ("Module", "Pytree", "Optimizer", "State") if hasattr(nnx, name))
    return nnx if isinstance(thing, kinds) else None


def _states_in(tree: Any) -> list[Mapping[str, Any]]:
    """The states of midepoch within the state of something around it."""
    if isinstance(tree, Mapping):
        if isinstance(tree.get("midepoch"), int):
            return [tree]
        return [state for inner in tree.values() for state in _states_in(inner)]
    if isinstance(tree, (list, tuple)):
        return [state for inner in tree for state in _states_in(inner)]
    return []


def _check_arrays(current: Mapping[str, Any], saved: Any, name: str) -> None:
    """A model fits if it has the same arrays of the same shapes: torch copies those that fit, and then complains."""
    if not isinstance(saved, Mapping):
        raise CheckpointMismatchError(
            name, type(saved).__name__, "a state dict", "something else was saved by that name"
        )
    missing, unknown = sorted(set(current) - set(saved)), sorted(set(map(str, saved)) - set(current))
    if missing or unknown:
        raise CheckpointMismatchError(
            f"{name}, keys",
            _few(unknown, "has, and the current has not"),
            _few(missing, "has, and the saved has not"),
            "another model, or other layers in it",
        )
    for key, value in current.items():
        shapes = tuple(getattr(value, "shape", ())), tuple(getattr(saved[key], "shape", ()))
        if shapes[0] != shapes[1]:
            raise CheckpointMismatchError(f"{name}, shape of {key}", shapes[1], shapes[0], "a model of another size")


def _check_optimizer(optimizer: Any, saved: Any, name: str) -> None:
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        tensors = {
            key: {inner: tuple(value.shape) for inner, value in entry.items() if is_array(value) and value.ndim}
            for key, entry in saved["state"].items()
        }
    except (TypeError, KeyError, AttributeError):
        raise CheckpointMismatchError(name, "no optimizer's state", "an optimizer", "another kind of object") from None
    groups = [group["params"] for group in optimizer.param_groups]
    if sizes != [len(group) for group in groups]:
        raise CheckpointMismatchError(
            f"{name}, parameters by group", sizes, [len(group) for group in groups], "an optimizer of another model"
        )
    shapes = [tuple(parameter.shape) for group in groups for parameter in group]
    for number, shape in enumerate(shapes):
        for inner, found in tensors.get(number, {}).items():
            if inner in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer") and found != shape:
                raise CheckpointMismatchError(f"{name}, {inner} of parameter {number}", found, shape, "another model")


def _few(names: list[str], what: str) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{what} {shown}" if names else "nothing more"
