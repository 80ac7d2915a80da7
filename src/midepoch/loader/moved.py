"""Batches on their way to a device or into page-locked memory: the next ones are sent before they are asked for."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from midepoch.loader.plans import BatchSource, Made
from midepoch.transforms import finish


class Mover(Protocol):
    """Moves batches, in order. ``depth``: batches that are under way beside the one that is delivered."""

    depth: int

    def send(self, value: Any) -> Any:
        """Begin to move a batch, and return a ticket for it."""

    def receive(self, ticket: Any) -> Any:
        """Return the batch of a ticket, ready for use in the caller's stream."""

    def close(self) -> None:
        """Wait for what is under way, and drop it."""


class MovedBatches:
    """The batches of a source, moved ahead of delivery. The cursor of each stays with it.

    The source is asked in the caller's thread, where functions of the user may run. Workers are asked for a batch ahead
    if it has arrived. Any other source makes it now instead of later. ``in_step``: the batches ahead do not depend on
    the time, because ranks wait for each other in the source.
    """

    def __init__(self, source: BatchSource, mover: Mover, kind: str, *, in_step: bool) -> None:
        self.source, self._mover, self._kind = source, mover, kind
        self._waits = in_step or not hasattr(source, "is_ready")
        self._depth = 1 if self._waits else mover.depth
        self._under_way: deque[tuple[Made | None, Any]] = deque()
        self._failure: Exception | None = None
        self._over = self._begun = False

    def next(self) -> Made | None:
        """Return the next batch and the cursor after it, or None at the end. Raises the errors of making it."""
        if not self._under_way:
            self._look_ahead()
        taken = self._under_way.popleft() if self._under_way else None
        while taken is not None and self._begun and len(self._under_way) < self._depth and self._may_ask():
            self._look_ahead()
        self._begun = True
        if taken is None:
            if self._failure is not None:
                raise self._failure
            return None
        made, ticket = taken
        return made if made is None or made.empty else made._replace(value=self._mover.receive(ticket))

    def _may_ask(self) -> bool:
        return not self._over and (self._waits or bool(self.source.is_ready))  # type: ignore[attr-defined]

    def _look_ahead(self) -> None:
        """Ask for the next batch, and send it. An error is raised in its turn, after the batches before it."""
        if self._over:
            return
        try:
            made = self.source.next()
            if made is None:
                self._over = True
            else:
                ticket = None if made.empty else self._mover.send(finish(made.value, self._kind))
                self._under_way.append((made._replace(value=None), ticket))
        except Exception as problem:
            self._over, self._failure = True, problem

    def close(self) -> bool:
        """Stop. Return True if none of its threads and workers is still running."""
        self._under_way.clear()
        self._mover.close()
        return self.source.close()
