"""Which share of the data this process gets: its rank among how many, as those who started it know.

Found in this order: what is given; an initialised torch.distributed or jax.distributed; a Ray Train worker; what
launchers leave in the environment (torchrun, OpenMPI and other MPIs, SLURM); else one of one. No framework is ever
imported here. Two that say different things are an error, never a guess.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from midepoch.errors import WorldError
from midepoch.imports import loaded

_log = logging.getLogger("midepoch")
_logged: set[tuple[World, str]] = set()


class World(NamedTuple):
    """A rank, and how many there are."""

    rank: int = 0
    size: int = 1


def process_group() -> Any:
    """torch.distributed if it is in use, else None."""
    dist: Any = loaded("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def jax_processes() -> Any:
    """jax if ``jax.distributed`` is in use, else None."""
    jax: Any = loaded("jax")
    known = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    return jax if known is not None and known() else None


def find_world(rank: int | None = None, size: int | None = None, data_parallel: Any = None) -> World:
    """What is given, else what is found.

    ``data_parallel``: the part of a torch process group, torch or JAX mesh over which data is cut, see ``part_of``.
    """
    if (rank is None) != (size is None):
        raise ValueError(f"give both rank and world_size or neither, got rank={rank}, world_size={size}")
    if rank is not None and size is not None:
        if data_parallel is not None:
            raise ValueError("give either rank and world_size or data_parallel, not both")
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        return World(rank, size)
    if data_parallel is not None:
        return _said(part_of(data_parallel), "data_parallel")
    return _said(*_found())


def _said(world: World, by: str) -> World:
    if (world, by) not in _logged:
        _logged.add((world, by))
        _log.info("rank %d of %d, found by %s", world.rank, world.size, by)
    return world


def _found() -> tuple[World, str]:
    """The world and who says so. Frameworks in this process must agree, also with torchrun if it started them."""
    voices: dict[str, World] = {}
    if (dist := process_group()) is not None:
        voices["torch.distributed"] = World(dist.get_rank(), dist.get_world_size())
    if (jax := jax_processes()) is not None:
        voices["jax.distributed"] = World(jax.process_index(), jax.process_count())
    if (ray := _ray_worker()) is not None:
        voices["Ray Train"] = ray
    launched = launcher(os.environ)
    if launched is not None and (not voices or "TORCHELASTIC_RUN_ID" in os.environ):
        voices[launched[1]] = launched[0]
    if len(set(voices.values())) > 1:
        said = ", ".join(f"{by} says rank {world.rank} of {world.size}" for by, world in voices.items())
        raise WorldError(
            f"it is not clear which share of the data this process is to get: {said}. "
            "Pass rank= and world_size= (or data_parallel=), or initialise them alike."
        )
    return next(((world, by) for by, world in voices.items()), (World(), "default"))


def _ray_worker() -> World | None:
    """The place of this process in a Ray Train worker group, if it is in one."""
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
    """What a launcher left in the environment: the innermost, where one started another (``srun torchrun …``).

    >>> launcher({"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "RANK": "5", "WORLD_SIZE": "128"})
    (World(rank=5, size=128), 'torchrun')
    """
    found: dict[str, World] = {}
    for by, rank_name, size_names in _LAUNCHERS:
        size_name = next((name for name in size_names if name in environment), None)
        if rank_name not in environment:
            continue
        if size_name is None:
            if environment[rank_name].isdigit() and int(environment[rank_name]) > 0:
                raise WorldError(
                    f"the environment says {rank_name}={environment[rank_name]}, but not of how many: "
                    f"{' or '.join(size_names)} is missing. Set it, or pass rank= and world_size=."
                )
            continue
        try:
            world = World(int(environment[rank_name]), int(environment[size_name]))
        except ValueError:
            world = World(-1, -1)
        if not 0 <= world.rank < world.size:
            raise WorldError(
                f"the environment says {rank_name}={environment[rank_name]} and {size_name}={environment[size_name]}: "
                "that is no rank. Mend or unset them, or pass rank= and world_size=."
            )
        if by == "SLURM" and world.size > 1 and world.rank == 0 and not _in_step(environment):
            if found:
                continue  # a batch script that starts the ranks in another way
            raise WorldError(
                f"SLURM has {world.size} tasks, but this process was not started by srun, so it may be all there is "
                "or the first of them. Start it with srun, or pass rank= and world_size=."
            )
        found[by] = world
    if not found:
        return None
    by, world = next(iter(found.items()))
    for other, outer in found.items():
        if outer.size > world.size and "TORCHELASTIC_RUN_ID" not in environment:
            raise WorldError(
                f"{by} says rank {world.rank} of {world.size}, but {other} has started {outer.size} processes: it is "
                "not clear which of them share the data. Unset what is wrong, or pass rank= and world_size=."
            )
    return world, by


def _in_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script itself has rank 0 and the job's number of tasks, too."""
    return any(name in environment for name in ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))


# The part of a mesh


def part_of(data_parallel: Any) -> World:
    """The data rank of this process: all processes that differ only in other dimensions share it.

    A torch process group; a torch DeviceMesh of one dimension, like ``mesh["dp"]``; or a pair of a torch or JAX mesh
    and the name (or names) of the dimensions over which data is cut: ``(mesh, ("dp_replicate", "dp_shard"))``.
    """
    mesh, names = data_parallel if isinstance(data_parallel, tuple) and len(data_parallel) == 2 else (data_parallel, ())
    names = (names,) if isinstance(names, (str, int)) else names
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"data_parallel=(mesh, names) takes the names of dimensions, got {data_parallel[1]!r}")
    names = tuple(names)
    if _is(mesh, "torch.distributed.device_mesh", "DeviceMesh"):
        return _of_torch_mesh(mesh, names)
    if _is(mesh, "jax.sharding", "Mesh"):
        return _of_jax_mesh(mesh, names)
    if is_process_group(mesh) and not names:
        dist = sys.modules["torch.distributed"]
        rank = dist.get_rank(mesh)
        if rank < 0:
            raise WorldError("this process is not in the process group given as data_parallel.")
        return World(rank, dist.get_world_size(mesh))
    raise TypeError(
        "data_parallel takes a torch process group, a DeviceMesh of one dimension, or (mesh, names of dimensions), "
        f"got {data_parallel!r:.80}"
    )


