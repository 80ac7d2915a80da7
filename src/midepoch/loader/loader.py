"""The Loader: batches of every epoch, and the cursor after the last one delivered."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from midepoch._internal.checks import integer
from midepoch._internal.hints import hinted_methods
from midepoch.audit.leases import LeaseSteps
from midepoch.audit.ledger import Ledger
from midepoch.loader.equal import EqualSteps, RankConsistencyCheck, check_equal_steps
from midepoch.loader.lanes import LaneBatches
from midepoch.loader.leases import LeaseBook
from midepoch.loader.leasing import Leasing, state_of
from midepoch.loader.moved import unwrapped
from midepoch.loader.options import Options
from midepoch.loader.passes import Pass, Start
from midepoch.loader.plans import BatchSource, StepPlan
from midepoch.loader.settings import HINTED, HINTS
from midepoch.loader.sources import Sources
from midepoch.loader.stretches import Stretch
from midepoch.loader.token_plan import TokenPlan, make_plan
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Share, StepOutputs
from midepoch.pipeline.spec import PipelineSpec, check_known
from midepoch.state import saved as states
from midepoch.state.done import excluded_from_batches

_log = logging.getLogger("midepoch")


class _Left(NamedTuple):
    """A pass that was left before its end: its start, the cursor after its last batch, and its batches."""

    start: Cursor
    cursor: Cursor | StepOutputs
    batches: int


@hinted_methods(HINTS, only=HINTED)
class Loader(Leasing):
    """Batches of a dataset, epoch after epoch. Created by ``Dataset.loader``.

    Each ``iter()`` is a pass over one epoch, from its beginning or from the position of a loaded state. After the last
    batch is delivered, the next ``iter()`` is the next epoch. After a ``break``:

    - A pass of only one batch was a look: the next ``iter()`` begins where it began.
    - If the data is shuffled, the next ``iter()`` continues after the last batch, as a resume from the state would.
    - If it is not, as for validation, the next ``iter()`` begins the epoch again, and logs a warning once.
    - With ``steps_per_epoch``, the next ``iter()`` always continues, with the rest of the steps.

    ``set_epoch`` begins an epoch; that of a loaded state resumes. ``next(loader)`` always continues.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        options: Options,
        cursor: Cursor,
        *,
        named: bool = False,
        counterparts: RankConsistencyCheck | None = None,
        equal: EqualSteps | None = None,
        ledger: Ledger | None = None,
        dataset: Any = None,
    ) -> None:
        self._spec, self._options, self._cursor, self._dataset = spec, options, cursor, dataset
        self._counterparts, self.ledger = counterparts, ledger
        super().__init__(options.num_workers)
        self.meter.by_batch = options.budget is not None
        self.origin: Cursor | StepOutputs = cursor
        """The cursor after the last batch delivered, or of a loaded state, whatever epoch was set."""
        self.how = "fresh"
        self.delivered: Cursor | StepOutputs | None = None
        """The cursor after the last batch delivered, or None if the next pass begins there."""
        self._named, self.namings = named, 0  # True if set_epoch chose the epoch, and the number of its calls
        self._left: _Left | None = None
        self._resume_point = cursor if cursor.begun else None
        """Where a loaded state left off, until more than a look follows: naming its epoch resumes there."""
        self._looked = self._warned = False
        self.loads = 0
        """How often a state was loaded or iteration was stopped, which ends iterators over a number of steps."""
        self._data_pass: Pass | None = None
        self.iterator: weakref.ref[Pass] | None = None
        self._sources = Sources(options, equal, self.meter.timings)
        self.leases = LeaseBook()
        self._packed = (0, 0)
        self.skipped = 0
        """Rows skipped so far under ``on_error="skip"``, on this rank."""
        if spec.has_positions and options.planning is None:  # else when a pass begins: its batches have to be counted
            check_equal_steps(make_plan(spec, options, Cursor()), options, spec.shard)
        elif cursor.begun:
            check_known(cursor, Share.of(spec.lanes, spec.shard), spec.lanes)
        if cursor.begun:  # of a state that was loaded into the dataset
            self.how = "loaded"
            if ledger is not None:
                self.begin_record(ledger, cursor, load=True)

    @property
    def packing_efficiency(self) -> float | None:
        """The share of token slots of packed sequences that contain tokens, in this process. None without packing."""
        live = self._live()
        tokens, places = self._packed
        if live is not None and (lanes := live.lanes) is not None:
            tokens, places = tokens + lanes.packed[0], places + lanes.packed[1]
        return tokens / places if places else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate. The epoch of a loaded state resumes where it was left; any other starts over.

        With ``steps_per_epoch`` it must be the number of the next pass, which continues where the last one stopped.
        """
        epoch = integer(epoch, "set_epoch")
        if self._options.steps_per_epoch:
            if epoch != self.epoch:
                raise ValueError(
                    f"set_epoch({epoch}): with steps_per_epoch={self._options.steps_per_epoch}, passes follow each "
                    f"other, and the next one is {self.epoch}. Load a state to continue at another step."
                )
            return
        self.end_leases()
        live, left = self._live(), self._left
        self._pass = self._left = None
        self.namings += 1
        if (left is not None and left.batches > 1) or (live is not None and live.delivered > 1):
            self._resume_point = None
        if self.how == "fresh" and not self._cursor.begun:
            # A run that begins there, as by those who make a loader for every epoch.
            self.origin = Cursor(epoch, steps=self._cursor.steps)
        point = self._resume_point
        if (
            epoch != self._cursor.epoch
            or left is not None
            or (self.delivered is not None and _resolved(self.delivered).epoch != epoch)
        ):
            self.delivered = None
        fresh = Cursor(epoch, steps=self._where().steps)
        self._cursor = point if point is not None and point.epoch == epoch else fresh
        self._named = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch delivered: flat and JSON-able.

        If positions can be computed, it is equal on all ranks and under 1 KB. Otherwise it has a few integers for each
        lane of this rank. With leases, it is what this rank has acknowledged.
        """
        self._draw_seed()
        at, own = state_of(self.leases, self.shard.count == 1)
        if self.ledger is not None:
            self.ledger.flush()
        state = states.save(self._spec, self._where() if at is None else at)
        return {**state, "leased": own} if own else state

    def load_state_dict(self, state: Any, *, allow: Collection[str] = ()) -> None:
        """Continue from a state, or from the list of the states of all ranks.

        Batch size, workers and world size may differ. Raises CheckpointMismatchError, and changes nothing, if the state
        belongs to other data, another order or pipeline. ``allow=["pipeline"]`` permits a field to differ, which is
        recorded in ``changes`` and in the state. The weights of a mix may be changed, and sources may be added or
        removed: the others continue at their positions.
        """
        resumed = self._resumed(state, allow)
        self._end_iteration()
        self._sources.forget()
        spec = resumed.spec.for_processes(self.shard.count) if resumed.spec.has_positions else resumed.spec
        # No call between these: a signal handler that saves must not see only some of them.
        self._spec, self._named, self._left = spec, False, None
        self._cursor = self.origin = resumed.cursor
        self.delivered, self.how, self._resume_point = None, "loaded", resumed.cursor
        self.leases.drop()
        if self._counterparts is not None:
            self._counterparts.loaded()
        if self.ledger is not None:  # now, not with the first batch: there may be no batch left
            self.begin_record(self.ledger, self._cursor, load=True)

    def check_state(self, state: Any) -> None:
        """Raise the error that ``load_state_dict`` would raise for a state that does not fit. Change nothing."""
        self._resumed(state, ())

    def _resumed(self, state: Any, allow: Collection[str]) -> states.Resumed:
        planning = self._options.planning
        resumed = states.load_global(state, self._spec, allow, None if planning is None else planning.budget)
        check_known(resumed.cursor, Share.of(resumed.spec.lanes, self._spec.shard), resumed.spec.lanes)
        if planning is not None and resumed.spec.excluded:
            raise excluded_from_batches(sum(map(len, resumed.spec.excluded)))
        if planning is not None:  # plans the window in progress: its batches must be those that were saved
            make_plan(resumed.spec, self._options, resumed.cursor).has(0)
        return resumed

    def _continue_at(self, cursor: Cursor, spec: PipelineSpec) -> None:
        self.end_leases()
        live = self._live()
        if spec.excluded is not self._spec.excluded:
            self._sources.forget()
        if self._resume_point is not None and self._resume_point[:2] == cursor[:2]:
            self._resume_point = cursor
        self._spec, self._left = spec, None
        if self.delivered is None or live is None or not live.is_open:
            self._cursor, self.delivered = cursor, None
        else:
            self.delivered = cursor
        if self._counterparts is not None:
            self._counterparts.loaded()
        if live is not None and live.is_open:
            live.reopen()

    @property
    def state_is_global(self) -> bool:
        """True if the state of one rank restores all ranks. False if each has lanes, or leases, of its own."""
        return self._spec.state_is_global and (self.leases.tracker is None or self.shard.count == 1)

    @property
    def takes_states_of_all_ranks(self) -> bool:
        """True if the list of the states of all ranks restores any number of them."""
        return True

    def _draw_seed(self) -> None:
        """Fix the seed of the global generators while functions run: at the first pass, or the first state."""
        if self._spec.node.has_functions or self._options.collate_fn is not None:
            self._spec = self._spec.seeded()

    def _where(self) -> Cursor:
        if (at := state_of(self.leases, self.shard.count == 1)[0]) is not None:
            return at
        return self._cursor if self.delivered is None else _resolved(self.delivered)

    def __iter__(self) -> Iterator[Any]:
        return Stretch(self) if self._options.steps_per_epoch else self._begin_pass()

    def _begin_pass(self, start: Start | None = None, cursor: Cursor | None = None) -> Pass:
        if start is None:
            self.end_leases()
        self._end_pass()
        self._draw_seed()
        if cursor is not None:  # leases that were left are continued
            self._cursor, self.delivered, self._named = cursor, None, False
        batches = Pass(self, self.next_start() if start is None else start)
        self.iterator = weakref.ref(batches)
        return batches

    def data_pass(self, *, next_epoch: bool = False) -> Pass:
        """Return the pass over the data that passes of a number of steps share, or begin that of its next epoch."""
        if self._data_pass is None or next_epoch:
            self._data_pass = self._begin_pass()
        return self._data_pass

    def next_start(self) -> Start:
        """Return the start of the next pass."""
        left, self._left, restart = self._left, None, None
        if left is not None:
            at = _resolved(left.cursor)
            self._named, self._cursor, self._looked = False, at, left.batches == 1
            if not self._looked:
                self._resume_point = None
            if self._looked or not self._spec.node.shuffled:
                restart = left.start if self._looked else Cursor(at.epoch, steps=at.steps)
            if restart is not None and self._spec.has_positions and not self._is_over(at):
                self.restarted(restart)
                restart = None
        cursor, rolled = self._cursor, False
        if self._is_over(cursor) and not self._named:
            # After the last batch, continuing means the next epoch, not an empty one.
            if self.ledger is not None and cursor.lanes is not None:
                self.record_end(self.ledger, cursor, cursor)
            cursor, rolled = Cursor(cursor.epoch + 1, steps=cursor.steps), True
        self.delivered = cursor if rolled else None
        if (plan := self.plan(cursor)) is not None:
            check_equal_steps(plan, self._options, self.shard)
            if isinstance(plan, TokenPlan) and not cursor.begun and self._spec.rows and not plan.has(0):
                raise ValueError(
                    f"no batch would be left: there are fewer batches by tokens than the {self.shard.count} ranks, and "
                    'the last step is dropped if it has none for every rank. Use last_batch="pad", or omit it.'
                )
        return Start(cursor, rolled, None if rolled else restart, left is not None)

    def restarted(self, cursor: Cursor) -> Cursor:
        """Begin again at a cursor: the pass before was left there, and is not continued."""
        if not self._looked and not self._warned:
            self._warned = True
            _log.warning(
                "epoch %d begins again at its first row: the last pass was left before its end, and the data is not "
                "shuffled. Use next(loader) or a state to continue, or set_epoch() to choose an epoch.", cursor.epoch,
            )  # fmt: skip
        self._cursor, self.delivered = cursor, None
        return cursor

    def left(self, batches: Pass) -> None:
        """Note that a pass was left before its end."""
        assert self.delivered is not None
        self._left = _Left(batches.start, self.delivered, batches.delivered)

    def may_roll(self, start: Cursor, rolled: bool, left: bool) -> bool:
        """Return True if a pass that finds nothing left continues with the next epoch.

        False if the epoch was set, or if this rank has loaded a state and other ranks may have batches left. A rank
        that left its own pass after the last batch does not wait for them.
        """
        alone = left or self.state_is_global or self._options.last_batch != "uneven"
        return start.begun and not rolled and not self._named and alone

    def rolled_to(self, epoch: int) -> Cursor:
        """Begin another epoch."""
        self.delivered = at = Cursor(epoch, steps=self._where().steps)
        return at

    def epoch_over(self, end: Cursor, rolled: bool) -> None:
        """Move to the next epoch or, after a roll-over, to the end of this one.

        Setting an epoch that was rolled over to thus does not repeat it. Until the next epoch is set or begun, the
        state is that after the last batch: setting the finished epoch after a resume, as a loop that saves its own
        epoch number does, repeats nothing.
        """
        if not self._spec.has_positions and end.position:
            self._spec = replace(self._spec, epoch_outputs=end.position)
        elif not self._spec.has_positions:
            _log.warning("epoch %d of %r is empty. Check that its filters keep some rows.", end.epoch, self)
        if self._cursor.epoch not in (end.epoch, end.epoch - rolled):
            self.delivered = None  # another epoch was set while this one was iterated
            return
        self._cursor = end if rolled else Cursor(end.epoch + 1, steps=end.steps)
        self._resume_point = end if rolled else None
        self.delivered, self._named = end if end.position else None, False

    def compare(self, start: Cursor, *, first: bool) -> None:
        """Compare this rank with the others: what it loads, and at the second batch of a pass also from where."""
        if self._counterparts is not None:
            self._counterparts.compare(self._spec.identity, start, self._spec.excluded, first=first)

    def record_end(self, ledger: Ledger, start: Cursor, end: Cursor) -> None:
        """Record a pass without batches that comes to the end of the epoch: what was left became nothing."""
        self.begin_record(ledger, start)
        ledger.finish(self.meter.waited, end)
        self.how, self.origin = "on", end

    def begin_record(
        self, ledger: Ledger, cursor: Cursor, *, load: bool = False, leased: LeaseSteps | None = None
    ) -> None:
        """Record that a pass begins at a cursor, or that a state was loaded there."""
        ledger.begin(
            self._spec,
            cursor,
            how=self.how,
            origin=_resolved(self.origin),
            end=self.plan(cursor),
            batch_size=self._options.batch_size,
            last_batch=self._options.last_batch,
            workers=self._options.num_workers,
            sizes=self._options.sizes,
            planning=self._options.planning,
            measured=self.meter,
            load=load,
            sources=self.sources if self._options.provenance else (),
            leased=leased,
            excluded=self.excluded_places(cursor),
        )

    def open(self, cursor: Cursor, plan: StepPlan | None, *, alone: bool = False) -> BatchSource:
        """Open the batches from a cursor on. ``alone``: ranks do not agree on their steps."""
        return self._sources.open(self._spec, cursor, plan, alone=alone)

    def leave_source(self, source: BatchSource | None) -> None:
        """Close the source of a pass that has ended. Workers stop with it unless they are persistent."""
        lanes = unwrapped(source)
        if isinstance(lanes, LaneBatches):
            self._packed = (self._packed[0] + lanes.packed[0], self._packed[1] + lanes.packed[1])
        self._sources.leave(source)

    def close_workers(self) -> None:
        """Stop the workers, and discard unfinished batches."""
        self._sources.close()

    def _live(self) -> Pass | None:
        return self.iterator() if self.iterator is not None else None

    def _end_iteration(self) -> None:
        """End the pass in progress, and all iterators over a number of steps."""
        self._end_pass()
        self.loads += 1

    def _end_pass(self) -> None:
        live = self._live()
        if live is not None:
            live.close()
        self.iterator = self._pass = self._data_pass = None

    def close(self) -> None:
        """Stop threads and workers now. They also stop with the loader, and with the process however it exits."""
        self._end_iteration()
        self.close_workers()


def _resolved(cursor: Cursor | StepOutputs) -> Cursor:
    return cursor.cursor() if isinstance(cursor, StepOutputs) else cursor
