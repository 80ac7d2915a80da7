"""Rank of this process among those that share each sequence."""

from __future__ import annotations

from typing import Any

from midepoch._internal.values import loaded
from midepoch.distributed.world import World, is_process_group, part_of
from midepoch.errors import WorldError


def context_rank(context_parallel: Any) -> World:
    """Return the context-parallel rank of this process and the number of ranks.

    ``context_parallel`` is one of:

    - ``(rank, size)``
    - a torch process group
    - a torch DeviceMesh of one dimension, such as ``mesh["cp"]``
    """
    if isinstance(context_parallel, tuple) and len(context_parallel) == 2 and all(map(_is_integer, context_parallel)):
        rank, size = map(int, context_parallel)
        if not 0 <= rank < size:
            raise ValueError(f"the rank of context_parallel must be in [0, {size}), got {rank}")
        return World(rank, size)
    if is_process_group(context_parallel):
        return part_of(context_parallel)
    outside = getattr(getattr(loaded("torch.distributed"), "GroupMember", None), "NON_GROUP_MEMBER", None)
    if outside is not None and context_parallel is outside:  # new_group returns it to those that it leaves out
        raise WorldError("this process is not in the process group given as context_parallel.")
    mesh_type = getattr(loaded("torch.distributed.device_mesh"), "DeviceMesh", None)
    if mesh_type is not None and isinstance(context_parallel, mesh_type):
        if len(context_parallel.shape) != 1:
            names = ", ".join(map(repr, context_parallel.mesh_dim_names or ())) or len(context_parallel.shape)
            raise ValueError(
                f"the mesh has the dimensions {names}; context_parallel takes one of them. Pass a part of the mesh, "
                'such as mesh["cp"].'
            )
        if context_parallel.get_coordinate() is None:
            raise WorldError("this process is not in the mesh given as context_parallel.")
        return part_of(context_parallel)
    raise TypeError(
        "context_parallel takes (rank, size), a torch process group or a DeviceMesh of one dimension, "
        f"got {context_parallel!r:.80}"
    )


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
