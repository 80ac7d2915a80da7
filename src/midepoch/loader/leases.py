"""Leases: batches in flight, delivered and not acknowledged yet.

*Lease*: one batch, with a number. *Tracker*: the leases of one pass: which steps were delivered, and which of them are
acknowledged. *LeaseBook*: the leases of a loader, over all passes. The state of a loader with leases is the oldest step
that is not acknowledged, and the later ones that are.

``ack`` may be called by any thread, and by a signal handler. It takes no lock: appending to the entry of the step in
``out`` decides which of several calls is the first. Its verdict is noted in ``inbox``. ``settle`` does the rest.
"""

from __future__ import annotations

import atexit
import errno
import os
import secrets
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midepoch._internal.hints import hinted_methods, no_attribute, warn_once
from midepoch._internal.processes import PREFIX
from midepoch.audit.ledger import Ledger
from midepoch.errors import LeaseError
from midepoch.loader.plans import Frontier, LeasedLanes, LeasedSteps, Taken
from midepoch.order import Shard
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Share
from midepoch.pipeline.plans import StepPlan
from midepoch.state.format import Leased

_MESSAGE = struct.Struct("<q?")
_FIRST, _AGAIN, _UNKNOWN = b"1", b"0", b"?"
_SOCKET = "socket"
_TIMEVAL = struct.Struct("@ll")

DEADLINE = 60.0
"""Seconds in which the process of a loader has to answer."""

_LONGEST_PATH = 100
"""Bytes of the address of a socket, of which systems allow 104 or 108."""

_FRESH = 60.0
"""Seconds in which a folder may belong to a process that is about to listen there."""

Ack = Callable[[int, bool], bool]


class Channel:
    """The socket of one loader. ``ack`` is called in its thread, and raises ValueError for an unknown lease."""

    def __init__(self, ack: Ack) -> None:
        self._ack, self._owner, self._closed = ack, os.getpid(), False
        prefix = f"midepoch-leases-{os.getuid()}-"
        parent = next((path for path in (tempfile.gettempdir(), "/tmp") if len(path) + 45 < _LONGEST_PATH), "/tmp")
        _remove_stale(Path(parent), prefix)
        self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # only this user may enter it
        self.address = str(self._folder / _SOCKET)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(128)
        self._listener.setblocking(False)
        atexit.register(self.close)
        threading.Thread(target=self._serve, name=f"{PREFIX}leases", daemon=True).start()

    def close(self) -> None:
        """Stop the thread, and remove the folder. A fork leaves that to its parent."""
        if self._owner != os.getpid() or self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as wake:
            wake.setblocking(False)
            wake.connect(self.address)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            unread: dict[int, bytes] = {}
            while not self._closed:
                for key, _ in selector.select():
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is self._listener:
                        with suppress(OSError):
                            accepted, _ = connection.accept()
                            accepted.setblocking(False)  # a process that reads no answers must not stop the thread
                            selector.register(accepted, selectors.EVENT_READ)
                    elif not self._answer(connection, unread):
                        unread.pop(connection.fileno(), None)
                        selector.unregister(connection)
                        connection.close()
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()

    def _answer(self, connection: socket.socket, unread: dict[int, bytes]) -> bool:
        """Apply the messages that have come. Return False if the other side has closed the connection."""
        try:
            received = connection.recv(65536)
            if not received:
                return False
            data = unread.pop(connection.fileno(), b"") + received
            whole = len(data) // _MESSAGE.size * _MESSAGE.size
            if data[whole:]:
                unread[connection.fileno()] = data[whole:]
            connection.sendall(b"".join(self._apply(*message) for message in _MESSAGE.iter_unpack(data[:whole])))
        except OSError:
            return False
        return True

    def _apply(self, number: int, rejected: bool) -> bytes:
        try:
            return _FIRST if self._ack(number, rejected) else _AGAIN
        except ValueError:
            return _UNKNOWN


