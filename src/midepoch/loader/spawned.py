"""Sending a pipeline to a process that is no fork, also from a script without ``if __name__ == "__main__"``.

Such a process imports the main script to find the functions defined there, and would run a training script a second
time. With cloudpickle, functions of the script are sent by value, and the import is unnecessary. Without it, the script
is imported only if something in the pipeline is defined there.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from midepoch.iteration.state import unnamed_file

_LARGE = 1 << 20
"""Bytes from which an array is sent in shared memory, once for all workers: the rows of a selection, for example."""

_QUIET = {"TOKENIZERS_PARALLELISM": "false"}
"""Environment variables of workers, unless already set. Tokenizers that the main process has used would otherwise print
a warning in forked workers."""


@contextmanager
def quiet_tokenizers() -> Iterator[None]:
    """Limit tokenizers to one thread while a worker is started."""
    added = {name: value for name, value in _QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@dataclass(frozen=True)
class PackedWorker:
    """The objects of a worker, pickled. ``needs_main``: the main script has to be imported to unpickle them.

    ``arrays``: large arrays, which are not in ``data``.
    """

    data: bytes
    needs_main: bool
    arrays: tuple[memoryview, ...] = ()

    @property
    def _sizes(self) -> list[int]:
        return [array.nbytes for array in self.arrays]

    @contextmanager
    def shared(self) -> Iterator[int | None]:
        """Provide an unnamed file with the arrays while workers are started, or None if there are none."""
        if not self.arrays:
            yield None
            return
        fd = unnamed_file(sum(map(_padded, self._sizes)))
        try:
            with open(fd, "wb", closefd=False) as file:
                for array in self.arrays:
                    file.write(array)
                    file.write(bytes(_padded(array.nbytes) - array.nbytes))
            yield fd
        finally:
            os.close(fd)

    def send(self, connection: Connection, fd: int | None, process: int) -> None:
        """Send the objects and the environment to a worker. Raise OSError if it has exited."""
        # Another thread that starts a worker may delete a variable in the meantime.
        environment = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
        connection.send_bytes(pickle.dumps((self._sizes, _QUIET | environment)))
        if fd is not None:
            send_handle(connection, fd, process)
        connection.send_bytes(self.data)


def _padded(size: int) -> int:
    """Return a size with padding, so that every array begins at a multiple of 64."""
    return -(-size // 64) * 64


def receive(connection: Connection) -> Any:
    """Return the objects that were sent to this worker. Raise EOFError if the main process has exited.

    The environment is replaced by that of the main process. Workers may be forked from a server whose environment is
    older, and lacks, for example, a token that was set later.
    """
    sizes, environment = pickle.loads(connection.recv_bytes())
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    buffers = []
    if sizes:
        fd = recv_handle(connection)
        try:
            # Writes stay in this process: pages that it writes are copied.
            memory = memoryview(mmap.mmap(fd, sum(map(_padded, sizes)), access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
        starts = accumulate(map(_padded, sizes), initial=0)
        buffers = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return pickle.loads(connection.recv_bytes(), buffers=buffers)


def packed(*what: Any) -> PackedWorker:
    """Pickle objects, by value if possible. Raises the errors of pickle."""
    arrays: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        arrays.append(raw)
        return False

    try:
        import cloudpickle
    except ImportError:
        data = pickle.dumps(what, protocol=5, buffer_callback=is_small)
        return PackedWorker(data, b"__main__" in data, tuple(arrays))
    return PackedWorker(cloudpickle.dumps(what, protocol=5, buffer_callback=is_small), False, tuple(arrays))


_USUAL = ("torch", "torchvision", "tokenizers", "transformers", "datasets")


def preload(context: Any, what: PackedWorker) -> None:
    """Let the server from which workers are forked import what they need, once. It has no effect if it is running.

    The server imports the main script unless other modules are set. A choice of the user is kept.
    """
    from multiprocessing.forkserver import _forkserver

    if getattr(_forkserver, "_preload_modules", ["__main__"]) == ["__main__"]:
        used = [name for name in _USUAL if name in sys.modules and name.encode() in what.data]
        context.set_forkserver_preload(["midepoch.loader.workers", "midepoch.loader.workers", *used])


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the main script while a process is started, so that it is not imported there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
