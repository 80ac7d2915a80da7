"""Data-parallel ranks as frameworks state them: two numbers, of which several processes may have the same."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""The groups of each world, by the data-parallel ranks of its processes. They end with ``destroy_process_group``."""


def arguments_for(rank: int, ranks: int) -> dict[str, Any]:
    """Return the arguments of ``Dataset.loader`` for a data-parallel rank. All processes must call it together.

    With tensor, context or pipeline parallelism, several processes have the same data-parallel rank. Then these are
    connected to those of the other data-parallel ranks, because ranks with lanes of their own agree on their last step.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == ranks:
        return {"rank": rank, "world_size": ranks}
    stated: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stated, rank)
    groups = _groups.setdefault(dist.group.WORLD, {})
    if tuple(stated) not in groups:
        groups[tuple(stated)] = _connected(stated)
    group = groups[tuple(stated)]
    if dist.get_rank(group) != rank:
        raise RuntimeError(f"data-parallel ranks must ascend with the ranks of processes, got {stated}")
    return {"data_parallel": group}


def _connected(data_ranks: list[int]) -> Any:
    """Return a process group of one process for each data-parallel rank, in their order."""
    import torch.distributed as dist

    replicas: Counter[int] = Counter()
    columns: dict[int, list[int]] = {}
    for process, data_rank in enumerate(data_ranks):
        columns.setdefault(replicas[data_rank], []).append(process)
        replicas[data_rank] += 1
    group, _ = dist.new_subgroups_by_enumeration(list(columns.values()), backend="gloo")
    return group