def _remove_stale(parent: Path, prefix: str) -> None:
    """Remove folders of killed processes of this user: nobody listens there, and they are not new."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _FRESH:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(str(folder / _SOCKET))
                except (ConnectionRefusedError, FileNotFoundError):
                    shutil.rmtree(folder, ignore_errors=True)


class _Connections(threading.local):
    """The connections of each thread to loaders, by process and address. They are closed with the thread."""

    def __init__(self) -> None:
        self.open = _Sockets()


class _Sockets(dict[tuple[int, str], socket.socket]):
    def __del__(self) -> None:
        for connection in self.values():
            connection.close()


_connections = _Connections()


@contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    """Yield the connection of this thread to a loader. It is closed after an error."""
    key = (os.getpid(), address)
    connection = _connections.open.pop(key, None)
    if connection is None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            if Path(address).parent.lstat().st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "its socket belongs to another user")
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # settimeout has no effect on connect
                connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(DEADLINE), int(DEADLINE % 1 * 1e6)))
            connection.connect(address)
        except OSError:
            connection.close()
            raise
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    _connections.open[key] = connection


def acknowledge(address: str, number: int, rejected: bool) -> bool:
    """Acknowledge a lease of another process, and wait until it is noted there."""
    try:
        with _connected(address) as connection:
            connection.sendall(_MESSAGE.pack(number, rejected))
            answer = connection.recv(1)
            if not answer:
                raise ConnectionResetError("closed")
    except BlockingIOError:
        raise LeaseError(
            f"lease {number} was not acknowledged: the process of its loader did not answer within {DEADLINE:g} s. "
            "Continue that process if it is stopped, and acknowledge the lease again."
        ) from None
    except OSError as problem:
        raise LeaseError(
            f"lease {number} cannot be acknowledged: the process of its loader has exited, or is not on this machine "
            f"({problem.strerror or problem}). Its batch is delivered again after a resume. From another machine, send "
            "lease.id to the loader's process, and call loader.ack(id) there."
        ) from None
    if answer == _UNKNOWN:
        raise ValueError(
            f"lease {number} is unknown: it was taken before a state was loaded or the position was set. Discard it."
        )
    return answer == _FIRST


MOST_NOTED = 256
"""Acknowledgements after which the next lease settles them: each holds the outputs of its step until then."""

_books: weakref.WeakSet[LeaseBook] = weakref.WeakSet()


@hinted_methods({}, only=("ack", "reject"))
class Lease:
    """A batch that counts as consumed when it is acknowledged. ``id``: its number, unique in the run.

    A lease can be pickled, without its batch, and acknowledged in another process of the same machine.
    """

    __slots__ = ("_owner", "batch", "id")

    def __init__(self, number: int, batch: Any, owner: LeaseBook | Remote) -> None:
        self.id, self.batch, self._owner = number, batch, owner

    def ack(self) -> bool:
        """Acknowledge the batch: it is never delivered again. Return False if it was acknowledged before."""
        return self._owner.ack(self.id, False)

    def reject(self) -> bool:
        """Acknowledge the batch as rejected, as by dynamic filtering. It is never delivered again."""
        return self._owner.ack(self.id, True)

    if not TYPE_CHECKING:  # a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("a lease", name, ("ack", "reject", "batch", "id"), {})

        def __getitem__(self, key: Any) -> None:
            raise TypeError(f"a lease is not its batch. Use lease.batch[{key!r:.60}].")

    def __repr__(self) -> str:
        return f"Lease({self.id})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _remote_lease, (self.id, self._owner.address())


class Remote:
    """The leases of a loader in another process of this machine."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ack(self, number: int, rejected: bool) -> bool:
        """Acknowledge a lease. It is in every state that the loader saves after this has returned."""
        return acknowledge(self._address, number, rejected)

    def address(self) -> str:
        """Return the address of the loader."""
        return self._address


def _remote_lease(number: int, address: str) -> Lease:
    return Lease(number, None, Remote(address))


