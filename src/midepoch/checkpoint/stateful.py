"""Objects with a state: pipelines, models, optimizers, anything with ``state_dict`` or ``get_state``, and trees.

Each kind (``kind_of``) has a tree of values, a check whether another tree fits, and a way to load one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from midepoch._internal.values import loaded
from midepoch.checkpoint.arrays import ArraySpec, is_array, is_flattened, is_sharded, spec_of
from midepoch.checkpoint.matching import check_module, check_optimizer, fit
from midepoch.checkpoint.tree import array_paths, array_specs, encode
from midepoch.errors import CheckpointMismatchError, StateError

_LITTLE_ENDIAN = sys.byteorder == "little"
_HOOKS = (
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
)  # fmt: skip
_STATE_METHODS = (
    "state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict", "get_extra_state",
    "set_extra_state",
)  # fmt: skip


def kind_of(owner: Any) -> str:
    """Return the kind of an object.

    "nnx": of flax. "module", "optimizer": of torch. "pipeline": with ``get_state`` and ``set_state``. "stateful": with
    ``state_dict`` and ``load_state_dict``. "tree": dicts, lists, arrays and any other value.
    """
    if _nnx_of(owner) is not None:
        return "nnx"
    if _is_torch(owner, "nn.Module"):
        return "module"
    if _has(owner, "get_state", "set_state"):
        return "pipeline"
    if _is_torch(owner, "optim.Optimizer"):
        return "optimizer"
    return "stateful" if _has(owner, "state_dict", "load_state_dict") else "tree"


def state_of(owner: Any) -> Any:
    """Return the values to save of a pipeline, model, optimizer, stateful object or tree."""
    owner = unwrap(owner)
    kind = kind_of(owner)
    if kind == "nnx":
        nnx = _nnx_of(owner)
        return nnx.to_pure_dict(owner if isinstance(owner, nnx.State) else nnx.state(owner))
    if kind == "pipeline":
        return owner.get_state()
    return owner if kind == "tree" else owner.state_dict()


def check_fits(owner: Any, tree: Any, name: str) -> None:
    """Raise CheckpointMismatchError if this tree cannot be loaded into an object. Changes nothing."""
    owner = unwrap(owner)
    kind = kind_of(owner)
    if _has(owner, "check_state"):
        try:
            owner.check_state(tree)
        except CheckpointMismatchError:
            raise
        except StateError as problem:
            cause = f"another pipeline: {problem}"
            raise CheckpointMismatchError(name, f"{tree!r:.120}", class_name(owner), cause) from None
    elif _has(getattr(owner, "dataset", None), "check_state"):
        for inner in _states_in(tree):  # a StatefulDataLoader, which would raise only at its first batch
            owner.dataset.check_state(inner)
    elif kind == "module":
        check_module(owner.state_dict(), tree, name)
    elif kind == "optimizer":
        check_optimizer(owner, tree, name)
    elif kind in ("nnx", "tree"):
        fit(state_of(owner), tree, name)
        is_mutable_array = is_array(owner) and spec_of(owner).library in ("torch", "numpy")
        if kind == "tree" and not isinstance(owner, (MutableMapping, list)) and not is_mutable_array:
            raise TypeError(
                f"{name}: a {type(owner).__qualname__} cannot be changed in place. Pass something with "
                f"load_state_dict, a dict or a list, or take its value from PipelineCheckpoint.read(step, {name!r}, "
                "like=…)."
            )


def load_state(owner: Any, tree: Any, name: str) -> None:
    """Load a tree that fits into an object."""
    owner = unwrap(owner)
    kind = kind_of(owner)
    if kind == "nnx":
        nnx = _nnx_of(owner)
        state = owner if isinstance(owner, nnx.State) else nnx.state(owner)
        nnx.replace_by_pure_dict(state, fit(nnx.to_pure_dict(state), tree, name))
        if state is not owner:
            nnx.update(owner, state)
    elif kind == "pipeline":
        owner.set_state(tree)
    elif kind == "tree":
        fit(owner, tree, name, in_place=True)
    else:
        owner.load_state_dict(tree)


def unwrap(owner: Any) -> Any:
    """Return a model without its wrappers for several processes or compilation: its state is the same without them."""
    torch: Any = loaded("torch")
    if torch is None or not isinstance(owner, torch.nn.Module):
        return owner
    while True:
        if isinstance(owner, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            owner = owner.module
        elif "_orig_mod" in owner._modules:
            owner = owner._orig_mod
        else:
            return owner


def is_distributed(owner: Any) -> bool:
    """Return True for a torch model or optimizer of which each rank may hold a part: FSDP, tensor parallelism."""
    if _is_torch(owner, "optim.Optimizer"):
        parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    else:
        parameters = list(owner.parameters()) if _is_torch(owner, "nn.Module") else []
    return any(is_sharded(parameter) or is_flattened(parameter) for parameter in parameters)


def check_not_distributed(owner: Any, name: str) -> None:
    """Raise TypeError for a model or optimizer that rank 0 cannot save alone."""
    if is_distributed(owner):
        raise TypeError(
            f"{name} is sharded (FSDP or tensor parallel): each rank holds a part of it. Save it as the model or the "
            'optimizer of PipelineCheckpoint(…, backend="dcp"), which saves all parts.'
        )


def class_name(owner: Any) -> str:
    owner_class = type(unwrap(owner))
    return f"{owner_class.__module__}.{owner_class.__qualname__}"


def is_global_state(pipeline: Any, state: Any) -> bool:
    """Return True if the state of one rank restores every rank."""
    return bool(getattr(pipeline, "state_is_global", False)) and isinstance(state, Mapping)


def reads_lazily(owner: Any) -> bool:
    """Return True if the arrays of a state need not be read to check whether it fits."""
    owner = unwrap(owner)
    return not _has(owner, "check_state") and kind_of(owner) in ("module", "optimizer", "tree", "nnx")


def check_class(owner: Any, saved: Any, name: str) -> None:
    """Raise CheckpointMismatchError for the state of another class, where nothing else distinguishes them."""
    owner, current = unwrap(owner), class_name(owner)
    if _has(owner, "check_state") or kind_of(owner) not in ("pipeline", "stateful") or not isinstance(saved, str):
        return
    if saved.split(".")[-1] != current.split(".")[-1]:  # a script's own classes have another module when imported
        cause = "another class (if it was only renamed, take its state from PipelineCheckpoint.read)"
        raise CheckpointMismatchError(f"the class of {name}", saved, current, cause)


def check_saveable(pipeline: Any, models: Mapping[str, Any], extra: Any) -> None:
    """Raise TypeError for arguments of the wrong kind."""
    if pipeline is not None and kind_of(pipeline) in ("module", "nnx", "tree"):
        raise TypeError(
            f"pipeline: a {type(pipeline).__qualname__} has no state. Expected a loader, dataset or iterator with "
            "get_state and set_state, or state_dict and load_state_dict (of midepoch; torchdata's StatefulDataLoader "
            "instead of a DataLoader; a class of your own). Pass models as model=…"
        )
    for name, model in models.items():
        if isinstance(model, (int, float, str, bytes, type)):
            raise TypeError(f"{name}: expected a model, an optimizer or a tree of arrays, got {model!r:.80}")
        if _has(model, "check_state"):
            raise TypeError(f"{name}: a {type(model).__qualname__} is a pipeline: save(pipeline, model, optimizer)")
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra: expected a dict from names to values, got a {type(extra).__qualname__}")


def restore_targets(owner: Any, json: Any) -> dict[str, Any]:
    """Return the arrays of an object that saved ones can be read into, without a copy in between.

    By the names of the saved ones: arrays of the same specification at the same path. None of an object that loads its
    state in its own way: that may skip values, or change them.
    """
    owner = unwrap(owner)
    if not _loads_unchanged(owner):
        return {}
    try:
        current = encode(state_of(owner), "", inline=0)
    except (TypeError, ValueError):  # a value that needs pickle: everything is loaded from new arrays
        return {}
    specs = array_specs(json)
    names = {path: name for name, paths in array_paths(current.json).items() for path in paths}
    targets: dict[str, Any] = {}
    free = set(current.arrays)  # tied weights are one array: it is read into once
    for saved, paths in array_paths(json).items():
        name = names.get(paths[0], "")
        if name in free and current.arrays[name][0] == specs[saved] and _is_writable(*current.arrays[name]):
            targets[saved] = current.arrays[name][1]
            free.discard(name)
    return targets


def _loads_unchanged(owner: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    kind = kind_of(owner)
    if kind == "module":
        return all(_has_torchs_methods(module, torch.nn.Module) for module in owner.modules())
    return kind == "tree" or (kind == "optimizer" and _has_torchs_methods(owner, torch.optim.Optimizer))


def _has_torchs_methods(owner: Any, base: type) -> bool:
    """Return True if only torch's own code makes and loads the state dict of a module or optimizer."""
    if any(getattr(owner, name, None) for name in _HOOKS):
        return False
    methods = [(getattr(type(owner), name, None), getattr(base, name, None)) for name in _STATE_METHODS]
    return all(own is torchs or str(getattr(own, "__module__", "")).startswith("torch.") for own, torchs in methods)


