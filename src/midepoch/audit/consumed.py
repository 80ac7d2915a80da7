"""Rows consumed by passes over lanes, and the proof that they tile the data.

In every lane, a pass consumes the rows from its first cursor to the cursor after its last step. The run is exact if
each pass begins where the pass before it was left: then the intervals tile the lane.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.lanes import At, LaneTrack, LeafPlace, StagePart, places
from midepoch.audit.orders import KnownOrder, SourceKey
from midepoch.audit.passes import Generation
from midepoch.errors import DataNotFoundError
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY

Int64Array = npt.NDArray[np.int64]


class Delivery(NamedTuple):
    """A row of a step: its rank, position and epoch.

    ``source``: number of the source, if there are several. ``part``: the tokens or outputs of the row, if not all. A
    row that yielded no output belongs to the step that consumed it.
    """

    step: int
    epoch: int
    position: int
    rank: int
    row: int
    source: int = 0
    part: str = ""


class Interval(NamedTuple):
    """Consumed rows of one source: rows ``first`` to ``stop`` of a lane, in an epoch of the source.

    ``begins``, ``ends``: parts already delivered of the first row (or group), and of the row after the last.
    """

    leaf: int
    epoch: int
    lane: Shard
    first: int
    stop: int
    begins: tuple[tuple[str, int], ...] = ()
    ends: tuple[tuple[str, int], ...] = ()

    @property
    def touched(self) -> int:
        """Rows of which outputs were made, including those in progress."""
        return self.stop - self.first + bool(self.ends)


class RowCounts(NamedTuple):
    """Rows of the sources in an epoch.

    ``consumed``: rows of which outputs were made, or that yielded none (``filtered`` of them). ``left``: not consumed.
    ``dropped``: left over at the end of an epoch. ``begun``: consumed rows of which more may be to come. ``unended``:
    lanes in which rows are drawn again and again, and that have not come to the end.
    """

    consumed: int = 0
    filtered: int = 0
    dropped: int = 0
    left: int = 0
    begun: int = 0
    unended: int = 0


Spots = Mapping[SourceKey, tuple[int, int, tuple[tuple[str, int], ...]]]
"""The place in each source."""


class LaneRun:
    """The lanes of a run, read with its order."""

    def __init__(self, order: KnownOrder) -> None:
        assert order.tree is not None
        self.order = order
        self._tree, self._sources = order.tree, order.sources
        self._rows = [source.rows for source in order.sources]
        self._keys = order.keys

    def places(self, one: Generation, lane: int, at: At) -> list[LeafPlace]:
        """Return the place of a cursor in each source."""
        leaf_places = places(self._tree, at, one.shape.epoch, Shard(lane, one.lanes))
        return [place if place.row >= 0 else place._replace(row=self._total(place)) for place in leaf_places]

    def after(self, one: Generation, lane: int, steps: int) -> list[LeafPlace]:
        """Return the place of a lane in each source after some steps. Nothing if no rank has a record of the lane."""
        track = one.owner(lane)
        return [] if track is None else self.places(one, lane, track.at(lane, steps))

    def _total(self, place: LeafPlace) -> int:
        return place.lane.before(self._rows[place.leaf])

    def intervals(self, one: Generation, lane: int, first: int, stop: int) -> Iterator[Interval]:
        """Yield the rows that steps ``first`` to ``stop`` of a pass consumed in a lane."""
        return self._between(self.after(one, lane, first), self.after(one, lane, stop))

    def _between(
        self, begin: Sequence[LeafPlace], end: Sequence[LeafPlace], last: Callable[[LeafPlace], LeafPlace] | None = None
    ) -> Iterator[Interval]:
        """Yield the rows between two places of a lane. ``last``: function that returns where the last group ends."""
        for a, b in zip(begin, end, strict=True):
            shared = max(a.scope, b.scope, key=len)
            if all(begin[leaf].spot == end[leaf].spot for leaf in shared):
                continue
            b = b if last is None else last(b)
            ends = b.part if b.row < self._total(b) else ()  # at its end, what is in progress is of another source
            if (a.epoch, a.lane, a.passes) == (b.epoch, b.lane, b.passes):
                yield Interval(a.leaf, a.epoch, a.lane, a.row, b.row, a.part, ends)
                continue
            yield Interval(a.leaf, a.epoch, a.lane, a.row, self._total(a), a.part)
            for epoch, shard in a.passes_until(b):  # a mix iterates a small source several times
                yield Interval(a.leaf, epoch, shard, 0, shard.before(self._rows[a.leaf]))
            yield Interval(b.leaf, b.epoch, b.lane, 0, b.row, (), ends)

    def consumed(self, one: Generation, steps: int) -> int:
        """Return the number of rows of the sources before and in the first steps of a pass, in all lanes.

        If a mix iterates a source again, the first time is counted.
        """
        return sum(self._consumed(self.after(one, lane, steps)) for lane in range(one.lanes))

    def _consumed(self, places: Sequence[LeafPlace]) -> int:
        """Return the number of rows that first passes over the sources have consumed, including those in progress.

        Of an output that a stage has in progress, it is not known which source of a mix it is of: it is counted once.
        """
        first = {each.leaf: each for each in places if not each.run and each.row < self._total(each)}
        scopes = {each.scope: each.stages[0].rows if each.stages else 0 for each in first.values()}
        inside = {scope: sum(first[leaf].inside for leaf in scope if leaf in first) for scope in scopes}
        in_progress = sum(max(inside[scope], rows) for scope, rows in scopes.items())
        return sum(self._total(place) if place.run else place.row for place in places) + in_progress

    def _filtered(self, begin: Sequence[LeafPlace], end: Sequence[LeafPlace]) -> int:
        """Return the number of consumed rows without an output, from the beginning of a pass on."""
        filtered = 0
        for a, b in zip(begin, end, strict=True):
            kept = b.first if b.run else b.kept
            if a.run or b.kept is None or kept is None or kept < 0:
                continue  # iterated again, or not known: only the first time counts
            # A row in progress is computed again on resume, and is kept then. Before, it is if outputs of its own were
            # delivered: not if a stage after it has used a part of it, such as a document that pack has cut.
            filtered += max(0, (self._total(b) if b.run else b.row + b.inside) - a.row - kept)
        return filtered

    def filtered(self, one: Generation, lane: int) -> int:
        """Return the rows without an output that the kept steps of a pass have consumed in a lane."""
        return self._filtered(self.after(one, lane, 0), self._end(one, lane))

    def consumed_besides(self, one: Generation, lane: int, other: LaneRun) -> int:
        """Return the rows that were consumed, up to the end of a pass, of sources that another mix does not have."""
        gone = (place for place in self._end(one, lane) if self._keys[place.leaf] not in other._keys)
        return sum(self._total(place) if place.run else place.row for place in gone)

    def _end(self, one: Generation, lane: int) -> list[LeafPlace]:
        """Return the place of a lane in each source after the kept steps of a pass."""
        track = one.owner(lane)
        return [] if track is None else self.after(one, lane, one.kept_of(track))

    def excluded_rows(self, one: Generation) -> int:
        """Return the rows that a pass came to and left out, because they are excluded."""
        excluded, total = one.first.header.excluded_rows(len(self._sources)), 0
        for lane in range(one.lanes):
            track = one.owner(lane)
            kept = 0 if track is None else one.kept_of(track)
            steps = kept + (track is not None and track.ends_after(kept))
            for a, b in zip(self.after(one, lane, 0), self.after(one, lane, steps), strict=True):
                stop = self._total(a) if b.run else b.row
                rows = excluded[a.leaf].positions() if not a.run else EMPTY.positions()  # only the first time counts
                own = _own_rows(a.lane, self._sources[a.leaf].at(a.epoch).positions_of_rows(rows))
                total += int(((own >= a.row) & (own < stop)).sum())
        return total

    def counts(self, passes: Sequence[Generation], lane: int) -> RowCounts:
        """Count the rows of a lane in an epoch, after the passes that are kept."""
        known = [(one, track) for one in passes if (track := one.owner(lane)) is not None]
        ended = any(lane in track.ended for one in passes for track in one.tracks.values())
        if not known:  # no rank has a record of it, or it had nothing left
            return RowCounts(left=sum(Shard(lane, passes[-1].lanes).before(count) for count in self._rows))
        filtered = sum(self.filtered(one, lane) for one, _ in known)
        one, track = known[-1]
        begin, places = self.after(one, lane, 0), self._end(one, lane)
        is_over = track.ends_after(one.kept_of(track))
        end = self.after(one, lane, track.delivered + 1) if is_over else places
        consumed, reached = self._consumed(places), self._consumed(end)
        left, dropped = sum(map(self._total, end)) - reached, 0
        if not (is_over or ended):
            begun = any(place.part for place in places)
            return RowCounts(consumed, filtered, 0, left, begun, self._tree["again"])
        if one.shape.batching.ends == "drop":  # rows consumed after the last batch were too few for another
            dropped = reached - consumed
        else:
            filtered += self._filtered(begin, end) - self._filtered(begin, places)
            consumed = reached
        if self.may_drop(one):
            return RowCounts(consumed, filtered, dropped + left)
        return RowCounts(consumed + left, filtered + left, dropped)  # stages read on to the end, and nothing came of it

    def may_drop(self, one: Generation) -> bool:
        """Return True if rows may be left over at the end of an epoch."""
        return one.shape.batching.ends == "drop" or bool(self._tree["drops"])

    def begin_and_ends(self, one: Generation, lane: int) -> tuple[Spots, list[Spots]] | None:
        """Return where a pass begins in a lane, and where its kept steps end. None if no rank has a record of the lane.

        Ranks that share a lane may form chunks of different sizes. Then the same place has several cursors: outputs of
        one group of rows, or of the next one. The state that was loaded is of one of them.
        """
        if (track := one.owner(lane)) is None:
            return None
        steps = one.kept_of(track)
        tracks = [other for other in one.tracks.values() if lane in other.begin and other.recorded >= steps]
        ends = [self._spots(one, lane, other, steps) for other in (track, *tracks)]
        return self._spots(one, lane, track, 0), ends

    def _spots(self, one: Generation, lane: int, track: LaneTrack, steps: int) -> Spots:
        places = self.places(one, lane, track.at(lane, steps))
        return {self._keys[place.leaf]: (place.run, place.row, place.part) for place in places}

    def deliveries(
        self, one: Generation, number: int, step: int, later: Sequence[Generation] = (), *, known: bool = False
    ) -> Iterator[Delivery]:
        """Yield the rows of step ``number`` of a pass, which is ``step`` of the run. ``later``: the passes after it.

        ``known``: raise DataNotFoundError if it is not known which rows these are.
        """
        for lane in range(one.lanes):
            track = one.owner(lane)
            if track is None or track.delivered <= number:
                continue
            rank = next(rank for rank, other in one.of_rank.items() if other.track is track)
            if not one.received(rank, number):
                continue
            for each in self._touched(one, lane, number, number + 1, later, known=known):
                positions = each.lane.locals(each.first, each.first + each.touched)
                rows = self._sources[each.leaf].at(each.epoch).chosen(positions)
                for i, (position, row) in enumerate(zip(positions.tolist(), rows.tolist(), strict=True)):
                    begins = each.begins if i == 0 else ()
                    ends = each.ends if i == each.stop - each.first else ()
                    yield Delivery(step, one.shape.epoch, position, rank, row, each.leaf, _part(begins, ends))

    def _touched(
        self, one: Generation, lane: int, first: int, stop: int, later: Sequence[Generation], *, known: bool = False
    ) -> Iterator[Interval]:
        """Yield the rows of which steps ``first`` to ``stop`` may have outputs.

        Those of a group can be of any of its rows. It ends where the next one begins, in this pass or in one that
        continues it. ``known``: raise DataNotFoundError if that is not recorded.
        """

        def group_end(place: LeafPlace) -> LeafPlace:
            found = self._group_end(place.leaf, one, lane, stop, later)
            if found is None and known:
                raise DataNotFoundError(
                    "its outputs are of a group of rows, such as a window of a shuffle, and the run has not come to "
                    "the end of it"
                )
            return found or place

        return self._between(self.after(one, lane, first), self.after(one, lane, stop), group_end)

    def _group_end(
        self, leaf: int, one: Generation, lane: int, step: int, later: Sequence[Generation]
    ) -> LeafPlace | None:
        """Return where the group that is in progress after a step ends in a source, or the place if there is none.

        None if its end is not recorded.
        """
        same = (other for other in (one, *later) if other.shape.epoch == one.shape.epoch)
        passes: Sequence[Generation] = [other for other in same if other.owner(lane) is not None]
        found, depth = self.after(one, lane, step), 0
        while group := next((each for each in found[leaf].stages if each.kind == "group" and each.depth > depth), None):
            depth = group.depth  # the last group of groups may end inside of another
            begins = [found[each].below(depth).spot for each in group.leaves]
            following = self._next_group(passes, lane, step, group, begins)
            if following is None:
                return None
            passes, step = following
            found = self.after(passes[0], lane, step)
        return found[leaf].below(depth) if depth else found[leaf]

    def _next_group(
        self, passes: Sequence[Generation], lane: int, step: int, group: StagePart, begins: list[Any]
    ) -> tuple[Sequence[Generation], int] | None:
        """Return the pass, with those after it, and the step in it after which a later group is in progress.

        ``passes``: the first has the group in progress, after ``step`` of it. None if the next is not recorded.
        """

        def is_later(one: Generation, step: int) -> bool:
            found = self.after(one, lane, step)
            return [found[leaf].below(group.depth).spot for leaf in group.leaves] != begins

        for number, one in enumerate(passes):
            track = one.owner(lane)
            assert track is not None
            steps = range(0 if number else step, track.delivered + (track.end is not None) + 1)
            after = bisect_left(steps, True, key=partial(is_later, one))
            if after < len(steps):
                return passes[number:], steps[after]
        return None

    def steps_of_row(
        self, one: Generation, before: int, row: int, source: int, later: Sequence[Generation] = ()
    ) -> Iterator[Delivery]:
        """Yield the steps of a pass that consumed a row. ``before``: steps of the run before the pass."""

        @cache
        def positions(epoch: int) -> Int64Array:
            return self._sources[source].at(epoch).positions_of(row)

        def may_hold(lane: int, first: int, stop: int) -> bool:
            for each in self._touched(one, lane, first, stop, later):
                own = _own_rows(each.lane, positions(each.epoch)) if each.leaf == source else EMPTY.positions()
                if ((own >= each.first) & (own < each.first + each.touched)).any():
                    return True
            return False

        tracks = ((lane, one.owner(lane)) for lane in range(one.lanes))
        spans = [(lane, 0, one.kept_of(track)) for lane, track in tracks if track is not None]
        numbers = set()
        while spans:  # by halves, where it can be in both
            lane, first, stop = spans.pop()
            if first >= stop or not may_hold(lane, first, stop):
                continue
            if stop - first == 1:
                numbers.add(first)
            else:
                middle = (first + stop) // 2
                spans += [(lane, first, middle), (lane, middle, stop)]
        for number in sorted(numbers):
            for found in self.deliveries(one, number, before + number + 1, later):
                if (found.row, found.source) == (row, source):
                    yield found


def joins(begin: Spots, end: Spots) -> bool:
    """Return True if a pass begins where another ends. In another mix, the sources of both count."""
    if list(begin) == list(end):
        return begin == end
    return all(begin[key][:2] == end[key][:2] for key in begin.keys() & end.keys())


def _own_rows(lane: Shard, positions: Int64Array) -> Int64Array:
    """Return the rows of a lane that have some of these positions of an epoch."""
    rows: Int64Array = positions[positions % lane.count == lane.index] // lane.count
    return rows


def _part(begins: tuple[tuple[str, int], ...], ends: tuple[tuple[str, int], ...]) -> str:
    """Describe the part of a row that a step got."""
    first = dict(begins)
    last = dict(ends)
    parts = []
    for kind in dict.fromkeys([*first, *last]):
        until = "the end" if kind not in last else f"{last[kind]:,}"
        parts.append(f"{'outputs of its group' if kind == 'group' else kind} {first.get(kind, 0):,} to {until}")
    return ", ".join(parts)
