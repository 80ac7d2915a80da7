"""Hugging Face ``Trainer`` that resumes exactly, without reading data to skip it. Needs ``midepoch[transformers]``.

trainer = ResumableTrainer(model, args, train_dataset=midepoch.load_dataset(…).map(tokenize))
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from midepoch.dataset import Dataset
from midepoch.errors import CheckpointDamagedError
from midepoch.integrations.states import (
    check_equal_epochs,
    check_same_steps,
    for_all_ranks,
    length_of,
    read_state,
    rest_or_next,
    write_state,
)
from midepoch.loader import Loader

STATE_FILE = "midepoch.json"
"""File in every ``checkpoint-N`` with the position in the data."""

_log = logging.getLogger("midepoch")


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Return the last complete ``checkpoint-N`` in the output folder of a Trainer, or None if there is none.

    A save that was killed leaves an incomplete one, without the Trainer's state, which is written last.
    """
    found = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if number.isdecimal() and path.is_dir():
            found[int(number)] = path
    for _, path in sorted(found.items(), reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_bytes())
            return str(path)
        except (OSError, ValueError):
            _log.warning("%s is incomplete: its save was interrupted. The checkpoint before it is used.", path)
    return None


class ResumableTraining:
    """Mixin that makes a Trainer resume exactly: ``class Mine(ResumableTraining, SFTTrainer)``.

    For a Dataset as ``train_dataset``, it creates a loader from the ``TrainingArguments``, and from
    ``loader_options`` for options that they lack: ``{"last_batch": "pad", "audit": "runs/7"}``. Other datasets and
    evaluation are left to the Trainer.

    A dataset that is not shuffled is shuffled by ``data_seed``, or else ``seed``, as the Trainer does. It stays in
    order with ``train_sampling_strategy="sequential"``. A resume keeps the order of the checkpoint.
    """

    _checkpoint: str | None = None  # from which the run resumes
    _before: tuple[int, Any] | None = None  # global step and state before the last batches were taken
    _logged: frozenset[str] = frozenset()

    def __init__(self, *rest: Any, loader_options: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._options = dict(loader_options or {})
        super().__init__(*rest, **named)
        refuse_loader(self.train_dataset)  # type: ignore[attr-defined]
        refuse_loader(getattr(self, "eval_dataset", None), "eval_dataset")
        if isinstance(self.train_dataset, Dataset):  # type: ignore[attr-defined]
            _check_arguments(self.args)  # type: ignore[attr-defined]

    def train(
        self: Any, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *rest: Any, **named: Any
    ) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:  # so that one program is for the first start and for all others
                self._tell(logging.WARNING, f"no checkpoint in {self.args.output_dir} yet: the run begins at step 0.")
        self._before = None
        self._checkpoint = None if isinstance(resume_from_checkpoint, bool | None) else str(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *rest, **named)  # type: ignore[misc]

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        if not isinstance(self.train_dataset, Dataset):
            return super().get_train_dataloader()  # type: ignore[misc]
        saved = None if self._checkpoint is None else self._saved(Path(self._checkpoint, STATE_FILE))
        loader = self._make_loader(self._ordered(self.train_dataset, saved))
        if saved is not None:
            if self._length(loader) is not None:
                check_same_steps(saved["total_batch"], self.get_total_train_batch_size(self.args), "the Trainer")
            loader.load_state_dict(saved["data"])
        return _Batches(loader, self._to_be_skipped).as_dataloader()

    def _make_loader(self: Any, data: Dataset) -> Loader:
        args = self.args
        options = {
            "num_workers": args.dataloader_num_workers,
            "drop_last": args.dataloader_drop_last,
            "collate_fn": self._get_collator_with_removed_columns(self.data_collator, description="training"),
            "prefetch": args.dataloader_prefetch_factor,
            "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        }
        data_ranks = self.get_total_train_batch_size(args) // (
            self._train_batch_size * args.gradient_accumulation_steps
        )
        if data_ranks != args.world_size and "data_parallel" not in self._options:
            # Tensor and context parallelism: neighbouring ranks get the same rows.
            options |= {"rank": args.process_index // (args.world_size // data_ranks), "world_size": data_ranks}
        chosen = {**options, **self._options}
        rows = chosen.pop("batch_size", None if chosen.get("max_tokens") is not None else self._train_batch_size)
        loader = data.loader(rows, **chosen)
        if args.max_steps <= 0:
            check_equal_epochs(loader, "the Trainer", "or TrainingArguments(max_steps=…)")
        return loader

    def _ordered(self: Any, data: Dataset, saved: dict[str, Any] | None) -> Dataset:
        """Return the data in the order of the run: its own, that of a checkpoint, or shuffled by the Trainer's seed."""
        node = data.pipeline.node
        shuffled = node.stages_shuffle or all(leaf.order.shuffle is not None for leaf in node.leaves)
        if shuffled or data.position or _strategy(self.args) == "sequential":
            return data  # also if a state was loaded, which has an order
        if data.pipeline.numbered is None:
            self._tell(
                logging.WARNING,
                "the training data is not shuffled, and a stream (after filter, pack, mix and similar steps) cannot be "
                "shuffled as a whole. Call shuffle(seed=…) before those steps. If the order is intended, use "
                "TrainingArguments(train_sampling_strategy='sequential').",
            )
            return data
        if saved is not None:
            state = saved["data"][0] if isinstance(saved["data"], list) else saved["data"]
            if isinstance(state, dict) and state.get("scope") == "none":
                self._tell(logging.INFO, "the checkpoint was saved with data in order: the run continues in order.")
                return data
            seed = state.get("seed") if isinstance(state, dict) else None
        else:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            self._tell(
                logging.INFO,
                f"the training data is shuffled with seed {seed}, as by the Trainer. Call shuffle(…) on the dataset "
                "for another order, or use TrainingArguments(train_sampling_strategy='sequential') for none.",
            )
        return data.shuffle(seed=seed)

    def _tell(self: Any, level: int, message: str) -> None:
        """Log a message once, and on one rank."""
        if message not in self._logged and self.args.process_index == 0:
            _log.log(level, message)
        self._logged |= {message}

    def _saved(self: Any, path: Path) -> dict[str, Any]:
        """Return the contents of the state file of a checkpoint."""
        if self.args.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip=True makes the Trainer count the epoch from its beginning. Leave it out: no data is "
                "read to skip it, and the data resumes at the next row."
            )
        saved = read_state(path)
        if not isinstance(saved, dict) or not saved.keys() >= {"data", "total_batch"}:
            raise CheckpointDamagedError(f"{path} is not a state of midepoch: it is damaged. Use another checkpoint.")
        return saved

    def num_examples(self: Any, dataloader: Any) -> int:
        found = getattr(dataloader, "dataset", None)
        return found.rows if isinstance(found, _Batches) else super().num_examples(dataloader)  # type: ignore[misc]

    def _to_be_skipped(self: Any, loader: Loader) -> int:
        """Return the number of batches that the Trainer, which counts steps, discards when a run resumes."""
        if self._checkpoint is None:
            return 0
        accumulated, length = self.args.gradient_accumulation_steps, self._length(loader)
        # For data of unknown length the Trainer treats the complete run as one epoch.
        steps = self.args.max_steps if length is None else max(1, math.ceil(length / accumulated))
        return int(self.state.global_step % steps * accumulated)

    def _length(self, loader: Loader) -> int | None:
        """Return the batches of an epoch, or None if the number is unknown."""
        return length_of(loader)

    def _trained_with(self: Any) -> Loader | None:
        """Return the loader of the current run. (Others are created to look at a batch.)"""
        found = getattr(self.callback_handler.train_dataloader, "dataset", None)
        return found.loader if isinstance(found, _Batches) else None

    def get_batch_samples(self: Any, *rest: Any, **named: Any) -> Any:
        if (loader := self._trained_with()) is not None:
            self._before = self.state.global_step, loader.state_dict()
        return super().get_batch_samples(*rest, **named)  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any, *rest: Any, **named: Any) -> None:
        if (loader := self._trained_with()) is not None:
            step, state = self._before or (None, None)
            if step != self.state.global_step:  # the step with the last batches is complete
                state = loader.state_dict()
            state = for_all_ranks(loader, state)
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            if self.args.should_save:  # first: a checkpoint with the Trainer's state, which is written last, has this
                total = self.get_total_train_batch_size(self.args)
                write_state(folder / STATE_FILE, {"data": state, "total_batch": total})
        super()._save_checkpoint(model, trial, *rest, **named)  # type: ignore[misc]