class Tracker:
    """The leases of a pass on one rank.

    ``first``: the id of the lease of step 0. ``out``: steps that were delivered and are not acknowledged. Each has the
    cursor after it, and then the verdicts of calls in progress. ``acked``: steps that are acknowledged, without those
    in ``inbox``.
    """

    def __init__(self, first: int, plan: StepPlan | None, start: Cursor, taken: Taken, ledger: Ledger | None) -> None:
        self.first, self.plan, self.start, self._taken, self._ledger = first, plan, start, taken, ledger
        self.out: dict[int, list[Any]] = {}
        self.inbox: dict[int, tuple[Any, bool]] = {}
        self.acked = EMPTY
        self.delivered = 0
        """Steps delivered so far, of the plan of the pass."""
        self.last: Any = start
        """The cursor after the last of them."""
        self.returned: set[int] = set()
        """Steps that were given back when a block was left, and not delivered again yet."""
        self.ended = False
        """True if the pass has no more steps."""
        self._lock = threading.RLock()

    @property
    def steps(self) -> int:
        """Steps of the run that are delivered."""
        return self.start.steps + self.delivered

    @property
    def held(self) -> int:
        """The number of leases that are out, without those that were returned."""
        return len(self.out) - len(self.returned)

    @property
    def complete(self) -> bool:
        """True if the pass is over and everything is acknowledged."""
        return self.ended and not self.out

    def add(self, step: int, cursor: Any) -> None:
        """Note that a step is delivered, and the cursor after it."""
        self.out[step] = [cursor]
        self.last, self.delivered = cursor, step + 1

    def pass_over(self, step: int, cursor: Any) -> None:
        """Note a step without a batch: all of its rows were skipped."""
        self.last, self.delivered = cursor, step + 1
        self.inbox[step] = (cursor, False)

    def ack(self, step: int, rejected: bool) -> bool:
        """Acknowledge a step. Return False if it is not out, or if another call was first."""
        entry = self.out.get(step)
        if entry is None:
            return False
        verdict = (entry[0], rejected)
        entry.append(verdict)
        # Every call completes the first one, which may have been interrupted. The step is noted before it leaves
        # ``out``: a state always finds it in one of them.
        self.inbox[step] = entry[1]
        if self.returned:
            self.returned.discard(step)
        self.out.pop(step, None)
        return entry[1] is verdict

    def settle(self) -> None:
        """Add what was acknowledged to ``acked``, and record it in the ledger.

        A signal handler may save a state while this method runs. So a step is recorded before it is in ``acked``, and
        is in ``acked`` before it leaves the inbox. ``acked`` is replaced only if it did not change meanwhile. A second
        call is harmless.
        """
        with self._lock:
            noted = dict(self.inbox)
            if not noted:
                return
            numbers = np.fromiter(noted, np.int64, len(noted))
            fresh = numbers[~self.acked.contains(numbers)]  # a call that was late notes a step again
            for rejected in (False, True):
                steps = {step: noted[step][0] for step in fresh.tolist() if noted[step][1] is rejected}
                units = self._taken.add(steps, recorded=self._ledger is not None) if steps else {}
                if steps and self._ledger is not None:
                    self._ledger.acknowledged(Intervals.from_positions(steps), units, rejected=rejected)
            while True:
                before = self.acked
                after = before.union(Intervals.from_positions(fresh))
                if self.acked is before:
                    self.acked = after
                    break
            for step in noted:
                self.inbox.pop(step, None)

    def frontier(self) -> Frontier:
        """Return the progress, with all acknowledgements that came before this call."""
        with self._lock:
            while True:
                self.settle()
                oldest = self.acked.after(0)
                over = oldest == self.delivered
                entry = [self.last] if over else self.out.get(oldest)
                if entry is not None:
                    return Frontier(self.acked, oldest, entry[0], over, over and self.ended)
                # Acknowledged a moment ago, by another thread.

    def cursor(self, *, alone: bool) -> tuple[Cursor, Leased | None]:
        """Return the cursor of a state, and what is added to it on one rank of several."""
        return self._taken.saved(self.frontier(), alone=alone)


