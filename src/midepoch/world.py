"""Which process of how many this is, as the frameworks that are in use know it; none is ever imported here."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
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


_NAMES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "MASTER_PORT")
_KEY = "midepoch/run"


def run_identity(world: World) -> str:
    """A text that all ranks of this run have in common, and no other run has, as far as that can be known.

    By the key-value stores of torch.distributed and JAX, where the first to come decides; else by what launchers leave
    in the environment; else empty.
    """
    dist = process_group()
    if dist is not None and dist.get_world_size() == world.size:
        from torch.distributed.distributed_c10d import _get_default_store

        return "-" + str(_get_default_store().compare_set(_KEY, "", secrets.token_hex(8)).decode())
    if (jax := jax_processes()) is not None and jax.process_count() == world.size:
        client = sys.modules["jax._src.distributed"].global_state.client
        if world.rank == 0:
            with suppress(Exception):  # it was set before, and stays
                client.key_value_set(_KEY, secrets.token_hex(8))
        return "-" + str(client.blocking_key_value_get(_KEY, 600_000))
    return "".join(f"-{os.environ[name]}" for name in _NAMES if os.environ.get(name, "").isalnum())
