"""Where a stream stands: its place, kept by what iterators hand out, in the main process and in torch's workers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from midepoch.errors import CheckpointMismatchError
from midepoch.flow import state as states
from midepoch.flow.lanes import Lanes, Place, Share
from midepoch.flow.rows import Bundles, BundlesHere
from midepoch.flow.spec import Spec
from midepoch.order import Cut
from midepoch.pipeline import Pipeline
from midepoch.seeds import draw_global_seed
from midepoch.shared import SharedCell, worker_share
from midepoch.state import check_worker


@dataclass(frozen=True, eq=False)
class What:
    """What a stream is. ``lanes_chosen``: the number of lanes was given, or taken over from a state."""

    spec: Spec
    format: str | None = None
    cut: Cut = field(default_factory=Cut)
    lanes: int = 1
    lanes_chosen: bool = False
    changes: tuple[str, ...] = ()
    epoch_outputs: int = 0
    global_seed: int | None = None
    """The seed of the global random generators while functions run, once it is drawn."""

    def seeded(self) -> What:
        """With the seed of the global generators, drawn unless there is one."""
        if self.global_seed is not None:
            return self
        return replace(self, global_seed=draw_global_seed(self.spec.digest))

    def for_processes(self, count: int) -> What:
        """With a lane for each process, unless lanes were chosen, or rows are only copied and need none."""
        if self.lanes_chosen or self.spec.plain or not self.spec.cuts_alike:
            return self
        return replace(self, lanes=count)

    @property
    def state_is_global(self) -> bool:
        """Whether the state of one process restores all: not if each runs lanes of its own."""
        return Share.of(self.for_processes(self.cut.count).lanes, self.cut).lanes.count == 1

    def restored(self, found: states.Restored) -> What:
        return replace(
            self,
            spec=found.spec,
            lanes=found.lanes,
            lanes_chosen=True,
            changes=found.changes,
            epoch_outputs=found.epoch_outputs,
            global_seed=self.global_seed if found.global_seed is None else found.global_seed,
        )

    def save(self, place: Place) -> dict[str, Any]:
        return states.save(self.identity, place, self.epoch_outputs, self.changes, self.global_seed)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The fields by which a state knows what it belongs to."""
        return states.identity(self.spec, self.lanes)

    def open(self, process: Cut, bundles: Bundles, place: Place) -> Lanes:
        """The lanes of one process from a place on. Raises CheckpointMismatchError if the place is another's."""
        share = Share.of(self.lanes, process)
        check_known(place, share, self.lanes)
        return Lanes(self.spec, self.lanes, share, bundles, place)

    @property
    def leaves(self) -> tuple[Pipeline, ...]:
        """The pipelines of single sources, each cut into the lanes."""
        return tuple(
            replace(leaf, order=replace(leaf.order, lanes=self.lanes), global_seed=self.global_seed, path=path)
            for leaf, path in zip(self.spec.leaves, self.spec.paths(), strict=True)
        )


def check_known(place: Place, share: Share, lanes: int) -> None:
    """Raise CheckpointMismatchError if a place does not tell of lanes that are needed."""
    missing = [lane for lane in share.lanes.positions(0, lanes).tolist() if lane not in place.lanes]
    if place.begun and missing:
        known = place.known
        raise CheckpointMismatchError(
            "flow",
            f"the lanes {known.index}, {known.index + known.count}, … of {lanes}",
            f"lane {missing[0]} is needed here",
            "this is the state of one of several ranks: a rank knows only the lanes that it runs. Load the list of the "
            "states of all ranks (any number of ranks can go on from it), or save with PipelineCheckpoint, which does",
        )


class Iterating(Protocol):
    """An iterator of a stream."""

    @property
    def place(self) -> Place: ...


