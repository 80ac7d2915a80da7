"""Agreement between the ranks of a run, through the key-value stores of torch.distributed and JAX.

Most functions do not wait: the first rank to set a value decides, and all others receive it. Only ``all_values`` waits
for all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from midepoch._internal.imports import loaded
from midepoch.distributed.world import World, jax_processes, process_group
from midepoch.errors import WorldError

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
_LOOK, _SURE, _LONG, _PATIENCE = 1.0, 5.0, 15.0, 1800.0
"""Seconds of waiting for other ranks: until a cause is looked for, until a cause counts, until a warning, until failure
(the default timeout of torch's collectives).
"""
_MOST_SHOWN = 120
"""Maximum number of characters of a value in a message."""


def first_value(key: str, value: str) -> str | None:
    """Set a key unless another rank has set it, and return its value. Return None if there is no store."""
    key = f"midepoch/{key}"
    if (store := _store()) is not None:
        try:
            return str(store.compare_set(key, "", value).decode())
        except (NotImplementedError, RuntimeError) as problem:
            if _is_no_store(problem):
                return None
            raise
    if jax_processes() is not None:
        client = _jax_client()
        with suppress(Exception):  # already set, and kept
            client.key_value_set(key, value)
        return str(client.blocking_key_value_get(key, _JAX_TIMEOUT_MS))
    return None


class Waits(NamedTuple):
    """A rank that waits for the others of its group: its rank, the size of the group, and a description of its loader.

    ``check``: raises if another rank has refused to continue.
    """

    group: str
    rank: int
    size: int
    what: dict[str, Any]
    check: Callable[[], None]


def all_values(key: str, value: str, waits: Waits) -> list[str]:
    """Set ``value`` as this rank's value of the key, wait for all ranks, and return their values by rank.

    Raise WorldError if a rank has refused (``refuse``), waits under a different key, or does not arrive.
    """
    names = [f"midepoch/{key}/{other}" for other in range(waits.size)]
    try:
        _set(names[waits.rank], value)
        try:
            _wait(names, key, waits)
        finally:
            _delete(_note_of(waits, waits.rank))
        return [_get(name) or "" for name in names]
    except WorldError:
        raise
    except Exception as problem:
        raise WorldError(
            f"the ranks could not agree on their next steps: {type(problem).__name__}: {problem}"
        ) from None


def publish(key: str, value: str) -> None:
    """Publish a value to other ranks, if there is a store."""
    with suppress(Exception):
        if connected():
            _set(f"midepoch/{key}", value)


def value_of(key: str) -> str | None:
    """Return the value of a key, or None if it is not set yet."""
    return _get(f"midepoch/{key}")


def refuse(group: str, why: str) -> None:
    """Publish the reason why this rank does not continue to ranks that wait or arrive later."""
    with suppress(Exception):
        _delete(f"midepoch/refused/{group}")
        _set(f"midepoch/refused/{group}", json.dumps([secrets.token_hex(8), why]))


def refusal(group: str) -> tuple[str, str]:
    """Return a token of the group's last refusal and its reason. Both are empty if there is none, or no store."""
    with suppress(Exception):
        token, why = json.loads(_get(f"midepoch/refused/{group}") or '["", ""]')
        return token, why
    return "", ""


def differences(said: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe the common fields in which ranks differ. Empty if they agree.

    >>> differences({0: {"seed": 1, "rows": 9}, 3: {"seed": 2, "rows": 9}})
    'seed is 1 on rank 0 and 2 on rank 3'
    """
    (first, theirs), *others = sorted(said.items())
    for rank, mine in others:
        names = [name for name in mine if name in theirs and theirs[name] != mine[name]]
        if names:
            return "; ".join(
                f"{name} is {_short(theirs[name], mine[name])} on rank {first} and "
                f"{_short(mine[name], theirs[name])} on rank {rank}"
                for name in names
            )
    return ""


def _short(value: Any, other: Any) -> str:
    """Return a value as text. A long text is cut to the surroundings of its first difference from the other."""
    text, than = str(value), str(other)
    if len(text) <= _MOST_SHOWN:
        return text
    alike = next((i for i, pair in enumerate(zip(text, than, strict=False)) if pair[0] != pair[1]), len(than))
    start = max(0, alike - _MOST_SHOWN // 2)
    return f"{'…' * bool(start)}{text[start : start + _MOST_SHOWN]}{'…' * (start + _MOST_SHOWN < len(text))}"


def withdraw(key: str, rank: int) -> None:
    """Delete this rank's value of a key, once all ranks have read it. A long run would otherwise fill the store."""
    _delete(f"midepoch/{key}/{rank}")


def _wait(names: list[str], key: str, waits: Waits) -> None:
    """Wait until all names are set. Check regularly for a refusal and for ranks that wait under a different key."""
    started = time.monotonic()
    pause, warned, seen = 0.001, False, dict[int, tuple[str, float]]()
    while not _all_set(names):
        # Not store.wait(): it writes to stderr on every timeout and does not notice a refusal.
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)
        waited = time.monotonic() - started
        if waited < _LOOK:
            continue
        waits.check()
        _check_others(key, waits, seen)
        if waited > _PATIENCE:
            raise TimeoutError(f"rank {', '.join(_late(names))} did not arrive within {_PATIENCE:g} s")
        if waited > _LONG and not warned:
            warned = True
            _log.warning(
                "waiting for rank %s to reach the same step. Every rank must iterate the same loaders equally often.",
                ", ".join(_late(names)),
            )


def _note_of(waits: Waits, rank: int) -> str:
    return f"midepoch/waits/{waits.group}/{rank}"


def _check_others(key: str, waits: Waits, seen: dict[int, tuple[str, float]]) -> None:
    """Raise WorldError if another rank of the group waits under a different key: both would wait in vain.

    ``seen``: the keys under which other ranks wait, and the time of the first sighting. A sighting counts only after
    ``_SURE`` seconds: a rank that continues deletes its note, possibly late.
    """
    mine, own = json.dumps([key, waits.what]), _note_of(waits, waits.rank)
    if _get(own) != mine:
        _delete(own)
        _set(own, mine)
    for rank in range(waits.size):
        theirs = _get(_note_of(waits, rank)) if rank != waits.rank else None
        if theirs is None or json.loads(theirs)[0] == key:
            seen.pop(rank, None)
        elif seen.get(rank, ("", 0.0))[0] != theirs:
            seen[rank] = (theirs, time.monotonic())
        elif time.monotonic() - seen[rank][1] > _SURE:
            difference = differences({rank: json.loads(theirs)[1], waits.rank: waits.what})
            difference = difference or f"rank {rank} and rank {waits.rank} are at different passes"
            raise WorldError(
                f"the ranks do not load the same data and wait for each other: {difference}. Create the same loaders "
                "and begin equally many passes on all ranks."
            )


def _late(names: list[str]) -> list[str]:
    return [name.rsplit("/", 1)[1] for name in names if _get(name) is None][:8]


def _all_set(names: list[str]) -> bool:
    if (store := _store()) is not None:
        return bool(store.check(names))
    return all(_get(name) is not None for name in names)


def _delete(name: str) -> None:
    with suppress(Exception):  # some stores cannot delete
        if (store := _store()) is not None:
            store.delete_key(name)
        else:
            _jax_client().key_value_delete(name)


def _set(name: str, value: str) -> None:
    if (store := _store()) is not None:
        store.set(name, value)
    else:
        _jax_client().key_value_set(name, value)


def _get(name: str) -> str | None:
    """Return the value of a name. None if it is not set yet, or if there is no store."""
    if (store := _store()) is not None:
        try:
            return str(store.get(name).decode()) if store.check([name]) else None
        except (NotImplementedError, RuntimeError) as problem:
            if _is_no_store(problem):
                return None
            raise
    if jax_processes() is None:
        return None
    try:
        return str(_jax_client().blocking_key_value_get(name, 1))
    except Exception as problem:
        if "DEADLINE_EXCEEDED" in str(problem) or "NOT_FOUND" in str(problem):
            return None
        raise


def _is_no_store(problem: Exception) -> bool:
    """Return True for an error of a store without an implementation, as that of the "fake" backend."""
    text = str(problem).lower()
    return any(sign in text for sign in ("not implemented", "internal assert", "pure virtual function"))


def _jax_client() -> Any:
    return sys.modules["jax._src.distributed"].global_state.client


def _store() -> Any:
    """Return the key-value store of torch.distributed, or None (MPI has no store)."""
    if process_group() is None:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


class Counters:
    """Counters of events in this process, reset with every process group, so that they agree between ranks."""

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
    """Return a text that all ranks of this start share and that no other start has, as far as can be known.

    It is the first of: ``MIDEPOCH_RUN_ID``; a text drawn by the first rank; the environment variables of the launcher;
    the empty text.
    """
    if given := os.environ.get("MIDEPOCH_RUN_ID"):
        return f"-{_plain(given)}"
    if connected() >= world.size and (drawn := first_value("run", secrets.token_hex(8))) is not None:
        return f"-{drawn}"
    if placed := _placement():
        return f"-{placed}"
    return "".join(f"-{_plain(os.environ[name])}" for name in _LEFT_BY_LAUNCHERS if os.environ.get(name))


def start_name(world: World) -> str:
    """Return ``run_identity``, or an empty text if another start might have the same."""
    identity = run_identity(world)
    if os.environ.get("MIDEPOCH_RUN_ID") or connected() >= world.size:
        return identity
    if _placement() or any(os.environ.get(name) for name in _UNIQUE):
        return identity
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world.size):  # torchrun on one machine: its agent started all ranks
        return f"{identity}-{_parent()}"
    return ""


