"""Trainers of TRL whose data resumes exactly: ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer``. Needs ``midepoch[trl]``.

trainer = ResumableSFTTrainer(model, args, train_dataset=midepoch.load_dataset(…))
trainer.train(resume_from_checkpoint=True)

TRL formats, tokenizes, masks and truncates the rows for SFT and DPO before training, by ``map`` and ``filter``. Here
the same functions become steps of the pipeline. Prompts of GRPO are leased: a kill neither loses nor repeats one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from midepoch.dataset import Dataset
from midepoch.integrations.transformers import ResumableTraining, _Batches, _check_arguments, refuse_loader
from midepoch.loader import Loader

_ROW = "midepoch_row"
"""Name of the column with the number of a completion in the generation batch of its rank."""


class ResumablePreparation(ResumableTraining):
    """Mixin for a trainer of TRL that prepares its dataset: ``class Mine(ResumablePreparation, RewardTrainer)``.

    Rows that TRL drops, because ``max_length`` cuts off all that would be trained on, are skipped: they are counted in
    ``loader.skipped``, and their batch is smaller. So the number of steps is known without reading the data.
    """

    _ours: Dataset | None = None
    train_dataset: Any

    def __init__(self, *rest: Any, train_dataset: Any = None, **named: Any) -> None:
        refuse_loader(train_dataset)
        if not isinstance(train_dataset, Dataset):
            super().__init__(*rest, train_dataset=train_dataset, **named)
            return
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


class ResumableSFTTrainer(ResumablePreparation, SFTTrainer):  # type: ignore[misc]
    """``SFTTrainer`` whose data resumes exactly where a checkpoint was saved, on any number of ranks.

    Rows are packed by the strategies of TRL.
    """

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
    for row in Prepared(data):
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


class GenerationLayout(NamedTuple):
    """Division of a generation batch into completions by rank and micro-batch, the same on all ranks.

    TRL repeats each prompt ``generations`` times and gives each rank ``size × slices`` consecutive completions. A rank
    trains on them in ``slices`` micro-batches, ``iterations`` times.
    """

    generations: int
    size: int
    slices: int
    iterations: int
    ranks: int
    accumulated: int

    @property
    def local(self) -> int:
        """Completions of a generation batch on one rank."""
        return self.size * self.slices

    @property
    def prompts(self) -> int:
        """Prompts of a generation batch over all ranks."""
        return self.local * self.ranks // self.generations

    def uses(self, prompt: int) -> int:
        """Return the micro-batches from generation until the last one with a completion of this prompt."""
        completions = range(prompt * self.generations, (prompt + 1) * self.generations)
        last = max(completion % self.local // self.size for completion in completions)
        return (self.iterations - 1) * self.slices + last + 1

    def micro_batches(self, prompts: int) -> int:
        """Return the micro-batches in which the first prompts of a generation batch are trained on: complete steps."""
        uses = max((self.uses(prompt) for prompt in range(prompts)), default=0)
        steps = math.ceil(uses / self.accumulated) * self.accumulated
        return min(steps, self.slices * self.iterations)

    def length(self, loader: Loader) -> int | None:
        """Return the micro-batches of an epoch on one rank, or None if the number is unknown."""
        if (rows := loader.pipeline.numbered) is None:
            return None
        complete, rest = divmod(rows, self.prompts)
        return complete * self.micro_batches(self.prompts) + self.micro_batches(rest)


class GenerationBatch(list[Any]):
    """Rows of one generation batch for one rank, with the leases of its prompts on all ranks."""

    def __init__(self, leases: Sequence[Any], layout: GenerationLayout, rank: int) -> None:
        self.waiting = dict(enumerate(leases))
        """Leases by number of the prompt that are still to be trained on."""
        self.used, self.grouped = 0, False
        numbers = range(rank * layout.local, (rank + 1) * layout.local)
        prompts = [number // layout.generations for number in numbers]
        # The end of an epoch: prompts of this batch again, which are not trained on a second time.
        self.padding = [prompt >= len(leases) for prompt in prompts]
        super().__init__(leases[prompt % len(leases)].batch for prompt in prompts)


class ResumablePrompts(ResumableTraining):
    """Mixin for a GRPO trainer: ``class Mine(ResumablePrompts, GRPOTrainer)``.

    Each prompt is leased, and acknowledged after the optimizer step that used the last of its completions. A checkpoint
    holds the prompts that were acknowledged, so a resume generates completions for all others, on any number of ranks.

    The completions of a prompt stay together: a step trains on complete groups if ``per_device_train_batch_size`` is a
    multiple of ``num_generations``, or if every generation is used in one step, which is the default of TRL.
    """

    _generation: GenerationBatch | None = None
    _trained: list[Any]  # leases to be acknowledged after the next optimizer step

    def __init__(self, *rest: Any, train_dataset: Any, **named: Any) -> None:
        refuse_loader(train_dataset)
        is_ours = isinstance(train_dataset, Dataset)
        # TRL accepts only its own kind of datasets, and does not read them before get_train_dataloader.
        accepted = datasets.Dataset.from_dict({"prompt": [""]}) if is_ours else train_dataset
        super().__init__(*rest, train_dataset=accepted, **named)
        if is_ours:
            self.train_dataset = train_dataset
            _check_arguments(self.args)  # type: ignore[attr-defined]
            _check_steps(self._layout(), train_dataset.pipeline.numbered is not None)
            self.add_callback(_Acknowledge(self))  # type: ignore[attr-defined]

    def train(self: Any, *rest: Any, **named: Any) -> Any:
        self._generation, self._trained = None, []
        return super().train(*rest, **named)

    def _layout(self: Any) -> GenerationLayout:
        args = self.args
        return GenerationLayout(
            self.num_generations,
            self._train_batch_size,
            args.steps_per_generation,
            self.num_iterations,
            args.world_size,
            args.gradient_accumulation_steps,
        )

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        found = super().get_train_dataloader()
        if not isinstance(found.dataset, _Batches):
            return found
        layout, args = self._layout(), self.args
        epochs = math.ceil(args.num_train_epochs) if args.max_steps <= 0 else None
        batches = _Generations(found.dataset.loader, self._to_be_skipped, layout, args.process_index, epochs)
        return batches.as_dataloader()

    def _make_loader(self: Any, data: Dataset) -> Loader:
        args = self.args
        options = {
            "num_workers": args.dataloader_num_workers,
            "prefetch": args.dataloader_prefetch_factor,
            "persistent_workers": args.dataloader_persistent_workers,
            **self._options,
        }
        if args.process_index:  # all ranks lease the same prompts, and one ledger is enough
            options.pop("audit", None)
        return data.loader(1, collate_fn=_only_row, rank=0, world_size=1, **options)

    def _ordered(self: Any, data: Dataset, saved: dict[str, Any] | None) -> Dataset:
        return super()._ordered(data, saved) if self.shuffle_dataset else data

    def _length(self, loader: Loader) -> int | None:
        return self._layout().length(loader)

    def _generate_and_score_completions(self: Any, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if isinstance(inputs, GenerationBatch):
            device = output["completion_mask"].device
            output[_ROW] = torch.arange(len(inputs), device=device)
            padding = torch.tensor(inputs.padding, device=device)
            output["completion_mask"] = output["completion_mask"].masked_fill(padding[:, None], 0)
            output["advantages"] = output["advantages"].masked_fill(
                padding.view(-1, *[1] * (output["advantages"].dim() - 1)), 0
            )
        return output

    def _prepare_inputs(self: Any, batch: Any) -> Any:
        if not isinstance(batch, GenerationBatch):
            return super()._prepare_inputs(batch)  # type: ignore[misc]
        is_new = batch is not self._generation
        if is_new:
            self._generation, self._buffered_inputs, self._step = batch, None, 0
        inputs = super()._prepare_inputs(batch)  # type: ignore[misc]
        if is_new and _has_rows(self._buffered_inputs, self._train_batch_size):
            batch.grouped, self._buffered_inputs = True, _in_order(self._buffered_inputs)
            inputs = self._buffered_inputs[0]
        batch.used += 1
        layout = self._layout()
        last = layout.slices * layout.iterations  # TRL shuffles completions: then all prompts are complete at the end
        complete = [p for p in batch.waiting if batch.used >= (layout.uses(p) if batch.grouped else last)]
        self._trained += [batch.waiting.pop(prompt) for prompt in complete]
        return inputs

    def acknowledge(self) -> None:
        """Acknowledge the prompts whose completions have all been trained on."""
        while self._trained:
            self._trained[0].ack()
            del self._trained[0]


class ResumableGRPOTrainer(ResumablePrompts, GRPOTrainer):  # type: ignore[misc]
    """``GRPOTrainer`` that trains on every prompt exactly once in an epoch, however often it is killed and resumed."""


class _Acknowledge(TrainerCallback):  # type: ignore[misc]
    """Callback after the optimizer step, before a checkpoint can be saved."""

    def __init__(self, trainer: ResumablePrompts) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._trainer.acknowledge()


class _Generations(_Batches):
    """Generation batches, each as often as the Trainer takes it, after placeholders for steps that are complete.

    They follow each other over epochs, because a resume within a generation moves the ends of epochs relative to the
    Trainer's steps. With ``num_train_epochs`` they end with the last epoch.
    """

    def __init__(
        self,
        loader: Loader,
        to_be_skipped: Callable[[Loader], int],
        layout: GenerationLayout,
        rank: int,
        epochs: int | None,
    ) -> None:
        super().__init__(loader, to_be_skipped)
        self._layout, self._rank, self._epochs = layout, rank, epochs
        self._generations = self._over_epochs()

    def _batches(self) -> Iterator[Any]:
        return self._generations

    def _over_epochs(self) -> Iterator[GenerationBatch]:
        while self._epochs is None or self.loader.epoch < self._epochs:
            with self.loader.lease() as leases:
                while prompts := list(islice(leases, self._layout.prompts)):
                    copies = self._layout.micro_batches(len(prompts))
                    yield from repeat(GenerationBatch(prompts, self._layout, self._rank), copies)

    def __len__(self) -> int:
        length = self._layout.length(self.loader)
        if length is None:
            raise TypeError(f"the number of batches of {self.loader!r} is unknown")
        return length

    @property
    def rows(self) -> int:
        rows = self.loader.pipeline.numbered
        return len(self.loader) if rows is None else rows


def _check_steps(layout: GenerationLayout, has_length: bool) -> None:
    uses, accumulated = layout.slices * layout.iterations, layout.accumulated
    if accumulated > uses and not has_length:
        raise ValueError(
            f"a step has {accumulated} micro-batches (gradient_accumulation_steps), and a generation is used in {uses} "
            "(steps_per_generation × num_iterations). With data of unknown length, as after filter, a step could have "
            "generations of two epochs. Raise steps_per_generation."
        )
    if uses % accumulated and accumulated % uses:
        raise ValueError(
            f"a generation is used in {uses} micro-batches (steps_per_generation × num_iterations) and a step has "
            f"{accumulated} (gradient_accumulation_steps). One must be a multiple of the other."
        )


def _has_rows(slices: list[dict[str, Any]], size: int) -> bool:
    """Return True if every value has a row for each completion, which is not so for the patches of images."""
    values = [value for part in slices for value in part.values() if value is not None]
    return all(len(value) == size for value in values if not isinstance(value, torch.Tensor) or value.dim())


def _in_order(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return micro-batches with the completions in the order of their prompts."""
    size = len(slices[0][_ROW])
    order = torch.cat([part[_ROW] for part in slices]).argsort()

    def arranged(values: list[Any]) -> list[Any]:
        first = values[0]
        if first is None or (isinstance(first, torch.Tensor) and not first.dim()):
            return values
        if isinstance(first, torch.Tensor):
            return list(torch.cat(values)[order].split(size))
        flat = [value for part in values for value in part]
        return [[flat[row] for row in rows] for rows in order.split(size)]

    columns = {name: arranged([part[name] for part in slices]) for name in slices[0]}
    return [{name: parts[number] for name, parts in columns.items()} for number in range(len(slices))]


def _only_row(rows: list[Any]) -> Any:
    return rows[0]
