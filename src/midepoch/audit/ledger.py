"""Writing the ledger: a file for each loader of each process, appended to as batches are delivered.

A pass over (the rest of) an epoch is a line of JSON with the positions of its steps and the position of the run before
it. It is followed by one byte for each step: ``.``, or ``-3.`` if three of its rows were skipped; occasionally
``@1500,20;``, the milliseconds since the pass began, and those in which the model waited for data, with more figures
(``midepoch.audit.records``); and ``~`` after a write failure. The record of a step is thus a single byte that exists or
does not, whatever kills the process, and a million rows in batches of 64 take 16 KB over all ranks. While it is
written, a file is up to a page longer than its records, filled with zeros. ``seen`` in the line of JSON is overwritten
once a second: the milliseconds from its ``time`` to the last step. So a killed run is not taken for one that runs. A
loaded state is a line of JSON as well, with ``"load": true``.

If positions cannot be computed, some steps are followed by the units and cursors of the lanes in braces
(``midepoch.audit.lanes``). ``#`` is the end of an epoch, with its cursors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from midepoch._internal.hints import hinted_methods
from midepoch._internal.processes import silent_at_exit
from midepoch.audit.documents import DocumentRecorder, mapped_room
from midepoch.audit.lanes import LaneRecorder, Places
from midepoch.audit.orders import save_lengths, save_order, stream_name
from midepoch.audit.records import (
    LOST,
    SUFFIX,
    Figures,
    LeaseSteps,
    MeasuredFigures,
    RecordedBatching,
    header_of,
    numbered,
    read_passes,
    steps_in,
)
from midepoch.distributed.runs import start_name
from midepoch.distributed.world import World
from midepoch.errors import StateError
from midepoch.order import Shard
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.lanes import Share
from midepoch.pipeline.planned import Planning
from midepoch.pipeline.plans import UNKNOWN
from midepoch.pipeline.reach import start
from midepoch.pipeline.spec import PipelineSpec
from midepoch.storage.address import Address, refuse_lost_slash

_MOST_FILES = 16
"""Maximum number of files searched for the previous process of this rank."""


def new_file(folder: Path, attempt: str, shard: Shard, stream: str) -> tuple[str, list[tuple[str, int]]]:
    """Return a name for a new file of a start, and the files of earlier processes with the numbers of their steps.

    Starts are numbered by the files in the folder, not by clocks, which differ between machines.
    """
    mark = hashlib.blake2b(attempt.encode(), digest_size=5).hexdigest()
    known = [(*found, path) for path in folder.glob(f"*{SUFFIX}") if (found := numbered(path)) is not None]
    current = max((number for number, other, _ in known if other == mark), default=0)
    last = max((number for number, _, _ in known), default=0)
    number = current if current and current == last else last + 1
    previous = [
        *_last([one for one in known if one[1] == mark], shard, stream),
        *_last([one for one in known if one[1] != mark], shard, stream),
    ]
    return f"{number:06}-{mark}-rank{shard.index:05}of{shard.count:05}-{secrets.token_hex(4)}{SUFFIX}", previous


def _last(known: list[tuple[int, str, Path]], shard: Shard, stream: str) -> list[tuple[str, int]]:
    """Return the last of these files of the same rows and rank by another process, and the number of its steps.

    A later file names those before it, so the last one is named by none of the others.
    """
    paths = [path for _, _, path in sorted(known, reverse=True) if f"-rank{shard.index:05}of" in path.name]
    files: dict[str, int] = {}
    named: set[str] = set()
    for path in paths[:_MOST_FILES]:
        try:
            passes = read_passes(path)
        except (OSError, StateError):
            continue
        if passes and passes[0].process != process_name() and passes[0].shape.stream == stream:
            files[path.name] = steps_in(passes, stream)
            named |= {name for one in passes for name, _ in one.previous}
    return [one for one in files.items() if one[0] not in named][:1]


def attempt_name(shard: Shard) -> str:
    """Return the name of this start. Raises ValueError if the ranks have none in common."""
    if found := start_name(World(shard.index, shard.count)).strip("-"):
        return found
    if shard.count == 1:
        return process_name()
    raise ValueError(
        f"a ledger of {shard.count} ranks needs a name that all ranks of this start share and no other start has, "
        "and none was found. Initialise torch.distributed or jax.distributed before the loader is created, set "
        "MIDEPOCH_RUN_ID for all ranks, or pass audit=midepoch.audit.Ledger(folder, attempt=…)."
    )


# The number of this process. Asking the system for it takes 0.2 µs, a fourth of the record of a step.
_process = SimpleNamespace(number=os.getpid())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(_process, "number", os.getpid()))
_births: dict[int, str] = {}


def process_name() -> str:
    """Return a name of this process that no other has, nor a fork of it."""
    return f"{socket.gethostname()}-{os.getpid()}-{_births.setdefault(os.getpid(), secrets.token_hex(4))}"


def host_of(process: str) -> str:
    """Return the name of the machine of a process."""
    return process.rsplit("-", 2)[0]


def process_space() -> str:
    """Return a name of the processes that can be seen from here: of a boot of a machine, or of a container on it.

    Empty if the system does not tell.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def is_gone(process: str, space: str) -> bool | None:
    """Return True if a process has exited. None if it cannot be seen from here."""
    number = process.rsplit("-", 2)[1]
    if not space or space != process_space():
        return None
    try:  # a process that was killed exists until its parent notes that
        return Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
    except OSError:
        return None


