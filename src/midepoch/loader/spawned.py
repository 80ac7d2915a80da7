"""Sending a pipeline to a process that is started anew, also from a script that has no ``if __name__ == "__main__"``.

Such a process imports the main script, to find the functions that were defined there, and so would run a training
script once more. With cloudpickle, functions of the script travel by value and it need not; without it, the script is
imported only if something in the pipeline is defined there.
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
    """What a worker needs, pickled. ``needs_main``: the main script has to be imported before it can be unpickled."""

    data: bytes
    needs_main: bool


def packed(*what: Any) -> Packed:
    """These objects, by value where possible. Raises what pickle raises."""
    try:
        import cloudpickle
    except ImportError:
        data = pickle.dumps(what)
        return Packed(data, b"__main__" in data)
    return Packed(cloudpickle.dumps(what), False)


@contextmanager
def without_main() -> Iterator[None]:
    """While a process is started: no main script for it to import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
