"""Ranks that train together take the same number of steps from the same place: what would break that is refused."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from midepoch.agreement import Occasions, all_said, first_said, unsay
from midepoch.errors import WorldError
from midepoch.loader.batches import Plan
from midepoch.loader.options import Options
from midepoch.order import Cut
from midepoch.state import OF_ONE_RANK

_COMMON = ("data", "rows", "selection", "scope", "pipeline")
"""By these fields a loader of one rank finds its counterparts on the others. In all else they are compared."""

_loaders = Occasions()
_log = logging.getLogger("midepoch")


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


class Companions:
    """Compares the passes of a loader with those of its counterparts on the other ranks. Nobody waits for anybody.

    The n-th pass of which more than one batch is asked for is compared with the n-th of the others: a look at a first
    batch, which one rank may have and another not, does not count.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._passes = 0

    def check(self, plan: Plan, identity: Mapping[str, Any], options: Options, cut: Cut) -> None:
        """Raise if the rank that came first goes through something else."""
        if self._name is None:
            what = json.dumps([[identity[name] for name in _COMMON], cut.count], sort_keys=True)
            key = hashlib.blake2b(what.encode(), digest_size=12).hexdigest()
            self._name = f"{key}/{_loaders.next(key)}"
        mine = {name: value for name, value in identity.items() if name not in (*_COMMON, *OF_ONE_RANK)}
        mine |= {"epoch": plan.epoch, "position": plan.start, "ends": options.ends, "batch size": options.batch_size}
        try:
            said = first_said(f"pass/{self._name}/{self._passes + 1}", json.dumps([cut.index, mine]))
        except RuntimeError as problem:
            _log.debug("ranks cannot be compared: %s", problem)  # the process that kept the store may have ended
            said = None
        rank, theirs = (cut.index, mine) if said is None else json.loads(said)
        differing = [name for name in mine if theirs.get(name) != mine[name]]
        if differing:
            here, there = (", ".join(f"{name} {of[name]}" for name in differing) for of in (mine, theirs))
            raise WorldError(
                f"the ranks do not go through the same: rank {cut.index} has {here}; rank {rank} has {there}. Rows "
                "would be lost or repeated, and ranks take unequal steps. Either the ranks loaded states that were "
                "saved behind different batches, or only some of them loaded one, or they made different loaders, or "
                "one has begun a pass more than the others. Load one state on all ranks (it does not matter which rank "
                "saved it), and make the loader alike."
            )
        self._passes += 1


class EqualSteps:
    """Ranks that each run lanes of their own agree how many of the next steps all of them take. Here ranks do wait for
    each other, as they do behind every step, but only once in many steps.
    """

    _MOST = 32

    def __init__(self, cut: Cut, what: str) -> None:
        self._cut, self._what, self._name = cut, what, ""
        self._passes = self._rounds = self.ahead = 0
        self._said = ""

    def begin(self) -> None:
        """A pass begins, on all ranks."""
        if not self._name:
            key = hashlib.blake2b(f"{self._what} {self._cut.count}".encode(), digest_size=12).hexdigest()
            self._name = f"{key}/{_loaders.next(f'steps {key}')}"
        self._passes, self._rounds, self.ahead = self._passes + 1, 0, 1

    def agree(self, steps: int) -> list[int]:
        """How many of the next ``ahead`` steps each rank has, this one so many. Raises WorldError if one stays away."""
        self._rounds, self.ahead = self._rounds + 1, min(2 * self.ahead, self._MOST)
        key = f"steps/{self._name}/{self._passes}/{self._rounds}"
        found = [int(said) for said in all_said(key, self._cut.index, self._cut.count, str(steps))]
        if self._said:  # who has spoken now has heard what was said before
            unsay(self._said, self._cut.index)
        self._said = key
        return found
