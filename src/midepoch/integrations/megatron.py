"""Megatron-Core: data iterators for ``forward_backward_func`` with a state for its checkpoints. Needs megatron-core.

data = iterator(ds, micro_batch_size=4, global_batch_size=512)
forward_backward_func(forward_step_func=…, data_iterator=data, num_microbatches=get_num_microbatches(), …)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state

from midepoch.dataset import Dataset
from midepoch.errors import CheckpointNotFoundError, MidepochError
from midepoch.integrations.micro_batches import MicroBatch, MicroBatches, rank_rows
from midepoch.integrations.states import IGNORED, next_tokens

_SAVED = "train_dataloader_dprank000.pt"
"""The file that Megatron writes with ``dataloader_save``. Those of the other ranks are equal."""


def reads_data() -> bool:
    """Return True on ranks that read data: tensor-parallel rank 0 of the first and of the last pipeline stage."""
    ends = parallel_state.is_pipeline_first_stage(ignore_virtual=True) or parallel_state.is_pipeline_last_stage(
        ignore_virtual=True
    )
    return bool(ends and parallel_state.get_tensor_model_parallel_rank() == 0)


def gpt_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with the keys of Megatron's GPT models: tokens, labels, loss_mask and position_ids."""
    import torch

    tokens, labels, positions = next_tokens(batch)
    counted = labels != IGNORED
    return {
        "tokens": tokens.contiguous(),
        "labels": labels.where(counted, torch.zeros_like(labels)).contiguous(),
        "loss_mask": counted.float(),
        "position_ids": positions.contiguous(),
    }


class DataIterator:
    """Endless iterator over the micro-batches of this data-parallel rank. Created by ``iterator`` and ``iterators``.

    The position moves with the last micro-batch of a step. The state is the same on all ranks that read data, and
    restores any number of them.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps, self._load = steps, steps.loads
        self._step = self._next = self._missed = 0

    def __iter__(self) -> DataIterator:
        return self

    def __next__(self) -> Any:
        steps = self._steps
        if self._step != steps.number:
            if self._missed and self._load == steps.loads:
                raise MidepochError(
                    f"another model chunk began the next step, but this one has not taken the last {self._missed} "
                    "micro-batches of its step. All chunks must take the same number of micro-batches per step."
                )
            self._step, self._next = steps.number, 0
        part = steps.part(self._next)
        self._load, self._step = steps.loads, steps.number
        self._next, self._missed = part.number + 1, part.total - part.number - 1
        return part.batch

    @property
    def loader(self) -> Any:
        """The loader. Its batches are this rank's share of a step."""
        return self._steps.batches.loader

    def state_dict(self) -> Any:
        """Return the position after the last complete step. All ranks of the data-parallel group must call it."""
        return self._steps.batches.state()

    save_state = state_dict  # what Megatron calls with dataloader_save

    def load_state_dict(self, state: Any) -> None:
        """Continue from a position, on any number of ranks. It applies to the iterators of all model chunks."""
        self._steps.load(state)

    def restore(self, folder: str | Path, iteration: int) -> None:
        """Continue from the state that Megatron saved at an iteration to the folder ``dataloader_save``."""
        import torch

        saved = sorted(Path(folder, f"iter_{iteration:07d}").rglob(_SAVED))
        if not saved:
            raise CheckpointNotFoundError(
                f"{folder} has no {_SAVED} of iteration {iteration}: the checkpoint does not contain the position in "
                "the data. Set dataloader_save to this folder when checkpoints are written."
            )
        self.load_state_dict(torch.load(saved[0], weights_only=True)["dataloader_state_dict"])


def iterator(
    dataset: Dataset,
    *,
    micro_batch_size: int | None = None,
    global_batch_size: int | Mapping[int, int] | None = None,
    to_batch: Callable[[Mapping[str, Any]], Any] = gpt_batch,
    **loader: Any,
) -> DataIterator:
    """Return the data iterator of this rank, by Megatron's data-parallel group. It never ends.

    Sizes are those of Megatron's ``num_microbatches_calculator`` unless given. ``global_batch_size`` may be a dict of
    sizes by the first step at which they apply, for a ramp-up. ``to_batch`` converts a dict of columns to
    what ``next`` returns. ``loader``: other arguments of ``Dataset.loader``.
    """
    micro = _size(calculator.get_micro_batch_size) if micro_batch_size is None else micro_batch_size
    step = _size(calculator.get_current_global_batch_size) if global_batch_size is None else global_batch_size
    ranks = parallel_state.get_data_parallel_world_size()
    rows: Any = (
        {first: rank_rows(size, micro, ranks) for first, size in step.items()}
        if isinstance(step, Mapping)
        else rank_rows(step, micro, ranks)
    )
    group = parallel_state.get_data_parallel_group()
    made = dataset.loader(rows, **{"data_parallel": group, "last_batch": "drop", **loader})
    batches = MicroBatches(made, micro, group=group)
    return DataIterator(_Steps(batches, to_batch))


def iterators(dataset: Dataset, chunks: int, **options: Any) -> list[DataIterator]:
    """Return a data iterator for each model chunk of a virtual pipeline. All get the same micro-batches, read once.

    ``options``: those of ``iterator``.
    """
    first = iterator(dataset, **options)
    first._steps.keeps = chunks > 1
    return [first, *(DataIterator(first._steps) for _ in range(chunks - 1))]


def _size(of: Callable[[], int]) -> int:
    try:
        return of()
    except AttributeError:
        raise ValueError(
            "Megatron's num_microbatches_calculator is not initialised. Call init_num_microbatches_calculator before, "
            "or pass micro_batch_size and global_batch_size."
        ) from None


class _Steps:
    """The step in progress, shared by the iterators of all model chunks."""

    keeps = False
    """The micro-batches of the step are kept, for the other chunks."""

    def __init__(self, batches: MicroBatches, to_batch: Callable[[Any], Any]) -> None:
        self.batches, self._to_batch = batches, to_batch
        self.number = self.loads = 0
        self._parts: list[MicroBatch] = []
        self._source: Iterator[MicroBatch] = batches.passes()

    def part(self, index: int) -> MicroBatch:
        """Return a micro-batch of the step in progress, or the first of the next step."""
        if index < len(self._parts):
            return self._parts[index]
        part = next(self._source)
        part = part._replace(batch=self._to_batch(part.batch))
        if part.number == 0:
            _check_count(part.total)
            self.number += 1
            self._parts = []
        if self.keeps:
            self._parts.append(part)
        return part

    def load(self, state: Any) -> None:
        self.batches.load(state)
        self._parts, self._source = [], self.batches.passes()
        self.number, self.loads = self.number + 1, self.loads + 1


def _check_count(count: int) -> None:
    """Raise ValueError if Megatron takes another number of micro-batches in a step."""
    try:
        wanted = calculator.get_num_microbatches()
    except AttributeError:  # a loop without the calculator
        return
    if wanted != count:
        raise ValueError(
            f"a step of the data has {count} micro-batches, but Megatron takes {wanted}. Pass the global_batch_size "
            "and micro_batch_size of Megatron, or {first step: global batch size, …} for a ramp-up."
        )
