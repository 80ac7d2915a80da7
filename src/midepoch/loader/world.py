"""Which rank of how many this process is."""

from __future__ import annotations

from midepoch.order import Cut
from midepoch.seeds import process_group


def find_world(shard: Cut, rank: int | None, world_size: int | None) -> Cut:
    """The shard if there is one, else what is given, else an initialised torch.distributed, else one of one."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"give both rank and world_size or neither, got rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None:
        if shard.count > 1:
            raise ValueError(
                f"the dataset is already shard {shard.index} of {shard.count}: leave out rank and world_size"
            )
        return Cut(rank, world_size)
    if shard.count > 1:
        return shard
    if (dist := process_group()) is not None:
        return Cut(dist.get_rank(), dist.get_world_size())
    return shard
