"""Finding the parts of a saved flow again in a current one: what may differ, what may not, and what is recorded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from midepoch import state as states
from midepoch.errors import CheckpointMismatchError
from midepoch.flow.chunk import At
from midepoch.flow.open import start
from midepoch.flow.spec import Mix, Spec, Zip
from midepoch.pipeline import Pipeline

_log = logging.getLogger("midepoch")

CHECKED = ("rows", "selection", "scope", "aligned", "seed", "window", "pipeline")


def describe(spec: Spec) -> dict[str, Any]:
    base = spec.base
    if isinstance(base, Pipeline):
        found = states.identity(base)
        plain = {"selection": "", "scope": "none", "seed": None, "window": None, "aligned": False}
        found["pipeline"] = spec.text
        return {name: value for name, value in found.items() if value != plain.get(name, ...)}
    weights = {"weights": list(base.weights)} if isinstance(base, Mix) else {}
    return {"pipeline": spec.text, **weights, "parts": [describe(part) for part in base.parts]}


def _data_of(described: Mapping[str, Any]) -> Any:
    """What data a described part is of: by which it is known again."""
    if "parts" in described:
        return [_data_of(part) for part in described["parts"]]
    return [described.get("data"), described.get("rows"), described.get("selection", "")]


class Matched:
    """Finds the parts of a saved flow again in a current one."""

    def __init__(self, allow: Collection[str], changes: list[str]) -> None:
        self._allow, self._changes = allow, changes

    def match(self, spec: Spec, saved: Mapping[str, Any], where: str) -> tuple[Spec, Any]:
        """The spec with drawn seeds taken over, and a function from saved cursors to cursors of it."""
        base = spec.base
        if not isinstance(saved, Mapping) or ("parts" in saved) == isinstance(base, Pipeline):
            raise mismatch("pipeline", saved.get("pipeline"), spec.text, where)
        here = describe(spec)
        if isinstance(base, Pipeline):
            return self._pipeline(spec, base, saved, here, where)
        self._check("pipeline", saved.get("pipeline"), here["pipeline"], where)
        inside = [one for one in saved["parts"] if isinstance(one, Mapping)]
        if isinstance(base, Mix):
            return self._mix(spec, base, saved, inside, where)
        if len(inside) != len(base.parts):
            raise mismatch("parts", len(inside), len(base.parts), where)
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
        for name in ("data", *CHECKED):
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
            wanted = _data_of(describe(part))
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
            raise mismatch(name, saved, here, where)
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


def mismatch(name: str, saved: Any, here: Any, where: str = "") -> CheckpointMismatchError:
    cause = states.CAUSES.get(name, "another pipeline than when it was saved")
    problem = CheckpointMismatchError(f"{where}{name}", saved, here, f"{cause}; allow=[{name!r}] goes on all the same")
    problem.field = name
    return problem
