"""Batches of lanes, if positions cannot be computed. Ranks agree on the number of steps."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any
from zlib import crc32

from midepoch._internal.progress import Timings
from midepoch.distributed import keyvalue
from midepoch.errors import MidepochError, WorldError
from midepoch.loader.collation import Presenter
from midepoch.loader.options import Options
from midepoch.loader.plans import MadeBatch, PhaseSizes
from midepoch.order import Shard
from midepoch.pipeline.chunk import Bunches, Items
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Lanes, StepOutputs
from midepoch.pipeline.plans import StepPlan
from midepoch.pipeline.rows import Bundles, BundlesHere
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.format import OF_ONE_RANK

_made, _loaders = keyvalue.Counters(), keyvalue.Counters()
_log = logging.getLogger("midepoch")

_SHIFT = 8
"""Number of loaders that one rank may have created more than another."""


def check_equal_steps(plan: StepPlan, options: Options, shard: Shard) -> None:
    """Raise WorldError, on all ranks before any step, if a rank would have no batch and ``last_batch`` is None."""
    if options.last_batch is not None or not (left_out := plan.left_out(shard.count)):
        return
    rows = shard.count - left_out
    raise WorldError(
        f"the last step of epoch {plan.epoch} has {rows} row{'s' * (rows != 1)} left for {shard.count} ranks: those "
        "without a batch would take one step less, and the others would wait for them. Choose the last batch: "
        'loader(…, last_batch="drop") omits the last global batch if it is not full, last_batch="pad" fills it with '
        'marked rows, last_batch="uneven" is for loops in which no rank waits for another.'
    )


class RankConsistencyCheck:
    """Comparison of this rank's n-th loader with the n-th loader of the other ranks.

    No rank waits: the first one publishes a description of its loader, and the others compare theirs. If one rank
    creates more loaders than another, the numbers are shifted: a difference is not an error if one of the two ranks has
    created both loaders. ``group``: name of the processes that train together, empty if all processes do.
    """

    def __init__(self, shard: Shard, identity: Mapping[str, Any], options: Options, group: str = "") -> None:
        self._group, self._options, self._rank = group, options, keyvalue.process_rank(shard.index)
        self._number = _made.next(group)
        # Loaders created before the ranks were connected are counted separately.
        self.name = f"{group}/{'' if keyvalue.connected() else 'early '}{self._number}"
        self._made_as = _digest(_comparable(identity, options))
        keyvalue.publish(f"made/{self._group}/{self._rank}/{self._number}", self._made_as)
        self._refused_before = keyvalue.refusal(group)[0]
        self._loads = self._passes = self._agreements = 0
        self._begun, self._since = False, ""  # the load after which passes are counted, if one had begun before it

    def loaded(self) -> None:
        """Note that a state was loaded. In the middle of a run, passes are counted from here on.

        Until then, the ranks may have counted differently: one had no batch of a pass, another one and left it.
        """
        self.edited()
        if self._begun:
            self._since, self._passes = f"{self._loads}/", 0

    def edited(self) -> None:
        """Note that weights were set or steps excluded: what is compared may have changed."""
        self._loads += 1

    def next_name(self) -> str:
        """Return a name for the next value that this loader and its counterparts agree on."""
        self._agreements += 1
        return f"{self.name}/{self._agreements}"

    def compare(self, spec: PipelineSpec, start: Cursor, *, first: bool) -> None:
        """Compare what this rank loads and, after the first batch of a pass, also where the pass began."""
        identity = spec.identity
        if spec.excluded:
            identity = {**identity, "excluded rows": crc32(json.dumps(spec.excluded_texts).encode())}
        if spec.unit == "rows" and start.has_done:
            identity = {**identity, "excluded positions": crc32(start.lane.done.encode().encode())}
        if first:
            self.check_identity(identity)
            return
        place = {"epoch": start.epoch}
        # The same on all ranks, unless one of them has nothing left. After an edit, each knows only its own lanes.
        is_common = spec.unit == "rows" or len(start.lanes) in (0, spec.lanes)
        if is_common and not any(lane.ended for lane in start.lanes.values()):
            place["position"] = start.position
        self.check_pass(identity, place)

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise WorldError, at the first step, if the first rank to arrive loads different data."""
        self._begun = True
        self._check(f"loader/{self.name}/{self._loads}", _comparable(identity, self._options))

    def check_pass(self, identity: Mapping[str, Any], place: Mapping[str, int]) -> None:
        """Raise WorldError if the first rank to arrive is elsewhere (``epoch``, and ``position`` if known).

        The n-th pass of more than one batch is compared with the n-th of the others. A pass of one batch, a look that
        possibly only one rank takes, does not count.
        """
        self._check(
            f"pass/{self.name}/{self._since}{self._passes + 1}", {**_comparable(identity, self._options), **place}
        )
        self._passes += 1

    def _check(self, key: str, description: dict[str, Any]) -> None:
        try:
            self.check_refusal()
            published = keyvalue.first_value(key, json.dumps([self._rank, self._made_as, description]))
            if published is None:
                return
            rank, made_as, received = json.loads(published)
            difference = keyvalue.differences({rank: received, self._rank: description})
            if not difference or self._is_shifted(rank, made_as):
                return
        except RuntimeError as problem:
            _log.debug("ranks cannot be compared: %s", problem)  # the process that keeps the store may have exited
            return
        text = (
            f"the ranks do not load the same data: {difference}, in loader number {self._number} of each rank. Create "
            "the same datasets and loaders in the same order on all ranks, begin as many passes on each, and load the "
            "same state (saved by any rank). Create a loader for one rank only with rank=0, world_size=1."
        )
        keyvalue.refuse(self._group, text)
        raise WorldError(text)

    def check_refusal(self) -> None:
        """Raise WorldError if another rank has refused to continue since this loader was created."""
        token, reason = keyvalue.refusal(self._group)
        if token and token != self._refused_before:
            raise WorldError(reason)

    def _is_shifted(self, rank: int, made_as: str) -> bool:
        """Return True if one of the two ranks has created both loaders: then their numbers are shifted."""
        if made_as == self._made_as:
            return False
        return made_as in self._all_made(self._rank) or self._made_as in self._all_made(rank)

    def _all_made(self, rank: int) -> set[str | None]:
        """Return the loaders that a rank has created with a number close to this one."""
        numbers = range(max(1, self._number - _SHIFT), self._number + _SHIFT + 1)
        return {keyvalue.get(f"made/{self._group}/{rank}/{number}") for number in numbers}


