"""Digests of Python values, functions included: equal in every process, and different when a result might differ.

A function is its bytecode, its constants, its defaults, its attributes, the values that it has captured, and the global
values that it uses, functions and attributes of modules among them. Code of installed packages counts as its name and
the version of the package. A value that cannot be compared has no digest.
"""

from __future__ import annotations

import builtins
import copyreg
import dis
import functools
import hashlib
import importlib.util
import json
import operator
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from midepoch._internal.values import loaded


class UndigestibleError(TypeError):
    """A value has no digest, such as an open file or a lock."""


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
        except UndigestibleError:
            raise
        except Exception as problem:
            raise UndigestibleError(f"{_name(type(value))} ({problem})") from None
        finally:
            del self._active[key]
        self._known[key] = (value, found)
        return found

    def _of(self, value: Any) -> bytes:
        text = self._special(value) if self._special is not None else None
        if text is not None:
            return _hashed(f"special {type(value).__name__}", text.encode())
        kind = type(value)
        if kind in (list, tuple):
            return self._parts(kind.__name__, value)
        if kind in (set, frozenset):
            return _hashed("set", *sorted(map(self.of, value)))
        if kind in (dict, types.MappingProxyType):  # in order, which a function may depend on
            return self._parts("dict", (each for item in value.items() for each in item))
        if kind in _FUNCTIONS:
            return self._parts(kind.__name__, _FUNCTIONS[kind](value))
        if kind is types.ModuleType:
            return self._module(value)
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, type) and kind is not types.GenericAlias:  # in Python 3.10, list[int] is a type
            return self._class(value)
        if kind is types.BuiltinFunctionType:
            return self._builtin(value)
        return self._object(value)

    def _parts(self, kind: str, values: Any) -> bytes:
        return _hashed(kind, *(self.of(each) for each in values))

    def _module(self, module: types.ModuleType) -> bytes:
        """A module of the user that is used as a whole is its file, and the modules of the user that it imports."""
        if not _is_users(module.__name__):
            return _hashed("module", _versioned(module.__name__).encode())
        values = vars(module).values()
        inner = {each.__name__: each for each in values if isinstance(each, types.ModuleType)}
        inner |= {owner.__name__: owner for each in values if (owner := loaded(getattr(each, "__module__", "") or ""))}
        others = [each for name, each in sorted(inner.items()) if _is_users(name) and each is not module]
        return self._parts("module", (module.__name__, _file_of(module.__name__), others))

    def _function(self, function: types.FunctionType) -> bytes:
        if not _is_users(function.__module__) and not hasattr(function, "__wrapped__"):
            return _hashed("name", f"{_versioned(function.__module__)} {function.__qualname__}".encode())
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells.append((name, cell.cell_contents))
            except ValueError:  # assigned later
                cells.append((name, None))
        values, modules = _uses_of(function)
        about = (function.__code__, function.__defaults__, function.__kwdefaults__, function.__dict__)
        return self._parts("function", (*about, cells, values, [_file_of(name) for name in modules]))

    def _class(self, value: type) -> bytes:
        if not _is_users(value.__module__):
            return _hashed("name", f"{_versioned(value.__module__)} {value.__qualname__}".encode())
        members = [(key, each) for key, each in vars(value).items() if _counts(key, each)]
        return self._parts("class", (value.__qualname__, value.__bases__, type(value), members))

    def _builtin(self, value: Any) -> bytes:
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return _hashed("name", f"{_versioned(value.__module__ or '')} {value.__qualname__}".encode())
        return self._parts("method", (value.__name__, owner))

    def _object(self, value: Any) -> bytes:
        kind, torch = type(value), loaded("torch")
        if isinstance(value, os._Environ):
            return _hashed("environ")
        if isinstance(value, np.ufunc) and getattr(np, value.__name__, None) is not value:
            raise UndigestibleError(f"{value!r}, whose function numpy does not show")
        if torch is not None and isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return _hashed(f"tensor {value.dtype} {tuple(value.shape)}", data)
        if (about := _tokenizer(value)) is not None:
            return self._parts("tokenizer", about)
        if hasattr(value, "__wrapped__"):
            return self._parts("wrapped", (kind, value.__wrapped__))
        if is_dataclass(value) and not _is_users(_module_of(kind)):
            return self._parts("object", (kind, [(each.name, getattr(value, each.name)) for each in fields(value)]))
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            if _is_users(_module_of(kind)):
                raise UndigestibleError(f"{_name(kind)}, which is only known by its name")
            return _hashed("name", f"{_versioned(_module_of(kind))} {reduced}".encode())
        make, args, *rest = reduced
        items = [each if each is None or not hasattr(each, "__next__") else list(each) for each in rest]
        return self._parts("object", (kind, getattr(make, "__qualname__", ""), args, items))


_FUNCTIONS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.CodeType: operator.attrgetter("co_code", "co_names", "co_varnames", "co_freevars", "co_consts"),
    functools.partial: lambda value: (value.func, value.args, value.keywords, vars(value)),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    property: lambda value: (value.fget, value.fset, value.fdel),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.cached_property: lambda value: (value.func,),
    functools.partialmethod: lambda value: (value.func, value.args, value.keywords),
}
"""Code, objects around functions, and what they are made of."""


def _module_of(kind: type) -> str:
    """Return the name of the module of a type. Some types of Cython have a descriptor there."""
    return kind.__module__ if isinstance(kind.__module__, str) else builtins.__name__


