"""The steps of a loader, where it is, and how many batches an epoch has."""

from __future__ import annotations

from typing import Any

from midepoch.loader.plans import EpochPlan, batches_of
from midepoch.loader.settings import LoaderSettings
from midepoch.loader.token_plan import TokenPlan, make_plan
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.length import estimated_length, known_length


class Counted(LoaderSettings):
    """The methods of a loader that count: its position, epoch and length."""

    _plan_at: tuple[Cursor, EpochPlan] | None = None
    _counts: tuple[Any, int] | None = None

    def _where(self) -> Cursor:
        """Return the cursor after the last batch delivered."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to iterate."""
        raise NotImplementedError

    def __repr__(self) -> str:
        at, spec = self._where(), self._spec
        lanes = f"{spec.lanes} lanes; " if spec.lanes > 1 else ""
        budget, sizes = self._options.budget, self._options.sizes
        size = f"batch_size={self.batch_size if sizes is None else sizes.text}"
        size = size if budget is None else f"max_tokens={budget.tokens:,}"
        epoch = at.epoch + self._is_over(at)
        return (
            f"Loader({f'{spec.rows:,} rows' if spec.has_positions else spec.node.text}; "
            f"{size}; num_workers={self._options.num_workers}; "
            f"rank {spec.shard.index} of {spec.shard.count}; {lanes}at epoch {epoch}, position {self.position:,})"
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank. Raises TypeError if it is not known before running."""
        spec = self._spec
        if self._options.steps_per_epoch:
            return self._options.steps_per_epoch
        if spec.has_positions:
            return self._batches_in_epoch()
        known = known_length(spec.node)
        if known is None or not (spec.state_is_global or spec.node.is_rows):
            raise TypeError(
                f"the number of batches is not known before the dataset has run ({spec.node.text}). Use "
                "estimated_len, which estimates it from the batches so far."
            )
        return batches_of(spec, self._options, known, self._first_step())

    def _batches_in_epoch(self) -> int:
        """Return the number of batches of this epoch. If they depend on the lengths of rows, all have to be planned."""
        spec, at, options = self._spec, self._where(), self._options
        epoch, first = at.epoch + self._is_over(at), self._first_step()
        key = (epoch if options.planning is not None else 0, first)
        if self._counts is None or self._counts[0] != key:
            self._counts = key, make_plan(spec, options, Cursor(epoch, steps=first)).share(spec.shard)
        return self._counts[1]

    def _first_step(self) -> int:
        """Return the step of the run at which the epoch began, or begins if the last one is over."""
        at, sizes = self._where(), self._options.sizes
        if self._options.schedule is not None:  # every epoch begins with the first phase
            return 0
        if sizes is None or self._is_over(at):
            return at.steps
        return sizes.step_at(max(0, sizes.before(at.steps) - at.position // self._spec.shard.count))

    @property
    def steps(self) -> int:
        """The number of steps since the run began, counted with ``steps_per_epoch`` and changing batch sizes."""
        return self._where().steps

    @property
    def estimated_len(self) -> int | None:
        """The approximate number of batches of an epoch, or None before the first batch."""
        spec, options = self._spec, self._options
        if spec.has_positions or options.steps_per_epoch:
            return len(self)
        if spec.epoch_outputs:  # they were counted
            return batches_of(spec, options, spec.epoch_outputs, self._first_step())
        length = estimated_length(spec.node, self._where(), spec.lanes)
        if length is None:
            return None
        if options.sizes is not None:
            return max(1, batches_of(spec, options, round(length), self._first_step()))
        return max(1, round(length / (options.batch_size * spec.shard.count)))

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, as far as it is known. Setting it calls ``set_epoch``.

        With ``steps_per_epoch`` it is the number of complete passes of so many steps.
        """
        at = self._where()
        if self._options.steps_per_epoch:
            return at.steps // self._options.steps_per_epoch
        return at.epoch + 1 if self._is_over(at) else at.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def position(self) -> int:
        """The number of rows of the epoch that have been delivered to all ranks together."""
        at = self._where()
        if self._is_over(at):
            return 0
        plan = self._running_plan(at) if at.planned is not None else None
        return plan.rows_before(at.position) if isinstance(plan, TokenPlan) else at.position

    def _running_plan(self, cursor: Cursor) -> EpochPlan | None:
        """Return the plan of the pass in progress, if it has a cursor, so that no window is planned twice."""
        live = self._live()
        plan = None if live is None else live.plan
        if isinstance(plan, TokenPlan) and plan.epoch == cursor.epoch and plan.begin.position <= cursor.position:
            return plan
        return self.plan(cursor)

    def _live(self) -> Any:
        """Return the pass in progress, if there is one."""
        raise NotImplementedError

    def plan(self, cursor: Cursor) -> EpochPlan | None:
        """Return the steps from a cursor on, or None if positions cannot be computed."""
        if not self._spec.has_positions:
            return None
        if self._options.planning is None:
            return make_plan(self._spec, self._options, cursor)
        if self._plan_at is None or self._plan_at[0] != cursor:  # a window of lengths is not planned twice
            self._plan_at = cursor, make_plan(self._spec, self._options, cursor)
        return self._plan_at[1]

    def _is_over(self, cursor: Cursor) -> bool:
        """Return True if nothing is left of the epoch, as far as it is known."""
        if cursor.planned is not None:
            if self._options.last_batch != "drop" or cursor.planned.start >= self._spec.rows:
                return cursor.planned.start >= self._spec.rows
            running = self._running_plan(cursor)
            if isinstance(running, TokenPlan):
                return not running.has_after(cursor.position)
        if (plan := self.plan(cursor)) is None:
            return cursor.lanes_ended
        return cursor.position > 0 and not plan.has(0)
