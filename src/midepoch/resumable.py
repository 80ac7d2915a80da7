"""What all that can be iterated and resumed has in common: ``next()``, and a second pair of names for its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class HasState:
    """``get_state`` and ``set_state`` (Grain, Orbax, ``midepoch.typing``) for what has ``state_dict`` (torch)."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """The same as ``state_dict()``."""
        return self.state_dict()

    def set_state(self, state: Any) -> None:
        """The same as ``load_state_dict(state)``."""
        self.load_state_dict(state)

    @property
    def state_is_global(self) -> bool:
        """Whether the state of one rank restores every rank."""
        return True

    @property
    def takes_states_of_all_ranks(self) -> bool:
        """Whether the list of the states of all ranks restores any number of ranks."""
        return False


class Resumable(HasState):
    """Something that ``iter()`` goes through: ``next()`` goes on with a pass of its own, which it begins if need be."""

    _pass: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __next__(self) -> Any:
        current = self._pass if self._pass is not None else iter(self)
        self._pass = current
        try:
            return next(current)
        except StopIteration:
            self._pass = None  # the next one begins another epoch
            raise
