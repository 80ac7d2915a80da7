"""Modules that the library imports, replaced by the simulated disk, stores, clock and processes."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent

from midepoch.audit import journal, ledger, orders
from midepoch.checkpoint import background, local, manager, manifest, remote, rendezvous, restoring, saving, store
from midepoch.distributed import keyvalue
from midepoch.loader import lanes, meter, passes, workers
from midepoch.order.epoch import EpochOrder, Order, SourceLayout
from midepoch.order.selection import Selection
from midepoch.pipeline import rows
from midepoch.pipeline.engine import Engine
from midepoch.transforms import generators
from midepoch.transforms.batch import Batch
from simulation.cluster import Cluster, Task
from simulation.disk import FIRST_NUMBER, Disk
from simulation.store import Bucket, KeyValues, objects_of
from simulation.workers import SimulatedCrew


class Site:
    """The simulated parts of the history that runs."""

    cluster: Cluster
    disk: Disk
    bucket: Bucket
    values: KeyValues | None = None
    """None if the ranks of the start are not connected."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        """Errors that the library has logged in this start."""

    def begin_start(self, connected: bool) -> None:
        """Forget what the processes before had in memory."""
        self.complaints.clear()
        self.values = KeyValues() if connected else None
        manager._rendezvous.clear()
        background._unfinished.clear()
        ledger._latest.clear()
        ledger._branches.clear()
        ledger._births.clear()
        rendezvous._process_started = self.cluster.time()

    def pid(self) -> int:
        """Return the number of the running process. A dead one has none: it owns nothing any more."""
        rank = self.cluster.current
        return 1 if rank is None else rank.pid if rank.alive else -1

    def started(self, pid: int) -> str:
        """Return the time at which a living process was started, as text."""
        alive = pid == 1 or any(rank.pid == pid and rank.alive for rank in self.cluster.ranks)
        return f"started {pid}" if alive else ""


class Module:
    """A module in which some names are replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(vars(module), **names)


_OF_DISK = [
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "listdir",
    "open",
    "dup",
    "close",
    "write",
    "pwrite",
    "preadv",
    "fstat",
    "ftruncate",
    "posix_fallocate",
    "fsync",
]


