"""Acknowledgements from other processes of the machine, through a socket in a private folder.

A message is the id of a lease and a flag, the answer one byte. The loader's process applies an acknowledgement before
it answers: one that has returned is in every state saved later. The folder is removed at exit. One that a killed
process left behind is never listened at again, and is removed by a later process.
"""

from __future__ import annotations

import atexit
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midepoch._internal.threads import PREFIX
from midepoch.errors import LeaseError

_MESSAGE = struct.Struct("<q?")
_FIRST, _AGAIN, _UNKNOWN = b"1", b"0", b"?"
_SOCKET = "socket"
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
    """Remove folders of processes that were killed: nobody listens there, and they are not new."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _FRESH:
                continue
            with socket.socket(socket.AF_UNIX) as probe:
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
