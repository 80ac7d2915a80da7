"""Objects with a state: pipelines, models, optimizers, anything with ``state_dict`` or ``get_state``, and trees.

Each kind (``kind_of``) has a tree of values, a check whether another tree fits, and a way to load one.
A restored tree gets the classes, libraries and devices of its target (``fit``), or CheckpointMismatchError is raised.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np

from midepoch._internal.hints import warn_once
from midepoch._internal.values import loaded
from midepoch.checkpoint.arrays import (
    ArraySpec,
    StoredArray,
    UnsupportedError,
    bytes_of,
    is_array,
    is_array_or_stored,
    is_flattened,
    is_sharded,
    make_array,
    spec_of,
)
from midepoch.checkpoint.tree import is_mapping, node_children
from midepoch.errors import CheckpointMismatchError, StateError

_LITTLE_ENDIAN = sys.byteorder == "little"
_SHAPED_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
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
        _check_optimizer(owner, tree, name)
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
            raise TypeError(
                f"{name}: expected a model, an optimizer or a tree of arrays, got {model!r:.80}. A step is passed by "
                "name: step=5."
            )
        if isinstance(model, Iterator):
            raise TypeError(f"{name}: expected a model or an optimizer, got an iterator. Pass {name} itself.")
        if _has(model, "check_state"):
            raise TypeError(f"{name}: a {type(model).__qualname__} is a pipeline: save(pipeline, model, optimizer)")
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra: expected a dict from names to values, got a {type(extra).__qualname__}")
    _note_other_model(models.get("model"), models.get("optimizer"))


def _note_other_model(model: Any, optimizer: Any) -> None:
    """Warn once if an optimizer of torch has no parameter of the model, as after a copy of the model."""
    if kind_of(model) != "module" or kind_of(optimizer) != "optimizer":
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained.isdisjoint(map(id, model.parameters())):
        warn_once(
            "the optimizer trains none of the model's parameters: it was made for another object. Create it after the "
            "last copy of the model, from model.parameters()."
        )


_COPIES = ({"state", "param_groups"}, {"last_epoch", "_step_count"}, {"growth_factor", "_growth_tracker"})
"""Keys of what state_dict() of torch's optimizers, schedulers and scalers returns."""


def refuse_copies(values: Mapping[str, Any]) -> None:
    """Raise TypeError for the result of a state_dict() that is a copy: restoring into it would change nothing else."""
    for name, value in values.items():
        if isinstance(value, Mapping) and any(keys <= value.keys() for keys in _COPIES):
            raise TypeError(f"restore: {name} is what state_dict() returned, a copy. Pass the object itself.")


def restore_targets(owner: Any, outline: Any) -> dict[str, Any]:
    """Return the arrays of an object that saved ones can be read into, without a copy in between.

    By the names of the saved ones: arrays of the same specification at the same place. None of an object that loads its
    state in its own way: that may skip values, or change them.
    """
    targets: dict[str, Any] = {}
    used: set[int] = set()  # tied weights are one array: it is read into once

    def compare(stored: Any, current: Any) -> None:
        if isinstance(stored, StoredArray):
            if stored.name not in targets and _is_writable(stored.spec, current):
                memory = current.data_ptr() if stored.spec.library == "torch" else current.ctypes.data
                if memory not in used:
                    used.add(memory)
                    targets[stored.name] = current
        elif isinstance(stored, (Mapping, list, tuple)) and (children := _children_of(current)) is not None:
            for key, value in stored.items() if isinstance(stored, Mapping) else enumerate(stored):
                compare(value, children.get(key))

    owner = unwrap(owner)
    if _loads_unchanged(owner):
        compare(outline, state_of(owner))
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
    """Return True for an array of this specification that bytes can be read into."""
    if type(value) is np.ndarray:  # the bytes on disk are little-endian
        native = value.dtype.isnative and _LITTLE_ENDIAN
        return native and bool(value.flags.writeable and value.flags.c_contiguous) and _spec_of(value) == spec
    torch: Any = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if _spec_of(value) != spec or value.is_conj() or value.is_neg():
        return False
    return all(n < 2 or stride for n, stride in zip(value.shape, value.stride(), strict=True))  # no value is repeated


def _spec_of(value: Any) -> ArraySpec | None:
    """Return the specification of an array; None if it can only be saved by pickle, as a sparse tensor."""
    with suppress(UnsupportedError):
        return value.spec if isinstance(value, StoredArray) else spec_of(value, distributed=("torch", "jax"))
    return None


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


