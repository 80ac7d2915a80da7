"""What the weights have seen: the passes of a run, each up to where a later one took over.

A fresh loader, and one into which a state was loaded, take the run back to where they stand: what was recorded behind
that is not in the weights any more. A pass that just goes on takes nothing back: rows that it is handed again are
repeated, unless it begins anew after no more than a look at its first batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from midepoch.audit.passes import Generation, Place


@dataclass
class History:
    """``kept`` in the order of places; ``repeats`` went through what had been gone through. ``stood`` before each."""

    kept: list[Generation] = field(default_factory=list)
    repeats: list[Generation] = field(default_factory=list)

    @property
    def all(self) -> list[Generation]:
        return sorted(self.kept + self.repeats, key=lambda one: one.beginning)

    def add(self, one: Generation) -> None:
        last = self.kept[-1] if self.kept else None
        if one.how != "on":
            self._back_to(min(one.stood, one.place))
        elif last is not None and one.place == last.place and _is_look(last):
            self._back_to(one.place)
        elif last is not None and one.place < (last.shape.epoch, last.frontier):
            if not _is_look(one):
                self.repeats.append(one)
            return
        self.kept.append(one)

    def _back_to(self, place: Place) -> None:
        epoch, position = place
        while self.kept and self.kept[-1].place >= place:
            self.kept.pop()
        if self.kept and self.kept[-1].shape.epoch == epoch:
            self.kept[-1].until = min(self.kept[-1].until, position)
        self.repeats = [one for one in self.repeats if one.place < place]
        for one in self.repeats:
            if one.shape.epoch == epoch:
                one.until = min(one.until, position)


def _is_look(one: Generation) -> bool:
    return max(one.steps.values()) <= 1
