"""Saving and loading a state: the cursor, and the pipeline with what it adopts from the run that saved it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Shard
from midepoch.order.budget import in_words
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor, StageAt, WindowAt
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Node
from midepoch.pipeline.planned import PlannedEpoch, Planning, changed_budget, window_at
from midepoch.pipeline.reach import check_cursor, start
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.changing import LaneContext
from midepoch.state.format import (
    CAUSES,
    FIELDS,
    KEY,
    OF_ONE_RANK,
    VERSION,
    Saved,
    apart,
    check_allow,
    cursor_to_json,
    excluded_from_json,
    parse,
    parts_from_json,
    parts_to_json,
    unreadable,
)
from midepoch.state.matching import CHECKED, Matched, count_leaves, leaf_numbers

OF_POSITION = {"epoch", "position", "first", "cursor", "worker", "round", "batch", "leased", "branches", *OF_ONE_RANK}


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
    before_last = None if skipping or _at_one_position(states) else _before_the_last_step(states)
    check_alike(states, OF_POSITION | {"steps"} | ({"shard"} if skipping else set()), "different runs")
    if skipping:
        return next((rank for rank, one in enumerate(states) if one["shard"] == shard.index), 0)
    if before_last is not None:
        return before_last
    return max(range(len(states)), key=lambda rank: (states[rank]["epoch"], states[rank].cursor.position))


def _at_one_position(states: Sequence[Saved]) -> bool:
    """Return True if states are at one position. The end of an epoch equals the beginning of the next."""
    places = {(one["epoch"], one.cursor.position) for one in states}
    ends = {
        (one["epoch"] + 1, 0) if one.rows_before == one["rows"] else (one["epoch"], one.cursor.position)
        for one in states
    }
    return len(places) == 1 or len(ends) == 1


def _before_the_last_step(states: Sequence[Saved]) -> int:
    """Return the first rank that is before the last step of an epoch, if all others are there, or have no row of it.

    The rows of a step are dealt from rank 0 on. A rank that has none of the last ones (``last_batch="uneven"``) is at
    the end of the epoch when it leaves its loop.
    """
    places = [(one["epoch"], one.cursor.position) for one in states]
    earliest = min(range(len(states)), key=places.__getitem__)
    (epoch, position), rows = places[earliest], states[earliest]["rows"]
    for rank, (one, place) in enumerate(zip(states, places, strict=True)):
        is_over = place in ((epoch, rows), (epoch + 1, 0)) and rank >= rows - position
        if one["budget"] or not (is_over or place == (epoch, position)):
            raise _steps_apart(states)
    return earliest


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
    turns = {rank: _turn(one, spec, len(states)) for rank, one in there.items()}
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


def _turn(state: Saved, spec: PipelineSpec, ranks: int) -> int:
    """Return the number of the first unit that a rank has not acknowledged, as its plan counts them."""
    if state.leased is not None:
        return state.leased.turn
    lane = state.cursor.lane
    first = lane.taken if state["budget"] else spec.undelivered(state["epoch"], lane).after(lane.taken)
    return first if state["budget"] else first - first % ranks


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


_KEPT = 16
"""Maximum number of changes in a state: the last ones."""


@dataclass(frozen=True)
class Resumed:
    """The contents of a state: the cursor, and the pipeline with what it adopts from the run that saved it."""

    cursor: Cursor
    spec: PipelineSpec
    worker: tuple[int, int, int] | None = None
    """(worker, workers, shards) of a state kept by one DataLoader worker."""
    round: int = 0
    batch: int = 0
    shard: tuple[int, int] | None = None
    """(shard, shards) of a state that is valid for one shard only."""


def save(
    spec: PipelineSpec, cursor: Cursor, budget: str = "", leased: Sequence[Any] = (), branches: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the state of a pipeline at a cursor.

    ``budget``: that of batches by tokens, if it counts them. ``leased``: what one of several ranks has acknowledged.
    ``branches``: of the run, by its ledger.
    """
    state = {
        KEY: VERSION,
        "epoch": cursor.epoch,
        "position": cursor.position,
        "steps": cursor.steps,
        "first": cursor.first,
        "unit": spec.unit,
        "cursor": cursor_to_json(cursor),
        **spec.identity,
    }
    if "parts" in state:
        state["parts"] = parts_to_json(state["parts"])
    if spec.node.budget is not None:
        budget = spec.node.budget.text
    more = {
        "budget": budget,
        "changes": list(spec.changes[-_KEPT:]),
        "excluded": [list(pair) for pair in spec.excluded_texts],
        "groups": spec.groups,
        "epoch_outputs": spec.epoch_outputs,
        "leased": leased,
        "branches": ",".join(branches),
    }
    state["more"] = [[name, value] for name, value in more.items() if value]
    if spec.global_seed is not None:
        state["more"].append(["global_seed", spec.global_seed])
    return state