def fit(template: Any, tree: Any, name: str, *, in_place: bool = False) -> Any:
    """Return ``tree`` with the classes of ``template``; raises CheckpointMismatchError if it does not fit.

    With ``in_place``, dicts and lists of the template are filled, and its torch and numpy arrays written to.
    """
    if is_array(template):
        return _fit_array(template, tree, name, in_place)
    if _is_plain(template):
        return _fit_plain(template, tree, name, in_place)
    children = _children_of(template)
    saved = _matched(template, children, tree, name)
    values = {key: fit(children[key], inner, f"{name}.{key}", in_place=in_place) for key, inner in saved.items()}
    made = _like(template, values)
    return _filled(template, made) if in_place and isinstance(made, (MutableMapping, list)) else made


def _children_of(value: Any) -> Any:
    """Return the children of a container by name or number, or None for any other value."""
    if is_mapping(value):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    children = node_children(value)
    return None if children is None else dict(children)


def _like(template: Any, values: dict[Any, Any]) -> Any:
    """Return a container of the same class with other children."""
    if is_mapping(template):
        return _mapping_like(template, values)
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(**values)
    if isinstance(template, (list, tuple)):
        return _sequence_like(template, list(values.values()))
    jax: Any = sys.modules["jax"]
    structure = jax.tree_util.tree_structure(template, is_leaf=lambda inner: inner is not template)
    return jax.tree_util.tree_unflatten(structure, list(values.values()))


def _matched(template: Any, children: Mapping[Any, Any], tree: Any, name: str) -> dict[Any, Any]:
    """Return the saved children by the keys of a template's; raises CheckpointMismatchError unless it has the same."""
    if isinstance(tree, (list, tuple)):
        if len(tree) != len(children):
            raise _mismatch(name, f"{len(tree)} values", f"{len(children)} values")
        return dict(zip(children, tree, strict=True))
    is_sequence = isinstance(template, (list, tuple)) and not hasattr(template, "_fields")
    if is_sequence or not isinstance(tree, Mapping):
        raise _mismatch(name, _describe(tree), type(template).__name__)
    if set(tree) == set(children):
        return {key: tree[key] for key in children}
    named = {str(key): value for key, value in tree.items()}  # in the names of JAX's nodes, numbers are strings
    missing, unknown = sorted(set(map(str, children)) - set(named)), sorted(set(named) - set(map(str, children)))
    if missing or unknown:
        raise _mismatch(f"{name}, keys that only one has", _first(unknown), _first(missing))
    return {key: named[str(key)] for key in children}


def _is_plain(template: Any) -> bool:
    """Return True if it holds neither arrays nor classes with fields: then the saved tree may have other entries."""
    if is_mapping(template):
        return all(map(_is_plain, template.values()))
    if isinstance(template, (list, tuple)) and not hasattr(template, "_fields"):
        return all(map(_is_plain, template))
    return not is_array(template) and _children_of(template) is None


def _fit_plain(template: Any, tree: Any, name: str, in_place: bool) -> Any:
    if template is None:
        return tree
    pairs = (is_mapping(template), isinstance(tree, Mapping)), (isinstance(template, list), isinstance(tree, list))
    is_deep = is_array_or_stored(tree) and tree.ndim
    if is_deep or any(is_expected != is_found for is_expected, is_found in pairs):
        raise _mismatch(name, _describe(tree), _describe(template))
    values = _retyped(template, tree)
    return _filled(template, values) if in_place else values


def _retyped(template: Any, tree: Any) -> Any:
    """Return plain values in containers of the template's types, where the template has any."""
    if is_mapping(template) and isinstance(tree, Mapping):
        return _mapping_like(template, {key: _retyped(template.get(key), value) for key, value in tree.items()})
    if isinstance(template, (list, tuple)) and isinstance(tree, (list, tuple)) and not hasattr(template, "_fields"):
        values = [_retyped(inner, value) for inner, value in zip_longest(template[: len(tree)], tree)]
        return _sequence_like(template if isinstance(tree, tuple) == isinstance(template, tuple) else tree, values)
    return tree


