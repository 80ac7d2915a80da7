"""The Loader: batches of every epoch, and the cursor behind the last one handed over."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from midepoch import state as states
from midepoch.audit.ledger import Ledger
from midepoch.checks import whole
from midepoch.ending import silent_at_exit
from midepoch.errors import MidepochError
from midepoch.loader.batches import BatchMaker, Made, Plan
from midepoch.loader.common import AnyLoader
from midepoch.loader.direct import DirectBatches
from midepoch.loader.equal import Counterparts, check_reach
from midepoch.loader.options import Options, check_goes_on
from midepoch.loader.pinned import pinner
from midepoch.loader.threads import ThreadedBatches
from midepoch.loader.workers import WorkerPool
from midepoch.order import Cut
from midepoch.pipeline import Pipeline
from midepoch.resumable import HasState
from midepoch.seeds import draw_global_seed
from midepoch.state import Cursor
from midepoch.transforms import finish

_Source = DirectBatches | ThreadedBatches | WorkerPool


class Loader(AnyLoader):
    """Batches of a dataset, epoch after epoch. Made by ``Dataset.loader``.

    Each ``iter()`` goes through one epoch: from its beginning, or from where a loaded state left off. When it has been
    gone through, the next ``iter()`` is the next epoch. A ``break`` moves nothing, unless the last batch was out.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: Options,
        cursor: Cursor,
        *,
        asked: bool = False,
        counterparts: Counterparts | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(options)
        self._pipeline, self._cursor = pipeline, cursor
        self._counterparts = counterparts
        self._ledger = ledger
        self._stood = cursor  # behind the last batch handed over, or where a state was loaded, whatever epoch is named
        self._how = "fresh"
        self._asked = asked  # the epoch was named by set_epoch
        self._namings = 0  # how often one was
        self._delivered: Cursor | None = None
        self._identity = states.identity(pipeline)
        self._iterator: weakref.ref[_Batches] | None = None
        self._pool: WorkerPool | None = None
        self._maker: BatchMaker | None = None
        self.skipped = 0
        """Rows passed over so far under ``on_error="skip"``, on this rank."""
        check_reach(self._plan(Cursor()), options, pipeline.cut)
        if cursor.position:  # of a state that was loaded into the dataset
            self._how = "loaded"
            if ledger is not None:
                self._begin_record(ledger, self._plan(cursor), load=True)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return self._plan(Cursor()).share(self._pipeline.cut)

    def __repr__(self) -> str:
        at, cut = self._where(), self._pipeline.cut
        return (
            f"Loader({self._pipeline.rows:,} rows; batch_size={self._options.batch_size}; "
            f"num_workers={self._options.num_workers}; rank {cut.index} of {cut.count}; "
            f"at epoch {at.epoch}, position {at.position:,})"
        )

    @property
    def pipeline(self) -> Pipeline:
        """The frozen description of what it loads."""
        return self._pipeline

    @property
    def cut(self) -> Cut:
        """Which share of every global batch this rank gets: ``index`` of ``count``."""
        return self._pipeline.cut

    def _epoch(self) -> int:
        at = self._where()
        return at.epoch + 1 if self._over(at) else at.epoch

    @property
    def position(self) -> int:
        """How many rows of the epoch all ranks together have been handed."""
        at = self._where()
        return 0 if self._over(at) else at.position

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The one a loaded state is in is gone on with where it was left; any other starts anew."""
        epoch = whole(epoch, "set_epoch")
        self._pass = None
        self._namings += 1
        if self._how == "fresh" and not self._cursor.position:
            self._stood = Cursor(epoch)  # a run that is begun there, as by those who make a loader for every epoch
        if epoch != self._cursor.epoch:
            self._cursor, self._delivered = Cursor(epoch), None
        elif self._delivered is not None and self._delivered.epoch != epoch:
            self._delivered = None
        self._asked = True

    def state_dict(self) -> dict[str, Any]:
        """Where to go on: just behind the last batch handed over. The same on every rank; under 1 KB, JSON-able."""
        self._draw_seed()
        return states.save(self._identity, self._where(), self._pipeline.global_seed)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from a state, saved by any rank, with any batch size, number of workers and world size.

        Raises CheckpointMismatchError, and changes nothing, if it belongs to other data, another order or pipeline;
        ``allow=["pipeline"]`` lets a field differ all the same, which is recorded in ``changes`` and in the state.
        """
        resumed = self._resumed(state, allow)
        self.close()
        pipeline = states.adopt(resumed, self._pipeline)
        identity = states.identity(pipeline)
        # No call among these: a signal handler that saves must not see half of them.
        self._pipeline, self._identity, self._maker, self._asked = pipeline, identity, None, False
        self._cursor = self._stood = resumed.cursor
        self._delivered, self._how = None, "loaded"
        if self._counterparts is not None:
            self._counterparts.loaded()
        if self._ledger is not None:  # now, not with the first batch: there may be nothing left to deliver
            self._begin_record(self._ledger, self._plan(self._cursor), load=True)

    def _begin_record(self, ledger: Ledger, plan: Plan, *, load: bool = False) -> None:
        ledger.begin(
            self._pipeline,
            how=self._how,
            stood=self._stood,
            epoch=plan.epoch,
            start=plan.start,
            end=plan.end,
            global_batch=plan.global_batch,
            ends=self._options.ends,
            workers=self._options.num_workers,
            waited=self._meter.waited,
            load=load,
        )

    def _draw_seed(self) -> None:
        """Fix what the global generators are seeded from while functions run: at the first pass, or the first state."""
        if self._pipeline.global_seed is None and (self._pipeline.has_functions or self._options.collate_fn):
            seed = draw_global_seed(self._pipeline.source.fingerprint)
            self._pipeline = replace(self._pipeline, global_seed=seed)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise what ``load_state_dict`` would raise for a state that does not belong here. Changes nothing."""
        self._resumed(state)

    def _resumed(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> states.Resumed:
        return states.load_global(state, self._pipeline, allow)

    @property
    def changes(self) -> tuple[str, ...]:
        """What was allowed to differ at resumes since the run began."""
        return self._pipeline.changes

    def _where(self) -> Cursor:
        return self._delivered or self._cursor

    def _plan(self, cursor: Cursor) -> Plan:
        return Plan.make(self._pipeline, self._options, cursor.epoch, cursor.position)

    def _over(self, cursor: Cursor) -> bool:
        return cursor.position > 0 and not len(self._plan(cursor))

    def __iter__(self) -> Iterator[Any]:
        self._end_iteration()
        batches = _Batches(self, *self._next_plan())
        self._iterator = weakref.ref(batches)
        return batches

    def _next_plan(self) -> tuple[Plan, bool]:
        """What the next pass goes through, and whether it is the epoch after the one that the cursor is in."""
        cursor, rolled = self._cursor, False
        if self._over(cursor) and not self._asked:
            # A state saved behind the last batch: going on means the next epoch, not an empty one.
            cursor, rolled = Cursor(cursor.epoch + 1), True
        self._delivered = cursor if rolled else None
        plan = self._plan(cursor)
        check_reach(plan, self._options, self._pipeline.cut)
        return plan, rolled

    def _epoch_over(self, plan: Plan, rolled: bool) -> None:
        """Move to the next epoch; past one that was rolled over to, so that naming it does not repeat it.

        Until the next epoch is named or begun, a state is that after the last batch: naming the finished epoch after a
        resume, as a loop that saves its own epoch number does, repeats nothing.
        """
        if self._cursor.epoch not in (plan.epoch, plan.epoch - rolled):
            self._delivered = None  # another epoch was named while this one was gone through
            return
        end = Cursor(plan.epoch, plan.end)
        self._cursor = end if rolled else Cursor(plan.epoch + 1)
        self._delivered, self._asked = end if plan.end else None, False

    def _source(self, plan: Plan) -> _Source:
        options = self._options
        self._draw_seed()
        self._maker = self._maker or BatchMaker(self._pipeline, options, self._meter.spent)
        if self._maker.direct:
            return DirectBatches(self._maker, plan, options.prefetch, options.num_workers)
        if not options.num_workers or self._maker.decodes_only:
            return ThreadedBatches(self._maker, plan, options.prefetch)
        if self._pool is None or not self._pool.is_here:
            self._pool = WorkerPool(self._pipeline, options)
        self._pool.begin(plan)
        return self._pool

    def _end_iteration(self) -> None:
        live = self._iterator() if self._iterator is not None else None
        if live is not None:
            live.close()
        self._iterator = self._pass = None

    def close(self) -> None:
        """End threads and workers now; they also end with the loader, and with the process however it ends."""
        self._end_iteration()
        self._close_pool()

    def _close_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _shown(self) -> tuple[dict[str, Any], float | None]:
        rows, at = self._pipeline.rows, self.position
        return {"rows": f"{rows:,}", "at": f"epoch {self.epoch}, position {at:,} of {rows:,}"}, at / max(1, rows)

    @silent_at_exit
    def __del__(self) -> None:
        if getattr(self, "_pool", None) is not None:
            self._close_pool()


class _Batches(HasState):
    """One pass over (the rest of) an epoch."""

    _closed = True  # until it has begun

    def __init__(self, loader: Loader, plan: Plan, rolled: bool) -> None:
        self._loader, self._ledger = loader, loader._ledger
        self._meter = loader.meter
        self._begin(plan, rolled)
        pipeline, options = loader._pipeline, loader._options
        self._format = pipeline.format or "torch" if options.collate_fn is None else "python"
        self._pin = pinner() if options.pin_memory else None

    def _begin(self, plan: Plan, rolled: bool) -> None:
        self._plan, self._rolled = plan, rolled
        self._meter.begin()
        self._named = self._loader._namings
        self._source: _Source | None = None
        self._step = self._out = 0  # made, and handed over
        self._closed = self._over = False
        self._failure: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader: just behind the last batch handed over."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loader, and go on from there with this iterator."""
        self._loader.load_state_dict(state)
        self._begin(*self._loader._next_plan())
        self._loader._iterator = weakref.ref(self)

    def __iter__(self) -> _Batches:
        return self

    def __length_hint__(self) -> int:
        """Batches left."""
        return 0 if self._over else max(0, self._plan.share(self._loader._pipeline.cut) - self._step)

    def __next__(self) -> Any:
        if self._meter.due:
            self._meter.call_hooks()
        asked = perf_counter()
        if self._over:
            raise StopIteration
        check_goes_on(self._failure, self._closed)
        loader, ledger, recorded = self._loader, self._ledger, -1
        try:
            while (made := self._next()) is not None:
                value = None if made.empty else finish(made.value, self._format)
                if self._pin is not None:
                    value = self._pin(value)
                if made.spent is not None:
                    self._meter.spent.add(made.spent)
                if not made.empty:
                    self._meter.handed(asked, made.rows, value)
                cursor = Cursor(self._plan.epoch, self._plan.bounds(made.step)[1])
                if ledger is not None:
                    if not made.step:  # the entries of a pass begin with its first batch
                        loader._begin_record(ledger, self._plan)
                    recorded = ledger.end
                    ledger.step(made.skipped, self._meter.waited)
                # The cursor moves here and nowhere else: with the batch. Python handles signals at calls, and there is
                # none from here to the caller's loop, so no interrupt comes between the two.
                loader.skipped += made.skipped
                self._out = made.step + 1
                loader._delivered = loader._stood = cursor
                loader._how = "on"
                if not made.empty:
                    return value
                recorded = -1
                self._refuse_to_drift(made)
        except BaseException as problem:
            if ledger is not None and recorded >= 0:
                ledger.take_back(recorded)
            self._fail(problem)
            raise
        self.close()
        raise StopIteration

    def _refuse_to_drift(self, made: Made) -> None:
        """A rank that passes over a whole batch would be a step ahead of the others from then on."""
        cut = self._loader._pipeline.cut
        if cut.count > 1 and made.skipped:
            first, stop = self._plan.bounds(made.step)
            raise MidepochError(
                f'on_error="skip" left rank {cut.index} of {cut.count} no row of the batch at positions {first:,} to '
                f"{stop - 1:,}: it would run a step ahead of the other ranks. Use larger batches, or shuffle by rows."
            )

    def _next(self) -> Made | None:
        if self._step >= len(self._plan):
            self._over = True
            if self._ledger is not None:
                self._ledger.finish(self._meter.waited)
            self._loader._epoch_over(self._plan, self._rolled)
            return None
        if self._step < 2 and self._loader._counterparts is not None:
            self._compare(self._loader._counterparts)
        if self._source is None:
            self._source = self._loader._source(self._plan)
        made = self._source.next(self._step)
        self._step += 1
        return made

    def _compare(self, counterparts: Counterparts) -> None:
        """Compare this rank with the others: what it loads, and at the second batch also from where."""
        loader, plan = self._loader, self._plan
        if self._step == 0:
            counterparts.check_identity(loader._identity)
        else:
            counterparts.check_pass(loader._identity, {"epoch": plan.epoch, "position": plan.start})

    def _fail(self, problem: BaseException) -> None:
        """Nothing comes after this: the batch that was not handed over would be passed over. Workers go, too: a signal
        may have come between a message and its book-keeping.
        """
        self._failure = problem
        self._loader._close_pool()
        self.close()

    def _end_if_complete(self, loader: Loader) -> None:
        """The end was not asked for, but nothing of it is left for this rank: the next pass is the next epoch's."""
        if self._out >= self._plan.share(loader._pipeline.cut) and self._named == loader._namings:
            if self._ledger is not None:
                self._ledger.finish(self._meter.waited)
            loader._epoch_over(self._plan, self._rolled)

    def close(self) -> None:
        """Stop; workers go too unless they are persistent."""
        if self._closed:
            return
        self._closed = True
        if self._out and not self._over and self._failure is None:
            self._end_if_complete(self._loader)
        if isinstance(self._source, WorkerPool):
            if not self._loader._options.persistent_workers:
                self._loader._close_pool()
        elif self._source is not None and not self._source.close():
            self._loader._maker = None  # a thread may come back to it
        self._source = None

    @silent_at_exit
    def __del__(self) -> None:
        self.close()
