"""The loader of a stream: batches of every epoch, and the place behind the last one handed over."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from midepoch.checks import whole
from midepoch.ending import silent_at_exit
from midepoch.flow import state as states
from midepoch.flow.lanes import Deal, Lanes, Place, Share
from midepoch.flow.length import estimated_length, known_length
from midepoch.flow.rows import Bundles, BundlesHere
from midepoch.flow.stages import Packing
from midepoch.flow.standing import What, check_known
from midepoch.loader.bundles import BundlePool
from midepoch.loader.common import AnyLoader
from midepoch.loader.equal import Counterparts, EqualSteps
from midepoch.loader.options import Options
from midepoch.loader.steps import StreamPass
from midepoch.order import Cut
from midepoch.state import check_worker

_log = logging.getLogger("midepoch")


class StreamLoader(AnyLoader):
    """Batches of a stream, epoch after epoch. Made by ``Stream.loader``.

    Each ``iter()`` goes through one epoch: from its beginning, or from where a loaded state left off. When it has been
    gone through, the next ``iter()`` is the next epoch. A ``break`` moves nothing.
    """

    def __init__(
        self,
        what: What,
        options: Options,
        place: Place,
        *,
        asked: bool = False,
        counterparts: Counterparts | None = None,
        equal: EqualSteps | None = None,
    ) -> None:
        super().__init__(options)
        self._counterparts = counterparts
        self._what, self._place, self._asked, self.equal = what, place, asked, equal
        self.delivered: Place | Deal | None = None
        self._iterator: weakref.ref[StreamPass] | None = None
        self._bundles: BundlesHere | BundlePool | None = None
        self._packed = [0, 0]  # tokens, places, of passes before this one
        self._skipped = 0  # by bundles and passes before these
        if place.begun:
            check_known(place, Share.of(what.lanes, what.cut), what.lanes)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, where that can be known."""
        known = known_length(self._what.spec)
        if known is None or not (self.state_is_global or self._what.spec.is_rows):
            raise TypeError("the number of batches is not known: estimated_len learns it from what was seen")
        return self._batches_of(known)

    @property
    def estimated_len(self) -> int | None:
        """About how many batches an epoch has, learned from what was seen so far; None before that."""
        what = self._what
        if what.epoch_outputs:  # they were counted
            return self._batches_of(what.epoch_outputs)
        found = estimated_length(what.spec, self._where(), what.lanes)
        return None if found is None else max(1, round(found / (self._options.batch_size * what.cut.count)))

    def _batches_of(self, outputs: int) -> int:
        """Batches of this rank, of so many outputs of all ranks."""
        options, cut = self._options, self._what.cut
        if options.ends == "uneven":
            return -(-cut.before(outputs) // options.batch_size)  # none of the last step, if it has no output for it
        step = options.batch_size * cut.count
        return outputs // step if options.ends == "drop" else -(-outputs // step)

    @property
    def packing_efficiency(self) -> float | None:
        """Which part of all places in packed sequences holds tokens, of what this process has packed; None without."""
        live = self._iterator() if self._iterator is not None else None
        tokens, places = self._packed
        if live is not None and live.packing is not None:
            tokens, places = tokens + live.packing.tokens, places + live.packing.places
        return tokens / places if places else None

    @property
    def skipped(self) -> int:
        """Rows left out so far under ``on_error="skip"``, of what this process has read: it may be a bundle ahead."""
        live = self._iterator() if self._iterator is not None else None
        packing = live.packing if live is not None else None
        bundles = self._bundles.skipped if self._bundles is not None else 0
        return self._skipped + bundles + (packing.skipped if packing is not None else 0)

    def __repr__(self) -> str:
        at, what = self._where(), self._what
        return (
            f"StreamLoader({what.spec.text}; batch_size={self._options.batch_size}; "
            f"num_workers={self._options.num_workers}; rank {what.cut.index} of {what.cut.count}; {what.lanes} lanes; "
            f"at epoch {at.epoch}, {at.position:,} outputs handed over)"
        )

    @property
    def what(self) -> What:
        """The frozen description of what it loads."""
        return self._what

    @property
    def cut(self) -> Cut:
        """Which share of every global batch this rank gets: ``index`` of ``count``."""
        return self._what.cut

    @property
    def changes(self) -> tuple[str, ...]:
        """What was changed at resumes since the run began: weights and sources of mixes, and what was allowed."""
        return self._what.changes

    def _epoch(self) -> int:
        at = self._where()
        return at.epoch + 1 if at.ended else at.epoch

    @property
    def position(self) -> int:
        """How many outputs of the epoch all ranks together have been handed."""
        at = self._where()
        return 0 if at.ended else at.position

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The one a loaded state is in is gone on with where it was left; any other starts anew."""
        epoch = whole(epoch, "set_epoch")
        self._pass = None
        if epoch != self._place.epoch:
            self._place, self.delivered = Place(epoch), None
        elif self.delivered is not None and self._where().epoch != epoch:
            self.delivered = None
        self._asked = True

    def state_dict(self) -> dict[str, Any]:
        """Where to go on: just behind the last batch handed over. A few numbers for each lane of this rank."""
        self._draw_seed()
        return self._what.save(self._where())

    def load_state_dict(self, state: Any, *, allow: Collection[str] = ()) -> None:
        """Go on from a state, or the list of those of all ranks, with any batch size, workers and number of ranks.

        Raises CheckpointMismatchError, and changes nothing, if it belongs to other data, another order or pipeline;
        ``allow=["pipeline"]`` lets a field differ all the same, which is recorded in ``changes`` and in the state.
        Weights of a mix may be changed, and sources be added or left out: the others go on where they were.
        """
        found = self._resumed(state, allow)
        self.close()
        what = self._what.restored(found)
        # No call among these: a signal handler that saves must not see half of them.
        self._what, self._place, self._bundles, self.delivered, self._asked = what, found.place, None, None, False
        if self._counterparts is not None:
            self._counterparts.loaded()

    def _draw_seed(self) -> None:
        """Fix what the global generators are seeded from while functions run: at the first pass, or the first state."""
        if self._what.spec.has_functions or self._options.collate_fn is not None:
            self._what = self._what.seeded()

    def check_state(self, state: Any) -> None:
        """Raise what ``load_state_dict`` would raise for a state that does not belong here. Changes nothing."""
        self._resumed(state, ())

    def _resumed(self, state: Any, allow: Collection[str]) -> states.Restored:
        found = states.load(state, self._what.spec, allow)
        check_worker(found.worker, None)
        check_known(found.place, Share.of(found.lanes, self._what.cut), found.lanes)
        return found

    @property
    def state_is_global(self) -> bool:
        """Whether the state of one rank restores every rank: not if each runs lanes of its own."""
        return self._what.state_is_global

    @property
    def takes_states_of_all_ranks(self) -> bool:
        """Whether the list of the states of all ranks restores any number of them."""
        return True

    def _where(self) -> Place:
        found = self.delivered
        return found.place() if isinstance(found, Deal) else found or self._place

    def __iter__(self) -> Iterator[Any]:
        self._end_iteration()
        self._draw_seed()
        place, rolled = self._next_place()
        batches = StreamPass(self, place, rolled)
        self._iterator = weakref.ref(batches)
        return batches

    def _next_place(self) -> tuple[Place, bool]:
        """Where the next pass begins, and whether that is in the epoch after the one that this stands in."""
        rolled = self._place.ended and not self._asked
        place = Place(self._place.epoch + 1) if rolled else self._place
        self.delivered = place if rolled else None
        return place, rolled

    def resume(self, batches: StreamPass) -> tuple[Place, bool]:
        """A pass was given a state, which this has loaded: where it goes on."""
        self._draw_seed()
        self._iterator = weakref.ref(batches)
        return self._next_place()

    def compare(self, place: Place, *, first: bool) -> None:
        """Compare this rank with the others: what it loads, and after the first batch of a pass also from where."""
        if self._counterparts is None:
            return
        if first:
            self._counterparts.check_identity(self._what.identity)
            return
        at = {"epoch": place.epoch}
        if place.known.count == 1 or not any(lane.ended for lane in place.lanes.values()):
            at["position"] = place.position  # the same on all ranks, unless one of them has nothing left
        self._counterparts.check_pass(self._what.identity, at)

    def begin(self, place: Place, process: Cut | None = None) -> Lanes:
        """The lanes of this rank, or of another process, from a place on."""
        return self._what.open(process or self._what.cut, self._make_bundles(), place)

    @property
    def may_roll(self) -> bool:
        """Whether a pass that finds nothing left goes on with the next epoch: not if an epoch was named, nor where
        other ranks may have something left.
        """
        alone = self.state_is_global or self._options.ends != "uneven"
        return self._place.begun and not self._asked and alone

    def rolled_to(self, epoch: int) -> None:
        self.delivered = Place(epoch)

    def _make_bundles(self) -> Bundles:
        if isinstance(self._bundles, BundlePool) and not self._bundles.is_here:
            self._bundles = None
        if self._bundles is None:
            what, options = self._what, self._options
            if options.num_workers and not what.spec.plain:
                self._bundles = BundlePool(what.leaves, options, self._meter.spent)
            else:
                self._bundles = BundlesHere(what.leaves, shared=what.cut.count > 1, spent=self._meter.spent)
        self._bundles.begin()
        return self._bundles

    def epoch_over(self, place: Place, rolled: bool) -> None:
        """Move to the next epoch; past one that was rolled over to, so that naming it does not repeat it.

        Until the next epoch is named or begun, a state is that after the last batch, as for a dataset's loader.
        """
        if place.position:
            self._what = replace(self._what, epoch_outputs=place.position)
        else:
            _log.warning("epoch %d of %r has nothing in it: do its filters leave anything?", place.epoch, self)
        if self._place.epoch not in (place.epoch, place.epoch - rolled):
            self.delivered = None  # another epoch was named while this one was gone through
            return
        self._place = place if rolled else Place(place.epoch + 1)
        self.delivered, self._asked = place if place.position else None, False

    def note(self, packing: Packing) -> None:
        """What a pass that has ended has packed."""
        self._packed = [self._packed[0] + packing.tokens, self._packed[1] + packing.places]
        self._skipped += packing.skipped

    def _end_iteration(self) -> None:
        live = self._iterator() if self._iterator is not None else None
        if live is not None:
            live.close()
        self._iterator = self._pass = None

    def close(self) -> None:
        """End workers now; they also end with the loader, and with the process however it ends."""
        self._end_iteration()
        self._close_pool()

    def close_workers(self, *, anyway: bool = False) -> None:
        """Called by a pass that has ended: workers go with it unless they are persistent."""
        if anyway or (self._options.num_workers and not self._options.persistent_workers):
            self._close_pool()

    def _close_pool(self) -> None:
        bundles, self._bundles = self._bundles, None
        if bundles is not None:
            self._skipped += bundles.skipped
            bundles.close()

    def _batches_left(self, batches: Iterator[Any], number: int) -> int | None:  # noqa: ARG002
        total = self.estimated_len
        return None if total is None else max(0, total - number)

    def _shown(self) -> tuple[dict[str, Any], float | None]:
        at, what = self._where(), self._what
        total = what.epoch_outputs or estimated_length(what.spec, at, what.lanes)
        about = {
            "stream": what.spec.text,
            "lanes": what.lanes,
            "at": f"epoch {self.epoch}, {self.position:,} outputs handed over"
            + (f" of about {total:,.0f}" if total else ""),
        }
        return about, self.position / total if total else None

    @silent_at_exit
    def __del__(self) -> None:
        if getattr(self, "_bundles", None) is not None:
            self._close_pool()
