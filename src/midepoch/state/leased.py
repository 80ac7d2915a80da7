"""Combining the states of ranks with leases, each of which went at its own pace.

The field ``leased`` of a rank is JSON:

- With positions, [rank, ranks, turn, turns]. All positions that the rank had in the pass before ``turn`` are
  acknowledged, and of the later ones those at ``turns``. A *turn* is the number of a position among those that the pass
  delivers; rank r has those that are r modulo ranks.
- In lanes, [rank, ranks, {lane: outputs}]: the outputs of shared lanes that this rank has acknowledged in the pass.

The combined state begins at the slowest rank. What others have acknowledged after it is ``done``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.open import is_count
from midepoch.state.done import done_in_lanes, sets_by_lane
from midepoch.state.format import apart, flow_in, json_in

State = Mapping[str, Any]


class Leased(NamedTuple):
    """The field of one rank. ``outputs``: of lanes, else None."""

    shard: Shard
    turn: int = 0
    turns: Intervals = EMPTY
    outputs: Mapping[int, Intervals] | None = None

    @property
    def is_new(self) -> bool:
        """True if nothing is acknowledged."""
        return not self.turn and not self.turns and not self.outputs


def combined(states: Sequence[State]) -> list[State]:
    """Return states without leases that are equivalent to those of all ranks, of which some had leases.

    Raises CheckpointMismatchError if some ranks are missing, or are an epoch ahead.
    """
    leased = [_leased(one) for one in states]
    known = [one for one in leased if one is not None]
    if not known:
        return list(states)
    ranks = known[0].shard.count
    in_order = all(one is None or one.shard == Shard(rank, len(states)) for rank, one in enumerate(leased))
    if len(states) != ranks or not in_order:
        raise CheckpointMismatchError(
            "leased",
            f"the state of rank {known[0].shard.index} of {ranks}, which has acknowledged its own leases",
            f"{len(states)} state{'s' * (len(states) != 1)}",
            "with leases each rank has a state of its own. Load the list of the states of all ranks, in their order "
            "(any number of ranks can resume from it), or save with PipelineCheckpoint, which does so",
        )
    epoch = min(one["epoch"] for one in states)
    for rank, (one, own) in enumerate(zip(states, leased, strict=True)):
        ahead = one["epoch"] - epoch
        if ahead > 1 or (ahead and not _is_beginning(one, own)):
            slow = next(rank for rank, other in enumerate(states) if other["epoch"] == epoch)
            raise apart(
                "epoch",
                f"rank {rank} had acknowledged leases of epoch {one['epoch']} while rank {slow} still had some of "
                f"epoch {epoch}: one state cannot hold both. Nothing was changed. Load an earlier checkpoint, and let "
                "all ranks finish an epoch before one of them begins the next.",
            )
    in_lanes = any(one["flow"] for one in states)
    return _lanes(states, leased, epoch) if in_lanes else [_positions(states, leased, epoch)]


def _is_beginning(state: State, own: Leased | None) -> bool:
    """Return True if nothing of the epoch of a state is acknowledged."""
    if state["flow"]:
        untouched = all(entry[1] == 0 for entry in _entries(state)) and not state["done"]
        return untouched and (own is None or own.is_new)
    return not state["position"] and (own is None or own.is_new)


def _positions(states: Sequence[State], leased: Sequence[Leased | None], epoch: int) -> State:
    there = [rank for rank, one in enumerate(states) if one["epoch"] == epoch]
    turns = {rank: states[rank]["position"] if (own := leased[rank]) is None else own.turn for rank in there}
    last = min(there, key=lambda rank: (turns[rank], states[rank]["position"]))
    base, first = states[last], turns[last]
    found = [Intervals.decode(base["done"])]
    start = found[0].after(base["position"])
    done = found[0].from_(start)
    end = first + max(0, base["rows"] - start)
    for rank in range(len(states)):
        own = leased[rank]
        stop = turns.get(rank, end)  # a rank in the next epoch has acknowledged all of this one
        later = EMPTY if own is None or rank not in turns else own.turns.from_(stop)
        for begin, until in ((first, stop), *zip(later.starts.tolist(), later.stops.tolist(), strict=True)):
            numbers = Shard(rank, len(states)).positions(max(first, begin), min(until, end)) - first + start
            if len(numbers):
                found.append(Intervals.from_positions(done.remaining(numbers)))
    everything = EMPTY.union(*found).before_(base["rows"])
    return {**base, "done": everything.encode(), "leased": ""}


def _lanes(states: Sequence[State], leased: Sequence[Leased | None], epoch: int) -> list[State]:
    groups: dict[str, list[int]] = {}
    for rank, one in enumerate(states):
        if one["epoch"] == epoch:
            groups.setdefault(one["known"], []).append(rank)
    if any(not _entries(states[rank]) for ranks in groups.values() for rank in ranks):
        raise apart(
            "leased",
            "some ranks had begun to lease when these states were saved, others had not. Nothing was changed. Save "
            "when all ranks are in their lease() block.",
        )
    made = [_shared(states, leased, ranks) for ranks in groups.values()]
    position = sum(entry[1] for one in made for entry in _entries(one))
    steps = min(states[rank]["steps"] for ranks in groups.values() for rank in ranks)
    finished = [one for one in states if one["epoch"] > epoch]
    return [
        *({**one, "position": position, "steps": steps, "dropped": 0} for one in made),
        *({**one, "flow": "[]", "position": 0, "steps": steps, "dropped": 0, "leased": ""} for one in finished),
    ]


def _shared(states: Sequence[State], leased: Sequence[Leased | None], ranks: Sequence[int]) -> State:
    """Return the state of the lanes that some ranks share: each is at its slowest rank."""
    lanes: dict[int, list[Any]] = {}
    done: dict[int, Intervals] = {}
    for rank in ranks:
        for lane, outputs, ended, cursor in _entries(states[rank]):
            before = lanes.get(lane)
            if before is None or (outputs, -ended) < (before[1], -before[2]):
                lanes[lane] = [lane, outputs, ended, cursor]
        own = leased[rank]
        excluded = done_in_lanes(states[rank]["done"])
        for given in (excluded, own.outputs or {} if own is not None else {}):
            for lane, some in given.items():
                done[lane] = done.get(lane, EMPTY).union(some)
    texts = {
        lane: text for lane, some in done.items() if lane in lanes and (text := some.from_(lanes[lane][1]).encode())
    }
    return {
        **states[ranks[0]],
        "flow": json.dumps([lanes[lane] for lane in sorted(lanes)], separators=(",", ":")),
        "done": json.dumps(texts, separators=(",", ":")) if texts else "",
        "leased": "",
    }


def _entries(state: State) -> list[Any]:
    """Return the lanes of a state, possibly none."""
    return flow_in(state["flow"] or "[]")


def _leased(state: State) -> Leased | None:
    text = state["leased"]
    if not text:
        return None
    fields = json_in(text, list, "leased")
    try:
        if len(fields) == 3:
            rank, ranks, outputs = fields
            return Leased(Shard(rank, ranks), outputs=sets_by_lane(outputs, "leased"))
        rank, ranks, turn, turns = fields
        if is_count(turn):
            return Leased(Shard(rank, ranks), turn, Intervals.decode(turns))
    except (ValueError, TypeError):
        pass
    raise StateError(f"the state is damaged: 'leased' is {text!r:.40}.")
