"""Giving restored values the shape of a template: its classes, libraries and devices; refusing what does not fit."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, MutableMapping
from itertools import zip_longest
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import Kind, UnsupportedError, bytes_of, is_array, kind_of, make
from midepoch.checkpoint.stored import Stored, is_array_or_stored
from midepoch.checkpoint.tree import is_mapping, node_children
from midepoch.errors import CheckpointMismatchError


def imposed(like: Any, tree: Any, name: str, *, in_place: bool = False) -> Any:
    """``tree`` as ``like`` is: raises CheckpointMismatchError where it cannot be.

    ``in_place``: dicts and lists of ``like`` are filled, its torch and numpy arrays written to.
    """
    if is_array(like):
        return _array(like, tree, name, in_place)
    if _is_plain(like):
        return _plain(like, tree, name, in_place)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        values = _children(like, dict(zip(like._fields, like, strict=True)), tree, name, in_place)
        return type(like)(**values)
    if is_mapping(like):
        return _mapping(like, tree, name, in_place)
    if isinstance(like, (list, tuple)):
        return _sequence(like, tree, name, in_place)
    if (children := node_children(like)) is not None:
        values = _children(like, dict(children), tree, name, in_place)
        jax = sys.modules["jax"]
        structure = jax.tree_util.tree_structure(like, is_leaf=lambda inner: inner is not like)
        return jax.tree_util.tree_unflatten(structure, list(values.values()))
    return tree


def _is_plain(like: Any) -> bool:
    """Check that there is neither an array nor a class with fields in it: what is saved may then be longer, or more."""
    if is_mapping(like):
        return all(map(_is_plain, like.values()))
    if isinstance(like, (list, tuple)) and not hasattr(like, "_fields"):
        return all(map(_is_plain, like))
    return not is_array(like) and not hasattr(like, "_fields") and node_children(like) is None


def _plain(like: Any, tree: Any, name: str, in_place: bool) -> Any:
    if like is None:
        return tree
    if is_mapping(like) and isinstance(tree, Mapping):
        values = _retyped(like, tree)
        if not in_place or not isinstance(like, MutableMapping):
            return values
        like.clear()
        for key, value in values.items():
            like[key] = value
        return like
    if isinstance(like, list) and isinstance(tree, list):
        if not in_place:
            return _retyped(like, tree)
        like[:] = _retyped(like, tree)
        return like
    if is_mapping(like) or isinstance(like, list) or isinstance(tree, (Mapping, list)):
        raise _mismatch(name, _words(tree), _words(like))
    if is_array_or_stored(tree) and tree.ndim:
        raise _mismatch(name, _words(tree), _words(like))
    return _retyped(like, tree)


def _retyped(like: Any, tree: Any) -> Any:
    """Plain values with containers of the template's types, as far as the template has any at their place."""
    if is_mapping(like) and isinstance(tree, Mapping):
        return _mapping_like(like, {key: _retyped(like.get(key), value) for key, value in tree.items()})
    if isinstance(like, (list, tuple)) and isinstance(tree, (list, tuple)) and not hasattr(like, "_fields"):
        values = [_retyped(one, two) for one, two in zip_longest(like[: len(tree)], tree)]
        return _sequence_like(like if isinstance(tree, tuple) == isinstance(like, tuple) else tree, values)
    return tree


