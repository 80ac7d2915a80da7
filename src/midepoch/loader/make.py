"""Making a loader: which rows of each batch this process gets, how far to work ahead, in which lanes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from midepoch.agreement import connected
from midepoch.audit.ledger import ledger_of
from midepoch.checks import whole
from midepoch.loader.equal import Counterparts
from midepoch.loader.loader import Loader
from midepoch.loader.options import PADDING, Options, ahead_for, check_drop, ends_of
from midepoch.order import Cut
from midepoch.pipeline import Pipeline
from midepoch.seeds import check_agreed
from midepoch.state import Cursor, identity
from midepoch.world import find_world, groups_of

_log = logging.getLogger("midepoch")


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
    data_parallel: Any,
    drop_last: bool,
    ends: str | None,
    audit: Any,
    **options: Any,
) -> Loader:
    """A loader of a pipeline from a cursor on; the arguments are those of ``Dataset.loader``, unchecked."""
    if not pipeline.rows:
        _log.warning("there are no rows to load: the split, slice, selection or filter is empty")
    batch_size = whole(batch_size, "loader(batch_size=…)", 1)
    is_shard = pipeline.cut.count > 1  # of which the rows are known already
    cut, together = cut_of(pipeline.cut, rank, world_size, data_parallel)
    ends = ends_of(drop_last, ends)
    if ends is None and not (together and cut.count > 1):  # those would wait for one that is left without a batch
        ends = "uneven"
    check_agreed(pipeline.seed_alone, cut.count)
    ahead = ahead_for(batch_size * pipeline.source.bytes_per_row) if prefetch is None else prefetch
    chosen = Options(
        batch_size=batch_size,
        num_workers=whole(num_workers, "loader(num_workers=…)"),
        prefetch=whole(ahead, "loader(prefetch=…)", 1),
        ends=ends,
        **options,
    )
    pipeline = replace(pipeline, cut=cut)
    if ends == "pad" and PADDING in (pipeline.known_columns or ()):
        raise ValueError(f'there is a column {PADDING!r} already, which ends="pad" marks padding rows with: rename it')
    try:
        check_drop(pipeline.rows, chosen, cut.count)
    except ValueError as problem:
        if not drop_last:
            raise
        _log.warning("%s", problem)  # as torch's loaders have it, an epoch is empty then
    settled = is_shard or pipeline.lanes_given or pipeline.lanes_kept or cursor.position
    if pipeline.source.fetched and not settled:
        pipeline = replace(pipeline, order=replace(pipeline.order, lanes=cut.count))
    ledger = ledger_of(audit)
    if ledger is not None:
        ledger.prepare(cut)
    counterparts = counterparts_of(cut, together, data_parallel, identity(pipeline), chosen)
    return Loader(pipeline, chosen, cursor, asked=asked, counterparts=counterparts, ledger=ledger)


def counterparts_of(
    cut: Cut, together: bool, data_parallel: Any, belongs: Mapping[str, Any], options: Options
) -> Counterparts | None:
    """The loaders of the other ranks that this one is compared with, if there are any."""
    if not together or (cut.count == 1 and data_parallel is None):
        return None
    return Counterparts(cut, belongs, options, groups_of(data_parallel).all)


def cut_of(shard: Cut, rank: int | None, world_size: int | None, data_parallel: Any) -> tuple[Cut, bool]:
    """The shard if there is one, else what is given or found of the world; and whether they train together."""
    given = rank is not None or world_size is not None
    if not given and data_parallel is None and shard.count > 1:
        return shard, shard.count == connected()
    world = find_world(rank, world_size, data_parallel)
    if shard.count > 1:
        raise ValueError(f"the dataset is already shard {shard.index} of {shard.count}: leave out rank and world_size")
    return Cut(world.rank, world.size), not given or world.size == connected()
