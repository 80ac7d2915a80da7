"""Drawing a seed when the user gives none, so that all ranks of a run draw the same."""

from __future__ import annotations

import logging
import secrets

from midepoch.agreement import first_said
from midepoch.world import jax_processes, process_group

_log = logging.getLogger("midepoch")
_draws = 0


def draw_seed() -> int:
    """A fresh seed; the same on all ranks that call in the same order, if torch.distributed or JAX connects them.

    The first to arrive decides, nobody waits.
    """
    global _draws
    _draws += 1
    drawn = str(secrets.randbits(32))
    seed = int(first_said(f"seed/{_draws}", drawn) or drawn)
    _log.info("shuffle(seed=None): drew seed %d", seed)
    return seed


def check_agreed(drawn: bool, shards: int) -> None:
    """Refuse a drawn seed where the ranks had no way to agree on it: each would go through another order."""
    if drawn and shards > 1 and process_group() is None and jax_processes() is None:
        raise ValueError(
            f"shuffle() without a seed cannot be cut into {shards} shards: each process would draw its own seed. "
            "Pass a seed, or initialise torch.distributed or jax.distributed before shuffle()."
        )
