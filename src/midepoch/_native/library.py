"""The compiled kernel: found beside this file, or None."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

SWITCH = "MIDEPOCH_NATIVE"
NAME = "kernel.native.dll" if sys.platform == "win32" else "kernel.native.so"
"""The second dot keeps Python from taking the library for an extension module."""
_VERSION = 1

_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "midepoch_version": [],
    "midepoch_copy_ranges": [_pointer, _number, _pointer, _number, _number, _pointer, _pointer, _pointer, _number],
    "midepoch_fill_ranges": [_pointer, _number, _pointer, _number, _pointer, _pointer, _number],
    "midepoch_number_ranges": [_pointer, _pointer, _number, _pointer, _pointer, _pointer, _number],
    "midepoch_number_concatenated": [_pointer, _pointer, _number, _pointer, _number, _number],
    "midepoch_best_fit": [_pointer, _number, _number, _pointer, _pointer, _pointer, _pointer],
}


@cache
def kernel() -> ctypes.CDLL | None:
    """Return the kernel, loaded once, or None if numpy does its work."""
    return None if is_switched_off() else load(Path(__file__).with_name(NAME))


def is_switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def load(path: Path) -> ctypes.CDLL | None:
    """Return the library at a path. None if it is missing, for another platform, or of another version."""
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _number
        return library if library.midepoch_version() == _VERSION else None
    except (OSError, AttributeError):
        return None


def check(result: int) -> int:
    """Raise if the kernel refused its arguments. Otherwise return what it returned."""
    if result >= 0:
        return result
    if result == -3:
        raise MemoryError("the kernel got no memory")
    raise ValueError("a range is out of bounds" if result == -1 else "the kernel got an argument that it cannot use")
