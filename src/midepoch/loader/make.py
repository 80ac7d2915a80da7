"""Creating a loader: the shard of this process, the prefetch, and the lanes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from midepoch._internal.values import integer
from midepoch.audit.ledger import ledger_of
from midepoch.dataset.reading import column_values
from midepoch.distributed.keyvalue import check_agreed, connected
from midepoch.distributed.world import find_world, groups_of
from midepoch.errors import WorldError
from midepoch.loader.batching import Batched, Batching
from midepoch.loader.lanes import EqualSteps, RankConsistencyCheck
from midepoch.loader.loader import Loader
from midepoch.loader.movers import check_device
from midepoch.loader.options import PADDING, Options, SingleRow, ahead_for, check_drop, last_batch_of, meaningless
from midepoch.loader.provenance import provenance_of
from midepoch.order import Shard
from midepoch.order.budget import BatchSizes
from midepoch.order.schedule import Schedule
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Share
from midepoch.pipeline.spec import PipelineSpec
from midepoch.transforms.context import ContextSlice

_log = logging.getLogger("midepoch")
_NOT_SHUFFLE = "The second argument is num_workers. To shuffle, use ds.shuffle(seed=…).loader(…)."


def make_loader(
    dataset: Any,
    cursor: Cursor,
    named: bool,
    *,
    batch_size: Any,
    num_workers: Any,
    prefetch: Any,
    prefetch_factor: Any,
    rank: int | None,
    world_size: int | None,
    data_parallel: Any,
    drop_last: bool,
    last_batch: str | None,
    audit: Any,
    provenance: Any,
    **options: Any,
) -> Loader:
    """Return a loader of a dataset, from a cursor on. The options are those of ``Dataset.loader``, unchecked.

    ``named``: True if the epoch was chosen, by ``set_epoch``.
    """
    spec = dataset.pipeline
    batching = Batching(**{field.name: options.pop(field.name) for field in fields(Batching)})
    if prefetch is not None and prefetch_factor is not None:
        raise ValueError("prefetch and prefetch_factor are two names of one setting. Omit one of them.")
    prefetch = prefetch_factor if prefetch is None else prefetch
    spec.node.check()
    if not spec.rows:
        _log.warning("there are no rows to load: the split, slice, selection or filter is empty")
    context = batching.context()
    if rank is None and data_parallel is None:
        rank, world_size = _without_context(context, spec.shard, rank, world_size)
    found_alone = context is None and rank is world_size is data_parallel is None and spec.shard.count == 1
    shard, together = shard_of(spec.shard, rank, world_size, data_parallel)
    schedule = spec.node.schedule
    if schedule is not None and batching.max_tokens is not None:
        batch_size, schedule = _without_sizes(batch_size, schedule), None
    if schedule is not None:
        batch_size = _scheduled_size(batch_size, schedule, spec, shard.count)
        schedule = None if schedule.batch_sizes(shard.count) is None else schedule
    rows, sizes = batch_size, None
    if batching.max_tokens is not None:
        if isinstance(rows, Mapping):
            raise meaningless("sizes by step", "tokens, planned")
        rows = None if rows is None else integer(rows, "loader(batch_size=…)", 1)
        batch_size = 1  # of batches that a budget makes
    elif isinstance(batch_size, Mapping):
        sizes = BatchSizes.of(batch_size)
        batch_size = max(sizes.sizes)
    elif isinstance(batch_size, (list, tuple)):
        raise TypeError(f"batch_size takes a number, or a dict such as {{0: 8, 1000: 16}}, got {batch_size!r:.60}")
    elif batch_size is None:
        if options.get("collate_columns"):
            raise ValueError("collate_columns=True is for batches. Omit it, or choose a batch_size.")
        batch_size, options["collate_fn"] = 1, SingleRow(options.get("collate_fn"))
    if isinstance(batch_size, Schedule):
        raise TypeError("a schedule is the second argument of mix(): midepoch.mix(sources, schedule).loader().")
    batch_size = integer(batch_size, "loader(batch_size=…)", 1)
    is_shard = spec.shard.count > 1  # of which the rows are already known
    collated = options.get("collate_fn") is not None
    batched = batching.applied(spec, partial(column_values, dataset), context, collated=collated, most_rows=rows)
    spec = batched.spec
    _advise_lanes(batched, shard)
    last_batch = last_batch_of(drop_last, last_batch)
    check_agreed(spec.seed_alone, shard.count)
    spec = replace(spec, shard=shard)
    spec = spec.for_processes(shard.count, begun=cursor.begun)
    in_lanes = spec.unit == "outputs"
    if not in_lanes and spec.source.fetched and not (is_shard or spec.lanes_chosen or cursor.begun):
        spec = replace(spec, lanes=shard.count)
    agreed = in_lanes and _is_agreed(spec, together, last_batch)
    if last_batch is None and (in_lanes or not (together and shard.count > 1)):
        last_batch = "uneven"  # ranks that train together would wait for one without a batch
    row_bytes = max(leaf.row_bytes for leaf in spec.node.leaves)
    typical = batch_size if batched.planning is None else batched.planning.typical_rows
    made_rows = typical if not in_lanes and spec.base.group is None else 1024  # in one piece, by a worker
    ahead = ahead_for(made_rows * row_bytes) if prefetch is None else prefetch
    chosen = Options(
        batch_size=batch_size,
        num_workers=integer(num_workers, "loader(num_workers=…)", hint=_NOT_SHUFFLE * isinstance(num_workers, bool)),
        prefetch=integer(ahead, "loader(prefetch=…)", 1),
        last_batch=last_batch,
        sizes=sizes,
        schedule=schedule,
        planning=batched.planning,
        bunches=batched.bunches,
        steps_per_epoch=batching.steps(),
        layout=batched.layout,
        context=batched.context,
        pads=batched.pads,
        provenance=provenance_of(spec, provenance),
        found_alone=found_alone and shard.count == 1 and not connected(),
        **options,
    )
    if last_batch == "pad" and PADDING in (spec.node.known_columns or ()):
        raise ValueError(
            f'the dataset has a column {PADDING!r}, which last_batch="pad" adds to mark padding rows. Rename it.'
        )
    if spec.numbered is not None:
        _check_drop(spec.numbered, chosen, shard.count, drop_last)
    check_device(chosen.device, spec.format if chosen.collate_fn is None else None)
    if chosen.steps_per_epoch and shard.count > 1 and last_batch == "uneven":
        raise ValueError(
            "steps_per_epoch on several ranks needs equal steps: the last step of an epoch of the data may have no "
            'batch for some of them. Pass last_batch="drop" or last_batch="pad".'
        )
    ledger = ledger_of(audit)
    if ledger is not None:
        _refuse_data_folder(ledger.folder, spec)
        ledger.prepare(shard)
    counterparts = _counterparts_of(shard, together, data_parallel, spec, chosen)
    equal = None
    if agreed and counterparts is not None:
        equal = EqualSteps(shard, spec.identity, groups_of(data_parallel).sharding, counterparts.check_refusal)
    return Loader(
        spec, chosen, cursor, named=named, counterparts=counterparts, equal=equal, ledger=ledger, dataset=dataset
    )


def _without_context(
    context: ContextSlice | None, shard: Shard, rank: int | None, world_size: int | None
) -> tuple[int | None, int | None]:
    """Return the rank among those that shard the data, if all ranks are those of one sequence."""
    if context is None or shard.count > 1:
        return rank, world_size
    world = find_world()
    if world.size not in (1, context.size):
        raise ValueError(
            f"context_parallel has {context.size} ranks of {world.size}: which of them get the same rows is not known. "
            'Pass data_parallel, such as mesh["dp"], or the rank and world_size of data parallelism.'
        )
    return 0, 1


def _advise_lanes(batched: Batched, shard: Shard) -> None:
    if batched.bunches is not None and batched.bunches.balance is not None and shard.count > 1 and not shard.index:
        _log.warning(
            "balance has no effect between ranks whose lengths are known only when rows are made: each forms batches "
            "of its own rows. Pass length=ds.lengths(…), or cache() the rows."
        )
    planning = batched.planning
    if shard.index or planning is None or planning.budget.balance is None:
        return
    group = planning.budget.group
    if group % shard.count:
        _log.warning(
            "balance: batches of about the same cost come in groups of %d, which %d ranks do not divide, so that some "
            "steps have batches of two groups. Call with_lanes(%d) on the dataset before.",
            group, shard.count, shard.count * max(1, group // shard.count),
        )  # fmt: skip


def _check_drop(rows: int, options: Options, ranks: int, drop_last: bool) -> None:
    try:
        check_drop(rows, options, ranks)
    except ValueError as problem:
        if not drop_last:
            raise
        _log.warning("%s", problem)  # the epoch is empty then, as in torch's loaders


def _scheduled_size(given: Any, schedule: Schedule, spec: PipelineSpec, ranks: int) -> Any:
    """Return the batch sizes of a rank by the schedule, or the given one if the schedule has none."""
    sizes = schedule.batch_sizes(ranks)
    counted = any(phase.steps is not None for phase in schedule.phases)
    if counted and not spec.node.follows_schedule:
        raise ValueError(
            f"the phases of the schedule are in steps of the run, and steps after the mix change the number of rows "
            f"({spec.node.text}): phases would end elsewhere. Filter and map the sources before they are mixed, and "
            "call pack() without a length."
        )
    if given is schedule and sizes is None:
        raise TypeError("loader() needs batch_size: the phases of the schedule have no global_batch_size.")
    lengths = {phase.sequence_length for phase in schedule.plan}
    if sizes is None and len(lengths) > 1 and given not in (None, 1) and spec.node.follows_schedule:
        raise ValueError(
            f"loader(batch_size={given}): the phases of the schedule have different sequence lengths, and a batch "
            "could have sequences of two of them. Give the phases a global_batch_size: they end with a complete batch "
            "then."
        )
    if given is schedule or sizes is None:
        return given if sizes is None else sizes if len(sizes) > 1 else sizes[0]
    if given not in (sizes, sizes[0] if len(sizes) == 1 else sizes):
        raise ValueError(
            f"loader(batch_size={given}): the schedule gives {', '.join(map(str, sizes.values()))} rows for each of "
            f"{ranks} ranks. Omit batch_size."
        )
    return given


def _without_sizes(given: Any, schedule: Schedule) -> Any:
    """Return the most rows of batches by tokens. Raise ValueError if the phases have batches of their own."""
    sized = next((phase.name for phase in schedule.plan if phase.global_batch_size is not None), None)
    if sized is not None:
        raise ValueError(
            f"loader(max_tokens=…): phase {sized!r} of the schedule has a global_batch_size. Omit one of them, and "
            "give the lengths of the phases in rows or tokens."
        )
    return None if given is schedule else given


def _counterparts_of(
    shard: Shard, together: bool, data_parallel: Any, spec: PipelineSpec, options: Options
) -> RankConsistencyCheck | None:
    """Return the check against the loaders of other ranks, or None if there are none."""
    if not together or (shard.count == 1 and data_parallel is None):
        return None
    return RankConsistencyCheck(shard, spec.identity, options, groups_of(data_parallel).training)


def shard_of(shard: Shard, rank: int | None, world_size: int | None, data_parallel: Any) -> tuple[Shard, bool]:
    """Return the shard if there is one, else the given or detected one; and True if the shards train together."""
    given = rank is not None or world_size is not None
    if not given and data_parallel is None and shard.count > 1:
        return shard, shard.count == connected()
    world = find_world(rank, world_size, data_parallel)
    if shard.count > 1:
        raise ValueError(f"the dataset is already shard {shard.index} of {shard.count}. Omit rank and world_size.")
    return Shard(world.rank, world.size), not given or world.size == connected()


def _is_agreed(spec: PipelineSpec, together: bool, last_batch: str | None) -> bool:
    """Return True if ranks with lanes of their own agree on the number of steps. Raise WorldError if they cannot."""
    shard = spec.shard
    groups = Share.of(spec.lanes, shard).lanes.count
    if groups == 1 or last_batch == "uneven" or (last_batch is None and not together):
        return False
    if last_batch is None:
        raise WorldError(
            f"{shard.count} ranks run lanes of their own, with different numbers of batches: ranks with more would "
            'wait for the others. Choose the last batch: loader(…, last_batch="drop") ends the epoch on all ranks '
            'when one has no full batch left, last_batch="pad" continues with batches that are marked as padding, '
            'last_batch="uneven" is for loops in which no rank waits for another. (With with_lanes(1) every rank '
            "runs everything.)"
        )
    if not together or connected() < shard.count:
        remedy = "Pass data_parallel= instead of rank= and world_size=" if connected() else "Initialise one of them"
        raise WorldError(
            f"last_batch={last_batch!r}: ranks with lanes of their own agree on the last step through "
            f"torch.distributed or JAX, which connect {connected()} processes instead of {shard.count}. {remedy}, or "
            'use with_lanes(1), with which every rank runs everything, or last_batch="uneven".'
        )
    return True


def _refuse_data_folder(folder: Path, spec: PipelineSpec) -> None:
    """Raise ValueError if a ledger would be kept beside the files of the data."""
    place = os.path.abspath(folder)
    for leaf in spec.node.leaves:
        paths = [path for path in leaf.source.files.paths if path.startswith(place)]
        if any(place == (path if leaf.source.is_folder else os.path.dirname(path)) for path in paths):
            raise ValueError(
                f"audit={str(folder)!r} is the folder of the data, and the ledger would be written beside its files. "
                "Pass a folder of the run, as in audit='runs/1'."
            )
