"""The kernel of this source tree, compiled for the tests whether or not it is installed."""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from midepoch._native import library

ROOT = Path(__file__).parents[1]


@cache
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def compiled() -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, library.NAME)
        return library.load(path) if hook().build(path) else None


def use(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Let the kernel do the work, or numpy, in this process and in those that it forks."""
    found = compiled() if native else None
    if native and found is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(library, "kernel", lambda: found)
