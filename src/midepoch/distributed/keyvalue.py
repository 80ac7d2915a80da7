"""The key-value store that the processes of a run share: that of torch.distributed, or else that of JAX."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from midepoch.distributed.world import jax_processes, process_group

_JAX_TIMEOUT_MS = 60_000
_UNSET = "midepoch: unset"
"""Value that ``compare_set`` returns for a name that is not set. No stored value equals it."""


def connected() -> int:
    """Return the number of processes that share this key-value store. 0 if there is none."""
    dist, jax = process_group(), jax_processes()
    return max(dist.get_world_size() if dist is not None else 0, jax.process_count() if jax is not None else 0)


def process_rank(otherwise: int) -> int:
    """Return the rank of this process among those that share its key-value store."""
    if (dist := process_group()) is not None:
        return int(dist.get_rank())
    if (jax := jax_processes()) is not None:
        return int(jax.process_index())
    return otherwise


def put_first(name: str, value: str) -> str | None:
    """Set a name unless another process has set it, and return its value. Return None if there is no store."""
    if (store := _store()) is not None:
        try:
            return str(store.compare_set(name, "", value).decode())
        except (NotImplementedError, RuntimeError) as problem:
            if _is_no_store(problem):
                return None
            raise
    if jax_processes() is not None:
        client = _jax_client()
        with suppress(Exception):  # already set, and kept
            client.key_value_set(name, value)
        return str(client.blocking_key_value_get(name, _JAX_TIMEOUT_MS))
    return None


def put(name: str, value: str) -> None:
    """Set the value of a name. JAX refuses a name that is set."""
    if (store := _store()) is not None:
        store.set(name, value)
    else:
        _jax_client().key_value_set(name, value)


def get(name: str) -> str | None:
    """Return the value of a name. None if it is not set yet, or if there is no store."""
    if (store := _store()) is not None:
        try:
            # Not check() and get(): if another process deletes the name in between, get() waits for it.
            found = str(store.compare_set(name, _UNSET, _UNSET).decode())
            return None if found == _UNSET else found
        except (NotImplementedError, RuntimeError) as problem:
            if not _is_no_store(problem):
                raise
        try:  # for stores that cannot compare
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


def delete(name: str) -> None:
    """Delete a name, if the store can."""
    with suppress(Exception):  # some stores cannot
        if (store := _store()) is not None:
            store.delete_key(name)
        else:
            _jax_client().key_value_delete(name)


def all_set(names: list[str]) -> bool:
    """Return True if every name has a value."""
    if (store := _store()) is not None:
        return bool(store.check(names))
    return all(get(name) is not None for name in names)


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


def _store() -> Any:
    """Return the key-value store of torch.distributed, or None (MPI has no store)."""
    if process_group() is None:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _jax_client() -> Any:
    return sys.modules["jax._src.distributed"].global_state.client


def _is_no_store(problem: Exception) -> bool:
    """Return True for an error of a store without an implementation, as that of the "fake" backend."""
    text = str(problem).lower()
    return any(sign in text for sign in ("not implemented", "internal assert", "pure virtual function"))
