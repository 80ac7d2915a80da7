"""mix, concat and zip: several datasets as one."""

from __future__ import annotations

import math
from builtins import zip as zip_
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from midepoch._internal.hints import hinted, name_of, remedy_for, warn_once
from midepoch._internal.values import one_of
from midepoch.dataset import Dataset, habits
from midepoch.errors import ColumnError, DataNotFoundError, MidepochError
from midepoch.order.bijection import check_seed
from midepoch.order.schedule import Phase, Schedule
from midepoch.pipeline.node import Combination, Concat, Mix, Node, Zip
from midepoch.pipeline.spec import PipelineSpec

_ENDS = ("first", "all", "never")


@hinted(habits.OPEN["mix"])
def mix(
    sources: Sequence[Any] | Mapping[str, Any],
    weights: Sequence[float] | Mapping[str, float] | Schedule | None = None,
    seed: int = 0,
    stop: str | None = None,
    *,
    length: str | None = None,
) -> Dataset:
    """Interleave rows of several datasets by weights.

    In every span of positions (as short as the weights allow: 10 for 0.5, 0.3, 0.2) each source occurs exactly in
    proportion to its weight; ``seed`` determines the order. By default all weights are equal. A weight of 0 pauses a
    source: it yields nothing and keeps its position.

    ``weights`` may be a ``Schedule``: then they follow from the position, passes over a source are limited, and the
    epoch ends with the schedule. It requires sources by name. If it counts tokens, these are the tokens of the column
    that ``pack()`` packs, or of the column ``length``.

    ``stop`` is the end of an epoch:

    - "first": when a source has no rows left; the default
    - "all": when every source has ended once; until then, sources that end are iterated again, shuffled again
    - "never": no end

    On resume the weights may change, and sources may be added or removed. The others continue at their positions, which
    is logged and recorded in ``changes``. A source that is removed and added again later starts at its beginning; use
    the weight 0 instead. Sources are recognized by their data and steps, or by their names if they are given as a dict.

    mixed = midepoch.mix([web.shuffle(seed=1), code.shuffle(seed=2)], weights=[0.7, 0.3], seed=3, stop="all")
    """
    given = weights.values() if isinstance(weights, Mapping) else weights if isinstance(weights, (list, tuple)) else ()
    if isinstance(sources, Schedule) or any(isinstance(each, Dataset) for each in given):
        raise TypeError("mix got the weights before the sources. Swap them: mix(sources, weights).")
    names: tuple[str, ...] = ()
    if isinstance(sources, Mapping):
        names = tuple(map(str, sources))
        if len(set(names)) < len(names):
            raise ValueError(f"mix: two sources have the same name, got {', '.join(names)}")
        if (wrong := next((name for name in sources if not isinstance(name, str)), None)) is not None:
            raise TypeError(f"mix: names of sources are texts, got {wrong!r}. Write {str(wrong)!r}, or pass a list.")
        sources = list(sources.values())
    if isinstance(weights, Mapping):
        if not names:
            raise TypeError(
                "mix: weights by name require sources by name: mix({'web': a, 'code': b}, {'web': 2, 'code': 1})"
            )
        if set(weights) != set(names):
            named, hint = ", ".join(map(str, weights)), "Give each source a weight; 0 pauses it."
            if "phases" in weights:
                hint = "For a schedule, pass Schedule.from_dict(…)."
            raise ValueError(f"mix: weights for {named}, but the sources are {', '.join(names)}. {hint}")
        weights = [weights[name] for name in names]
    by_position: tuple[tuple[str, Any], ...] = (("weights", weights), ("seed", seed))
    for name, value in by_position:
        if isinstance(value, str) and value in _ENDS:
            raise TypeError(f"mix({name}=…) got {value!r}, by its position. Name it: mix(sources, stop={value!r}).")
    parts = _parts(sources, "mix")
    if length is not None and getattr(weights, "unit", "rows") != "tokens":
        raise ValueError("mix(length=…) is for a schedule that counts tokens. Omit it.")
    if isinstance(weights, Schedule):
        base = _scheduled(parts, names, weights, check_seed(seed), stop, length)
        return _combined(base, sources)
    if isinstance(weights, (str, bytes, PathLike)):
        raise TypeError(f"mix takes weights or a Schedule, got {weights!r:.60}. Read a file with Schedule.load(path).")
    try:
        chosen = [1.0] * len(parts) if weights is None else [float(weight) for weight in weights]
    except (TypeError, ValueError):
        if any(isinstance(weight, Phase) for weight in given):
            raise TypeError(
                "mix got phases as weights. Make a schedule of them: mix(sources, Schedule([…]))."
            ) from None
        raise TypeError(f"mix: weights are numbers in a list or dict, [0.7, 0.3], got {weights!r:.60}") from None
    if len(chosen) != len(parts):
        raise ValueError(
            f"mix: {len(chosen)} weights for {len(parts)} sources. Give each source a weight; 0 pauses it."
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in chosen) or not any(chosen):
        raise ValueError(f"mix: weights must be 0 or more, and at least one above 0, got {chosen}")
    for number, (part, weight) in enumerate(zip_(parts, chosen, strict=True)):
        if weight and not any(leaf.rows for leaf in part.leaves):
            raise DataNotFoundError(
                f"mix: source {number} has no rows, so its weight of {weight:g} is impossible. Omit it, or set its "
                "weight to 0."
            )
    return _combined(Mix(parts, tuple(chosen), check_seed(seed), stop or "first", names), sources)


