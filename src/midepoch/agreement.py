"""What the ranks of one start agree on, through the key-value stores of torch.distributed and JAX.

Mostly without waiting: the first to speak decides, all others hear it. ``all_said`` alone waits for all ranks.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

from midepoch.errors import WorldError
from midepoch.world import World, jax_processes, process_group

_LEFT_BY_LAUNCHERS = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "MASTER_PORT",
)
_UNIQUE = ("SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_JAX_TIMEOUT_MS = 60_000
_log = logging.getLogger("midepoch")
_LONG, _PATIENCE = 15, 1800
"""Seconds to wait for other ranks: as long as torch's collectives do."""


def first_said(key: str, value: str) -> str | None:
    """The value that the first rank gave for this key: this one, or one from before. None where there is no store."""
    key = f"midepoch/{key}"
    if (store := _store()) is not None:
        try:
            return str(store.compare_set(key, "", value).decode())
        except (NotImplementedError, RuntimeError) as problem:
            if "not implemented" in str(problem).lower() or "INTERNAL ASSERT" in str(problem):
                return None  # a store that only looks like one, as of the "fake" backend
            raise
    if jax_processes() is not None:
        client = sys.modules["jax._src.distributed"].global_state.client
        with suppress(Exception):  # it was set before, and stays
            client.key_value_set(key, value)
        return str(client.blocking_key_value_get(key, _JAX_TIMEOUT_MS))
    return None


def all_said(key: str, rank: int, count: int, value: str) -> list[str]:
    """What each rank has said under this key, in order, this one ``value``: waits for those that come later."""
    names = [f"midepoch/{key}/{other}" for other in range(count)]
    try:
        if (store := _store()) is not None:
            store.set(names[rank], value)
            _wait(store, names)
            return [store.get(name).decode() for name in names]
        client = sys.modules["jax._src.distributed"].global_state.client
        client.key_value_set(names[rank], value)
        return [str(client.blocking_key_value_get(name, _PATIENCE * 1000)) for name in names]
    except Exception as problem:
        raise WorldError(
            f"the ranks could not agree on their next steps: {type(problem).__name__}: {problem}"
        ) from None


def unsay(key: str, rank: int) -> None:
    """Take back what this rank has said under a key, once all have heard it: a run of weeks would fill the store."""
    name = f"midepoch/{key}/{rank}"
    with suppress(Exception):  # a store that cannot: it stays
        if (store := _store()) is not None:
            store.delete_key(name)
        else:
            sys.modules["jax._src.distributed"].global_state.client.key_value_delete(name)


def _wait(store: Any, names: list[str]) -> None:
    try:
        store.wait(names, timedelta(seconds=_LONG))
    except Exception:  # too long, or for good: the second attempt tells
        late = [name.rsplit("/", 1)[1] for name in names if not store.check([name])]
        _log.warning(
            "waiting for rank %s to come to the same step: every rank has to go through the loader as often.",
            ", ".join(late[:8]),
        )
        store.wait(names, timedelta(seconds=_PATIENCE))


def _store() -> Any:
    """The key-value store of torch.distributed, if there is one (MPI has none)."""
    if process_group() is None:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


class Occasions:
    """Counts how often something came up in this process, anew with every process group: as often as on other ranks."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._store: Any = None

    def next(self, key: str) -> int:
        if (store := _store()) is not self._store:
            self._store = store
            self._counts.clear()
        self._counts[key] += 1
        return self._counts[key]


def run_identity(world: World) -> str:
    """A text that all ranks of this start have in common, and no other start has, as far as that can be known.

    ``MIDEPOCH_RUN_ID`` if it is set; else drawn by the first rank; else made of what launchers leave in the
    environment; else empty.
    """
    if given := os.environ.get("MIDEPOCH_RUN_ID"):
        return f"-{_plain(given)}"
    if connected() >= world.size and (drawn := first_said("run", secrets.token_hex(8))) is not None:
        return f"-{drawn}"
    if placed := _placement():
        return f"-{placed}"
    return "".join(f"-{_plain(os.environ[name])}" for name in _LEFT_BY_LAUNCHERS if os.environ.get(name))


def start_name(world: World) -> str:
    """As ``run_identity``, but empty where another start might have the same name."""
    found = run_identity(world)
    if os.environ.get("MIDEPOCH_RUN_ID") or connected() >= world.size:
        return found
    if _placement() or any(os.environ.get(name) for name in _UNIQUE):
        return found
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world.size):  # torchrun on one machine: its agent started all ranks
        return f"{found}-{_parent()}"
    return ""


def _parent() -> str:
    """The process that started this one, and when that was started: no other will ever be both."""
    parent = os.getppid()
    with suppress(OSError, IndexError), open(f"/proc/{parent}/stat") as file:
        return f"{parent}.{file.read().rsplit(')', 1)[1].split()[19]}"
    return str(parent)


def _placement() -> str | None:
    """What the workers of one start of Ray Train have in common, where there is no store."""
    ray: Any = sys.modules.get("ray")
    if "ray.train" not in sys.modules or ray is None or not ray.is_initialized():
        return None
    with suppress(Exception):
        return ray.get_runtime_context().get_placement_group_id() or None
    return None


def connected() -> int:
    """How many processes share a key-value store with this one; 0 if there is none."""
    dist, jax = process_group(), jax_processes()
    return max(dist.get_world_size() if dist is not None else 0, jax.process_count() if jax is not None else 0)


def _plain(text: str) -> str:
    """As a part of a file's name."""
    return "".join(c if c.isalnum() or c in "._" else "_" for c in text)
