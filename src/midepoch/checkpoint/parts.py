"""What users hand over to be saved and restored: pipelines, models, optimizers, anything with a state, trees.

Each kind knows its tree of values, whether another tree fits it, and how to take one over.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from midepoch.checkpoint.arrays import is_array, is_flattened, is_sharded, kind_of
from midepoch.checkpoint.like import imposed
from midepoch.checkpoint.stored import Stored, is_array_or_stored
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.imports import loaded


def tree_of(thing: Any) -> Any:
    """The values to save of a pipeline, model, optimizer, stateful or tree."""
    thing = unwrapped(thing)
    if (nnx := _nnx_of(thing)) is not None:
        state = thing if isinstance(thing, nnx.State) else nnx.state(thing)
        return nnx.to_pure_dict(state)
    if is_iterator(thing):
        return thing.get_state()
    return thing.state_dict() if _is_stateful(thing) else thing


def check(thing: Any, tree: Any, name: str) -> None:
    """Raise CheckpointMismatchError if this tree cannot be restored into that thing. Changes nothing."""
    thing = unwrapped(thing)
    if _has(thing, "check_state"):
        try:
            thing.check_state(tree)
        except CheckpointMismatchError:
            raise
        except StateError as problem:
            raise CheckpointMismatchError(
                name, f"{tree!r:.120}", class_of(thing), f"another pipeline: {problem}"
            ) from None
    elif _has(getattr(thing, "dataset", None), "check_state"):
        for inner in _states_in(tree):  # a StatefulDataLoader, which would complain only at its first batch
            thing.dataset.check_state(inner)
    elif _is_torch(thing, "nn.Module"):
        _check_arrays(thing.state_dict(), tree, name)
    elif _is_torch(thing, "optim.Optimizer"):
        _check_optimizer(thing, tree, name)
    elif _nnx_of(thing) is not None or not (is_iterator(thing) or _is_stateful(thing)):
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
    if (nnx := _nnx_of(thing)) is None and is_iterator(thing):
        thing.set_state(tree)
    elif nnx is None and _is_stateful(thing):
        thing.load_state_dict(tree)
    elif nnx is not None:
        state = thing if isinstance(thing, nnx.State) else nnx.state(thing)
        nnx.replace_by_pure_dict(state, imposed(nnx.to_pure_dict(state), tree, name))
        if state is not thing:
            nnx.update(thing, state)
    else:
        imposed(thing, tree, name, in_place=True)


def unwrapped(thing: Any) -> Any:
    """A model without what wraps it for several processes or compiles it, so that it restores with and without."""
    torch: Any = loaded("torch")
    if torch is None or not isinstance(thing, torch.nn.Module):
        return thing
    while True:
        if isinstance(thing, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            thing = thing.module
        elif "_orig_mod" in thing._modules:
            thing = thing._orig_mod
        else:
            return thing


def is_spread(thing: Any) -> bool:
    """True for a model or an optimizer of torch of which each rank may hold a part: FSDP, tensor parallelism."""
    if _is_torch(thing, "optim.Optimizer"):
        parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
    else:
        parameters = list(thing.parameters()) if _is_torch(thing, "nn.Module") else []
    return any(is_sharded(parameter) or is_flattened(parameter) for parameter in parameters)


def check_not_spread(thing: Any, name: str) -> None:
    """Raise TypeError for a model or an optimizer of which rank 0 alone cannot save all."""
    if is_spread(thing):
        raise TypeError(
            f"{name} is sharded (FSDP or tensor parallel): each rank holds a part of it. Save it as the model or the "
            'optimizer of PipelineCheckpoint(…, backend="dcp"), which keeps all parts.'
        )


def class_of(thing: Any) -> str:
    kind = type(unwrapped(thing))
    return f"{kind.__module__}.{kind.__qualname__}"


def is_global(pipeline: Any, state: Any) -> bool:
    """Whether one rank's state of a pipeline restores every rank."""
    return bool(getattr(pipeline, "state_is_global", False)) and isinstance(state, Mapping)


def is_tree(thing: Any) -> bool:
    """Check for dicts, lists and arrays, in contrast to a thing with methods for its state."""
    return _nnx_of(thing) is None and not is_iterator(thing) and not _is_stateful(thing)


def reads_later(thing: Any) -> bool:
    """Check for a thing that is filled here or by torch: its arrays need not be read to see whether they fit."""
    thing = unwrapped(thing)
    torchs = _is_torch(thing, "nn.Module") or _is_torch(thing, "optim.Optimizer")
    return not _has(thing, "check_state") and (torchs or is_tree(thing) or _nnx_of(thing) is not None)


