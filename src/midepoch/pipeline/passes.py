"""The parts of a mix, each iterated pass after pass in one lane."""

from __future__ import annotations

from collections.abc import Callable

from midepoch.order import Shard
from midepoch.pipeline.chunk import Flow, Items, Pulled, Puller, joined
from midepoch.pipeline.combined import conformer
from midepoch.pipeline.cursor import At
from midepoch.pipeline.node import Mix

Open = Callable[[int, int, Shard, At], Flow]
"""Opens a part by its number, in an epoch, in a lane, at a cursor."""

FIRST, AGAIN, BORROWING = 0, 1, 2
"""Kinds of passes: the first, a later one, or one over the pieces of all lanes in turn.

The last is for a lane in which a pass brought nothing, as where a source has fewer rows than there are lanes: the
weights hold in every lane.
"""


def pair(epoch: int, run: int) -> int:
    """A number for each pair, no two the same, and small: (0, 0), (1, 0), (0, 1), (2, 0) … are 0, 1, 2, 3 …"""
    return (epoch + run) * (epoch + run + 1) // 2 + run


def place_of(run: int, stage: int, epoch: int, lane: Shard) -> tuple[int, Shard]:
    """The epoch and the lane that a pass of a part is over."""
    if stage != BORROWING:
        return pair(epoch, run), lane
    shift = run % lane.count
    return pair(epoch, run_number(run, stage, lane)), Shard((lane.index + shift) % lane.count, lane.count)


def run_number(run: int, stage: int, lane: Shard) -> int:
    """A number for a pass: lanes that borrow have numbers of their own, one for each time over all pieces."""
    return (run // lane.count + 1) * lane.count + lane.index if stage == BORROWING else run


class Part:
    """One flow of a mix, pass after pass."""

    def __init__(
        self,
        number: int,
        mix: Mix,
        open_part: Open,
        start: At,
        epoch: int,
        lane: Shard,
        run: int,
        stage: int,
        cursor: At,
    ) -> None:
        self._number, self._open_part, self._start, self._epoch, self._lane = number, open_part, start, epoch, lane
        self._again, self._tag = mix.stop != "first", mix.tags[number]
        self._conform = conformer(mix, number)
        self._pass, self._stage = run, stage
        self._open(cursor)
        self._found = cursor != start  # something came of this pass
        # Something came of the lanes in turn, or may have: what came before a resume is not known.
        self._found_in_turn = self._found or run % lane.count > 0
        self.barren = False

    def _open(self, cursor: At) -> None:
        place = place_of(self._pass, self._stage, self._epoch, self._lane)
        self._intake = Puller(self._open_part(self._number, *place, cursor), cursor)

    @property
    def exhausted(self) -> bool:
        """Return whether it has been iterated once."""
        return self._stage != FIRST

    def has_more(self) -> bool:
        """Return whether something is left of this pass."""
        return self._intake.has_more()

    def draw(self, count: int) -> Draw:
        """The next outputs; fewer only if the part has ended and is not iterated again."""
        # One that is barren begins its pass again on resume, to find that out again.
        before = [self._pass, self._stage, self._start if self.barren else self._intake.cursor]
        taken: list[tuple[int, int, Pulled]] = []
        ends: list[int] = []
        got = 0
        while got < count and not self.barren:
            some = self._intake.take(count - got)
            if some.count:
                taken.append((self._pass, self._stage, some))
                got, self._found = got + some.count, True
            if got < count:
                ends.append(got)
                if not self._again:
                    self._stage = AGAIN
                    break
                self._next_pass()
        numbers = [run_number(run, stage, self._lane) for run, stage, _ in taken]
        return Draw([(self._tag << 24) + number for number in numbers], self._conform, before, taken, ends)

    def _next_pass(self) -> None:
        """Begin again, and where this pass brought nothing, with the pieces of all lanes in turn."""
        lanes, found, self._found = self._lane.count, self._found, False
        if self._stage != BORROWING and not found:
            self._pass, self._stage, self._found_in_turn = 0, BORROWING, False
            self.barren = lanes == 1  # there is no other
        else:
            self._pass, self._stage = self._pass + 1, max(self._stage, AGAIN)
            self._found_in_turn |= found
            if self._stage == BORROWING and self._pass % lanes == 0:
                self.barren, self._found_in_turn = not self._found_in_turn, False
        if self.barren:
            self._pass = 0
        else:
            self._open(self._start)


class Draw:
    """Outputs that were taken of a part at once. ``ends``: after how many of them it had to begin again, or could not
    continue.
    """

    def __init__(
        self,
        numbers: list[int],
        conform: Callable[[Items], Items],
        before: At,
        taken: list[tuple[int, int, Pulled]],
        ends: list[int],
    ) -> None:
        self._numbers, self._conform, self._before, self._taken, self.ends = numbers, conform, before, taken, ends

    @property
    def exhausted(self) -> bool:
        """True if the part had been iterated once before."""
        return bool(self._before[1] != FIRST)

    def items(self) -> Items | None:
        """The outputs. Ordinals distinguish rows of other sources and other passes, for the generators of functions."""
        if not self._taken:
            return None
        passes = [
            taken.items().with_ordinals(number)
            for number, (_, _, taken) in zip(self._numbers, self._taken, strict=True)
        ]
        return self._conform(joined(passes))

    def before(self, count: int) -> At:
        """The part's entry in the cursor from which one of them comes first."""
        done = count
        for run, stage, taken in self._taken:
            if done < taken.count:
                return [run, stage, taken.before(done)]
            done -= taken.count
        return self.at(count)

    def at(self, count: int) -> At:
        """The part's entry in the cursor, after the first ``count``: it begins again only when more is needed."""
        found = self._before
        for run, stage, taken in self._taken:
            if not count:
                break
            found = [run, stage, taken.at(min(count, taken.count))]
            count -= min(count, taken.count)
        return found
