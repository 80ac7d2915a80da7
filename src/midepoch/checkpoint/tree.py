"""Trees of values (dicts, lists, numbers, arrays…) as JSON that holds everything except the bytes of large arrays.

Plain values are plain JSON. Any other value is an object with the key ``$``:

    {"$": "array", "of": "torch", "dtype": "float32", "shape": [2, 3], "name": "layer.weight"}    bytes in safetensors
    {"$": "array", …, "data": "AAAA…"}                                        a small one: base64, no second file
    {"$": "tuple", "items": […]}     {"$": "dict", "items": [[key, value], …]}     {"$": "float", "is": "nan"}
    {"$": "node", "class": "optax._src.transform.ScaleByAdamState", "fields": {…}}      named tuples, JAX's nodes
    {"$": "pickle", "data": "gASV…"}                              only with allow_pickle=True, when saving and loading

Reading creates only the values listed here: no class is imported by name, nothing is unpickled.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from midepoch._internal.values import loaded
from midepoch.checkpoint import arrays
from midepoch.checkpoint.arrays import (
    ArraySpec,
    IncompleteError,
    StoredArray,
    UnsupportedError,
    bytes_of,
    is_array,
    make_array,
)
from midepoch.checkpoint.files import FileSource, Sink
from midepoch.errors import CheckpointDamagedError, CheckpointError

INLINE = 8 << 10
"""Bytes: an array up to this size is stored in the JSON, which saves a file, its fsync and its checksums."""
_DEEPEST = 200
_LARGEST_AXIS = 2**48
_LARGEST_INT = 4096


@dataclass
class EncodedTree:
    """Tree as JSON, and its large arrays by name."""

    json: Any = None
    arrays: dict[str, tuple[ArraySpec, Any]] = field(default_factory=dict)

    def files(self, name: str) -> dict[str, Callable[[Sink], Any]]:
        """Return the names of the files of this tree, and a function for each that writes it."""
        text = json.dumps(self.json, allow_nan=False).encode()
        files: dict[str, Callable[[Sink], Any]] = {f"{name}.json": lambda sink: sink.write(memoryview(text))}
        if self.arrays:
            files[f"{name}.safetensors"] = lambda sink: arrays.write_arrays(sink, self.arrays)
        return files


def encode(
    tree: Any, name: str, *, allow_pickle: bool = False, inline: int = INLINE, distributed: Container[str] = ()
) -> EncodedTree:
    """Encode a tree. Raises TypeError with the path of a value that cannot be stored.

    Arrays of up to ``inline`` bytes stay in the JSON. ``distributed``: the libraries ("torch", "jax") whose arrays may
    span several processes; never in pickles, as each process would pickle only its part.

    >>> encode({"lr": 0.1, "betas": (0.9, 0.99)}, "optimizer").json
    {'lr': 0.1, 'betas': {'$': 'tuple', 'items': [0.9, 0.99]}}
    """
    encoder = _Encoder(name, allow_pickle, inline, distributed)
    encoder.result.json = encoder.value(tree, ())
    return encoder.result


class _Encoder:
    def __init__(self, name: str, allow_pickle: bool, inline: int, distributed: Container[str]) -> None:
        self._name, self._allow_pickle, self._inline, self._distributed = name, allow_pickle, inline, distributed
        self.result = EncodedTree()
        self._tied: dict[tuple[Any, ...], str] = {}

    def value(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:  # Python parses no number of more than 4,300 digits
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
        items = {key: self.value(inner, (*path, key)) for key, inner in value.items()}
        metadata = getattr(value, "_metadata", None)  # versions of modules, which torch hides in its state dicts
        if metadata is None:
            return items
        return {"$": "state_dict", "items": items, "metadata": self.value(dict(metadata), (*path, "_metadata"))}

    def _node(self, value: Any, fields: list[tuple[str, Any]], path: tuple[str, ...]) -> Any:
        inner = {key: self.value(child, (*path, key)) for key, child in fields}
        return {"$": "node", "class": f"{type(value).__module__}.{type(value).__qualname__}", "fields": inner}

    def _array(self, value: Any, path: tuple[str, ...]) -> Any:
        try:
            spec = arrays.spec_of(value, distributed=self._distributed)
        except IncompleteError as problem:
            raise TypeError(f"{self._where(path)} is {problem}") from None
        except (UnsupportedError, RuntimeError, NotImplementedError) as problem:
            if self._allow_pickle:
                return self._pickled(value, path)
            raise TypeError(self._refusal(path, str(problem))) from None
        entry: dict[str, Any] = {"$": "array", "of": spec.library, "dtype": spec.dtype, "shape": list(spec.shape)}
        if spec.impl:
            entry["impl"] = spec.impl
        if spec.weak:
            entry["weak"] = True
        if isinstance(value, np.generic):
            entry["scalar"] = True
        if spec.nbytes <= self._inline:
            return {**entry, "data": base64.b64encode(bytes_of(value).tobytes()).decode()}
        return {**entry, "name": self._stored(value, spec, path)}

    def _stored(self, value: Any, spec: ArraySpec, path: tuple[str, ...]) -> str:
        """Return the name of an array among the stored ones: tied weights are stored once."""
        memory = _memory_of(value, spec) if spec.library == "torch" else None
        if memory is not None and memory in self._tied:
            return self._tied[memory]
        name = ".".join(path) or self._name
        while name in self.result.arrays or name == "__metadata__":
            name += "_"
        self.result.arrays[name] = (spec, value)
        if memory is not None:
            self._tied[memory] = name
        return name

    def _other(self, value: Any, path: tuple[str, ...]) -> Any:
        torch: Any = loaded("torch")
        if torch is not None and isinstance(value, (torch.dtype, torch.device)):
            tag = "torch.dtype" if isinstance(value, torch.dtype) else "torch.device"
            return {"$": tag, "is": str(value).removeprefix("torch.")}
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
        name = f"a {type(value).__module__}.{type(value).__qualname__}"
        if callable(getattr(type(value), "state_dict", None)):
            raise TypeError(
                f"{self._where(path)} is {name} within a tree. Pass it by itself, or as one of extra={{name: …}}."
            )
        raise TypeError(self._refusal(path, name))

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

    def _refusal(self, path: tuple[str, ...], description: str) -> str:
        return (
            f"{self._where(path)} is {description}, which cannot be saved without pickle. Leave it out, turn it into "
            "plain values or arrays, or pass allow_pickle=True to PipelineCheckpoint when saving and restoring, if you "
            "trust everyone who can write to the checkpoints."
        )


def _memory_of(tensor: Any, spec: ArraySpec) -> tuple[Any, ...] | None:
    """Return a key that two tensors share if they are views of the same values."""
    if arrays.is_sharded(tensor):
        return None
    return tensor.data_ptr(), tensor.stride(), str(tensor.device), tensor.is_conj(), tensor.is_neg(), spec


def is_mapping(value: Any) -> bool:
    """Return True for a dict of any class and any other mapping, except one of JAX's nodes (a flax State).

    JAX also treats an OrderedDict and a defaultdict as nodes: here they are dicts, whether JAX is imported or not.
    """
    return isinstance(value, dict) or (isinstance(value, Mapping) and node_children(value) is None)


def node_children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the children by name of a JAX node (a flax struct, an optax state), or None."""
    jax: Any = loaded("jax")
    if jax is None or value is None:  # None is a node without children to JAX
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
    """Pickler that raises IncompleteError for an array, at any depth, of which this process lacks values."""

    def reducer_override(self, value: Any) -> Any:
        if is_array(value):
            arrays.check_complete(value)
        return NotImplemented


