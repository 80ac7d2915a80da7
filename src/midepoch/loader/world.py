"""Which rows of each batch this process gets."""

from __future__ import annotations

from midepoch.order import Cut
from midepoch.world import find_world


def find_cut(shard: Cut, rank: int | None, world_size: int | None) -> Cut:
    """The shard if there is one, else what is given or found of the world."""
    if rank is None and world_size is None and shard.count > 1:
        return shard
    world = find_world(rank, world_size)
    if shard.count > 1:
        raise ValueError(f"the dataset is already shard {shard.index} of {shard.count}: leave out rank and world_size")
    return Cut(world.rank, world.size)