def _scheduled(
    parts: tuple[Node, ...], names: tuple[str, ...], schedule: Schedule, seed: int, stop: str | None, length: str | None
) -> Mix:
    """Return the mix of a schedule."""
    if stop is not None:
        raise ValueError(f"mix(stop={stop!r}): a schedule has its own end. Omit stop.")
    if not names:
        raise TypeError("mix: a schedule requires sources by name: mix({'web': a, 'code': b}, schedule)")
    for what, given in (("weights for", schedule.names), ("max_passes of", schedule.max_passes)):
        if unknown := [name for name in given if name not in names]:
            raise ValueError(
                f"mix: the schedule has {what} {', '.join(unknown)}, but the sources are {', '.join(names)}. Add the "
                "missing source, or remove it from the schedule."
            )
    for name, part in zip_(names, parts, strict=True):
        if name in schedule.names and not any(leaf.rows for leaf in part.leaves):
            raise DataNotFoundError(
                f"mix: source {name!r} has no rows, and the schedule has a weight for it. Check its path, or remove it "
                "from the schedule."
            )
    weights = tuple(float(schedule.plan[0].weights.get(name, 0)) for name in names)
    return Mix(parts, weights, seed, "never", names, schedule, None if length is None else (length, 0))


_STOPS = {"first_exhausted": "first", "all_exhausted": "all"}


@hinted(habits.OPEN["interleave_datasets"])
def interleave_datasets(
    datasets: Sequence[Any],
    probabilities: Sequence[float] | None = None,
    seed: int | None = None,
    stopping_strategy: str = "first_exhausted",
) -> Dataset:
    """Interleave rows of several datasets: ``mix``, by the names that Hugging Face has for it.

    Shares are exact in every span of positions, not on average, and without ``probabilities`` they are equal.
    """
    if isinstance(seed, str):
        raise TypeError(f"interleave_datasets: the third argument is the seed, got {seed!r}. Name stopping_strategy=….")
    hint = "To have every row once, in no particular shares, use concat([a, b]).shuffle(seed=…)."
    one_of(stopping_strategy, tuple(_STOPS), "stopping_strategy", hint)
    return mix(datasets, probabilities, 0 if seed is None else seed, _STOPS[stopping_strategy])


