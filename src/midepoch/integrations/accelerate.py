"""Accelerate: a loader that ``save_state`` saves and ``load_state`` restores. Needs ``midepoch[accelerate]``.

model, optimizer = accelerator.prepare(model, optimizer)
loader = prepare(accelerator, ds.loader(batch_size=32))
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from midepoch.integrations.states import for_all_ranks, read_state, write_state
from midepoch.loader import Loader
from midepoch.stats import Stats

_prepared: WeakKeyDictionary[Accelerator, set[str]] = WeakKeyDictionary()


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """A loader whose batches lie on the accelerator's device. Made by ``prepare``."""

    def __init__(self, accelerator: Accelerator, loader: Loader) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self._accelerator = accelerator
        self._delivered: Any = None

    def __iter__(self) -> Iterator[Any]:
        """One pass, as the loader makes it. The state is that behind the batch handed over, not that looked at next.

        One batch is looked ahead: gradients are to be synchronised with the last one.
        """
        place = self._accelerator.device if self._accelerator.device_placement else None
        self.begin()
        coming: Any = self
        delivered = 0
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
                # The last thing before the batch is delivered, see Loader. After the last batch the loader itself is
                # at the next epoch by now.
                delivered += 1
                self._delivered = None if self.end_of_dataloader else state
                yield batch
        finally:
            self.end()
            if coming is not self:
                # Left with a batch looked at and not delivered: the loader is to continue before that one, or to begin
                # again, by the same rule as its own passes.
                continues = delivered > 1 and self.loader.pipeline.node.shuffled
                self.loader.load_state_dict(self._delivered if continues and self._delivered is not None else begun)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch to be handed over."""
        return self.loader.epoch if self._delivered is None else int(_one(self._delivered)["epoch"])

    @property
    def position(self) -> int:
        """How many rows of the epoch all ranks together have been handed."""
        return self.loader.position if self._delivered is None else int(_one(self._delivered)["position"])

    def stats(self, *, reset: bool = False) -> Stats:
        """As the loader's."""
        return self.loader.stats(reset=reset)

    def close(self) -> None:
        """End threads and workers now."""
        self.loader.close()

    def __repr__(self) -> str:
        return f"PreparedLoader({self.loader!r})"

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, as the loader does. The one that a loaded state is in is gone on with."""
        self.loader.set_epoch(epoch)
        self._delivered = None

    def state_dict(self) -> Any:
        """Just behind the last batch handed over, as the loader's."""
        return self.loader.state_dict() if self._delivered is None else self._delivered

    def load_state_dict(self, state: Any) -> None:
        """As the loader's."""
        self.loader.load_state_dict(state)
        self._delivered = None


def _one(state: Any) -> Any:
    return state[0] if isinstance(state, list) else state


def prepare(accelerator: Accelerator, loader: Loader, *, name: str = "train") -> PreparedLoader:
    """A loader for an Accelerate loop: batches on the device, its place in every ``save_state`` and ``load_state``.

    It cuts the data over the ranks already, so nothing is cut, dispatched or made even by repetition. ``name`` tells
    several from each other; each is a file ``midepoch-NAME.json`` in the folder of ``save_state``. A state of other
    data is refused before anything is loaded.
    """
    names = _prepared.setdefault(accelerator, set())
    if name in names:
        raise ValueError(f"there is a loader named {name!r} already: prepare(accelerator, loader, name=…)")
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
