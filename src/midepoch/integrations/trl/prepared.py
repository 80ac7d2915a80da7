"""TRL's ``SFTTrainer`` and ``DPOTrainer``: TRL's own preparation of rows, computed when they are delivered.

TRL formats, tokenizes, masks and truncates a dataset before training, by ``map`` and ``filter``. Here the same
functions become steps of the pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import datasets
import numpy as np
from trl import DPOTrainer, SFTTrainer

from midepoch.dataset import Dataset
from midepoch.integrations.transformers import ResumableTraining, _check_arguments
from midepoch.loader import Loader


class ResumablePreparation(ResumableTraining):
    """Mixin for a trainer of TRL that prepares its dataset: ``class Mine(ResumablePreparation, RewardTrainer)``.

    Rows that TRL drops, because ``max_length`` cuts off all that would be trained on, are skipped: they are counted in
    ``loader.skipped``, and their batch is smaller. So the number of steps is known without reading the data.
    """

    _ours: Dataset | None = None
    train_dataset: Any

    def __init__(self, *rest: Any, train_dataset: Any = None, **named: Any) -> None:
        if not isinstance(train_dataset, (Dataset, Loader)):
            super().__init__(*rest, train_dataset=train_dataset, **named)
            return
        if isinstance(train_dataset, Loader):
            raise TypeError(
                "train_dataset must be a Dataset, got a loader. Pass options of the loader as loader_options, such as "
                "{'last_batch': 'pad'}."
            )
        self._ours = train_dataset
        # TRL accepts only datasets of Hugging Face. It looks at the first row, and prepares the others.
        self._accepted = datasets.Dataset.from_list([_first_row(train_dataset)])
        super().__init__(*rest, train_dataset=self._accepted, **named)
        if self.train_dataset is self._accepted:  # rows that are not prepared: images
            self.train_dataset = train_dataset
            _check_arguments(self.args)  # type: ignore[attr-defined]

    def _given(self, dataset: Any) -> Any:
        """Return the dataset that the user passed, given the one that TRL accepted in its place."""
        return self._ours if self._ours is not None and dataset is self._accepted else dataset

    def _prepare_dataset(self, dataset: Any, *rest: Any, **named: Any) -> Any:
        ours = self._given(dataset)
        if not isinstance(ours, Dataset):
            return super()._prepare_dataset(dataset, *rest, **named)  # type: ignore[misc]
        return super()._prepare_dataset(Prepared(ours), *rest, **named).data  # type: ignore[misc]

    def _precompute_ref_logps(self, dataset: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(dataset, Dataset):
            raise ValueError(
                "precompute_ref_log_probs=True reads all rows before training, but midepoch reads each row when it is "
                "trained on. Omit it: the reference model then runs in each step."
            )
        return super()._precompute_ref_logps(dataset, *rest, **named)  # type: ignore[misc]


class PackedPreparation(ResumablePreparation):
    """Preparation that may pack rows, with the strategies of TRL."""

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, *rest: Any, **named: Any
    ) -> Any:
        ours = self._given(dataset)
        if not (packing and isinstance(ours, Dataset)):
            return super()._prepare_dataset(dataset, processing_class, args, packing, *rest, **named)
        if args.max_length is None:
            raise ValueError("packing=True needs max_length, the length of the sequences.")
        if ours is self._ours:  # what is packed cannot be shuffled as a whole any more
            self.args = args  # as the Trainer will set it
            ours = self._ordered(ours, None)
        unpacked = copy.copy(args)
        unpacked.max_length, unpacked.shuffle_dataset = None, False
        prepared = super()._prepare_dataset(ours, processing_class, unpacked, False, *rest, **named)
        prepared = prepared.select_columns(["input_ids", "labels"])
        if args.packing_strategy == "bfd":  # the other strategies split what is longer
            prepared = prepared.map(_truncated, fn_kwargs={"length": args.max_length})
        strategy = "concat" if args.packing_strategy == "wrapped" else "best_fit"
        packed = prepared.pack(args.max_length, strategy=strategy, extra={"labels": -100})
        removed = ["segment_ids", "position_ids"]
        return packed.map(_unpadded, fn_kwargs={"lengths": strategy == "best_fit"}, remove_columns=removed)


class ResumableSFTTrainer(PackedPreparation, SFTTrainer):  # type: ignore[misc]
    """``SFTTrainer`` whose data resumes exactly where a checkpoint was saved, on any number of ranks."""


class ResumableDPOTrainer(ResumablePreparation, DPOTrainer):  # type: ignore[misc]
    """``DPOTrainer`` whose data resumes exactly where a checkpoint was saved, on any number of ranks."""


class Prepared:
    """A dataset with the methods of ``datasets`` that TRL prepares it with."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    @property
    def column_names(self) -> list[str]:
        return self.data.column_names

    def __iter__(self) -> Iterator[Any]:
        return iter(type(self.data)(self.data.pipeline))

    def map(
        self,
        function: Callable[..., Any],
        *,
        batched: bool = False,
        fn_kwargs: Mapping[str, Any] | None = None,
        remove_columns: Any = None,
    ) -> Prepared:
        return Prepared(self.data.map(function, batched, fn_kwargs=fn_kwargs, remove_columns=remove_columns))

    def filter(self, function: Callable[..., Any], *, fn_kwargs: Mapping[str, Any] | None = None) -> Prepared:
        return Prepared(self.data.map(_Kept(function), fn_kwargs=fn_kwargs, on_error="skip"))

    def select_columns(self, column_names: Any) -> Prepared:
        return Prepared(self.data.select_columns(column_names))

    def shuffle(self, seed: int) -> Prepared:
        return Prepared(self.data.shuffle(seed=seed))


class DroppedRowError(ValueError):
    """A row that TRL does not train on."""


class _Kept:
    """Map that raises for rows that a filter drops. Positions stay: the row is skipped, its batch is smaller."""

    __name__ = "rows with tokens to train on"

    def __init__(self, condition: Callable[..., Any]) -> None:
        self._condition = condition

    def __call__(self, row: dict[str, Any], **named: Any) -> dict[str, Any]:
        if not self._condition(row, **named):
            raise DroppedRowError("TRL drops this row: within max_length it has nothing to train on.")
        return {}


def _first_row(data: Dataset) -> Any:
    for row in type(data)(data.pipeline):
        return row
    raise ValueError("train_dataset has no rows.")


def _truncated(row: dict[str, Any], length: int) -> dict[str, Any]:
    return {name: row[name][:length] for name in ("input_ids", "labels")}


def _unpadded(row: dict[str, Any], lengths: bool) -> dict[str, Any]:
    """Return a packed row as TRL packs it: without padding, and with the lengths of its documents."""
    documents = np.asarray(row["segment_ids"])
    size = int((documents > 0).sum())
    result = {name: row[name][:size] for name in ("input_ids", "labels")}
    return {**result, "seq_lengths": np.bincount(documents[:size])[1:].tolist()} if lengths else result
