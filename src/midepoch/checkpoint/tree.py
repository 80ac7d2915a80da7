"""A tree of values (dicts, lists, numbers, arrays…) as JSON that says everything but the bytes of the large arrays.

Plain values are plain JSON. What JSON cannot say is an object with the key ``$``:

    {"$": "array", "of": "torch", "dtype": "float32", "shape": [2, 3], "name": "layer.weight"}    bytes in safetensors
    {"$": "array", …, "data": "AAAA…"}                                        a small one: base64, no second file
    {"$": "tuple", "items": […]}     {"$": "dict", "items": [[key, value], …]}     {"$": "float", "is": "nan"}
    {"$": "node", "class": "optax._src.transform.ScaleByAdamState", "fields": {…}}      named tuples, JAX's nodes
    {"$": "pickle", "data": "gASV…"}                              only where it was asked for, when saving and loading

Reading makes nothing but the values named here: no class is imported by name, nothing is unpickled.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import (
    IncompleteError,
    Kind,
    UnsupportedError,
    bytes_of,
    check_complete,
    is_array,
    is_sharded,
    kind_of,
    make,
)
from midepoch.errors import CheckpointDamagedError, CheckpointError
from midepoch.imports import loaded

INLINE = 8 << 10
"""Bytes: an array up to this size is kept in the JSON, which saves a file, its fsync and its sums."""
_DEEPEST = 200
_LARGEST_AXIS = 2**48
_LARGEST_INT = 4096


@dataclass
class Encoded:
    """A tree as JSON, and its large arrays by name."""

    json: Any = None
    arrays: dict[str, tuple[Kind, Any]] = field(default_factory=dict)


def encode(
    tree: Any, name: str, *, allow_pickle: bool = False, inline: int = INLINE, distributed: Container[str] = ()
) -> Encoded:
    """Take a tree apart. Raises TypeError that names the place of a value that cannot be kept.

    Arrays of up to ``inline`` bytes stay in the JSON. ``distributed``: the libraries ("torch",
    "jax") whose arrays may lie on several processes; in pickles none may, as each would hold a part of its own.

    >>> encode({"lr": 0.1, "betas": (0.9, 0.99)}, "optimizer").json
    {'lr': 0.1, 'betas': {'$': 'tuple', 'items': [0.9, 0.99]}}
    """
    encoder = _Encoder(name, allow_pickle, inline, distributed)
    encoder.result.json = encoder.value(tree, ())
    return encoder.result


class _Encoder:
    def __init__(self, name: str, allow_pickle: bool, inline: int, distributed: Container[str]) -> None:
        self._name, self._allow_pickle, self._inline, self._distributed = name, allow_pickle, inline, distributed
        self.result = Encoded()
        self._tied: dict[tuple[Any, ...], str] = {}

    def value(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:  # Python reads no number of more than 4,300 digits
            return value if value.bit_length() < _LARGEST_INT else {"$": "int", "is": hex(value)}
        if isinstance(value, np.str_):
            return str(value)
        if type(value) is float:
            return value if math.isfinite(value) else {"$": "float", "is": repr(value)}
        if len(path) > _DEEPEST:
            raise ValueError(f"{self._where(path)}: more than {_DEEPEST} levels deep")
        if is_array(value):
            return self._array(value, path)
        if type(value) is not Counter and is_mapping(value):
            return self._mapping(value, path)
        if type(value) is list:
            return self._items(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._node(value, list(zip(value._fields, value, strict=True)), path)
        if isinstance(value, tuple):
            return {"$": "tuple", "items": self._items(value, path)}
        return self._other(value, path)

    def _items(self, items: Any, path: tuple[str, ...]) -> list[Any]:
        return [self.value(item, (*path, str(number))) for number, item in enumerate(items)]

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        plain = all(type(key) is str for key in value) and "$" not in value
        if not plain:
            pairs = [[self.value(k, (*path, "key")), self.value(v, (*path, str(k)))] for k, v in value.items()]
            return {"$": "dict", "items": pairs}
        found = {key: self.value(inner, (*path, key)) for key, inner in value.items()}
        metadata = getattr(value, "_metadata", None)  # versions of modules, which torch hides in its state dicts
        if metadata is None:
            return found
        return {"$": "state_dict", "items": found, "metadata": self.value(dict(metadata), (*path, "_metadata"))}

    def _node(self, value: Any, fields: list[tuple[str, Any]], path: tuple[str, ...]) -> Any:
        kind = type(value)
        inner = {key: self.value(child, (*path, key)) for key, child in fields}
        return {"$": "node", "class": f"{kind.__module__}.{kind.__qualname__}", "fields": inner}

    def _array(self, value: Any, path: tuple[str, ...]) -> Any:
        try:
            kind = kind_of(value, distributed=self._distributed)
        except IncompleteError as problem:
            raise TypeError(f"{self._where(path)} is {problem}") from None
        except (UnsupportedError, RuntimeError, NotImplementedError) as problem:
            if self._allow_pickle:
                return self._pickled(value, path)
            raise TypeError(self._refusal(path, str(problem))) from None
        entry: dict[str, Any] = {"$": "array", "of": kind.library, "dtype": kind.dtype, "shape": list(kind.shape)}
        if kind.impl:
            entry["impl"] = kind.impl
        if kind.weak:
            entry["weak"] = True
        if isinstance(value, np.generic):
            entry["scalar"] = True
        if kind.nbytes <= self._inline:
            return {**entry, "data": base64.b64encode(bytes_of(value).tobytes()).decode()}
        return {**entry, "name": self._stored(value, kind, path)}

    def _stored(self, value: Any, kind: Kind, path: tuple[str, ...]) -> str:
        """The name of an array among the stored ones: tied weights are stored once."""
        memory = _memory_of(value, kind) if kind.library == "torch" else None
        if memory is not None and memory in self._tied:
            return self._tied[memory]
        name = ".".join(path) or self._name
        while name in self.result.arrays or name == "__metadata__":
            name += "_"
        self.result.arrays[name] = (kind, value)
        if memory is not None:
            self._tied[memory] = name
        return name

    def _other(self, value: Any, path: tuple[str, ...]) -> Any:
        torch: Any = loaded("torch")
        if torch is not None and isinstance(value, (torch.dtype, torch.device)):
            kind = "torch.dtype" if isinstance(value, torch.dtype) else "torch.device"
            return {"$": kind, "is": str(value).removeprefix("torch.")}
        if type(value) is bytes:
            return {"$": "bytes", "data": base64.b64encode(value).decode()}
        if type(value) in (set, frozenset):
            return {"$": type(value).__name__, "items": self._items(sorted(value, key=repr), path)}
        if type(value) is Counter:
            return {"$": "counter", "items": self._mapping(dict(value), path)}
        if type(value) is complex:
            return {"$": "complex", "items": self._items((value.real, value.imag), path)}
        if (children := node_children(value)) is not None:
            return self._node(value, children, path)
        if self._allow_pickle:
            return self._pickled(value, path)
        what = f"a {type(value).__module__}.{type(value).__qualname__}"
        if callable(getattr(type(value), "state_dict", None)):
            raise TypeError(
                f"{self._where(path)} is {what} within a tree: give it by itself, or as one of extra={{name: …}}."
            )
        raise TypeError(self._refusal(path, what))

    def _pickled(self, value: Any, path: tuple[str, ...]) -> Any:
        buffer = io.BytesIO()
        try:
            _CompletePickler(buffer).dump(value)
        except IncompleteError as problem:
            raise TypeError(f"{self._where(path)} holds {problem}") from None
        except Exception as problem:
            raise TypeError(
                f"{self._where(path)} is a {type(value).__qualname__}, which cannot be pickled ({problem!r:.200}). "
                "Leave it out, or turn it into plain values or arrays."
            ) from problem
        return {"$": "pickle", "data": base64.b64encode(buffer.getvalue()).decode()}

    def _where(self, path: tuple[str, ...]) -> str:
        return ".".join((self._name, *path))

    def _refusal(self, path: tuple[str, ...], what: str) -> str:
        return (
            f"{self._where(path)} is {what}, which cannot be kept without pickle. Leave it out, turn it into plain "
            "values or arrays, or pass allow_pickle=True to PipelineCheckpoint when saving and when restoring, if you "
            "trust everyone who can write to the checkpoints."
        )


def _memory_of(tensor: Any, kind: Kind) -> tuple[Any, ...] | None:
    """What two tensors share that are the same one."""
    if is_sharded(tensor):
        return None
    place = (tensor.data_ptr(), tensor.stride(), str(tensor.device))
    return *place, tensor.is_conj(), tensor.is_neg(), kind


def is_mapping(value: Any) -> bool:
    """Check for a dict of any class, or what behaves like one; not for a node of JAX's own (a flax State).

    JAX also takes an OrderedDict and a defaultdict for nodes: here they are dicts, whether JAX is imported or not.
    """
    return isinstance(value, dict) or (isinstance(value, Mapping) and node_children(value) is None)


def node_children(value: Any) -> list[tuple[str, Any]] | None:
    """The children by name of a node that JAX knows (a flax struct, an optax state), or None."""
    jax: Any = loaded("jax")
    if jax is None or value is None:  # which JAX takes for a node without children
        return None
    pairs, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return [("/".join(map(_key_text, path)), child) for path, child in pairs]


def _key_text(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


class _CompletePickler(pickle.Pickler):
    """Raises IncompleteError for an array, at any depth, of which this process does not hold all values."""

    def reducer_override(self, value: Any) -> Any:
        if is_array(value):
            check_complete(value)
        return NotImplemented


class StateDict(dict[str, Any]):
    """A state dict of torch, with the versions of its modules."""

    _metadata: Any


def array_kinds(json: Any) -> dict[str, Kind]:
    """The stored arrays that a tree speaks of, by name; raises CheckpointDamagedError."""
    found: dict[str, Kind] = {}

    def visit(node: Any, depth: int) -> None:
        if depth > 3 * _DEEPEST:
            raise CheckpointDamagedError("a tree of values is too deep")
        if isinstance(node, list):
            for inner in node:
                visit(inner, depth + 1)
        elif isinstance(node, dict):
            if node.get("$") == "array" and "name" in node:
                if not isinstance(node["name"], str):
                    raise CheckpointDamagedError(f"an array named {node['name']!r:.40}")
                found[node["name"]] = _kind(node)
            for inner in node.values():
                visit(inner, depth + 1)

    visit(json, 0)
    return found


def array_paths(json: Any) -> dict[str, list[tuple[str, ...]]]:
    """The places of the stored arrays in a tree, by name: tied weights have several. Keys, not their numbers, count."""
    found: dict[str, list[tuple[str, ...]]] = {}

    def visit(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, list):
            for number, inner in enumerate(node):
                visit(inner, (*path, str(number)))
        elif isinstance(node, dict) and node.get("$") == "array":
            if "name" in node:
                found.setdefault(node["name"], []).append(path)
        elif isinstance(node, dict) and node.get("$") == "dict":
            for key, inner in node["items"]:
                visit(inner, (*path, "$", repr(key)))
        elif isinstance(node, dict):
            for name, inner in node.items():
                visit(inner, (*path, name))

    visit(json, ())
    return found


def decode(json: Any, arrays: Mapping[str, Any], *, allow_pickle: bool = False) -> Any:
    """Put a tree together again; raises CheckpointDamagedError for anything that ``encode`` does not write."""
    try:
        return _Decoder(arrays, allow_pickle).value(json)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, ImportError) as problem:
        raise CheckpointDamagedError(f"a tree of values cannot be read: {problem!r:.200}") from None


class _Decoder:
    def __init__(self, arrays: Mapping[str, Any], allow_pickle: bool) -> None:
        self._arrays, self._allow_pickle = arrays, allow_pickle
        self._makers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "array": self._array,
            "tuple": lambda node: tuple(self.value(node["items"])),
            "set": lambda node: set(self.value(node["items"])),
            "frozenset": lambda node: frozenset(self.value(node["items"])),
            "complex": lambda node: complex(*self.value(node["items"])),
            "dict": lambda node: {self.value(key): self.value(inner) for key, inner in node["items"]},
            "node": lambda node: {key: self.value(inner) for key, inner in node["fields"].items()},
            "float": lambda node: float(_text(node["is"])),
            "int": lambda node: int(_text(node["is"]), 16),
            "counter": lambda node: Counter(self.value(node["items"])),
            "bytes": lambda node: base64.b64decode(node["data"], validate=True),
            "state_dict": self._state_dict,
            "torch.dtype": _torch_value,
            "torch.device": _torch_value,
            "pickle": self._pickle,
        }

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(inner) for inner in node]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: self.value(inner) for key, inner in node.items()}
        return self._makers[node["$"]](node)

    def _array(self, node: dict[str, Any]) -> Any:
        if "name" in node:
            array = self._arrays[node["name"]]
            return array[()] if node.get("scalar") else array
        kind = _kind(node)
        data = np.frombuffer(bytearray(base64.b64decode(node["data"], validate=True)), np.uint8)
        if len(data) != kind.nbytes:
            raise CheckpointDamagedError(f"an array has {len(data)} bytes, not {kind.nbytes}")
        array = make(kind, data)
        return array[()] if node.get("scalar") else array

    def _state_dict(self, node: dict[str, Any]) -> StateDict:
        found = StateDict(self.value(node["items"]))
        found._metadata = self.value(node["metadata"])
        return found

    def _pickle(self, node: dict[str, Any]) -> Any:
        if not self._allow_pickle:
            raise CheckpointError(
                "this checkpoint holds pickled objects, which can run any code when they are loaded. If you trust "
                "everyone who could have written it, pass allow_pickle=True to PipelineCheckpoint."
            )
        return pickle.loads(base64.b64decode(node["data"], validate=True))


def _torch_value(node: dict[str, Any]) -> Any:
    import torch

    text = _text(node["is"])
    if node["$"] == "torch.device":
        return torch.device(text)
    found = getattr(torch, text)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is no dtype of torch")
    return found


def _kind(node: dict[str, Any]) -> Kind:
    try:
        shape = tuple(node["shape"])
        if any(type(length) is not int or not 0 <= length < _LARGEST_AXIS for length in shape) or len(shape) > 64:
            raise ValueError(f"a shape {shape!r:.80}")
        if node["of"] not in ("torch", "numpy", "jax", "key"):
            raise ValueError(f"an array of {node['of']!r:.40}")
        kind = Kind(node["of"], _text(node["dtype"]), shape, _text(node.get("impl", "")), bool(node.get("weak")))
        kind.nbytes  # noqa: B018  a dtype that there is not shows here
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as problem:
        raise CheckpointDamagedError(f"an array cannot be read: {problem!r:.200}") from None
    return kind


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value
