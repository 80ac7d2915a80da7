"""The two protocols of objects that a training run can save and restore.

    class Numbers(CheckpointableIterator[int]):
        def __init__(self): self.count = 0
        def __next__(self): self.count += 1; return self.count
        def get_state(self): return {"count": self.count}
        def set_state(self, state): self.count = state["count"]

Datasets, loaders and iterators of midepoch implement both. User-defined classes may implement either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Stateful(Protocol):
    """Object with torch's state methods: ``load_state_dict(state_dict())`` makes a new object continue from there."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


@runtime_checkable
class CheckpointableIterator(Protocol[T_co]):
    """Iterator with a state: ``set_state(get_state())`` makes a new iterator continue from there.

    Subclassing is optional. A subclass inherits ``__iter__`` and must define the other three methods.
    """

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        raise NotImplementedError(f"{type(self).__name__} is a CheckpointableIterator without __next__")

    def get_state(self) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} is a CheckpointableIterator without get_state")

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError(f"{type(self).__name__} is a CheckpointableIterator without set_state")
