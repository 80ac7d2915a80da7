"""Writing the ledger: a journal for each loader of each process, appended to as batches are delivered.

A pass over (the rest of) an epoch is a header with the cursor at which it begins, and a few counters
(``midepoch.audit.records``). Delivering a batch adds 1 to the first of them: a store of 8 bytes into mapped memory,
which exists or does not, whatever kills the process. So the record of a pass does not grow with its steps. Occasionally
the milliseconds since the pass began and in which the model waited for data are appended, with more figures. A second
counter has the time of the last step, once a second, so that a killed run is not taken for one that runs.

If positions cannot be computed, the cursors of the lanes are appended for some steps together
(``midepoch.audit.lanes``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from midepoch._internal.hints import hinted_methods
from midepoch._internal.processes import alive, machine, silent_at_exit
from midepoch.audit.documents import DocumentRecorder
from midepoch.audit.journal import Journal
from midepoch.audit.lanes import CURSORS, LaneMarks, LaneRecorder
from midepoch.audit.orders import mix_of, order_name, save_lengths, save_order, stream_name
from midepoch.audit.records import (
    ACKED,
    HEADER,
    MARK,
    OVER,
    RETURNED,
    SAVED,
    SKIPPED,
    SUFFIX,
    Count,
    Figures,
    LeaseSteps,
    MeasuredFigures,
    PassHeader,
    RecordedBatching,
    acknowledgement,
    numbered,
    read_file,
    steps_in,
)
from midepoch.distributed.keyvalue import run_identity
from midepoch.distributed.world import World
from midepoch.errors import StateError
from midepoch.order import Shard
from midepoch.order.intervals import Intervals
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Share, StepOutputs
from midepoch.pipeline.planned import Planning
from midepoch.pipeline.plans import UNKNOWN
from midepoch.pipeline.reach import start
from midepoch.pipeline.spec import PipelineSpec
from midepoch.storage.address import Address, check_folder

_MOST_FILES = 16
"""Maximum number of files searched for the previous process of this rank."""


class NewFile(NamedTuple):
    """A name for a new file of a start, and what earlier files of its rank have.

    ``previous``: of the last one of the same start by another process, and of the last one of another start: the name
    of the file, and the number of its steps. ``has_others``: a loader of other rows recorded there without a name.
    """

    name: str
    previous: list[tuple[str, int]]
    has_others: bool


def new_file(folder: Path, attempt: str, shard: Shard, stream: str) -> NewFile:
    """Return the new file of a start. Starts are numbered by the files in the folder: clocks of machines differ."""
    mark, rank = _mark_of(attempt), f"-rank{shard.index:05}of"
    known = [(*found, path) for path in folder.glob(f"*{SUFFIX}") if (found := numbered(path)) is not None]
    current = max((number for number, other, _ in known if other == mark), default=0)
    last = max((number for number, _, _ in known), default=0)
    previous, has_others = [], False
    for is_same in (True, False):
        files: dict[str, int] = {}
        named: set[str] = set()  # a later file names those before it, so the last one is named by none of the others
        paths = [path for _, other, path in sorted(known, reverse=True) if (other == mark) == is_same]
        for path in [path for path in paths if rank in path.name][:_MOST_FILES]:
            with suppress(OSError, StateError):
                passes = read_file(path).passes
                headers = [one.header for one in passes]
                has_others |= any(one.stream != stream and not one.name for one in headers[:1])
                if headers and headers[0].process != process_name() and headers[0].stream == stream:
                    files[path.name] = steps_in(passes, stream)
                    named |= {name for one in headers for name, _ in one.previous}
        previous += [one for one in files.items() if one[0] not in named][:1]
    number = current if current and current == last else last + 1
    name = f"{number:06}-{mark}{rank}{shard.count:05}-{secrets.token_hex(4)}{SUFFIX}"
    return NewFile(name, previous, has_others)


def _mark_of(attempt: str) -> str:
    return hashlib.blake2b(attempt.encode(), digest_size=5).hexdigest()


_shared: set[Path] = set()
"""Folders in which loaders of different rows record without names. Each is logged once."""
_branches: Counter[tuple[str, tuple[str, int]]] = Counter()
"""By start, rows and rank: the branches of this process. The ranks of a start begin as many, so names are the same."""
_births: dict[int, str] = {}


def process_name() -> str:
    """Return a name of this process that no other has, nor a fork of it."""
    if (process := os.getpid()) not in _births:
        _births[process] = secrets.token_hex(4)
    return f"{socket.gethostname()}-{process}-{_births[process]}"


def host_of(process: str) -> str:
    """Return the name of the machine of a process."""
    return process.rsplit("-", 2)[0]


def is_gone(process: str, space: str) -> bool | None:
    """Return True if a process has exited. None if it cannot be seen from here, where another ``machine`` is."""
    return not alive(int(process.rsplit("-", 2)[1])) if space == machine() else None


_log = logging.getLogger("midepoch")
_MARK_SECONDS = 5.0
_FIRST_MARK = 1.0  # each of the next comes after twice the time, up to _MARK_SECONDS
_SEEN_SECONDS = 1.0
_numbers = count(1)  # passes of this process
_latest: dict[tuple[Path, tuple[str, int]], Ledger] = {}  # that began the last pass of a stream and rank in a folder
_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Count nothing in the files of the parent: called in a fork."""
    for ledger in _ledgers:
        ledger.counters, ledger.due, ledger._mark = list(ledger.counters), 0.0, 0.0  # the next step says so
        ledger._writing = RLock()  # a thread of the parent may hold the other one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@hinted_methods({}, only=["__init__"])