def _modules(site: Site) -> dict[str, Any]:
    def of_disk(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            given = arguments[0]
            is_real = isinstance(given, int) and given < FIRST_NUMBER  # of a temporary file without a name
            return getattr(os if is_real else site.disk, name)(*arguments, **options)

        return call

    def flock(number: int, flags: int) -> None:
        file = site.disk.files.get(number)
        if file is not None and file.real >= 0:
            fcntl.flock(file.real, flags)

    clock = Module(
        time,
        time=lambda: site.cluster.time(),
        monotonic=lambda: site.cluster.now(),
        perf_counter=lambda: site.cluster.now(),
        sleep=lambda seconds: site.cluster.sleep(seconds),
    )
    return {
        "os": Module(os, getpid=site.pid, **{name: of_disk(name) for name in _OF_DISK}),
        "shutil": Module(shutil, rmtree=of_disk("rmtree")),
        "fcntl": Module(fcntl, flock=flock),
        "mmap": Module(mmap, mmap=lambda number, size, offset=0: Pages(site, number, size, offset)),
        "time": clock,
        "perf_counter": clock.perf_counter,
        "threading": Module(
            threading,
            Thread=lambda target, name: Thread(site, target),
            Lock=lambda: Lock(site),
            get_ident=lambda: id(getcurrent()),
        ),
        "secrets": Module(secrets, token_hex=lambda size=8: site.cluster.token(size)),
        "Path": _path_class(site),
    }


_REPLACED: dict[Any, str] = {
    background: "threading",
    local: "os fcntl secrets shutil time Path",
    store: "os",
    rendezvous: "time secrets",
    remote: "time",
    saving: "time secrets",
    restoring: "secrets",
    manager: "time",
    manifest: "time",
    ledger: "os time secrets Path",
    journal: "os mmap",
    passes: "perf_counter",
    meter: "perf_counter",
    workers: "time",
    orders: "os secrets",
    keyvalue: "time secrets",
}


class _PassNumbers:
    """The passes of each process, counted from 1."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def __next__(self) -> int:
        rank = self._site.cluster.current
        if rank is None:
            return 1
        rank.passes += 1
        return rank.passes


class _Counters:
    """Counters of each process."""

    def __init__(self, site: Site, name: str) -> None:
        self._site, self._name = site, name

    def next(self, key: str) -> int:
        rank = self._site.cluster.current
        counts = Counter[str]() if rank is None else rank.made
        counts[f"{self._name} {key}"] = counts.get(f"{self._name} {key}", 0) + 1
        return counts[f"{self._name} {key}"]


def _read_once(read: Callable[[Engine, Any], Batch]) -> Callable[[Engine, Any], Batch]:
    """Return a function that reads the same rows of a source once. No fault reaches the data, which never changes."""
    known: dict[Any, Batch] = {}

    def call(engine: Engine, rows: Any) -> Batch:
        leaf = engine.leaf
        key = (leaf.source, leaf.order.selection, leaf.order.shuffle, *leaf.head.items(), rows.tobytes())
        if key not in known:
            known[key] = read(engine, rows)
        return known[key]

    return call


@lru_cache(maxsize=1000)
def _order_at(selection: Selection, shuffle: Any, lanes: int, epoch: int, layout: SourceLayout) -> EpochOrder:
    """Return the order of an epoch, which is a value."""
    return EpochOrder(Order(selection, shuffle, lanes), epoch, layout)


@contextmanager
def installed(site: Site) -> Iterator[Site]:
    """Replace the modules, for any number of histories."""
    modules = _modules(site)
    group = SimpleNamespace(
        get_world_size=lambda: len(site.cluster.ranks),
        get_rank=lambda: site.cluster.current.number,  # type: ignore[union-attr]
    )
    changes = [(module, name, modules[name]) for module, names in _REPLACED.items() for name in names.split()]
    changes += [
        (store, "started", site.started),
        (store, "machine", lambda: "machine"),
        (remote, "Objects", objects_of(lambda: site.bucket)),
        (ledger, "machine", lambda: ""),
        (journal, "counters_in", Counters),
        (ledger, "_numbers", _PassNumbers(site)),
        (keyvalue, "process_group", lambda: None if site.values is None else group),
        (keyvalue, "_store", lambda: site.values),
        (workers, "cores", lambda: 2),
        (rows, "_FIRST", 4),  # an epoch has several bundles
        (generators, "_TRIAL", 2),  # as above: a function is called with and without checks
        (Engine, "read", _read_once(Engine.read)),
        (Order, "at", lambda one, *epoch: _order_at(one.selection, one.shuffle, one.lanes, *epoch)),
        (workers, "open_crew", lambda job: SimulatedCrew(site.cluster, job, job.options.num_workers)),
        (lanes, "_made", _Counters(site, "made")),
        (lanes, "_loaders", _Counters(site, "loaders")),
        (keyvalue, "_draws", _Counters(site, "draws")),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield site
    finally:
        gc.collect()  # finalizers close descriptors of the simulated disk
        for module, name, value in before:
            setattr(module, name, value)


class Thread:
    """A thread of the process that runs."""

    def __init__(self, site: Site, target: Callable[[], None]) -> None:
        self._site, self._target = site, target

    def start(self) -> None:
        rank = self._site.cluster.current
        assert rank is not None
        self._site.cluster.begin(rank, self._target)


class Lock:
    """A lock for which other threads wait."""

    def __init__(self, site: Site) -> None:
        self._site, self._held, self._waiting = site, False, list[Task]()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        cluster = self._site.cluster
        if self._held and blocking and cluster.current is not None:  # a timeout may take longer than it says
            self._waiting.append(cluster.task)
            cluster.sleep(100.0)
        was_free, self._held = not self._held, True
        return was_free

    def release(self) -> None:
        self._held = False
        for task in self._waiting:
            task.wake = self._site.cluster.monotonic
        self._waiting.clear()


class Pages:
    """Mapped memory, into which a dead process stores nothing."""

    def __init__(self, site: Site, number: int, size: int, offset: int) -> None:
        file = site.disk.files[number]
        self._rank, self._pages = file.rank, mmap.mmap(file.real, size, offset=offset)

    def __setitem__(self, where: Any, value: Any) -> None:
        if self._rank is None or self._rank.alive:
            self._pages[where] = value


class Counters:
    """Counters in mapped memory."""

    def __init__(self, pages: Pages, place: int, count: int) -> None:
        self._pages, self._place, self._values = pages, place, [0] * count

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __getitem__(self, number: int) -> int:
        return self._values[number]

    def __setitem__(self, number: int, value: int) -> None:
        self._values[number] = value
        place = self._place + 8 * number
        self._pages[place : place + 8] = value.to_bytes(8, "little")


def _path_class(site: Site) -> type[PosixPath]:
    """Return a class of paths whose changes pass the disk."""

    class SimulatedPath(PosixPath):
        def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            try:
                site.disk.mkdir(self, mode)
            except FileNotFoundError:
                if not parents:
                    raise
                self.parent.mkdir(parents=True, exist_ok=True)
                self.mkdir(mode, exist_ok=exist_ok)
            except FileExistsError:
                if not exist_ok:
                    raise

        def unlink(self, missing_ok: bool = False) -> None:
            try:
                site.disk.unlink(self)
            except FileNotFoundError:
                if not missing_ok:
                    raise

        def rmdir(self) -> None:
            site.disk.rmdir(self)

        def open(self, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if "w" not in mode:
                return super().open(mode, *arguments, **options)
            return Writer(site.disk, site.disk.open(self, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))

        def write_bytes(self, data: Any) -> int:
            with self.open("wb") as file:
                file.write(data)
            return len(data)

    return SimulatedPath


class Writer:
    """A file that is written from its beginning."""

    def __init__(self, disk: Disk, number: int) -> None:
        self._disk, self._number = disk, number

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.close(self._number)

    def write(self, data: bytes) -> None:
        while data:
            data = data[self._disk.write(self._number, data) :]

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return self._number
