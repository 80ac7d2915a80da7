"""Seeds drawn when the user gives none, equal on all ranks of a run."""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
import sys
from typing import Any

import numpy as np

from midepoch.distributed.keyvalue import Counters
from midepoch.distributed.rendezvous import first_value

_log = logging.getLogger("midepoch")
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
