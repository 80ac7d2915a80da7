"""Matching of restored trees with their targets: they get the target's classes, libraries and devices, or are refused
with CheckpointMismatchError.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, MutableMapping
from itertools import zip_longest
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import (
    ArraySpec,
    StoredArray,
    UnsupportedError,
    bytes_of,
    is_array,
    is_array_or_stored,
    make_array,
    spec_of,
)
from midepoch.checkpoint.tree import is_mapping, node_children
from midepoch.errors import CheckpointMismatchError

_SHAPED_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def fit(template: Any, tree: Any, name: str, *, in_place: bool = False) -> Any:
    """Return ``tree`` with the classes of ``template``; raises CheckpointMismatchError if it does not fit.

    With ``in_place``, dicts and lists of the template are filled, and its torch and numpy arrays written to.
    """
    if is_array(template):
        return _fit_array(template, tree, name, in_place)
    if _is_plain(template):
        return _fit_plain(template, tree, name, in_place)
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        fields = dict(zip(template._fields, template, strict=True))
        return type(template)(**_fit_children(template, fields, tree, name, in_place))
    if is_mapping(template):
        values = _mapping_like(template, _fit_children(template, template, tree, name, in_place))
        return _filled(template, values) if in_place else values
    if isinstance(template, (list, tuple)):
        return _fit_sequence(template, tree, name, in_place)
    if (children := node_children(template)) is not None:
        values = _fit_children(template, dict(children), tree, name, in_place)
        jax = sys.modules["jax"]
        structure = jax.tree_util.tree_structure(template, is_leaf=lambda inner: inner is not template)
        return jax.tree_util.tree_unflatten(structure, list(values.values()))
    return tree


def _is_plain(template: Any) -> bool:
    """Return True if it holds neither arrays nor classes with fields: then the saved tree may have other entries."""
    if is_mapping(template):
        return all(map(_is_plain, template.values()))
    if isinstance(template, (list, tuple)) and not hasattr(template, "_fields"):
        return all(map(_is_plain, template))
    return not is_array(template) and not hasattr(template, "_fields") and node_children(template) is None


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


def _fit_sequence(template: Any, tree: Any, name: str, in_place: bool) -> Any:
    if not isinstance(tree, (list, tuple)) or len(tree) != len(template):
        saved = f"{len(tree)} values" if isinstance(tree, (list, tuple)) else _describe(tree)
        raise _mismatch(name, saved, f"{len(template)} values")
    pairs = enumerate(zip(template, tree, strict=True))
    values = [fit(inner, value, f"{name}.{number}", in_place=in_place) for number, (inner, value) in pairs]
    return _filled(template, values) if in_place and isinstance(template, list) else _sequence_like(template, values)


def _fit_children(template: Any, children: Mapping[Any, Any], tree: Any, name: str, in_place: bool) -> dict[Any, Any]:
    if isinstance(tree, (list, tuple)):
        tree = dict(zip(children, tree, strict=False)) if len(tree) == len(children) else {}
    if not isinstance(tree, Mapping):
        raise _mismatch(name, _describe(tree), type(template).__name__)
    if set(tree) != set(children):  # in the names of JAX's nodes, numbers are strings
        tree = {str(key): value for key, value in tree.items()}
        if set(tree) != {str(key) for key in children}:
            raise _mismatch(name, sorted(tree)[:8], sorted(map(str, children))[:8])
        if not isinstance(template, dict):
            children = {str(key): child for key, child in children.items()}
        tree = {key: tree[str(key)] for key in children}
    return {key: fit(child, tree[key], f"{name}.{key}", in_place=in_place) for key, child in children.items()}


def _fit_array(template: Any, tree: Any, name: str, in_place: bool) -> Any:
    if tree is template:
        return template  # it was read into
    if not is_array_or_stored(tree):
        raise _mismatch(name, type(tree).__name__, f"an array of shape {tuple(template.shape)}")
    try:
        current = spec_of(template, distributed=("torch", "jax"))
        saved = tree.spec if isinstance(tree, StoredArray) else spec_of(tree, distributed=("torch", "jax"))
    except UnsupportedError:  # by pickle (a sparse tensor): it replaces the current one
        return tree
    if _layout(current) != _layout(saved):
        raise _mismatch(name, f"{saved.dtype} {saved.shape}", f"{current.dtype} {current.shape}")
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
    return f"an array of shape {tuple(value.shape)}" if is_array_or_stored(value) else type(value).__name__


def _mismatch(name: str, saved: Any, current: Any) -> CheckpointMismatchError:
    return CheckpointMismatchError(name, saved, current, "another model, optimizer or tree than when it was saved")


def check_module(current: Mapping[str, Any], saved: Any, name: str) -> None:
    """Raise CheckpointMismatchError unless a state dict has the same arrays: torch raises only after copying some."""
    if not isinstance(saved, Mapping):
        cause = "another object was saved under this name"
        raise CheckpointMismatchError(name, type(saved).__name__, "a state dict", cause)
    missing, unknown = sorted(set(current) - set(saved)), sorted(set(map(str, saved)) - set(current))
    if missing or unknown:
        cause = "another model, or other layers in it (listed are the keys that only one of them has)"
        raise CheckpointMismatchError(f"{name}, keys", _first(unknown), _first(missing), cause)
    torch: Any = sys.modules["torch"]
    for key, value in current.items():
        if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
            continue
        ours, theirs = f"{value.dtype} {tuple(value.shape)}", _describe_tensor(saved[key], torch)
        if ours != theirs:
            raise CheckpointMismatchError(f"{name}, {key}", theirs, ours, "a model of another size or dtype")


def _describe_tensor(value: Any, torch: Any) -> str:
    if isinstance(value, StoredArray):
        return f"torch.{value.spec.dtype} {value.shape}" if value.spec.library == "torch" else value.spec.library
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def check_optimizer(optimizer: Any, saved: Any, name: str) -> None:
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
