"""Base class of what can be resumed: ``next()``, and the second pair of names of the state methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Resumable:
    """Iterable with ``state_dict`` (torch), ``get_state`` (Grain, Orbax, ``midepoch.typing``) and ``next()``.

    ``next()`` continues the current pass and begins one if there is none. An iterator has its own.
    """

    _pass: Iterator[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        """Return ``state_dict()``."""
        return self.state_dict()

    def set_state(self, state: Any) -> None:
        """Call ``load_state_dict(state)``."""
        self.load_state_dict(state)

    @property
    def state_is_global(self) -> bool:
        """True if the state of one rank restores every rank."""
        return True

    @property
    def takes_states_of_all_ranks(self) -> bool:
        """True if the list of the states of all ranks restores any number of ranks."""
        return False

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __next__(self) -> Any:
        for value in self.current_pass():  # not next(): an interrupt on its return would lose the value
            return value
        self.end_pass()
        raise StopIteration("the epoch is over: use a for loop for each epoch. The next call begins the next one.")

    def current_pass(self) -> Iterator[Any]:
        """Return the current pass of ``next()``. Begin one if there is none."""
        if self._pass is None:
            self._pass = iter(self)
        return self._pass

    def end_pass(self) -> None:
        """Make the next ``next()`` begin another pass."""
        self._pass = None