def load(state: Any, spec: PipelineSpec, allow: Collection[str] = (), planning: Planning | None = None) -> Resumed:
    """Load a state, or the list of the states of all ranks. ``planning``: of batches by tokens, if they are planned.

    Raises StateError or CheckpointMismatchError if it does not fit, and changes nothing. Fields in ``allow`` may
    differ: differences are recorded.
    """
    check_allow(allow)
    states = _states(state)
    one = states[0]
    if spec.unit == "rows" and not any(each.leased for each in states):
        one = states[rank_to_load(states, spec.shard)]
    changes = [str(change) for change in one["changes"]]
    matched = Matched(allow, changes)
    described = _described(one, spec)
    node, convert = matched.match(spec.node, described, "")
    numbers = leaf_numbers(spec.node, described) if matched.mixed else list(range(len(node.leaves)))
    excluded = excluded_from_json(one["excluded"], count_leaves(described))
    if excluded:  # rows stay excluded wherever their source is now
        excluded = tuple(EMPTY if number is None else excluded[number] for number in numbers)
    adopted = replace(
        spec,
        node=node,
        lanes=one["lanes"],
        lanes_chosen=True,
        groups=one["groups"] or spec.groups,
        changes=tuple(changes[-_KEPT:]),
        excluded=excluded,
        epoch_outputs=max(each["epoch_outputs"] for each in states),
        origins=tuple(dict.fromkeys(name for each in states for name in each["branches"].split(",") if name)),
        global_seed=spec.global_seed if one["global_seed"] is None else one["global_seed"],
    )
    if one.in_lanes:
        cursor = lanes_of_all(states, one["lanes"], node, changed=matched.mixed)
        _check_units(cursor, one["budget"], adopted, mixed=matched.mixed, moved=numbers != list(range(len(numbers))))
        over, lanes = cursor.lanes_ended, {}
        for number, lane in cursor.lanes.items():
            at = convert(_rebudgeted(lane.at, one["budget"], adopted), 0, _context(cursor, number, one["lanes"]))
            check_cursor(node, at)
            # A lane may have outputs left in a changed mix. An epoch that had ended in all lanes stays ended.
            lanes[number] = replace(lane, at=at, ended=lane.ended and (over or not matched.mixed))
        cursor = cursor._replace(lanes=lanes)
    else:
        cursor = _in_unit(position_of_all(states, adopted), one, adopted, planning)
    worker = (one["worker"], one["workers"], one["shards"]) if one["workers"] else None
    shard = _shard(one, spec) if one["shard"] is not None else None
    return Resumed(cursor, adopted, worker, one["round"], one["batch"], shard)


def load_global(
    state: Any, spec: PipelineSpec, allow: Collection[str] = (), planning: Planning | None = None
) -> Resumed:
    """Load a state that is equal on all ranks and workers."""
    resumed = load(state, spec, allow, planning)
    if resumed.worker is not None:
        worker = f"worker {resumed.worker[0]} of {resumed.worker[1]}"
        raise CheckpointMismatchError("worker", worker, None, "a state of one DataLoader worker")
    if resumed.shard is not None:
        shard = f"shard {resumed.shard[0]} of {resumed.shard[1]}"
        cause = 'a state of rows delivered one by one under on_error="skip", where each shard has its own position'
        raise CheckpointMismatchError("shard", shard, None, cause)
    return resumed


def one_of(state: Any, shard: Shard) -> Any:
    """Return a state, or from a list of the states of all ranks the one to load on this rank.

    Raises CheckpointMismatchError if the ranks were not at the same position.
    """
    if not isinstance(state, (list, tuple)):
        return state
    states = _states(state)
    if any(one.leased for one in states):
        return state
    return states[rank_to_load(states, shard)].raw


def _states(state: Any) -> list[Saved]:
    states = [parse(one) for one in (state if isinstance(state, (list, tuple)) else [state])]
    if not states:
        raise StateError("the list of the states of all ranks is empty. Pass the state of each rank.")
    keepers = [one for one in states if not one.context_rank]
    if not keepers:
        raise CheckpointMismatchError(
            "leased",
            f"the state of rank {states[0].context_rank} of context_parallel",
            "none of the first",
            "with leases, the acknowledgements of the first rank of a sequence count for all of its ranks. Load the "
            "state of that rank on all of them, or the list of the states of all ranks",
        )
    return keepers


def _context(cursor: Cursor, lane: int, lanes: int) -> LaneContext:
    return LaneContext(cursor.epoch, Shard(lane, lanes))


def _described(saved: Saved, spec: PipelineSpec) -> Mapping[str, Any]:
    """Return the description of the pipeline in a state."""
    one_source = isinstance(spec.node.base, Leaf)
    if one_source == bool(saved["parts"]) or saved["unit"] != spec.unit:
        cause = f"{CAUSES['pipeline']}. Its position means nothing in this pipeline, so the field cannot be allowed"
        raise CheckpointMismatchError("pipeline", saved["pipeline"], spec.node.text, cause)
    if saved["parts"]:
        return parts_from_json(saved["parts"])
    return {name: saved[name] for name in ("data", *CHECKED)}