def _mapping_like(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same class, with the other values: what else it holds (a default factory) stays."""
    if type(like) is dict:
        return values
    if not isinstance(like, MutableMapping):
        try:
            return type(like)(values)  # type: ignore[call-arg]
        except TypeError:
            return values
    made = copy.copy(like)
    made.clear()
    for key, value in values.items():
        made[key] = value
    return made


def _sequence_like(like: Any, values: list[Any]) -> Any:
    return values if type(like) is list else type(like)(values)


def _mapping(like: Mapping[Any, Any], tree: Any, name: str, in_place: bool) -> Any:
    values = _children(like, like, tree, name, in_place)
    if in_place and isinstance(like, MutableMapping):
        for key, value in values.items():
            like[key] = value
        return like
    return _mapping_like(like, values)


def _sequence(like: Any, tree: Any, name: str, in_place: bool) -> Any:
    if not isinstance(tree, (list, tuple)) or len(tree) != len(like):
        found = f"{len(tree)} values" if isinstance(tree, (list, tuple)) else _words(tree)
        raise _mismatch(name, found, f"{len(like)} values")
    pairs = enumerate(zip(like, tree, strict=True))
    values = [imposed(one, two, f"{name}.{number}", in_place=in_place) for number, (one, two) in pairs]
    if in_place and isinstance(like, list):
        like[:] = values
        return like
    return _sequence_like(like, values)


def _children(like: Any, children: Mapping[Any, Any], tree: Any, name: str, in_place: bool) -> dict[Any, Any]:
    if isinstance(tree, (list, tuple)):
        tree = dict(zip(children, tree, strict=False)) if len(tree) == len(children) else {}
    if not isinstance(tree, Mapping):
        raise _mismatch(name, _words(tree), type(like).__name__)
    if set(tree) != set(children):  # numbers are texts in the names of JAX's nodes
        tree = {str(key): value for key, value in tree.items()}
        if set(tree) != {str(key) for key in children}:
            raise _mismatch(name, sorted(tree)[:8], sorted(map(str, children))[:8])
        children = {str(key): child for key, child in children.items()} if not isinstance(like, dict) else children
        return {
            key: imposed(child, tree[str(key)], f"{name}.{key}", in_place=in_place) for key, child in children.items()
        }
    return {key: imposed(child, tree[key], f"{name}.{key}", in_place=in_place) for key, child in children.items()}


def _array(like: Any, tree: Any, name: str, in_place: bool) -> Any:
    if tree is like:
        return like  # it was read into
    if not is_array_or_stored(tree):
        raise _mismatch(name, type(tree).__name__, f"an array of shape {tuple(like.shape)}")
    try:
        ours = kind_of(like, distributed=("torch", "jax"))
        theirs = tree.kind if isinstance(tree, Stored) else kind_of(tree, distributed=("torch", "jax"))
    except UnsupportedError:  # a sparse tensor or the like, by pickle: it takes the place of the one there is
        return tree
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype or (ours.library == "key") != (theirs.library == "key"):
        raise _mismatch(name, f"{theirs.dtype} {theirs.shape}", f"{ours.dtype} {ours.shape}")
    if isinstance(tree, Stored):
        return tree  # it fits
    if ours.library == "torch":
        return _torch(like, make(ours, bytes_of(tree)), in_place)
    if ours.library == "numpy":
        value = make(ours, bytes_of(tree))
        if in_place and isinstance(like, np.ndarray) and like.flags.writeable:
            like[...] = value
            return like
        return value[()] if isinstance(like, np.generic) else value
    return _jax(like, tree, ours, theirs)


def _jax(like: Any, tree: Any, kind: Kind, theirs: Kind) -> Any:
    """On the devices of ``like``, also where those are several processes'."""
    jax: Any = sys.modules["jax"]
    if isinstance(tree, jax.Array) and tree.sharding == like.sharding and kind == theirs:
        return tree
    if like.is_fully_addressable:
        return jax.device_put(make(kind, bytes_of(tree)), like.sharding)
    host = np.asarray(tree)
    return jax.make_array_from_callback(host.shape, like.sharding, lambda index: host[index])


def _torch(like: Any, value: Any, in_place: bool) -> Any:
    if not in_place:
        return value.to(like.device)
    torch = sys.modules["torch"]
    with torch.no_grad():
        like.copy_(value)
    return like


def _words(value: Any) -> str:
    return f"an array of shape {tuple(value.shape)}" if is_array_or_stored(value) else type(value).__name__


def _mismatch(name: str, saved: Any, current: Any) -> CheckpointMismatchError:
    return CheckpointMismatchError(name, saved, current, "another model, optimizer or tree than when it was saved")
