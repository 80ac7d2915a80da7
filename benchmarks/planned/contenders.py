"""The contenders: for a rank, the rows of each batch, and a state from which another process continues.

All of them read rows in a random order of the whole epoch, and put rows of similar lengths together. Those with a
number of rows for each batch instead of a budget get the budget divided by the mean length.

- midepoch: its loader, and its states. Also with ``balance``.
- torch: a sampler that shuffles, sorts by length in windows, and `BatchSampler`; the batches are shuffled, and rank r
  of S takes every S-th. It has no state: a run that resumes skips the steps that were taken.
- transformers: `LengthGroupedSampler` and `BatchSampler`, dealt to ranks in the same way, as `Trainer` does, which also
  resumes by skipping the steps taken. "distributed": `DistributedLengthGroupedSampler`, which deals rows.
  "rebalance": `BatchRebalanceSampler`.
- lhotse: `DynamicBucketingSampler` with a buffer of one window, durations as lengths, and its states.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.planned import data
from benchmarks.planned.figures import Rows

SEED = 1


@dataclass(frozen=True)
class Setting:
    """The data of a measurement, and the budget. ``path``: an Arrow file of row numbers."""

    path: Path
    rows: int
    mean: float = data.MEAN
    sigma: float = data.SIGMA
    window: int = data.WINDOW
    budget: int = data.BUDGET

    @cached_property
    def lengths(self) -> Rows:
        return data.lengths_of(self.rows, self.mean, self.sigma)

    @property
    def batch_size(self) -> int:
        return max(1, int(self.budget / self.lengths.mean()))


class Opened(NamedTuple):
    """The batches of a rank, and its state after those that were taken."""

    batches: Iterator[Rows]
    state: Callable[[], Any]


@dataclass(frozen=True)
class Rank:
    """A rank of an epoch. ``state``: of a run before, to be continued."""

    index: int
    count: int
    epoch: int = 0
    state: Any = None


Contender = Callable[[Setting, Rank], Opened]


def open_ids(setting: Setting, rank: Rank, **options: Any) -> Any:
    """Return a loader of midepoch whose batches are row numbers."""
    import midepoch

    ds = midepoch.from_files(str(setting.path), index_dir=setting.path.parent / "index").shuffle(seed=SEED)
    return ds.with_format("numpy").loader(
        max_tokens=setting.budget,
        length=setting.lengths,
        bucket_window=setting.window,
        collate_fn=_ids,
        collate_columns=True,
        rank=rank.index,
        world_size=rank.count,
        **options,
    )


def _ids(columns: Any) -> Rows:
    return np.array(columns["id"])


def midepoch_(balance: str | None = None) -> Contender:
    def opened(setting: Setting, rank: Rank) -> Opened:
        loader = open_ids(setting, rank, balance=balance)
        if rank.state is None:
            loader.set_epoch(rank.epoch)
        else:
            loader.load_state_dict(rank.state)
        return Opened(iter(loader), loader.state_dict)

    return opened


def torch_(setting: Setting, rank: Rank) -> Opened:
    import torch
    from torch.utils.data import BatchSampler

    generator = torch.Generator().manual_seed(SEED + rank.epoch)
    lengths, order = setting.lengths, torch.randperm(setting.rows, generator=generator).numpy()
    windows = [order[i : i + setting.window] for i in range(0, setting.rows, setting.window)]
    by_length = np.concatenate([window[np.argsort(-lengths[window], kind="stable")] for window in windows])
    batches = list(BatchSampler(by_length.tolist(), setting.batch_size, drop_last=False))
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return _skipping((batches[k] for k in shuffled[rank.index :: rank.count]), rank.state)


def transformers_(setting: Setting, rank: Rank) -> Opened:
    import torch
    from torch.utils.data import BatchSampler
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(SEED + rank.epoch)
    sampler: Any = LengthGroupedSampler(setting.batch_size, lengths=setting.lengths.tolist(), generator=generator)
    batches = BatchSampler(sampler, setting.batch_size, drop_last=False)
    return _skipping(islice(batches, rank.index, None, rank.count), rank.state)


def distributed(setting: Setting, rank: Rank) -> Opened:
    from torch.utils.data import BatchSampler
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    sampler: Any = DistributedLengthGroupedSampler(
        setting.batch_size, lengths=setting.lengths.tolist(), num_replicas=rank.count, rank=rank.index, seed=SEED
    )
    sampler.set_epoch(rank.epoch)
    return _skipping(iter(BatchSampler(sampler, setting.batch_size, drop_last=False)), rank.state)


def rebalance(setting: Setting, rank: Rank) -> Opened:
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    sampler = BatchRebalanceSampler(
        setting.lengths.tolist(),
        setting.batch_size * rank.count,
        dp_size=rank.count,
        grad_accum=1,
        seed=SEED,
        rank=rank.index,
        drop_last=False,
    )
    sampler.set_epoch(rank.epoch)
    return _skipping(iter(sampler), rank.state)


def _skipping(batches: Iterator[Any], steps: int | None) -> Opened:
    """Return batches after a number of steps of this rank, which are all that a run knows."""
    taken = steps or 0
    for _ in islice(batches, taken):
        pass

    def counted() -> Iterator[Rows]:
        nonlocal taken
        for batch in batches:
            taken += 1
            yield np.array(batch, np.int64)

    return Opened(counted(), lambda: taken)


def lhotse_(buckets: int) -> Contender:
    def opened(setting: Setting, rank: Rank) -> Opened:
        from lhotse import CutSet, MonoCut
        from lhotse.dataset import DynamicBucketingSampler

        order = np.random.default_rng([SEED, rank.epoch]).permutation(setting.rows).tolist()
        cuts = [MonoCut(str(row), 0, float(setting.lengths[row]), 0) for row in order]
        sampler = DynamicBucketingSampler(
            CutSet.from_cuts(cuts),
            max_duration=setting.budget,
            num_buckets=buckets,
            shuffle=True,
            buffer_size=setting.window,
            world_size=rank.count,
            rank=rank.index,
            seed=SEED,
        )
        if rank.state is None:
            sampler.set_epoch(rank.epoch)
        else:
            sampler.load_state_dict(rank.state)
        # At the end of an epoch, lhotse marks the name of a row that it repeats.
        batches = (np.array([int(cut.id.split("_")[0]) for cut in batch], np.int64) for batch in sampler)
        return Opened(batches, sampler.state_dict)

    return opened


CONTENDERS: dict[str, Contender] = {
    "midepoch": midepoch_(),
    "midepoch, tokens": midepoch_("tokens"),
    "midepoch, quadratic": midepoch_("quadratic"),
    "torch": torch_,
    "transformers": transformers_,
    "transformers, distributed": distributed,
    "transformers, rebalance": rebalance,
    "lhotse, 10 buckets": lhotse_(10),
    "lhotse, 100 buckets": lhotse_(100),
}


def installed(name: str) -> bool:
    """Return True if the sampler of a contender can be imported."""
    if importlib.util.find_spec(name.split(",")[0]) is None:
        return False
    if name != "transformers, rebalance":  # not in older versions
        return True
    return hasattr(importlib.import_module("transformers.trainer_pt_utils"), "BatchRebalanceSampler")
