"""NeMo Automodel: a recipe whose data is a midepoch dataset, with its position in every checkpoint.

recipe: midepoch.integrations.nemo_automodel.ResumableFinetuneRecipe
dataset:
  _target_: my_data.sequences  # a function that returns a Dataset
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nemo_automodel.components.datasets.loader import CollatorConfig, DataloaderConfig
from nemo_automodel.components.datasets.utils import default_collater
from nemo_automodel.components.training.rng import StatefulRNG
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from midepoch.dataset import Dataset
from midepoch.integrations.micro_batches import CollatedParts, MicroBatches, SavedAsText, rank_rows
from midepoch.integrations.states import arguments_for, check_shifted

_log = logging.getLogger("midepoch")


class ResumableDataloader(SavedAsText):
    """Epochs of micro-batches for Automodel's StepScheduler. Its state restores any number of ranks.

    Automodel saves the states of a StatefulDataLoader in one file for each data-parallel rank, and cannot load them on
    more ranks. This state is saved by distributed checkpointing instead.
    """

    use_distributed_checkpointing = True
    _to_begin = "Set another checkpoint.checkpoint_dir to begin with the first row."

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches
        self.sampler = batches.loader  # the StepScheduler names its epoch
        self._checked = False

    def __iter__(self) -> Iterator[Any]:
        for part in self._batches.one_pass():
            batch = part.batch
            if not self._checked and isinstance(batch, Mapping) and "input_ids" in batch and "labels" in batch:
                check_shifted(batch["input_ids"], batch["labels"])
            self._checked = True
            yield batch

    def __len__(self) -> int:
        return len(self._batches.loader) * self._batches.per_step


@dataclass
class ResumableDataloaderConfig(DataloaderConfig):  # type: ignore[misc]
    """Automodel's settings of a dataloader, for a dataset that is a midepoch Dataset."""

    global_batch_size: int = 1

    def build(
        self,
        *,
        dp_rank: int,
        dp_world_size: int,
        tokenizer: Any = None,
        dataset_build_context: Any = None,
        collate_wrapper: Any = None,
        **_: Any,
    ) -> ResumableDataloader:
        dataset = self._build_dataset(tokenizer=tokenizer, dataset_build_context=dataset_build_context)
        if not isinstance(dataset, Dataset):
            raise TypeError(f"dataset._target_ must return a midepoch Dataset, got {type(dataset).__name__}")
        self._check()
        micro = int(self.batch_size)
        if self.shuffle is not False and dataset.pipeline.numbered is not None and not dataset.pipeline.node.shuffled:
            dataset = dataset.shuffle(seed=self.seed)
        collate = self.collate_fn or default_collater
        if isinstance(collate, CollatorConfig):
            collate = collate.build(tokenizer=tokenizer)
        if collate_wrapper is not None:
            collate = collate_wrapper(collate)
        loader = dataset.with_format("python").loader(
            rank_rows(self.global_batch_size, micro, dp_world_size),
            self.num_workers,
            collate_fn=CollatedParts(collate, micro),
            prefetch=self.prefetch_factor,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers and self.num_workers > 0,
            last_batch="drop",
            **arguments_for(dp_rank, dp_world_size),
        )
        return ResumableDataloader(MicroBatches(loader, micro))

    def _check(self) -> None:
        for name, wrong in (
            ("packed_sequence", self.packing is not None and not self.packing.prepacked),
            ("dataloader.group_by_length", self.group_by_length),
            ("dataloader.batch_size of null", self.batch_size is None),
        ):
            if wrong:
                raise ValueError(
                    f"{name} is not supported for midepoch datasets. Omit it, and use Dataset.pack to pack."
                )


class ResumableData:
    """A recipe whose training dataset is a midepoch Dataset: ``class MyRecipe(ResumableData, OtherRecipe)``."""

    cfg: Any

    def setup(self) -> None:
        own = self.cfg.dataloader
        if own is not None and not isinstance(own, ResumableDataloaderConfig):
            settings = {field.name: getattr(own, field.name) for field in fields(DataloaderConfig)}
            rows = int(self.cfg.get("step_scheduler.global_batch_size", 1))
            self.cfg.dataloader = ResumableDataloaderConfig(**settings, global_batch_size=rows)
        super().setup()  # type: ignore[misc]

    def _load_checkpoint_tracked_state(self, ckpt_dir: str) -> Any:
        """Load a checkpoint of fewer ranks, too. Automodel saves the random state of each rank, and needs its file."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        tracked: set[str] = self.__dict__["__state_tracked"]
        random = {key for key in tracked if isinstance(getattr(self, key), StatefulRNG)}
        lacking = {key for key in random if not list(Path(ckpt_dir, key).glob(f"{key}_*_rank_{rank}.pt"))}
        if lacking and rank > 0:
            _log.warning("rank %d begins with the random state of its seed: the checkpoint is of fewer ranks", rank)
            tracked -= lacking
        try:
            return super()._load_checkpoint_tracked_state(ckpt_dir)  # type: ignore[misc]
        finally:
            tracked |= lacking


class ResumableFinetuneRecipe(ResumableData, TrainFinetuneRecipeForNextTokenPrediction):  # type: ignore[misc]
    """Automodel's recipe for pretraining and fine-tuning language models, on midepoch datasets."""
