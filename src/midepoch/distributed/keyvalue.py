"""The key-value store that the processes of a run share: that of torch.distributed, or else that of JAX.

All names begin with ``midepoch/`` there. Ranks agree through it. Most functions do not wait: the first rank to set a
value decides, and all others receive it. Only ``all_values`` waits for all ranks.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from midepoch.distributed.world import jax_processes, process_group
from midepoch.errors import WorldError

_log = logging.getLogger("midepoch")

_JAX_TIMEOUT_MS = 60_000
_UNSET = "midepoch: unset"
"""Value that ``compare_set`` returns for a name that is not set. No stored value equals it."""
_LOOK, _SURE, _LONG, _PATIENCE = 1.0, 5.0, 15.0, 1800.0
"""Seconds of waiting for other ranks: until a cause is looked for, until a cause counts, until a warning, until failure
(the default timeout of torch's collectives).
"""
_MOST_SHOWN = 120
"""Maximum number of characters of a value in a message."""


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


def first_value(name: str, value: str) -> str | None:
    """Set a name unless another process has set it, and return its value. Return None if there is no store."""
    if (store := _store()) is not None:
        return _answer(lambda: store.compare_set(_key(name), "", value))
    if jax_processes() is not None:
        client = _jax_client()
        with suppress(Exception):  # already set, and kept
            client.key_value_set(_key(name), value)
        return str(client.blocking_key_value_get(_key(name), _JAX_TIMEOUT_MS))
    return None


def put(name: str, value: str) -> None:
    """Set the value of a name. JAX refuses a name that is set."""
    if (store := _store()) is not None:
        store.set(_key(name), value)
    else:
        _jax_client().key_value_set(_key(name), value)


def get(name: str) -> str | None:
    """Return the value of a name. None if it is not set yet, or if there is no store."""
    if (store := _store()) is not None:
        key = _key(name)
        # Not check() and get(): if another process deletes the name in between, get() waits for it.
        value = _answer(lambda: store.compare_set(key, _UNSET, _UNSET))
        if value is None:  # a store that cannot compare
            value = _answer(lambda: store.get(key) if store.check([key]) else _UNSET.encode())
        return None if value == _UNSET else value
    if jax_processes() is None:
        return None
    try:
        return str(_jax_client().blocking_key_value_get(_key(name), 1))
    except Exception as problem:
        if "DEADLINE_EXCEEDED" in str(problem) or "NOT_FOUND" in str(problem):
            return None
        raise


def delete(name: str) -> None:
    """Delete a name, if the store can."""
    with suppress(Exception):  # some stores cannot
        if (store := _store()) is not None:
            store.delete_key(_key(name))
        else:
            _jax_client().key_value_delete(_key(name))


def all_set(names: list[str]) -> bool:
    """Return True if every name has a value."""
    if (store := _store()) is not None:
        return bool(store.check([_key(name) for name in names]))
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


def _key(name: str) -> str:
    return f"midepoch/{name}"


def _store() -> Any:
    """Return the key-value store of torch.distributed, or None (MPI has no store)."""
    if process_group() is None:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _jax_client() -> Any:
    return sys.modules["jax._src.distributed"].global_state.client


def _answer(request: Callable[[], bytes]) -> str | None:
    """Return the answer of torch's store; None if it does not implement the request, as that of the "fake" backend."""
    try:
        return str(request().decode())
    except (NotImplementedError, RuntimeError) as problem:
        text = str(problem).lower()
        if any(sign in text for sign in ("not implemented", "internal assert", "pure virtual function")):
            return None
        raise


# Agreement between ranks


class Waits(NamedTuple):
    """A rank that waits for the others of its group.

    ``description``: of its loader, for messages. ``check``: raises if another rank has refused to continue.
    """

    group: str
    rank: int
    size: int
    description: dict[str, Any]
    check: Callable[[], None]


def all_values(key: str, value: str, waits: Waits) -> list[str]:
    """Set ``value`` as this rank's value of the key, wait for all ranks, and return their values by rank.

    Raise WorldError if a rank has refused (``refuse``), waits under a different key, or does not arrive.
    """
    names = [f"{key}/{other}" for other in range(waits.size)]
    try:
        put(names[waits.rank], value)
        try:
            _wait(names, key, waits)
        finally:
            delete(_note_of(waits, waits.rank))
        return [get(name) or "" for name in names]
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
            put(key, value)


def refuse(group: str, reason: str) -> None:
    """Publish the reason for which this rank does not continue, for ranks that wait or arrive later."""
    with suppress(Exception):
        delete(f"refused/{group}")
        put(f"refused/{group}", json.dumps([secrets.token_hex(8), reason]))


def refusal(group: str) -> tuple[str, str]:
    """Return a token of the group's last refusal and its reason. Both are empty if there is none, or no store."""
    with suppress(Exception):
        token, reason = json.loads(get(f"refused/{group}") or '["", ""]')
        return token, reason
    return "", ""


def differences(values: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe the common fields in which ranks differ. Empty if they agree.

    >>> differences({0: {"seed": 1, "rows": 9}, 3: {"seed": 2, "rows": 9}})
    'seed is 1 on rank 0 and 2 on rank 3'
    """
    (first, expected), *others = sorted(values.items())
    for rank, fields in others:
        names = [name for name in fields if name in expected and expected[name] != fields[name]]
        if names:
            return "; ".join(
                f"{name} is {_short(expected[name], fields[name])} on rank {first} and "
                f"{_short(fields[name], expected[name])} on rank {rank}"
                for name in names
            )
    return ""


def _short(value: Any, other: Any) -> str:
    """Return a value as text. A long text is shortened to the surroundings of its first difference from the other."""
    text, compared = str(value), str(other)
    if len(text) <= _MOST_SHOWN:
        return text
    pairs = enumerate(zip(text, compared, strict=False))
    common = next((i for i, pair in pairs if pair[0] != pair[1]), len(compared))
    start = max(0, common - _MOST_SHOWN // 2)
    return f"{'…' * bool(start)}{text[start : start + _MOST_SHOWN]}{'…' * (start + _MOST_SHOWN < len(text))}"


def _wait(names: list[str], key: str, waits: Waits) -> None:
    """Wait until all names are set. Check regularly for a refusal and for ranks that wait under a different key."""
    started = time.monotonic()
    pause, warned, seen = 0.001, False, dict[int, tuple[str, float]]()
    while not all_set(names):
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
    """Return the name of a rank's note that it waits."""
    return f"waits/{waits.group}/{rank}"


def _check_others(key: str, waits: Waits, seen: dict[int, tuple[str, float]]) -> None:
    """Raise WorldError if another rank of the group waits under a different key: both would wait in vain.

    ``seen``: the keys under which other ranks wait, and the time of the first sighting. A sighting counts only after
    ``_SURE`` seconds: a rank that continues deletes its note, possibly late.
    """
    note, name = json.dumps([key, waits.description]), _note_of(waits, waits.rank)
    if get(name) != note:
        delete(name)
        put(name, note)
    for rank in range(waits.size):
        other = get(_note_of(waits, rank)) if rank != waits.rank else None
        if other is None or json.loads(other)[0] == key:
            seen.pop(rank, None)
        elif seen.get(rank, ("", 0.0))[0] != other:
            seen[rank] = (other, time.monotonic())
        elif time.monotonic() - seen[rank][1] > _SURE:
            difference = differences({rank: json.loads(other)[1], waits.rank: waits.description})
            difference = difference or f"rank {rank} and rank {waits.rank} are in different passes"
            text = (
                f"the ranks do not load the same data and wait for each other: {difference}. Create the same loaders "
                "and begin the same number of passes on all ranks."
            )
            refuse(waits.group, text)  # or the others would wait for this rank, which deletes its note
            raise WorldError(text)


def _late(names: list[str]) -> list[str]:
    """Return the ranks without a value, at most 8."""
    return [name.rsplit("/", 1)[1] for name in names if get(name) is None][:8]
