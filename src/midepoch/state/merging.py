"""One cursor from the states of several ranks: at the same step or, with leases, each at its own pace.

The combined cursor begins at the slowest rank. What others have acknowledged after it was delivered ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from midepoch.errors import CheckpointMismatchError
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor
from midepoch.pipeline.node import Node
from midepoch.pipeline.open import start
from midepoch.pipeline.planned import window_at
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.format import FIELDS, OF_ONE_RANK, Saved, apart

OF_POSITION = {"epoch", "position", "first", "cursor", "worker", "round", "batch", "leased", *OF_ONE_RANK}


def check_alike(states: Sequence[Saved], free: set[str], what: str) -> None:
    """Raise CheckpointMismatchError if states differ in a field that is not ``free``."""
    for rank, one in enumerate(states):
        for name in sorted(FIELDS - free):
            if one[name] != states[0][name]:
                raise apart(
                    name,
                    f"the list contains states of {what}: {name} is {states[0][name]!r} on rank 0 and {one[name]!r} on "
                    f"rank {rank}. Nothing was changed.",
                )


def check_same_run(states: Sequence[Saved]) -> None:
    """Raise CheckpointMismatchError if states are of different runs."""
    check_alike(states, OF_POSITION | {"steps", "epoch_outputs"}, "different runs")


def rank_to_load(states: Sequence[Saved], shard: Shard) -> int:
    """Return the rank whose state is loaded, where positions can be computed. All must be at the same position."""
    skipping = all(one["shard"] is not None for one in states)  # then each rank has a position of its own
    if not skipping and not _at_one_position(states):
        raise _steps_apart(states)
    check_alike(states, OF_POSITION | {"steps"} | ({"shard"} if skipping else set()), "different runs")
    if skipping:
        return next((rank for rank, one in enumerate(states) if one["shard"] == shard.index), 0)
    return max(range(len(states)), key=lambda rank: (states[rank]["epoch"], states[rank].cursor.position))


def _at_one_position(states: Sequence[Saved]) -> bool:
    """Return True if states are at one position. The end of an epoch equals the beginning of the next."""
    places = {(one["epoch"], one.cursor.position) for one in states}
    ends = {
        (one["epoch"] + 1, 0) if one.rows_before == one["rows"] else (one["epoch"], one.cursor.position)
        for one in states
    }
    return len(places) == 1 or len(ends) == 1


def position_of_all(states: Sequence[Saved], spec: PipelineSpec) -> Cursor:
    """Return the cursor of all ranks, where positions can be computed. ``spec``: with the excluded rows of the run."""
    if not any(one.leased for one in states):
        chosen = states[rank_to_load(states, spec.shard)].cursor
        lane, place = chosen.lane, (chosen.epoch, chosen.position)
        same = [one.cursor.lane for one in states if (one.cursor.epoch, one.cursor.position) == place]
        excluded, ahead = (EMPTY.union(*(getattr(one, name) for one in same)) for name in ("excluded", "ahead"))
        lane = replace(lane, excluded=excluded.from_(lane.taken), ahead=ahead.from_(lane.taken))
        return Cursor.at_row(chosen.epoch, lane, chosen.steps, chosen.first)
    epoch = _epoch_of_leases(states)
    there = {rank: one for rank, one in enumerate(states) if one["epoch"] == epoch}
    turns = {rank: one.cursor.lane.taken if one.leased is None else one.leased.turn for rank, one in there.items()}
    last = min(there, key=lambda rank: (turns[rank], there[rank].cursor.position))
    base, first = there[last].cursor, turns[last]
    lane, end_of_units = base.lane, states[0]["rows"]
    done = lane.done if states[0]["budget"] else spec.undelivered(epoch, lane)
    begin = done.after(lane.taken)
    done = done.from_(begin)
    end = first + max(0, end_of_units - begin)
    found = [lane.ahead]
    for rank, one in enumerate(states):
        stop = turns.get(rank, end)  # a rank in the next epoch has acknowledged all of this one
        later = EMPTY if one.leased is None or rank not in turns else one.leased.turns.from_(stop)
        for low, high in ((first, stop), *zip(later.starts.tolist(), later.stops.tolist(), strict=True)):
            numbers = Shard(rank, len(states)).positions(max(first, low), min(high, end)) - first + begin
            if len(numbers):
                found.append(Intervals.from_positions(done.remaining(numbers)))
    ahead = EMPTY.union(*found).before_(end_of_units)
    steps = max(one.cursor.steps for one in there.values())
    if states[0]["budget"]:
        lane = replace(lane, at=window_at(lane))
    return Cursor.at_row(epoch, replace(lane, ahead=ahead), steps, base.first)


def _epoch_of_leases(states: Sequence[Saved]) -> int:
    """Return the epoch of ranks with leases. Raise if some ranks are missing, or are an epoch ahead."""
    known = [one.leased for one in states if one.leased is not None]
    ranks = known[0].shard.count
    in_order = all(one.leased is None or one.leased.shard == Shard(rank, ranks) for rank, one in enumerate(states))
    if len(states) != ranks or not in_order:
        raise CheckpointMismatchError(
            "leased",
            f"the state of rank {known[0].shard.index} of {ranks}, which has acknowledged its own leases",
            f"{len(states)} state{'s' * (len(states) != 1)}",
            "with leases each rank has a state of its own. Load the list of the states of all ranks, in their order "
            "(any number of ranks can resume from it), or save with PipelineCheckpoint, which does so",
        )
    check_same_run(states)
    epoch: int = min(one["epoch"] for one in states)
    for rank, one in enumerate(states):
        ahead = one["epoch"] - epoch
        if ahead > 1 or (ahead and not _is_beginning(one)):
            slow = next(rank for rank, other in enumerate(states) if other["epoch"] == epoch)
            raise apart(
                "epoch",
                f"rank {rank} had acknowledged leases of epoch {one['epoch']} while rank {slow} still had some of "
                f"epoch {epoch}: one state cannot hold both. Nothing was changed. Load an earlier checkpoint, and let "
                "all ranks finish an epoch before one of them begins the next.",
            )
    return epoch


def _is_beginning(state: Saved) -> bool:
    """Return True if nothing of the epoch of a state is acknowledged."""
    return not state.cursor.position and not state.cursor.has_done and (state.leased is None or state.leased.is_new)


def lanes_of_all(states: Sequence[Saved], lanes: int, node: Node, *, changed: bool) -> Cursor:
    """Return the cursor with the lanes of all ranks. ``changed``: the mix was changed."""
    cursors = [one.cursor for one in states]
    if any(one.leased for one in states):
        cursors = _leased_lanes(states)
    else:
        check_alike(states, OF_POSITION | {"steps", "epoch_outputs"}, "different runs or steps")
    return _merged(states, cursors, lanes, node, changed=changed, leased=any(one.leased for one in states))


def _leased_lanes(states: Sequence[Saved]) -> list[Cursor]:
    """Return cursors without leases that are equivalent to those of all ranks: each lane is at its slowest rank."""
    epoch = _epoch_of_leases(states)
    inside = [one for one in states if one["epoch"] == epoch]
    if any(not one.cursor.lanes for one in inside):
        raise apart(
            "leased",
            "some ranks had begun to lease when these states were saved, others had not. Nothing was changed. Save "
            "when all ranks are in their lease() block.",
        )
    lanes: dict[int, LaneCursor] = {}
    excluded: dict[int, Intervals] = {}
    ahead: dict[int, Intervals] = {}
    for one in inside:
        for number, lane in one.cursor.lanes.items():
            before = lanes.get(number)
            if before is None or (lane.taken, not lane.ended) < (before.taken, not before.ended):
                lanes[number] = lane
            excluded[number] = excluded.get(number, EMPTY).union(lane.excluded)
            own = {} if one.leased is None or one.leased.outputs is None else one.leased.outputs
            ahead[number] = ahead.get(number, EMPTY).union(lane.ahead, own.get(number, EMPTY))
    merged = {
        number: replace(lane, excluded=excluded[number].from_(lane.taken), ahead=ahead[number].from_(lane.taken))
        for number, lane in lanes.items()
    }
    steps = max(one.cursor.steps for one in inside)
    finished = [Cursor.start(one["epoch"], steps) for one in states if one["epoch"] > epoch]
    return [Cursor(epoch, merged, steps, max(one.cursor.first for one in inside)), *finished]


def _merged(
    states: Sequence[Saved], cursors: Sequence[Cursor], lanes: int, node: Node, *, changed: bool, leased: bool
) -> Cursor:
    """Return the cursor with the lanes of all ranks together. Without leases, they must have been at the same step."""
    epoch = min(cursor.epoch for cursor in cursors)
    if changed and len({(cursor.epoch, cursor.lanes_ended) for cursor in cursors}) > 1:
        raise apart(
            "parts",
            "some ranks had finished the epoch when these states were saved, others had not: a mix can be changed "
            "only if all or none have. Nothing was changed.",
        )
    if len(cursors) == 1 or not any(cursor.lanes for cursor in cursors):
        if any(cursor.epoch != epoch for cursor in cursors):
            raise _steps_apart(states)
        return cursors[0]
    # Ranks that finished the epoch before others (last_batch="uneven") are at the beginning of the next.
    inside = [cursor for cursor in cursors if cursor.epoch == epoch and cursor.lanes]
    finished = [cursor for cursor in cursors if cursor.epoch == epoch + 1 and not cursor.lanes]
    if len(inside) + len(finished) < len(cursors):
        raise _steps_apart(states)
    found: dict[int, LaneCursor] = {}
    running: set[int] = set()
    for cursor in inside:
        for number, lane in cursor.lanes.items():
            before = found.get(number, lane)
            if before.taken != lane.taken:
                raise _steps_apart(states)
            noticed = before if before.ended else lane  # possibly only one of the ranks has noticed the end
            excluded, ahead = before.excluded.union(lane.excluded), before.ahead.union(lane.ahead)
            found[number] = replace(noticed, excluded=excluded, ahead=ahead)
        if not any(lane.ended for lane in cursor.lanes.values()):
            running.add(cursor.steps - cursor.first)  # of this epoch: ranks may have had more of one before
    if len(running) > 1 and not leased:
        raise _steps_apart(states)
    missing = [number for number in range(lanes) if number not in found]
    if missing and not finished:
        raise apart(
            "flow", f"the states contain {len(found)} of {lanes} lanes. Pass a list with the states of all ranks."
        )
    over = LaneCursor(0, start(node), ended=True)
    last = max(inside, key=lambda cursor: cursor.steps)
    return Cursor(epoch, {**found, **dict.fromkeys(missing, over)}, last.steps, last.first)


def _steps_apart(states: Sequence[Saved]) -> CheckpointMismatchError:
    at = [f"rank {rank}: epoch {one['epoch']}, position {one.cursor.position}" for rank, one in enumerate(states)]
    return apart(
        "position",
        "the ranks were not at the same step when these states were saved "
        f"({'; '.join(at[:4])}{'; …' * (len(at) > 4)}): rows would be lost or repeated. Nothing was changed. Save all "
        "ranks after the same batch. If the state is the same on all ranks, that of one rank restores every rank.",
    )
