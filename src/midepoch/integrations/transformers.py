"""Hugging Face ``Trainer`` that goes on exactly, and reads nothing to skip it. Needs ``midepoch[transformers]``.

trainer = ResumableTrainer(model, args, train_dataset=midepoch.load_dataset(…).shuffle(seed=42).map(tokenize))
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from midepoch.dataset import Dataset
from midepoch.errors import CheckpointDamagedError
from midepoch.integrations.passes import rest_or_next
from midepoch.integrations.states import check_same_steps, for_all_ranks, read_state, write_state
from midepoch.loader import Loader

STATE_FILE = "midepoch.json"
"""In every ``checkpoint-N``: where in the data it was saved."""


class ResumableTraining:
    """What makes a Trainer resume exactly, to be mixed into one: ``class Mine(ResumableTraining, SFTTrainer)``.

    Of a Dataset as ``train_dataset`` a loader is made as ``TrainingArguments`` say, and ``loader_options``,
    for what they have no words for: ``{"ends": "pad", "audit": "runs/7"}``. Other datasets are left to the Trainer,
    and so is evaluation.
    """

    _checkpoint: str | None = None  # that the run goes on from
    _before: tuple[int, Any] | None = None  # global step and state when batches were taken last

    def __init__(self, *rest: Any, loader_options: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._options = dict(loader_options or {})
        super().__init__(*rest, **named)
        if isinstance(self.train_dataset, Loader):  # type: ignore[attr-defined]
            raise TypeError(
                "train_dataset must be a Dataset, not a loader: give what is special about the "
                "loader as loader_options, {'ends': 'pad'} for one."
            )

    def train(
        self: Any, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *rest: Any, **named: Any
    ) -> Any:
        if resume_from_checkpoint is True:  # None where there is none: the Trainer says so itself
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._before = None
        self._checkpoint = None if isinstance(resume_from_checkpoint, bool | None) else str(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *rest, **named)  # type: ignore[misc]

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        if not isinstance(self.train_dataset, Dataset):
            return super().get_train_dataloader()  # type: ignore[misc]
        loader = self._make_loader(self.train_dataset)
        if self._checkpoint is not None:
            if self.args.ignore_data_skip:
                raise ValueError(
                    "ignore_data_skip=True makes the Trainer count the epoch from its beginning. Leave it out: nothing "
                    "is skipped by reading here, the data goes on at the very next row."
                )
            self._go_on(loader, Path(self._checkpoint, STATE_FILE))
        # A DataLoader that does nothing: the Trainer, and skip_first_batches, know how to take one apart.
        # Its seed is drawn from a generator of its own, lest the model's dropout depend on where a run was resumed.
        batches, own = _Batches(loader, self._to_be_skipped), torch.Generator()
        return DataLoader(batches, batch_size=None, collate_fn=_as_it_is, generator=own)

    def _make_loader(self: Any, data: Dataset) -> Loader:
        args = self.args
        options = {
            "num_workers": args.dataloader_num_workers,
            "drop_last": args.dataloader_drop_last,
            "collate_fn": self._get_collator_with_removed_columns(self.data_collator, description="training"),
            "prefetch": args.dataloader_prefetch_factor,
            "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
            "persistent_workers": args.dataloader_persistent_workers,
        }
        data_ranks = self.get_total_train_batch_size(args) // (
            self._train_batch_size * args.gradient_accumulation_steps
        )
        if data_ranks != args.world_size and "data_parallel" not in self._options:
            # Tensor and context parallelism: neighbours see the same rows.
            options |= {"rank": args.process_index // (args.world_size // data_ranks), "world_size": data_ranks}
        return data.loader(self._train_batch_size, **{**options, **self._options})

    def _go_on(self: Any, loader: Loader, path: Path) -> None:
        saved = read_state(path)
        if not isinstance(saved, dict) or not saved.keys() >= {"data", "total_batch"}:
            raise CheckpointDamagedError(f"{path} is not what was written there.")
        if _length(loader) is not None:
            check_same_steps(saved["total_batch"], self.get_total_train_batch_size(self.args), "the Trainer")
        loader.load_state_dict(saved["data"])

    def num_examples(self: Any, dataloader: Any) -> int:
        found = getattr(dataloader, "dataset", None)
        return found.rows if isinstance(found, _Batches) else super().num_examples(dataloader)  # type: ignore[misc]

    def _to_be_skipped(self: Any, loader: Loader) -> int:
        """How many batches the Trainer, which counts steps, is going to throw away when a run goes on."""
        if self._checkpoint is None:
            return 0
        accumulated = self.args.gradient_accumulation_steps
        length = _length(loader)
        # Of a stream of unknown length: to the Trainer, an epoch is all of the run.
        steps = self.args.max_steps if length is None else max(1, math.ceil(length / accumulated))
        return int(self.state.global_step % steps * accumulated)

    def _trained_with(self: Any) -> Loader | None:
        """The loader of the run that is under way. (Others are made where somebody wants a look at a batch.)"""
        found = getattr(self.callback_handler.train_dataloader, "dataset", None)
        return found.loader if isinstance(found, _Batches) else None

    def get_batch_samples(self: Any, *rest: Any, **named: Any) -> Any:
        if (loader := self._trained_with()) is not None:
            self._before = self.state.global_step, loader.state_dict()
        return super().get_batch_samples(*rest, **named)  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any, *rest: Any, **named: Any) -> None:
        if (loader := self._trained_with()) is not None:
            step, state = self._before or (None, None)
            if step != self.state.global_step:  # the step whose batches were taken last has been made
                state = loader.state_dict()
            state = for_all_ranks(loader, state)
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            if self.args.should_save:  # before all else: what has the Trainer's state, which is written last, has this
                total = self.get_total_train_batch_size(self.args)
                write_state(folder / STATE_FILE, {"data": state, "total_batch": total})
        super()._save_checkpoint(model, trial, *rest, **named)  # type: ignore[misc]


class ResumableTrainer(ResumableTraining, Trainer):  # type: ignore[misc]
    """``Trainer`` whose data goes on exactly where a checkpoint was saved."""


class _Batches(IterableDataset[Any]):  # type: ignore[misc]
    """The batches of a loader, behind as many of nothing as the Trainer throws away before it goes on.

    It counts steps by what it takes from the loader, so these keep its count right; making them costs nothing.
    """

    def __init__(self, loader: Loader, to_be_skipped: Callable[[Loader], int]) -> None:
        self.loader, self._to_be_skipped = loader, to_be_skipped
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        skipped = 0 if self._begun else self._to_be_skipped(self.loader)
        self._begun = True
        yield from repeat(None, skipped)
        yield from rest_or_next(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def rows(self) -> int:
        """Of an epoch, on all ranks; of a stream, at most."""
        loader = self.loader
        if loader.pipeline.has_positions:
            return loader.pipeline.rows
        return len(loader) * loader.options.batch_size * loader.cut.count


def _length(loader: Loader) -> int | None:
    """Batches of an epoch, if that is known."""
    try:
        return len(loader)
    except TypeError:
        return None


def _as_it_is(batch: Any) -> Any:
    return batch
