"""Digests of Python values, functions included: equal in every process, and different when a result might differ.

A function is its bytecode, its constants, its defaults, the values that it has captured, and the global values that it
names, functions among them. Code of installed packages counts as its name and the version of the package.
"""

from __future__ import annotations

import builtins
import copyreg
import dis
import enum
import functools
import hashlib
import json
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from midepoch._internal.imports import loaded


class UndigestibleError(TypeError):
    """A value has no digest, such as an open file or a lock. ``what``: its description."""


Special = Callable[[Any], str | None]
"""Returns a text for values with an identity of their own, and None for others."""


def digest_of(value: Any, special: Special | None = None) -> str:
    """Return the digest of a value. Raises UndigestibleError, which names the part that has none."""
    return _Digest(special).of(value).hex()


class _Digest:
    def __init__(self, special: Special | None) -> None:
        self._special = special
        self._active: dict[int, int] = {}  # of the values around the current one, for references in a circle
        self._known: dict[int, tuple[Any, bytes]] = {}

    def of(self, value: Any) -> bytes:
        simple = _simple(value)
        if simple is not None:
            return _hashed(*simple)
        key = id(value)
        if key in self._active:
            return _hashed("circle", str(len(self._active) - self._active[key]).encode())
        if key in self._known:
            return self._known[key][1]
        self._active[key] = len(self._active)
        try:
            found = self._of(value)
        finally:
            del self._active[key]
        self._known[key] = (value, found)
        return found

    def _of(self, value: Any) -> bytes:
        text = self._special(value) if self._special is not None else None
        if text is not None:
            return _hashed(f"special {type(value).__name__}", text.encode())
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return self._parts("list", value)
        if isinstance(value, (set, frozenset)):
            return _hashed("set", *sorted(map(self.of, value)))
        if isinstance(value, (dict, types.MappingProxyType)):
            return _hashed("dict", *sorted(self.of(key) + self.of(inner) for key, inner in value.items()))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return _hashed(f"array {value.dtype.str} {value.shape}", np.ascontiguousarray(value).tobytes())
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return _hashed("module", _versioned(value.__name__).encode())
        if isinstance(value, functools.partial):
            return self._parts("partial", (value.func, value.args, value.keywords))
        if isinstance(value, property):
            return self._parts("property", (value.fget, value.fset, value.fdel))
        if isinstance(value, (staticmethod, classmethod)):
            return self._parts(type(value).__name__, [value.__func__])
        if isinstance(value, functools.cached_property):
            return self._parts("property", [value.func])
        if isinstance(value, types.MethodType):
            return self._parts("method", (value.__func__, value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, (types.BuiltinFunctionType, type)) or not hasattr(value, "__reduce_ex__"):
            return self._named(value)
        return self._object(value)

    def _parts(self, kind: str, values: Any) -> bytes:
        return _hashed(kind, *(self.of(each) for each in values))

    def _code(self, code: types.CodeType) -> bytes:
        consts = [const for const in code.co_consts if const is not None and const != _doc(code)]
        about = (code.co_code, list(code.co_names), list(code.co_varnames[: code.co_argcount]), consts)
        return self._parts("code", about)

    def _function(self, function: types.FunctionType) -> bytes:
        if not _is_users(function.__module__):
            return self._named(function)
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells.append((name, cell.cell_contents))
            except ValueError:  # assigned later
                cells.append((name, None))
        names = sorted(_globals_of(function.__code__) & function.__globals__.keys())
        known = [(name, function.__globals__[name]) for name in names]
        return self._parts(
            "function", (function.__code__, function.__defaults__, function.__kwdefaults__, cells, known)
        )

    def _named(self, value: Any) -> bytes:
        """Return the digest of a class, or of a function whose code is not looked at."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if module is None or name is None:
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType):
                return self._parts("method", (type(owner), getattr(value, "__name__", ""), owner))
            module, name = "builtins", name or repr(type(value))
        if isinstance(value, type) and _is_users(module):
            members = {key: each for key, each in vars(value).items() if _counts(key, each)}
            return self._parts("class", (name, list(value.__bases__), members))
        return _hashed("name", f"{_versioned(module)} {name}".encode())

    def _object(self, value: Any) -> bytes:
        torch = loaded("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return _hashed(f"tensor {value.dtype} {tuple(value.shape)}", data)
        if (text := _tokenizer(value)) is not None:
            return _hashed("tokenizer", text.encode())
        if is_dataclass(value):
            return self._parts(
                "object", (type(value), [(each.name, getattr(value, each.name)) for each in fields(value)])
            )
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as problem:
            raise UndigestibleError(f"{type(value).__module__}.{type(value).__qualname__} ({problem})") from None
        if isinstance(reduced, str):
            return _hashed("name", f"{_versioned(type(value).__module__)} {reduced}".encode())
        make, args, *rest = reduced
        items = [each if each is None or not hasattr(each, "__next__") else list(each) for each in rest]
        return self._parts("object", (type(value), getattr(make, "__qualname__", ""), args, items))


def _simple(value: Any) -> tuple[str, bytes] | None:
    """Return the kind of a plain value and its bytes, or None for others."""
    if isinstance(value, enum.Enum):
        return "enum", f"{type(value).__qualname__}.{value.name}".encode()
    if value is None or value is Ellipsis or type(value) in (bool, int, float, complex, str):
        return type(value).__name__, repr(value).encode()
    if isinstance(value, (bytes, bytearray)):
        return "bytes", bytes(value)
    if isinstance(value, (np.generic, np.dtype)):
        return "numpy", repr(value).encode()
    if type(value).__module__.partition(".")[0] == "pyarrow" and type(value).__name__.endswith(
        ("Type", "Expression", "Schema")
    ):
        return type(value).__name__, str(value).encode()
    return None


def _hashed(kind: str, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _doc(code: types.CodeType) -> Any:
    """Return the docstring of a function's code, which changes no result."""
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) and code.co_flags & 0x2 else ...


