"""A filesystem layer between a process and the kernel, by ptrace: it sees every call that changes a folder, in all
threads and whatever library makes it, can stop the process for ever before the n-th or make it fail, and can tell what
a kill or a power loss at any moment would have left.

Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

_TRACEME, _POKEUSER, _CONT, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 6, 7, 24, 0x4200, 0x420E
_RAX, _ORIG_RAX = 80, 120
"""Places of registers in the memory of a thread that ptrace shows."""
_SYSGOOD, _CLONE, _EXITKILL = 1, 8, 0x100000
_WALL = 0x40000000
_AT_FDCWD = -100

_WRITE, _PWRITE, _WRITEV, _FSYNC, _FDATASYNC, _FTRUNCATE = 1, 18, 20, 74, 75, 77
_OPEN, _OPENAT, _CREAT = 2, 257, 85
_RENAME, _RENAMEAT, _RENAMEAT2 = 82, 264, 316
_MKDIR, _MKDIRAT, _RMDIR, _UNLINK, _UNLINKAT = 83, 258, 84, 87, 263
_OTHERS = {
    40: "sendfile",
    326: "copy_file_range",
    296: "pwritev",
    328: "pwritev2",
    86: "link",
    265: "linkat",
}
_MMAP, _FALLOCATE = 9, 285

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


@dataclass
class Op:
    """One call: what, where, and with which bytes."""

    what: str
    path: str
    to: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Failure:
    """Calls that are not made: so many from the n-th on return an error."""

    first: int
    count: int
    error: int


@dataclass
class Traced:
    """How it went: the calls that came through, and whether the process was stopped or ended by itself."""

    ops: list[Op] = field(default_factory=list)
    killed: bool = False
    code: int | None = None
    calls: int = 0
    """Calls on the folder, also those that failed."""
    refused: int = 0
    """Those that were not made."""


def available() -> str | None:
    """Why this cannot be used here, or None."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "needs Linux on x86-64"
    pid = os.fork()
    if not pid:
        os._exit(0 if libc.ptrace(_TRACEME, 0, None, None) == 0 else 1)
    return None if os.waitpid(pid, 0)[1] == 0 else "ptrace is not allowed here"


def traced(
    action: Callable[[], None], folder: Path, stop_before: int | None = None, failure: Failure | None = None
) -> Traced:
    """Run an action in a fork under the tracer, until its end or before call number ``stop_before`` on the folder.

    The action calls ``begin()`` where tracing shall start. With a ``failure``, mapping a file is a call, too.
    """
    return _Tracer(forked(action), str(folder), stop_before, failure).run()


