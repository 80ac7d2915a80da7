"""mix, concat and zip: several datasets or streams as one."""

from __future__ import annotations

import math
from builtins import zip as zip_
from collections.abc import Mapping, Sequence
from typing import Any

from midepoch.errors import ColumnError, DataNotFoundError, MidepochError
from midepoch.flow.lanes import Place
from midepoch.flow.spec import Combination, Concat, Mix, Spec, Zip
from midepoch.flow.standing import What
from midepoch.order.keys import check_seed
from midepoch.stream import Stream


def mix(
    sources: Sequence[Any] | Mapping[str, Any],
    weights: Sequence[float] | Mapping[str, float] | None = None,
    seed: int = 0,
    stop: str = "first",
) -> Stream:
    """Outputs of several datasets or streams in turn, as often as their weights say: a ``Stream``.

    In every span of positions (as short as the weights allow: 10 for 0.5, 0.3, 0.2) each source comes exactly as often
    as its weight says; ``seed`` decides in which order. Without weights each comes as often as the others. A weight of
    0 pauses a source: nothing comes of it, and it keeps its place.

    ``stop="first"`` ends an epoch where a source has nothing left; with "all" sources that end are iterated again,
    shuffled again, until every one has ended once; with "never" the epoch has no end.

    On resume the weights may be others, and sources may be added or left out: those that remain continue where they
    were, which is logged and recorded in ``changes``. One that is left out and added again later begins at its
    beginning; give it the weight 0 instead. Sources are known again by their data and steps, or by their names if they
    are given as a dict.

        mixed = midepoch.mix([web.shuffle(seed=1), code.shuffle(seed=2)], weights=[0.7, 0.3], seed=3, stop="all")
    """
    names: tuple[str, ...] = ()
    if isinstance(sources, Mapping):
        names, sources = tuple(map(str, sources)), list(sources.values())
        if len(set(names)) < len(names):
            raise ValueError(f"mix: two sources have the same name: {', '.join(names)}")
    if isinstance(weights, Mapping):
        if not names:
            raise TypeError(
                "mix: weights by name need sources by name: mix({'web': a, 'code': b}, {'web': 2, 'code': 1})"
            )
        if set(weights) != set(names):
            raise ValueError(f"mix: weights for {', '.join(map(str, weights))}; the sources are {', '.join(names)}")
        weights = [weights[name] for name in names]
    parts = _parts(sources, "mix")
    chosen = [1.0] * len(parts) if weights is None else [float(weight) for weight in weights]
    if len(chosen) != len(parts):
        raise ValueError(f"mix: {len(chosen)} weights for {len(parts)} sources")
    if not all(math.isfinite(weight) and weight >= 0 for weight in chosen) or not any(chosen):
        raise ValueError(f"mix: weights must be 0 or more, and one of them above 0, got {chosen}")
    for number, (part, weight) in enumerate(zip_(parts, chosen, strict=True)):
        if weight and not any(leaf.rows for leaf in part.leaves):
            raise DataNotFoundError(
                f"mix: source {number} has no rows, so its weight of {weight:g} cannot hold. Leave it out, or give it "
                "the weight 0."
            )
    return _stream(Mix(parts, tuple(chosen), check_seed(seed), stop, names), sources)


def concat(sources: Sequence[Any], *others: Any) -> Stream:
    """One dataset or stream after the other: a ``Stream``. (Each lane goes through its part of all of them.)"""
    parts = _parts([] if others else sources, "concat")
    return _stream(Concat(parts), sources)


def zip(sources: Sequence[Any], *others: Any) -> Stream:  # noqa: A001  (the name that the field uses; not imported by itself)
    """Datasets or streams side by side, until the shortest ends: rows with the columns of all. A ``Stream``."""
    parts = _parts([] if others else sources, "zip")
    names = [name for part in parts for name in part.known_columns or ()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ColumnError(f"zip: {', '.join(map(repr, twice))} in two of the parts: rename_columns in one of them.")
    return _stream(Zip(parts), sources)


def _parts(sources: Any, what: str) -> tuple[Spec, ...]:
    if not isinstance(sources, (list, tuple)) or not sources:
        raise TypeError(f"{what} takes a list: {what}([a, b]) of datasets or streams, not {sources!r:.60}")
    return tuple(_spec_of(source) for source in sources)


def _stream(base: Combination, sources: Sequence[Any]) -> Stream:
    if not isinstance(base, Zip):
        _ = base.schema  # parts that do not go together are refused here, not in the batch where they meet
    formats = {source.what.format for source in sources}
    lanes, given = _lanes_of(sources)
    return Stream(What(Spec(base), formats.pop() if len(formats) == 1 else None, lanes=lanes, lanes_chosen=given))


def _spec_of(given: Any) -> Spec:
    """What is to be combined: the spec of a dataset or stream that stands at its beginning."""
    what = getattr(given, "what", None)
    if not isinstance(what, What):
        raise TypeError(f"datasets or streams are combined, got {type(given).__name__}")
    if what.cut.count > 1:
        raise ValueError("shards cannot be combined: combine the datasets, then shard what comes of it")
    start = given._standing.start
    if start.begun if isinstance(start, Place) else start:
        raise MidepochError("a dataset that a state was loaded into cannot be combined: load the state into the mix")
    return what.spec


def _lanes_of(parts: Sequence[Any]) -> tuple[int, bool]:
    """The lanes that the parts were given, if any was."""
    given = {part.what.lanes for part in parts if part.what.lanes_chosen}
    if len(given) > 1:
        raise ValueError(f"the parts were given different numbers of lanes: {sorted(given)}. Give them to the mix.")
    return (given.pop(), True) if given else (1, False)
