"""The global values that the code of a function uses, and which code is the user's."""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import importlib.util
import sys
import sysconfig
import types
from contextlib import suppress
from typing import Any, NamedTuple

_OWN = __name__.partition(".")[0]


class CodeUses(NamedTuple):
    """Global values that a function uses, by name, and modules that it imports while it runs."""

    values: list[tuple[str, Any]]
    modules: list[str]


def uses_of(function: types.FunctionType) -> CodeUses:
    """Return what a function uses, its inner functions included. Not what it assigns itself, which is its state."""
    found: dict[str, Any] = {}
    modules: dict[str, None] = {}
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
                if is_users(name):
                    modules[name] = None
    return CodeUses(sorted(found.items(), key=lambda item: item[0]), sorted(modules))


def _codes(code: types.CodeType) -> list[types.CodeType]:
    inner = [each for const in code.co_consts if isinstance(const, types.CodeType) for each in _codes(const)]
    return [code, *inner]


def _followed(name: str, value: Any, after: list[dis.Instruction]) -> tuple[str, Any]:
    """Return the value that code reads from a module, through any number of attributes."""
    for each in after:
        if not isinstance(value, types.ModuleType) or not is_users(value.__name__):
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
def is_users(module: str | None) -> bool:
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


def file_of(module: str) -> str:
    """Return a digest of the file of a module, or its name if there is no file."""
    path = _path_of(module)
    with suppress(OSError, TypeError), open(path, "rb") as file:  # type: ignore[arg-type]
        return hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    return module


def versioned(module: str) -> str:
    """Return the name of a module with the version of its package, if it has one. midepoch counts without."""
    top = module.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", "") if top != _OWN else ""
    return f"{module} {version}" if isinstance(version, str) and version else module