def forked(action: Callable[[], None]) -> int:
    """A fork that does something and ends, with 1 if that raised."""
    assert threading.active_count() == 1, "a fork of threads"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def begin() -> None:
    """In the traced process: from here on."""
    if libc.ptrace(_TRACEME, 0, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
    os.kill(os.getpid(), signal.SIGSTOP)


class _Tracer:
    def __init__(self, pid: int, folder: str, stop_before: int | None, failure: Failure | None) -> None:
        self._pid, self._folder, self._stop_before, self._failure = pid, folder, stop_before, failure
        self._refused: set[int] = set()  # threads whose call is not made
        self._waiting: dict[int, Op | None] = {}  # by thread: the call it is in
        self._begun = False
        self._count = 0
        self.result = Traced()

    def run(self) -> Traced:
        while True:
            try:
                tid, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return self.result
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                self._waiting.pop(tid, None)
                if tid == self._pid:
                    self.result.code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
                    return self.result
                continue
            if not self._handle(tid, status):
                os.kill(self._pid, signal.SIGKILL)
                self.result.killed = True
                self._reap()
                return self.result

    def _reap(self) -> None:
        while True:
            try:
                tid, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return
            if tid == self._pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                return

    def _handle(self, tid: int, status: int) -> bool:
        """Go on after a stop; False if the process is to be stopped here."""
        number = os.WSTOPSIG(status)
        deliver = 0
        if not self._begun:
            libc.ptrace(_SETOPTIONS, tid, None, _SYSGOOD | _CLONE | _EXITKILL)
            self._begun = True
        elif number == signal.SIGTRAP | 0x80:
            if not self._syscall(tid):
                return False
        elif number not in (signal.SIGTRAP, signal.SIGSTOP):
            deliver = number
        libc.ptrace(_SYSCALL, tid, None, deliver)
        return True

    def _syscall(self, tid: int) -> bool:
        buffer = ctypes.create_string_buffer(88)
        if libc.ptrace(_SYSCALL_INFO, tid, 88, ctypes.addressof(buffer)) < 0:
            return True
        kind = buffer.raw[0]
        if kind == 1:
            number, *arguments = struct.unpack_from("<7Q", buffer.raw, 24)
            op = self._op(tid, number, arguments)
            self._waiting[tid] = op
            if op is not None:
                self._count += 1
                self.result.calls = self._count
                fails = self._failure
                if fails is not None and fails.first <= self._count < fails.first + fails.count:
                    libc.ptrace(_POKEUSER, tid, _ORIG_RAX, -1)
                    self._refused.add(tid)
                return self._count != self._stop_before
        elif kind == 2 and tid in self._refused:
            assert self._failure is not None
            self._refused.discard(tid)
            self._waiting.pop(tid, None)
            self.result.refused += 1
            libc.ptrace(_POKEUSER, tid, _RAX, -self._failure.error)
        elif kind == 2:
            (returned,) = struct.unpack_from("<q", buffer.raw, 24)
            op = self._waiting.pop(tid, None)
            if op is not None and returned >= 0:
                if op.what == "write":
                    op.data = op.data[:returned]
                self.result.ops.append(op)
        return True

    def _op(self, tid: int, number: int, a: list[int]) -> Op | None:
        """The call as an Op, if it changes the folder."""
        op: Op | None = None
        if number in (_WRITE, _PWRITE):
            path = self._of(tid, a[0])
            if path:
                offset = a[3] if number == _PWRITE else self._position(tid, a[0])
                op = Op("write", path, offset=offset, data=self._memory(tid, a[1], a[2]))
        elif number == _WRITEV:
            if path := self._of(tid, a[0]):
                pieces = struct.iter_unpack("<QQ", self._memory(tid, a[1], 16 * a[2]))
                data = b"".join(self._memory(tid, start, size) for start, size in pieces)
                op = Op("write", path, offset=self._position(tid, a[0]), data=data)
        elif number in (_FSYNC, _FDATASYNC):
            op = Op("fsync", self._of(tid, a[0]))
        elif number == _FTRUNCATE:
            op = Op("truncate", self._of(tid, a[0]), offset=a[1])
        elif number in (_OPEN, _OPENAT, _CREAT):
            path, flags = (
                (self._path(tid, a[0], a[1]), a[2]) if number == _OPENAT else (self._path(tid, None, a[0]), a[1])
            )
            creates, truncates = bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC)
            if number == _CREAT or creates or truncates:
                op = Op("create" if not truncates else "create anew", path)
        elif number in (_RENAME, _RENAMEAT, _RENAMEAT2):
            places = (None, a[0], None, a[1]) if number == _RENAME else (a[0], a[1], a[2], a[3])
            op = Op("rename", self._path(tid, *places[:2]), self._path(tid, *places[2:]))
        elif number in (_MKDIR, _MKDIRAT):
            op = Op("mkdir", self._path(tid, None, a[0]) if number == _MKDIR else self._path(tid, a[0], a[1]))
        elif number in (_RMDIR, _UNLINK):
            op = Op("remove", self._path(tid, None, a[0]))
        elif number == _UNLINKAT:
            op = Op("remove", self._path(tid, a[0], a[1]))
        elif number == _FALLOCATE:
            op = Op("allocate", self._of(tid, a[0]), offset=a[2] + a[3])
        elif number == _MMAP and self._failure is not None:
            op = Op("map", self._of(tid, a[4]) if ctypes.c_int(a[4] & 0xFFFFFFFF).value >= 0 else "")
        elif number in _OTHERS and (path := self._of(tid, a[0]) or self._of(tid, a[2])):
            raise AssertionError(f"{_OTHERS[number]} on {path}: the tracer does not know what that does")
        inside = op is not None and any(p == self._folder or p.startswith(self._folder + "/") for p in (op.path, op.to))
        return op if inside else None

    def _of(self, tid: int, fd: int) -> str:
        try:
            return os.readlink(f"/proc/{tid}/fd/{fd}")
        except OSError:
            return ""

    def _path(self, tid: int, base: int | None, address: int) -> str:
        text = self._memory(tid, address, 4096).split(b"\0", 1)[0].decode(errors="replace")
        if text.startswith("/"):
            return os.path.normpath(text)
        base = None if base is not None and ctypes.c_int(base & 0xFFFFFFFF).value == _AT_FDCWD else base
        folder = os.readlink(f"/proc/{tid}/cwd") if base is None else self._of(tid, base)
        return os.path.normpath(os.path.join(folder, text))

    def _position(self, tid: int, fd: int) -> int:
        return int(Path(f"/proc/{tid}/fdinfo/{fd}").read_text().split("pos:")[1].split()[0])

    def _memory(self, tid: int, address: int, size: int) -> bytes:
        """So much of the process's memory, or as much as there is."""
        with open(f"/proc/{tid}/mem", "rb", 0) as memory:
            try:
                memory.seek(address)
                return memory.read(size)
            except OSError:
                memory.seek(address)
                return memory.read(-address % 4096)