def _globals_of(code: types.CodeType) -> set[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _globals_of(const)
    return names


def _counts(name: str, member: Any) -> bool:
    """Return True if a member of a class determines what its objects do."""
    hidden = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__dataclass_fields__")
    return name not in hidden and not isinstance(member, (types.GetSetDescriptorType, types.MemberDescriptorType))


@functools.cache
def _is_users(module: str | None) -> bool:
    """Return True for code that may change between two runs without a new version: scripts, and files outside of
    installed packages.
    """
    if module in (None, "__main__", "__mp_main__"):
        return True
    if module in sys.builtin_module_names or module == builtins.__name__:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module.partition(".")[0] == __name__.partition(".")[0]:
        return file is None and module not in sys.modules
    paths = sysconfig.get_paths()
    return not file.startswith(tuple(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")))


def _versioned(module: str) -> str:
    """Return the name of a module with the version of its package, if it has one. midepoch counts without."""
    top = module.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", "") if top != __name__.partition(".")[0] else ""
    return f"{module} {version}" if isinstance(version, str) and version else module


def _tokenizer(value: Any) -> str | None:
    """Return a tokenizer of tokenizers, or a fast one of transformers, as text. None for anything else.

    Calls of transformers set truncation and padding in its backend, so that these do not identify it.
    """
    backend = getattr(value, "backend_tokenizer", None)
    given = value if backend is None else backend
    if type(given).__module__.partition(".")[0] != "tokenizers" or not hasattr(given, "to_str"):
        return None
    about: Mapping[str, Any] = json.loads(given.to_str())
    if backend is not None:
        about = {key: each for key, each in about.items() if key not in ("truncation", "padding")}
        about["model_max_length"], about["side"] = (
            str(value.model_max_length),
            str(getattr(value, "truncation_side", "")),
        )
    return json.dumps(about, sort_keys=True)
