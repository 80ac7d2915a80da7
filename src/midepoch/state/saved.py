"""Saving and loading a state: the cursor, and the pipeline with what it adopts from the run that saved it."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.order import Shard
from midepoch.order.budget import Budget, in_words
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor, LaneCursors, PlannedAt
from midepoch.pipeline.excluded import excluded_in, excluded_text
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Node
from midepoch.pipeline.open import check_cursor, is_count, start
from midepoch.pipeline.planned import changed_budget
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.changing import LaneContext
from midepoch.state.done import changed_batches, changed_mix, done_in_lanes, done_of_all, done_text
from midepoch.state.format import (
    CAUSES,
    FIELDS,
    KEY,
    OF_ONE_RANK,
    VERSION,
    apart,
    changes_in,
    check_allow,
    flow_in,
    json_in,
    parse,
)
from midepoch.state.leased import combined
from midepoch.state.matching import CHECKED, Matched

_log = logging.getLogger("midepoch")
_MOST_LANES = 1 << 16
_KEPT = 16
"""Maximum number of changes in a state: the last ones."""
_OF_POSITION = {"epoch", "position", "worker", "round", "batch", "done", "dropped", *OF_ONE_RANK}


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


def save(spec: PipelineSpec, cursor: Cursor) -> dict[str, Any]:
    """Return the state of a pipeline at a cursor."""
    state = {KEY: VERSION, "epoch": cursor.epoch, "position": cursor.position, **spec.identity}
    if not spec.has_positions:
        known = LaneCursors({}) if cursor.lanes is None else cursor.lanes
        lanes = [[lane, at.outputs, int(at.ended), at.cursor] for lane, at in sorted(known.by_lane.items())]
        state |= {
            "flow": json.dumps(lanes, separators=(",", ":")),
            "known": f"{known.known.index}/{known.known.count}",
            "epoch_outputs": spec.epoch_outputs,
            "changes": json.dumps(list(spec.changes)[-_KEPT:]) if spec.changes else "",
        }
        if (budget := spec.node.budget) is not None:
            state["planned"] = json.dumps([0, [[budget.text, 0, 0]]], separators=(",", ":"))
    elif spec.groups:
        state["groups"] = spec.groups
    if cursor.planned is not None:
        state["planned"] = json.dumps([cursor.planned.start, cursor.planned.legs], separators=(",", ":"))
    if cursor.steps:
        state["steps"] = cursor.steps
    if spec.excluded:
        state["excluded"] = excluded_text(spec.excluded)
    if cursor.has_done:
        state["done"] = done_text(cursor)
    if cursor.dropped:
        state["dropped"] = cursor.dropped
    if spec.global_seed is not None:
        state["global_seed"] = spec.global_seed
    return state


def load(state: Any, spec: PipelineSpec, allow: Collection[str] = (), budget: Budget | None = None) -> Resumed:
    """Load a state, or the list of the states of all ranks. ``budget``: that of batches which are planned.

    Raises StateError or CheckpointMismatchError if it does not fit, and changes nothing. Fields in ``allow`` may
    differ: differences are recorded.
    """
    check_allow(allow)
    several = list(state) if isinstance(state, (list, tuple)) else [state]
    if not several:
        raise StateError("the list of the states of all ranks is empty. Pass the state of each rank.")
    parsed = _without_leases([parse(one) for one in several])
    if spec.has_positions:
        first = parsed[_rank_to_load(parsed, spec.shard)]
        done = done_of_all(first, parsed)
    else:
        first = parsed[0]
        free = {"flow", "known", "epoch_outputs", *(("steps",) if any(one["dropped"] for one in parsed) else ())}
        _check_alike(parsed, _OF_POSITION | free, "different runs or steps")
    changes = changes_in(first["changes"])
    matched = Matched(allow, changes)
    node, convert = matched.match(spec.node, _described(first, spec), "")
    if spec.has_positions:
        cursor = _position(first, node, budget, done)
    else:
        cursor = _merged([_lanes(one) for one in parsed], first["lanes"], spec.node, changed=matched.mixed)
        if matched.mixed and (cursor.has_done or first["excluded"]):
            raise changed_mix()
        if cursor.lanes is not None:
            over, lanes = cursor.lanes_ended, {}
            for lane, at in cursor.lanes.by_lane.items():
                inner = _rebudgeted(at.cursor, planned_in(first), node.budget)
                inner = convert(inner, 0, LaneContext(cursor.epoch, Shard(lane, first["lanes"])))
                check_cursor(node, inner)
                # A lane may have outputs left in a changed mix. An epoch that had ended in all lanes stays ended.
                lanes[lane] = replace(at, cursor=inner, ended=at.ended and (over or not matched.mixed))
            cursor = cursor._replace(lanes=replace(cursor.lanes, by_lane=lanes))
    cursor = cursor._replace(steps=min(one["steps"] for one in parsed) if not spec.has_positions else first["steps"])
    adopted = replace(
        spec,
        node=node,
        lanes=first["lanes"],
        lanes_chosen=True,
        groups=first["groups"] or spec.groups,
        changes=tuple(changes[-_KEPT:]),
        excluded=excluded_in(first["excluded"], len(node.leaves)),
        epoch_outputs=max(one["epoch_outputs"] for one in parsed),
        global_seed=spec.global_seed if first["global_seed"] is None else first["global_seed"],
    )
    if spec.has_positions and spec.base.group is not None and first["position"] and not first["groups"]:
        _log.warning(
            "the state is of a version in which batched functions received whole batches. From here on they receive "
            "groups at fixed positions of the epoch: rows are the same, values that depend on the group may differ."
        )
    worker = (first["worker"], first["workers"], first["shards"]) if first["workers"] else None
    shard = _shard(first, spec) if first["shard"] is not None else None
    return Resumed(cursor, adopted, worker, first["round"], first["batch"], shard)


def load_global(state: Any, spec: PipelineSpec, allow: Collection[str] = (), budget: Budget | None = None) -> Resumed:
    """Load a state that is equal on all ranks and workers. ``budget``: that of batches which are planned."""
    resumed = load(state, spec, allow, budget)
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
    if not state:
        raise StateError("the list of the states of all ranks is empty. Pass the state of each rank.")
    parsed = [parse(one) for one in state]
    if any(one["leased"] for one in parsed):
        together = _without_leases(parsed)
        return together[0] if len(together) == 1 else together
    return state[_rank_to_load(parsed, shard)]


def _without_leases(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return states that are equivalent to those of ranks with leases."""
    if not any(one["leased"] for one in found):
        return found
    free = {"leased", "planned", "steps", "flow", "known", "epoch_outputs"}
    _check_alike(found, _OF_POSITION | free, "different runs")
    return [dict(one) for one in combined(found)]


