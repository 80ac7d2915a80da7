"""Data-parallel ranks as frameworks state them: two numbers, of which several processes may have the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

_groups: dict[tuple[int, int], Any] = {}


def arguments_for(rank: int, ranks: int) -> dict[str, Any]:
    """Return the arguments of ``Dataset.loader`` for a data-parallel rank. All processes must call it together.

    With tensor, context or pipeline parallelism, several processes have the same data-parallel rank. Then these are
    connected to those of the other data-parallel ranks, because ranks with lanes of their own agree on their last step.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == ranks:
        return {"rank": rank, "world_size": ranks}
    key = (id(dist.group.WORLD), ranks)
    if key not in _groups:
        _groups[key] = _connected(rank)
    return {"data_parallel": _groups[key]}


def _connected(rank: int) -> Any:
    """Return a process group of one process for each data-parallel rank, in their order."""
    import torch.distributed as dist

    stated: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stated, rank)
    replicas: Counter[int] = Counter()
    columns: dict[int, list[int]] = {}
    for process, data_rank in enumerate(stated):
        columns.setdefault(replicas[data_rank], []).append(process)
        replicas[data_rank] += 1
    group, _ = dist.new_subgroups_by_enumeration(list(columns.values()), backend="gloo")
    if dist.get_rank(group) != rank:
        raise RuntimeError(f"data-parallel ranks must ascend with the ranks of processes, got {stated}")
    return group
