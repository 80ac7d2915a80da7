"""The state of a flow: where its lanes stand and what they belong to, as the same flat dict that other states are.

``flow``  (text, JSON): [[lane, outputs, ended, cursor], …]
``known`` (text): which lanes those are, "index/count"
``parts`` (text, JSON): of flows of several sources, what each was
``epoch_outputs``: how many outputs the last epoch had that was gone through
``changes`` (text, JSON): what was allowed to change, or was changed in a mix, since the run began
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midepoch import state as states
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.flow.chunk import At
from midepoch.flow.lanes import LaneAt, Place
from midepoch.flow.open import check_cursor, start
from midepoch.flow.spec import Mix, Spec, Zip
from midepoch.order import Cut
from midepoch.pipeline import Pipeline

_log = logging.getLogger("midepoch")

_CHECKED = ("rows", "selection", "scope", "aligned", "seed", "window", "pipeline")
_KEPT = 16
"""Changes that are kept in the state: the last ones."""


@dataclass(frozen=True)
class Restored:
    """What a state of a flow says: where to go on, as what, and what is recorded in it."""

    place: Place
    spec: Spec
    lanes: int
    epoch_outputs: int
    changes: tuple[str, ...]
    worker: tuple[int, int, int] | None
    round: int = 0
    batch: int = 0


def identity(spec: Spec, lanes: int) -> dict[str, Any]:
    """The fields by which a state knows what it belongs to."""
    if isinstance(spec.base, Pipeline):
        return {**states.identity(spec.base), "lanes": lanes, "pipeline": spec.text}
    return {
        "data": spec.digest,
        "rows": sum(leaf.rows for leaf in spec.leaves),
        "selection": "",
        "scope": "none",
        "seed": None,
        "window": None,
        "lanes": lanes,
        "aligned": False,
        "pipeline": spec.text,
        "parts": json.dumps(_describe(spec), separators=(",", ":")),
    }


def save(belongs: Mapping[str, Any], place: Place, epoch_outputs: int, changes: Sequence[str]) -> dict[str, Any]:
    """The state of a flow (by its ``identity``) at a place."""
    lanes = [[lane, at.outputs, int(at.ended), at.cursor] for lane, at in sorted(place.lanes.items())]
    return {
        states.KEY: states.VERSION,
        "epoch": place.epoch,
        "position": place.position,
        **belongs,
        "flow": json.dumps(lanes, separators=(",", ":")),
        "known": f"{place.known.index}/{place.known.count}",
        "epoch_outputs": epoch_outputs,
        "changes": json.dumps(list(changes)[-_KEPT:]) if changes else "",
    }


def _describe(spec: Spec) -> dict[str, Any]:
    base = spec.base
    if isinstance(base, Pipeline):
        found = states.identity(base)
        plain = {"selection": "", "scope": "none", "seed": None, "window": None, "aligned": False}
        return {name: value for name, value in {**found, "pipeline": spec.text}.items() if value != plain.get(name, ...)}
    weights = {"weights": list(base.weights)} if isinstance(base, Mix) else {}
    return {"pipeline": spec.text, **weights, "parts": [_describe(part) for part in base.parts]}


def _data_of(described: Mapping[str, Any]) -> Any:
    """What data a described part is of: by which it is known again."""
    if "parts" in described:
        return [_data_of(part) for part in described["parts"]]
    return [described.get("data"), described.get("rows"), described.get("selection", "")]


def load(state: Any, spec: Spec, allow: Collection[str] = ()) -> Restored:
    """Read and check a state, or the list of those of all ranks. Raises, and changes nothing, if it does not fit."""
    check_allow(allow)
    several = list(state) if isinstance(state, (list, tuple)) else [state]
    if not several:
        raise StateError("a list of the states of all ranks is empty.")
    found = [states.parse(one) for one in several]
    first = found[0]
    _check_alike(found)
    current = identity(spec, first["lanes"])
    changes: list[str] = [str(one) for one in _json(first["changes"] or "[]", list, "changes")]
    matched = _Matched(spec, allow, changes)
    if isinstance(spec.base, Pipeline):
        if first["parts"] or not first["flow"]:
            raise _mismatch("pipeline", first["pipeline"], current["pipeline"])
        described = {name: first[name] for name in ("data", *_CHECKED)}
    else:
        if not first["parts"]:
            raise _mismatch("pipeline", first["pipeline"], current["pipeline"])
        described = _json(first["parts"], dict, "parts")
    adopted, convert = matched.match(spec, described, "")
    merged = _merged([_place(one) for one in found], first["lanes"], spec)
    lanes = {lane: _converted(at, convert, adopted) for lane, at in merged.lanes.items()}
    worker = (first["worker"], first["workers"], first["shards"]) if first["workers"] else None
    return Restored(
        replace(merged, lanes=lanes),
        adopted,
        first["lanes"],
        max(one["epoch_outputs"] for one in found),
        tuple(changes),
        worker,
        first["round"],
        first["batch"],
    )


def of_worker(worker: tuple[int, int, int]) -> CheckpointMismatchError:
    """What to raise for the state of a DataLoader worker where none is."""
    text = f"worker {worker[0]} of {worker[1]}"
    return CheckpointMismatchError("worker", text, None, "a state of one DataLoader worker")


def check_allow(allow: Collection[str]) -> None:
    """Raise ValueError for names of fields that cannot be allowed to differ."""
    names = {*_CHECKED, "data"}
    unknown = [name for name in ([allow] if isinstance(allow, str) else allow) if name not in names]
    if unknown or isinstance(allow, str):
        raise ValueError(f"allow takes a list of names out of {', '.join(sorted(names))}, got {allow!r}")


def _converted(at: LaneAt, convert: Any, spec: Spec) -> LaneAt:
    cursor = convert(at.cursor)
    check_cursor(spec, cursor)
    return replace(at, cursor=cursor)


class _Matched:
    """Finds the parts of a saved flow again in a current one."""

    def __init__(self, spec: Spec, allow: Collection[str], changes: list[str]) -> None:
        self._whole, self._allow, self._changes = spec, allow, changes

    def match(self, spec: Spec, saved: Mapping[str, Any], where: str) -> tuple[Spec, Any]:
        """The spec with drawn seeds taken over, and a function from saved cursors to cursors of it."""
        base = spec.base
        if not isinstance(saved, Mapping) or ("parts" in saved) == isinstance(base, Pipeline):
            raise _mismatch("pipeline", saved.get("pipeline"), spec.text, where)
        here = _describe(spec)
        if isinstance(base, Pipeline):
            return self._pipeline(spec, base, saved, here, where)
        self._check("pipeline", saved.get("pipeline"), here["pipeline"], where)
        inside = [one for one in saved["parts"] if isinstance(one, Mapping)]
        if isinstance(base, Mix):
            return self._mix(spec, base, saved, inside, where)
        if len(inside) != len(base.parts):
            raise _mismatch("parts", len(inside), len(base.parts), where)
        both = [
            self.match(part, one, f"{where}source {number}: ")
            for number, (part, one) in enumerate(zip(base.parts, inside, strict=True))
        ]
        adopted = replace(spec, base=replace(base, parts=tuple(part for part, _ in both)))
        converts = [convert for _, convert in both]
        return adopted, _through(len(spec.stages), lambda at: _each(at, converts, spec))

    def _pipeline(
        self, spec: Spec, base: Pipeline, saved: Mapping[str, Any], here: Mapping[str, Any], where: str
    ) -> tuple[Spec, Any]:
        for name in ("data", *_CHECKED):
            drawn = name == "seed" and base.seed_drawn and saved.get("scope") == here.get("scope")
            if not drawn:
                default = {"scope": "none", "selection": "", "aligned": False}.get(name)
                self._check(name, saved.get(name, default), here.get(name, default), where)
        order, seed = base.order, saved.get("seed")
        if order.shuffle is not None and base.seed_drawn and isinstance(seed, int):
            order = replace(order, shuffle=replace(order.shuffle, seed=seed))
        return replace(spec, base=replace(base, order=order, seed_agreed=True)), lambda at: at

    def _mix(
        self, spec: Spec, base: Mix, saved: Mapping[str, Any], inside: Sequence[Mapping[str, Any]], where: str
    ) -> tuple[Spec, Any]:
        left = dict(enumerate(inside))
        parts: list[Spec] = []
        sources: list[tuple[int, Any] | None] = []
        for number, part in enumerate(base.parts):
            wanted = _data_of(_describe(part))
            same = next((i for i, one in left.items() if _data_of(one) == wanted), None)
            if same is None:
                parts.append(part)
                sources.append(None)
                continue
            adopted, convert = self.match(part, left.pop(same), f"{where}source {number}: ")
            parts.append(adopted)
            sources.append((same, convert))
        before, now = saved.get("weights"), list(base.weights)
        kept = [found[0] for found in sources if found is not None]
        changed = before != now or kept != list(range(len(inside))) or len(kept) != len(base.parts)
        if changed:
            added = [i for i, found in enumerate(sources) if found is None]
            text = f"{where}mix: weights {before} became {now}"
            text += f"; sources {sorted(left)} left" if left else ""
            text += f"; sources {added} joined" if added else ""
            self._changes.append(text)
            _log.warning("the state is gone on with another mix: %s", text)
        new = replace(spec, base=replace(base, parts=tuple(parts)))
        begins = [[0, 0, start(part)] for part in parts]

        def convert_mix(at: At) -> At:
            if not (isinstance(at, list) and len(at) == 3 and isinstance(at[2], list) and len(at[2]) == len(inside)):
                return at  # not one of a mix: refused by the check that follows
            position, era, each = at
            entries = []
            for found, begin in zip(sources, begins, strict=True):
                entry = begin if found is None else each[found[0]]
                if found is not None and isinstance(entry, list) and len(entry) == 3:
                    entry = [entry[0], entry[1], found[1](entry[2])]
                entries.append(entry)
            return [0, era + 1, entries] if changed else [position, era, entries]

        return new, _through(len(spec.stages), convert_mix)

    def _check(self, name: str, saved: Any, here: Any, where: str) -> None:
        if saved == here:
            return
        if name not in self._allow:
            raise _mismatch(name, saved, here, where)
        self._changes.append(f"{where}{name}: {saved!r} became {here!r}"[:200])


def _each(at: At, converts: Sequence[Any], spec: Spec) -> At:
    """Of a concatenation ([number, cursor]) or a zip ([cursor, …])."""
    if not isinstance(at, list):
        return at
    if isinstance(spec.base, Zip):
        return [convert(one) for convert, one in zip(converts, at, strict=False)]
    known = len(at) == 2 and isinstance(at[0], int) and 0 <= at[0] < len(converts)
    return [at[0], converts[at[0]](at[1])] if known else at


def _through(stages: int, convert: Any) -> Any:
    """A conversion of the innermost of so many levels of cursors."""
    if not stages:
        return convert
    inner = _through(stages - 1, convert)
    return lambda at: [inner(at[0]), *at[1:]] if isinstance(at, list) and at else at


def _mismatch(name: str, saved: Any, here: Any, where: str = "") -> CheckpointMismatchError:
    cause = states.CAUSES.get(name, "another pipeline than when it was saved")
    problem = CheckpointMismatchError(f"{where}{name}", saved, here, f"{cause}; allow=[{name!r}] goes on all the same")
    problem.field = name
    return problem


def _json(text: str, kind: type, name: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, kind):
        raise StateError(f"the state is damaged: {name!r} is {text!r:.40}.")
    return found


def _place(found: Mapping[str, Any]) -> Place:
    lanes: dict[int, LaneAt] = {}
    for entry in _json(found["flow"], list, "flow"):
        if not (isinstance(entry, list) and len(entry) == 4 and all(map(_is_count, entry[:3])) and entry[2] in (0, 1)):
            raise StateError(f"the state is damaged: 'flow' has {entry!r:.60}.")
        if entry[0] >= found["lanes"] or entry[0] in lanes:
            raise StateError(f"the state is damaged: lane {entry[0]} of {found['lanes']}.")
        lanes[entry[0]] = LaneAt(entry[1], bool(entry[2]), entry[3])
    index, _, count = found["known"].partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise StateError(f"the state is damaged: 'known' is {found['known']!r:.40}.")
    known = Cut(int(index), int(count))
    if lanes and set(lanes) != set(known.positions(0, found["lanes"]).tolist()):
        raise StateError("the state is damaged: it does not have the lanes that it says it has.")
    return Place(found["epoch"], lanes, known, found["position"])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _check_alike(found: Sequence[Mapping[str, Any]]) -> None:
    free = {"epoch", "position", "flow", "known", "worker", "round", "batch", "epoch_outputs"}
    for rank, one in enumerate(found):
        for name in sorted(found[0].keys() - free):
            if one.get(name) != found[0][name]:
                raise states.apart(
                    name,
                    f"the list holds states of different runs or steps: {name} is {found[0][name]!r} on rank 0 and "
                    f"{one.get(name)!r} on rank {rank}. Nothing was changed.",
                )


def _merged(places: Sequence[Place], lanes: int, spec: Spec) -> Place:
    """The lanes that all ranks together know of. They must have been at the same step."""
    epoch = min(place.epoch for place in places)
    if len(places) == 1 or not any(place.begun for place in places):
        if any(place.epoch != epoch for place in places):
            raise _steps_apart(places)
        return places[0]
    # Ranks that were through with the epoch before others (ends="uneven") stand at the beginning of the next.
    behind = [place for place in places if place.epoch == epoch and place.begun]
    through = [place for place in places if place.epoch == epoch + 1 and not place.begun]
    if len(behind) + len(through) < len(places):
        raise _steps_apart(places)
    found: dict[int, LaneAt] = {}
    for place in behind:
        for lane, at in place.lanes.items():
            if found.setdefault(lane, at) != at:
                raise _steps_apart(places)
    running = {place.position for place in behind if not any(at.ended for at in place.lanes.values())}
    if len(running) > 1:
        raise _steps_apart(places)
    missing = [lane for lane in range(lanes) if lane not in found]
    if missing and not through:
        raise states.apart(
            "flow", f"of {lanes} lanes the states know {len(found)} only: the list must have those of all ranks."
        )
    over = LaneAt(0, True, start(spec))
    position = max(place.position for place in behind)
    return Place(epoch, {**found, **dict.fromkeys(missing, over)}, Cut(), position)


def _steps_apart(places: Sequence[Place]) -> CheckpointMismatchError:
    at = [f"rank {rank}: epoch {place.epoch}, position {place.position}" for rank, place in enumerate(places)]
    return states.apart(
        "position",
        f"the ranks were not at the same step when these states were saved ({'; '.join(at[:4])}{'; …' * (len(at) > 4)}): "
        "rows would be lost or repeated. Nothing was changed. Save all ranks behind the same batch.",
    )
