"""Matching the parts of a saved flow with those of a current one, and recording the differences."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from midepoch.errors import CheckpointMismatchError
from midepoch.order import Shuffle, Weighted
from midepoch.order.shuffle import SCOPES
from midepoch.pipeline.cursor import ConcatAt, FlowAt, ZipAt
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Concat, Mix, Node, Zip
from midepoch.pipeline.spec import DEFAULTS, describe
from midepoch.state import format as states
from midepoch.state.changing import (
    Convert,
    Found,
    LaneContext,
    changed_mix,
    changed_schedule,
    learned_in,
    learned_with,
    refused,
    saved_mix,
    through,
)

_log = logging.getLogger("midepoch")
CHECKED = ("rows", "selection", "scope", "aligned", "weights", "seed", "window", "pipeline", "arguments")


def taken_over(leaf: Leaf, saved: Mapping[str, Any], allow: Collection[str] = ()) -> Leaf:
    """Return the leaf with the state's values for those settings of its shuffle that were not given.

    Defaults depend on the access to the data and on the size of the cache, both of which may change between runs.
    """
    shuffle, scope = leaf.order.shuffle, saved["scope"]
    if isinstance(shuffle, Weighted):
        adopts = leaf.seed_drawn and "seed" not in allow and isinstance(saved["seed"], int)
        return replace(leaf, order=replace(leaf.order, shuffle=shuffle.seeded(saved["seed"]))) if adopts else leaf
    if shuffle is None or scope not in SCOPES or (scope != shuffle.scope and "scope" not in leaf.defaults):
        return leaf
    window, seed = shuffle.window, shuffle.seed
    if scope == "window" and "window" in leaf.defaults and saved["window"]:
        window = saved["window"]
    if leaf.seed_drawn and "seed" not in allow and isinstance(saved["seed"], int):
        seed = saved["seed"]
    try:
        shuffle = Shuffle(seed, scope, window, saved["aligned"] is True)
    except (TypeError, ValueError):  # damaged: refused by the comparison that follows
        return leaf
    return replace(leaf, order=replace(leaf.order, shuffle=shuffle))


class Matched:
    """Comparison of a saved flow with a current one. ``changes``: the differences that were allowed."""

    def __init__(self, allow: Collection[str], changes: list[str]) -> None:
        self._allow, self._changes = allow, changes
        self.mixed = False
        """True if a mix was changed."""

    def match(self, spec: Node, saved: Any, where: str) -> tuple[Node, Convert]:
        """Return the spec with adopted drawn seeds, and the conversion of its cursors."""
        base, here = spec.base, describe(spec)
        if not isinstance(saved, Mapping) or ("parts" in saved) == isinstance(base, Leaf):
            text = saved.get("pipeline") if isinstance(saved, Mapping) else saved
            raise mismatch("pipeline", text, spec.text, where)
        if isinstance(base, Leaf):
            return self._pipeline(spec, base, saved, where), lambda at, *_: at
        self._check("pipeline", saved.get("pipeline"), here["pipeline"], where)
        self._check("arguments", saved.get("arguments"), here.get("arguments"), where)
        parts = saved["parts"]
        if not isinstance(parts, list) or not all(isinstance(one, Mapping) for one in parts):
            raise mismatch("parts", repr(parts)[:60], len(base.parts), where)
        if isinstance(base, Mix):
            new, convert = self._mix(spec, base, saved, parts, where)
        else:
            new, convert = self._several(spec, base, parts, where)
        return new, lambda at, need, of: through(spec, at, need, of, convert)

    def _pipeline(self, spec: Node, base: Leaf, saved: Mapping[str, Any], where: str) -> Node:
        base = taken_over(base, {**DEFAULTS, **saved}, self._allow)
        here = describe(replace(spec, base=base))
        differs = all(saved.get(name) != here.get(name) and name not in self._allow for name in ("data", "rows"))
        if differs and not _other_snapshot(str(saved.get("data")), str(here["data"])):
            raise CheckpointMismatchError(
                f"{where}data",
                f"{saved.get('rows')} rows",
                f"{here.get('rows')} rows",
                "files were added or removed since it was saved, or it is the state of another loader; of "
                "from_map_style: the length has changed. Open the same files, as a list of paths; new ones can be "
                "another source of a mix",
            )
        for name in ("data", *CHECKED):
            default = DEFAULTS.get(name)
            self._check(name, saved.get(name, default), here.get(name, default), where)
        return replace(spec, base=replace(base, seed_agreed=True))

    def _several(self, spec: Node, base: Concat | Zip, parts: Sequence[Any], where: str) -> tuple[Node, Convert]:
        if len(parts) != len(base.parts):
            raise mismatch("parts", len(parts), len(base.parts), where)
        both = [
            self.match(part, one, f"{where}source {number}: ")
            for number, (part, one) in enumerate(zip(base.parts, parts, strict=True))
        ]
        converts = [convert for _, convert in both]

        def convert(at: FlowAt, need: int | None, of: LaneContext) -> FlowAt:
            if self.mixed and (need is None or need > 1):
                raise refused("another mix", "inside of a zip or concat", where)  # it may affect the next outputs
            of = replace(of, inside=True)
            if isinstance(at, ZipAt) and len(at.parts) == len(converts):
                return ZipAt(tuple(one(inner, need, of) for one, inner in zip(converts, at.parts, strict=True)))
            if isinstance(at, ConcatAt) and at.number < len(converts):
                return ConcatAt(at.number, converts[at.number](at.at, need, of))
            return at  # refused by the check that follows

        return replace(spec, base=replace(base, parts=tuple(part for part, _ in both))), convert

    def _mix(
        self, spec: Node, base: Mix, saved: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], where: str
    ) -> tuple[Node, Convert]:
        same = _same_parts(base, saved, parts, where)
        found: list[Found] = []
        for number, (part, old) in enumerate(zip(base.parts, same, strict=True)):
            if old is None:
                found.append(Found(part, None, lambda at, *_: at))
                continue
            name = repr(base.names[number]) if base.names else number
            adopted, convert = self.match(part, parts[old], f"{where}source {name}: ")
            found.append(Found(adopted, old, convert))
        before, now = saved.get("weights"), list(base.weights)
        kept = same == list(range(len(parts)))
        base = replace(base, parts=tuple(one.spec for one in found))
        if base.schedule is not None:
            return self._scheduled(spec, base, saved, found, kept, where)
        learned, changed = learned_in(saved, len(parts)), before != now or not kept
        weights = before if isinstance(before, list) and len(before) == len(parts) else None
        weights = weights if learned is None else list(learned.weights)
        if changed:
            self._note_mix(weights, now, same, len(parts), where)
        else:
            base = replace(base, learned=learned)
        return replace(spec, base=base), lambda at, need, of: changed_mix(
            base, found, weights, changed, at, need, of, where
        )

    def _scheduled(
        self, spec: Node, base: Mix, saved: Mapping[str, Any], found: Sequence[Found], kept: bool, where: str
    ) -> tuple[Node, Convert]:
        """Match a mix by a schedule. What is to come may change, also in the middle of a phase."""
        assert base.schedule is not None
        before = saved_mix(base, saved)
        if before is None or before.schedule is None:
            raise mismatch("schedule", saved.get("schedule"), base.schedule.text, where)
        is_same = kept and before.schedule.text == base.schedule.text
        if kept:
            base = replace(base, learned=learned_with(base.schedule, before))
        if not is_same:
            change = f"{where}mix: the schedule was changed" + ("" if kept else ", and its sources")
            self._changes.append(change)
            self.mixed = True
            _log.warning(
                "the state is resumed with another mix: %s. If that is not intended, use the schedule of the state.",
                change,
            )
        return replace(spec, base=base), lambda at, need, of: changed_schedule(base, before, found, at, need, of, where)

    def _note_mix(self, before: Any, now: Any, same: Sequence[int | None], count: int, where: str) -> None:
        left = [i for i in range(count) if i not in same]
        joined = [i for i, old in enumerate(same) if old is None]
        if len(left) == count or (set(left) & set(joined) and "data" not in self._allow):
            raise mismatch(
                "data",
                f"sources {left}",
                f"sources {joined} in their place",
                where,
                "a source of the mix replaces another, and would start at its beginning",
            )
        moved = [old for old in same if old is not None]
        text = f"{where}mix: weights {before} became {now}"
        text += f"; sources {left} left" if left else ""
        text += f"; sources {joined} joined" if joined else ""
        text += f"; sources {moved} in this order" if moved != sorted(moved) else ""
        self._changes.append(text[:200])
        self.mixed = True
        hint = ". Their position is not kept; a weight of 0 would keep it" if left else ""
        _log.warning("the state is resumed with another mix: %s%s", text, hint)

    def _check(self, name: str, saved: Any, here: Any, where: str) -> None:
        if saved == here or (name == "arguments" and not states.comparable(saved, here, self._allow)):
            return
        if name == "pipeline" and _stages_in(saved) != _stages_in(here):
            raise CheckpointMismatchError(f"{where}pipeline", saved, here, _cause_of(saved, here))
        if name not in self._allow:
            raise mismatch(name, saved, here, where)
        self._changes.append(f"{where}{name}: {saved!r} became {here!r}"[:200])


def _stages_in(text: Any) -> list[str]:
    """Return the kinds of the stages of a pipeline that have cursors of their own."""
    stages = []
    for step in str(text).split(","):
        kind, _, rest = step.partition("[")
        if kind == "mix" and rest.startswith("schedule "):
            stages.append(f"mix {rest.split()[:2]}")  # its cursor counts rows or tokens
        elif kind in ("batch", "shuffle", "take", "skip", "mix", "concat", "zip"):
            stages.append(kind)
        elif kind == "pack":
            stages.append(f"pack {rest.split()[1:2]}")
    return stages


def _cause_of(saved: Any, here: Any) -> str:
    """Return the cause of a difference in stages that have cursors of their own."""
    mixes = [[stage for stage in _stages_in(text) if stage.startswith("mix")] for text in (saved, here)]
    if mixes[0] != mixes[1] and all(mixes):
        return (
            "a mix has plain weights, or a schedule in rows or in tokens, and that was changed. Each counts its "
            "position in another unit. This cannot be allowed"
        )
    return "the stages have changed, so the cursor does not apply. This cannot be allowed"


def leaf_numbers(node: Node, saved: Any) -> list[int | None]:
    """Return for each leaf of a flow its number in a saved flow that matches, or None if it is not there."""
    base = node.base
    if isinstance(base, Leaf):
        return [0]
    parts = saved["parts"]
    firsts = list(accumulate((count_leaves(part) for part in parts), initial=0))
    same = _same_parts(base, saved, parts, "") if isinstance(base, Mix) else list(range(len(parts)))
    found: list[int | None] = []
    for part, old in zip(base.parts, same, strict=True):
        inner = [None] * len(part.leaves) if old is None else leaf_numbers(part, parts[old])
        found += [None if old is None or number is None else firsts[old] + number for number in inner]
    return found


def count_leaves(saved: Any) -> int:
    """Return the number of leaves of a saved flow."""
    return sum(map(count_leaves, saved["parts"])) if "parts" in saved else 1


def _same_parts(
    base: Mix, saved: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], where: str
) -> list[int | None]:
    """Return the saved part that corresponds to each part of a mix: by name, else by description, else by data."""
    names, matches = saved.get("names"), dict[int, int]()
    compares_arguments = any(map(_has_arguments, parts))  # older states lack it
    if base.names and isinstance(names, list) and len(names) == len(parts):
        matches = {number: names.index(name) for number, name in enumerate(base.names) if name in names}
    alike: dict[tuple[str, bool], list[int]] = {}  # parts with a new name: possibly just renamed
    for number, part in enumerate(base.parts):
        if number not in matches:
            drawn = any(leaf.seed_drawn for leaf in part.leaves)
            described = describe(part) if compares_arguments else _without(describe(part), "arguments")
            alike.setdefault((_key(described, drawn), drawn), []).append(number)
    for (key, drawn), current in alike.items():
        candidates = [i for i, one in enumerate(parts) if i not in matches.values() and _key(one, drawn) == key]
        if candidates and len(current) != len(candidates):
            raise mismatch(
                "parts",
                f"{len(candidates)} sources that look the same",
                f"{len(current)} of them, in unknown order: name the sources, mix({{'web': a, 'code': b}})",
                where,
            )
        matches.update(zip(current, candidates, strict=False))
    for number, part in enumerate(base.parts):
        if number not in matches:
            data = _data_of(describe(part))
            same = (i for i, one in enumerate(parts) if i not in matches.values() and _data_of(one) == data)
            matches.update({number: first} if (first := next(same, None)) is not None else {})
    return [matches.get(number) for number in range(len(base.parts))]


def _key(described: Mapping[str, Any], drawn: bool) -> str:
    """Return the description of a part as text, without its seeds if they were drawn."""
    return json.dumps(_without(described, "seed") if drawn else described, sort_keys=True)


def _without(described: Mapping[str, Any], field: str) -> dict[str, Any]:
    fields = {name: value for name, value in described.items() if name != field}
    if isinstance(fields.get("parts"), list):
        fields["parts"] = [_without(one, field) if isinstance(one, Mapping) else one for one in fields["parts"]]
    return fields


def _has_arguments(described: Mapping[str, Any]) -> bool:
    parts = described.get("parts")
    inner = parts if isinstance(parts, list) else []
    return "arguments" in described or any(isinstance(one, Mapping) and _has_arguments(one) for one in inner)


def _data_of(described: Mapping[str, Any]) -> Any:
    """Return the data of a described part."""
    if isinstance(described.get("parts"), list):
        return [_data_of(part) if isinstance(part, Mapping) else part for part in described["parts"]]
    return [described.get("data"), described.get("rows"), described.get("selection", "")]


def mismatch(name: str, saved: Any, here: Any, where: str = "", cause: str = "") -> CheckpointMismatchError:
    if name == "data" and not cause:
        cause = _other_snapshot(str(saved), str(here))
    cause = cause or states.CAUSES.get(name, "the pipeline has changed since it was saved")
    if name in states.CAUSES:
        cause += f"; allow=[{name!r}] loads it anyway"
    problem = CheckpointMismatchError(f"{where}{name}", saved, here, cause)
    problem.field = name
    return problem


def _other_snapshot(saved: str, here: str) -> str:
    """Return the cause of a difference between two snapshots of a table, and the call that opens the saved one."""
    (_, *old), (_, *new) = saved.split(" "), here.split(" ")
    if len(old) != 2 or old == new or old[0] not in _SNAPSHOTS:
        return ""
    function, argument, noun = _SNAPSHOTS[old[0]]
    now = f"{noun} {new[1]} is open" if len(new) == 2 and new[0] == old[0] else "other data is open"
    return f"it was saved with {noun} {old[1]} of a table, and {now}. Open it with {function}(…, {argument}={old[1]})"


_SNAPSHOTS = {
    "delta": ("from_delta", "version", "version"),
    "iceberg": ("from_iceberg", "snapshot_id", "snapshot"),
    "lance": ("from_lance", "version", "version"),
}
"""Functions that open tables, by the name of the format in a fingerprint."""