_log = logging.getLogger("midepoch")
_MARK_SECONDS = 5.0
_FIRST_MARK = 1.0  # each of the next comes after twice the time, up to _MARK_SECONDS
_SEEN_SECONDS = 1.0
_SEEN = b'"seen":"%012d"'
_PAGE = mmap.PAGESIZE
_STEP = ord(".")
_numbers = count(1)  # passes of this process
_latest: dict[tuple[str, int], Ledger] = {}  # the ledger that began the last pass of a stream and rank in this process


@hinted_methods({}, only=["__init__"])
class Ledger:
    """The folder of a run's ledger, and the name of this start of the run.

    ``name`` separates loaders of the same rows that record in one folder (training and evaluation). ``attempt`` is a
    name that all ranks of this start share and no other start has. It is found automatically under torchrun, SLURM,
    MPI, Ray Train, torch.distributed and JAX. If you start ranks in another way, set ``MIDEPOCH_RUN_ID``, or pass it
    here.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str = "", attempt: str | None = None) -> None:
        text = os.fspath(folder)
        refuse_lost_slash(folder)
        if "://" in text:
            raise ValueError(
                f"a ledger is appended to at every step, which {Address(text)} does not support. Pass a local folder."
            )
        self.folder, self.name, self._attempt = Path(text).expanduser(), name, attempt
        self._file, self._owner, self._rows, self._beside = -1, 0, ("", 0), False
        self._began = self._last = self._mark = self._due = self._synced = 0.0
        self._measured: MeasuredFigures | None = None
        self._base, self._latest, self._waited, self._seen = Figures(), Figures(), 0.0, 0
        self._pages: mmap.mmap | None = None
        self._lanes = LaneRecorder()
        self._how, self._passed = "fresh", False  # the latter: a pass was begun since a state was loaded
        """How the run comes to its next pass: it is "fresh", a state was "loaded", or it is "on" its way."""
        self._origin: Any = Cursor()
        """The place after the last batch recorded, or of a loaded state."""
        self.documents = DocumentRecorder()
        self._path, self._ends, self._ended_at = self.folder, False, 0
        self.end = self._room = 0
        """Bytes recorded so far."""
        self.undo: tuple[int, int] | None = None
        """The end of the records before the last step, until its batch is delivered."""

    def __repr__(self) -> str:
        return f"Ledger({str(self.folder)!r}{f', name={self.name!r}' if self.name else ''})"

    def prepare(self, shard: Shard) -> None:
        """Raise errors that prevent a ledger before anything is delivered."""
        self._attempt = self.attempt(shard)  # fixed now: the process group may be gone when a pass begins
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(13, "no permission to write")
        except OSError as problem:
            text = f"the ledger cannot be kept in {self.folder}: {problem.strerror}"
            raise OSError(problem.errno, text) from None

    def attempt(self, shard: Shard) -> str:
        """Return the name of this start. Raises if the ranks have none in common."""
        return attempt_name(shard) if self._attempt is None else self._attempt

    def loaded(self, cursor: Cursor) -> None:
        """Note that a state was loaded: the run continues there."""
        self._how, self._origin = "loaded", cursor

    def chosen(self, cursor: Cursor) -> None:
        """Note that an epoch was chosen. A new run begins there, as by those who make a loader for every epoch."""
        if self._how == "fresh":
            self._origin = cursor

    def begin(
        self,
        spec: PipelineSpec,
        cursor: Cursor,
        batching: RecordedBatching,
        *,
        until: int = UNKNOWN,
        planning: Planning | None = None,
        workers: int = 0,
        measured: MeasuredFigures | None = None,
        sources: Sequence[str] = (),
        leased: LeaseSteps | None = None,
        load: bool = False,
    ) -> None:
        """Record that a pass begins at a cursor, in batches of some settings. ``until``: units of the epoch, if known.

        ``planning``: of batches by tokens. ``measured``: the source of figures. ``sources``: names of the sources, if
        the documents of steps are recorded. ``leased``: the steps of its leases, if its batches are leases. ``load``: a
        state was loaded, and no pass is begun yet.
        """
        shard, in_lanes = spec.shard, spec.unit == "outputs"
        self._ends = until == UNKNOWN  # then the end is recorded when it is reached
        self._rows = (stream_name(spec, self.name), shard.index)
        origin = self._origin if isinstance(self._origin, Cursor) else self._origin.cursor()
        how = "loaded" if load else self._how
        header: dict[str, Any] = {
            **header_of(spec, cursor, origin, batching, until, leased),
            "process": process_name(),
            "space": process_space(),
            "attempt": self.attempt(shard),
            "stream": self._rows[0],
            "name": self.name,
            "how": how,
            "workers": workers,
            "number": next(_numbers),
            "time": round(time.time(), 3),
            **{key: value for key, value in (("load", load), ("sources", list(sources))) if value},
        }
        self._lanes = LaneRecorder()
        if in_lanes:
            numbers = Share.of(spec.lanes, shard).lanes.positions(0, spec.lanes).tolist()
            self._lanes = LaneRecorder(cursor.lanes, numbers, start(spec.node))
            header |= {"lanes": spec.lanes, "cursors": list(self._lanes.begin.items()), "ended": self._lanes.ended}
        try:
            header |= self._open(header["attempt"], shard)
            if sources and in_lanes and not load:  # else rows follow from positions
                self.documents.begin(self._path, header["number"])
            save_order(self.folder, spec)
            if planning is not None:
                save_lengths(self.folder, spec, planning)
        except OSError as problem:
            self._lose(problem)
            return
        self._passed = not load
        if load:
            self._write(b"\n" + json.dumps(header, separators=(",", ":")).encode() + b"\n")
            return
        before, _latest[self._rows] = _latest.get(self._rows), self
        self._beside = self._how == "on" and before not in (None, self)
        if before is not None and before is not self:
            before._beside = True  # if it continues with its own pass after this
        self._began = self._last = self._synced = time.monotonic()
        self._measured = measured
        if measured is not None:
            self._base = self._latest.counted_from(measured.figures())
            self._waited = measured.all_waited
        self._mark = self._began + min(_FIRST_MARK, _MARK_SECONDS)
        self._due = min(self._mark, self._began + _SEEN_SECONDS)
        line = json.dumps({**header, "seen": f"{0:012}"}, separators=(",", ":")).encode()
        self._seen = self.end + 1 + line.rindex(_SEEN % 0)
        self._write(b"\n" + line + b"\n")

    def step(self, skipped: int, waited: float, at: Any) -> None:
        """Record that a batch is delivered without ``skipped`` of its rows, and the place after it.

        ``waited``: seconds that the model has waited since the pass began. It is taken back by ``take_back`` until
        ``undo`` is None.
        """
        now, lanes, places = time.monotonic(), self._lanes, None
        self._last = now
        if lanes.numbers:
            places = Places.of(at, lanes.numbers)
            if lanes.is_due(places):  # the cursors of earlier steps are written before this one
                self.flush()
        due, end = now >= self._due, self.end
        self.undo = (end, len(lanes.pending))
        self._how, self._origin = "on", at
        pages = self._pages
        is_plain = not (due or skipped or self._beside) and self._owner == _process.number
        if pages is not None and is_plain and end + 1 < self._room:
            pages[end] = _STEP  # most steps
            self.end = end + 1
            if places is not None:
                lanes.pending.append(places)
            return
        record = b"." if not skipped else b"-%d." % skipped
        if self._beside:
            record += b"!"  # another loader of the same rows has begun a pass meanwhile
            self._beside = False
        is_mark = due and now >= self._mark
        if is_mark:
            record += self._times(now, waited)
        self._write(record)
        if places is not None:
            lanes.pending.append(places)
        if is_mark:
            self._mark = now + min(_MARK_SECONDS, max(_FIRST_MARK, now - self._began))
            self.flush()
        if due:
            self._see(now)
            if is_mark and now - self._synced >= _MARK_SECONDS:
                self.sync()
                self._synced = now

    def _see(self, now: float) -> None:
        """Write the time of the last step into the line of JSON."""
        self._due = min(self._mark, now + _SEEN_SECONDS)
        seen = _SEEN % ((now - self._began) * 1000)
        if self._file < 0 or self._owner != os.getpid():
            return
        if self._pages is not None:
            self._pages[self._seen : self._seen + len(seen)] = seen
        else:
            with suppress(OSError):
                os.pwrite(self._file, seen, self._seen)

    def note(self, record: bytes) -> None:
        """Add a record of leases to the pass."""
        self._write(record)

    def flush(self) -> None:
        """Write the cursors of the lanes that are pending: a state is saved, or another pass begins."""
        lanes = self._lanes
        if lanes.pending:
            last = lanes.pending[-1]
            record, before = lanes.record()
            self._write(record)
            lanes.pending, lanes.before = [], before  # no call between: an interrupt does not come here
            if last.ended and self._ends:  # also if no pass comes to ask for another batch
                self._end_lanes(lanes, last)

    def leave(self) -> None:
        """Write what is pending: a pass ends, or is left."""
        self.flush()
        self.documents.trim()

    def _times(self, now: float, waited: float) -> bytes:
        measured = self._measured
        waited = waited if measured is None else measured.all_waited
        mark = b"@%d,%d;" % ((now - self._began) * 1000, max(0.0, waited - self._waited) * 1000)
        if measured is None:
            return mark
        self._latest = measured.figures()
        return mark + self._latest.minus(self._base).record()

    def take_back(self) -> None:
        """Discard the record of the last step, if it is not delivered: an interrupt came before."""
        if self.undo is None:
            return
        (end, pending), self.undo = self.undo, None
        del self._lanes.pending[pending:]
        self._ends = self._ends or bool(self._lanes.numbers and self._ended_at >= end)
        if self._file < 0 or self._owner != os.getpid() or not end <= self._room:
            return
        zeros = bytes(self._room - end)
        if self._pages is not None:
            self._pages[end : self._room] = zeros
        else:
            with suppress(OSError):
                os.pwrite(self._file, zeros, end)
        self.end = end

    def finish(self, waited: float, end: Cursor) -> None:
        """Record that a pass was iterated to its end. One without a batch has no record but that of its state."""
        self.flush()
        if not self._passed:
            self._origin = end
            return
        if self._ends and self._lanes.numbers and end.lanes:
            self._end_lanes(self._lanes, Places.of(end, self._lanes.numbers))
        elif self._ends:
            self._write(b"#")
        self._how, self._origin = "on", end
        self._write(self._times(self._last, waited))  # as all marks, at a step: what follows is not its time
        self._see(self._last)
        self.sync()

    def _end_lanes(self, lanes: LaneRecorder, places: Places) -> None:
        """Record the end of the epoch, and the places of the lanes there, once."""
        self._ends, self._ended_at, lanes.pending = False, self.end, [places]
        self._write(b"#" + lanes.record()[0])
        lanes.pending = []

    def sync(self) -> None:
        """Write the ledger to disk. (A process that dies loses nothing without it, but a machine may.)"""
        if self._file >= 0 and self._owner == os.getpid():
            try:
                os.fsync(self._file)
                self.documents.sync()
            except OSError as problem:
                self._lose(problem)

    def _open(self, attempt: Any, shard: Shard) -> dict[str, Any]:
        """Open a file of its own if necessary, and return the fields of its first line."""
        if self._file >= 0 and self._owner == os.getpid():
            return {}
        self.folder.mkdir(parents=True, exist_ok=True)
        name, previous = new_file(self.folder, str(attempt), shard, self._rows[0])
        self._path = self.folder / name
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._owner, self.end, self._room, self._pages = os.getpid(), 0, 0, None
        return {"previous": previous}

    def _write(self, record: bytes) -> None:
        if self._file < 0:
            return
        if self._owner != os.getpid():  # a fork: its batches are not those of its parent
            os.close(self._file)
            self._file, self._pages = -1, None
            _log.error("batches of a forked process from its parent's loader are not recorded in %s", self.folder)
            return
        end = self.end + len(record)
        try:
            if end >= self._room:  # one byte is reserved for LOST
                self._grow(end + 1)
            if self._pages is not None:
                self._pages[self.end : end] = record
            elif os.pwrite(self._file, record, self.end) < len(record):
                raise OSError(28, "No space left on device")
        except OSError as problem:
            self._lose(problem)
            return
        self.end = end

    def _lose(self, problem: OSError) -> None:
        """Stop recording this pass.

        Steps without a record count as not delivered, never as proven. A failure of the ledger does not stop the run.
        """
        _log.warning(
            "the ledger in %s cannot be written (%s). The run continues, and midepoch audit will report its record "
            "as incomplete. Recording is tried again with the next pass.",
            self.folder, problem.strerror or problem,
        )  # fmt: skip
        if self._file >= 0 and self._owner == os.getpid():
            with suppress(OSError):
                if self._pages is not None and self.end < self._room:
                    self._pages[self.end : self.end + 1] = LOST
                elif self._pages is None:
                    os.pwrite(self._file, LOST, self.end)
                self.end += 1
        self._close()

    def _grow(self, end: int) -> None:
        """Allocate more space, on disk and mapped."""
        room = -(-end // _PAGE) * _PAGE
        self._pages = mapped_room(self._file, self._room, room)
        self._room = room

    def _close(self) -> None:
        if self._owner == os.getpid():
            self.flush()
        self.documents.close()
        file, self._file, self._pages = self._file, -1, None
        if file >= 0 and self._owner == os.getpid():
            with suppress(OSError):
                os.ftruncate(file, self.end)
            os.close(file)

    @silent_at_exit
    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ledger, (str(self.folder), self.name, self._attempt)


def ledger_of(given: Any) -> Ledger | None:
    """Return the argument ``audit`` of a loader (a folder, a Ledger, or None) as a ledger with a file of its own."""
    if given is None:
        return None
    return _ledger(given.folder, given.name, given._attempt) if isinstance(given, Ledger) else Ledger(given)


def _ledger(folder: Any, name: str, attempt: str | None) -> Ledger:
    return Ledger(folder, name=name, attempt=attempt)
