"""torchtitan: a dataloader component whose position is part of every checkpoint and restores any number of ranks.

dataloader=MidepochDataLoader.Config(data=lambda tokenizer, seq_len: packed_sequences(seq_len + 1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_origin

import tyro

from midepoch.dataset import Dataset
from midepoch.integrations.micro_batches import MicroBatches, SavedAsText, rank_rows
from midepoch.integrations.states import IGNORED, arguments_for, next_tokens

try:
    from torchtitan.components import dataloader as _layout  # up to 0.3
except ImportError:
    from torchtitan.components.data import loader as _layout  # the main branch since August 2026

_ONE_DICT = get_origin(getattr(_layout, "TrainerBatch", tuple[Any, Any])) is not tuple
"""True if a batch is one dict with its labels and the number of valid tokens: the main branch since September 2026."""


class MidepochDataLoader(SavedAsText, _layout.BaseDataLoader):  # type: ignore[misc]
    """Batches of a midepoch dataset, as torchtitan's Trainer takes them.

    Its state is the same on all ranks. So a checkpoint resumes with another data-parallel degree, which torchtitan's
    own dataloaders refuse.
    """

    _to_begin = "Use --checkpoint.exclude_from_loading dataloader to begin with the first row."

    @dataclass(kw_only=True, slots=True)
    class Config(_layout.BaseDataLoader.Config):  # type: ignore[misc]
        """Settings of the component. Those in the command line are ``--dataloader.NAME``."""

        data: Annotated[Any, tyro.conf.Suppress] = None
        """A Dataset, or a function of ``tokenizer`` and ``seq_len`` that returns it."""

        global_batch_size: int = -1
        """Rows of a step: that of ``training.global_batch_size``. Default: one batch per rank."""

        epochs: int = -1
        """Epochs after which the data ends. Default: never."""

        num_workers: int = 0
        """Number of worker processes on each rank."""

        infinite: bool = True
        """False to end after one epoch. Set by torchtitan's Validator, up to 0.3."""

        repeat: bool = True
        """The same, set by the Validator of the main branch."""

        loader: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Other arguments of ``Dataset.loader``."""

        to_batch: Annotated[Callable[[Any], Any] | None, tyro.conf.Suppress] = None
        """Function from a batch of columns to a batch of the trainer. Default: next tokens."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int = 0,
        local_batch_size: int = 0,
        max_context_length: int = 0,
        num_tokens_per_batch: int = 0,
        **_: Any,
    ) -> None:
        """Open the data. Up to 0.3, torchtitan passes a sequence length and rows; its main branch passes tokens."""
        self._flat = bool(num_tokens_per_batch)
        if self._flat:
            seq_len, local_batch_size = max_context_length, num_tokens_per_batch // max_context_length
            if local_batch_size * seq_len != num_tokens_per_batch:
                raise ValueError(
                    f"the tokens of a micro-batch must be a multiple of max_context_length={seq_len}, got "
                    f"{num_tokens_per_batch}. Change training.num_tokens_per_microbatch_per_dp_rank."
                )
        dataset = config.data if isinstance(config.data, Dataset) else _opened(config.data, tokenizer, seq_len)
        step = config.global_batch_size if config.global_batch_size > 0 else local_batch_size * dp_world_size
        loader = dataset.loader(
            rank_rows(step, local_batch_size, dp_world_size),
            config.num_workers,
            **{"last_batch": "drop", **arguments_for(dp_rank, dp_world_size), **config.loader},
        )
        self._batches, self._seq_len = MicroBatches(loader, local_batch_size), seq_len
        self._epochs = config.epochs if config.epochs > 0 else None if config.infinite and config.repeat else 1
        self._to_batch = config.to_batch or self._next_tokens

    def __iter__(self) -> Iterator[Any]:
        for part in self._batches.passes(self._epochs):
            yield self._to_batch(part.batch)

    def _next_tokens(self, batch: Mapping[str, Any]) -> Any:
        """Return [rows, length] tensors, or those of all rows in a line where torchtitan counts in tokens."""
        tensors = next_tokens(batch, self._seq_len)
        tokens, labels, positions = (each.reshape(-1) for each in tensors) if self._flat else tensors
        inputs = {"input": tokens, "positions": positions}
        if not _ONE_DICT:
            return inputs, labels
        return {**inputs, "labels": labels, "num_valid_tokens": int((labels != IGNORED).sum())}


def _opened(data: Any, tokenizer: Any, seq_len: int) -> Dataset:
    if not callable(data):
        raise TypeError(
            f"MidepochDataLoader.Config(data=…) must be a Dataset, or a function of tokenizer and seq_len, got {data!r}"
        )
    dataset = data(tokenizer, seq_len)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"data(tokenizer, seq_len) must return a Dataset, got {type(dataset).__name__}")
    return dataset