def _simple(value: Any) -> tuple[str, bytes] | None:
    """Return the kind of a plain value and its bytes, or None for others."""
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str):
        return kind.__name__, repr(value).encode()
    if kind in (bytes, bytearray):
        return "bytes", bytes(value)
    if _module_of(kind).partition(".")[0] == "pyarrow":
        return _arrow(value)
    return None


def _arrow(value: Any) -> tuple[str, bytes] | None:
    """Return the bytes of data, without those of unused memory. None for anything else."""
    import pyarrow as pa

    table = value
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        table = pa.table({"": value})
    elif isinstance(value, pa.RecordBatch):
        table = pa.Table.from_batches([value])
    if not isinstance(table, pa.Table):
        return None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return type(value).__name__, sink.getvalue().to_pybytes()


def _hashed(kind: str, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


_HIDDEN = ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__dataclass_fields__", "_abc_impl")


def _counts(name: str, member: Any) -> bool:
    """Return True if a member of a class determines what its objects do."""
    descriptors = (types.GetSetDescriptorType, types.MemberDescriptorType)
    return name not in (*_HIDDEN, "__static_attributes__", "__firstlineno__") and not isinstance(member, descriptors)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_OF_FILES = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file")


def _tokenizer(value: Any) -> tuple[Any, ...] | None:
    """Return what determines a tokenizer of tokenizers, or a fast one of transformers. None for anything else.

    Calls of transformers set truncation and padding in its backend, so that these do not identify it.
    """
    backend = getattr(value, "backend_tokenizer", None)
    given = value if backend is None else backend
    if _module_of(type(given)).partition(".")[0] != "tokenizers" or not hasattr(given, "to_str"):
        return None
    about = json.loads(given.to_str())
    if backend is None:
        return (json.dumps(about, sort_keys=True),)
    about = {key: each for key, each in about.items() if key not in ("truncation", "padding")}
    names = ("model_max_length", "padding_side", "truncation_side", "model_input_names", "chat_template")
    settings = [str(getattr(value, name, None)) for name in (*names, "special_tokens_map")]
    more = sorted((key, str(each)) for key, each in getattr(value, "init_kwargs", {}).items() if key not in _OF_FILES)
    return type(value), json.dumps(about, sort_keys=True), settings, more


_OWN = __name__.partition(".")[0]


def _uses_of(function: types.FunctionType) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the global values that a function uses, by name, and the modules that it imports while it runs.

    Inner functions are included, and what it assigns itself is not: that is its state.
    """
    found: dict[str, Any] = {}
    modules: set[str] = set()
    for code in _codes(function.__code__):
        instructions = list(dis.get_instructions(code))
        assigned = {each.argval for each in instructions if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
        for place, each in enumerate(instructions):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval in function.__globals__:
                if each.argval not in assigned:
                    name, value = _followed(each.argval, function.__globals__[each.argval], instructions[place + 1 :])
                    found[name] = value
            elif each.opname == "IMPORT_NAME":
                name = _absolute(str(each.argval), instructions[:place], function)
                if _is_users(name):
                    modules.add(name)
    return sorted(found.items(), key=lambda item: item[0]), sorted(modules)


def _codes(code: types.CodeType) -> list[types.CodeType]:
    inner = [each for const in code.co_consts if isinstance(const, types.CodeType) for each in _codes(const)]
    return [code, *inner]


def _followed(name: str, value: Any, after: list[dis.Instruction]) -> tuple[str, Any]:
    """Return the value that code reads from a module, through any number of attributes."""
    for each in after:
        if not isinstance(value, types.ModuleType) or not _is_users(value.__name__):
            break
        if each.opname in ("CACHE", "EXTENDED_ARG", "PUSH_NULL"):
            continue
        if each.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not hasattr(value, str(each.argval)):
            break
        name, value = f"{name}.{each.argval}", getattr(value, str(each.argval))
    return name, value


def _absolute(name: str, before: list[dis.Instruction], function: types.FunctionType) -> str:
    """Return the name of an imported module. Its level is the constant before the names."""
    levels = [each.argval for each in before if each.opname in ("LOAD_CONST", "LOAD_SMALL_INT")]
    level = levels[-2] if len(levels) > 1 and isinstance(levels[-2], int) else 0
    package = str(function.__globals__.get("__package__") or "")
    if level and package:
        with suppress(ImportError):
            return importlib.util.resolve_name("." * level + name, package)
    return name


@functools.cache
def _is_users(module: str | None) -> bool:
    """Return True for code that may change without a new version: scripts, and files outside of installed packages."""
    if module in (None, "__main__", "__mp_main__"):
        return True
    if module in sys.builtin_module_names or module == builtins.__name__ or module.partition(".")[0] == _OWN:
        return False
    file = _path_of(module)
    if file is None:
        return module not in sys.modules
    paths = sysconfig.get_paths()
    return not file.startswith(tuple(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")))


def _path_of(module: str) -> str | None:
    loaded = sys.modules.get(module)
    if loaded is not None:
        return getattr(loaded, "__file__", None)
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module)
        return spec.origin if spec is not None else None
    return None


def _file_of(module: str) -> str:
    """Return a digest of the file of a module, or its name if there is no file."""
    path = _path_of(module)
    with suppress(OSError, TypeError), open(path, "rb") as file:  # type: ignore[arg-type]
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    return module


def _versioned(module: str) -> str:
    """Return the name of a module with the version of its package, if it has one. midepoch counts without."""
    top = module.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", "") if top != _OWN else ""
    return f"{module} {version}" if isinstance(version, str) and version else module