def is_process_group(thing: Any) -> bool:
    """Whether this is a process group of torch."""
    return _is(thing, "torch.distributed", "ProcessGroup")


class Groups(NamedTuple):
    """Names of groups of processes, made of their numbers. ``cut``: those that cut the data among them, as other groups
    of a mesh do by themselves. ``all``: those that train together, as far as is known; the others get the same data.
    """

    cut: str = ""
    all: str = ""


def groups_of(data_parallel: Any) -> Groups:
    """The groups of this process in what is given as ``data_parallel``."""
    if data_parallel is None:
        return Groups()
    mesh, names = data_parallel if isinstance(data_parallel, tuple) else (data_parallel, ())
    names = (names,) if isinstance(names, str) else tuple(names)
    if _is(mesh, "torch.distributed.device_mesh", "DeviceMesh"):
        chosen = _dimensions(names, mesh.mesh_dim_names or (), len(mesh.shape))
        mine = tuple(slice(None) if i in chosen else at for i, at in enumerate(mesh.get_coordinate()))
        return Groups(_group_name(mesh.mesh[mine].flatten().tolist()), _group_name(mesh.mesh.flatten().tolist()))
    if is_process_group(mesh):
        name = _group_name(sys.modules["torch.distributed"].get_process_group_ranks(mesh))
        return Groups(name, name)
    places = _jax_places(mesh, names)
    mine = places[sys.modules["jax"].process_index()]
    sharing = sorted(process for process, found in places.items() if found == mine)
    return Groups(f"{sharing.index(sys.modules['jax'].process_index())}th", _group_name(list(places)))


def _group_name(processes: list[int]) -> str:
    return hashlib.blake2b(repr(sorted(processes)).encode(), digest_size=8).hexdigest()


def _is(thing: Any, module: str, name: str) -> bool:
    kind = getattr(loaded(module), name, None)
    return kind is not None and isinstance(thing, kind)


def _dimensions(names: tuple[str, ...], known: Sequence[str], count: int) -> list[int]:
    """The numbers of the named dimensions; of a mesh of one, that one need not be named."""
    if not names and count == 1:
        return [0]
    if not names:
        raise ValueError(
            f"the mesh has the dimensions {', '.join(map(repr, known)) or count}: say over which of them data is cut, "
            "as data_parallel=(mesh, names). Ranks along the others get the same data."
        )
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) < len(names):
        raise ValueError(
            f"data_parallel names {', '.join(map(repr, names))}, the mesh has {', '.join(map(repr, known))}"
        )
    return [list(known).index(name) for name in names]


def _of_torch_mesh(mesh: Any, names: tuple[str, ...]) -> World:
    shape, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    chosen = _dimensions(names, mesh.mesh_dim_names or (), len(shape))
    if coordinate is None:
        raise WorldError("this process is not in the mesh given as data_parallel.")
    rank, size = 0, 1
    for i in chosen:
        rank, size = rank * shape[i] + coordinate[i], size * shape[i]
    return World(rank, size)


def _of_jax_mesh(mesh: Any, names: tuple[str, ...]) -> World:
    """Processes whose devices stand at the same coordinates of the data dimensions share a rank."""
    places = _jax_places(mesh, names)
    groups = sorted(set(places.values()))
    every = {at for group in groups for at in group}
    if len(groups) * len(groups[0]) != len(every):
        raise WorldError(
            f"the processes hold these places of the data dimensions: {dict(sorted(places.items()))}. Data can be cut "
            "by processes only if any two of them hold the same places or none in common, and all equally many."
        )
    mine = places.get(sys.modules["jax"].process_index())
    if mine is None:
        raise WorldError("this process has no device in the mesh given as data_parallel.")
    return World(groups.index(mine), len(groups))


def _jax_places(mesh: Any, names: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    """The places along the data dimensions that the devices of each process hold."""
    import numpy as np

    devices = mesh.devices
    chosen = _dimensions(names, mesh.axis_names, devices.ndim)
    rest = [i for i in range(devices.ndim) if i not in chosen]
    table = np.transpose(devices, [*chosen, *rest]).reshape(int(np.prod([devices.shape[i] for i in chosen])), -1)
    places: dict[int, set[int]] = {}
    for at, row in enumerate(table):
        for device in row:
            places.setdefault(device.process_index, set()).add(at)
    return {process: tuple(sorted(found)) for process, found in places.items()}
