"""Going on with a mix that was changed: sources go on where they were, and what was begun is ended as it was.

A stage behind a mix may have handed over a part of what it made of some outputs: tokens of a document, rows of a
window. Until those outputs have come again on resume, the mix stays as it was; only then it is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from midepoch.errors import CheckpointMismatchError
from midepoch.flow.chunk import At
from midepoch.flow.combined import old_schedule, pair
from midepoch.flow.open import start
from midepoch.flow.spec import Local, Mix, Spec, StageSpec
from midepoch.transforms.packing import PackSpec


@dataclass(frozen=True)
class Of:
    """Whose cursor it is: that of a lane, in an epoch."""

    epoch: int
    lane: int


Convert = Callable[[At, int | None, Of], At]
"""From a saved cursor to one of the current flow. The number is that of outputs from there on that must not become
other ones, because something that was made of them was handed over in part; None if it is not known.
"""


@dataclass(frozen=True)
class Found:
    """A part of a mix: which of the saved ones it is, if any, and how to convert its cursor."""

    spec: Spec
    old: int | None
    convert: Convert


class Gone(Exception):  # noqa: N818  (never leaves this package)
    """What was begun is of a source that is not there any more: there is nothing to end."""


def needed(stage: StageSpec, skip: int, need: int | None) -> int | None:
    """How many outputs below a stage must stay the same, so that ``need`` of its own do, and what is begun is ended."""
    if need == 0 and not skip:
        return 0
    if need is None or need > 1:
        return None
    if isinstance(stage, PackSpec) and stage.strategy == "concat":
        return 1 if need == 0 else None
    if isinstance(stage, PackSpec):
        return stage.window
    return 1 if isinstance(stage, Local) and not stage.grouped else stage.size


def changed_mix(
    base: Mix, found: Sequence[Found], count: int, was: Any, at: At, need: int | None, of: Of, where: str
) -> At:
    """The cursor of a mix that had ``count`` parts, as one of the mix that it is now. ``was``: its weights before, if
    it was changed, else None.
    """
    if not (isinstance(at, list) and len(at) in (3, 4) and isinstance(at[2], list) and len(at[2]) == count):
        return at  # not one of a mix: refused by the check that follows
    position, era, each, *old = at
    entries = [_entry(one, each, need, of) for one in found]
    if was is None:
        return [position, era, entries, *old]
    if need == 0 and not (old and position < old[0][0]):
        return [0, era + 1, entries]
    if need is not None and not old and _are_weights(was, count):
        now = {one.old: number for number, one in enumerate(found) if one.old is not None}
        kept = [position + need, [[weight, now.get(number, -1)] for number, weight in enumerate(was)]]
        sources = old_schedule(kept, base.seed, of.epoch, of.lane, era).sources(position, position + need)
        gone = [source for source in sources.tolist() if kept[1][source][1] < 0]
        if not gone:
            return [position, era, entries, kept]
        if need == 1:
            raise Gone
    raise CheckpointMismatchError(
        f"{where}weights",
        was,
        list(base.weights),
        "the mix was changed while stages behind it stand in the middle of what they make of its outputs, which would "
        "be other ones. Go on with the mix as it was for a while, or shuffle and batch before mixing",
    )


def _entry(one: Found, each: Sequence[At], need: int | None, of: Of) -> At:
    entry = [0, 0, start(one.spec)] if one.old is None else each[one.old]
    if one.old is not None and isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], int):
        inner = Of(pair(of.epoch, entry[0]), of.lane)
        entry = [entry[0], entry[1], one.convert(entry[2], need, inner)]
    return entry


def _are_weights(weights: Any, count: int) -> bool:
    good = isinstance(weights, list) and len(weights) == count
    return good and all(isinstance(weight, (int, float)) and weight > 0 for weight in weights)