def _comparable(identity: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return the fields that must be equal on all ranks."""
    shared = {name: value for name, value in identity.items() if name not in OF_ONE_RANK}
    sizes = {} if options.sizes is None else {"batch sizes": options.sizes.text}
    budget = {} if options.budget is None else {"batches": options.budget.text}
    return {**shared, "last_batch": options.last_batch, "batch size": options.batch_size, **sizes, **budget}


def _digest(comparable: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(comparable, sort_keys=True).encode(), digest_size=12).hexdigest()


class EqualSteps:
    """Agreement on the number of next steps for which every rank has a batch, for ranks with lanes of their own.

    Ranks wait for each other here, but only once in up to 32 steps. ``check`` raises if a rank has refused to continue.
    """

    _MOST = 32

    def __init__(self, shard: Shard, description: Mapping[str, Any], group: str, check: Callable[[], None]) -> None:
        self._shard, self._description, self._group = shard, description, group
        self._check, self._name = check, ""
        self._passes = self._rounds = self.ahead = 0
        self._published = ""

    def begin(self) -> None:
        """Begin a pass, as all other ranks do."""
        if not self._name:
            key = f"{self._group}/{self._shard.count}/{_digest(self._description)}"
            self._name = f"{key}/{_loaders.next(key)}"
        self._passes, self._rounds, self.ahead = self._passes + 1, 0, 1

    def agree(self, steps: int) -> list[int]:
        """Return the number of the next ``ahead`` steps that each rank has; this rank has ``steps``.

        Raise WorldError if a rank does not arrive.
        """
        self._rounds, self.ahead = self._rounds + 1, min(2 * self.ahead, self._MOST)
        shard = self._shard
        key = f"steps/{self._name}/{self._passes}/{self._rounds}"
        waits = keyvalue.Waits(self._group, shard.index, shard.count, dict(self._description), self._check)
        values = keyvalue.all_values(key, str(steps), waits)
        if self._published:  # every rank that has published the new value has received the previous one
            keyvalue.delete(f"{self._published}/{shard.index}")
        self._published = key
        return [int(value) for value in values]


class LaneSteps:
    """The steps of one rank. A step is ``PADDING`` if other ranks have outputs left and this one has not."""

    PADDING = object()

    def __init__(self, lanes: Lanes, options: Options, equal: EqualSteps | None, first_step: int = 0) -> None:
        self._lanes, self._size, self._last_batch = lanes, options.batch_size, options.last_batch
        self._sizes, self._step = options.sizes, first_step
        self._phases = None if options.schedule is None else PhaseSizes(options.schedule, lanes)
        self._equal = equal
        self._ready: deque[StepOutputs] = deque()
        self._left, self._over = 0, False
        self._failure: Exception | None = None
        if equal is not None:
            equal.begin()

    @property
    def number(self) -> int:
        """The number of steps so far, in the run."""
        return self._step

    def next(self) -> Any:
        """Return the next outputs, or PADDING, or None at the end."""
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

    def _take(self) -> StepOutputs | None:
        if self._lanes.done is not None:
            self._lanes.skip_done()
        size, left = self._size if self._sizes is None else self._sizes.at(self._step), None
        if self._phases is not None:
            size, left = self._phases.next()
        full = size * self._lanes.share.shard.count  # outputs of a step, of all ranks that share the lanes
        full = full if left is None else min(full, left)
        outputs = self._lanes.take(size, left)
        while outputs is not None and self._lanes.spares and not outputs.row_count:  # all of its rows are excluded
            outputs = self._lanes.take(size, left)
        if outputs is None or (self._last_batch == "drop" and outputs.total < full):
            return None
        self._step += 1
        outputs.steps = self._step
        return outputs

    def _agree(self, equal: EqualSteps) -> None:
        """Look ahead, and agree. An error ahead is raised in its turn, after the good steps before it."""
        ahead = equal.ahead
        try:
            while len(self._ready) < ahead and (deal := self._take()) is not None:
                self._ready.append(deal)
        except Exception as problem:
            if not self._ready:
                raise
            self._failure = problem
        counts = equal.agree(len(self._ready) if self._failure is None else ahead)
        self._left = min(counts) if self._last_batch == "drop" else max(counts)
        self._over = self._left < ahead
        while self._over and len(self._ready) > self._left:
            self._ready.pop()


class LaneBatches:
    """The batches of a rank, made of the outputs of its lanes."""

    def __init__(
        self,
        spec: PipelineSpec,
        options: Options,
        bundles: Callable[[], Bundles],
        cursor: Cursor,
        equal: EqualSteps | None,
        timings: Timings,
    ) -> None:
        self._spec, self._options, self._bundles, self._epoch = spec, options, bundles, cursor.epoch
        self._presenter = Presenter(spec, options)
        self._mine = bundles()
        self._lanes = spec.open(spec.shard, self._mine, cursor, traced=bool(options.provenance))
        self._delivered_steps = cursor.steps
        self._steps = LaneSteps(self._lanes, options, equal, cursor.steps)
        self._timings, self._skipped, self._counted = timings, self._count_skipped(), (0, 0)
        here = isinstance(self._mine, BundlesHere) or not any(leaf.tail or leaf.can_skip for leaf in spec.leaves)
        self._measures = here and equal is None  # else workers or other ranks are waited for
        self._last: Items | None = None
        self.begun = False
        """True if a step was taken, by this rank or by others that share its lanes."""

    @property
    def packed(self) -> tuple[int, int]:
        """Tokens packed so far, and the token slots of their sequences."""
        return self._lanes.packing.tokens, self._lanes.packing.places

    @property
    def end(self) -> Cursor:
        """The cursor at the end of the epoch. Outputs that are left in the lanes are omitted."""
        return self._lanes.cursor().at_end()._replace(steps=self._delivered_steps)

    def next(self) -> MadeBatch | None:
        """Return the next batch and the cursor after it, or None at the end."""
        while (deal := self._measured_step() if self._measures else self._steps.next()) is not None:
            self.begun = True
            self._delivered_steps = self._delivered_steps + 1 if deal is LaneSteps.PADDING else deal.steps
            began = perf_counter()
            if deal is LaneSteps.PADDING:
                # This rank has reached its end, and others have not.
                value, traced = self._presenter.padding(self._something(), self._epoch)
                return MadeBatch(value, self.end, traced=traced)
            rows = deal.items.row_count if isinstance(deal.items, Bunches) else len(deal.items)
            if rows:
                self._last = deal.items
                value, traced = self._presenter.batch(deal.items, self._epoch)
            elif self._options.last_batch == "pad":
                value, traced = self._presenter.padding(deal.some, self._epoch)
            else:
                continue  # all of it is for other ranks
            self._timings.present += perf_counter() - began
            if self.packed != self._counted:
                self._count_packed()
            before, self._skipped = self._skipped, self._count_skipped()
            return MadeBatch(value, deal, rows, self._skipped - before, traced=traced)
        return None

    def _measured_step(self) -> Any:
        """Return the next step. What it took besides reading and functions was mixing, packing and grouping."""
        timings, began = self._timings, perf_counter()
        before = timings.read + timings.functions
        deal = self._steps.next()
        timings.combine += max(0.0, perf_counter() - began - (timings.read + timings.functions - before))
        return deal

    def close(self) -> bool:
        """Leave the workers to their pool."""
        return True

    def _count_packed(self) -> None:
        (tokens, places), (before, places_before) = self.packed, self._counted
        self._timings.packed += tokens - before
        self._timings.places += places - places_before
        self._counted = tokens, places

    def _count_skipped(self) -> int:
        return self._mine.skipped + self._lanes.packing.skipped

    def _something(self) -> Items:
        """Return some outputs to pad with.

        They are the last outputs of this rank; after a resume the first of the epoch; or, if its lanes have none, the
        first of another rank, which has one, else there would be no step.
        """
        if self._last is None:
            beginning = Cursor(self._epoch)
            deal = self._first(self._spec.shard, beginning) or self._first(Shard(), beginning)
            if deal is None:
                raise MidepochError('there are no rows to pad with. Use last_batch="drop".')
            self._last = deal.some
        return self._last

    def _first(self, process: Shard, beginning: Cursor) -> StepOutputs | None:
        traced = bool(self._options.provenance)
        return self._spec.open(process, self._bundles(), beginning, traced=traced).take(1)
