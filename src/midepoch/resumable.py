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
        for value in self.current_pass():  # not next(): an interrupt on its return would lose the value
            return value
        self.end_pass()
        raise StopIteration

    def current_pass(self) -> Iterator[Any]:
        """Return the pass that ``next()`` is in; begin one if it is in none."""
        if self._pass is None:
            self._pass = iter(self)
        return self._pass

    def end_pass(self) -> None:
        """Let the next ``next()`` begin another pass."""
        self._pass = None
