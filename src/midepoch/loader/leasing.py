"""``Loader.lease``: the iterator over leases, and what begins and ends them."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any

from midepoch._internal.hints import no_attribute
from midepoch.audit.records import LeaseSteps
from midepoch.errors import MidepochError
from midepoch.loader import state as states
from midepoch.loader.leases import MOST_NOTED, Lease, Tracker, Waiting
from midepoch.loader.options import check_continues
from midepoch.loader.passes import Pass
from midepoch.loader.plans import lane_cursor
from midepoch.loader.state import Kind, Start
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor
from midepoch.pipeline.lanes import Share
from midepoch.pipeline.plans import RemainingSteps
from midepoch.pipeline.reach import start as start_of

if TYPE_CHECKING:
    from midepoch.loader.loader import Loader

_log = logging.getLogger("midepoch")


class LeaseItems:
    """Iterator over the leases of the rest of an epoch. Created by ``Loader.lease``, used in a ``with`` block.

    Leases that are still out when the block ends are returned: the next block first delivers them again, unless they
    are acknowledged by then.
    """

    _pass: Pass
    _tracker: Tracker

    def __init__(self, loader: Loader, max_out: int | None, timeout: float | None) -> None:
        self._loader, self._book = loader, loader._leases
        self._max_out, self._timeout = max_out, timeout
        self._entered = False
        self._noted = 0  # batches of the pass that are in the tracker
        self._acked = EMPTY
        self._first = 0  # number of its first step, in lanes
        self._left: int | None = None  # leases until the next multiple of steps_per_epoch

    if not TYPE_CHECKING:  # a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            hints = dict.fromkeys(("ack", "reject", "batch", "id"), "It iterates leases, which have it: next(items).")
            raise no_attribute("the block of lease()", name, dir(type(self)), hints)

    def __enter__(self) -> LeaseItems:
        if self._book.open:
            raise RuntimeError("a with block of lease() is open for this loader already. Leave that block first.")
        if self._entered:
            raise RuntimeError("this with block has ended. Call lease() again.")
        self._pass, self._tracker = begin_leases(self._loader, self)
        self._entered = self._book.open = True
        if every := self._loader.options.steps_per_epoch:
            self._left = every - self._tracker.steps % every
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._book.open = False
        if self._book.tracker is self._tracker:
            leave_leases(self._loader, self._pass, self._tracker)

    def resume(self, tracker: Tracker) -> tuple[Cursor, RemainingSteps | None]:
        """Return the start of the steps that are not acknowledged, and their plan if there is one."""
        tracker.settle()
        if tracker.plan is not None:
            self._acked = tracker.acked
            return tracker.start, RemainingSteps(tracker.plan, tracker.acked)
        frontier = tracker.frontier()
        self._first, later = frontier.oldest, frontier.acked.from_(frontier.oldest)
        self._acked = Intervals.of(later.starts - self._first, later.stops - self._first)
        return lane_cursor(frontier), None

    @property
    def steps(self) -> LeaseSteps:
        """The steps of the pass."""
        return LeaseSteps(self._acked, self._first)

    def __iter__(self) -> LeaseItems:
        return self

    def __next__(self) -> Lease:
        self._check_entered()
        if not self._book.open:
            raise RuntimeError("this with block has ended. Call lease() again.")
        check_continues(None, self._book.tracker is not self._tracker)
        tracker = self._tracker
        if len(tracker.inbox) >= MOST_NOTED:
            tracker.settle()
        if self._max_out is not None and tracker.held >= self._max_out:
            self._wait(f"{_count(tracker.held)} out (max_out={self._max_out})", self._max_out)
        if self._noted < self._pass.delivered:  # an interrupt came before it was noted
            self._note(self._noted, lost=True)
        while self._left != 0:
            for batch in self._pass:  # not next(): an interrupt on its return would lose the batch
                for number in range(self._noted, self._pass.delivered - 1):
                    self._note(number, empty=True)
                if (step := self._note(self._pass.delivered - 1)) is not None:
                    self._left = None if self._left is None else self._left - 1
                    return Lease(self._tracker.first + step, batch, self._book)
            for number in range(self._noted, self._pass.delivered):
                self._note(number, empty=True)  # a last step whose rows are all of other ranks
            self._tracker.ended = True
            if self._left is None:
                break
            self._begin_next_epoch()
        raise StopIteration

    def _begin_next_epoch(self) -> None:
        """Wait for all leases of an epoch of the data, and continue with the next one."""
        self._wait(f"{_count(self._tracker.held)} out at the end of an epoch of the data", 1)
        self._book.open = False
        self._noted, self._acked, self._first = 0, EMPTY, 0
        empty = not (self._tracker.delivered or self._pass.resumes)
        self._pass, self._tracker = begin_leases(self._loader, self)
        self._book.open = True
        if empty:
            raise MidepochError("an epoch of the data has no batch. Check that its filters keep some rows.")

    def _note(self, number: int, *, empty: bool = False, lost: bool = False) -> int | None:
        """Enter a batch of the pass in the tracker. Return its step, or None if it is acknowledged already."""
        if not self._tracker.delivered and self._pass.start is not self._tracker.start:
            self._tracker = track(self._loader, self._pass)  # it began at the next epoch: nothing was left of this one
        tracker, delivered = self._tracker, self._loader._run.at
        step = self._first + number
        if self._acked and tracker.plan is not None:
            step = self._acked.remaining(number)
        self._noted = number + 1
        if step >= tracker.delivered:
            if empty:
                tracker.pass_over(step, delivered)
                return None
            tracker.add(step, delivered)
            if lost:
                tracker.returned.add(step)
            return step
        if step in tracker.out:
            tracker.returned.discard(step)
            return step
        return None

    def join(self, timeout: float | None = None) -> None:
        """Wait until no lease is out. Raises TimeoutError after ``timeout`` seconds."""
        self._check_entered()
        self._wait(f"{_count(self._tracker.held)} out", 1, timeout)

    def _wait(self, what: str, fewer: int, timeout: float | None = None) -> None:
        tracker = self._tracker
        waiting = Waiting(self._book, what, self._timeout if timeout is None else timeout)
        waiting.until(lambda: tracker.held < fewer)

    @property
    def out(self) -> int:
        """The number of leases that are out."""
        self._check_entered()
        return self._tracker.held

    def _check_entered(self) -> None:
        if not self._entered:
            raise RuntimeError("leases are taken in a with block. Use: with loader.lease() as items.")


def _count(leases: int) -> str:
    return "1 lease is" if leases == 1 else f"{leases:,} leases are"


def begin_leases(loader: Loader, items: LeaseItems) -> tuple[Pass, Tracker]:
    """Return a pass of leases, and its tracker: the rest of a pass whose block was left, or a new pass."""
    tracker = loader._leases.tracker
    if tracker is not None and (tracker.complete or (not tracker.out and loader.shard.count == 1)):
        end_leases(loader)
        tracker = None
    if tracker is None:
        batches = loader._begin_pass()
        batches.leased = items.steps
        return batches, track(loader, batches)
    start, plan = items.resume(tracker)
    tracker.ended = False  # until this pass ends
    batches = loader._begin_pass(Start(start, chosen=True))
    batches.leased = items.steps
    if plan is not None:
        batches.feed = loader._open_feed(start, alone=True, plan=plan)
    return batches, tracker


def track(loader: Loader, batches: Pass) -> Tracker:
    """Begin the leases of a pass."""
    spec, share = loader.pipeline, Share.of(loader.pipeline.lanes, loader.shard)
    plan = batches.opened().plan if spec.unit == "rows" else None
    if spec.unit == "outputs":  # a state names the lanes of this rank, also before anything is acknowledged
        fresh, known = LaneCursor(0, start_of(spec.node)), batches.start.lanes
        lanes = {lane: known.get(lane, fresh) for lane in share.lanes.positions(0, spec.lanes).tolist()}
        batches.start = batches.start._replace(lanes=lanes)
        loader._run = loader._run._replace(next=batches.start)
    return loader._leases.begin(plan, batches.start, spec.shard, share, loader._ledger)


def leave_leases(loader: Loader, batches: Pass, tracker: Tracker) -> None:
    """Close a pass of leases. Those that are still out are returned."""
    batches.close()
    tracker.ended = tracker.ended or batches.ended
    tracker.settle()
    tracker.returned |= set(tracker.out)
    if tracker.ended and 0 < tracker.delivered == len(tracker.out):
        _log.warning(
            "%s out at the end of the epoch, and none was acknowledged: the next block delivers them again. Call "
            "lease.ack() for each batch that was used.", _count(len(tracker.out)),
        )  # fmt: skip
    if loader._ledger is not None:
        loader._ledger.returned()
    run = loader._run
    if run.kind in (Kind.LOOKED, Kind.LEFT):
        loader._run = run._replace(kind=Kind.LOADED, next=run.cursor)


def end_leases(loader: Loader) -> None:
    """Continue without leases, at what is acknowledged.

    Raises RuntimeError if a block is open, or if one of several ranks has leases left.
    """
    tracker = loader._leases.tracker
    if tracker is None:
        return
    if loader._leases.open:
        raise RuntimeError("a with block of lease() is open for this loader. Leave it first.")
    if not tracker.complete:
        if loader.shard.count > 1:
            raise RuntimeError(
                f"rank {loader.shard.index} of {loader.shard.count} has acknowledged only a part of its leases, and "
                "others may have acknowledged more or less. Take the rest with lease(), or load the states of all "
                "ranks."
            )
        loader._run = states.load(loader.pipeline, tracker.cursor(alone=True)[0])
    loader._leases.drop()
