"""The history that the weights have: the passes of a run, each up to the point where a later one took over.

A fresh loader, or one into which a state was loaded, takes the run back to its position: later records are not in the
weights any more. A pass that continues takes nothing back; rows that it delivers again are repeated. A pass of one
batch may be a look, such as a sample to build the model from: it counts only if the run resumes after it, or if nothing
follows. A loaded state counts if no other one and no fresh start follows: it is where the run ended, or will resume.
"""

from __future__ import annotations

from dataclasses import replace

from midepoch.audit.passes import Generation
from midepoch.audit.records import Place


class History:
    """The history of a run. ``kept``: passes in the order of their positions. ``repeats``: passes of repeated rows."""

    def __init__(self, passes: list[Generation]) -> None:
        self.kept: list[Generation] = []
        self.repeats: list[Generation] = []
        look: Generation | None = None
        load: Generation | None = None
        for one in passes:
            if one.is_load:  # of several, the last one counts
                load = one
                continue
            place = one.origin if one.how == "loaded" else one.place  # a pass may continue after an exclusion
            if look is not None and look.place < place <= look.after:
                self._add(look)
            elif look is not None and load is None:
                one = _after_look(one, look)
            if load is not None and one.how == "on":
                self._back_to(load.origin, load)
            load, look = None, one if one.is_look else None
            if look is None:
                self._add(one)
        if look is not None and (load is None or look.place < load.origin <= look.after):
            self._add(look)
        if load is not None:
            self._back_to(load.origin, load)

    @property
    def all(self) -> list[Generation]:
        return sorted(self.kept + self.repeats, key=lambda one: one.beginning)

    def _add(self, one: Generation) -> None:
        if one.how != "on":
            self._back_to(one.origin, one)
        if self.kept and one.place < self.kept[-1].after:
            self.repeats.append(one)
        else:
            self.kept.append(one)

    def _back_to(self, place: Place, by: Generation) -> None:
        """Take the run back to a place.

        Later records are not in the weights, except for ranks of the same start that continued.
        """
        epoch, position = place
        while self.kept and self.kept[-1].place >= place:
            gone = self.kept.pop()
            on = {rank: steps for rank, steps in gone.steps.items() if by.hows.get(rank) == "on"}
            if on and gone.shape.attempt == by.shape.attempt:
                self.repeats.append(replace(gone, steps=on))
        if self.kept and self.kept[-1].shape.epoch == epoch:
            self.kept[-1].until = min(self.kept[-1].until, position)
        self.repeats = [one for one in self.repeats if one.place < place or one.shape.attempt == by.shape.attempt]
        for one in self.repeats:
            if one.shape.epoch == epoch and one.shape.attempt != by.shape.attempt:
                one.until = min(one.until, position)


def _after_look(one: Generation, look: Generation) -> Generation:
    """Return a pass that continued after a look, with the way in which its ranks came to the look."""
    on = [rank for rank, how in one.hows.items() if how == "on" and look.hows.get(rank, "on") != "on"]
    if not on or one.shape.attempt != look.shape.attempt:
        return one
    return replace(
        one, hows={**one.hows, **{rank: look.hows[rank] for rank in on}}, origin=min(one.origin, look.origin)
    )