class Ledger:
    """The folder of a run's ledger, and the name of this start of the run.

    ``name`` separates loaders of the same rows that record in one folder (training and evaluation). ``attempt`` is a
    name that all ranks of this start share and no other start has. It is found automatically under torchrun, SLURM,
    MPI, Ray Train, torch.distributed and JAX. If you start ranks in another way, set ``MIDEPOCH_RUN_ID``, or pass it
    here.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str = "", attempt: str | None = None) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise TypeError(f"audit takes the folder of a run, as in audit='runs/7', got {folder!r:.60}")
        text = os.fspath(folder)
        check_folder(folder)
        if "://" in text:
            raise ValueError(
                f"a ledger is appended to at every step, which {Address(text)} does not support. Pass a local folder."
            )
        self.folder, self.name, self._attempt = Path(text).expanduser(), name, attempt
        self.documents = DocumentRecorder()
        self.counters: Any = [0] * len(Count)
        """Those of the pass (``Count``), in its file. The loader counts its steps there."""
        self.due = 0.0
        """Time, by ``time.perf_counter``, from which on ``step`` is to be called for the next step."""
        self.lanes = LaneRecorder()
        """The steps whose cursors are not written yet, if positions cannot be computed."""
        self._journal: Journal | None = None
        self._how, self._passed = "fresh", False  # how the run comes to its next pass; True if one was begun
        self._branch, self._moved = "", False  # of the run; True once a step of it or the end of an epoch is recorded
        self._rows, self._beside, self._ends = ("", 0), False, False
        self._spec: PipelineSpec | None = None  # whose order is stored
        self._first = 0  # steps of the run before the pass
        self._gap = False  # True if the last pass could not be recorded
        self._began = self._mark = self._synced = self._waited = 0.0
        self._measured: MeasuredFigures | None = None
        self._base, self._latest = Figures(), Figures()
        self._writing = RLock()  # a state may be saved in another thread, or by a handler of signals
        _ledgers.add(self)

    def __repr__(self) -> str:
        return f"Ledger({str(self.folder)!r}{f', name={self.name!r}' if self.name else ''})"

    def prepare(self, shard: Shard) -> None:
        """Raise errors that prevent a ledger before anything is delivered."""
        self._attempt = self._attempt_of(shard)  # fixed now: the process group may be gone when a pass begins
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(13, "no permission to write")
        except OSError as problem:
            text = f"the ledger cannot be kept in {self.folder}: {problem.strerror}. Pass a folder, as in 'runs/7'"
            raise OSError(problem.errno, text) from None

    def _attempt_of(self, shard: Shard) -> str:
        """Return the name of this start. Raises ValueError if the ranks have none in common."""
        if self._attempt is not None:
            return self._attempt
        if found := run_identity(World(shard.index, shard.count), unique=True).strip("-"):
            return found
        if shard.count == 1:
            return process_name()
        raise ValueError(
            f"a ledger of {shard.count} ranks needs a name that all ranks of this start share and no other start has, "
            "and none was found. Initialise torch.distributed or jax.distributed before the loader is created, set "
            "MIDEPOCH_RUN_ID for all ranks, or pass audit=midepoch.audit.Ledger(folder, attempt=…)."
        )

    @property
    def _has_moved(self) -> bool:
        return self._moved or self.counters[Count.STEPS] > 0

    def branches(self, origins: Sequence[str]) -> Sequence[str]:
        """Return the branches of a state that is saved now: before anything is recorded, those of the one loaded."""
        return (self._branch,) if self._has_moved else origins

    def begin(
        self,
        spec: PipelineSpec,
        cursor: Cursor,
        batching: RecordedBatching,
        measured: MeasuredFigures,
        *,
        until: int = UNKNOWN,
        planning: Planning | None = None,
        workers: int = 0,
        sources: Sequence[str] = (),
        leased: LeaseSteps | None = None,
        load: bool = False,
    ) -> None:
        """Record that a pass begins at a cursor, in batches of some settings. ``until``: units of the epoch, if known.

        ``planning``: of batches by tokens. ``measured``: the meter of the loader. ``sources``: names of the sources, if
        the documents of steps are recorded. ``leased``: the steps of its leases, if its batches are leases. ``load``: a
        state was loaded, and no pass is begun yet.
        """
        shard, attempt = spec.shard, self._attempt_of(spec.shard)
        self._how = "loaded" if load else "on" if self.counters[Count.STEPS] else self._how
        self._moved = not load and self._has_moved
        if spec is not self._spec:  # in most epochs it is that of the one before
            self._rows = (stream_name(spec, self.name), shard.index)
        if load or not self._branch:
            _branches[attempt, self._rows] += 1
            self._branch = f"{_mark_of(attempt)}.{_branches[attempt, self._rows]}"
        self._first, self._ends = cursor.steps, until == UNKNOWN  # then the end is recorded when it is reached
        self.counters, self.due, self._passed = [0] * len(Count), 0.0, not load
        self._began = time.perf_counter()
        self._synced = self._synced or self._began
        self._mark = self._began + min(_FIRST_MARK, _MARK_SECONDS)
        self._measured, self._waited = measured, measured.all_waited
        self._base = self._latest.counted_from(measured.figures())
        in_lanes = spec.unit == "outputs"  # else units and rows follow from positions
        numbers = Share.of(spec.lanes, shard).lanes.positions(0, spec.lanes).tolist() if in_lanes else ()
        self.lanes = LaneRecorder(cursor.lanes, numbers, start(spec.node))
        try:
            journal, earlier = self._opened(attempt, shard)
            if self._how == "fresh" and not (load or cursor.steps or shard.index):
                self._note(earlier, shuffled=spec.node.shuffled)
            number = next(_numbers)
            if sources and in_lanes and not load:
                self.documents.begin(journal.path, number)
            if spec is not self._spec:
                save_order(self.folder, spec)
                self._spec = spec
            if planning is not None:
                save_lengths(self.folder, spec, planning)
            header = PassHeader(
                attempt=attempt,
                branch=self._branch,
                origins=spec.origins if load else (),
                stream=self._rows[0],
                order=order_name(spec),
                name=self.name,
                process=process_name(),
                space=machine(),
                number=number,
                time=round(time.time(), 3),
                previous=earlier.previous,
                how=self._how,
                is_load=load,
                rank=shard.index,
                ranks=shard.count,
                workers=workers,
                cursor=cursor.without_stages() if in_lanes else cursor,
                lanes=spec.lanes if in_lanes else 0,
                places=self.lanes.begin,
                end=until,
                rows=spec.rows,
                batching=batching,
                excluded=spec.excluded_texts,
                leases=leased,
                mix=mix_of(spec.node, cursor.epoch),
                sources=sources,
            )
            journal.append(HEADER, header.to_json())
            if load:
                return
            self.counters = journal.append_counters(len(Count))
        except OSError as problem:
            self._gap = self._gap or not load
            self._lose(problem)
            return
        self.counters[Count.LOST], self._gap = int(self._gap), False
        place = self.folder.absolute(), self._rows
        before, _latest[place] = _latest.get(place), self
        self._beside = self._how == "on" and before not in (None, self)
        if before is not None and before is not self:
            before._beside, before.due = True, 0.0  # if it continues with its own pass after this

    def _note(self, earlier: NewFile, *, shuffled: bool) -> None:
        """Log what is wrong if training begins at its first step beside files of another loader or an earlier start."""
        if earlier.has_others and not self.name and self.folder.absolute() not in _shared:
            _shared.add(self.folder.absolute())
            _log.warning(
                "two loaders of different rows record in %s. For another run, pass another folder. For two loaders of "
                "one run, name them: audit=midepoch.audit.Ledger(folder, name='train').",
                self.folder,
            )
        steps = sum(steps for _, steps in earlier.previous)
        if steps and shuffled:
            _log.warning(
                "the ledger in %s has %s steps of an earlier start, and this one begins at step 0, without a state. To "
                "resume, load its checkpoint first. For another run, pass another folder.",
                self.folder,
                f"{steps:,}",
            )

    def _opened(self, attempt: str, shard: Shard) -> tuple[Journal, NewFile]:
        """Return a journal of its own, and if it is new what is beside it. Raises OSError."""
        if self._journal is not None and self._journal.is_open:
            return self._journal, NewFile("", [], False)
        self.folder.mkdir(parents=True, exist_ok=True)
        new = new_file(self.folder, attempt, shard, self._rows[0])
        self._journal = Journal(self.folder / new.name)
        return self._journal, new

    def step(self, number: int, skipped: int) -> None:
        """Record more of a step than that it is delivered, right before it is: skipped rows, and times that are due.

        ``number``: steps of the pass before it.
        """
        if skipped:
            self._append(SKIPPED, json.dumps([number, skipped]).encode())
        if self._beside:
            self._beside, self.counters[Count.BESIDE] = False, 1
        now = time.perf_counter()
        if now >= self._mark:
            self._write_mark(number + 1, now)
            self.flush()
            self._mark = now + min(_MARK_SECONDS, max(_FIRST_MARK, now - self._began))
            self._sync_at(now)
        self._see(now)

    def add(self, at: Any) -> None:
        """Keep where the lanes are after a step, right before it is delivered.

        The cursors of earlier steps are written when a lane has come to another chunk.
        """
        lanes = self.lanes
        places = (at.marks, at.after) if isinstance(at, StepOutputs) else lanes.marks(at)
        for first, _ in lanes.pending[:1]:  # a thread that saves a state may write it at this moment
            for mark, other in zip(first, places[0], strict=True):
                if not (isinstance(mark, tuple) and isinstance(other, tuple) and mark[0] is other[0]):
                    self.flush()
                    break
        lanes.pending.append(places)
        lanes.last = at

    def _see(self, now: float) -> None:
        """Note the time of the last step."""
        self.counters[Count.SEEN] = max(0, int((now - self._began) * 1000))
        self.due = min(self._mark, now + _SEEN_SECONDS)

    def _write_mark(self, steps: int, now: float) -> None:
        assert self._measured is not None
        waited = max(0.0, self._measured.all_waited - self._waited)
        self._latest = self._measured.figures()
        elapsed = max(0, int((now - self._began) * 1000))
        self._append(MARK, json.dumps([steps, elapsed, int(waited * 1000), self._latest.minus(self._base)]).encode())

    def acknowledged(self, steps: Intervals, units: Mapping[int, Intervals], *, rejected: bool) -> None:
        """Record leases that were acknowledged or rejected, and their units."""
        self._append(ACKED, acknowledgement(steps, units, rejected=rejected))

    def returned(self) -> None:
        """Record that the leases that are out are returned."""
        self._append(RETURNED, json.dumps(self.counters[Count.STEPS]).encode())

    def flush(self) -> None:
        """Write the cursors of the lanes that are pending: a state is saved, or another pass begins."""
        with self._writing:
            lanes, steps = self.lanes, self.counters[Count.STEPS]
            is_recorded = self._journal is not None and self._journal.is_open  # not in a fork, or after a failure
            for number, content in lanes.records(steps) if is_recorded else ():
                self._append(CURSORS, content, number)
            end = lanes.written(steps)
            if end is not None and is_recorded:  # also if no pass comes to ask for another batch
                self._end(end)

    def saved(self, steps: int | None) -> None:
        """Record that a state is saved: the run may come back to this step, also after it has left this branch.

        ``steps``: of the run, in the state. None with leases, whose states count acknowledged steps.
        """
        self.flush()
        number = self.counters[Count.STEPS] if steps is None else steps - self._first
        if number > 0 or (number == 0 and self._moved and self._passed):  # also of a pass that found only the end
            self._append(SAVED, b"", number)

    def leave(self) -> None:
        """Write what is pending: a pass ends, or is left."""
        self.flush()
        self.documents.trim()

    def finish(self, end: Cursor) -> None:
        """Record that a pass was iterated to its end. One without a batch has no record but that of its state."""
        self.flush()
        if not self._passed:
            return
        self._moved = True
        self._ends = self._ends or not self.counters[Count.STEPS]  # without a step, this is all that it records
        self._end(self.lanes.marks(end))
        self._how = "on"
        assert self._measured is not None
        last = self._measured.last_delivery or self._began  # as all marks, at a step: what follows is not its time
        self._write_mark(self.counters[Count.STEPS], last)
        self._see(last)
        self._sync_at(last)

    def _end(self, marks: LaneMarks) -> None:
        """Record the end of the epoch, and the places of the lanes there, once. It may be known before."""
        if self._ends:
            self._ends = False
            self._append(OVER, json.dumps(self.lanes.end(marks)).encode())

    def _sync_at(self, now: float) -> None:
        """Write the ledger to disk, but not more often than marks are written: epochs may be shorter than that."""
        if now - self._synced >= _MARK_SECONDS:
            self.sync()
            self._synced = now

    def sync(self) -> None:
        """Write the ledger to disk. (A process that dies loses nothing without it, but a machine may.)"""
        if self._journal is not None:
            try:
                self._journal.sync()
                self.documents.sync()
            except OSError as problem:
                self._lose(problem)

    def _append(self, kind: bytes, content: bytes, number: int = 0) -> None:
        journal = self._journal
        if journal is None:
            return
        if not journal.is_open:
            self._journal = None
            _log.error("batches of a forked process from its parent's loader are not recorded in %s", self.folder)
            return
        try:
            with self._writing:
                journal.append(kind, content, number)
        except OSError as problem:
            self._lose(problem)

    def _lose(self, problem: OSError) -> None:
        """Stop recording this pass.

        Steps without a record count as not delivered, never as proven. A failure of the ledger does not stop the run.
        """
        _log.warning(
            "the ledger in %s cannot be written (%s). The run continues, and midepoch audit will report its record "
            "as incomplete. Recording is tried again with the next pass.",
            self.folder, problem.strerror or problem,
        )  # fmt: skip
        self.counters[Count.LOST] = 1
        self._close()

    def _close(self) -> None:
        journal, self._journal = self._journal, None
        self.counters = list(self.counters)  # what follows is not in the file any more
        self.documents.close()
        if journal is not None:
            journal.end()

    @silent_at_exit
    def __del__(self) -> None:
        if getattr(self, "_journal", None) is not None:
            self.flush()
            self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Ledger, str(self.folder), name=self.name, attempt=self._attempt), ()


def ledger_of(given: Any) -> Ledger | None:
    """Return the argument ``audit`` of a loader (a folder, a Ledger, or None) as a ledger with a file of its own."""
    if isinstance(given, Ledger):
        return Ledger(given.folder, name=given.name, attempt=given._attempt)
    return None if given is None else Ledger(given)
