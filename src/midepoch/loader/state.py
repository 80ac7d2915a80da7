"""The progress of a loader between two calls, and the transitions that change it. Pure functions.

A loader keeps one ``RunState`` and replaces it in one store, so that a signal handler that saves never sees a part of a
change. Its kind says how the run came there::

    NEW ──begin/deliver──► OPEN ──finish──► OVER ──deliver──► OPEN …
                             │
                             └──leave──► LOOKED (one batch) or LEFT ──deliver──► OPEN
    any ──load──► LOADED      any ──choose──► CHOSEN (set_epoch)      any ──edit──► the same kind
    OPEN ──pause──► LOADED (close between two calls of next)

``at`` is what ``state_dict`` saves: the place after the last batch delivered. ``next`` is where the next pass begins.
They differ at the end of an epoch (the state is that after its last batch, and the next pass is the next epoch), and
after a look.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.plans import Delivered, resolved
from midepoch.pipeline.spec import PipelineSpec


class Kind(Enum):
    """The way in which a run came to its place."""

    NEW = auto()
    LOADED = auto()
    OPEN = auto()
    LOOKED = auto()
    LEFT = auto()
    OVER = auto()
    CHOSEN = auto()


class RunState(NamedTuple):
    """Everything a loader remembers between two calls.

    ``loaded``: where a loaded state left off, until more than a look follows. ``set_epoch`` of its epoch resumes there.
    """

    spec: PipelineSpec
    at: Delivered
    next: Cursor
    kind: Kind = Kind.NEW
    loaded: Cursor | None = None

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last batch delivered, or at which the run begins."""
        return resolved(self.at)


class Start(NamedTuple):
    """The start of a pass.

    ``rolled``: it is in the epoch after that of the state. ``restart``: where it begins instead if the epoch has
    batches left, which is not always known before. ``chosen``: the epoch was chosen, so that an empty pass is right.
    ``left``: the pass before was left in this process, and may have been at its end.
    """

    cursor: Cursor
    rolled: bool = False
    restart: Cursor | None = None
    chosen: bool = False
    left: bool = False
    looked: bool = False
    """True if that was only a look at its first batch."""


def new(spec: PipelineSpec, cursor: Cursor, *, chosen: bool) -> RunState:
    """Return the state of a new loader. ``chosen``: the epoch of its dataset was set."""
    if cursor.begun:  # of a state that was loaded into the dataset
        return RunState(spec, cursor, cursor, Kind.CHOSEN if chosen else Kind.LOADED, cursor)
    return RunState(spec, cursor, cursor, Kind.CHOSEN if chosen else Kind.NEW)


def was_left(state: RunState) -> bool:
    """Return True if a pass was left before its end."""
    return state.kind in (Kind.OPEN, Kind.LEFT, Kind.LOOKED)


def begin(state: RunState, *, over: bool, shuffled: bool) -> Start:
    """Return where the next pass begins. ``over``: nothing is left of the epoch of its place, as far as it is known."""
    left = was_left(state)
    chosen = state.kind is Kind.CHOSEN
    cursor = state.cursor if left else state.next
    if over and not chosen:  # after the last batch, continuing means the next epoch, not an empty one
        return Start(cursor.next_epoch(), rolled=True, left=left)
    restart = None
    if state.kind is Kind.LOOKED:
        restart = state.next
    elif left and not shuffled:
        restart = Cursor.start(cursor.epoch, cursor.steps)
    return Start(cursor, restart=restart, chosen=chosen, left=left, looked=state.kind is Kind.LOOKED)


def opened(state: RunState, cursor: Cursor) -> RunState:
    """Return the state when a pass begins at a cursor. Nothing is delivered yet."""
    kind = Kind.CHOSEN if state.kind is Kind.CHOSEN else Kind.LOADED if state.kind is Kind.LOADED else Kind.NEW
    loaded = state.loaded
    past = loaded is not None and state.kind is Kind.OVER and loaded.epoch != cursor.epoch
    return RunState(state.spec, cursor, cursor, kind, None if past or state.kind is Kind.LEFT else loaded)


def deliver(state: RunState, at: Delivered, start: Cursor) -> RunState:
    """Return the state after a batch of the pass that began at ``start``, unless an epoch was chosen since then."""
    spec, _, next_, _, loaded = state
    kind = Kind.OPEN if next_ is start else Kind.CHOSEN
    return tuple.__new__(RunState, (spec, at, next_, kind, loaded))  # for every batch: half the time of RunState(…)


def leave(state: RunState, start: Cursor, *, looked: bool) -> RunState:
    """Return the state after a pass was left before its end. ``looked``: after its first batch, which was a look."""
    if looked:
        return state._replace(next=start, kind=Kind.LOOKED)
    return state._replace(kind=Kind.LEFT, loaded=None)


def pause(state: RunState) -> RunState:
    """Return the state after ``close()`` between two calls of ``next()``: the next pass continues."""
    return state._replace(next=state.cursor, kind=Kind.LOADED, loaded=None) if was_left(state) else state


def finish(state: RunState, end: Cursor, *, rolled: bool, looked: bool = False) -> RunState:
    """Return the state at the end of an epoch. ``looked``: by a look at its last batch, or by one that found none.

    Until the next epoch is chosen or begun, the place is that after the last batch: choosing the finished epoch after a
    resume, as a loop that saves its own epoch number does, repeats nothing. An epoch that was rolled over to is
    remembered, so that choosing it does not repeat it.
    """
    if state.next.epoch != end.epoch:  # another one was chosen while this one was iterated
        return RunState(state.spec, state.next, state.next, Kind.CHOSEN, state.loaded)
    next_ = end if rolled else end.next_epoch()
    at: Delivered = end if end.position else next_
    return RunState(state.spec, at, next_, Kind.OVER, state.loaded if looked else end if rolled else None)


def choose(state: RunState, epoch: int, *, batches: int) -> RunState:
    """Return the state after ``set_epoch``. ``batches``: delivered in the pass in progress, or that was left."""
    loaded = None if state.kind is Kind.LEFT or batches > 1 else state.loaded
    cursor = state.cursor
    looked = state.kind is Kind.LOOKED or (state.kind is Kind.OPEN and batches == 1)
    chosen = Cursor.start(epoch, state.next.steps if looked else cursor.steps)
    if loaded is not None and loaded.epoch == epoch:
        chosen = loaded
    keeps = state.kind in (Kind.OPEN, Kind.OVER) and cursor.epoch == epoch == state.next.epoch
    return RunState(state.spec, state.at if keeps else chosen, chosen, Kind.CHOSEN, loaded)


def load(spec: PipelineSpec, cursor: Cursor) -> RunState:
    """Return the state after a state was loaded."""
    return RunState(spec, cursor, cursor, Kind.LOADED, cursor)


def edit(state: RunState, spec: PipelineSpec, cursor: Cursor, *, is_open: bool) -> RunState:
    """Return the state with another pipeline, or other units to deliver, from the next batch on.

    ``is_open``: a pass is in progress, and continues at the cursor. Else ``set_epoch`` of its epoch keeps the edit.
    """
    loaded = state.loaded
    same = loaded is not None and loaded.epoch == cursor.epoch and loaded.position == cursor.position
    if same or not (is_open or was_left(state)):
        loaded = cursor
    if is_open and state.kind is Kind.OPEN:
        return RunState(spec, cursor, state.next, Kind.OPEN, loaded)
    kind = state.kind if state.kind in (Kind.NEW, Kind.LOADED, Kind.CHOSEN) else Kind.LOADED
    return RunState(spec, cursor, cursor, kind, loaded)
