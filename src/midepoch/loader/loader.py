"""The Loader: batches of every epoch, and the state after the last one delivered."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from operator import length_hint
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from midepoch._internal import html
from midepoch._internal.hints import fixed, hinted_methods, no_attribute
from midepoch._internal.progress import Bar
from midepoch._internal.resumable import Resumable
from midepoch._internal.values import integer
from midepoch.audit.ledger import Ledger
from midepoch.audit.records import LeaseSteps
from midepoch.distributed.keyvalue import first_value
from midepoch.errors import WorldError
from midepoch.loader import counting, edits
from midepoch.loader import state as runs
from midepoch.loader.feeds import Feed, Feeds
from midepoch.loader.lanes import EqualSteps, RankConsistencyCheck
from midepoch.loader.leases import Lease, LeaseBook
from midepoch.loader.leasing import LeaseItems, end_leases
from midepoch.loader.meter import Meter
from midepoch.loader.options import ATTRIBUTES, HINTED, HINTS, Options, SingleRow
from midepoch.loader.passes import Pass, StepsPass
from midepoch.loader.plans import make_plan
from midepoch.loader.provenance import source_names
from midepoch.loader.state import Start
from midepoch.order import Shard
from midepoch.order.schedule import shares
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.plans import StepPlan
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state import saved as states
from midepoch.state.changing import phase_at, with_weights
from midepoch.stats import Hook, Stats

if TYPE_CHECKING:
    from midepoch.dataset import Dataset

_log = logging.getLogger("midepoch")
Self = TypeVar("Self", bound="Loader")


@fixed("a Loader", "Make another: ds.loader(…). A state of this one can be loaded into it.")
@hinted_methods(HINTS, only=HINTED)
class Loader(Resumable):
    """Batches of a dataset, epoch after epoch. Created by ``Dataset.loader``.

    Each ``iter()`` is a pass over one epoch, from its beginning or from the position of a loaded state. After the last
    batch is delivered, the next ``iter()`` is the next epoch. After a ``break``:

    - A pass of only one batch was a look, unless an error ended it: the next ``iter()`` begins where it began.
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
        self._options, self._dataset, self._counterparts, self._ledger = options, dataset, counterparts, ledger
        self._run = runs.new(spec, cursor, chosen=named)
        self._meter = Meter(options.num_workers, by_batch=options.budget is not None)
        self._feeds, self._leases = Feeds(options, equal, self._meter.timings), LeaseBook()
        self._live: weakref.ref[Pass] | None = None  # the last pass that was begun
        self._data_pass: Pass | None = None  # that passes of a number of steps share
        self._packed, self._skipped = (0, 0), 0
        self._breaks = 0  # how often a state was loaded or iteration was stopped
        counting.check_new(spec, options, cursor)
        if cursor.begun and ledger is not None:
            self._begin_record(ledger, self._run.cursor, load=True)

    if not TYPE_CHECKING:  # a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError: raise it again
                return object.__getattribute__(self, name)
            raise no_attribute("a Loader", name, dir(self), ATTRIBUTES)

        def __getitems__(self, keys: object) -> None:  # of torch's DataLoader
            raise TypeError("a Loader makes batches itself. Iterate it in place of a DataLoader, which takes datasets.")

    def __getstate__(self) -> dict[str, Any]:
        if self._live is not None:
            raise TypeError("a Loader in use is not copied or pickled. Save loader.state_dict(), or send its dataset.")
        return vars(self)

    def __dir__(self) -> list[str]:
        return sorted(name for name in dir(type(self)) if not name.startswith("_"))

    # What it delivers

    @property
    def pipeline(self) -> PipelineSpec:
        """The frozen definition of the data it loads."""
        return self._run.spec

    @property
    def options(self) -> Options:
        """The settings of its batches."""
        return self._options

    @property
    def dataset(self) -> Dataset:
        """The dataset that it was created from. Its own cursor does not move."""
        return self._dataset  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> int | None:
        """The number of rows of a batch on this rank, or None if single rows are delivered, or batches by tokens."""
        if self._options.budget is not None:
            return self._options.budget.rows or None
        return None if isinstance(self._options.collate_fn, SingleRow) else self._options.batch_size

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._options.num_workers

    @property
    def collate_fn(self) -> Callable[[Any], Any] | None:
        """The function that makes a batch of rows, or None for columns as tensors."""
        function = self._options.collate_fn
        return function.function if isinstance(function, SingleRow) else function

    @property
    def drop_last(self) -> bool:
        """True if the last global batch is omitted unless it is full."""
        return self._options.last_batch == "drop"

    @property
    def last_batch(self) -> str | None:
        """The treatment of the last global batch if it is not full."""
        return self._options.last_batch

    @property
    def pin_memory(self) -> bool:
        """True if batches are in page-locked memory."""
        return self._options.pin_memory

    @property
    def prefetch_factor(self) -> int:
        """The number of batches that each worker makes ahead."""
        return self._options.prefetch

    @property
    def persistent_workers(self) -> bool:
        """True if workers stay between epochs."""
        return self._options.persistent_workers

    @property
    def worker_init_fn(self) -> Callable[[int], Any] | None:
        """The function that each worker calls when it starts."""
        return self._options.worker_init_fn

    @property
    def timeout(self) -> float:
        """The seconds to wait for a worker, or 0 for any time."""
        return self._options.timeout

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, by the numbers in ``source`` of batches with provenance.

        They are those of the mix, or else the paths of the data.
        """
        return source_names(self.pipeline)

    @property
    def shard(self) -> Shard:
        """The shard of every global batch that this rank gets: ``index`` of ``count``."""
        return self.pipeline.shard

    @property
    def changes(self) -> tuple[str, ...]:
        """Changes at resumes since the run began: fields that were allowed to differ, and weights of mixes."""
        return self.pipeline.changes

    # Where it is

    @property
    def steps(self) -> int:
        """The number of global batches since the run began. After step N it is N, also after a resume."""
        return self._where().steps

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, as far as it is known. Setting it calls ``set_epoch``.

        With ``steps_per_epoch`` it is the number of complete passes of so many steps.
        """
        at = self._where()
        if self._options.steps_per_epoch:
            return at.steps // self._options.steps_per_epoch
        return at.epoch + self._is_over(at)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def position(self) -> int:
        """The number of rows of the epoch that have been delivered to all ranks together."""
        at = self._where()
        return 0 if self._is_over(at) else counting.position(self.pipeline, self._options, at, self._plan_of(at))

    @property
    def skipped(self) -> int:
        """Rows skipped so far under ``on_error="skip"``, on this rank."""
        return self._skipped

    @property
    def packing_efficiency(self) -> float | None:
        """The share of token slots of packed sequences that contain tokens, in this process. None without packing."""
        live = self._current()
        more = (0, 0) if live is None or live.feed is None else live.feed.packed
        tokens, places = self._packed[0] + more[0], self._packed[1] + more[1]
        return tokens / places if places else None

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank. Raises TypeError if it is not known before running."""
        at = self._where()
        return counting.length(self.pipeline, self._options, at, over=self._is_over(at))

    @property
    def estimated_len(self) -> int | None:
        """The approximate number of batches of an epoch, or None before the first batch."""
        at = self._where()
        return counting.estimated_length(self.pipeline, self._options, at, over=self._is_over(at))

    def __repr__(self) -> str:
        at = self._where()
        epoch = at.epoch + self._is_over(at)
        return counting.text(self.pipeline, self._options, self.batch_size, epoch, self.position)

    def _repr_html_(self) -> str:
        rows, at = counting.rows_of_epoch(self.pipeline, self._options, self.estimated_len), self.position
        about = counting.about(self.pipeline, self._options, self.epoch, at, rows, self.stats())
        return html.table("Loader", about, at / rows[0] if rows else None)

    def _where(self) -> Cursor:
        """Return the cursor after the last batch delivered or, with leases, of what is acknowledged."""
        tracker = self._leases.tracker
        if tracker is not None and not tracker.complete:
            return tracker.cursor(alone=self.shard.count == 1)[0]
        return self._run.cursor

    def _next_cursor(self) -> Cursor:
        """Return the cursor from which the next batch is delivered."""
        at, live = self._where(), self._current()
        if live is not None and live.is_open:
            return live.start if live.start.epoch > at.epoch else at
        if self._run.kind is runs.Kind.LOOKED and self._leases.tracker is None and not self._options.steps_per_epoch:
            at = self._run.next  # the next pass begins where the look began
        return at.next_epoch() if self._is_over(at) else at

    def _is_over(self, cursor: Cursor) -> bool:
        """Return True if nothing is left of the epoch, as far as it is known."""
        loaded = self._run.loaded
        if loaded is not None and self._run.kind is runs.Kind.LOADED and self.last_batch == "uneven":
            edited = loaded.epoch == cursor.epoch and len(cursor.lanes) < len(loaded.lanes)
            if edited and not loaded.lanes_ended:  # this rank is at its end, and others may have batches left
                return False
        return counting.is_over(self.pipeline, self._options, cursor, self._plan_of(cursor))

    def _plan_of(self, cursor: Cursor) -> StepPlan | None:
        """Return the plan of the pass in progress, if it has a cursor, so that no window is planned twice."""
        live = self._current()
        plan = None if live is None or live.feed is None else live.feed.plan
        inside = plan is not None and plan.epoch == cursor.epoch and plan.first_lane.taken <= cursor.lane.taken
        return plan if inside else None

    # The state

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch delivered: a JSON-able dict.

        If positions can be computed, it is equal on all ranks and under 1 KB. Otherwise it has a few integers for each
        lane of this rank. With leases, it is what this rank has acknowledged.
        """
        self._draw_seed()
        tracker, alone = self._leases.tracker, self.shard.count == 1
        cursor, own = self._run.cursor, None
        if tracker is not None:
            at, own = tracker.cursor(alone=alone)
            cursor = cursor if tracker.complete else at
        if self._ledger is not None:
            self._ledger.saved(cursor.steps if tracker is None else None)
        planning = self._options.planning
        leased = [] if own is None else own.to_json()
        if tracker is not None and self._options.context_rank:
            leased.append(["context_rank", self._options.context_rank])
        branches = () if self._ledger is None else self._ledger.branches(self.pipeline.origins)
        return states.save(self.pipeline, cursor, "" if planning is None else planning.budget.text, leased, branches)

    def load_state_dict(self, state: Any, *, allow: Collection[str] = ()) -> None:
        """Continue from a state, or from the list of the states of all ranks.

        Batch size, workers and world size may differ. Raises CheckpointMismatchError, and changes nothing, if the state
        belongs to other data, another order or pipeline. ``allow=["pipeline"]`` permits a field to differ, which is
        recorded in ``changes`` and in the state. The weights of a mix may be changed, and sources may be added or
        removed: the others continue at their positions.
        """
        resumed = self._resumed(state, allow)
        self._end_iteration()
        self._feeds.forget()
        self._leases.drop()
        self._run = runs.load(resumed.spec.for_processes(self.shard.count, begun=True), resumed.cursor)
        if self._counterparts is not None:
            self._counterparts.loaded()
        if self._ledger is not None:  # now, not with the first batch: there may be no batch left
            self._begin_record(self._ledger, self._run.cursor, load=True)

    def check_state(self, state: Any) -> None:
        """Raise the error that ``load_state_dict`` would raise for a state that does not fit. Change nothing."""
        self._resumed(state, ())

    def _states_checker(self) -> Callable[[list[Any]], None]:
        """Return ``check_state`` of the pipeline as it is now: a save in the background calls it later."""
        spec = self.pipeline

        def check(of_all_ranks: list[Any]) -> None:
            self._resumed(of_all_ranks, (), spec)

        return check

    def _resumed(self, state: Any, allow: Collection[str], spec: PipelineSpec | None = None) -> states.Resumed:
        resumed = states.load_global(state, spec or self.pipeline, allow, self._options.planning)
        resumed.spec.check_known(resumed.cursor, self.shard)
        counting.check_window(resumed.spec, self._options, resumed.cursor)
        return resumed

    @property
    def state_is_global(self) -> bool:
        """True if the state of one rank restores all ranks. False if each has lanes, or leases, of its own."""
        return self.pipeline.state_is_global and (self._leases.tracker is None or self.shard.count == 1)

    @property
    def takes_states_of_all_ranks(self) -> bool:
        """True if the list of the states of all ranks restores any number of them."""
        return True

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
        if self._run.kind is runs.Kind.LOADED and epoch not in (self.epoch, self._run.cursor.epoch):
            _log.warning(
                "set_epoch(%d) leaves the state that was loaded, of epoch %d. To continue it, begin the loop there: "
                "for epoch in range(loader.epoch, …).",
                epoch,
                self._run.cursor.epoch,
            )
        end_leases(self)
        live, self._pass = self._current(), None
        self._run = runs.choose(self._run, epoch, batches=0 if live is None else live.delivered)

    def _draw_seed(self) -> None:
        """Fix the seed of the global generators while functions run: at the first pass, or the first state."""
        if self.pipeline.node.has_functions or self._options.collate_fn is not None:
            spec = self.pipeline.seeded()
            if spec is not self.pipeline:  # once: a thread that saves must not take back a batch that is delivered then
                self._run = self._run._replace(spec=spec)

    # Edits

    def exclude(
        self,
        *,
        steps: range | Iterable[int] | None = None,
        rows: Iterable[int] | Mapping[str | int, Iterable[int]] | None = None,
        documents: Any = None,
        run: Any = None,
    ) -> int:
        """Leave out steps, rows or documents from here on. Return how many rows (or outputs of steps) are excluded.

        ``steps``: numbers of steps of this epoch, as ``loader.steps`` counts them: the next one is
        ``loader.steps + 1``. They are left out, and the batches after them move up. Their rows stay excluded if the
        batch size or the world size changes later.

        ``rows``: numbers of rows before shuffling; with several sources, a dict by the name or number of the source.
        They are left out of the rest of this epoch and of every later one.

        ``documents``: the same rows, as provenance and ``midepoch audit`` name them: a batch with provenance, its
        ``doc_ids``, or (source, row) pairs. ``run``: the folder of a ledger; then ``steps`` are those of the recorded
        run, and exactly the documents that it delivered at these steps are left out, whatever its batch size was.

        If the pipeline changes the number of rows (a filter, ``pack``, ``mix``), excluding steps runs it up to the last
        of them, which takes as long as delivering these steps.

        The state has the exclusion. Call it with the same arguments on all ranks: before iterating, between two
        batches, or after ``load_state_dict``. With batches by ``max_tokens``, steps are counted in batches.
        """
        given = [
            name for name, value in (("steps", steps), ("rows", rows), ("documents", documents)) if value is not None
        ]
        if len(given) != 1 or (run is not None and steps is None):
            raise TypeError(
                "exclude() takes either steps= or rows= or documents=. Pass one of them; run= needs steps=."
            )
        cursor, spec, options = self._next_cursor(), self.pipeline, self._options
        if run is not None:
            documents, steps = edits.documents_of(run, steps, spec), None
        # Rows that are too few for a batch after a resume are dropped when a pass begins, and not by an edit.
        keeps_rest = steps is None and self.last_batch == "drop" and self._run.kind is runs.Kind.LOADED
        cursor = self._where() if keeps_rest else cursor
        if documents is not None:
            rows = edits.rows_of_documents(documents, self.sources)
        if steps is not None:
            edited = edits.without_steps(spec, options, cursor, steps)
        else:
            edited = edits.without_rows(spec, options, cursor, rows)
        _log.info("exclude: %d %s are left out from the next batch on", edited.left_out, spec.unit)
        self._continue_at(edited.spec, edited.cursor)
        ledger, is_planned = self._ledger, spec.unit == "rows"
        no_batch = is_planned and not make_plan(edited.spec, options, edited.cursor).has(0)
        if ledger is not None and no_batch and not keeps_rest:
            # Nothing is left of the epoch, so that no batch follows that would begin a record.
            self._draw_seed()
            self._begin_record(ledger, edited.cursor)
            ledger.finish(edited.cursor)
        return edited.left_out

    def _continue_at(self, spec: PipelineSpec, cursor: Cursor) -> None:
        """Continue at a cursor, with a pipeline that differs in what is not delivered yet."""
        end_leases(self)
        live = self._current()
        is_open = live is not None and live.is_open
        self._run = runs.edit(self._run, spec, cursor, is_open=is_open)
        if self._counterparts is not None:
            self._counterparts.edited()
        if live is not None and is_open:
            live.reopen()

    @property
    def weights(self) -> dict[str, float] | tuple[float, ...]:
        """The weights of the mix at the next batch, as shares of 1: by name, or a tuple if its sources have no names.

        In a phase with ``final_weights`` they are the weights at its beginning.
        """
        mix = edits.mix_of(self.pipeline, "weights")
        weights: Sequence[float] = mix.current
        if mix.schedule is not None:
            cursor = self._next_cursor()
            phase = phase_at(self.pipeline, cursor)
            weights = [mix.schedule.plan[phase].weights.get(name, 0.0) for name in mix.names]
            if mix.learned is not None and mix.learned.applies(cursor.epoch, phase):
                weights = mix.learned.weights
        found = shares(weights)
        return edits.Weights(zip(mix.names, found, strict=True)) if mix.names else found

    @property
    def phase(self) -> str | None:
        """The name of the phase of the next batch, or None if the data is not mixed by a schedule."""
        schedule = self.pipeline.node.schedule
        return None if schedule is None else schedule.plan[phase_at(self.pipeline, self._next_cursor())].name

    def set_weights(self, weights: Mapping[str, float] | Sequence[float]) -> None:
        """Change the weights of the mix from the next batch on, for methods that learn them during the run.

        ``weights``: by the name of the source (0 if it is not named), or a list. With a schedule, they apply until the
        phase ends in this epoch. The state has them, so a resume continues with them. Steps after the mix (shuffle,
        batch, pack) first deliver the rows that they have drawn with the weights before.

        Call it at the same step on all ranks. The weights of the first rank to call it apply on all of them.
        """
        chosen, cursor = edits.checked_weights(weights, self.pipeline), self._next_cursor()
        if isinstance(weights, Mapping) and isinstance(now := self.weights, dict):
            for name in (name for name, weight in now.items() if weight and name not in weights):
                _log.warning("set_weights: %r is not named, so its weight is 0. Name all sources.", name)
        phase, chosen = self._agreed(phase_at(self.pipeline, cursor), chosen, cursor)
        spec, cursor = with_weights(self.pipeline, cursor, phase, chosen)
        _log.info("set_weights: the weights of the mix are %s from the next batch on", [round(w, 6) for w in chosen])
        self._continue_at(spec, cursor)

    def _agreed(self, phase: int, weights: tuple[float, ...], cursor: Cursor) -> tuple[int, tuple[float, ...]]:
        """Return the weights of the first rank. Raise WorldError if it called at another step."""
        if self._counterparts is None:
            return phase, weights
        text = json.dumps([cursor.epoch, cursor.steps, phase, weights])
        agreed = first_value(f"weights/{self._counterparts.next_name()}", text)
        if agreed is None:
            return phase, weights
        epoch, steps, phase, weights = json.loads(agreed)
        if (epoch, steps) != (cursor.epoch, cursor.steps):
            raise WorldError(
                f"set_weights was called after step {cursor.steps:,} on this rank, and after step {steps:,} on "
                "another. Call it at the same step on all ranks."
            )
        return phase, tuple(weights)

    # Iteration

    def __iter__(self) -> Iterator[Any]:
        self._pass = None  # next() continues after the last batch of any pass
        if self._data_pass is not None and self._data_pass.failed:
            self._data_pass = None
        return StepsPass(self) if self._options.steps_per_epoch else self._begin_pass()

    def _begin_pass(self, start: Start | None = None) -> Pass:
        """Begin a pass. ``start``: where leases that were left are continued."""
        if start is None:
            end_leases(self)
        self._end_pass()
        self._draw_seed()
        batches = Pass(self, self._next_start() if start is None else start)
        self._live = weakref.ref(batches)
        return batches

    def _pass_over_data(self, *, next_epoch: bool = False) -> Pass:
        """Return the pass over the data that passes of a number of steps share, or begin that of its next epoch."""
        if self._data_pass is None or next_epoch:
            self._data_pass = self._begin_pass()
        return self._data_pass

    def _next_start(self) -> Start:
        """Return the start of the next pass. Raise if it would have no batch for some rank, as far as it is known."""
        run, by_steps = self._run, bool(self._options.steps_per_epoch)
        if by_steps and run.kind is runs.Kind.LOOKED:  # passes of steps always continue
            run = run._replace(kind=runs.Kind.LEFT)
        at = run.cursor if runs.was_left(run) else run.next
        start = runs.begin(run, over=self._is_over(at), shuffled=by_steps or self.pipeline.node.shuffled)
        if start.restart is not None and self.pipeline.unit == "rows":  # that something is left is known
            self._restarted(start.restart, looked=start.looked)
            start = start._replace(cursor=start.restart, restart=None)
        if self.pipeline.unit == "rows":
            counting.check_start(self.pipeline, self._options, start.cursor)
        return start

    def _restarted(self, cursor: Cursor, *, looked: bool) -> None:
        """Warn once if a pass that was left is not continued."""
        if not looked and not self._meter.restarted:
            self._meter.restarted = True
            _log.warning(
                "epoch %d begins again at its first row: the last pass was left before its end, and the data is not "
                "shuffled. Use next(loader) or a state to continue, or set_epoch() to choose an epoch.", cursor.epoch,
            )  # fmt: skip

    def _open_feed(self, cursor: Cursor, *, alone: bool = False, plan: StepPlan | None = None) -> Feed:
        return self._feeds.open(self.pipeline, cursor, alone=alone, plan=plan)

    def _finish(self, end: Cursor, *, rolled: bool, looked: bool = False) -> None:
        """Move to the end of an epoch."""
        if self.pipeline.unit == "outputs":
            if outputs := counting.outputs_of(self.pipeline, end):
                self._run = self._run._replace(spec=replace(self.pipeline, epoch_outputs=outputs))
            else:
                _log.warning("epoch %d of %r is empty. Check that its filters keep some rows.", end.epoch, self)
        self._run = runs.finish(self._run, end, rolled=rolled, looked=looked)

    def _compare(self, start: Cursor, *, first: bool) -> None:
        """Compare this rank with the others: what it loads, and at the second batch of a pass also from where."""
        if self._counterparts is not None:
            self._counterparts.compare(self.pipeline, start, first=first)

    def _begin_record(
        self, ledger: Ledger, start: Cursor, *, leased: LeaseSteps | None = None, load: bool = False
    ) -> None:
        """Record that a pass begins. ``load``: that a state was loaded."""
        options = self._options
        ledger.begin(
            self.pipeline,
            start,
            counting.batching(options),
            self._meter,
            until=counting.end_of_epoch(self.pipeline, options, start),
            planning=options.planning,
            workers=options.num_workers,
            sources=self.sources if options.provenance else (),
            leased=leased,
            load=load,
        )

    def _leave(self, feed: Feed | None, *, edited: bool = False) -> None:
        """Close the batches of a pass that has ended, or was edited."""
        if feed is not None:
            tokens, places = feed.packed
            self._packed = (self._packed[0] + tokens, self._packed[1] + places)
        self._feeds.leave(feed, edited=edited)

    def _current(self) -> Pass | None:
        return self._live() if self._live is not None else None

    def _end_iteration(self) -> None:
        """End the pass in progress, and all iterators over a number of steps."""
        self._end_pass()
        self._breaks += 1

    def _end_pass(self) -> None:
        live = self._current()
        if live is not None:
            live.close()
        self._live = self._pass = self._data_pass = None

    def close(self) -> None:
        """Stop threads and workers now. They also stop with the loader, and with the process however it exits.

        The loader can be used again: if its batches came from ``next(loader)``, it continues after the last one.
        """
        by_next = self._pass is not None
        self._end_iteration()
        self._run = runs.pause(self._run) if by_next else self._run
        self._feeds.close()

    def __getitem__(self, number: object) -> Any:
        raise TypeError(
            "a loader makes batches itself, one after the other. Use next(loader) for a batch, loader.dataset[0] for a "
            "row, and the loader in place of a DataLoader."
        )

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Leases

    def lease(self, *, max_out: int | None = None, timeout: float | None = None) -> LeaseItems:
        """Return an iterator over leases: batches that count as consumed when they are acknowledged.

        ``with loader.lease() as items: for lease in items: …`` iterates the rest of an epoch. Acknowledge each lease by
        ``lease.ack()``, ``lease.reject()`` or ``loader.ack(…)``, in any order, from any thread or process of the
        machine. The state holds what was acknowledged: a resume first delivers the other batches again, then continues.
        Leases that are still out when the block ends are delivered again by the next block.

        ``max_out``: the most leases that may be out. The next one then waits for an acknowledgement, and raises
        TimeoutError after ``timeout`` seconds. Ranks do not wait for each other. With ``steps_per_epoch``, a block has
        that number of steps, and waits for all leases at the end of an epoch of the data. With ``context_parallel``,
        the acknowledgements of the first rank of a sequence count for all of its ranks.
        """
        if max_out is not None:
            max_out = integer(max_out, "lease(max_out=…)", 1)
        if timeout is not None and not (isinstance(timeout, (int, float)) and 0 <= timeout < float("inf")):
            raise ValueError(f"timeout must be a number of seconds, or None for no limit, got {timeout!r}")
        return LeaseItems(self, max_out, timeout)

    def ack(self, lease: Lease | int, *, rejected: bool = False) -> bool:
        """Acknowledge a lease, given as a ``Lease`` or its id. Return False if it was acknowledged before.

        ``rejected``: count it as rejected. Raises ValueError if the lease is unknown.
        """
        number = lease.id if isinstance(lease, Lease) else lease
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"ack() takes a lease or its id, got {lease!r:.60}. Pass the lease, or lease.id.")
        return self._leases.ack(int(number), rejected)

    # Measurements

    def stats(self, *, reset: bool = False) -> Stats:
        """Return the speed of delivery, the time that the model waited, and the work that took the time.

        On this rank, since the loader was created, or since the last call with ``reset=True``.
        """
        return self._meter.stats(reset=reset)

    def on_stats(self, hook: Hook, *, every: float = 30.0) -> None:
        """Call ``hook(stats, batches)`` every ``every`` seconds while batches are delivered.

        ``midepoch.stats`` has hooks for TensorBoard and Weights & Biases. They are called when the next batch is
        requested, so that their errors lose no batch.
        """
        if not callable(hook):
            raise TypeError(f"expected a hook, a function of stats and batches, got {hook!r}")
        try:
            with suppress(ValueError):  # of a function of C, which has no signature
                signature(hook).bind(None, 0)
        except TypeError:  # now, and not in the middle of the run
            raise TypeError(f"on_stats calls hook(stats, batches), but {hook!r:.60} takes other arguments.") from None
        if not every >= 0:
            raise ValueError(f"every must be a number of seconds, got {every!r}")
        self._meter.on_stats(hook, every)

    def progress(self, *, done: int = 0) -> Iterator[Any]:
        """Iterate the next pass with a progress bar, on a terminal or in a notebook.

        ``for batch in loader.progress(): …``. ``done``: batches of the epoch that were delivered before, so that the
        bar of a resumed run starts there.
        """
        done, batches, epoch = integer(done, "progress(done=…)"), iter(self), self.epoch
        with Bar(f"epoch {epoch}", "batches", patience=0.0) as bar:
            first = True
            for batch in batches:
                yield batch  # no statement before it: an interrupt there would lose a batch
                done += 1
                if first or bar.due:
                    stats, first = self.stats(), False
                    speed = f"{stats.rows_per_second:,.0f} rows/s, waited {100 * stats.waited_share:.0f} %"
                    left, known = length_hint(batches, -1), self.estimated_len
                    bar.update(done, done + left if left >= 0 else None if known is None else max(done, known), speed)
