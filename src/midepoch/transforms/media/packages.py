"""Packages that decode: which of them can be imported, and the message if none can."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache

from midepoch.errors import MidepochError


@lru_cache(maxsize=32)
def available(name: str) -> bool:
    """Return True if a package can be imported. Some are installed and fail, such as torchvision for another torch."""
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def installed(name: str) -> bool:
    """Return True if a package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def missing(what: str, packages: str) -> MidepochError:
    return MidepochError(f"{what} needs {packages}. Install with `pip install midepoch[media]`.")