def _is_writable(spec: ArraySpec, value: Any) -> bool:
    if spec.library == "numpy":  # the bytes on disk are little-endian
        native = type(value) is np.ndarray and value.dtype.isnative and _LITTLE_ENDIAN
        return native and bool(value.flags.writeable and value.flags.c_contiguous)
    torch: Any = sys.modules.get("torch")
    if torch is None or spec.library != "torch" or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    repeated = any(n > 1 and not stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return not value.is_conj() and not value.is_neg() and not repeated


def _has(owner: Any, *names: str) -> bool:
    """Return True if its class has these methods: some objects pretend to have any (nnx.Rngs)."""
    return all(callable(getattr(type(owner), name, None)) for name in names)


def _is_torch(owner: Any, name: str) -> bool:
    torch: Any = loaded("torch")
    if torch is None:
        return False
    module, class_ = name.split(".")
    return isinstance(owner, getattr(getattr(torch, module), class_))


def _nnx_of(owner: Any) -> Any:
    """Return flax.nnx for one of its modules, optimizers or states, else None."""
    nnx: Any = loaded("flax.nnx")
    if nnx is None:
        return None
    classes = tuple(getattr(nnx, name) for name in ("Module", "Pytree", "Optimizer", "State") if hasattr(nnx, name))
    return nnx if isinstance(owner, classes) else None


def _states_in(tree: Any) -> list[Mapping[str, Any]]:
    """Return the midepoch states within the state of an object around them."""
    if isinstance(tree, Mapping):
        if isinstance(tree.get("midepoch"), int):
            return [tree]
        return [state for inner in tree.values() for state in _states_in(inner)]
    if isinstance(tree, (list, tuple)):
        return [state for inner in tree for state in _states_in(inner)]
    return []