class LeaseBook:
    """The leases of a loader. Ids are consecutive, from a random number on: ids of other runs are unknown here."""

    def __init__(self) -> None:
        self.tracker: Tracker | None = None
        self.open = False
        """True while a ``with`` block of ``lease()`` is open."""
        self._next = secrets.randbits(30) << 32
        self._past: list[range] = []  # of complete passes
        self._channel: Channel | None = None
        self._inherited: tuple[Tracker | None, Channel | None] = (None, None)  # of the process that was forked
        self.wake: threading.Event | None = None
        """Set by the next acknowledgement, if a thread waits for it."""
        _books.add(self)

    def begin(self, plan: StepPlan | None, start: Cursor, shard: Shard, share: Share, ledger: Ledger | None) -> Tracker:
        """Begin the leases of a pass. ``share``: of the lanes, if it has no plan."""
        self.drop()
        taken: Taken = LeasedLanes(start, shard, share) if plan is None else LeasedSteps(plan, start, shard)
        self.tracker = Tracker(self._next, plan, start, taken, ledger)
        return self.tracker

    def drop(self) -> None:
        """Forget the leases of the last pass: it is complete, or the position of the run has changed."""
        if self.tracker is not None:
            self.tracker.settle()  # so that the ledger has the last acknowledgements before another pass begins
        tracker, self.tracker = self.tracker, None
        if tracker is not None:
            self._next = tracker.first + tracker.delivered
            if tracker.complete and tracker.delivered:
                self._past.append(range(tracker.first, self._next))

    def ack(self, number: int, rejected: bool) -> bool:
        """Acknowledge a lease by its id. Return False if it was acknowledged before."""
        tracker = self.tracker
        if tracker is not None and tracker is self._inherited[0]:
            return acknowledge(self._parent_address(), number, rejected)
        if tracker is None or not tracker.ack(number - tracker.first, rejected):
            return self._late(number, tracker)
        if self.wake is not None:
            self.wake.set()
        return True

    def _late(self, number: int, tracker: Tracker | None) -> bool:
        if tracker is not None and tracker.first <= number < tracker.first + tracker.delivered:
            return False
        if any(number in past for past in self._past):
            return False
        raise ValueError(
            f"lease {number} is unknown: it belongs to another loader, or was taken before a state was loaded or the "
            "position was set. Discard it: its batch is delivered again unless it was acknowledged before that."
        )

    def _parent_address(self) -> str:
        channel = self._inherited[1]
        if channel is None:
            raise ValueError(
                "this process was forked before the first lease, so it cannot acknowledge any. Take a lease before you "
                "fork, or call ack in the process of the loader."
            )
        return channel.address

    def address(self) -> str:
        """Return the address under which other processes of this machine acknowledge."""
        if self.tracker is not None and self.tracker is self._inherited[0]:
            return self._parent_address()
        if self._channel is None:
            self._channel = Channel(_answer(weakref.ref(self)))
            weakref.finalize(self, self._channel.close)
        return self._channel.address

    @property
    def is_shared(self) -> bool:
        """True if other processes may acknowledge."""
        return self._channel is not None

    def forked(self) -> None:
        """Note that this is a copy in a forked process. What is out belongs to the parent."""
        self._inherited, self._channel = (self.tracker, self._channel), None


def _answer(book: weakref.ref[LeaseBook]) -> Callable[[int, bool], bool]:
    def ack(number: int, rejected: bool) -> bool:
        owner = book()
        if owner is None:
            raise ValueError(
                f"the loader of lease {number} no longer exists. Keep the loader until all leases are acknowledged."
            )
        return owner.ack(number, rejected)

    return ack


def _before_fork() -> None:
    """Open the channel of loaders with leases out: a forked process inherits them without pickling any."""
    for book in list(_books):
        if book.tracker is not None and book.tracker.out:
            book.address()


def _after_fork() -> None:
    for book in list(_books):
        book.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


_QUIET = 30.0
"""Seconds after which waiting for an acknowledgement is announced, once: a step of training may take as long."""


class Waiting:
    """Waiting for acknowledgements, until a condition holds."""

    def __init__(self, book: LeaseBook, what: str, timeout: float | None) -> None:
        self._book, self._what, self._timeout = book, what, timeout

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait. Raises TimeoutError after the timeout, and RuntimeError if nothing could acknowledge."""
        if reached():
            return
        began = time.monotonic()
        wake = threading.Event()
        try:
            self._book.wake = wake
            while not reached():
                if not self._book.is_shared and not _has_other_threads():
                    raise RuntimeError(
                        f"{self._what}, this is the only thread, and no other process has a lease: none could be "
                        "acknowledged. Acknowledge leases before this call, or in another thread or process."
                    )
                left = None if self._timeout is None else began + self._timeout - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"{self._what}, after {self._timeout:g} s of waiting. Raise timeout, or check that leases "
                        "are acknowledged."
                    )
                if time.monotonic() > began + _QUIET:
                    warn_once("%s: waiting until one is acknowledged by lease.ack().", self._what)
                wake.wait(1.0 if left is None else min(left, 1.0))
                wake.clear()
        finally:
            self._book.wake = None


def _has_other_threads() -> bool:
    """Return True if a thread of the program may acknowledge. Those that read for a loader do not."""
    here = threading.current_thread()
    return any(one is not here and not one.name.startswith("midepoch-") for one in threading.enumerate())