def _described(found: Mapping[str, Any], spec: PipelineSpec) -> dict[str, Any]:
    """Return the description of the pipeline in a state."""
    one_source = isinstance(spec.node.base, Leaf)
    if one_source == bool(found["parts"]) or bool(found["flow"]) == spec.has_positions:
        cause = f"{CAUSES['pipeline']}. Its position means nothing in this pipeline, so the field cannot be allowed"
        raise CheckpointMismatchError("pipeline", found["pipeline"], spec.node.text, cause)
    if found["parts"]:
        described: dict[str, Any] = json_in(found["parts"], dict, "parts")
        return described
    return {name: found[name] for name in ("data", *CHECKED)}


def _position(found: Mapping[str, Any], node: Node, budget: Budget | None, done: Intervals) -> Cursor:
    at = planned_in(found)
    position = found["position"] if at is None else max(found["position"], at.start)
    if position > found["rows"]:
        raise StateError(f"the state is damaged: position {position} of {found['rows']} rows.")
    rows = sum(leaf.rows for leaf in node.leaves)
    if position > rows:
        raise CheckpointMismatchError("rows", found["rows"], rows, f"position {position} is past the end")
    if budget is None:
        if at is not None and at.legs:
            raise CheckpointMismatchError(
                "batches",
                f"in a window of batches by tokens: {in_words(at.legs[-1][0])}",
                "batches of a fixed number of rows",
                "the rows delivered so far are not the first of the epoch. Resume with max_tokens, which may differ, "
                "or save at the end of an epoch",
            )
        position = found["position"] if at is None else at.start
        return Cursor(found["epoch"], position, done=done.before_(rows))
    if done and (at is None or not at.legs or at.legs[-1][0] != budget.text):
        raise changed_batches(done, at, budget)
    if at is None:
        at = PlannedAt(found["position"])
    for text, *_ in at.legs:
        if budget.earlier(text) is None:
            raise changed_budget(text, budget)
    begun = found["position"] or done
    return Cursor(found["epoch"], found["position"], planned=at if begun else None, done=done)


