"""Ranks that train together take the same number of steps from the same place: what would break that is refused."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from midepoch.distributed import rendezvous
from midepoch.errors import WorldError
from midepoch.loader.options import Options
from midepoch.loader.plans import Plan
from midepoch.order import Shard
from midepoch.state.format import OF_ONE_RANK

_made, _loaders = rendezvous.Counters(), rendezvous.Counters()
_log = logging.getLogger("midepoch")
_SHIFT = 8
"""Loaders that one rank may have made more than another."""


def check_equal_steps(plan: Plan, options: Options, cut: Shard) -> None:
    """Refuse to leave a rank without a batch, unless that was asked for. All ranks refuse alike, before any step."""
    if options.last_batch is not None or not (left_out := plan.left_out(cut.count)):
        return
    rows = cut.count - left_out
    raise WorldError(
        f"the last step of epoch {plan.epoch} has {rows} row{'s' * (rows != 1)} left for {cut.count} ranks: those "
        f"without a batch would take a step less, and the others wait for them. Say what is to become of it: "
        f'loader(…, last_batch="drop") leaves the last global batch out if it is not full, last_batch="pad" fills it '
        f'up with rows that are marked, last_batch="uneven" is for loops that do not wait.'
    )


class RankConsistencyCheck:
    """Compares a loader with its counterparts on the other ranks: the n-th loader made there, as this one was here.

    Nobody waits for anybody: the first rank says what it has, and the others compare. Where one rank makes more loaders
    than another, the numbers are shifted: two loaders that differ are no fault if one of the ranks has made both.
    ``group`` names the processes that train together, where they are not all there are.
    """

    def __init__(self, cut: Shard, identity: Mapping[str, Any], options: Options, group: str = "") -> None:
        self._group, self._options, self._rank = group, options, rendezvous.process_rank(cut.index)
        self._number = _made.next(group)
        # Loaders made before the ranks were connected count apart.
        self.name = f"{group}/{'' if rendezvous.connected() else 'early '}{self._number}"
        self._made_as = _digest(_comparable(identity, options))
        rendezvous.publish(f"made/{self._group}/{self._rank}/{self._number}", self._made_as)
        self._refused_before = rendezvous.refusal(group)[0]
        self._loads = self._passes = 0

    def loaded(self) -> None:
        """A state was loaded, which may have changed the seed or the lanes."""
        self._loads += 1

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise WorldError, at the first step, if the rank that came first loads something else."""
        self._check(f"loader/{self.name}/{self._loads}", _comparable(identity, self._options))

    def check_pass(self, identity: Mapping[str, Any], place: Mapping[str, int]) -> None:
        """Raise WorldError if the rank that came first is at another place (``epoch``, and ``position`` if known).

        The n-th pass of which more than one batch is asked for is compared with the n-th of the others: a look at a
        first batch, which one rank may have and another not, does not count.
        """
        self._check(f"pass/{self.name}/{self._passes + 1}", {**_comparable(identity, self._options), **place})
        self._passes += 1

    def _check(self, key: str, mine: dict[str, Any]) -> None:
        try:
            self.check_refusal()
            said = rendezvous.first_value(key, json.dumps([self._rank, self._made_as, mine]))
            if said is None:
                return
            rank, made_as, theirs = json.loads(said)
            found = rendezvous.differences({rank: theirs, self._rank: mine})
            if not found or self._is_shifted(rank, made_as):
                return
        except RuntimeError as problem:
            _log.debug("ranks cannot be compared: %s", problem)  # the process that kept the store may have ended
            return
        text = (
            f"the ranks do not load the same: {found}. Compared was loader number {self._number} that each rank made. "
            "Make the same datasets and loaders in the same order on all ranks, begin as many passes on each, and load "
            "one state on all of them (it does not matter which rank saved it). A loader for one rank alone takes "
            "rank=0, world_size=1."
        )
        rendezvous.refuse(self._group, text)
        raise WorldError(text)

    def check_refusal(self) -> None:
        """Raise WorldError if another rank has refused to go on since this loader was made."""
        token, why = rendezvous.refusal(self._group)
        if token and token != self._refused_before:
            raise WorldError(why)

    def _is_shifted(self, rank: int, made_as: str) -> bool:
        """Whether one of the two ranks has made the loaders of both, so that the numbers do not tell what differs."""
        if made_as == self._made_as:
            return False
        return made_as in self._all_made(self._rank) or self._made_as in self._all_made(rank)

    def _all_made(self, rank: int) -> set[str | None]:
        """The loaders that a rank has made shortly before and after the one of this number."""
        numbers = range(max(1, self._number - _SHIFT), self._number + _SHIFT + 1)
        return {rendezvous.value_of(f"made/{self._group}/{rank}/{number}") for number in numbers}


def _comparable(identity: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """What must be the same on all ranks."""
    mine = {name: value for name, value in identity.items() if name not in OF_ONE_RANK}
    return {**mine, "last_batch": options.last_batch, "batch size": options.batch_size}


def _digest(comparable: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(comparable, sort_keys=True).encode(), digest_size=12).hexdigest()


class EqualSteps:
    """Ranks that each run lanes of their own agree how many of the next steps all of them take. Here ranks do wait for
    each other, as they do after every step, but only once in many steps. ``check`` raises if one has refused to go on.
    """

    _MOST = 32

    def __init__(self, cut: Shard, what: Mapping[str, Any], group: str, check: Callable[[], None]) -> None:
        self._cut, self._what, self._group, self._check, self._name = cut, what, group, check, ""
        self._passes = self._rounds = self.ahead = 0
        self._said = ""

    def begin(self) -> None:
        """A pass begins, on all ranks."""
        if not self._name:
            key = f"{self._group}/{self._cut.count}/{_digest(self._what)}"
            self._name = f"{key}/{_loaders.next(key)}"
        self._passes, self._rounds, self.ahead = self._passes + 1, 0, 1

    def agree(self, steps: int) -> list[int]:
        """How many of the next ``ahead`` steps each rank has, this one so many. Raises WorldError if one stays away."""
        self._rounds, self.ahead = self._rounds + 1, min(2 * self.ahead, self._MOST)
        cut = self._cut
        key = f"steps/{self._name}/{self._passes}/{self._rounds}"
        waits = rendezvous.Waits(self._group, cut.index, cut.count, dict(self._what), self._check)
        said = rendezvous.all_values(key, str(steps), waits)
        if self._said:  # who has spoken now has heard what was said before
            rendezvous.withdraw(self._said, cut.index)
        self._said = key
        return [int(text) for text in said]
