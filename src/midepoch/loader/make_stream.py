"""Making the loader of a stream: which lanes this process runs, and how it ends together with others."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from midepoch.agreement import connected
from midepoch.checks import whole
from midepoch.errors import WorldError
from midepoch.flow.lanes import Place, Share
from midepoch.flow.standing import What
from midepoch.loader.equal import EqualSteps
from midepoch.loader.make import counterparts_of, cut_of
from midepoch.loader.options import Options, ahead_for, ends_of
from midepoch.loader.stream import StreamLoader
from midepoch.seeds import check_agreed
from midepoch.world import groups_of

_log = logging.getLogger("midepoch")


def make_stream_loader(
    what: What,
    place: Place,
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
    **options: Any,
) -> StreamLoader:
    """A loader of a stream from a place on; the arguments are those of ``Stream.loader``, unchecked."""
    if not any(leaf.rows for leaf in what.spec.leaves):
        _log.warning("there are no rows to load: the split, slice, selection or filter is empty")
    batch_size = whole(batch_size, "loader(batch_size=…)", 1)
    cut, together = cut_of(what.cut, rank, world_size, data_parallel)
    ends = ends_of(drop_last, ends)
    for leaf in what.spec.leaves:
        check_agreed(leaf.seed_alone, cut.count)
    what = replace(what, cut=cut)
    if not place.begun:
        what = what.for_processes(cut.count)
    agreed = _is_agreed(what, together, ends)
    row_bytes = max(leaf.source.bytes_per_row for leaf in what.spec.leaves)
    ahead = ahead_for(1024 * row_bytes) if prefetch is None else prefetch
    chosen = Options(
        batch_size=batch_size,
        num_workers=whole(num_workers, "loader(num_workers=…)"),
        prefetch=whole(ahead, "loader(prefetch=…)", 1),
        ends=ends or "uneven",
        **options,
    )
    counterparts = counterparts_of(cut, together, data_parallel, what.identity, chosen)
    equal = None
    if agreed and counterparts is not None:
        equal = EqualSteps(cut, what.identity, groups_of(data_parallel).cut, counterparts.check_refusal)
    return StreamLoader(what, chosen, place, asked=asked, counterparts=counterparts, equal=equal)


def _is_agreed(what: What, together: bool, ends: str | None) -> bool:
    """Whether ranks that run lanes of their own agree on equally many steps. Raises WorldError if they cannot."""
    cut = what.cut
    groups = Share.of(what.lanes, cut).lanes.count
    if groups == 1 or ends == "uneven" or (ends is None and not together):
        return False
    if ends is None:
        raise WorldError(
            f"{cut.count} ranks run lanes of their own, and will not have equally many batches: those that have more "
            'would wait for the others. Say what is to become of them: loader(…, ends="drop") ends the epoch on all '
            'ranks where one has no full batch left, ends="pad" goes on with batches that are marked as padding, '
            'ends="uneven" is for loops that do not wait. (with_lanes(1) lets every rank run everything.)'
        )
    if not together or connected() < cut.count:
        if connected():
            remedy = "Say which of them cut the data with data_parallel= instead of rank= and world_size="
        else:
            remedy = "Initialise one of them"
        raise WorldError(
            f"ends={ends!r}: ranks that run lanes of their own agree on the last step through torch.distributed or "
            f"JAX, which connect {connected()} processes and not the {cut.count} of the data. {remedy}, or use "
            'with_lanes(1), which lets every rank run everything, or ends="uneven".'
        )
    return True
