"""Drawing a seed when the user gives none, so that all ranks of a run draw the same."""

from __future__ import annotations

import logging
import secrets

from midepoch.world import process_group

_log = logging.getLogger("midepoch")
_draws = 0


def draw_seed() -> int:
    """A fresh seed; the same on all ranks that call in the same order, if torch.distributed is initialised.

    The ranks agree through the process group's key-value store: the first to arrive decides, nobody waits.
    """
    global _draws
    seed = secrets.randbits(32)
    dist = process_group()
    if dist is not None and dist.get_world_size() > 1:
        from torch.distributed.distributed_c10d import _get_default_store

        _draws += 1
        seed = int(_get_default_store().compare_set(f"midepoch/seed/{_draws}", "", str(seed)))
    _log.info("shuffle(seed=None): drew seed %d", seed)
    return seed


def check_agreed(drawn: bool, shards: int) -> None:
    """Refuse a drawn seed where the ranks had no way to agree on it: each would go through another order."""
    if drawn and shards > 1 and process_group() is None:
        raise ValueError(
            f"shuffle() without a seed cannot be cut into {shards} shards: each process would draw its own seed. "
            "Pass a seed, or initialise torch.distributed before shuffle()."
        )