def _rebudgeted(at: Any, planned: PlannedAt | None, budget: Budget | None) -> Any:
    """Return the cursor of a lane for other batches by tokens than those of the state, or for none.

    That is possible where no window of rows is in progress.
    """
    before = None if planned is None else planned.legs[0][0]
    after = None if budget is None else budget.text
    if before == after:
        return at
    if before is None:
        return [at, 0]
    if not (isinstance(at, list) and len(at) == 2 and isinstance(at[1], int)):
        return at  # refused by the check that follows
    if at[1]:
        raise CheckpointMismatchError(
            "batches",
            in_words(before),
            "batches of a number of rows" if budget is None else budget.words,
            "the state is in the middle of a window of rows whose lengths are known only when they are made, so its "
            "batches cannot be formed by another budget. Resume with the same max_tokens, and change it after an epoch",
        )
    return at if budget is not None else at[0]


def planned_in(found: Mapping[str, Any]) -> PlannedAt | None:
    """Return where batches by a budget of tokens are, or None if the state has none."""
    if not found["planned"]:
        return None
    listed = json_in(found["planned"], list, "planned")
    good = len(listed) == 2 and is_count(listed[0]) and isinstance(listed[1], list)
    if good and all(isinstance(leg, list) and len(leg) == 3 for leg in listed[1]):
        legs = tuple((text, done, checksum) for text, done, checksum in listed[1])
        if all(isinstance(text, str) and is_count(done) and is_count(checksum) for text, done, checksum in legs):
            return PlannedAt(listed[0], legs)
    raise StateError(f"the state is damaged: 'planned' is {found['planned']!r:.40}.")


def _shard(found: Mapping[str, Any], spec: PipelineSpec) -> tuple[int, int]:
    shard, here = (found["shard"], found["shards"]), (spec.shard.index, spec.shard.count)
    if shard != here:
        raise CheckpointMismatchError(
            "shard",
            f"shard {shard[0]} of {shard[1]}",
            f"shard {here[0]} of {here[1]}",
            'with on_error="skip", shards that deliver rows one by one skip different rows, so each needs a state of '
            "its own; ds.loader(…) keeps one for all",
        )
    return shard


def _rank_to_load(found: Sequence[Mapping[str, Any]], shard: Shard) -> int:
    """Return the rank whose state is loaded. All must be at the same position."""
    skipping = all(one["shard"] is not None for one in found)  # then each rank has a position of its own
    if not skipping and not _one_position(found):
        raise _steps_apart([Cursor(one["epoch"], one["position"]) for one in found])
    _check_alike(found, _OF_POSITION | ({"shard"} if skipping else set()), "different runs")
    if skipping:
        return next((rank for rank, one in enumerate(found) if one["shard"] == shard.index), 0)
    return max(range(len(found)), key=lambda rank: (found[rank]["epoch"], found[rank]["position"]))


