"""Random generators of Python, numpy and torch. (JAX has none: its keys are values, and go into ``extra``.)"""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import numpy.random  # imported now: numpy would import it at first use, at worst in a signal handler

from midepoch._internal.values import loaded
from midepoch.errors import CheckpointDamagedError

_turn = threading.RLock()
"""Held while generators of torch are read or set. A thread that sets one keeps the interpreter while it waits for
another that reads it, and that one may need the interpreter for the garbage collector: both would wait indefinitely.
"""


def _renew() -> None:
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_renew)  # the thread that holds it is not in the child


def capture() -> dict[str, Any]:
    """Return the states of all generators that are in use in this process, as a tree."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "state": np.array(numbers, np.uint32), "gauss": gauss},
        "numpy": dict(np.random.get_state(legacy=False)),
    }
    torch: Any = loaded("torch")
    if torch is not None:
        with _turn:
            state["torch"] = {"cpu": torch.get_rng_state()}
            for device, module in _devices(torch).items():
                if device == "mps":
                    state["torch"][device] = [module.get_rng_state()]
                elif module.is_initialized():  # else nothing was drawn there yet
                    state["torch"][device] = list(module.get_rng_state_all())
    return state


def checked(state: Any) -> dict[str, Any]:
    """Return a captured state, or raise CheckpointDamagedError: ``restore`` must not fail half way."""
    try:
        random.Random().setstate((state["python"]["version"], tuple(map(int, state["python"]["state"])), None))
        _bit_generator(state["numpy"]).state = state["numpy"]
        return dict(state)
    except (KeyError, TypeError, ValueError, IndexError) as problem:
        raise CheckpointDamagedError(f"the state of the random generators cannot be read: {problem!r:.200}") from None


def restore(state: dict[str, Any]) -> None:
    """Set all generators that are part of the state and in use in this process."""
    python = state["python"]
    random.setstate((python["version"], tuple(map(int, python["state"])), python["gauss"]))
    if np.random.get_state(legacy=False)["bit_generator"] != state["numpy"]["bit_generator"]:
        np.random.set_bit_generator(_bit_generator(state["numpy"]))  # type: ignore[attr-defined]
    np.random.set_state(state["numpy"])
    torch: Any = loaded("torch")
    if torch is None or "torch" not in state:
        return
    with _turn:
        torch.set_rng_state(state["torch"]["cpu"])
        for device, module in _devices(torch).items():
            saved = state["torch"].get(device, ())
            if device == "mps":
                for inner in saved:
                    module.set_rng_state(inner)
            else:
                for number, inner in enumerate(saved[: module.device_count()]):
                    module.set_rng_state(inner, number)


def reseed(state: dict[str, Any], rank: int) -> None:
    """Seed all generators of a rank that did not exist when the state was saved, from the state and the rank alone."""
    words = np.asarray(state["python"]["state"], np.uint32)[:16]
    seed = np.random.SeedSequence([rank, *map(int, words)])
    python, legacy, torch_seed = (int(word) for word in seed.generate_state(3, np.uint64))
    random.seed(python)
    np.random.seed(legacy % 2**32)
    torch: Any = loaded("torch")
    if torch is not None:
        torch.manual_seed(torch_seed % 2**63)


def _bit_generator(state: dict[str, Any]) -> Any:
    """Return a new generator of the class that a state belongs to."""
    classes = {"MT19937": np.random.MT19937, "PCG64": np.random.PCG64, "PCG64DXSM": np.random.PCG64DXSM,
               "Philox": np.random.Philox, "SFC64": np.random.SFC64}  # fmt: skip
    return classes[state["bit_generator"]]()


def _devices(torch: Any) -> dict[str, Any]:
    """Return the modules of torch whose devices are available, by name. Only ``mps`` has no device numbers."""
    modules = {name: getattr(torch, name) for name in ("cuda", "xpu") if getattr(torch, name).is_available()}
    return {**modules, "mps": torch.mps} if torch.backends.mps.is_available() else modules
