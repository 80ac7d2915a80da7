"""Data-parallel rank and world size of this process.

They are taken from the first of: the arguments; an initialised torch.distributed or jax.distributed; a Ray Train
worker; the environment variables of a launcher (torchrun, OpenMPI and other MPIs, SLURM); else rank 0 of 1. No
framework is imported here. Contradictory answers are an error, never a guess.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from midepoch._internal.hints import no_attribute, warn_once
from midepoch._internal.values import integer, loaded
from midepoch.errors import WorldError

_log = logging.getLogger("midepoch")
_logged: set[tuple[World, str]] = set()


class World(NamedTuple):
    """A rank and the number of ranks."""

    rank: int = 0
    size: int = 1

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute("a World", name, self._fields, {})


def process_group() -> Any:
    """Return torch.distributed if it is initialised, else None."""
    dist: Any = loaded("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def jax_processes() -> Any:
    """Return jax if ``jax.distributed`` is initialised, else None."""
    jax: Any = loaded("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    return jax if is_initialized is not None and is_initialized() else None


def find_world(rank: int | None = None, size: int | None = None, data_parallel: Any = None) -> World:
    """Return the given rank and size, else those that are detected.

    ``data_parallel``: the torch process group, or the dimensions of a torch or JAX mesh, over which data is sharded.
    See ``part_of``.
    """
    if (rank is None) != (size is None):
        raise ValueError(f"give both rank and world_size or neither, got rank={rank}, world_size={size}")
    if rank is not None and size is not None:
        if data_parallel is not None:
            raise ValueError("give either rank and world_size or data_parallel, not both")
        rank, size = integer(rank, "rank"), integer(size, "world_size", 1)
        if rank >= size:
            raise ValueError(f"rank must be from 0 to {size - 1} for world_size={size}, got {rank}")
        dist = process_group()
        if dist is not None and dist.get_world_size() == size and dist.get_rank() != rank:
            warn_once(
                "rank=%s was given, and torch.distributed says that this is rank %s. To detect them, omit rank and "
                "world_size. Two processes with one rank load the same rows.",
                str(rank),
                f"{dist.get_rank()} of {size}",
            )
        return World(rank, size)
    if data_parallel is not None:
        world, origin = part_of(data_parallel), "data_parallel"
    else:
        world, origin = _detected()
    if (world, origin) not in _logged:
        _logged.add((world, origin))
        _log.info("rank %d of %d, found by %s", world.rank, world.size, origin)
    return world


def _detected() -> tuple[World, str]:
    """Return the world and its origin. Frameworks in this process must agree, also with torchrun if it started them."""
    worlds: dict[str, World] = {}
    if (dist := process_group()) is not None:
        worlds["torch.distributed"] = World(dist.get_rank(), dist.get_world_size())
    if (jax := jax_processes()) is not None:
        worlds["jax.distributed"] = World(jax.process_index(), jax.process_count())
    if (ray := _ray_worker()) is not None:
        worlds["Ray Train"] = ray
    launched = launcher(os.environ)
    if launched is not None and (not worlds or "TORCHELASTIC_RUN_ID" in os.environ):
        worlds[launched[1]] = launched[0]
    if len(set(worlds.values())) > 1:
        answers = ", ".join(f"{origin} says rank {world.rank} of {world.size}" for origin, world in worlds.items())
        raise WorldError(
            f"the rank of this process is ambiguous: {answers}. "
            "Pass rank= and world_size= (or data_parallel=), or initialise the frameworks consistently."
        )
    size = os.environ.get("WORLD_SIZE", "1")
    if not worlds and size.isdigit() and int(size) > 1:
        raise WorldError(
            f"the environment sets WORLD_SIZE={size} without RANK, so every process would load all rows. Set RANK, "
            "unset WORLD_SIZE, or pass rank= and world_size=."
        )
    return next(((world, origin) for origin, world in worlds.items()), (World(), "default"))


def _ray_worker() -> World | None:
    """Return the rank of this process in its Ray Train worker group, or None outside of one."""
    train: Any = loaded("ray.train")
    if train is None:
        return None
    with suppress(Exception), warnings.catch_warnings():  # outside of a worker it raises, or warns and returns None
        warnings.simplefilter("ignore")
        context = train.get_context()
        return World(int(context.get_world_rank()), int(context.get_world_size()))
    return None


_LAUNCHERS = (
    ("torchrun", "RANK", ("WORLD_SIZE",)),
    ("OpenMPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MPI", "PMI_RANK", ("PMI_SIZE",)),
    ("SLURM", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)


def launcher(environment: Mapping[str, str]) -> tuple[World, str] | None:
    """Return the world that a launcher set in the environment, and the launcher's name.

    If one launcher started another (``srun torchrun …``), the innermost counts.

    >>> launcher({"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "RANK": "5", "WORLD_SIZE": "128"})
    (World(rank=5, size=128), 'torchrun')
    """
    worlds: dict[str, World] = {}
    for name, rank_variable, size_variables in _LAUNCHERS:
        size_variable = next((each for each in size_variables if each in environment), None)
        if rank_variable not in environment:
            continue
        if size_variable is None:
            if environment[rank_variable].isdigit() and int(environment[rank_variable]) > 0:
                raise WorldError(
                    f"the environment sets {rank_variable}={environment[rank_variable]} without a world size: "
                    f"{' or '.join(size_variables)} is missing. Set it, or pass rank= and world_size=."
                )
            continue
        try:
            world = World(int(environment[rank_variable]), int(environment[size_variable]))
        except ValueError:
            world = World(-1, -1)
        if not 0 <= world.rank < world.size:
            raise WorldError(
                f"the environment sets {rank_variable}={environment[rank_variable]} and "
                f"{size_variable}={environment[size_variable]}: that is not a valid rank. "
                "Fix or unset them, or pass rank= and world_size=."
            )
        # A batch script has rank 0 and the job's number of tasks, too, but not these.
        in_step = any(name in environment for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
        if name == "SLURM" and world.size > 1 and world.rank == 0 and not in_step:
            if worlds:
                continue  # a batch script that starts the ranks with another launcher
            raise WorldError(
                f"SLURM has {world.size} tasks, but this process was not started by srun: it may be the only process "
                "or the first of several. Start it with srun, or pass rank= and world_size=."
            )
        worlds[name] = world
    if not worlds:
        return None
    inner, world = next(iter(worlds.items()))
    for outer, outer_world in worlds.items():
        if outer_world.size > world.size and "TORCHELASTIC_RUN_ID" not in environment:
            raise WorldError(
                f"{inner} says rank {world.rank} of {world.size}, but {outer} has started {outer_world.size} "
                "processes: the world size is ambiguous. Unset the wrong variables, or pass rank= and world_size=."
            )
    return world, inner


# The part of a mesh


class Groups(NamedTuple):
    """Names of two groups of processes, derived from their ranks.

    ``sharding``: the processes that shard the data among themselves; other groups of the mesh read the same data.
    ``training``: the processes that train together, as far as known.
    """

    sharding: str = ""
    training: str = ""


def groups_of(data_parallel: Any) -> Groups:
    """Return the groups of this process in the given ``data_parallel``."""
    if data_parallel is None:
        return Groups()
    own, indices = _processes(data_parallel, "data_parallel")
    sharing = sorted(process for process in indices if indices[process] == indices[own])
    training = hashlib.blake2b(repr(sorted(indices)).encode(), digest_size=8).hexdigest()
    return Groups(f"{training}-{sharing.index(own)}", training)


def part_of(given: Any, argument: str = "data_parallel") -> World:
    """Return the data-parallel rank of this process. Processes that differ only in other dimensions share it.

    ``given``, the value of ``argument``, is one of:

    - a torch process group
    - a torch DeviceMesh of one dimension, such as ``mesh["dp"]``
    - a torch or JAX mesh and the names of the dimensions over which data is sharded, such as
      ``(mesh, ("dp_replicate", "dp_shard"))``
    """
    own, indices = _processes(given, argument)
    parts = sorted(set(indices.values()))
    if len(parts) * len(parts[0]) != len({index for part in parts for index in part}):
        raise WorldError(
            f"the processes have these indices along the data dimensions: {dict(sorted(indices.items()))}. Use a mesh "
            "in which any two processes have the same indices or none in common, and all equally many."
        )
    return World(parts.index(indices[own]), len(parts))


def context_rank(context_parallel: Any) -> World:
    """Return the context-parallel rank of this process and the number of ranks.

    ``context_parallel`` is ``(rank, size)``, or a group or mesh as in ``part_of``.
    """
    is_pair = isinstance(context_parallel, tuple) and len(context_parallel) == 2
    if is_pair and all(hasattr(value, "__index__") and not isinstance(value, bool) for value in context_parallel):
        return World(*map(int, context_parallel))
    return part_of(context_parallel, "context_parallel")


def _processes(given: Any, argument: str) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Return this process, and for each process its indices along the data dimensions, flattened.

    A process of torch has one index. A process of JAX has those of all its devices.
    """
    mesh, names = given if isinstance(given, tuple) and len(given) == 2 else (given, ())
    names = (names,) if isinstance(names, str) else names
    plain = "(rank, size), " if argument == "context_parallel" else ""
    refused = TypeError(
        f"{argument} takes {plain}a torch process group, a DeviceMesh of one dimension, or (mesh, names of "
        f"dimensions), got {given!r:.80}"
    )
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise refused if plain else TypeError(f"{argument}=(mesh, names) takes the names of dimensions, got {names!r}")
    dist: Any = sys.modules.get("torch.distributed")
    jax: Any = sys.modules.get("jax")
    outside = WorldError(f"this process is not in the mesh or process group given as {argument}.")
    known: Sequence[str] = ()
    if _is(mesh, "torch.distributed.device_mesh", "DeviceMesh"):
        own, known, processes = dist.get_rank(), mesh.mesh_dim_names or (), np.array(mesh.mesh.tolist())
    elif _is(mesh, "jax.sharding", "Mesh"):
        own, known = jax.process_index(), mesh.axis_names
        numbers = [device.process_index for device in mesh.devices.flat]
        processes = np.array(numbers).reshape(mesh.devices.shape)
    elif _is(mesh, "torch.distributed", "ProcessGroup") and not names:
        numbers = [dist.get_global_rank(mesh, rank) for rank in range(dist.get_world_size(mesh))]
        own, processes = dist.get_rank(), np.array(numbers)
    elif dist is not None and mesh is dist.GroupMember.NON_GROUP_MEMBER:
        raise outside  # new_group returns it to those that it leaves out
    else:
        raise refused
    chosen = _dimensions(tuple(names), known, processes.ndim, argument)
    shape = [processes.shape[i] for i in chosen]
    rows = np.moveaxis(processes, chosen, range(len(chosen))).reshape(int(np.prod(shape)), -1)
    indices: dict[int, tuple[int, ...]] = {}
    for index, row in enumerate(rows):
        for process in set(row.tolist()):
            indices[process] = (*indices.get(process, ()), index)
    if own not in indices:
        raise outside
    return own, indices


def _is(thing: Any, module: str, name: str) -> bool:
    expected = getattr(loaded(module), name, None)
    return expected is not None and isinstance(thing, expected)


def _dimensions(names: tuple[str, ...], known: Sequence[str], count: int, argument: str) -> list[int]:
    """Return the indices of the named dimensions. A mesh of one dimension needs no name."""
    if not names and count == 1:
        return [0]
    if not names:
        raise ValueError(
            f"the mesh has the dimensions {', '.join(map(repr, known)) or count}; {argument} names none of them. "
            f"Pass {argument}=(mesh, names) with those over which data is sharded. Ranks along the others get the "
            "same data."
        )
    if len(set(names) & set(known)) < len(names):
        raise ValueError(f"{argument} names {', '.join(map(repr, names))}, the mesh has {', '.join(map(repr, known))}")
    return [list(known).index(name) for name in names]