def takes_all(pipeline: Any) -> bool:
    """Whether a pipeline goes on from the list of the states of all ranks, on any number of them."""
    return bool(getattr(pipeline, "takes_states_of_all_ranks", False))


def is_known_by_class(thing: Any) -> bool:
    """Whether nothing but its class says what a state belongs to: it takes any, and checks none."""
    thing = unwrapped(thing)
    if _nnx_of(thing) is not None or _is_torch(thing, "nn.Module") or _is_torch(thing, "optim.Optimizer"):
        return False
    return (is_iterator(thing) or _is_stateful(thing)) and not _has(thing, "check_state")


def check_saveable(pipeline: Any, models: Mapping[str, Any], extra: Any) -> None:
    """Raise TypeError for arguments that are something else than their names say."""
    if pipeline is not None and (
        _is_torch(pipeline, "nn.Module") or not (is_iterator(pipeline) or _is_stateful(pipeline))
    ):
        raise TypeError(
            f"pipeline: a {type(pipeline).__qualname__} cannot say where it stands. Expected a loader, dataset or "
            "iterator with get_state and set_state, or state_dict and load_state_dict (of midepoch; torchdata's "
            "StatefulDataLoader instead of a DataLoader; a class of your own). Models go into model=…"
        )
    for name, thing in models.items():
        if isinstance(thing, (int, float, str, bytes, type)):
            raise TypeError(f"{name}: expected a model, an optimizer or a tree of arrays, got {thing!r:.80}")
        if _has(thing, "check_state"):
            raise TypeError(f"{name}: a {type(thing).__qualname__} is a pipeline: save(pipeline, model, optimizer)")
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra: expected a dict of names and what to save by them, got a {type(extra).__qualname__}")


def _has(thing: Any, *names: str) -> bool:
    """Whether its class has these methods: some objects pretend to have anything (nnx.Rngs)."""
    return all(callable(getattr(type(thing), name, None)) for name in names)


def is_iterator(thing: Any) -> bool:
    """Whether this has ``get_state`` and ``set_state``."""
    return _has(thing, "get_state", "set_state") and not _is_torch(thing, "nn.Module")


def _is_stateful(thing: Any) -> bool:
    return _has(thing, "state_dict", "load_state_dict")


def _is_torch(thing: Any, kind: str) -> bool:
    torch: Any = loaded("torch")
    if torch is None:
        return False
    room, name = kind.split(".")
    return isinstance(thing, getattr(getattr(torch, room), name))


def _is_mutable_array(thing: Any) -> bool:
    return is_array(thing) and kind_of(thing).library in ("torch", "numpy")


def _nnx_of(thing: Any) -> Any:
    """flax.nnx if this is a module, optimizer or state of it."""
    nnx: Any = loaded("flax.nnx")
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
            _few(unknown),
            _few(missing),
            "another model, or other layers in it (listed is what only one of them has)",
        )
    torch: Any = sys.modules["torch"]
    for key, value in current.items():
        if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
            continue
        other = saved[key]
        ours = f"{value.dtype} {tuple(value.shape)}"
        theirs = _tensor_words(other, torch)
        if ours != theirs:
            raise CheckpointMismatchError(f"{name}, {key}", theirs, ours, "a model of another size or dtype")


def _tensor_words(value: Any, torch: Any) -> str:
    if isinstance(value, Stored):
        return f"torch.{value.kind.dtype} {value.shape}" if value.kind.library == "torch" else value.kind.library
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_optimizer(optimizer: Any, saved: Any, name: str) -> None:
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        shapes_of = {
            key: {inner: tuple(value.shape) for inner, value in entry.items() if is_array_or_stored(value)}
            for key, entry in saved["state"].items()
        }
    except (TypeError, KeyError, AttributeError):
        raise CheckpointMismatchError(name, "no optimizer's state", "an optimizer", "another kind of object") from None
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        ours, theirs = sorted(set(group) - set(other)), sorted(set(other) - set(group))
        if ours and theirs:  # one of them alone may be another version of torch
            raise CheckpointMismatchError(f"{name}, settings", theirs, ours, "another kind of optimizer")
    groups = [group["params"] for group in optimizer.param_groups]
    if sizes != [len(group) for group in groups]:
        raise CheckpointMismatchError(
            f"{name}, parameters by group", sizes, [len(group) for group in groups], "an optimizer of another model"
        )
    shapes = [tuple(parameter.shape) for group in groups for parameter in group]
    for number, shape in enumerate(shapes):
        for inner, found in shapes_of.get(number, {}).items():
            if found and inner in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer") and found != shape:
                raise CheckpointMismatchError(f"{name}, {inner} of parameter {number}", found, shape, "another model")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
