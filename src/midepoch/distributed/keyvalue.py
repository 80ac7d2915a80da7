"""The key-value store that the processes of a run share: that of torch.distributed, or else that of JAX.

All names begin with ``midepoch/`` there. Ranks agree through it. Most functions do not wait: the first rank to set a
value decides, and all others receive it. Only ``all_values`` waits for all ranks.

It also gives a name to each start of a run (one that is interrupted and resumed has several), and draws the seeds that
the user does not give: both are equal on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from midepoch._internal.processes import started
from midepoch._internal.values import loaded
from midepoch.distributed.world import World, jax_processes, process_group
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

    def note(self, rank: int) -> str:
        """Return the name of the note of a rank that waits."""
        return f"waits/{self.group}/{rank}"


def all_values(key: str, value: str, waits: Waits) -> list[str]:
    """Set ``value`` as this rank's value of the key, wait for all ranks, and return their values by rank.

    Raise WorldError if a rank has refused (``refuse``), waits under a different key, or does not arrive.
    """
    names = [f"{key}/{other}" for other in range(waits.size)]
    try:
        put(names[waits.rank], value)
        _wait(names, key, waits)
        return [get(name) or "" for name in names]
    except WorldError:
        raise
    except Exception as problem:
        raise WorldError(
            f"the ranks could not agree on their next steps: {type(problem).__name__}: {problem}"
        ) from None
    finally:
        delete(waits.note(waits.rank))


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


class Backoff:
    """Pauses that get longer, up to a timeout in seconds. A wait that has become long is logged once."""

    def __init__(self, timeout: float, longest: float) -> None:
        self._began, self._timeout, self._longest, self._next = time.monotonic(), timeout, longest, 0.001
        self._is_logged = False

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def pause(self, message: str | Callable[[], str] = "") -> bool:
        """Sleep; False after the timeout. ``message``: what is logged, or a function that returns it."""
        if message and not self._is_logged and self.waited > _LONG:
            self._is_logged = True
            _log.warning("%s", message if isinstance(message, str) else message())
        if self.waited > self._timeout:
            return False
        time.sleep(self._next)
        self._next = min(self._longest, 1.5 * self._next)
        return True


def _wait(names: list[str], key: str, waits: Waits) -> None:
    """Wait until all names are set. Check regularly for a refusal and for ranks that wait under a different key."""
    backoff, seen = Backoff(_PATIENCE, 0.25), dict[int, tuple[str, float]]()

    def late() -> str:
        return ", ".join([name.rsplit("/", 1)[1] for name in names if get(name) is None][:8])

    def waiting() -> str:
        return (
            f"waiting for rank {late()} to reach the same step. Every rank must iterate the same loaders equally often."
        )

    while not all_set(names):
        if backoff.waited >= _LOOK:
            waits.check()
            _check_others(key, waits, seen)
        # Not store.wait(): it writes to stderr on every timeout and does not notice a refusal.
        if not backoff.pause(waiting):
            raise TimeoutError(f"rank {late()} did not arrive within {_PATIENCE:g} s")


def _check_others(key: str, waits: Waits, seen: dict[int, tuple[str, float]]) -> None:
    """Raise WorldError if another rank of the group waits under a different key: both would wait in vain.

    ``seen``: the keys under which other ranks wait, and the time of the first sighting. A sighting counts only after
    ``_SURE`` seconds: a rank that continues deletes its note, possibly late.
    """
    note, name = json.dumps([key, waits.description]), waits.note(waits.rank)
    if get(name) != note:
        delete(name)
        put(name, note)
    for rank in range(waits.size):
        other = get(waits.note(rank)) if rank != waits.rank else None
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


_LAUNCHER_VARIABLES = (
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
"""Those that no other start has."""


def run_identity(world: World, *, unique: bool = False) -> str:
    """Return a text that all ranks of this start share and that no other start has, as far as can be known.

    It is the first of: ``MIDEPOCH_RUN_ID``; a text drawn by the first rank; the environment variables of the launcher;
    the empty text. ``unique``: return the empty text if another start might have the same.
    """
    if given := os.environ.get("MIDEPOCH_RUN_ID"):
        return f"-{_file_name(given)}"
    if connected() >= world.size and (drawn := first_value("run", secrets.token_hex(8))) is not None:
        return f"-{drawn}"
    if placed := _placement():
        return f"-{placed}"
    identity = "".join(f"-{_file_name(os.environ[name])}" for name in _LAUNCHER_VARIABLES if os.environ.get(name))
    if not unique or any(os.environ.get(name) for name in _UNIQUE):
        return identity
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world.size):  # torchrun on one machine: its agent started all ranks
        parent = os.getppid()
        return f"{identity}-{parent}.{started(parent)}"
    return ""


def _placement() -> str | None:
    """Return the placement group that the workers of one start of Ray Train share, for use without a store."""
    ray: Any = loaded("ray")
    if loaded("ray.train") is None or ray is None or not ray.is_initialized():
        return None
    with suppress(Exception):
        return ray.get_runtime_context().get_placement_group_id() or None
    return None


def _file_name(text: str) -> str:
    """Return a text that is safe as part of a file name."""
    return "".join(c if c.isalnum() or c in "._" else "_" for c in text)


_draws = Counters()


def draw_seed(rows: str) -> tuple[int, bool]:
    """Return a fresh seed, and True if all ranks that draw for the same rows, equally often, get the same seed.

    They do if torch.distributed or JAX connects them. The first rank to arrive decides; no rank waits.
    """
    drawn = str(secrets.randbits(32))
    agreed = first_value(f"seed/{rows}/{_draws.next(rows)}", drawn)
    seed = int(agreed or drawn)
    _log.info("shuffle(seed=None): drew seed %d", seed)
    return seed, agreed is not None


def draw_global_seed(rows: str) -> int:
    """Return the seed of the global generators while functions run. It follows ``torch.manual_seed``.

    If torch is not imported, it follows ``random.seed`` and ``numpy.random.seed`` together. The generators are not
    advanced. In a DataLoader worker it is the base seed that torch drew for all workers. All ranks use the seed of the
    first to arrive.
    """
    torch: Any = sys.modules.get("torch")
    data: Any = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data is not None else None
    if worker is not None:
        return int(worker.seed - worker.id) % 2**64
    if torch is not None:
        own = int(torch.initial_seed()) % 2**64
    else:
        states = repr((random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2:]))  # type: ignore[index]
        own = int.from_bytes(hashlib.blake2b(states.encode(), digest_size=8).digest(), "little")
    agreed = first_value(f"global_seed/{rows}/{_draws.next(f'global {rows}')}", str(own))
    return int(agreed or own)


def check_agreed(drawn_alone: bool, shards: int) -> None:
    """Raise ValueError if each shard has drawn a seed of its own: every rank would iterate a different order."""
    if drawn_alone and shards > 1:
        raise ValueError(
            f"shuffle() without a seed cannot be split into {shards} shards: each process has drawn its own seed. "
            "Pass a seed, or initialise torch.distributed or jax.distributed before shuffle()."
        )
