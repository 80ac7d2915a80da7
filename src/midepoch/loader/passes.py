"""One pass of a loader over (the rest of) an epoch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from midepoch._internal.hints import Elsewhere, warn_once
from midepoch._internal.processes import silent_at_exit
from midepoch._internal.resumable import Resumable
from midepoch.audit.records import LeaseSteps
from midepoch.errors import MidepochError
from midepoch.loader import state as states
from midepoch.loader.options import check_continues, check_surroundings
from midepoch.loader.plans import MadeBatch
from midepoch.loader.state import Start
from midepoch.pipeline.cursor import Cursor
from midepoch.transforms import finish
from midepoch.transforms.formats import prepare

if TYPE_CHECKING:
    from midepoch.loader.feeds import Feed
    from midepoch.loader.loader import Loader

_log = logging.getLogger("midepoch")


class StepsPass(Resumable):
    """Iterator over the steps of a run up to the next multiple of ``steps_per_epoch``, across epochs of the data."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._load = loader, loader._breaks
        self._stop = self._next_stop()

    def _next_stop(self) -> int:
        size = self._loader.options.steps_per_epoch
        return (self._loader.steps // size + 1) * size

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, after the last batch delivered."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loader, and continue there with this iterator."""
        self._loader.load_state_dict(state)
        self._load, self._stop = self._loader._breaks, self._next_stop()

    def __iter__(self) -> StepsPass:
        return self

    def __length_hint__(self) -> int:
        return max(0, self._stop - self._loader.steps)

    def __next__(self) -> Any:
        loader = self._loader
        check_continues(None, self._load != loader._breaks)
        if loader.steps >= self._stop:
            raise StopIteration
        for value in loader._pass_over_data():
            return value
        if loader.steps >= self._stop:  # the last step of the epoch had no batch for this rank
            raise StopIteration
        for value in loader._pass_over_data(next_epoch=True):
            return value
        raise MidepochError("an epoch of the data has no batch. Check that its filters keep some rows.")


class Pass(Resumable):
    """Iterator over the batches of a pass. The state of the loader moves with every batch."""

    next = Elsewhere("iter(loader)", "next", "Use next(batches), or for batch in loader.")

    _closed = True  # before it has begun
    ended = False
    """True if the end of the epoch was reached."""
    leased: LeaseSteps | None = None
    """Its steps, if batches are leased: then ranks go at their own pace."""
    feed: Feed | None = None
    """Its batches, once they are opened."""

    def __init__(self, loader: Loader, start: Start) -> None:
        self._loader, self._ledger, self._meter = loader, loader._ledger, loader._meter
        options = loader.options
        self._format = loader.pipeline.format or "torch" if options.collate_fn is None else "python"
        check_surroundings(options)
        prepare(self._format)  # not in the time of the first batch
        self._begin(start)

    def _begin(self, start: Start) -> None:
        self._start = start
        self._meter.begin()
        self._made = self.delivered = self._since = 0  # batches made, delivered, and of those since the feed was opened
        self._recorded = self._closed = self._over = False
        self._failure: BaseException | None = None
        self._go_to(start.cursor)

    def _go_to(self, cursor: Cursor) -> None:
        self.start = cursor
        self._loader._run = states.opened(self._loader._run, cursor)
        self.feed = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, after the last batch delivered."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loader, and continue there with this iterator."""
        self._loader.load_state_dict(state)
        self._begin(self._loader._next_start())
        self._loader._live = weakref.ref(self)

    def __iter__(self) -> Pass:
        return self

    def __length_hint__(self) -> Any:
        """Return the number of batches left, if it is known."""
        left = None if self._closed else self.opened().left(self._made)
        return 0 if self._over else NotImplemented if left is None else left

    def opened(self) -> Feed:
        """Return its batches, which are opened on first use."""
        if self.feed is None:
            self.feed = self._loader._open_feed(self.start, alone=self.leased is not None)
        return self.feed

    def __next__(self) -> Any:
        if self._meter.due:
            self._meter.call_hooks()
        asked = perf_counter()
        if self._over:
            raise StopIteration
        check_continues(self._failure, self._closed)
        loader, ledger = self._loader, self._ledger
        try:
            while (made := self._next()) is not None:
                value = None if made.empty else finish(made.value, self._format)
                if made.timings is not None:
                    self._meter.timings.add(made.timings)
                if not made.empty:
                    self._meter.delivered(asked, made.rows, value)
                at = self.feed.after(made)  # type: ignore[union-attr]
                if ledger is not None:
                    if not self._recorded:  # a pass is recorded from its first batch on
                        loader._begin_record(ledger, self.start, leased=self.leased)
                        self._recorded = True
                    if made.traced is not None:
                        ledger.documents.write(self._since, made.traced)
                    if ledger.lanes.numbers:
                        ledger.add(at)
                    if asked >= ledger.due or made.skipped:
                        ledger.step(self._since, made.skipped)
                run = states.deliver(loader._run, at, self.start)
                if ledger is not None:
                    ledger.counters[0] = self._since + 1  # Count.STEPS: a store, and not a call
                # The state moves only here, together with the batch. Python handles signals at calls, and there is
                # none from here to the caller's loop, so that no interrupt comes between the two.
                self.delivered += 1
                self._since += 1
                loader._run = run
                if made.skipped:
                    loader._skipped += made.skipped
                if not made.empty:
                    return value
                self._refuse_to_drift(made)
        except BaseException as problem:
            try:
                if ledger is not None and self._recorded:
                    ledger.counters[0] = self._since  # without a step that is not delivered
            finally:
                self._fail(problem)
            raise
        self.close()
        raise StopIteration("the epoch is over. The next call begins the next one.")

    def _refuse_to_drift(self, made: MadeBatch) -> None:
        """Raise MidepochError if this rank skips a batch: it would be one step ahead of the others from then on."""
        shard, plan = self._loader.shard, None if self.feed is None else self.feed.plan
        if shard.count > 1 and made.skipped and plan is not None and self.leased is None:
            raise MidepochError(
                f'on_error="skip" left rank {shard.index} of {shard.count} no row of the batch at '
                f"{plan.place(self._made - 1)}: it would be one step ahead of the others. Use larger batches, or "
                "shuffle by rows."
            )

    def _next(self) -> MadeBatch | None:
        """Return the next batch, or None at the end of the epoch, when the loader moves to the next."""
        loader = self._loader
        while True:
            if self._made < (2 if self.leased is None else 1):
                loader._compare(self.start, first=not self._made)
            feed = self.feed or self.opened()
            made = feed.next()
            check_continues(None, self._closed)  # another thread has closed it meanwhile
            if made is not None:
                if self._start.restart is not None:  # something is left: the last pass was incomplete
                    restart, self._start = self._start.restart, self._start._replace(restart=None)
                    loader._restarted(restart, looked=self._start.looked)
                    self._go_to(restart)
                    continue
                self._made += 1
                return made
            if not (self.delivered or self._made or feed.begun) and self._may_roll(feed):
                # Nothing is left of the loader's epoch: continue with the next, instead of an empty pass.
                self._record_end(feed)
                self._start = Start(self.start.next_epoch(), rolled=True)
                self._go_to(self._start.cursor)
                continue
            if not self._made and self.leased is None:
                loader._compare(self.start, first=False)  # a pass also for this rank: others may have had a batch
            self._over = self.ended = True
            self._record_end(feed)
            loader._finish(feed.end, rolled=self._start.rolled, looked=not self._made)
            begun = self._made or self._start.cursor.begun or self._start.rolled
            if not begun and loader.last_batch == "drop" and loader.pipeline.epoch_outputs:
                _log.warning(
                    "epoch %d has no batch: its rows are fewer than a global batch, and last_batch is 'drop'. Use "
                    "smaller batches, or last_batch=\"pad\".", feed.end.epoch,
                )  # fmt: skip
            return None

    def _may_roll(self, feed: Feed) -> bool:
        """Return True if a pass that finds nothing left continues with the next epoch.

        False if the epoch was chosen, or if this rank has loaded a state and other ranks may have batches left. A rank
        that left its own pass after the last batch does not wait for them.
        """
        start, loader = self._start, self._loader
        together = self.leased is None and loader.last_batch != "uneven"  # then all ranks are at the end
        alone = loader.shard.count == 1 or start.left or loader.state_is_global or together
        return feed.finds_end and self.start.begun and not start.rolled and not start.chosen and alone

    def _record_end(self, feed: Feed) -> None:
        """Record the end of the epoch, also in a pass without batches: rows after the last batch may become nothing."""
        if self._ledger is None:
            return
        if not self._recorded and feed.finds_end:
            self._loader._begin_record(self._ledger, self.start, leased=self.leased)
        self._ledger.finish(feed.end)

    @property
    def failed(self) -> bool:
        """True if an error ended the pass."""
        return self._failure is not None

    @property
    def resumes(self) -> bool:
        """True if the pass began inside an epoch."""
        return self._start.cursor.begun

    @property
    def is_open(self) -> bool:
        """True if the pass is in progress."""
        return not (self._closed or self._over)

    def reopen(self) -> None:
        """Continue after the last batch delivered with what the loader has there now. The rest is a record of its own.

        Batches that were made ahead are discarded.
        """
        feed, self.feed = self.feed, None
        if self._ledger is not None and self._recorded:
            self._ledger.flush()
        self._loader._leave(feed, edited=True)
        run = self._loader._run
        self.start = self._loader._next_cursor()
        self._loader._run = run._replace(next=self.start)
        self._made = self._since = 0
        self._recorded = False

    def _fail(self, problem: BaseException) -> None:
        """End the pass: a batch that was not delivered would be lost.

        Workers stop, too: a signal may have come between a message and its bookkeeping.
        """
        self._failure = problem
        self._loader._feeds.close()
        self.close()

    def close(self) -> None:
        """Stop. Workers stop, too, unless they are persistent."""
        if self._closed:
            return
        self._closed = True
        if self.delivered and not self._over and self._loader._run.next is self.start:
            self._leave()  # before any file is written: Python drops an interrupt that comes while a pass is collected
        if self._ledger is not None and self.delivered:
            self._ledger.leave()
        feed, self.feed = self.feed, None
        self._loader._leave(feed)

    def _leave(self) -> None:
        """Note that the end was not reached. If nothing is left for this rank, the next pass is the next epoch."""
        feed, loader = self.feed, self._loader
        if self._start.looked and self.delivered == 1:
            warn_once(
                "iter(loader) was left after its first batch, again: a pass of one batch is a look, and the next one "
                "begins with the same batch. next(loader) takes the next batch."
            )
        if feed is not None and self._failure is None and feed.complete(self._since):
            if self._ledger is not None:
                self._ledger.finish(feed.end)
            self.ended = True
            loader._finish(feed.end, rolled=self._start.rolled, looked=self.delivered == 1)
        else:
            looked = self.delivered == 1 and self._failure is None  # what an error ended was no look
            loader._run = states.leave(loader._run, self.start, looked=looked)

    @silent_at_exit
    def __del__(self) -> None:
        self.close()