class StateDict(dict[str, Any]):
    """State dict of torch, with the versions of its modules."""

    _metadata: Any


def array_specs(json: Any) -> dict[str, ArraySpec]:
    """Return the specifications of the stored arrays of a tree, by name; raises CheckpointDamagedError."""
    specs: dict[str, ArraySpec] = {}

    def find(node: Any, depth: int) -> None:
        if depth > 3 * _DEEPEST:
            raise CheckpointDamagedError("a tree of values is too deep")
        if isinstance(node, dict) and node.get("$") == "array" and "name" in node:
            if not isinstance(node["name"], str):
                raise CheckpointDamagedError(f"an array named {node['name']!r:.40}")
            specs[node["name"]] = _parse_spec(node)
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            find(inner, depth + 1)

    find(json, 0)
    return specs


def decode(json: Any, stored: Mapping[str, Any], *, allow_pickle: bool = False) -> Any:
    """Decode a tree; raises CheckpointDamagedError for anything that ``encode`` does not write."""
    try:
        return _Decoder(stored, allow_pickle).value(json)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, ImportError) as problem:
        raise CheckpointDamagedError(f"a tree of values cannot be read: {problem!r:.200}") from None


class _Decoder:
    def __init__(self, stored: Mapping[str, Any], allow_pickle: bool) -> None:
        self._stored, self._allow_pickle = stored, allow_pickle
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
            "torch.dtype": lambda node: arrays.torch_dtype(_text(node["is"])),
            "torch.device": lambda node: import_module("torch").device(_text(node["is"])),
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
            array = self._stored[node["name"]]
        else:
            spec = _parse_spec(node)
            data = np.frombuffer(bytearray(base64.b64decode(node["data"], validate=True)), np.uint8)
            if len(data) != spec.nbytes:
                raise CheckpointDamagedError(f"an array has {len(data)} bytes, not {spec.nbytes}")
            array = make_array(spec, data)
        return array[()] if node.get("scalar") else array

    def _state_dict(self, node: dict[str, Any]) -> StateDict:
        state = StateDict(self.value(node["items"]))
        state._metadata = self.value(node["metadata"])
        return state

    def _pickle(self, node: dict[str, Any]) -> Any:
        if not self._allow_pickle:
            raise CheckpointError(
                "this checkpoint holds pickled objects, which can run any code when they are loaded. If you trust "
                "everyone who could have written it, pass allow_pickle=True to PipelineCheckpoint."
            )
        return pickle.loads(base64.b64decode(node["data"], validate=True))