def _in_unit(cursor: Cursor, saved: Saved, spec: PipelineSpec, planning: Planning | None) -> Cursor:
    """Return the cursor of a state, which counts rows or batches by tokens, in the unit of this loader.

    A cursor in batches is converted to the exact rows that it means. Raises CheckpointMismatchError if their lengths
    are not known here.
    """
    lane, before, here = cursor.lane, saved["budget"], "" if planning is None else planning.budget.text
    rows, reached = spec.rows, saved.rows_before
    if (lane.at is not None) != bool(before and cursor.lanes) or reached > saved["rows"]:
        raise unreadable(f"position {reached} of {saved['rows']} rows")
    if reached > rows:
        raise CheckpointMismatchError("rows", saved["rows"], rows, f"position {reached} is past the end")
    if before != here and before:
        lane = _in_rows(cursor.epoch, lane, before, spec, planning)
    if before != here and here and (lane.taken or lane.done):
        lane = LaneCursor(0, WindowAt(lane))
    if not here:
        lane = replace(lane, excluded=lane.excluded.before_(rows), ahead=lane.ahead.before_(rows))
    return Cursor.at_row(cursor.epoch, lane, cursor.steps, cursor.first)


def _in_rows(epoch: int, lane: LaneCursor, before: str, spec: PipelineSpec, planning: Planning | None) -> LaneCursor:
    at = window_at(lane)
    if lane.taken == at.first and not lane.done:
        return at.rows
    if planning is None:
        raise CheckpointMismatchError(
            "batches",
            f"in a window of batches by tokens: {in_words(before)}",
            "batches of a fixed number of rows",
            "the rows delivered so far are not the first of the epoch, and follow from lengths that this loader does "
            "not know. Resume with max_tokens, which may differ, or save at the end of an epoch",
        )
    budget = planning.budget.earlier(before)
    if budget is None:
        raise changed_budget(before, planning.budget)
    planning, excluded = replace(planning, budget=budget), spec.excluded_positions(epoch)
    return PlannedEpoch(spec.leaf.order, spec.source.layout, planning, epoch, at, excluded).in_rows(lane)


def _check_units(cursor: Cursor, before: str, spec: PipelineSpec, *, mixed: bool, moved: bool) -> None:
    """Raise CheckpointMismatchError if outputs after the position are done that would be others here.

    ``moved``: sources have other numbers, by which lanes know the excluded rows that outputs in progress have.
    """
    if not cursor.has_done and not (moved and any(lane.spared for lane in cursor.lanes.values())):
        return
    here = "" if spec.node.budget is None else spec.node.budget.text
    if before != here:
        words = [in_words(text) if text else "batches of a number of rows" for text in (before, here)]
        raise CheckpointMismatchError(
            "batches",
            words[0],
            words[1],
            "outputs after the position are excluded or acknowledged. They are known by their numbers, and lengths are "
            "known only when rows are made. Resume as before until they are passed, and change it then",
        )
    if mixed:
        raise CheckpointMismatchError(
            "done",
            "steps after the position are excluded or acknowledged, or rows were just excluded",
            "another mix",
            "other weights or sources would give them other rows. Resume with the same mix, and change it some steps "
            "later",
        )


def _rebudgeted(at: Any, before: str, spec: PipelineSpec) -> Any:
    """Return the cursor of a lane for other batches by tokens than those of the state, or for none.

    That is possible where no window of rows is in progress.
    """
    budget = spec.node.budget
    after = "" if budget is None else budget.text
    if before == after:
        return at
    if not before:
        return StageAt(at, 0, 0)
    if not isinstance(at, StageAt):
        return at  # refused by the check that follows
    if at.delivered:
        raise CheckpointMismatchError(
            "batches",
            in_words(before),
            "batches of a number of rows" if budget is None else budget.words,
            "the state is in the middle of a window of rows whose lengths are known only when they are made, so its "
            "batches cannot be formed by another budget. Resume with the same max_tokens, and change it after an epoch",
        )
    return at if budget is not None else at.before


def _shard(saved: Saved, spec: PipelineSpec) -> tuple[int, int]:
    shard, here = (saved["shard"], saved["shards"]), (spec.shard.index, spec.shard.count)
    if shard != here:
        raise CheckpointMismatchError(
            "shard",
            f"shard {shard[0]} of {shard[1]}",
            f"shard {here[0]} of {here[1]}",
            'with on_error="skip", shards that deliver rows one by one skip different rows, so each needs a state of '
            "its own; ds.loader(…) keeps one for all",
        )
    return shard