@hinted(habits.OPEN["concat"])
def concatenate_datasets(dsets: Sequence[Any], axis: int = 0) -> Dataset:
    """Concatenate datasets, or with ``axis=1`` their columns: ``concat`` and ``zip``, as Hugging Face calls them."""
    if axis not in (0, 1):
        raise ValueError(f"axis must be 0 for rows or 1 for columns, got {axis!r}")
    return zip(dsets) if axis else concat(dsets)


@hinted(habits.OPEN["concat"])
def concat(sources: Sequence[Any], *others: Any) -> Dataset:
    """Concatenate datasets. (Each lane iterates its part of all of them.)"""
    parts = _parts(None if others else sources, "concat")
    columns = [set(part.known_columns) for part in parts if part.known_columns]
    if len(columns) == len(parts) and not set.intersection(*columns):
        warn_once(
            "concat: no column is in all parts (%s), and rows have null for those that their part lacks. Use "
            "rename_columns if they mean the same.", "; ".join(", ".join(sorted(names)) for names in columns),
        )  # fmt: skip
    return _combined(Concat(parts), sources)


@hinted()
def zip(sources: Sequence[Any], *others: Any) -> Dataset:  # noqa: A001  (the name that the field uses; not imported by itself)
    """Combine datasets side by side until the shortest ends: rows with the columns of all.

    Rows are combined as they come: shuffle and filter the result, not the parts.
    """
    parts = _parts(None if others else sources, "zip")
    names = [name for part in parts for name in part.known_columns or ()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ColumnError(f"zip: {', '.join(map(repr, twice))} in two of the parts. Use rename_columns in one of them.")
    orders = {tuple(leaf.order.shuffle for leaf in part.leaves) for part in parts}
    counts = {source.pipeline.numbered for source in sources}  # None after a filter
    if len(orders) > 1 or (None in counts and len(counts) > 1):
        warn_once(
            "zip combines rows as they come, and its parts are shuffled or filtered differently: the rows side by side "
            "do not belong together. Shuffle and filter the result: zip([a, b]).shuffle(seed=1)."
        )
    elif len(counts) > 1:
        warn_once(
            "zip ends with the shortest part: they have %s rows.",
            " and ".join(f"{rows}" for rows in sorted(filter(None, counts))),
        )
    return _combined(Zip(parts), sources)


def _parts(sources: Any, what: str) -> tuple[Node, ...]:
    if not isinstance(sources, (list, tuple)) or not sources:
        found = "several arguments, or None" if sources is None else f"{sources!r:.60}"
        raise TypeError(f"{what} takes a list of datasets, {what}([a, b]), got {found}")
    return tuple(_node_of(source) for source in sources)


def _combined(base: Combination, sources: Sequence[Dataset]) -> Dataset:
    if isinstance(base, Concat):
        base.schema.check()  # here, not in the first batch
    specs = [source.pipeline for source in sources]
    formats, lanes = {spec.format for spec in specs}, {spec.lanes for spec in specs if spec.lanes_chosen}
    if len(lanes) > 1:
        raise ValueError(
            f"the parts have different numbers of lanes: {sorted(lanes)}. Call with_lanes on the combination instead."
        )
    common = formats.pop() if len(formats) == 1 else None
    return Dataset(PipelineSpec(Node(base), common, lanes=max(lanes, default=1), lanes_chosen=bool(lanes)))


def _node_of(given: Any) -> Node:
    """Return the node of a dataset to combine. It must be at its beginning."""
    if not isinstance(given, Dataset):
        listed = isinstance(given, (list, tuple))
        remedy = "Pass datasets alone, and weights in a second list." if listed else remedy_for(given)
        raise TypeError(f"expected a Dataset to combine, got {name_of(given)}. {remedy}")
    if given.pipeline.shard.count > 1:
        raise ValueError("shards cannot be combined. Combine the datasets, then shard the result.")
    if given._iteration.start.begun:
        raise MidepochError(
            "a dataset into which a state was loaded cannot be combined. Load the state into the combination."
        )
    return given.pipeline.node
