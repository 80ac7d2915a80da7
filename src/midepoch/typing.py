"""What a training run can save and restore: the two protocols of the field.

    class Numbers(CheckpointableIterator[int]):
        def __init__(self): self.at = 0
        def __next__(self): self.at += 1; return self.at
        def get_state(self): return {"at": self.at}
        def set_state(self, state): self.at = state["at"]

Datasets, loaders and iterators of midepoch serve both; classes of users' own may serve either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Stateful(Protocol):
    """``load_state_dict(state_dict())`` on a fresh object makes it go on as this one would; as torch has it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


@runtime_checkable
class CheckpointableIterator(Protocol[T_co]):
    """An iterator that knows where it stands: ``set_state(get_state())`` on a fresh one goes on from there.

    Deriving from it is not needed; a class that does gets ``__iter__``, and must bring the other three.
    """

    def __iter__(self) -> Iterator[T_co]:
        return self

    def __next__(self) -> T_co:
        raise NotImplementedError(f"{type(self).__name__} derives from CheckpointableIterator and has no __next__")

    def get_state(self) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} derives from CheckpointableIterator and has no get_state")

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError(f"{type(self).__name__} derives from CheckpointableIterator and has no set_state")
