"""Where a dataset stands: its cursor, kept by what iterators hand out, in the main process and in torch's workers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from midepoch import state as states
from midepoch.engine import Engine
from midepoch.iterate import BatchIterator, RowIterator, Start
from midepoch.order import Cut
from midepoch.pipeline import Pipeline
from midepoch.seeds import draw_global_seed
from midepoch.shared import Note, SharedCell, worker_share
from midepoch.state import Cursor, Resumed

_Iterator = TypeVar("_Iterator", RowIterator, BatchIterator)
_log = logging.getLogger("midepoch")


class Standing:
    """The one mutable part of a dataset: an epoch, where ``iter()`` starts in it, and what was handed out last.

    ``pipeline`` is replaced as a whole when a state is loaded that brings a drawn seed or lanes along.
    """

    def __init__(self, pipeline: Pipeline, cursor: Cursor, asked: bool = False) -> None:
        self.pipeline = pipeline
        self.shared = SharedCell(cursor.epoch, asked)
        self.start = cursor.position
        self._round = self._batch = 0
        self._latest: RowIterator | BatchIterator | None = None
        self._delivered: Cursor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"pipeline": self.pipeline, "shared": self.shared, "start": self.start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Standing.__init__(self, state["pipeline"], Cursor())
        self.shared, self.start = state["shared"], state["start"]

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.shared.epoch:
            self.shared.epoch, self.start = epoch, 0
            self._latest, self._delivered = None, None
        self.shared.asked = True

    def save(self) -> dict[str, Any]:
        """The state just behind the last row handed over."""
        live = self._latest
        return self.save_at(self.cursor(), *((live.round, live.batch) if live else (self._round, self._batch)))

    def load(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> None:
        """Go on from a state, or raise and change nothing."""
        self._adopt(*self._resume(state, allow))
        self._latest, self._delivered = None, None

    def _adopt(self, resumed: Resumed, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        if resumed.global_seed is not None:
            self.shared.global_seed = resumed.global_seed
        self._go_to(resumed)

    def _go_to(self, resumed: Resumed) -> None:
        """Stand at a cursor. One at the end of an epoch leaves alone another epoch that was asked for by name."""
        cursor, (share, worker) = resumed.cursor, self.share()
        self.start, self._round, self._batch = cursor.position, resumed.round, resumed.batch
        ended, asked = self._ended(share, cursor), self.shared.asked
        if worker is not None:
            # The epoch is shared with the main process, which may have named another one for the pass after this.
            if not ended and not asked:
                self.shared.epoch = cursor.epoch
        elif not ended or not asked:
            self.shared.epoch = cursor.epoch
        elif self.shared.epoch != cursor.epoch:
            self.start = 0

    def _resume(self, state: Any, allow: Collection[str] = ()) -> tuple[Resumed, Pipeline]:
        resumed = states.load(self._given(state), self.pipeline, allow)
        _, worker = self.share()
        states.check_worker(resumed.worker, worker)
        return resumed, states.adopt(resumed, self.pipeline)

    def check(self, state: Any) -> None:
        """Raise what loading a state would raise; one of a worker of any number of them passes."""
        states.load(self._given(state), self.pipeline)

    def _given(self, state: Any) -> Any:
        """A state, or a list with one of each rank."""
        return list(map(self.state_in, state)) if isinstance(state, (list, tuple)) else self.state_in(state)

    def state_in(self, state: Any) -> Any:
        """A hook for interfaces whose states look different."""
        return state

    def save_at(self, cursor: Cursor, round_: int = 0, batch: int = 0) -> dict[str, Any]:
        """The state at a cursor, for the iterators of this dataset."""
        state = states.save(states.identity(self.pipeline), cursor, self.seeded.global_seed)
        _, worker = self.share()
        if worker is not None:
            state["worker"], state["workers"], state["shards"] = worker
            state["round"], state["batch"] = round_, batch
        cut = self.pipeline.cut
        if cut.count > 1 and self.pipeline.can_skip:
            state["shard"], state["shards"] = cut.index, cut.count
        return state

    @property
    def seeded(self) -> Pipeline:
        """The pipeline as it is run: with the seed of the global generators, drawn when it is first asked for."""
        if not self.pipeline.has_functions:
            return self.pipeline
        if self.shared.global_seed is None:
            given = self.pipeline.global_seed
            self.shared.global_seed = draw_global_seed(self.pipeline.source.fingerprint) if given is None else given
        return replace(self.pipeline, global_seed=self.shared.global_seed)

    def cursor(self) -> Cursor:
        if self._latest is not None:
            return self._latest.cursor
        return self._delivered or Cursor(self.shared.epoch, self.start)

    def share(self) -> tuple[Cut, tuple[int, int, int] | None]:
        """This process's share of the positions; in a DataLoader worker, its share of the shard."""
        return worker_share(self.pipeline.cut)

    def _ended(self, share: Cut, cursor: Cursor) -> bool:
        """Whether nothing of the epoch is left at a cursor: not for this shard, nor for any other in its place."""
        rows, shards = self.pipeline.rows, self.pipeline.cut.count
        first = share.index - share.index % shards  # the shares of this worker on all shards
        places = (Cut(first + shard, share.count) for shard in range(shards))
        return cursor.position > 0 and all(place.before(cursor.position) >= place.before(rows) for place in places)

    def begin(self) -> Cursor:
        """Where ``iter()`` starts. At the end of an epoch that was not asked for by name, that is its beginning."""
        cursor = Cursor(self.shared.epoch, self.start)
        share, worker = self.share()
        if worker is not None:
            self.start = 0  # in a worker a loaded state is for one iteration: the next is a new epoch
        elif self._ended(share, cursor) and not self.shared.asked:
            return Cursor(self.shared.epoch, 0)
        return cursor

    def start_from(self, cursor: Cursor) -> Start:
        share, worker = self.share()
        late = None
        if worker is not None:
            if not cursor.position:  # any other position is one of the lanes that it was saved with
                order = replace(self.pipeline.order, lanes=self.worker_lanes(share.count))
                self.pipeline = replace(self.pipeline, order=order)
            at_end = self._ended(share, cursor)
            note = Note(self._round, at_end, cursor.epoch)
            self.shared.note(worker[0], note)
            late = self._roll_over(note, worker[1]) if at_end else None
        start = Start(Engine(self.seeded, shared=share.count > 1), share, cursor, self._round, self._batch, late)
        self._round = self._batch = 0
        return start

    def worker_lanes(self, shares: int) -> int:  # noqa: ARG002  (what a subclass decides by)
        """Into how many lanes the epoch is cut for all DataLoader workers of all shards."""
        return self.pipeline.order.lanes

    def _roll_over(self, mine: Note, workers: int) -> Callable[[], tuple[Cursor, int] | None]:
        """In a worker that resumes at its end: a new epoch begins if all workers are at theirs, or some are past it.

        StatefulDataLoader asks for the first batch after all workers have loaded, so their notes are complete by then.
        It goes on with the worker after the last one, which is the first again only if all had the same number of
        batches; otherwise this pass stays empty and the next one is the new epoch, in the right order.
        """
        shared, cut, rows = self.shared, self.pipeline.cut, self.pipeline.rows
        size = max(1, self._batch)
        even = len({-(-cut.within(Cut(worker, workers)).before(rows) // size) for worker in range(workers)}) == 1

        def decide() -> tuple[Cursor, int] | None:
            notes = shared.notes(workers)
            ahead = max(notes)
            if ahead.round > mine.round:
                return Cursor(ahead.epoch), ahead.round
            if not all(note.at_end for note in notes):
                return None
            if not shared.asked:
                shared.epoch = mine.epoch
                if not even:
                    return None
            elif shared.epoch == mine.epoch:
                return None  # the user asks for this very epoch, of which nothing is left
            elif not even:
                _log.warning("epoch %d begins with another worker than it would have without the resume", shared.epoch)
            return Cursor(shared.epoch), mine.round + 1

        return decide

    def start_at(self, state: Mapping[str, Any]) -> Start:
        """Where an iterator of this dataset goes on that is given a state itself, as StatefulDataLoader does."""
        resumed, pipeline = self._resume(state)
        self._adopt(resumed, pipeline)
        if self.share()[1] is None:
            return self.start_from(self.begin())
        self.start = 0
        return self.start_from(resumed.cursor)

    def follow(self, iterator: _Iterator) -> _Iterator:
        self._latest, self._delivered = iterator, None
        return iterator

    def epoch_over(self, iterator: Any, cursor: Cursor) -> None:
        """An epoch was gone through: the next ``iter()`` starts at the beginning."""
        if iterator is self._latest:  # not one that was left behind by a newer one
            self._latest, self._delivered, self.start = None, cursor, 0


_registered: set[type] = set()


def register_with_torch(kind: type) -> None:
    """Let torch's DataLoader see an iterable dataset, if torch has been imported; never import it for that."""
    data = sys.modules.get("torch.utils.data")
    if kind not in _registered and data is not None and hasattr(data, "IterableDataset"):
        data.IterableDataset.register(kind)
        _registered.add(kind)