def _parent() -> str:
    """Return the id and the start time of the parent process, a pair that is never reused."""
    parent = os.getppid()
    with suppress(OSError, IndexError), open(f"/proc/{parent}/stat") as file:
        return f"{parent}.{file.read().rsplit(')', 1)[1].split()[19]}"
    return str(parent)


def _placement() -> str | None:
    """Return the placement group that the workers of one start of Ray Train share, for use without a store."""
    ray: Any = loaded("ray")
    if loaded("ray.train") is None or ray is None or not ray.is_initialized():
        return None
    with suppress(Exception):
        return ray.get_runtime_context().get_placement_group_id() or None
    return None


def process_rank(otherwise: int) -> int:
    """Return the rank of this process among those that share its key-value store."""
    if (dist := process_group()) is not None:
        return int(dist.get_rank())
    if (jax := jax_processes()) is not None:
        return int(jax.process_index())
    return otherwise


def connected() -> int:
    """Return the number of processes that share this key-value store. 0 if there is none."""
    dist, jax = process_group(), jax_processes()
    return max(dist.get_world_size() if dist is not None else 0, jax.process_count() if jax is not None else 0)


def _plain(text: str) -> str:
    """Return a text that is safe as part of a file name."""
    return "".join(c if c.isalnum() or c in "._" else "_" for c in text)