def _one_position(found: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if states are at one position. The end of an epoch equals the beginning of the next."""
    positions = {(one["epoch"], one["position"]) for one in found}
    ends = {(one["epoch"] + 1, 0) if _is_at_end(one) else (one["epoch"], one["position"]) for one in found}
    return len(positions) == 1 or len(ends) == 1


def _is_at_end(one: Mapping[str, Any]) -> bool:
    at = planned_in(one)
    return bool((one["position"] if at is None else at.start) == one["rows"])


def _lanes(found: Mapping[str, Any]) -> Cursor:
    """Return the cursor that a state has in its lanes."""
    if found["lanes"] > _MOST_LANES:
        raise StateError(f"the state is damaged: 'lanes' is {found['lanes']}.")
    lanes: dict[int, LaneCursor] = {}
    done = done_in_lanes(found["done"])
    for entry in flow_in(found["flow"]):
        if entry[0] >= found["lanes"] or entry[0] in lanes:
            raise StateError(f"the state is damaged: lane {entry[0]} of {found['lanes']}.")
        left = done.pop(entry[0], EMPTY).from_(entry[1])
        lanes[entry[0]] = LaneCursor(entry[1], bool(entry[2]), entry[3], left)
    if done:
        raise StateError(f"the state is damaged: 'done' has lane {min(done)}, which 'flow' has not.")
    index, _, count = found["known"].partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise StateError(f"the state is damaged: 'known' is {found['known']!r:.40}.")
    known = Shard(int(index), int(count))
    if not lanes and found["position"]:
        raise StateError(f"the state is damaged: position {found['position']} of no lane.")
    if lanes and set(lanes) != set(known.positions(0, found["lanes"]).tolist()):
        raise StateError("the state is damaged: its lanes are not those that it names.")
    at = LaneCursors(lanes, known) if lanes else None
    return Cursor(found["epoch"], found["position"], at, dropped=found["dropped"])


def _check_alike(found: Sequence[Mapping[str, Any]], free: set[str], what: str) -> None:
    for rank, one in enumerate(found):
        for name in sorted(FIELDS - free):
            if one[name] != found[0][name]:
                raise apart(
                    name,
                    f"the list contains states of {what}: {name} is {found[0][name]!r} on rank 0 and {one[name]!r} on "
                    f"rank {rank}. Nothing was changed.",
                )


def _merged(cursors: Sequence[Cursor], lanes: int, node: Node, *, changed: bool) -> Cursor:
    """Return the cursor with the lanes of all ranks together. They must have been at the same step."""
    epoch = min(cursor.epoch for cursor in cursors)
    if changed and len({(cursor.epoch, cursor.lanes_ended) for cursor in cursors}) > 1:
        raise apart(
            "parts",
            "some ranks had finished the epoch when these states were saved, others had not: a mix can be changed "
            "only if all or none have. Nothing was changed.",
        )
    if len(cursors) == 1 or not any(cursor.lanes for cursor in cursors):
        if any(cursor.epoch != epoch for cursor in cursors):
            raise _steps_apart(cursors)
        return cursors[0]
    # Ranks that finished the epoch before others (last_batch="uneven") are at the beginning of the next.
    inside = [cursor for cursor in cursors if cursor.epoch == epoch and cursor.lanes is not None]
    finished = [cursor for cursor in cursors if cursor.epoch == epoch + 1 and cursor.lanes is None]
    if len(inside) + len(finished) < len(cursors):
        raise _steps_apart(cursors)
    found: dict[int, LaneCursor] = {}
    running: set[int] = set()
    for cursor in inside:
        assert cursor.lanes is not None
        for lane, at in cursor.lanes.by_lane.items():
            before = found.get(lane, at)
            if before.outputs != at.outputs:
                raise _steps_apart(cursors)
            noticed = before if before.ended else at  # possibly only one of the ranks has noticed the end
            found[lane] = replace(noticed, done=before.done.union(at.done)) if before.done or at.done else noticed
        if not any(at.ended for at in cursor.lanes.by_lane.values()):
            running.add(cursor.position - cursor.dropped)
    if len(running) > 1:
        raise _steps_apart(cursors)
    missing = [lane for lane in range(lanes) if lane not in found]
    if missing and not finished:
        raise apart(
            "flow", f"the states contain {len(found)} of {lanes} lanes. Pass a list with the states of all ranks."
        )
    over = LaneCursor(0, True, start(node))
    position = max(cursor.position for cursor in inside)
    return Cursor(epoch, position, LaneCursors({**found, **dict.fromkeys(missing, over)}))


def _steps_apart(cursors: Sequence[Cursor]) -> CheckpointMismatchError:
    at = [f"rank {rank}: epoch {cursor.epoch}, position {cursor.position}" for rank, cursor in enumerate(cursors)]
    return apart(
        "position",
        "the ranks were not at the same step when these states were saved "
        f"({'; '.join(at[:4])}{'; …' * (len(at) > 4)}): rows would be lost or repeated. Nothing was changed. Save all "
        "ranks after the same batch. If the state is the same on all ranks, that of one rank restores every rank.",
    )
