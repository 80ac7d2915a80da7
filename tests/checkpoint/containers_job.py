"""Saves or restores trees of many containers and prints what came back: run by test_like.py with and without jax.

python containers_job.py save|restore with|without FOLDER…
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from midepoch.checkpoint import CheckpointMismatchError, PipelineCheckpoint

Pair = namedtuple("Pair", ["left", "right"])


class Named(dict):  # type: ignore[type-arg]
    name = "one of the user's"


def arrays(value: float, length: int = 3000) -> dict[str, Any]:
    return {
        "ordered": OrderedDict(b=torch.full((length,), value), a=np.full(length, value)),
        "default": defaultdict(list, a=torch.full((length,), value)),
        "user": UserDict(a=np.full(length, value)),
        "own": Named(a=torch.full((4,), value)),
        "pair": Pair(torch.full((length,), value), OrderedDict(x=np.full(4, value))),
        "list": [OrderedDict(x=torch.full((4,), value))],
        "proxy": MappingProxyType({"a": np.full(4, value)}),
    }


def plain(value: int) -> dict[str, Any]:
    return {
        "ordered": OrderedDict(b=value, a=[value]),
        "default": defaultdict(list, a=[value], more=OrderedDict(x=value)),
        "user": UserDict(a=value),
        "counter": Counter(a=value),
        "size": torch.Size([value, 3]),
        "tuple": (value, OrderedDict(x=value)),
    }


def words(value: Any) -> str:
    """The types, and one number for each array."""
    kind = type(value).__name__
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{kind} of {float(value.reshape(-1)[-1])}"
    if hasattr(value, "items"):
        factory = getattr(value, "default_factory", None)
        return (
            f"{kind}({factory and factory.__name__}: {', '.join(f'{key}={words(one)}' for key, one in value.items())})"
        )
    if isinstance(value, (list, tuple)):
        return f"{kind}({', '.join(map(words, value))})"
    return repr(value)


def restored(folder: str) -> None:
    checkpoint = PipelineCheckpoint(folder)
    model, extra, other = arrays(0), {"plain": plain(0)}, arrays(0, length=2999)
    kept = model["ordered"]["b"], model["default"]
    checkpoint.restore_latest(None, model, extra=extra)
    print(words(model), words(extra), model["ordered"]["b"] is kept[0], model["default"] is kept[1], sep="\n")
    print(
        words(checkpoint.read(1, "model", like=arrays(0))), words(checkpoint.read(1, "plain", like=plain(0))), sep="\n"
    )
    print(words(checkpoint.read(1, "model")), words(checkpoint.read(1, "plain")), sep="\n")
    try:
        checkpoint.restore_latest(None, other)
    except CheckpointMismatchError as problem:
        print(problem)


if __name__ == "__main__":
    what, mode, *folders = sys.argv[1:]
    if mode == "with":
        import jax.numpy  # noqa: F401
    for folder in folders:
        if what == "save":
            PipelineCheckpoint(folder).save(None, arrays(7), extra={"plain": plain(7)}, step=1, rng=False)
        else:
            restored(folder)
    assert ("jax" in sys.modules) == (mode == "with")
