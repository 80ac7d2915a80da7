"""The local disk: a real folder in memory, and beside it what a loss of power would leave of it.

A file survives as it was when it was last synced, as it is, or in between. A name survives if its folder was synced
after it was made; of the changes of names since then, any subset does (or, as in a journal, the first ones).
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from simulation.cluster import Cluster, Killed, Rank

FIRST_NUMBER = 1_000_000
_numbers = count(FIRST_NUMBER)
"""Descriptors: no history has one of another, whose objects may be finalised late."""


@dataclass(eq=False)
class Node:
    """A file or a folder. ``entries``: of a folder, by name. ``synced``: what is safe of it."""

    entries: dict[str, Node] | None = None
    synced: Any = None

    @staticmethod
    def folder() -> Node:
        return Node({}, {})


@dataclass
class Open:
    """An open file of a process."""

    real: int
    node: Node
    rank: Rank | None
    path: str


Change = tuple[Node, str, Node | None]


@dataclass
class Disk:
    """The folder of a history, with the functions of ``os`` that the library calls."""

    root: Path
    cluster: Cluster
    files: dict[int, Open] = field(default_factory=dict)
    pending: list[list[Change]] = field(default_factory=list)
    """Changes of names that are not safe yet, in order. Those of one operation are safe together."""
    tree: Node = field(default_factory=Node.folder)
    lost: bool = False

    def __post_init__(self) -> None:
        self._prefix = len(str(self.root))
        self.cluster.on_death, self.cluster.on_power_loss = self.close_all, self.lose_power

    # Names

    def _parts(self, path: Any) -> list[str]:
        return [part for part in os.fspath(path)[self._prefix :].split("/") if part]

    def find(self, path: Any) -> Node | None:
        node: Node | None = self.tree
        for part in self._parts(path):
            node = None if node is None or node.entries is None else node.entries.get(part)
        return node

    def _where(self, path: Any) -> tuple[Node, str]:
        *parents, name = self._parts(path)
        folder = self.tree
        for part in parents:
            assert folder.entries is not None
            folder = folder.entries[part]
        return folder, name

    def _change(self, *changes: Change) -> None:
        for folder, name, node in changes:
            assert folder.entries is not None
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        self.pending.append(list(changes))

    def _begin(self, name: str, path: Any, *, reads: bool = False) -> None:
        place = os.fspath(path)[self._prefix + 1 :]
        self.cluster.operation(place.partition("/")[0], f"{name} {place}", reads=reads)

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._begin("mkdir", path)
        os.mkdir(path, mode)
        self._change((*self._where(path), Node.folder()))

    def rename(self, old: Any, new: Any) -> None:
        self._begin("rename", new)
        os.rename(old, new)
        node = self.find(old)
        self._change((*self._where(old), None), (*self._where(new), node))

    replace = rename

    def unlink(self, path: Any) -> None:
        self._begin("unlink", path)
        os.unlink(path)
        self._change((*self._where(path), None))

    def rmdir(self, path: Any) -> None:
        self._begin("rmdir", path)
        os.rmdir(path)
        self._change((*self._where(path), None))

    def rmtree(self, path: Any, ignore_errors: bool = False) -> None:
        try:
            for name in sorted(os.listdir(path)):
                inner = os.path.join(path, name)
                if os.path.isdir(inner):
                    self.rmtree(inner, ignore_errors)
                else:
                    self.unlink(inner)
            self.rmdir(path)
        except OSError:
            if not ignore_errors:
                raise

    def listdir(self, path: Any) -> list[str]:
        self._begin("list", path, reads=True)
        return sorted(os.listdir(path))

    # Files

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        creates = bool(flags & os.O_CREAT)
        self._begin("create" if creates else "open", path, reads=not creates)
        is_new = creates and not os.path.lexists(path)
        readable = (flags & ~os.O_WRONLY) | os.O_RDWR if flags & os.O_WRONLY else flags  # a sync copies the content
        real = os.open(path, readable | os.O_CLOEXEC, mode)
        if is_new:
            self._change((*self._where(path), Node(synced=b"")))
        node = self.find(path)
        assert node is not None, f"{path} was made without the simulated disk"
        return self._keep(real, node, os.fspath(path))

    def _keep(self, real: int, node: Node, path: str) -> int:
        number = next(_numbers)
        self.files[number] = Open(real, node, self.cluster.current, path)
        return number

    def dup(self, number: int) -> int:
        file = self.files[number]
        return self._keep(os.dup(file.real), file.node, file.path)

    def close(self, number: int) -> None:
        if (file := self.files.get(number)) is not None and file.real >= 0:
            os.close(file.real)
            file.real = -1

    def close_all(self, rank: Rank) -> None:
        """Close the files of a process that has died, which releases its locks."""
        for number, file in self.files.items():
            if file.rank is rank:
                self.close(number)

    def _real(self, number: int, name: str, *, reads: bool = False) -> int:
        file = self.files.get(number)
        if file is None or file.real < 0:
            raise Killed if self._is_dead() else OSError(9, "Bad file descriptor")
        self._begin(name, file.path, reads=reads)
        return file.real

    def _is_dead(self) -> bool:
        return (rank := self.cluster.current) is not None and not rank.alive

    def write(self, number: int, data: Any) -> int:
        real = self._real(number, "write")
        half = len(data) if self.cluster.random.random() < 0.8 else max(1, len(data) // 2)
        return os.write(real, data[:half])

    def pwrite(self, number: int, data: Any, offset: int) -> int:
        return os.pwrite(self._real(number, "write"), data, offset)

    def preadv(self, number: int, buffers: Any, offset: int) -> int:
        return os.preadv(self._real(number, "read", reads=True), buffers, offset)

    def fstat(self, number: int) -> os.stat_result:
        return os.fstat(self.files[number].real)

    def ftruncate(self, number: int, size: int) -> None:
        os.ftruncate(self._real(number, "truncate"), size)

    def posix_fallocate(self, number: int, start: int, size: int) -> None:
        os.posix_fallocate(self._real(number, "allocate"), start, size)

    def fsync(self, number: int) -> None:
        real, node = self._real(number, "sync"), self.files[number].node
        if node.entries is None:
            node.synced = os.pread(real, os.fstat(real).st_size, 0)
            return
        left = []
        for change in self.pending:
            if not any(folder is node for folder, _, _ in change):
                left.append(change)
                continue
            for folder, name, inner in change:
                _set(folder.synced, name, inner)
        self.pending = left

    # Other damage

    def rot(self, folder: Path, share: float) -> bool:
        """Change a bit of the step that was saved last, if there are others. Returns False if there are not."""
        sequences = {}
        for path in folder.glob("step_*/manifest.json"):
            with suppress(ValueError):  # changed before
                sequences[json.loads(path.read_bytes())["sequence"]] = path.parent
        if len(sequences) < 2:
            return False
        last = sequences[max(sequences)]
        files = sorted(path for path in last.rglob("*") if path.is_file() and path.stat().st_size)
        place = int(share * sum(path.stat().st_size for path in files))
        for path in files:
            data = bytearray(path.read_bytes())
            if place < len(data):
                data[place] ^= 4
                path.write_bytes(data)
                node = self.find(path)
                assert node is not None
                node.synced = bytes(data)
                return True
            place -= len(data)
        return False

    # A loss of power

    def lose_power(self) -> None:
        """Replace the folder by what survives."""
        self.lost, draw = True, self.cluster.random
        for number in self.files:
            self.close(number)
        in_order = draw.random() < 0.5
        kept = draw.randint(0, len(self.pending))
        for position, change in enumerate(self.pending):
            if position < kept if in_order else draw.random() < 0.5:
                for folder, name, node in change:
                    _set(folder.synced, name, node)
        contents: dict[int, bytes] = {}
        self._read(self.tree, str(self.root), contents)
        shutil.rmtree(self.root)
        self.pending = []
        self.tree = self._rebuild(self.tree, str(self.root), contents)

    def _read(self, node: Node, path: str, contents: dict[int, bytes]) -> None:
        for name, inner in (node.entries or {}).items():
            if inner.entries is None:
                with open(f"{path}/{name}", "rb") as file:
                    contents[id(inner)] = file.read()
            else:
                self._read(inner, f"{path}/{name}", contents)

    def _rebuild(self, node: Node, path: str, contents: dict[int, bytes]) -> Node:
        """Write what survives of a folder, and return it."""
        os.mkdir(path)
        entries: dict[str, Node] = {}
        for name, inner in sorted(node.synced.items()):
            if inner.entries is not None:
                entries[name] = self._rebuild(inner, f"{path}/{name}", contents)
                continue
            data = self._survives(inner.synced, contents.get(id(inner), inner.synced))
            entries[name] = Node(synced=data)
            with open(f"{path}/{name}", "wb") as file:
                file.write(data)
        return Node(entries, dict(entries))

    def _survives(self, synced: bytes, current: bytes) -> bytes:
        """Return a file after the loss: pages of either version, of either length."""
        if synced == current:
            return current
        choice = self.cluster.random.randrange(4)
        if choice < 2:
            return current if choice else synced
        cut = self.cluster.random.randint(0, len(current))
        return current[:cut] + (bytes(len(current) - cut) if choice == 2 else synced[cut:])


def _set(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node