class Event(Enum):
    """What ends a process, and which names and bytes outlive it."""

    KILL = ("now", "data")
    POWER = ("kept", "synced")
    POWER_WITH_NAMES = ("now", "synced")  # a file system may keep more than it has to

    def __init__(self, names: str, contents: str) -> None:
        self.names, self.contents = names, contents


class Disk:
    """What a disk holds: what was written, and what of it would outlive the end of a process, or of power."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)
        self._tree: Any = self._durable(folder)

    def _durable(self, path: Path) -> Any:
        if path.is_dir():
            entries = {inner.name: self._durable(inner) for inner in path.iterdir()}
            return {"now": entries, "kept": dict(entries)}
        data = path.read_bytes()
        return {"data": bytearray(data), "synced": data}

    def apply(self, op: Op) -> None:
        if op.what == "mkdir":
            self._set(op.path, {"now": {}, "kept": {}})
        elif op.what.startswith("create"):
            node = self._get(op.path)
            if node is None:
                self._set(op.path, {"data": bytearray(), "synced": b""})
            elif op.what == "create anew":
                del node["data"][:]
        elif op.what == "write":
            node = self._get(op.path)
            data = node["data"]
            data.extend(bytes(max(0, op.offset - len(data))))
            data[op.offset : op.offset + len(op.data)] = op.data
        elif op.what == "truncate":
            node = self._get(op.path)
            del node["data"][op.offset :]
            node["data"].extend(bytes(op.offset - len(node["data"])))
        elif op.what == "allocate":
            data = self._get(op.path)["data"]
            data.extend(bytes(max(0, op.offset - len(data))))
        elif op.what == "fsync":
            node = self._get(op.path)
            if node is not None and "now" in node:
                node["kept"] = dict(node["now"])
            elif node is not None:
                node["synced"] = bytes(node["data"])
        elif op.what == "rename":
            node = self._get(op.path)
            self._remove(op.path)
            self._set(op.to, node)
        elif op.what == "remove":
            self._remove(op.path)

    def left(self, event: Event) -> Any:
        """What is left after it, as a value: equal where the same would be written."""
        return self._value(self._tree, event)

    def write(self, target: Path, event: Event) -> None:
        """Write what is left after it into a folder that is made here."""
        self._write(self._tree, target, event)

    def _value(self, node: Any, event: Event) -> Any:
        if "now" in node:
            return frozenset((name, self._value(inner, event)) for name, inner in node[event.names].items())
        return bytes(node[event.contents])

    def _write(self, node: Any, target: Path, event: Event) -> None:
        if "now" in node:
            target.mkdir()
            for name, inner in node[event.names].items():
                self._write(inner, target / name, event)
        else:
            target.write_bytes(node[event.contents])

    def _parts(self, path: str) -> list[str]:
        assert path == self._root or path.startswith(self._root + "/"), path
        return [part for part in path[len(self._root) :].split("/") if part]

    def _get(self, path: str) -> Any:
        node = self._tree
        for part in self._parts(path):
            if node is None or "now" not in node:
                return None
            node = node["now"].get(part)
        return node

    def _set(self, path: str, node: Any) -> None:
        *folders, name = self._parts(path)
        parent = self._get("/".join([self._root, *folders]))
        parent["now"][name] = node

    def _remove(self, path: str) -> None:
        *folders, name = self._parts(path)
        parent = self._get("/".join([self._root, *folders]))
        parent["now"].pop(name, None)
