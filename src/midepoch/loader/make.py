"""Making a loader: which rows of each batch this process gets, how far to work ahead, in which lanes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from midepoch.checks import whole
from midepoch.errors import DataNotFoundError
from midepoch.loader.loader import Loader
from midepoch.loader.options import Options, ahead_for
from midepoch.order import Cut
from midepoch.pipeline import Pipeline
from midepoch.seeds import check_agreed
from midepoch.state import Cursor
from midepoch.world import find_world


def make_loader(
    pipeline: Pipeline,
    cursor: Cursor,
    *,
    asked: bool,
    batch_size: Any,
    num_workers: Any,
    prefetch: Any,
    rank: int | None,
    world_size: int | None,
    **options: Any,
) -> Loader:
    """A loader of a pipeline from a cursor on; the arguments are those of ``Dataset.loader``, unchecked."""
    if not pipeline.rows:
        raise DataNotFoundError("there are no rows to load: the split, slice or selection is empty.")
    batch_size = whole(batch_size, "loader(batch_size=…)", 1)
    cut = _cut(pipeline.cut, rank, world_size)
    check_agreed(pipeline.seed_drawn, cut.count)
    ahead = ahead_for(batch_size * pipeline.source.bytes_per_row) if prefetch is None else prefetch
    chosen = Options(
        batch_size=batch_size,
        num_workers=whole(num_workers, "loader(num_workers=…)"),
        prefetch=whole(ahead, "loader(prefetch=…)", 1),
        **options,
    )
    pipeline = replace(pipeline, cut=cut)
    if pipeline.source.fetched and not pipeline.lanes_given and not cursor.position:
        pipeline = replace(pipeline, order=replace(pipeline.order, lanes=cut.count))
    return Loader(pipeline, chosen, cursor, asked=asked)


def _cut(shard: Cut, rank: int | None, world_size: int | None) -> Cut:
    """The shard if there is one, else what is given or found of the world."""
    if rank is None and world_size is None and shard.count > 1:
        return shard
    world = find_world(rank, world_size)
    if shard.count > 1:
        raise ValueError(f"the dataset is already shard {shard.index} of {shard.count}: leave out rank and world_size")
    return Cut(world.rank, world.size)
