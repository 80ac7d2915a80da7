"""Names of the starts of a run, equal on all ranks of a start.

A run that is interrupted and resumed has several starts. Seeds that the user does not give are drawn here, equal on
all ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import secrets
import sys
from contextlib import suppress
from typing import Any

import numpy as np

from midepoch._internal.processes import started
from midepoch._internal.values import loaded
from midepoch.distributed.keyvalue import Counters, connected, first_value
from midepoch.distributed.world import World

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


def run_identity(world: World) -> str:
    """Return a text that all ranks of this start share and that no other start has, as far as can be known.

    It is the first of: ``MIDEPOCH_RUN_ID``; a text drawn by the first rank; the environment variables of the launcher;
    the empty text.
    """
    if given := os.environ.get("MIDEPOCH_RUN_ID"):
        return f"-{_file_name(given)}"
    if connected() >= world.size and (drawn := first_value("run", secrets.token_hex(8))) is not None:
        return f"-{drawn}"
    if placed := _placement():
        return f"-{placed}"
    return "".join(f"-{_file_name(os.environ[name])}" for name in _LAUNCHER_VARIABLES if os.environ.get(name))


def start_name(world: World) -> str:
    """Return ``run_identity``, or an empty text if another start might have the same."""
    identity = run_identity(world)
    if os.environ.get("MIDEPOCH_RUN_ID") or connected() >= world.size:
        return identity
    if _placement() or any(os.environ.get(name) for name in _UNIQUE):
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
