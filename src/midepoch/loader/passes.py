"""One pass of a loader over (the rest of) an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from midepoch._internal.resumable import HasState
from midepoch._internal.threads import silent_at_exit
from midepoch.audit.leases import LeaseSteps
from midepoch.audit.ledger import Ledger
from midepoch.errors import MidepochError
from midepoch.loader.callers import warn_of_lightning
from midepoch.loader.lanes import LaneBatches
from midepoch.loader.moved import unwrapped
from midepoch.loader.options import check_continues
from midepoch.loader.plans import BatchSource, Made, StepPlan
from midepoch.pipeline.cursor import Cursor
from midepoch.transforms import finish
from midepoch.transforms.formats import prepare

if TYPE_CHECKING:
    from midepoch.loader.loader import Loader


class Start(NamedTuple):
    """The start of a pass. ``rolled``: it is in the epoch after that of the loader.

    ``restart``: the alternative start if the epoch has batches left, which is not always known before.
    """

    cursor: Cursor
    rolled: bool = False
    restart: Cursor | None = None
    left: bool = False
    """True if the pass before was left in this process, and may have been at its end."""


class Pass(HasState):
    """Iterator over the batches of a pass. The cursor of the loader moves with every batch."""

    _closed = True  # before it has begun
    ended = False
    """True if the end of the epoch was reached."""
    leased: LeaseSteps | None = None
    """Its steps, if batches are leased: then ranks go at their own pace."""

    def __init__(self, loader: Loader, start: Start) -> None:
        self._loader, self._ledger, self._meter = loader, loader.ledger, loader.meter
        options = loader.options
        self._format = loader.pipeline.format or "torch" if options.collate_fn is None else "python"
        warn_of_lightning()
        prepare(self._format)  # not in the time of the first batch
        self._begin(start)

    def _begin(self, start: Start) -> None:
        self.start, self.rolled, self._restart, self._left = start
        self._meter.begin()
        self._namings = self._loader.namings
        self.plan: StepPlan | None = self._loader.plan(self.start)
        self.source: BatchSource | None = None
        self._made = self.delivered = self._since = 0  # batches made, delivered, and of those since the plan begins
        self._recorded = False
        self._closed = self._over = False
        self._failure: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, after the last batch delivered."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loader, and continue there with this iterator."""
        self._loader.load_state_dict(state)
        self._begin(self._loader.next_start())
        self._loader.iterator = weakref.ref(self)

    def __iter__(self) -> Pass:
        return self

    def __length_hint__(self) -> Any:
        """Return the number of batches left, if it is known."""
        if self.plan is None or self.plan.end is None:
            return NotImplemented
        return 0 if self._over else max(0, self.plan.share(self._loader.shard) - self._made)

    def __next__(self) -> Any:
        if self._meter.due:
            self._meter.call_hooks()
        asked = perf_counter()
        if self._over:
            raise StopIteration
        check_continues(self._failure, self._closed)
        loader, ledger, recorded = self._loader, self._ledger, None
        try:
            while (made := self._next()) is not None:
                value = None if made.empty else finish(made.value, self._format)
                if made.timings is not None:
                    self._meter.timings.add(made.timings)
                if not made.empty:
                    self._meter.delivered(asked, made.rows, value)
                cursor = made.cursor
                if ledger is not None:
                    if not self._recorded:  # a pass is recorded from its first batch on
                        loader.begin_record(ledger, self.start, leased=self.leased)
                        self._recorded = True
                    if self.plan is None:
                        ledger.prepare_step(cursor)
                    if made.traced is not None:
                        ledger.documents.write(self._since, made.traced)
                    recorded = ledger.recorded
                    ledger.step(made.skipped, self._meter.waited, cursor)
                # The cursor moves only here, together with the batch. Python handles signals at calls, and there is
                # none from here to the caller's loop, so that no interrupt comes between the two.
                loader.skipped += made.skipped
                self.delivered += 1
                self._since += 1
                loader.delivered = loader.origin = cursor
                loader.how = "on"
                if not made.empty:
                    return value
                recorded = None
                self._refuse_to_drift(made)
        except BaseException as problem:
            if ledger is not None and recorded is not None:
                ledger.take_back(recorded)
            self._fail(problem)
            raise
        self.close()
        raise StopIteration

    def _refuse_to_drift(self, made: Made) -> None:
        """Raise MidepochError if this rank skips a batch: it would be one step ahead of the others from then on."""
        shard = self._loader.shard
        if shard.count > 1 and made.skipped and self.plan is not None and self.leased is None:
            raise MidepochError(
                f'on_error="skip" left rank {shard.index} of {shard.count} no row of the batch at '
                f"{self.plan.place(self._made - 1)}: it would be one step ahead of the others. Use larger batches, or "
                "shuffle by rows."
            )

    def _next(self) -> Made | None:
        """Return the next batch, or None at the end of the epoch, when the loader moves to the next."""
        loader = self._loader
        while True:
            if self._made < (2 if self.leased is None else 1):
                loader.compare(self.start, first=not self._made)
            if self.source is None and (self.plan is None or self.plan.has(0)):
                self.source = loader.open(self.start, self.plan, alone=self.leased is not None)
            made = None if self.source is None else self.source.next()
            if made is not None:
                if self._restart is not None:
                    self._go_to(loader.restarted(self._restart))  # something is left: the last pass was incomplete
                    continue
                self._made += 1
                return made
            begun = self.delivered or self._made or ((lanes := self.lanes) is not None and lanes.begun)
            if not begun and self.plan is None and loader.may_roll(self.start, self.rolled, self._left):
                # Nothing is left of the loader's epoch: continue with the next, instead of an empty pass.
                self._record_end()
                self._go_to(loader.rolled_to(self.start.epoch + 1), rolled=True)
                continue
            self._over = self.ended = True
            self._record_end()
            loader.epoch_over(self._end(), self.rolled)
            return None

    def _record_end(self) -> None:
        """Record the end of the epoch, also in a pass without batches: rows after the last batch may become nothing."""
        if self._ledger is not None and not self._recorded and self.plan is None:
            self._loader.record_end(self._ledger, self.start, self._end())
        elif self._ledger is not None:
            self._ledger.finish(self._meter.waited, self._end(), 0 if self.lanes is None else self.lanes.dropped)

    def _go_to(self, cursor: Cursor, *, rolled: bool = False) -> None:
        self.start, self.rolled, self._restart = cursor, rolled, None
        self.plan, self.source = self._loader.plan(cursor), None

    @property
    def is_open(self) -> bool:
        """True if the pass is in progress."""
        return not (self._closed or self._over)

    def reopen(self) -> None:
        """Continue after the last batch delivered with what the loader has there now. Batches made ahead are discarded.

        The rest is recorded as a pass of its own.
        """
        source, self.source = self.source, None
        if self._ledger is not None and self._recorded:
            self._ledger.flush()
        self._loader.leave_source(source)
        self._go_to(self._loader.next_cursor(), rolled=self.rolled)
        self._made = self._since = 0
        self._recorded = False

    def _end(self) -> Cursor:
        """Return the cursor at the end of the epoch."""
        if self.plan is not None:
            return self.plan.end_cursor
        lanes = self.lanes
        assert lanes is not None
        return lanes.end

    @property
    def ledger(self) -> Ledger | None:
        """The ledger in which it is recorded, if any."""
        return self._ledger

    @property
    def lanes(self) -> LaneBatches | None:
        """The batches of lanes, if positions cannot be computed."""
        source = unwrapped(self.source)
        return source if isinstance(source, LaneBatches) else None

    def _fail(self, problem: BaseException) -> None:
        """End the pass: a batch that was not delivered would be lost.

        Workers stop, too: a signal may have come between a message and its bookkeeping.
        """
        self._failure = problem
        self._loader.close_workers()
        self.close()

    def close(self) -> None:
        """Stop. Workers stop, too, unless they are persistent."""
        if self._closed:
            return
        self._closed = True
        if self._ledger is not None and self.delivered:
            self._ledger.leave()
        if self.delivered and not self._over and self._namings == self._loader.namings:
            self._leave()
        source, self.source = self.source, None
        self._loader.leave_source(source)

    def _leave(self) -> None:
        """Note that the end was not reached. If nothing is left for this rank, the next pass is the next epoch."""
        complete = self.plan is not None and not self.plan.has_for(self._since, self._loader.shard)
        if complete and self._failure is None:
            if self._ledger is not None:
                self._ledger.finish(self._meter.waited, self._end(), 0 if self.lanes is None else self.lanes.dropped)
            self.ended = True
            self._loader.epoch_over(self._end(), self.rolled)
        else:
            self._loader.left(self)

    @silent_at_exit
    def __del__(self) -> None:
        self.close()
