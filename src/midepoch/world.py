"""Which process of how many this is, as the frameworks that are in use know it; none is ever imported here."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class World(NamedTuple):
    """A rank, and how many there are."""

    rank: int = 0
    size: int = 1


def process_group() -> Any:
    """torch.distributed if it is in use, else None."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def jax_processes() -> Any:
    """jax if ``jax.distributed`` is in use, else None."""
    jax: Any = sys.modules.get("jax")
    return jax if jax is not None and jax.distributed.is_initialized() else None


def find_world(rank: int | None = None, size: int | None = None) -> World:
    """What is given, else an initialised torch.distributed, else an initialised jax.distributed, else one of one."""
    if (rank is None) != (size is None):
        raise ValueError(f"give both rank and world_size or neither, got rank={rank}, world_size={size}")
    if rank is not None and size is not None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        return World(rank, size)
    if (dist := process_group()) is not None:
        return World(dist.get_rank(), dist.get_world_size())
    if (jax := jax_processes()) is not None:
        return World(jax.process_index(), jax.process_count())
    return World()
