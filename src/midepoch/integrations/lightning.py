"""Lightning: a DataModule whose exact position is part of every checkpoint. Needs ``midepoch[lightning]``.

data = ResumableData(lambda: ds.shuffle(seed=42).loader(batch_size=32, last_batch="drop"))
trainer.fit(model, datamodule=data, ckpt_path="last")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl

from midepoch._internal.hints import hinted_methods
from midepoch.errors import CheckpointNotFoundError, WorldError
from midepoch.integrations.states import check_equal_epochs, check_same_steps, for_all_ranks, length_of, rest_or_next
from midepoch.loader import Loader

_MOST_BEHIND = 8
"""Maximum number of batches delivered to Lightning but not trained on: one fetched ahead, one that failed, and spare.
"""


@hinted_methods({}, only=["__init__"])
class ResumableData(pl.LightningDataModule):  # type: ignore[misc]
    """Training data whose position, after the last batch that was trained on, is part of every checkpoint.

    ``train`` and ``val`` create the loaders. They are called after Lightning has started its ranks, which loaders
    created earlier would not know. The data continues over the epochs of Lightning: with ``limit_train_batches=10`` the
    next epoch begins with the eleventh batch. Another Trainer starts from the beginning, unless it is given a
    checkpoint.
    """

    def __init__(self, train: Callable[[], Loader], val: Callable[[], Any] | None = None) -> None:
        super().__init__()
        for name, make in (("train", train), ("val", val)):
            if make is not None and not callable(make):
                raise TypeError(
                    f"ResumableData({name}=…) takes a function that creates the loader, such as lambda: ds.loader(32), "
                    f"got {make!r:.60}"
                )
        self._make_train, self._make_val = train, val
        self._train: _Passes | None = None
        self._fitted_by: Any = None
        self._restored: dict[str, Any] | None = None

    def train_dataloader(self) -> Any:
        if self._train is None or self._fitted_by is not self.trainer:
            restored = self._restored if self._train is None or self.trainer.ckpt_path is not None else None
            if restored is None and self.trainer.ckpt_path is not None:
                raise CheckpointNotFoundError(
                    f"{self.trainer.ckpt_path} does not contain the position in the data: it was written without this "
                    "DataModule, and rows would be lost or repeated. Use a checkpoint that was written with it."
                )
            loader = self._make_train()
            if not isinstance(loader, Loader):
                raise TypeError(f"ResumableData(train=…) must return a loader, as of ds.loader(32), got {loader!r:.60}")
            self._check_ranks(loader)
            check_equal_epochs(loader, "Lightning", "")
            self._train, self._fitted_by = _Passes(loader, self._trained, self._counted), self.trainer
            if restored is not None:
                self._resume(restored)
        return self._train

    def _resume(self, restored: dict[str, Any]) -> None:
        assert self._train is not None
        if length_of(self._train.loader) is not None:
            check_same_steps(restored["global_batch"], self._train.global_batch, "Lightning")
        self._train.go_to(restored["train"])

    def val_dataloader(self) -> Any:
        return [] if self._make_val is None else self._make_val()

    def state_dict(self) -> dict[str, Any]:
        """Return the position to resume from. Lightning calls it on all ranks, which may exchange their states."""
        if self._train is None:
            return self._restored or {}
        state = for_all_ranks(self._train.loader, self._train.stands())
        return {"train": state, "global_batch": self._train.global_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        if self._train is not None and self._fitted_by is self.trainer:
            self._resume(state_dict)

    def _trained(self) -> int:
        """Return the number of batches that Lightning has trained on in the complete run."""
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def _counted(self) -> bool:
        """Return True if Lightning itself ends an epoch after a number of batches."""
        return self.trainer.fit_loop._data_fetcher.length is not None

    def _check_ranks(self, loader: Loader) -> None:
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        if (loader.shard.index, loader.shard.count) != (ranks["rank"], ranks["num_replicas"]):
            raise WorldError(
                f"the loader is rank {loader.shard.index} of {loader.shard.count}, but to Lightning this process is "
                "rank "
                f"{ranks['rank']} of {ranks['num_replicas']} for data. Create the loader in the function that is given "
                "to ResumableData, not before, or pass rank= and world_size=, or data_parallel=."
            )


class _Passes:
    """Object that Lightning treats as a DataLoader. It has no sampler that Lightning could replace."""

    def __init__(self, loader: Loader, trained: Callable[[], int], counted: Callable[[], bool]) -> None:
        self.loader, self._trained, self._counted = loader, trained, counted
        self._states: tuple[Any, ...] = (loader.state_dict(),)  # after each of the last batches delivered
        self._delivered = self._trained_before = 0

    @property
    def global_batch(self) -> int:
        """Rows of a step, over all ranks."""
        return self.loader.options.batch_size * self.loader.shard.count

    def stands(self) -> Any:
        """Return the state after the last batch that was trained on."""
        return self._states[-1 - self._behind()]

    def go_to(self, state: Any) -> None:
        """Resume from a state."""
        self.loader.load_state_dict(state)
        self._states, self._delivered = (self.loader.state_dict(),), 0

    def __iter__(self) -> Iterator[Any]:
        if self._behind():  # batches fetched ahead in a pass that was abandoned
            self.go_to(self.stands())
        if not self._delivered:
            self._trained_before = self._trained()
        return self._batches()

    def _behind(self) -> int:
        """Return the number of delivered batches that have not been trained on."""
        return self._delivered and self._delivered - (self._trained() - self._trained_before)

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or of any number of epochs if Lightning counts batches.

        If the iterator ended with the data's epoch, a run resumed directly after it would have an epoch with more
        batches.
        """
        continues = True
        while continues:
            continues = False
            for batch in rest_or_next(self.loader):
                states = (*self._states[-_MOST_BEHIND:], self.loader.state_dict())
                self._states, self._delivered = states, self._delivered + 1  # directly before the yield, see Loader
                yield batch
                continues = self._counted()

    def __len__(self) -> int:
        return len(self.loader)

    # Lightning also saves states of loaders, but does not load them if the last epoch was complete. Therefore the state
    # of the DataModule is used. Without these methods Lightning would warn that the loader cannot be resumed.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
