"""Drawing a seed when the user gives none, so that all ranks of a run draw the same."""

from __future__ import annotations

import logging
import secrets

from midepoch.agreement import Occasions, first_said

_log = logging.getLogger("midepoch")
_draws = Occasions()


def draw_seed(what: str) -> tuple[int, bool]:
    """A fresh seed, and whether all ranks that draw for the same rows (as often as this one) have the same.

    They do if torch.distributed or JAX connects them: the first to arrive decides, nobody waits.
    """
    drawn = str(secrets.randbits(32))
    said = first_said(f"seed/{what}/{_draws.next(what)}", drawn)
    seed = int(said or drawn)
    _log.info("shuffle(seed=None): drew seed %d", seed)
    return seed, said is not None


def check_agreed(drawn_alone: bool, shards: int) -> None:
    """Refuse a drawn seed where the ranks had no way to agree on it: each would go through another order."""
    if drawn_alone and shards > 1:
        raise ValueError(
            f"shuffle() without a seed cannot be cut into {shards} shards: each process has drawn its own seed. "
            "Pass a seed, or initialise torch.distributed or jax.distributed before shuffle()."
        )
