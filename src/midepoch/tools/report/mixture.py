"""The sources of a run: names, weights, rows consumed, and the progress of an epoch over them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from midepoch.audit import Run
from midepoch.audit.consumed import LaneRun
from midepoch.audit.orders import KnownOrder
from midepoch.audit.passes import Generation

_STOP = re.compile(r"^mix\[(\w+)")


@dataclass(frozen=True)
class SourceRows:
    """Rows of a source that an epoch has consumed, of ``rows``: more than these if it is iterated again."""

    name: str
    rows: int
    consumed: int
    weight: float | None = None
    """Its share of the outputs of a mix, or None if it is not a part of one."""


def sources_of(run: Run, one: Generation, steps: int) -> list[SourceRows]:
    """Return the sources after a number of steps of a pass, in the order of the tree."""
    order = run.lanes_of(one).order if one.lanes else run.order
    names, about = names_of(order), _description(order)
    mix = one.first.mix
    current = None if mix is None else mix.weights_at(run.reached(one, steps))
    weights = _weights(about if current is None else {**about, "weights": current})
    consumed = _consumed(run, order, one, steps)
    return [
        SourceRows(name, source.rows, rows, weight)
        for name, source, rows, weight in zip(names, order.sources, consumed, weights, strict=True)
    ]


def progress(run: Run, one: Generation, steps: int) -> float | None:
    """Return the part of its epoch that is consumed after a number of steps of a pass, or None if it has no end."""
    if not one.lanes:
        return run.reached(one, steps) / one.first.rows if one.first.rows else None
    if one.first.mix is not None and one.first.mix.schedule is not None:
        outputs = one.first.mix.schedule.plan[-1].outputs
        return min(1.0, run.reached(one, steps) / outputs) if outputs else None
    order = run.lanes_of(one).order
    counts = iter(zip(_consumed(run, order, one, steps), (source.rows for source in order.sources), strict=True))
    return _progress(_description(order), counts)


def is_in_group(run: Run, one: Generation, steps: int) -> bool:
    """Return True if more rows may be consumed than are known: outputs of a group do not tell the rows they are of."""
    if not one.lanes:
        return False
    lanes = run.lanes_of(one)
    for lane in range(one.lanes):
        if (track := lanes.owner(one, lane)) is not None:
            found = lanes.places(one, lane, track.at(lane, min(steps, track.delivered)))
            if any(kind == "group" for place in found for kind, _ in place.part):
                return True
    return False


def _progress(about: Mapping[str, Any], counts: Any) -> float | None:
    if "parts" not in about:
        consumed, rows = next(counts)
        return min(1.0, consumed / rows) if rows else None
    stop = _STOP.match(about["pipeline"])
    if stop is None:  # concat and zip: all rows of all parts
        pairs = [next(counts) for _ in range(_leaves(about))]
        total = sum(rows for _, rows in pairs)
        return min(1.0, sum(min(pair) for pair in pairs) / total) if total else None
    parts = [_progress(part, counts) for part in about["parts"]]
    known = [part for part, weight in zip(parts, about["weights"], strict=True) if weight]
    if stop[1] == "never" or any(part is None for part in known) or not known:
        return None
    return (max if stop[1] == "first" else min)(part for part in known if part is not None)


def _leaves(about: Mapping[str, Any]) -> int:
    return sum(map(_leaves, about["parts"])) if "parts" in about else 1


def _description(order: KnownOrder) -> dict[str, Any]:
    found: dict[str, Any] = order.about.get("parts") or {"pipeline": order.about.get("pipeline", "")}
    return found


def _consumed(run: Run, order: KnownOrder, one: Generation, steps: int) -> list[int]:
    """Return by source the rows consumed in the epoch, over all lanes."""
    if not one.lanes:
        return [run.reached(one, steps)]
    rows = [source.rows for source in order.sources]
    sums = [0] * len(rows)
    lanes = LaneRun(order)
    for lane in range(one.lanes):
        track = lanes.owner(one, lane) or next((each for each in one.tracks.values() if lane in each.begin), None)
        if track is None:
            continue
        for place in lanes.places(one, lane, track.at(lane, min(steps, track.delivered))):
            sums[place.leaf] += place.run * place.lane.before(rows[place.leaf]) + place.row + bool(place.part)
    return sums


def names_of(order: KnownOrder) -> list[str]:
    """Return the names of the sources: those of a mix, else of their files or folders if these differ."""
    given = list(_given_names(_description(order), ""))
    folders = [_folder(source.about.get("files", ())) for source in order.sources]
    distinct = len(set(folders)) == len(folders) and all(folders)
    return [
        name or (folder if distinct else f"source {number}")
        for number, (name, folder) in enumerate(zip(given, folders, strict=True))
    ]


def _given_names(about: Mapping[str, Any], name: str) -> list[str]:
    """Return a name for each source: those of the mixes around it."""
    if "parts" not in about:
        return [name]
    own: Sequence[str] = about.get("names") or [""] * len(about["parts"])
    found: list[str] = []
    for number, (part, of_part) in enumerate(zip(about["parts"], own, strict=True)):
        of_part = of_part or (f"{number}" if name else "")
        found += _given_names(part, f"{name}/{of_part}" if name and of_part else of_part or name)
    return found


def _folder(files: Sequence[str]) -> str:
    """Return a short name of some files: the name of the only one, or of their folder."""
    if not files:
        return ""
    first = PurePosixPath(files[0])
    return first.name if len(files) == 1 else first.parent.name


def _weights(about: Mapping[str, Any], share: float | None = 1.0) -> list[float | None]:
    """Return by source its share of the outputs of the mixes around it, or None."""
    if "parts" not in about:
        return [share]
    weights: Sequence[float] = about.get("weights") or ()
    total = sum(weights)
    found: list[float | None] = []
    for number, part in enumerate(about["parts"]):
        found += _weights(part, share * weights[number] / total if total and share is not None else None)
    return found
