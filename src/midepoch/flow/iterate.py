"""Iterating a stream in one process: rows one by one, or batches, with a state that follows delivery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from midepoch.flow.chunk import real
from midepoch.flow.lanes import Deal, Lanes, Place
from midepoch.resumable import HasState
from midepoch.transforms import finish, present, present_rows

_FIRST, _MOST = 1, 256


class Owner(Protocol):
    """The stream behind an iterator."""

    def save_at(self, place: Place) -> dict[str, Any]: ...

    def start_at(self, state: Mapping[str, Any]) -> tuple[Place, Lanes]: ...

    def reopen(self, place: Place) -> Lanes: ...

    def epoch_over(self, iterator: Any, place: Place) -> None: ...


class _Iterator(HasState):
    def __init__(self, start: tuple[Place, Lanes], owner: Owner, kind: str) -> None:
        self._owner, self._kind = owner, kind
        self._begin(start)

    def _begin(self, start: tuple[Place, Lanes]) -> None:
        self._start, self._lanes = start
        self._deal: Deal | None = None
        self._given = self._size = 0  # outputs of the deal that were delivered, of how many
        self._ended = self._broken = False  # broken: outputs were taken that did not get as far as to be delivered

    def __iter__(self) -> Any:
        return self

    @property
    def place(self) -> Place:
        """After the last output delivered, and what all shards together get until each has had as many turns.

        It is the same on all shards that have had as many turns, also where the last outputs are fewer than the shards.
        """
        if self._ended:
            return self._lanes.place()
        return self._start if self._deal is None else self._deal.place(self._turns)

    @property
    def _turns(self) -> int | None:
        """Turns of the deal that this shard has had; None: all of them."""
        raise NotImplementedError

    def _take(self, count: int) -> Any:
        """The next outputs of this process, or StopIteration. After an error it begins again after the last one that
        was delivered: those that were taken and not delivered are not lost.
        """
        if self._broken:
            place = self.place
            self._begin((place, self._owner.reopen(place)))
        self._broken = True  # until they are presented
        while True:
            deal = self._lanes.take(count) if not self._ended else None
            if deal is None:
                self._broken = False
                if not self._ended:
                    self._ended = True
                    self._owner.epoch_over(self, self.place)
                raise StopIteration
            self._deal, self._given, self._size = deal, 0, len(deal.items)
            if self._size:
                return real(deal.items)

    def state_dict(self) -> dict[str, Any]:
        """Just behind the last output handed over."""
        return self._owner.save_at(self.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was saved."""
        self._begin(self._owner.start_at(state))


class StreamRows(_Iterator):
    """One output after the other, Stateful in the sense of torchdata."""

    def _begin(self, start: tuple[Place, Lanes]) -> None:
        super()._begin(start)
        self._rows: list[Any] = []
        self._next = _FIRST

    def __next__(self) -> Any:
        if self._broken or self._given >= self._size:
            self._refill()
        row = self._rows[self._given]
        self._given += 1
        return row

    def _refill(self) -> None:
        try:
            self._present(self._next)
        except StopIteration:
            raise
        except Exception:
            if self._next == _FIRST:
                raise
            self._present(_FIRST)  # the good ones before the one that fails come first

    def _present(self, count: int) -> None:
        self._rows = present_rows(self._take(count), self._kind)
        self._next, self._broken = min(2 * count, _MOST), False

    @property
    def _turns(self) -> int | None:
        return self._given


class StreamBatches(_Iterator):
    """Batches of outputs, as columns."""

    def __init__(self, start: tuple[Place, Lanes], owner: Owner, kind: str, count: int, drop_last: bool) -> None:
        self._count, self._drop_last = count, drop_last
        super().__init__(start, owner, kind)

    def __next__(self) -> Any:
        batch = self._take(self._count)
        if self._drop_last and len(batch) < self._count:
            self._given, self._broken = self._size, False  # left out
            batch = self._take(self._count)  # the end: StopIteration
        made = finish(present(batch, self._kind), self._kind)
        self._given, self._broken = self._size, False
        return made

    @property
    def _turns(self) -> int | None:
        return None if self._given else 0  # a batch is the shard's part of a whole deal