def _parse_spec(node: dict[str, Any]) -> ArraySpec:
    try:
        shape = tuple(node["shape"])
        if any(type(length) is not int or not 0 <= length < _LARGEST_AXIS for length in shape) or len(shape) > 64:
            raise ValueError(f"a shape {shape!r:.80}")
        if node["of"] not in ("torch", "numpy", "jax", "key"):
            raise ValueError(f"an array of {node['of']!r:.40}")
        spec = ArraySpec(node["of"], _text(node["dtype"]), shape, _text(node.get("impl", "")), bool(node.get("weak")))
        spec.nbytes  # noqa: B018  raises for an unknown dtype
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as problem:
        raise CheckpointDamagedError(f"an array cannot be read: {problem!r:.200}") from None
    return spec


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {value!r:.40}")
    return value


@dataclass(frozen=True)
class StoredTree:
    """Tree of values whose arrays have not been read."""

    json: Any
    arrays: Mapping[str, StoredArray]
    allow_pickle: bool = False

    @staticmethod
    def opened(json: Any, source: Callable[[], FileSource], allow_pickle: bool = False) -> StoredTree:
        """Return the tree of this JSON, its arrays in a file that is opened if there are any."""
        specs = array_specs(json)
        return StoredTree(json, arrays.find_arrays(source(), specs.items()) if specs else {}, allow_pickle)

    def outline(self) -> Any:
        """Return the tree with a ``StoredArray`` for each array, to check whether it fits."""
        return decode(self.json, self.arrays, allow_pickle=self.allow_pickle)

    def read(self, targets: Mapping[str, Any] | None = None) -> Any:
        """Return the tree, its arrays read into the targets of their names, or into new memory."""
        targets = targets or {}
        arrays = {
            name: stored.read_into(targets[name]) if name in targets else stored.read()
            for name, stored in self.arrays.items()
        }
        return decode(self.json, arrays, allow_pickle=self.allow_pickle)
