"""The Stream: a pipeline that changes the number of rows, and a place. Every method returns a new one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from midepoch import html
from midepoch.checks import whole
from midepoch.flow.chunk import real
from midepoch.flow.iterate import StreamBatches, StreamRows
from midepoch.flow.lanes import Place
from midepoch.flow.length import estimated_length, known_length
from midepoch.flow.spec import Spec, StageSpec, Window
from midepoch.flow.standing import FlowStanding, What
from midepoch.order import Cut
from midepoch.order.keys import check_seed
from midepoch.pipeline import Pipeline
from midepoch.resumable import Resumable
from midepoch.seeds import check_agreed
from midepoch.stages import Stages
from midepoch.standing import register_with_torch
from midepoch.transforms import Step
from midepoch.transforms.formats import check_format

if TYPE_CHECKING:
    from midepoch.loader.stream import StreamLoader

Self = TypeVar("Self", bound="Stream")


class Stream(Stages, Resumable):
    """Outputs of a pipeline that changes the number of rows, or of several datasets together; iterable and resumable.

    Made by ``filter``, ``flat_map``, ``unbatch``, ``batch``, ``pack``, ``map(one_to_one=False)`` of a dataset, and by
    ``mix``, ``concat`` and ``zip``. There are no positions: it cannot be indexed, and its length is an estimate.

    Iterating yields the outputs of the current epoch (``set_epoch``), each a dict. ``iter()`` starts at the beginning
    of the epoch, or where a loaded state left off; a ``break`` moves nothing.
    """

    def __init__(self, what: What, place: Place | None = None, *, asked: bool = False) -> None:
        self._standing = FlowStanding(what, place or Place(), asked)
        register_with_torch(Stream)

    # What it is

    @property
    def what(self) -> What:
        """The frozen description of this stream."""
        return self._standing.what

    @property
    def spec(self) -> Spec:
        return self._standing.what.spec

    def __len__(self) -> int:
        known = known_length(self.spec)
        if known is None or not (self.state_is_global or self.spec.is_rows):
            raise TypeError("the length of this stream is not known: estimated_len learns it from what was seen")
        return self.what.cut.before(known)

    @property
    def estimated_len(self) -> int | None:
        """About how many outputs an epoch has (of this shard), learned from what was seen; None before that.

        It is the number of the last epoch that was gone through; until then what is left is taken to be like what was
        seen. Part of the state.
        """
        what, place = self.what, self._standing.place()
        found: float | None = what.epoch_outputs or estimated_length(what.spec, place, what.lanes)
        return None if found is None else round(found / what.cut.count)

    @property
    def column_names(self) -> list[str]:
        """The columns of an output. Where only running tells, this makes the first one."""
        if (known := self._columns) is not None:
            return list(known)
        lanes = FlowStanding(self.what, Place(self.epoch)).begin()[1]
        deal = lanes.take(1)
        return list(real(deal.items).columns) if deal is not None else []

    @property
    def epoch(self) -> int:
        """The epoch that ``iter()`` will go through. Setting it is ``set_epoch``."""
        return self._standing.shared.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def position(self) -> int:
        """How many outputs of the epoch all shards together have been handed."""
        return self._standing.place().position

    @property
    def changes(self) -> tuple[str, ...]:
        """What was changed at resumes since the run began: weights and sources of mixes, and what was allowed."""
        return self.what.changes

    def _repr_html_(self) -> str:
        what, about = self.what, self.estimated_len
        shown = {"steps": what.spec.text, "lanes": what.lanes, "at": f"epoch {self.epoch}"}
        return html.table("Stream", shown if about is None else {**shown, "outputs": f"about {about:,} an epoch"})

    def __repr__(self) -> str:
        what = self.what
        parts = [what.spec.text]
        if not isinstance(what.spec.base, Pipeline):
            parts.append(f"{len(what.spec.base.parts)} parts")
        if what.lanes > 1:
            parts.append(f"{what.lanes} lanes")
        if what.cut.count > 1:
            parts.append(f"shard {what.cut.index} of {what.cut.count}")
        if what.format:
            parts.append(f"format={what.format}")
        place = self._standing.place()
        if place.begun:
            parts.append(f"at epoch {place.epoch}, {place.position:,} outputs handed over")
        return f"Stream({'; '.join(parts)})"

    # More steps

    @property
    def _functions(self) -> int:
        return self.spec.functions

    @property
    def _input_format(self) -> str:
        return self.what.format or "python"

    @property
    def _lists(self) -> tuple[str, ...] | None:
        return self.spec.known.lists

    @property
    def _columns(self) -> tuple[str, ...] | None:
        return self.spec.known_columns

    def _with_step(self: Self, step: Step) -> Self:
        new = self.spec.with_step(step)
        _ = new.known_columns  # a wrong column is an error here, not in an hour
        return self._derive(replace(self.what, spec=new))

    def _with_stage(self, stage: StageSpec) -> Stream:
        return self._derive(replace(self.what, spec=Spec(self.spec.base, (*self.spec.stages, stage))))

    def shuffle(self, seed: int, window: int = 10_000) -> Stream:
        """Shuffled within windows of ``window`` outputs, anew in every epoch. A resume makes one window again.

        Shuffling the dataset first, before ``filter`` or ``pack``, permutes all rows and costs nothing on resume.
        """
        return self._with_stage(Window(whole(window, "shuffle(window=…)", 1), check_seed(seed)))

    def with_format(self: Self, kind: str | None) -> Self:
        """Outputs and batches as "python" (the default), "numpy", "torch", "arrow" or "jax"."""
        return self._derive(replace(self.what, format=check_format(kind)))

    def with_lanes(self: Self, lanes: int) -> Self:
        """Cut every epoch into this many lanes, whose outputs come in turn.

        The order is a function of the number of lanes alone. A rank runs its own lanes where the world size divides it;
        else ranks run some lanes together, each for all of them. Choose a number that all your world sizes divide.
        """
        lanes = whole(lanes, "with_lanes", 1)
        if lanes > 1 and not self.spec.cuts_alike:
            raise ValueError(
                "with_lanes: a zip of flows that are not rows of equally long datasets has one lane: with more, others "
                "would stand side by side."
            )
        return self._derive(replace(self.what, lanes=lanes, lanes_chosen=True))

    def shard(self: Self, num_shards: int, index: int) -> Self:
        """One of ``num_shards`` parts of every epoch, without overlap or gap, of about the same size."""
        if self.what.cut.count > 1:
            raise ValueError(f"the stream is already shard {self.what.cut.index} of {self.what.cut.count}")
        for leaf in self.spec.leaves:
            check_agreed(leaf.seed_alone, num_shards)
        return self._derive(replace(self.what, cut=Cut(index, num_shards)))

    def _derive(self: Self, what: What) -> Self:
        standing = self._standing
        if standing.start.begun and (what.spec is not self.spec or what.lanes != self.what.lanes):
            raise ValueError("a state was loaded, and this would change what comes next. Add steps, then load it.")
        return type(self)(what, replace(standing.start, epoch=self.epoch), asked=standing.shared.asked)

    # Reading

    def __getitem__(self, key: Any) -> Any:
        raise TypeError("a stream has no positions to index by: iterate it, or index the dataset that it is made of")

    def __iter__(self) -> Iterator[Any]:
        here, self._pass = self._standing, None
        return here.follow(StreamRows(here.begin(), here, self._input_format))  # type: ignore[no-any-return]

    def iter(self, batch_size: int, drop_last_batch: bool = False) -> Iterator[Any]:
        """Batches of the current epoch as columns; the state follows as for rows."""
        here, size = self._standing, whole(batch_size, "iter", 1)
        found = StreamBatches(here.begin(), here, self._input_format, size, drop_last_batch)
        return here.follow(found)  # type: ignore[no-any-return]

    def loader(
        self,
        batch_size: int,
        num_workers: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        prefetch: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel: Any = None,
        ends: str | None = None,
        multiprocessing_context: str | None = None,
        collate_columns: bool = False,
    ) -> StreamLoader:
        """Batches of every epoch; the arguments are those of ``Dataset.loader``.

        Workers run everything up to the first ``batch``, ``pack``, ``shuffle``, ``mix``, ``concat`` or ``zip``; what
        follows (and ``collate_fn``) is run by the main process. Every rank runs lanes of its own: ``with_lanes``
        chooses how many there are, else there is one for each rank.
        """
        from midepoch.loader.make_stream import make_stream_loader

        standing = self._standing
        return make_stream_loader(
            self.what,
            replace(standing.start, epoch=self.epoch),
            asked=standing.shared.asked,
            batch_size=batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=collate_fn,
            prefetch=prefetch,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            rank=rank,
            world_size=world_size,
            data_parallel=data_parallel,
            ends=ends,
            multiprocessing_context=multiprocessing_context,
            collate_columns=collate_columns,
        )

    # The place

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The one a loaded state is in is gone on with where it was left; any other starts anew."""
        self._standing.set_epoch(whole(epoch, "set_epoch"))
        self._pass = None

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, just behind the last output handed over: a few numbers a lane, JSON-able."""
        return self._standing.save()

    def load_state_dict(self, state: Any, *, allow: Collection[str] = ()) -> None:
        """Go on from a state, or from the list of those of all shards.

        Raises CheckpointMismatchError, and changes nothing, if it belongs to other data, another order or pipeline;
        ``allow=["pipeline"]`` lets a field differ all the same, which is recorded in ``changes`` and in the state.
        Weights of a mix may be changed, and sources be added or left out: the others go on where they were.
        """
        self._standing.load(state, allow)
        self._pass = None

    def check_state(self, state: Any) -> None:
        """Raise what ``load_state_dict`` would raise for a state that does not belong here. Changes nothing."""
        self._standing.check(state)

    @property
    def state_is_global(self) -> bool:
        """Whether the state of one shard restores every shard: not if each runs lanes of its own."""
        return self.what.state_is_global

    @property
    def takes_states_of_all_ranks(self) -> bool:
        """Whether the list of the states of all shards restores any number of them."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {"standing": self._standing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._standing = state["standing"]
        register_with_torch(Stream)