class ResumableTrainer(ResumableTraining, Trainer):  # type: ignore[misc]
    """``Trainer`` whose data resumes exactly where a checkpoint was saved."""


class _Batches(IterableDataset[Any]):  # type: ignore[misc]
    """Batches of a loader, after as many placeholders as the Trainer discards before it resumes.

    The Trainer counts steps by the batches it takes. The placeholders keep its count correct at no cost.
    """

    def __init__(self, loader: Loader, to_be_skipped: Callable[[Loader], int]) -> None:
        self.loader, self._to_be_skipped = loader, to_be_skipped
        self._begun = False

    def __iter__(self) -> Iterator[Any]:
        skipped = 0 if self._begun else self._to_be_skipped(self.loader)
        self._begun = True
        # chain, because "yield from" would close the batches of several epochs with the first one.
        yield from chain(repeat(None, skipped), self._batches())

    def _batches(self) -> Iterator[Any]:
        return rest_or_next(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def as_dataloader(self) -> DataLoader[Any]:
        """Return a DataLoader without work of its own, as the Trainer and skip_first_batches expect one.

        Its seed is drawn from its own generator, so that the model's dropout does not depend on the point of a resume.
        """
        return DataLoader(self, batch_size=None, collate_fn=_unchanged, generator=torch.Generator())

    @property
    def rows(self) -> int:
        """Rows of an epoch on all ranks. For a stream, an upper bound."""
        loader = self.loader
        if (rows := loader.pipeline.numbered) is not None:
            return rows
        return len(loader) * loader.options.batch_size * loader.shard.count


def refuse_loader(given: Any, name: str = "train_dataset") -> None:
    """Raise TypeError for a loader, or for the splits of a dataset, in place of a dataset."""
    if isinstance(given, Loader):
        options = ", and its options as loader_options: {'last_batch': 'pad'}" if name == "train_dataset" else ""
        raise TypeError(f"{name} must be a Dataset, got a loader. Pass loader.dataset{options}.")
    if isinstance(given, Mapping) and name == "train_dataset":
        parts = ", ".join(map(repr, given)) or "nothing"
        raise TypeError(f"{name} must be a Dataset, got a dict of {parts}. Pass one of them: {name}=parts['train'].")


def _strategy(args: Any) -> str:
    """Return the sampling that the arguments ask for. Transformers 5.0 and 5.1 had no such argument."""
    older = "group_by_length" if getattr(args, "group_by_length", False) else "random"
    return str(getattr(args, "train_sampling_strategy", older))


def _check_arguments(args: Any) -> None:
    """Raise ValueError for arguments that would be ignored, because the loader makes the batches."""
    strategy = _strategy(args)
    if strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy={strategy!r} needs the lengths of all rows, and a dataset of midepoch is not "
            "read in advance. Use 'random' or 'sequential'. To spend less on padding, pack rows with ds.pack(…), or "
            "pass loader_options={'max_tokens': …, 'steps_per_epoch': …}."
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            raise ValueError(
                f"accelerator_config={{'{name}': True}} is for data that Accelerate distributes, and a dataset of "
                "midepoch gives each rank its own rows. Leave it out, and set per_device_train_batch_size."
            )


def _unchanged(batch: Any) -> Any:
    return batch
