"""Lightning: a DataModule that is a part of every checkpoint, exactly. Needs ``midepoch[lightning]``.

data = ResumableData(lambda: ds.shuffle(seed=42).loader(batch_size=32, ends="drop"))
trainer.fit(model, datamodule=data, ckpt_path="last")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl

from midepoch.errors import CheckpointNotFoundError, WorldError
from midepoch.integrations.passes import rest_or_next
from midepoch.integrations.states import check_same_steps, for_all_ranks
from midepoch.loader import Loader

_MOST_BEHIND = 8
"""Batches that may have been handed to Lightning and not trained on: one that it looks ahead, one that has failed."""


class ResumableData(pl.LightningDataModule):  # type: ignore[misc]
    """Training data whose place is a part of every checkpoint: just behind the last batch that was trained on.

    ``train`` and ``val`` make the loaders. They are called when Lightning has started its ranks, which loaders made
    earlier would not know of. The data goes on over the epochs of Lightning: with ``limit_train_batches=10`` the next
    one begins with the eleventh batch. Another Trainer begins anew, unless it is given a checkpoint.
    """

    def __init__(self, train: Callable[[], Loader], val: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._make_train, self._make_val = train, val
        self._train: _Passes | None = None
        self._fitted_by: Any = None
        self._restored: dict[str, Any] | None = None

    def train_dataloader(self) -> Any:
        if self._train is None or self._fitted_by is not self.trainer:
            restored = self._restored if self._train is None or self.trainer.ckpt_path is not None else None
            if restored is None and self.trainer.ckpt_path is not None:
                raise CheckpointNotFoundError(
                    f"{self.trainer.ckpt_path} does not say where in the data it was saved, and rows would be lost or "
                    "repeated: it was written without this DataModule."
                )
            loader = self._make_train()
            self._check_ranks(loader)
            self._train, self._fitted_by = _Passes(loader, self._trained, self._counted), self.trainer
            if restored is not None:
                self._go_on(restored)
        return self._train

    def _go_on(self, restored: dict[str, Any]) -> None:
        assert self._train is not None
        if self._train.has_length:
            check_same_steps(restored["global_batch"], self._train.global_batch, "Lightning")
        self._train.go_to(restored["train"])

    def val_dataloader(self) -> Any:
        return [] if self._make_val is None else self._make_val()

    def state_dict(self) -> dict[str, Any]:
        """Where to go on. All ranks call it, as Lightning has them do: those of a stream exchange theirs."""
        if self._train is None:
            return self._restored or {}
        state = for_all_ranks(self._train.loader, self._train.stands())
        return {"train": state, "global_batch": self._train.global_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        if self._train is not None and self._fitted_by is self.trainer:
            self._go_on(state_dict)

    def _trained(self) -> int:
        """How many batches Lightning has trained on, in all of the run."""
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def _counted(self) -> bool:
        """Whether Lightning ends an epoch by itself, behind a number of batches."""
        return self.trainer.fit_loop._data_fetcher.length is not None

    def _check_ranks(self, loader: Loader) -> None:
        ranks = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        if (loader.cut.index, loader.cut.count) != (ranks["rank"], ranks["num_replicas"]):
            raise WorldError(
                f"the loader is rank {loader.cut.index} of {loader.cut.count}, Lightning has this process as rank "
                f"{ranks['rank']} of {ranks['num_replicas']} for data: make it in the function that is given to "
                "ResumableData, and not before, or with rank=, world_size= or data_parallel=."
            )


class _Passes:
    """What Lightning takes for a DataLoader. It has no sampler, so none is replaced."""

    def __init__(self, loader: Loader, trained: Callable[[], int], counted: Callable[[], bool]) -> None:
        self.loader, self._trained, self._counted = loader, trained, counted
        self._states: tuple[Any, ...] = (loader.state_dict(),)  # after each of the last batches delivered
        self._handed_over = self._trained_before = 0

    @property
    def global_batch(self) -> int:
        """Rows of a step, over all ranks."""
        return self.loader.options.batch_size * self.loader.cut.count

    @property
    def has_length(self) -> bool:
        try:
            return len(self.loader) >= 0
        except TypeError:
            return False

    def stands(self) -> Any:
        """The state behind the last batch that was trained on."""
        return self._states[-1 - self._behind()]

    def go_to(self, state: Any) -> None:
        """Go on from a state."""
        self.loader.load_state_dict(state)
        loaded = self.loader.state_dict()
        self._states, self._handed_over = (loaded,), 0

    def __iter__(self) -> Iterator[Any]:
        if self._behind():  # what was looked ahead in a pass that is not gone on with
            self.go_to(self.stands())
        if not self._handed_over:
            self._trained_before = self._trained()
        return self._batches()

    def _behind(self) -> int:
        """How many of the batches handed over have not been trained on."""
        return self._handed_over and self._handed_over - (self._trained() - self._trained_before)

    def _batches(self) -> Iterator[Any]:
        """An epoch, or as many batches as Lightning takes if it knows how many: its epoch may not end with the data's.

        With an end there, a run that is resumed just behind it would have an epoch with more batches.
        """
        going_on = True
        while going_on:
            going_on = False
            for batch in rest_or_next(self.loader):
                states = (*self._states[-_MOST_BEHIND:], self.loader.state_dict())
                self._states, self._handed_over = states, self._handed_over + 1  # the last thing, see Loader
                yield batch
                going_on = self._counted()

    def __len__(self) -> int:
        return len(self.loader)

    # Lightning keeps states of loaders too, but does not load them if the last epoch was complete: the DataModule's is
    # the one that counts. Without these it would warn that the loader cannot be resumed.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
