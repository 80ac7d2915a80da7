"""The parts of a mix, each iterated pass after pass in one lane."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from midepoch.order import Shard
from midepoch.pipeline.chunk import Chunk, Flow, Items, Pulled, Puller, joined
from midepoch.pipeline.combined import conformer
from midepoch.pipeline.cursor import At, flatten
from midepoch.pipeline.node import Mix

Int64Array = npt.NDArray[np.int64]
Open = Callable[[int, int, Shard, At], Flow]
"""Function that opens a part, given its number, epoch, lane and cursor."""

FIRST, AGAIN, BORROWING = 0, 1, 2
"""Stages of a part: its first pass, a later one, or a pass over the shards of all lanes in turn.

The last is for a lane in which a pass yielded nothing, as when a source has fewer rows than there are lanes: the
weights apply in every lane.
"""


ENDED = 1 << 40
"""Number of the pass of a part that a scheduled mix cannot draw from any more, if its passes are not limited."""


def pair(epoch: int, run: int) -> int:
    """Return a small number, different for each pair: (0, 0), (1, 0), (0, 1), (2, 0) … are 0, 1, 2, 3 …"""
    return (epoch + run) * (epoch + run + 1) // 2 + run


def place_of(run: int, stage: int, epoch: int, lane: Shard) -> tuple[int, Shard]:
    """Return the epoch and the lane of a pass over a part."""
    if stage != BORROWING:
        return pair(epoch, run), lane
    shift = run % lane.count
    return pair(epoch, run_number(run, stage, lane)), Shard((lane.index + shift) % lane.count, lane.count)


def run_number(run: int, stage: int, lane: Shard) -> int:
    """Return the number of a pass. Lanes that borrow have numbers of their own, one for each round over all lanes."""
    return (run // lane.count + 1) * lane.count + lane.index if stage == BORROWING else run


class Part:
    """One part of a mix, pass after pass."""

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
        self._limited, self._most = mix.most_passes(number) is not None, mix.most_passes(number) or ENDED
        self._conform = conformer(mix, number)
        self._pass, self._stage = run, stage
        self._drawn: list[tuple[tuple[int, int, Puller, bool, bool], Pulled]] = []  # the last draw
        self.spent = run >= self._most
        """True if it has had all of its passes, or yields nothing, and a schedule does not draw from it any more."""
        if self.spent:
            cursor = start
            self._intake = Puller(_Nothing(), start)
        else:
            self._open(cursor)
        self._found = cursor != start  # this pass has yielded outputs
        # The round over all lanes has yielded outputs, or may have: outputs before a resume are not known.
        self._found_in_turn = self._found or run % lane.count > 0
        self.barren = False

    def _open(self, cursor: At) -> None:
        place = place_of(self._pass, self._stage, self._epoch, self._lane)
        self._intake = Puller(self._open_part(self._number, *place, cursor), cursor)

    @property
    def exhausted(self) -> bool:
        """Return True if it has been iterated once."""
        return self._stage != FIRST

    def has_more(self) -> bool:
        """Return True if this pass has outputs left."""
        return self._intake.has_more()

    def draw(self, count: int) -> Draw:
        """Return the next outputs, fewer only if the part has ended and is not iterated again."""
        # A part that yields nothing begins its pass again on resume, and finds that out again.
        before = [self._pass, self._stage, self._start if self.barren else self._intake.cursor]
        taken: list[tuple[int, int, Pulled]] = []
        ends: list[int] = []
        got, self._drawn = 0, []
        while got < count and not self.barren and not self.spent:
            begun = (self._pass, self._stage, self._intake, self._found, self._found_in_turn)
            pulled = self._intake.take(count - got)
            self._drawn.append((begun, pulled))
            if pulled.count:
                taken.append((self._pass, self._stage, pulled))
                got, self._found = got + pulled.count, True
            if got < count:
                ends.append(got)
                if not self._again:
                    self._stage = AGAIN
                    break
                self._next_pass()
        numbers = [run_number(run, stage, self._lane) for run, stage, _ in taken]
        return Draw([(self._tag << 24) + number for number in numbers], self._conform, before, taken, ends)

    def give_back(self, keep: int) -> None:
        """Take back all but the first ``keep`` outputs of the last draw, and the passes that began after them."""
        for begun, pulled in self._drawn:
            if keep <= pulled.count:
                self._pass, self._stage, self._intake, self._found, self._found_in_turn = begun
                self._found |= keep > 0
                self.barren = self.spent = False
                self._intake.give_back(pulled, keep)
                return
            keep -= pulled.count

    def end(self) -> None:
        """Never draw from it again."""
        self._pass, self._stage, self._intake, self.spent = self._most, AGAIN, Puller(_Nothing(), self._start), True

    def _next_pass(self) -> None:
        """Begin again. If this pass yielded nothing, continue with the shards of all lanes in turn."""
        if self._limited and (not self._found or self._pass + 1 >= self._most):
            self.spent = True
            return
        lanes, yielded, self._found = self._lane.count, self._found, False
        if self._stage != BORROWING and not yielded:
            self._pass, self._stage, self._found_in_turn = 0, BORROWING, False
            self.barren = lanes == 1  # there is no other lane
        else:
            self._pass, self._stage = self._pass + 1, max(self._stage, AGAIN)
            self._found_in_turn |= yielded
            if self._stage == BORROWING and self._pass % lanes == 0:
                self.barren, self._found_in_turn = not self._found_in_turn, False
        if self.barren:
            self._pass = 0
        else:
            self._open(self._start)


class _Nothing:
    """The flow of a part that is not iterated any more."""

    def pull(self) -> Chunk | None:
        return None


class Draw:
    """Outputs taken from a part in one call. ``ends``: numbers of outputs after which it began again, or ended."""

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
    def count(self) -> int:
        """The number of outputs."""
        return sum(taken.count for _, _, taken in self._taken)

    @property
    def exhausted(self) -> bool:
        """True if the part had been iterated once before."""
        return bool(self._before[1] != FIRST)

    def items(self) -> Items | None:
        """Return the outputs. Ordinals separate the generators of functions for rows of other sources and passes."""
        if not self._taken:
            return None
        passes = [
            taken.items().with_ordinals(number)
            for number, (_, _, taken) in zip(self._numbers, self._taken, strict=True)
        ]
        return self._conform(joined(passes))

    def before(self, count: int) -> At:
        """Return the part's entry in the cursor right before one of them."""
        done = count
        for run, stage, taken in self._taken:
            if done < taken.count:
                return [run, stage, taken.before(done)]
            done -= taken.count
        return self.at(count)

    def table(self, counts: Int64Array, coming: npt.NDArray[np.bool_]) -> Int64Array | None:
        """Return the numbers of many entries in one call, or None if a chunk has no such table.

        ``counts``: outputs before each. ``coming``: True where the entry is right before the next output.
        """
        width, parts, done = -1, [], 0
        for run, stage, taken in self._taken:
            for chunk, start, stop in taken.pieces:
                if chunk.table is None:
                    return None
                for is_before in (False, True):
                    low = done if is_before else done + 1
                    places = np.flatnonzero((counts >= low) & (counts < low + stop - start) & (coming == is_before))
                    if len(places):
                        values = chunk.table(start + counts[places] - done, is_before)
                        if values is None or width not in (-1, values.shape[1]):
                            return None
                        width = values.shape[1]
                        parts.append((places, run, stage, values))
                done += stop - start
        found = np.zeros((len(counts), 2 + max(width, 0)), np.int64)
        covered = np.zeros(len(counts), np.bool_)
        for places, run, stage, values in parts:
            found[places, 0], found[places, 1], found[places, 2:], covered[places] = run, stage, values, True
        if not covered.all():  # those before the first output, and after the last
            for count in np.unique(counts[~covered]).tolist():
                numbers: list[int] = []
                flatten(self.at(count), numbers, [])
                if width >= 0 and len(numbers) != 2 + width:
                    return None
                if width < 0:
                    width, found = len(numbers) - 2, np.zeros((len(counts), len(numbers)), np.int64)
                found[~covered & (counts == count)] = numbers
        return found

    def at(self, count: int) -> At:
        """Return the part's entry in the cursor after the first ``count``. It begins again only when more is needed."""
        entry = self._before
        for run, stage, taken in self._taken:
            if not count:
                break
            entry = [run, stage, taken.at(min(count, taken.count))]
            count -= min(count, taken.count)
        return entry
