"""The only mutable part of a dataset: its epoch and its cursor, in the main process and in torch's workers."""

from __future__ import annotations

import logging
import mmap
import os
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from multiprocessing import context, reduction
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from midepoch._internal.hints import warn_once
from midepoch._internal.processes import silent_at_exit
from midepoch.distributed.world import process_group
from midepoch.iteration.iterators import BatchIterator, IterationStart, LaneRows, PositionRows, RowIterator, RowSource
from midepoch.order import Shard
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Lanes
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state import saved as states
from midepoch.state.format import check_worker

_log = logging.getLogger("midepoch")

_SIZE = 16384
_EPOCH, _NAMED, _SEEDED, _SEED, _NOTES = 0, 8, 9, 16, 24
_NOTE = struct.Struct("<qqq")


class Note(NamedTuple):
    """Position of a worker: the epochs it has begun since it resumed, and 1 if it is at the end of one."""

    round: int
    at_end: int
    epoch: int


class SharedCell:
    """Shared values: the epoch, True if ``set_epoch`` requested it, the seed of the global generators once drawn, and
    the position of each worker when it began.
    """

    def __init__(
        self, epoch: int = 0, named: bool = False, global_seed: int | None = None, *, fd: int | None = None
    ) -> None:
        self._fd = fd
        self._memory = mmap.mmap(-1 if fd is None else fd, _SIZE)
        if fd is None:
            self.epoch, self.named, self.global_seed = epoch, named, global_seed

    @property
    def epoch(self) -> int:
        return int(struct.unpack_from("<q", self._memory, _EPOCH)[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        struct.pack_into("<q", self._memory, _EPOCH, value)

    @property
    def named(self) -> bool:
        return bool(self._memory[_NAMED])

    @named.setter
    def named(self, value: bool) -> None:
        self._memory[_NAMED] = int(value)

    @property
    def global_seed(self) -> int | None:
        return int(struct.unpack_from("<Q", self._memory, _SEED)[0]) if self._memory[_SEEDED] else None

    @global_seed.setter
    def global_seed(self, value: int | None) -> None:
        struct.pack_into("<Q", self._memory, _SEED, value or 0)
        self._memory[_SEEDED] = int(value is not None)

    def note(self, worker: int, note: Note) -> None:
        at = _NOTES + worker * _NOTE.size
        if at + _NOTE.size > _SIZE:
            raise ValueError(f"more than {(_SIZE - _NOTES) // _NOTE.size} DataLoader workers are not supported")
        _NOTE.pack_into(self._memory, at, *note)

    def notes(self, workers: int) -> list[Note]:
        return [Note(*_NOTE.unpack_from(self._memory, _NOTES + i * _NOTE.size)) for i in range(workers)]

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:  # pickled without starting a process: copy the values
            return SharedCell, (self.epoch, self.named, self.global_seed)
        if self._fd is None:
            self._move_to_file()
        assert self._fd is not None
        return _rebuild, (reduction.DupFd(self._fd),)

    def _move_to_file(self) -> None:
        content = self._memory[:]
        fd = unnamed_file(_SIZE)
        self._memory, self._fd = mmap.mmap(fd, _SIZE), fd
        self._memory[:] = content

    @silent_at_exit
    def __del__(self) -> None:
        fd = getattr(self, "_fd", None)
        if fd is not None:
            os.close(fd)


def _rebuild(handle: Any) -> SharedCell:
    return SharedCell(fd=handle.detach())


def unnamed_file(size: int) -> int:
    """Return a descriptor of memory without a name. It is freed with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("midepoch", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


_Worker = tuple[int, int, int]
"""A DataLoader worker: its number, the number of workers, and that of shards."""


def torch_worker() -> Any:
    """Return what torch says about this DataLoader worker. None in other processes."""
    data = sys.modules.get("torch.utils.data")
    return None if data is None else data.get_worker_info()


def warn_of_loops(caller: FrameType, shard: Shard) -> None:
    """Log once what torch's DataLoader or Hugging Face's Trainer would do with the rows.

    ``caller``: the frame that called ``iter(ds)``. In a worker, it alone knows how it is used.
    """
    worker, module = torch_worker(), str(caller.f_globals.get("__name__"))
    others = worker is not None and not worker.id and worker.num_workers > 1
    if others and caller.f_locals.get("drop_last") is True:  # in torch's fetcher
        workers = str(worker.num_workers)
        warn_once(
            "DataLoader(ds, num_workers=%s, drop_last=True) drops the last incomplete batch of each worker: more rows "
            "than len() of it says. Use ds.loader(batch_size, num_workers=%s, drop_last=True), which drops at most one "
            "batch.",
            workers, workers,
        )  # fmt: skip
    # Accelerate, and trainers that use it, share the batches themselves.
    is_shared = shard.count > 1 or not module.startswith("torch.") or "accelerate" in sys.modules
    if not is_shared and (group := process_group()) is not None and group.get_world_size() > 1:
        warn_once(
            "a torch DataLoader delivers all rows of this dataset on each of %s ranks. Use ds.loader(batch_size), "
            "which shares them, or ds.shard(world_size, rank).",
            str(group.get_world_size()),
        )
    if "transformers.trainer" in sys.modules and (worker is None or not worker.id):
        frame: FrameType | None = caller  # in the Trainer's loop, or in a worker that was forked there
        while frame is not None and frame.f_globals.get("__name__") != "transformers.trainer":
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name not in ("evaluation_loop", "prediction_loop"):
            warn_once(
                "this Trainer does not save the position in a midepoch dataset: a resume reads and discards all rows "
                "up to it. Nor does it shuffle the dataset. Use midepoch.integrations.transformers.ResumableTrainer, "
                "or class MyTrainer(ResumableTraining, %s).",
                type(frame.f_locals.get("self")).__name__,
            )


_Iterator = TypeVar("_Iterator", RowIterator, BatchIterator)


class IterationState:
    """An epoch, the start of the next ``iter()`` in it, and the last delivery.

    ``spec`` is replaced when a loaded state has a drawn seed, lanes or groups.
    """

    def __init__(self, spec: PipelineSpec, cursor: Cursor, named: bool = False) -> None:
        self.spec = spec
        self.shared = SharedCell(cursor.epoch, named)
        self.start = cursor
        self._round = self._batch = 0
        self._latest: RowIterator | BatchIterator | None = None
        self._delivered: Cursor | None = None
        self._before: weakref.ref[Any] | None = None
        """The iterator before the latest one, which may still be in use."""
        self._finished: int | None = None
        """The epoch that was iterated last, to its end."""

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "shared": self.shared, "start": self.start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        IterationState.__init__(self, state["spec"], Cursor())
        self.shared, self.start = state["shared"], state["start"]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of ``iter()``. The epoch of a loaded state resumes at its position."""
        if epoch != self.shared.epoch:
            self.shared.epoch, self.start = epoch, Cursor(epoch)
            self._latest, self._delivered = None, None
        self.shared.named = True

    def cursor(self) -> Cursor:
        """Return the cursor after the last row delivered, or at the start of the next ``iter()``."""
        if self._latest is not None:
            return self._latest.cursor
        return self._delivered or self.start._replace(epoch=self.shared.epoch)

    def share(self) -> tuple[Shard, _Worker | None]:
        """Return this process's share of the epoch. In a DataLoader worker, its part of that, and the worker."""
        shard, info = self.spec.shard, torch_worker()
        if info is None:
            return shard, None
        return shard.within(Shard(info.id, info.num_workers)), (info.id, info.num_workers, shard.count)

    def save(self) -> dict[str, Any]:
        """Return the state after the last row delivered."""
        live = self._latest
        before = None if self._before is None else self._before()
        if live is not None and before is not None and before.cursor.position > live.cursor.position:
            warn_once(
                "several iterations of this dataset are in progress, and this is the state of the newest. Use the "
                "iterator's own state: rows = iter(ds), then rows.state_dict()."
            )
        return self.save_at(self.cursor(), *((live.round, live.batch) if live else (self._round, self._batch)))

    def save_at(self, cursor: Cursor, round_: int = 0, batch: int = 0) -> dict[str, Any]:
        """Return the state at a cursor, for the iterators of this dataset."""
        process, worker = self.share()
        spec = self.spec
        spec = spec if cursor.begun else spec.for_processes(process.count)
        state = states.save(self._seeded(spec), cursor)
        if worker is not None:
            state["worker"], state["workers"], state["shards"] = worker
            if spec.unit == "rows":
                state["round"], state["batch"] = round_, batch
        if spec.skips_rows:
            state["shard"], state["shards"] = spec.shard.index, spec.shard.count
        return state

    @property
    def seeded(self) -> PipelineSpec:
        """The spec as it is run: with the seed of the global generators, drawn on first use."""
        return self._seeded(self.spec)

    def _seeded(self, spec: PipelineSpec) -> PipelineSpec:
        if not spec.node.has_functions:
            return spec
        if self.shared.global_seed is None:
            self.shared.global_seed = spec.seeded().global_seed
        return replace(spec, global_seed=self.shared.global_seed)

    def load(self, state: Any, allow: Collection[str] = ()) -> None:
        """Continue from a state, or raise and change nothing."""
        self._adopt(self._resume(state, allow))
        self._latest, self._delivered = None, None

    def check(self, state: Any) -> None:
        """Raise the error of loading a state. The state of any worker passes."""
        resumed = states.load(self._given(state), self.spec)
        if resumed.worker is None:
            resumed.spec.check_known(resumed.cursor, self.spec.shard)

    def _resume(self, state: Any, allow: Collection[str] = ()) -> states.Resumed:
        resumed = states.load(self._given(state), self.spec, allow)
        process, worker = self.share()
        check_worker(resumed.worker, worker)
        resumed.spec.check_known(resumed.cursor, process)
        return resumed

    def _given(self, state: Any) -> Any:
        """Return a state, or a list with one of each rank."""
        return list(map(self.state_in, state)) if isinstance(state, (list, tuple)) else self.state_in(state)

    def state_in(self, state: Any) -> Any:
        """Convert a state: a hook for interfaces with other states."""
        return state

    def _adopt(self, found: states.Resumed) -> None:
        """Move to the cursor of a state. If it is at the end of an epoch, another epoch that was set is kept."""
        cursor, (process, worker) = found.cursor, self.share()
        self.spec, self.start, self._round, self._batch = found.spec, cursor, found.round, found.batch
        if found.spec.global_seed is not None:
            self.shared.global_seed = found.spec.global_seed
        ended, named = self._ended(process, cursor), self.shared.named
        if worker is not None:
            # The epoch is shared with the main process, which may have set another one for the next pass.
            if not ended and not named:
                self.shared.epoch = cursor.epoch
        elif not ended or not named:
            self.shared.epoch = cursor.epoch
        elif self.shared.epoch != cursor.epoch:
            self.start = Cursor(self.shared.epoch)

    def _ended(self, share: Shard, cursor: Cursor) -> bool:
        """Return True if nothing of the epoch is left at a cursor, for this shard or any other in its place.

        If positions cannot be computed: as far as it is known.
        """
        if self.spec.unit == "outputs":
            return cursor.lanes_ended
        shards = self.spec.shard.count
        done = self.spec.undelivered(cursor.epoch, cursor.lane)
        position, rows, _ = done.left(cursor.lane.taken, self.spec.rows)
        first = share.index - share.index % shards  # the shares of this worker on all shards
        shares = (Shard(first + shard, share.count) for shard in range(shards))
        return cursor.position > 0 and all(each.before(position) >= each.before(rows) for each in shares)

    def begin(self) -> Cursor:
        """Return the start of ``iter()``. At the end of an epoch that was not set, it is the beginning of the epoch."""
        cursor = self.start._replace(epoch=self.shared.epoch)
        process, worker = self.share()
        if worker is not None:
            self.start = Cursor(cursor.epoch)  # in a worker, a loaded state applies to one iteration
        elif self._ended(process, cursor) and not self.shared.named:
            return Cursor(cursor.epoch)
        return cursor

    def start_from(self, cursor: Cursor) -> IterationStart:
        """Open the rows of this process at a cursor."""
        process, worker = self.share()
        self.spec = self.spec.for_processes(process.count, begun=cursor.begun)
        late = None
        if self.spec.unit == "rows" and worker is not None:
            if not cursor.position:  # any other position belongs to the lanes with which it was saved
                self.spec = replace(self.spec, lanes=self.worker_lanes(process.count))
            at_end = self._ended(process, cursor)
            note = Note(self._round, at_end, cursor.epoch)
            self.shared.note(worker[0], note)
            late = self._roll_over(note, worker[1]) if at_end else None
        start = IterationStart(cursor, self._open(cursor), self._round, self._batch, late)
        self._round = self._batch = 0
        return start

    def _open(self, cursor: Cursor) -> RowSource:
        spec, process = self._seeded(self.spec), self.share()[0]
        if spec.unit == "rows":
            done = spec.undelivered(cursor.epoch, cursor.lane)
            return PositionRows(spec.leaf, process, cursor, done, spec.groups or process.count)
        return LaneRows(self.open_lanes, cursor, spec.format or "python")

    def open_lanes(self, cursor: Cursor) -> Lanes:
        """Open the lanes of this process at a cursor."""
        spec, process = self._seeded(self.spec), self.share()[0]
        return spec.open(process, spec.bundles_here(shared=process.count > 1), cursor)

    def worker_lanes(self, shares: int) -> int:  # noqa: ARG002  (what a subclass decides by)
        """Return the number of lanes of an epoch for all DataLoader workers of all shards."""
        return self.spec.lanes

    def _roll_over(self, own: Note, workers: int) -> Callable[[], tuple[Cursor, RowSource, int] | None]:
        """Return a function for a worker that resumes at its end: it begins a new epoch if no worker has rows left.

        StatefulDataLoader requests the first batch after all workers have loaded, so that their notes are complete by
        then. It continues with the worker after the last one, which is the first again only if all had the same number
        of batches; otherwise this pass stays empty and the next one is the new epoch, in the right order.
        """
        shared, shard, rows = self.shared, self.spec.shard, self.spec.rows
        size = max(1, self._batch)
        even = len({-(-shard.within(Shard(worker, workers)).before(rows) // size) for worker in range(workers)}) == 1

        def start(epoch: int, round_: int) -> tuple[Cursor, RowSource, int]:
            return Cursor(epoch), self._open(Cursor(epoch)), round_

        def decide() -> tuple[Cursor, RowSource, int] | None:
            notes = shared.notes(workers)
            ahead = max(notes)
            if ahead.round > own.round:
                return start(ahead.epoch, ahead.round)
            if not all(note.at_end for note in notes):
                return None
            if not shared.named:
                shared.epoch = own.epoch
                if not even:
                    return None
            elif shared.epoch == own.epoch:
                return None  # the user requests exactly this epoch, of which nothing is left
            elif not even:
                _log.warning("epoch %d begins with another worker than it would have without the resume", shared.epoch)
            return start(shared.epoch, own.round + 1)

        return decide

    def start_at(self, state: Any) -> IterationStart:
        """Open the rows at a state, for an iterator that loads one, as StatefulDataLoader does."""
        resumed = self._resume(state)
        self._adopt(resumed)
        if self.share()[1] is None:
            return self.start_from(self.begin())
        self.start = Cursor(self.shared.epoch)
        return self.start_from(resumed.cursor)

    def follow(self, iterator: _Iterator) -> _Iterator:
        """Take the state from an iterator from now on."""
        self._before = None if self._latest is None else weakref.ref(self._latest)
        self._latest, self._delivered = iterator, None
        return iterator

    def epoch_over(self, iterator: Any, cursor: Cursor) -> None:
        """Note that an iterator has reached the end of an epoch: the next ``iter()`` starts at its beginning."""
        if iterator is self._latest:  # not one that a newer iterator has replaced
            if self._finished == cursor.epoch and self.spec.node.shuffled and not self.shared.named:
                warn_once(
                    "epoch %s of a shuffled dataset was iterated twice, in the same order. For another one, call "
                    "ds.set_epoch(epoch) before each pass, or use ds.loader(batch_size).",
                    str(cursor.epoch),
                )
            self._finished = cursor.epoch
            self._latest, self._delivered, self.start = None, cursor, Cursor(cursor.epoch)


def register_with_torch(kind: type) -> None:
    """Make a class an iterable dataset of torch, if torch is imported. Never import it for that.

    DataLoader and frameworks ask ``isinstance(ds, torch.utils.data.IterableDataset)``, and some of them
    ``isinstance(ds, torch.utils.data.Dataset)``, which has no registry: it becomes a base class.
    """
    base = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    if base is not None and base not in kind.__mro__:
        kind.__bases__ = (*kind.__bases__, base)
        base.register(kind)  # it may have noted before that the class is none


def is_registered(kind: type) -> bool:
    """Return True if a class is an iterable dataset of torch."""
    return any(each.__module__.startswith("torch.") for each in kind.__mro__)
