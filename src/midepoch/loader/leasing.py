"""``Loader.lease``: the iterator over leases, and the methods of a loader that deal with them."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from midepoch._internal.checks import integer
from midepoch.audit.leases import RETURNED, LeaseSteps
from midepoch.loader.lease_state import RemainingSteps, lane_cursor
from midepoch.loader.leases import MOST_NOTED, Lease, LeaseBook, Tracker, Waiting
from midepoch.loader.options import check_continues
from midepoch.loader.passes import Pass, Start
from midepoch.loader.plans import Plan
from midepoch.loader.token_plan import TokenPlan
from midepoch.loader.weighting import Weighting
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor, LaneCursor, LaneCursors
from midepoch.pipeline.lanes import Share, StepOutputs
from midepoch.pipeline.open import start

if TYPE_CHECKING:
    from midepoch.loader.loader import Loader


class LeaseItems:
    """Iterator over the leases of the rest of an epoch. Created by ``Loader.lease``, used in a ``with`` block.

    Leases that are still out when the block ends are returned: the next block first delivers them again, unless they
    are acknowledged by then.
    """

    _pass: Pass
    _tracker: Tracker

    def __init__(self, loader: Loader, max_out: int | None, timeout: float | None) -> None:
        self._loader, self._book = loader, loader.leases
        self._max_out, self._timeout = max_out, timeout
        self._entered = False
        self._noted = 0  # batches of the pass that are in the tracker
        self._acked = EMPTY
        self._first = 0  # number of its first step, in lanes

    def __enter__(self) -> LeaseItems:
        if self._book.open:
            raise RuntimeError("a with block of lease() is open for this loader already. Leave that block first.")
        if self._entered:
            raise RuntimeError("this with block has ended. Call lease() again.")
        self._pass, self._tracker = self._loader.begin_leases(self)
        self._entered = self._book.open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._book.open = False
        if self._book.tracker is self._tracker:
            self._loader.leave_leases(self._pass, self._tracker)

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
        for batch in self._pass:  # not next(): an interrupt on its return would lose the batch
            for number in range(self._noted, self._pass.delivered - 1):
                self._note(number, empty=True)
            if (step := self._note(self._pass.delivered - 1)) is not None:
                return Lease(self._tracker.first + step, batch, self._book)
        self._tracker.ended = True
        raise StopIteration

    def _note(self, number: int, *, empty: bool = False, lost: bool = False) -> int | None:
        """Enter a batch of the pass in the tracker. Return its step, or None if it is acknowledged already."""
        if not self._tracker.delivered and self._pass.start is not self._tracker.start:
            self._tracker = self._loader.track(self._pass)  # it began at the next epoch: nothing was left of this one
        tracker, delivered = self._tracker, self._loader.delivered
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


class Leasing(Weighting):
    """The methods of a loader that deal with leases."""

    leases: LeaseBook
    _cursor: Cursor
    origin: Cursor | StepOutputs
    delivered: Cursor | StepOutputs | None
    _resume_point: Cursor | None
    _left: Any
    _named: bool

    def lease(self, *, max_out: int | None = None, timeout: float | None = None) -> LeaseItems:
        """Return an iterator over leases: batches that count as consumed when they are acknowledged.

        ``with loader.lease() as items: for lease in items: …`` iterates the rest of an epoch. Acknowledge each lease by
        ``lease.ack()``, ``lease.reject()`` or ``loader.ack(…)``, in any order, from any thread or process of the
        machine. The state holds what was acknowledged: a resume first delivers the other batches again, then continues.
        Leases that are still out when the block ends are delivered again by the next block.

        ``max_out``: the most leases that may be out. The next one then waits for an acknowledgement, and raises
        TimeoutError after ``timeout`` seconds. Ranks do not wait for each other.
        """
        if self._options.steps_per_epoch:
            raise ValueError("lease() iterates epochs of the data, not steps_per_epoch. Create the loader without it.")
        if max_out is not None:
            max_out = integer(max_out, "lease(max_out=…)", 1)
        if timeout is not None and not (isinstance(timeout, (int, float)) and 0 <= timeout < math.inf):
            raise ValueError(f"timeout must be a number of seconds, or None for no limit, got {timeout!r}")
        return LeaseItems(self, max_out, timeout)  # type: ignore[arg-type]

    def ack(self, lease: Lease | int, *, rejected: bool = False) -> bool:
        """Acknowledge a lease, given as a ``Lease`` or its id. Return False if it was acknowledged before.

        ``rejected``: count it as rejected. Raises ValueError if the lease is unknown.
        """
        number = lease.id if isinstance(lease, Lease) else lease
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"ack() takes a lease or its id, got {lease!r:.60}. Pass the lease, or lease.id.")
        return self.leases.ack(int(number), rejected)

    def track(self, batches: Pass) -> Tracker:
        """Begin the leases of a pass."""
        spec, share = self._spec, Share.of(self._spec.lanes, self._spec.shard)
        if batches.plan is None:  # a state names the lanes of this rank, also before anything is acknowledged
            known = {} if batches.start.lanes is None else batches.start.lanes.by_lane
            fresh = LaneCursor(0, False, start(spec.node))
            lanes = {lane: known.get(lane, fresh) for lane in share.lanes.positions(0, spec.lanes).tolist()}
            batches.start = batches.start._replace(lanes=LaneCursors(lanes, share.lanes))
        plan = batches.plan
        assert plan is None or isinstance(plan, (Plan, TokenPlan))  # a pass that is continued has its leases already
        return self.leases.begin(plan, batches.start, spec.shard, share, batches.ledger)

    def begin_leases(self, items: LeaseItems) -> tuple[Pass, Tracker]:
        """Return a pass of leases, and its tracker: the rest of a pass whose block was left, or a new pass."""
        tracker = self.leases.tracker
        if tracker is not None and (tracker.complete or (not tracker.out and self._spec.shard.count == 1)):
            self.end_leases()
            tracker = None
        if tracker is None:
            batches = self._begin_pass()
            batches.leased = items.steps
            return batches, self.track(batches)
        start, plan = items.resume(tracker)
        tracker.ended = False  # until this pass ends
        batches = self._begin_pass(Start(start), tracker.start)
        batches.leased = items.steps
        if plan is not None:
            batches.plan = plan
        return batches, tracker

    def leave_leases(self, batches: Pass, tracker: Tracker) -> None:
        """Close a pass of leases. Those that are still out are returned."""
        batches.close()
        tracker.ended = tracker.ended or batches.ended
        tracker.settle()
        tracker.returned |= set(tracker.out)
        if batches.ledger is not None:
            batches.ledger.note(RETURNED)
        self._left = None

    def end_leases(self) -> None:
        """Continue without leases, at what is acknowledged.

        Raises RuntimeError if a block is open, or if one of several ranks has leases left.
        """
        tracker = self.leases.tracker
        if tracker is None:
            return
        if self.leases.open:
            raise RuntimeError("a with block of lease() is open for this loader. Leave it first.")
        if not tracker.complete:
            if self.shard.count > 1:
                raise RuntimeError(
                    f"rank {self.shard.index} of {self.shard.count} has acknowledged only a part of its leases, and "
                    "others may have acknowledged more or less. Take the rest with lease(), or load the states of all "
                    "ranks."
                )
            self._cursor = self.origin = self._resume_point = self._where()
            self.delivered, self._left, self._named = None, None, False
        self.leases.drop()

    def _begin_pass(self, start: Start | None = None, cursor: Cursor | None = None) -> Pass:
        raise NotImplementedError


def state_of(leases: LeaseBook, alone: bool) -> tuple[Cursor | None, str]:
    """Return the cursor that leases determine, if any, and what one of several ranks adds to a state."""
    tracker = leases.tracker
    if tracker is None:
        return None, ""
    cursor, own = tracker.cursor(alone=alone)
    return (None if tracker.complete else cursor), own
