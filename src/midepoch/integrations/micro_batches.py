"""Micro-batches of a loader whose batch is this rank's share of a global batch, for loops that accumulate gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from midepoch.errors import CheckpointNotFoundError, MidepochError
from midepoch.integrations.states import for_all_ranks
from midepoch.loader import Loader
from midepoch.loader.options import meaningless
from midepoch.transforms.provenance import BOUNDS, DOCUMENTS

_STATE = "midepoch"
"""The key of the position in the state of a framework's dataloader."""


def rank_rows(global_batch: int, micro_batch: int, ranks: int) -> int:
    """Return the rows of a step that one rank gets. Raise ValueError if a step is not an integer number of them."""
    if global_batch < 1 or global_batch % (micro_batch * ranks):
        raise ValueError(
            f"global_batch_size must be a multiple of micro-batch × data-parallel ranks = {micro_batch} × {ranks}, "
            f"got {global_batch}. Change the micro-batch to one that divides {global_batch} / {ranks}."
        )
    return global_batch // ranks


class MicroBatch(NamedTuple):
    """A micro-batch, its number in the step, and the number of all micro-batches of the step."""

    batch: Any
    number: int
    total: int


class MicroBatches:
    """Passes over a loader in micro-batches. The position moves with the last micro-batch of a step.

    A step is one batch of the loader, so that global batches, also the last of an epoch, do not depend on the number of
    ranks or of accumulated micro-batches. A state saved in mid-step is that before the step, whose gradients are not
    part of a checkpoint either.
    """

    def __init__(self, loader: Loader, size: int, *, group: Any = None) -> None:
        if loader.options.budget is not None:
            raise meaningless("tokens, planned", "micro-batches")
        if loader.options.layout is not None:
            raise ValueError(
                "micro-batches need batches with a number of rows: omit layout, and pack sequences with Dataset.pack."
            )
        self.loader, self._size, self._group = loader, size, group
        self._before: Any = None
        """The state before the step in progress, or None if none is."""

    @property
    def per_step(self) -> int:
        """Micro-batches of a step on this rank: the maximum, if the batch size changes."""
        return self.loader.options.batch_size // self._size

    def one_pass(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a pass over the loader."""
        if self._before is not None:  # a pass that was left in mid-step
            self.loader.load_state_dict(self._before)
            self._before = None
        batches, cuts = iter(self.loader), self.per_step > 1
        before = self.loader.state_dict() if cuts else None
        for batch in batches:  # not next(): an interrupt on its return would lose the batch
            parts = cut(batch, self._size)
            for number, part in enumerate(parts):
                self._before = before if number + 1 < len(parts) else None
                yield MicroBatch(part, number, len(parts))
            before = self.loader.state_dict() if cuts else None

    def passes(self, epochs: int | None = None) -> Iterator[MicroBatch]:
        """Yield the micro-batches of all epochs before epoch ``epochs``, or of any number of them."""
        while epochs is None or self.loader.epoch < epochs:
            empty = True
            for part in self.one_pass():
                empty = False
                yield part
            if empty:
                raise MidepochError("an epoch of the data has no batch. Check that its filters keep some rows.")

    def state(self) -> Any:
        """Return the state that restores any number of ranks. All ranks of the group must call it."""
        own = self.loader.state_dict() if self._before is None else self._before
        return for_all_ranks(self.loader, own, self._group)

    def load(self, state: Any) -> None:
        """Continue from a state."""
        self.loader.load_state_dict(state)
        self._before = None


class SavedAsText:
    """Mixin for the dataloader of a framework whose checkpoints flatten nested states: it saves one string."""

    _batches: MicroBatches
    _to_begin: str
    """Advice for a checkpoint that lacks the position."""

    @property
    def loader(self) -> Loader:
        """The loader. Its batches are this rank's share of a step."""
        return self._batches.loader

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last complete step, for all ranks."""
        return {_STATE: json.dumps(self._batches.state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position, on any number of ranks."""
        if _STATE not in state_dict:
            raise CheckpointNotFoundError(
                f"the checkpoint does not contain the position in the data, only {sorted(state_dict)}: it was written "
                f"with another dataloader. {self._to_begin}"
            )
        self._batches.load(json.loads(state_dict[_STATE]))


@dataclass(frozen=True)
class CollatedParts:
    """The ``collate_fn`` of a loader that collates the rows of each micro-batch by themselves."""

    collate: Callable[[list[Any]], Any]
    size: int

    def __call__(self, rows: list[Any]) -> Collated:
        return Collated(self.collate(rows[at : at + self.size]) for at in range(0, len(rows), self.size))


class Collated(list[Any]):
    """The micro-batches of a step."""


def cut(batch: Any, size: int) -> list[Any]:
    """Return a batch as parts of ``size`` rows."""
    if isinstance(batch, Collated):
        return batch
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batches must be dicts of columns to be cut into micro-batches, got {type(batch).__name__}. Return a dict "
            "from collate_fn."
        )
    if (documents := batch.get(DOCUMENTS)) is not None:
        rest = cut({name: column for name, column in batch.items() if name != DOCUMENTS}, size)
        return [{**part, DOCUMENTS: _documents(documents, at * size, size)} for at, part in enumerate(rest)]
    lengths = {name: len(column) for name, column in batch.items()}
    rows = max(lengths.values())
    if other := {name: length for name, length in lengths.items() if length != rows}:
        raise ValueError(
            f"all columns of a batch must have a value for each of its {rows} rows to be cut into micro-batches, but "
            f"lengths are {other}. Remove these columns with select_columns."
        )
    if rows % size:
        raise ValueError(f"a batch of {rows} rows cannot be cut into micro-batches of {size}. Use last_batch='drop'.")
    return [{name: column[at : at + size] for name, column in batch.items()} for at in range(0, rows, size)]


def _documents(documents: Mapping[str, Any], first: int, size: int) -> dict[str, Any]:
    """Return the documents of some rows or packed sequences of a batch."""
    if BOUNDS not in documents:
        return {name: column[first : first + size] for name, column in documents.items()}
    bounds = documents[BOUNDS][first : first + size + 1]
    begin, end = int(bounds[0]), int(bounds[-1])
    pieces = {name: column[begin:end] for name, column in documents.items() if name != BOUNDS}
    return {**pieces, BOUNDS: bounds - begin}
