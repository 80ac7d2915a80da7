"""The random generators of Python, numpy and torch. (JAX has none: its keys are values, and go into ``extra``.)"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.random  # here, as numpy imports it when it is first used: in a signal handler, at worst

from midepoch.errors import CheckpointDamagedError
from midepoch.imports import loaded


def capture() -> dict[str, Any]:
    """The states of all generators that are in use in this process, as a tree."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "state": np.array(numbers, np.uint32), "gauss": gauss},
        "numpy": dict(np.random.get_state(legacy=False)),
    }
    torch: Any = loaded("torch")
    if torch is not None:
        state["torch"] = {"cpu": torch.get_rng_state()}
        for kind in _devices(torch):
            if kind == "mps" or getattr(torch, kind).is_initialized():  # else nothing was drawn there yet
                state["torch"][kind] = _device_states(torch, kind)
    return state


def checked(state: Any) -> dict[str, Any]:
    """A captured state, or CheckpointDamagedError: what sets the generators must not stop half way."""
    try:
        random.Random().setstate((state["python"]["version"], tuple(map(int, state["python"]["state"])), None))
        _bit_generator(state["numpy"]).state = state["numpy"]
        return dict(state)
    except (KeyError, TypeError, ValueError, IndexError) as problem:
        raise CheckpointDamagedError(f"the state of the random generators cannot be read: {problem!r:.200}") from None


def restore(state: dict[str, Any]) -> None:
    """Set all generators that the state knows of and that are in use here."""
    python = state["python"]
    random.setstate((python["version"], tuple(map(int, python["state"])), python["gauss"]))
    if np.random.get_state(legacy=False)["bit_generator"] != state["numpy"]["bit_generator"]:
        np.random.set_bit_generator(_bit_generator(state["numpy"]))  # type: ignore[attr-defined]
    np.random.set_state(state["numpy"])
    torch: Any = loaded("torch")
    if torch is None or "torch" not in state:
        return
    torch.set_rng_state(state["torch"]["cpu"])
    for kind in _devices(torch):
        for number, inner in enumerate(state["torch"].get(kind, ())):
            if number < _count(torch, kind):
                _set_device_state(torch, kind, number, inner)


def reseed(state: dict[str, Any], rank: int) -> None:
    """Seed all generators for a rank that was not there when the state was saved: by the state and the rank alone."""
    words = np.asarray(state["python"]["state"], np.uint32)[:16]
    seed = np.random.SeedSequence([rank, *map(int, words)])
    python, legacy, torch_seed = (int(word) for word in seed.generate_state(3, np.uint64))
    random.seed(python)
    np.random.seed(legacy % 2**32)
    torch: Any = loaded("torch")
    if torch is not None:
        torch.manual_seed(torch_seed % 2**63)


def _bit_generator(state: dict[str, Any]) -> Any:
    """A fresh generator of the kind that a state is of."""
    kinds = {"MT19937": np.random.MT19937, "PCG64": np.random.PCG64, "PCG64DXSM": np.random.PCG64DXSM,
             "Philox": np.random.Philox, "SFC64": np.random.SFC64}  # fmt: skip
    return kinds[state["bit_generator"]]()


def _devices(torch: Any) -> list[str]:
    found = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def _count(torch: Any, kind: str) -> int:
    return 1 if kind == "mps" else int(getattr(torch, kind).device_count())


def _device_states(torch: Any, kind: str) -> list[Any]:
    device = getattr(torch, kind)
    return [device.get_rng_state()] if kind == "mps" else list(device.get_rng_state_all())


def _set_device_state(torch: Any, kind: str, number: int, state: Any) -> None:
    device = getattr(torch, kind)
    if kind == "mps":
        device.set_rng_state(state)
    else:
        device.set_rng_state(state, number)
