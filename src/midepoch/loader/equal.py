"""Ranks that train together take the same number of steps from the same place: what would break that is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from midepoch.agreement import first_said
from midepoch.errors import WorldError
from midepoch.loader.batches import Plan
from midepoch.loader.options import Options
from midepoch.order import Cut

_begun: dict[str, tuple[int, int]] = {}  # how many other places an epoch was begun at in this process, and the last one


def check_reach(plan: Plan, options: Options, cut: Cut) -> None:
    """Refuse to leave a rank without a batch, unless that was asked for. All ranks refuse alike, before any step."""
    if options.ends is not None or not (left_out := plan.left_out(cut.count)):
        return
    rows = cut.count - left_out
    raise WorldError(
        f"the last step of epoch {plan.epoch} has {rows} row{'s' * (rows != 1)} left for {cut.count} ranks: those "
        f"without a batch would take a step less, and the others wait for them. Say what is to become of it: "
        f'loader(…, ends="drop") leaves the last global batch out if it is not whole, ends="pad" fills it up with rows '
        f'that are marked, ends="uneven" is for loops that do not wait.'
    )


def check_start(plan: Plan, identity: Mapping[str, Any], cut: Cut) -> None:
    """Refuse to go on at another place than the rank that began this epoch first.

    The n-th place at which this process begins an epoch is compared with the n-th of the others; nobody waits.
    """
    if cut.count == 1:
        return
    what = json.dumps([dict(identity), plan.global_batch, cut.count, plan.epoch], sort_keys=True)
    key = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
    number, last = _begun.get(key, (0, -1))
    if last == plan.start:
        return
    _begun[key] = (number + 1, plan.start)
    said = first_said(f"start/{key}/{number}", f"{plan.start} {cut.index}")
    if said is None:
        return
    start, rank = map(int, said.split())
    if start != plan.start:
        raise WorldError(
            f"rank {cut.index} is to begin epoch {plan.epoch} at position {plan.start:,}, but rank {rank} began it at "
            f"{start:,}: rows would be lost or repeated, and ranks take unequal steps. Either the ranks loaded states "
            "that were saved behind different batches, or only some of them found a checkpoint. Load one state on all "
            "ranks: it does not matter which rank saved it."
        )