class FlowStanding:
    """The one mutable part of a stream: an epoch, where ``iter()`` starts in it, and what was handed out last."""

    def __init__(self, what: What, place: Place, asked: bool = False) -> None:
        self.what = what
        self.shared = SharedCell(place.epoch, asked)
        self.start = place
        self._latest: Iterating | None = None
        self._delivered: Place | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"what": self.what, "shared": self.shared, "start": self.start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FlowStanding.__init__(self, state["what"], Place())
        self.shared, self.start = state["shared"], state["start"]

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.shared.epoch:
            self.shared.epoch, self.start = epoch, Place(epoch)
            self._latest, self._delivered = None, None
        self.shared.asked = True

    def place(self) -> Place:
        if self._latest is not None:
            return self._latest.place
        return self._delivered or replace(self.start, epoch=self.shared.epoch)

    def save(self) -> dict[str, Any]:
        return self.save_at(self.place())

    def save_at(self, place: Place) -> dict[str, Any]:
        process, worker = self.share()
        what = self.what if place.begun else self.what.for_processes(process.count)
        state = self._seeded(what).save(place)
        if worker is not None:
            state["worker"], state["workers"], state["shards"] = worker
        return state

    def _seeded(self, what: What) -> What:
        """As it is run: with the seed of the global generators, drawn when it is first asked for."""
        if not what.spec.has_functions:
            return what
        if self.shared.global_seed is None:
            self.shared.global_seed = what.seeded().global_seed
        return replace(what, global_seed=self.shared.global_seed)

    def load(self, state: Any, allow: Collection[str] = ()) -> None:
        """Go on from a state, or raise and change nothing."""
        self._go_to(self.resume(state, allow))
        self._latest, self._delivered = None, None

    def _go_to(self, found: states.Restored) -> None:
        """Stand at a place. One at the end of an epoch leaves alone another epoch that was asked for by name."""
        self.what, self.start = self.what.restored(found), found.place
        if found.global_seed is not None:
            self.shared.global_seed = found.global_seed
        ended, asked = found.place.ended, self.shared.asked
        if self.share()[1] is not None:
            # The epoch is shared with the main process, which may have named another one for the pass after this.
            if not ended and not asked:
                self.shared.epoch = found.place.epoch
        elif not ended or not asked:
            self.shared.epoch = found.place.epoch
        elif self.shared.epoch != found.place.epoch:
            self.start = Place(self.shared.epoch)

    def resume(self, state: Any, allow: Collection[str] = ()) -> states.Restored:
        found = states.load(state, self.what.spec, allow)
        process, worker = self.share()
        check_worker(found.worker, worker)
        check_known(found.place, Share.of(found.lanes, process), found.lanes)
        return found

    def check(self, state: Any) -> None:
        """Raise what loading a state would raise; one of a worker of any number of them passes."""
        found = states.load(state, self.what.spec)
        if found.worker is None:
            check_known(found.place, Share.of(found.lanes, self.what.cut), found.lanes)

    def share(self) -> tuple[Cut, tuple[int, int, int] | None]:
        """This process's share of the outputs; in a DataLoader worker, its share of the shard."""
        return worker_share(self.what.cut)

    def begin(self) -> tuple[Place, Lanes]:
        """Where ``iter()`` starts, and the lanes from there on. At the end of an epoch that is its beginning."""
        place, (process, worker) = replace(self.start, epoch=self.shared.epoch), self.share()
        if worker is not None:
            self.start = Place(place.epoch)  # in a worker a loaded state is for one iteration
        elif place.ended and not self.shared.asked:
            place = Place(place.epoch)
        return place, self.open_at(place, process)

    def open_at(self, place: Place, process: Cut) -> Lanes:
        if not place.begun:
            self.what = self.what.for_processes(process.count)
        what = self._seeded(self.what)
        return what.open(process, BundlesHere(what.leaves, shared=process.count > 1), place)

    def reopen(self, place: Place) -> Lanes:
        """The lanes from a place of the current pass on."""
        return self.open_at(place, self.share()[0])

    def start_at(self, state: Any) -> tuple[Place, Lanes]:
        """Where an iterator of this stream goes on that is given a state itself, as StatefulDataLoader does."""
        found = self.resume(state)
        self._go_to(found)
        process, worker = self.share()
        if worker is None:
            return self.begin()
        self.start = Place(self.shared.epoch)  # in a worker a loaded state is for one iteration
        return found.place, self.open_at(found.place, process)

    def follow(self, iterator: Any) -> Any:
        self._latest, self._delivered = iterator, None
        return iterator

    def epoch_over(self, iterator: Any, place: Place) -> None:
        """An epoch was gone through: the next ``iter()`` starts at the beginning."""
        if iterator is self._latest:
            self._latest, self._delivered, self.start = None, place, Place(place.epoch)
            self.what = replace(self.what, epoch_outputs=place.position)