def _mapping_like(template: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the same class with other values; its other attributes (a default factory) are kept."""
    if type(template) is dict:
        return values
    if not isinstance(template, MutableMapping):
        try:
            return type(template)(values)  # type: ignore[call-arg]
        except TypeError:
            return values
    return _filled(copy.copy(template), values)


def _filled(target: Any, values: Any) -> Any:
    """Return a dict or a list, filled with these values, or the values if it is neither."""
    if isinstance(target, MutableMapping):
        if list(target) != list(values):
            target.clear()
        for key, value in values.items():
            target[key] = value
    elif isinstance(target, list):
        target[:] = values
    else:
        return values
    return target


def _sequence_like(template: Any, values: list[Any]) -> Any:
    return values if type(template) is list else type(template)(values)


def _fit_array(template: Any, tree: Any, name: str, in_place: bool) -> Any:
    if tree is template:
        return template  # it was read into
    if not is_array_or_stored(tree):
        raise _mismatch(name, _describe(tree), _describe(template))
    current, saved = _spec_of(template), _spec_of(tree)
    if current is None or saved is None:  # it replaces the current one
        return tree
    if _layout(current) != _layout(saved):
        raise _mismatch(name, _describe(tree), _describe(template))
    if isinstance(tree, StoredArray):
        return tree  # it fits
    if current.library in ("jax", "key"):
        return _fit_jax(template, tree, current, saved)
    value = make_array(current, bytes_of(tree))
    if current.library == "torch":
        if not in_place:
            return value.to(template.device)
        with sys.modules["torch"].no_grad():
            template.copy_(value)
        return template
    if in_place and isinstance(template, np.ndarray) and template.flags.writeable:
        template[...] = value
        return template
    return value[()] if isinstance(template, np.generic) else value


def _layout(spec: ArraySpec) -> tuple[Any, ...]:
    return spec.shape, spec.dtype, spec.library == "key"


def _fit_jax(template: Any, tree: Any, current: ArraySpec, saved: ArraySpec) -> Any:
    """Put an array on the devices of the template, also if they belong to several processes."""
    jax: Any = sys.modules["jax"]
    if isinstance(tree, jax.Array) and tree.sharding == template.sharding and current == saved:
        return tree
    if template.is_fully_addressable:
        return jax.device_put(make_array(current, bytes_of(tree)), template.sharding)
    host = np.asarray(tree)
    return jax.make_array_from_callback(host.shape, template.sharding, lambda index: host[index])


def _describe(value: Any) -> str:
    if isinstance(value, StoredArray):
        return f"{'torch.' * (value.spec.library == 'torch')}{value.spec.dtype} {value.shape}"
    return f"{value.dtype} {tuple(value.shape)}" if is_array(value) else type(value).__name__


def _mismatch(name: str, saved: Any, current: Any) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        name, saved, current, "it was saved from a model, optimizer or tree of another size, dtype or structure"
    )


def check_module(current: Mapping[str, Any], saved: Any, name: str) -> None:
    """Raise CheckpointMismatchError unless a state dict has the same arrays: torch raises only after copying some."""
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        raise _mismatch(name, _describe(saved), "a state dict")
    torch: Any = sys.modules["torch"]
    for key, value in _matched(current, current, saved, name).items():
        is_lazy = torch.nn.parameter.is_lazy(current[key])
        if isinstance(current[key], torch.Tensor) and not is_lazy and _describe(value) != _describe(current[key]):
            raise _mismatch(f"{name}, {key}", _describe(value), _describe(current[key]))


def _check_optimizer(optimizer: Any, saved: Any, name: str) -> None:
    """Raise CheckpointMismatchError unless a state belongs to such an optimizer with parameters of these shapes."""
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        saved_shapes = {
            key: {inner: tuple(value.shape) for inner, value in entry.items() if is_array_or_stored(value)}
            for key, entry in saved["state"].items()
        }
    except (TypeError, KeyError, AttributeError):
        raise CheckpointMismatchError(name, "no optimizer's state", "an optimizer", "another kind of object") from None
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        ours, theirs = sorted(set(group) - set(other)), sorted(set(other) - set(group))
        if ours and theirs:  # one of them alone may be due to another version of torch
            raise CheckpointMismatchError(f"{name}, settings", theirs, ours, "another kind of optimizer")
    groups = [group["params"] for group in optimizer.param_groups]
    current_sizes = [len(group) for group in groups]
    if sizes != current_sizes:
        field = f"{name}, parameters by group"
        raise CheckpointMismatchError(field, sizes, current_sizes, "an optimizer of another model")
    shapes = [tuple(parameter.shape) for group in groups for parameter in group]
    for number, shape in enumerate(shapes):
        for key, other in saved_shapes.get(number, {}).items():
            if other and key in _SHAPED_LIKE_PARAMETERS and other != shape:
                raise CheckpointMismatchError(f"{name}, {key} of parameter {number}", other, shape, "another model")


def _first(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
