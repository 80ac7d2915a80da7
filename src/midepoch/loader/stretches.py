"""steps_per_epoch: passes of a fixed number of steps, which continue where the last one stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from midepoch._internal.resumable import Resumable
from midepoch.errors import MidepochError
from midepoch.loader.options import check_continues

if TYPE_CHECKING:
    from midepoch.loader.loader import Loader


class Stretch(Resumable):
    """Iterator over the steps of a run up to the next multiple of ``steps_per_epoch``, across epochs of the data."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._load = loader, loader._breaks
        self._stop = self._next_stop()

    def _next_stop(self) -> int:
        size = self._loader.options.steps_per_epoch
        return (self._loader.steps // size + 1) * size

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, after the last batch delivered."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loader, and continue there with this iterator."""
        self._loader.load_state_dict(state)
        self._load, self._stop = self._loader._breaks, self._next_stop()

    def __iter__(self) -> Stretch:
        return self

    def __length_hint__(self) -> int:
        return max(0, self._stop - self._loader.steps)

    def __next__(self) -> Any:
        loader = self._loader
        check_continues(None, self._load != loader._breaks)
        if loader.steps >= self._stop:
            raise StopIteration
        for value in loader._pass_over_data():
            return value
        if loader.steps >= self._stop:  # the last step of the epoch had no batch for this rank
            raise StopIteration
        for value in loader._pass_over_data(next_epoch=True):
            return value
        raise MidepochError("an epoch of the data has no batch. Check that its filters keep some rows.")
