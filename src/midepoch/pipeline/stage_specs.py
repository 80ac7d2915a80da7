"""Stages of a pipeline: groups of outputs, windows, slices, batches by tokens. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from midepoch.order.budget import Budget
from midepoch.pipeline.leaf import group_of, is_one_to_one, text_of
from midepoch.transforms import Step
from midepoch.transforms.packing import PackSpec


@dataclass(frozen=True, eq=False)
class Local:
    """Steps after a stage, over groups of its outputs."""

    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        """The number of outputs in a group."""
        return group_of(self.steps) or 1

    @property
    def grouped(self) -> bool:
        """True if the result depends on which outputs are in a group."""
        return group_of(self.steps) is not None

    @property
    def keeps_rows(self) -> bool:
        """True if every output becomes exactly one, independently of others: then the stage needs no cursor."""
        return not self.grouped and all(is_one_to_one(step) and not skips(step) for step in self.steps)

    @property
    def text(self) -> str:
        return text_of(self.steps)


@dataclass(frozen=True)
class Rebatch:
    """Groups of outputs as one row each."""

    size: int
    drop_last: bool = False

    @property
    def text(self) -> str:
        return f"batch[{self.size}{' drop' * self.drop_last}]"


@dataclass(frozen=True)
class Window:
    """Outputs shuffled within windows of ``size``."""

    size: int
    seed: int

    @property
    def text(self) -> str:
        return f"shuffle[{self.size} seed={self.seed}]"


@dataclass(frozen=True)
class Slice:
    """Outputs number ``start`` to ``stop`` of every epoch, or to its end if ``stop`` is None: take or skip."""

    start: int = 0
    stop: int | None = None

    def count_of(self, outputs: float | None) -> int:
        """Return the number of outputs left of ``outputs``, or of an unlimited number if that is None."""
        if outputs is None or (self.stop is not None and self.stop < outputs):
            assert self.stop is not None
            outputs = self.stop
        return max(0, round(outputs) - self.start)

    @property
    def text(self) -> str:
        return f"skip[{self.start}]" if self.stop is None else f"take[{self.stop}]"


HIDDEN = "__midepoch_length__"
"""The column with the result of a function of the user that counts tokens. It is removed with the stage."""


DELIVERED_BITS = 24
"""Bits of the number of delivered batches of a window, in its cursor. A checksum is above them."""


@dataclass(frozen=True)
class Buckets:
    """Batches by a budget of tokens, of the outputs in a window. Only a loader adds it, as the last stage.

    ``column``: its lengths count, or its numbers if they are ``given``.
    ``shuffled``: batches of a window are shuffled, else the longest rows come first.
    """

    budget: Budget
    column: str
    given: bool = False
    shuffled: bool = True

    @property
    def size(self) -> int:
        """The number of outputs in a group."""
        return self.budget.window

    @property
    def text(self) -> str:
        return ""  # the budget may change between windows: a state has it beside the cursor


StageSpec = Local | Rebatch | Window | Slice | PackSpec | Buckets


def skips(step: Step) -> bool:
    """Return True if a step drops rows on which it fails."""
    return getattr(step, "on_error", "raise") == "skip"
