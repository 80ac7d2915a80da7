"""The first line of a pass in the ledger: what it delivers, and from where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from midepoch.audit.leases import LeaseSteps, leases_of
from midepoch.audit.mixes import mix_of
from midepoch.audit.orders import order_name
from midepoch.audit.records import VERSION, VERSION_OF_OTHERS, VERSION_OF_POSITIONS
from midepoch.audit.starts import process_name, process_space
from midepoch.order.intervals import Intervals
from midepoch.order.sizes import BatchSizes
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.excluded import excluded_text
from midepoch.pipeline.planned import Planning
from midepoch.pipeline.spec import PipelineSpec


class Ending(Protocol):
    """The plan of a pass."""

    def known(self, rows: int) -> int:
        """Return the position at its end. UNKNOWN if it is not known, and there are more rows to count it by."""


def header_of(
    spec: PipelineSpec,
    cursor: Cursor,
    origin: Cursor,
    batch_size: int,
    last_batch: str | None,
    until: int,
    sizes: BatchSizes | None,
    planning: Planning | None,
    done: Intervals,
    leased: LeaseSteps | None,
    excluded: Mapping[int, Intervals] | None,
) -> dict[str, Any]:
    """Return what all passes record.

    ``until``: the position at its end, or UNKNOWN. ``done``: positions that are excluded or acknowledged. ``excluded``:
    those, or outputs by lane, that are excluded.
    """
    shard = spec.shard
    header: dict[str, Any] = {
        "midepoch_ledger": VERSION_OF_POSITIONS if spec.has_positions else VERSION_OF_OTHERS,
        "order": order_name(spec),
        "stood": origin[:2],
        "rank": shard.index,
        "ranks": shard.count,
        "epoch": cursor.epoch,
        "start": cursor.position,
        "end": until,
        "rows": spec.rows if planning is None else until,
        "global_batch": batch_size * shard.count,
        "ends": last_batch or ("uneven" if planning is None else "dealt"),
        "process": process_name(),
        "space": process_space(),
    }
    if sizes is not None:
        header |= {"sizes": sizes.text, "first_step": cursor.steps}
    if planning is not None:
        planned = "" if cursor.planned is None else json.dumps(cursor.planned, separators=(",", ":"))
        header |= {"batches": planning.budget.text, "planned": planned}
    if planning is not None or sizes is not None:
        header["midepoch_ledger"] = VERSION_OF_OTHERS
    header |= mix_of(spec.node, cursor.epoch)
    if spec.excluded and not spec.has_positions:
        header["excluded"] = excluded_text(spec.excluded)
    if done:
        header |= {"midepoch_ledger": VERSION, "done": done.encode()}
    if excluded:
        header["excluded_places"] = {lane: places.encode() for lane, places in excluded.items()}
    if leased is not None:
        header |= {"midepoch_ledger": VERSION, "leases": leases_of(cursor, leased)}
    return header
