"""Giving restored values the shape of a template: its classes, libraries and devices; refusing what does not fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import Kind, UnsupportedError, bytes_of, is_array, kind_of, make
from midepoch.checkpoint.stored import Stored, is_array_or_stored
from midepoch.checkpoint.tree import node_children
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
    if isinstance(like, Mapping) and (isinstance(like, dict) or node_children(like) is None):
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
    """Whether there is neither an array nor a class in it: what is saved may then be longer, or more."""
    if type(like) is dict:
        return all(map(_is_plain, like.values()))
    if type(like) in (list, tuple):
        return all(map(_is_plain, like))
    return not is_array(like) and not hasattr(like, "_fields") and node_children(like) is None


def _plain(like: Any, tree: Any, name: str, in_place: bool) -> Any:
    if like is None:
        return tree
    if isinstance(like, dict) and isinstance(tree, Mapping):
        if not in_place:
            return dict(tree)
        like.clear()
        like.update(tree)
        return like
    if isinstance(like, list) and isinstance(tree, list):
        if not in_place:
            return list(tree)
        like[:] = tree
        return like
    if isinstance(like, (dict, list)) or isinstance(tree, (Mapping, list)) or (is_array_or_stored(tree) and tree.ndim):
        raise _mismatch(name, type(tree).__name__, type(like).__name__)
    return tree


def _mapping(like: Mapping[Any, Any], tree: Any, name: str, in_place: bool) -> Any:
    values = _children(like, like, tree, name, in_place)
    if in_place and isinstance(like, MutableMapping):
        for key, value in values.items():
            like[key] = value
        return like
    return values


def _sequence(like: Any, tree: Any, name: str, in_place: bool) -> Any:
    if not isinstance(tree, (list, tuple)) or len(tree) != len(like):
        found = f"{len(tree)} values" if isinstance(tree, (list, tuple)) else type(tree).__name__
        raise _mismatch(name, found, f"{len(like)} values")
    pairs = enumerate(zip(like, tree, strict=True))
    values = [imposed(one, two, f"{name}.{number}", in_place=in_place) for number, (one, two) in pairs]
    if in_place and isinstance(like, list):
        like[:] = values
        return like
    return values if isinstance(like, list) else tuple(values)


def _children(like: Any, children: Mapping[Any, Any], tree: Any, name: str, in_place: bool) -> dict[Any, Any]:
    if isinstance(tree, (list, tuple)):
        tree = dict(zip(children, tree, strict=False)) if len(tree) == len(children) else {}
    if not isinstance(tree, Mapping):
        raise _mismatch(name, type(tree).__name__, type(like).__name__)
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


def _mismatch(name: str, saved: Any, current: Any) -> CheckpointMismatchError:
    return CheckpointMismatchError(name, saved, current, "another model, optimizer or tree than when it was saved")
