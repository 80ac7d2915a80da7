"""Sending a pipeline to a process that is no fork, also from a script without ``if __name__ == "__main__"``.

Such a process imports the main script to find the functions defined there, and would run a training script a second
time. With cloudpickle, functions of the script are sent by value, and the import is unnecessary. Without it, the script
is imported only if something in the pipeline is defined there.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Packed:
    """The objects of a worker, pickled. ``needs_main``: the main script has to be imported to unpickle them."""

    data: bytes
    needs_main: bool


def packed(*what: Any) -> Packed:
    """Pickle objects, by value if possible. Raises the errors of pickle."""
    try:
        import cloudpickle
    except ImportError:
        data = pickle.dumps(what)
        return Packed(data, b"__main__" in data)
    return Packed(cloudpickle.dumps(what), False)


_USUAL = ("torch", "torchvision", "tokenizers", "transformers", "datasets")


def preload(context: Any, what: Packed) -> None:
    """Let the server from which workers are forked import what they need, once. It has no effect if it is running.

    The server imports the main script unless it is told other modules. A choice of the user is kept.
    """
    from multiprocessing.forkserver import _forkserver

    if getattr(_forkserver, "_preload_modules", ["__main__"]) == ["__main__"]:
        used = [name for name in _USUAL if name in sys.modules and name.encode() in what.data]
        context.set_forkserver_preload(["midepoch.loader.workers", "midepoch.loader.bundles", *used])


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the main script while a process is started, so that it is not imported there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
