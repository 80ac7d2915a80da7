"""verl: prompts in place for its trainers, with an exact resume. Needs verl 0.9.

class Trainer(ResumablePrompts, RayPPOTrainer): ...

Without a trainer of your own, ``data.custom_cls.path=pkg://midepoch.integrations.verl`` and
``data.custom_cls.name=PromptDataset`` read prompts in place, in the order of verl.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from midepoch.dataset import Dataset
from midepoch.open import from_files


class PromptDataset(RLHFDataset):  # type: ignore[misc]
    """``RLHFDataset`` of files in place, of all formats and stores, which are neither copied nor held in memory."""

    def _download(self, use_origin_parquet: bool = False) -> None:  # noqa: ARG002 (the signature of verl)
        self.data_files = copy.deepcopy(self.original_data_files)

    def _read_files_and_tokenize(self) -> None:
        rows = from_files([str(path) for path in self.data_files])
        if 0 < self.max_samples < len(rows):
            rows = rows.shuffle(seed=0 if self.seed is None else self.seed) if self.shuffle else rows
            rows = rows.take(self.max_samples)
        self.dataframe: Any = _Rows(rows)
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def item(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row as verl's item."""
        maker = copy.copy(self)
        maker.dataframe = [row]
        item: dict[str, Any] = RLHFDataset.__getitem__(maker, 0)
        return item

    @property
    def rows(self) -> Dataset:
        """The rows of the files."""
        data: Dataset = self.dataframe.data
        return data


class _Rows:
    """Rows with the methods of ``datasets`` that verl uses."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> Any:
        return self.data[int(number)]

    def filter(self, condition: Callable[[Any], bool], **_: Any) -> _Rows:
        """Keep the rows for which the function is true. All rows are read, as by verl, to know the number of steps."""
        return _Rows(self.data.select([number for number, row in enumerate(self.data) if condition(row)]))


class ResumablePrompts:
    """Mixin for ``RayPPOTrainer``: batches of a midepoch loader, whose state is the ``data.pt`` of each checkpoint.

    The trainer must finish a batch before it takes the next one. Trainers that generate ahead of the update need
    leases: see examples/grpo_verl.
    """

    def _create_dataloader(self: Any, train_dataset: Any, val_dataset: Any, collate: Any, train_sampler: Any) -> None:
        data = self.config.data
        if train_dataset is None:
            samples = data.get("train_max_samples", -1)
            train_dataset = PromptDataset(data.train_files, self.tokenizer, data, self.processor, samples)
        if not isinstance(train_dataset, PromptDataset):
            raise TypeError(f"the training data must be a PromptDataset, got {type(train_dataset).__name__}")
        if train_sampler is not None:
            raise ValueError("a sampler would be ignored: midepoch orders the prompts. Leave it out.")
        super()._create_dataloader(train_dataset, val_dataset, collate, None)  # type: ignore[misc]
        rows = train_dataset.rows.shuffle(seed=data.get("seed")) if data.shuffle else train_dataset.rows
        workers = int(data["dataloader_num_workers"])
        self.train_dataloader = rows.map(_item, fn_kwargs={"dataset": train_dataset}).loader(
            data.get("gen_batch_size", None) or data.train_batch_size,
            num_workers=workers,
            collate_fn=collate or collate_fn,
            last_batch="drop",
            rank=0,
            world_size=1,
        )

    def _load_checkpoint(self: Any) -> Any:
        """Restore a checkpoint. verl does not load the state of the data at the end of an epoch."""
        done = super()._load_checkpoint()  # type: ignore[misc]
        if self.config.trainer.resume_mode != "disable" and self.global_steps:
            path = self.config.trainer.get("resume_from_path")
            if self.config.trainer.resume_mode == "auto":
                path = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            self.train_dataloader.load_state_dict(torch.load(Path(path, "data.pt"), weights_only=False))
        return done


def _item(row: dict[str, Any], dataset: PromptDataset) -> dict[str, Any]:
    return dataset.item(row)
