"""Accelerate: a loader that ``save_state`` saves and ``load_state`` restores. Needs ``midepoch[accelerate]``.

model, optimizer = accelerator.prepare(model, optimizer)
loader = prepare(accelerator, ds.loader(batch_size=32))
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from midepoch._internal.hints import hinted
from midepoch.integrations.states import for_all_ranks, read_state, write_state
from midepoch.loader import Loader

_log = logging.getLogger("midepoch")
_prepared: WeakKeyDictionary[Accelerator, set[str]] = WeakKeyDictionary()


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """Loader whose batches are on the accelerator's device. Created by ``prepare``."""

    def __init__(self, accelerator: Accelerator, loader: Loader) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._accelerator = accelerator
        self._delivered: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over one pass of the loader. The state is that after the delivered batch.

        One batch is fetched ahead, because gradients have to be synchronised with the last one.
        """
        place = self._accelerator.device if self._accelerator.device_placement else None
        self.begin()
        coming: Any = self
        delivered, is_exiting = 0, sys.is_finalizing
        try:
            batches = iter(self.loader)
            begun = self._delivered = self.loader.state_dict()
            coming = next(batches, self)
            while coming is not self:
                batch, state = coming, self.loader.state_dict()
                coming = next(batches, self)
                self.end_of_dataloader = coming is self
                if place is not None:
                    batch = send_to_device(batch, place, non_blocking=self._accelerator.non_blocking)
                # Directly before the batch is delivered, see Loader. After the last batch the loader is already at the
                # next epoch.
                delivered += 1
                self._delivered = None if self.end_of_dataloader else state
                yield batch
        finally:
            self.end()
            if coming is not self and not is_exiting():
                # Left with a batch looked at and not delivered: the loader is to continue before that one, or to begin
                # again, by the same rule as its own passes.
                continues = delivered > 1 and self.loader.pipeline.node.shuffled
                self.loader.load_state_dict(self._delivered if continues and self._delivered is not None else begun)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader."""
        if name in ("dataset", "sampler", "batch_sampler"):  # which accelerator.skip_first_batches looks for
            raise AttributeError(
                f"a prepared loader has no {name}. To skip batches is not necessary: accelerator.load_state continues "
                "after the last one. To leave some out: loader.exclude(steps=…)."
            )
        if name in ("exclude", "set_weights", "lease") and self._delivered is not None:
            raise AttributeError(
                f"{name}: a pass of this prepared loader is open, and a batch is fetched ahead. Call it before the "
                "first batch, or after accelerator.load_state(…)."
            )
        if name.startswith("_") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def steps(self) -> int:
        """Steps of the run that were delivered."""
        return int(self._stands("steps"))

    @property
    def epoch(self) -> int:
        """Epoch of the next batch to be delivered."""
        return int(self._stands("epoch"))

    @property
    def position(self) -> int:
        """Number of rows of the epoch that were delivered to all ranks together."""
        return self.loader.position if self.loader.options.budget is not None else int(self._stands("position"))

    def _stands(self, name: str) -> Any:
        if self._delivered is None:
            return getattr(self.loader, name)
        return (self._delivered[0] if isinstance(self._delivered, list) else self._delivered)[name]

    def __repr__(self) -> str:
        return f"PreparedLoader({self.loader!r})"

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as the loader does. The epoch of a loaded state is resumed."""
        self.loader.set_epoch(epoch)
        self._delivered = None

    def state_dict(self) -> Any:
        """Return the state of the loader after the last delivered batch."""
        return self.loader.state_dict() if self._delivered is None else self._delivered

    def load_state_dict(self, state: Any) -> None:
        """Load a state of the loader."""
        self.loader.load_state_dict(state)
        self._delivered = None


@hinted(
    {
        "too many": "Prepare the loader alone, loader = prepare(accelerator, loader), and the others by Accelerate: "
        "model, optimizer = accelerator.prepare(model, optimizer)."
    }
)
def prepare(accelerator: Accelerator, loader: Loader, *, name: str = "train") -> PreparedLoader:
    """Return a loader for an Accelerate loop. Its batches are on the device, and ``save_state`` and ``load_state``
    include its state.

    The loader already shards the data over the ranks: Accelerate neither shards, dispatches nor pads batches. ``name``
    distinguishes several loaders. Each is a file ``midepoch-NAME.json`` in the folder of ``save_state``. A state of
    different data is refused before anything is loaded.
    """
    if not isinstance(loader, Loader):
        raise TypeError(f"prepare(accelerator, loader) takes a loader, as of ds.loader(32), got {loader!r:.60}")
    names = _prepared.setdefault(accelerator, set())
    if name in names:
        raise ValueError(
            f"there already is a loader named {name!r}. Pass another name: prepare(accelerator, loader, name=…)"
        )
    if not names and any(optimizer.state for optimizer in accelerator._optimizers):
        _log.warning(
            "prepare(accelerator, loader): the optimizer has a state already. If accelerator.load_state(…) was called "
            "before, it has not restored the position in the data: prepare the loader first."
        )
    names.add(name)
    prepared, file = PreparedLoader(accelerator, loader), f"midepoch-{name}.json"

    def save(_models: Any, _weights: Any, folder: str) -> None:
        state = for_all_ranks(loader, prepared.state_dict())
        each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if each_node else accelerator.is_main_process:
            write_state(Path(folder, file), state)

    def load(_models: Any, folder: str) -> None:
        prepared.load_state_dict(read_state(Path(folder, file)))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return prepared
