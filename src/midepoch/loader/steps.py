"""One pass over (the rest of) an epoch of a stream: as many steps as all ranks take, each with its batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

from midepoch.ending import silent_at_exit
from midepoch.errors import MidepochError
from midepoch.flow.chunk import Items
from midepoch.flow.lanes import Deal, Lanes, Place
from midepoch.flow.stages import Packing
from midepoch.loader.equal import EqualSteps
from midepoch.loader.meter import Meter
from midepoch.loader.options import Options, check_goes_on
from midepoch.loader.present import Presenter
from midepoch.order import Cut
from midepoch.resumable import HasState
from midepoch.transforms.generators import Generators

_NOTHING = object()


class Loading(Protocol):
    """The loader behind a pass."""

    equal: EqualSteps | None
    delivered: Place | Deal | None
    """The place after the last batch delivered; None if that is where the pass begins."""

    @property
    def what(self) -> Any: ...

    @property
    def options(self) -> Options: ...

    @property
    def meter(self) -> Meter: ...

    @property
    def may_roll(self) -> bool: ...

    def compare(self, place: Place, *, first: bool) -> None: ...

    def begin(self, place: Place, process: Cut | None = None) -> Lanes: ...

    def rolled_to(self, epoch: int) -> None: ...

    def epoch_over(self, place: Place, rolled: bool) -> None: ...

    def note(self, packing: Packing) -> None: ...

    def close_workers(self, *, anyway: bool = False) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...

    def resume(self, batches: StreamPass) -> tuple[Place, bool]: ...


class Steps:
    """The steps of one rank. ``PADDING`` where others still have something and this one has not."""

    PADDING = object()

    def __init__(self, lanes: Lanes, options: Options, share: int, equal: EqualSteps | None) -> None:
        self._lanes, self._size, self._ends = lanes, options.batch_size, options.ends
        self._whole = options.batch_size * share  # outputs of a step, with those of ranks that share the lanes
        self._equal = equal
        self._ready: deque[Deal] = deque()
        self._left, self._over = 0, False
        self._failure: Exception | None = None
        if equal is not None:
            equal.begin()

    def next(self) -> Any:
        """The next deal, or PADDING, or None at the end."""
        if self._equal is None:
            return self._take()
        while not self._left:
            if self._over:
                return None
            self._agree(self._equal)
        if self._failure is not None and not self._ready:
            raise self._failure
        self._left -= 1
        return self._ready.popleft() if self._ready else self.PADDING

    def _take(self) -> Deal | None:
        deal = self._lanes.take(self._size)
        if deal is None or (self._ends == "drop" and deal.total < self._whole):
            return None
        return deal

    def _agree(self, equal: EqualSteps) -> None:
        """Look ahead, and agree. What fails ahead is raised where it comes, after the good steps before it."""
        ahead = equal.ahead
        try:
            while len(self._ready) < ahead and (deal := self._take()) is not None:
                self._ready.append(deal)
        except Exception as problem:
            if not self._ready:
                raise
            self._failure = problem
        counts = equal.agree(len(self._ready) if self._failure is None else ahead)
        self._left = min(counts) if self._ends == "drop" else max(counts)
        self._over = self._left < ahead
        while self._over and len(self._ready) > self._left:
            self._ready.pop()


class StreamPass(HasState):
    """Iterates the batches of a pass."""

    _closed = True  # until it has begun

    def __init__(self, loader: Loading, start: Place, rolled: bool) -> None:
        self._loader = loader
        self._begin(start, rolled)

    def _begin(self, start: Place, rolled: bool) -> None:
        self._start, self._rolled = start, rolled
        what = self._loader.what
        generators = Generators(what.spec.seed, what.global_seed or 0)
        self._presenter = Presenter(what.format, self._loader.options, generators)
        self._loader.meter.begin()
        self._lanes: Lanes | None = None
        self._steps: Steps | None = None
        self._last: Items | None = None
        self._begun = False  # a step was taken, by this rank or by others
        self._compared = False  # the place where the pass began, with those of the other ranks
        self._closed = self._over = False
        self._failure: BaseException | None = None

    @property
    def packing(self) -> Packing | None:
        return None if self._lanes is None else self._lanes.packing

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader: just behind the last batch handed over."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loader, and go on from there with this iterator."""
        self._loader.load_state_dict(state)
        self._begin(*self._loader.resume(self))

    def __iter__(self) -> StreamPass:
        return self

    def __next__(self) -> Any:
        if self._loader.meter.due:
            self._loader.meter.call_hooks()
        asked = perf_counter()
        if self._over:
            raise StopIteration
        check_goes_on(self._failure, self._closed)
        loader = self._loader
        try:
            deal, value = self._made()
            if deal is not None:
                after, rows = (self._padded_place(), 0) if deal is Steps.PADDING else (deal, len(deal.items))
                loader.meter.handed(asked, rows, value)
                # The place moves here and nowhere else: with the batch. Python handles signals at calls, and there is
                # none from here to the caller's loop, so no interrupt comes between the two.
                loader.delivered = after
                return value
        except BaseException as problem:
            self._failure = problem
            self.close(anyway=True)  # a signal may have come between a message of a worker and its book-keeping
            raise
        self._end()
        raise StopIteration

    def _padded_place(self) -> Place:
        """The place after a batch of nothing but padding: this rank is at its end, and others are not."""
        assert self._lanes is not None
        return self._lanes.place().over()

    def _made(self) -> tuple[Any, Any]:
        """The next deal, and its batch; (None, None) at the end."""
        while True:
            steps = self._steps or self._open()
            if self._begun and not self._compared:
                self._loader.compare(self._start, first=False)
                self._compared = True
            deal = steps.next()
            if deal is None:
                if not self._begun and self._loader.may_roll and not self._rolled and self._start.begun:
                    self._roll()
                    continue
                return None, None
            self._begun = True
            began = perf_counter()
            value = self._presented(deal)
            self._loader.meter.spent.present += perf_counter() - began
            if value is not _NOTHING:
                return deal, value

    def _presented(self, deal: Any) -> Any:
        """The batch of a deal (of a collate function: whatever it returns); _NOTHING if all of it is for others."""
        if deal is Steps.PADDING:
            return self._presenter.padding(self._something(), self._start.epoch)
        if len(deal.items):
            self._last = deal.items
            return self._presenter.batch(deal.items, self._start.epoch)
        if self._loader.options.ends == "pad":
            return self._presenter.padding(deal.some, self._start.epoch)
        return _NOTHING

    def _something(self) -> Items:
        """Some outputs to pad with: the last ones of this rank; after a resume the first of the epoch; or, where its
        lanes have none at all, the first of another rank, which has one, or there would be no step.
        """
        if self._last is None:
            beginning = Place(self._start.epoch)
            deal = self._loader.begin(beginning).take(1) or self._loader.begin(beginning, Cut()).take(1)
            if deal is None:
                raise MidepochError('there is no output at all to pad with: use ends="drop".')
            self._last = deal.some
        return self._last

    def _open(self) -> Steps:
        loader = self._loader
        loader.compare(self._start, first=True)
        self._lanes = loader.begin(self._start)
        self._steps = Steps(self._lanes, loader.options, self._lanes.share.cut.count, loader.equal)
        return self._steps

    def _roll(self) -> None:
        """Nothing is left of the epoch that a state was saved in: going on means the next one, not an empty one."""
        self._start, self._rolled = Place(self._start.epoch + 1), True
        self._steps = None
        self._loader.rolled_to(self._start.epoch)

    def _end(self) -> None:
        self._over = True
        assert self._lanes is not None
        place = self._lanes.place()
        self.close()
        self._loader.epoch_over(place.over(), self._rolled)

    def close(self, *, anyway: bool = False) -> None:
        """Stop; workers go too unless they are persistent."""
        if self._closed:
            return
        self._closed = True
        if self._lanes is not None:
            self._loader.note(self._lanes.packing)
            self._loader.close_workers(anyway=anyway)
        self._lanes, self._steps = None, None

    @silent_at_exit
    def __del__(self) -> None:
        self.close()
