"""What the ranks of one start agree on without waiting: the first to speak decides, all others hear it.

Through the key-value stores of torch.distributed and JAX. Nobody waits for anybody, so nothing here can hang a rank.
"""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress

from midepoch.world import World, jax_processes, process_group

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
_JAX_TIMEOUT_MS = 600_000


def first_said(key: str, value: str) -> str | None:
    """The value that the first rank gave for this key: this one, or one from before. None where there is no store."""
    key = f"midepoch/{key}"
    if process_group() is not None:
        from torch.distributed.distributed_c10d import _get_default_store

        return str(_get_default_store().compare_set(key, "", value).decode())
    if jax_processes() is not None:
        client = sys.modules["jax._src.distributed"].global_state.client
        with suppress(Exception):  # it was set before, and stays
            client.key_value_set(key, value)
        return str(client.blocking_key_value_get(key, _JAX_TIMEOUT_MS))
    return None


def run_identity(world: World) -> str:
    """A text that all ranks of this start have in common, and no other start has, as far as that can be known.

    ``MIDEPOCH_RUN_ID`` if it is set; else drawn by the first rank; else made of what launchers leave in the
    environment; else empty.
    """
    if given := os.environ.get("MIDEPOCH_RUN_ID"):
        return f"-{_plain(given)}"
    if connected() >= world.size and (drawn := first_said("run", secrets.token_hex(8))) is not None:
        return f"-{drawn}"
    return "".join(f"-{_plain(os.environ[name])}" for name in _LEFT_BY_LAUNCHERS if os.environ.get(name))


def connected() -> int:
    """How many processes share a key-value store with this one; 0 if there is none."""
    dist, jax = process_group(), jax_processes()
    return max(dist.get_world_size() if dist is not None else 0, jax.process_count() if jax is not None else 0)


def _plain(text: str) -> str:
    """As a part of a file's name."""
    return "".join(c if c.isalnum() or c in "._" else "_" for c in text)
