r"""Writing the ledger: a file for each process, appended to as batches are handed over.

A pass over (the rest of) an epoch is a line of JSON that says which positions its steps have, and behind it one byte
for each step: ``.``, or ``-3.`` if three rows of it were passed over; now and then ``@1500;``, the milliseconds since
the pass began. So the record of a step is a single byte that is there or is not, whatever kills the process, and a
million rows in batches of 64 take 16 KB over all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from midepoch.agreement import connected, run_identity
from midepoch.audit.orders import order_name, save_order, stream_name
from midepoch.order import Cut
from midepoch.pipeline import Pipeline
from midepoch.world import World

VERSION = 1
SUFFIX = ".ledger"
_log = logging.getLogger("midepoch")
_MARK_SECONDS = 5.0
_process = secrets.token_hex(4)


class Ledger:
    """Where a run's ledger is kept, and which start of the run this is.

    ``attempt`` is a name that all ranks of this start have in common and no other start has. It is found by itself
    under torchrun, SLURM, Ray Train, torch.distributed and JAX; who starts ranks in another way sets
    ``MIDEPOCH_RUN_ID``, or gives it here.
    """

    def __init__(self, folder: str | os.PathLike[str], *, attempt: str | None = None) -> None:
        text = os.fspath(folder)
        if "://" in text:
            raise ValueError(f"a ledger is appended to at every step, which {text} cannot be: give a folder.")
        self.folder, self._attempt = Path(text).expanduser(), attempt
        self._file = -1
        self._owner = 0
        self._mark = self._began = 0.0

    def __repr__(self) -> str:
        return f"Ledger({str(self.folder)!r})"

    def attempt(self, cut: Cut) -> str:
        """The name of this start. Raises where the ranks have none in common."""
        if self._attempt is not None:
            return self._attempt
        if cut.count == 1 and not connected():
            return f"{socket.gethostname()}-{os.getpid()}-{_process}"
        found = run_identity(World(cut.index, cut.count)).strip("-")
        if not found:
            raise ValueError(
                f"a ledger of {cut.count} ranks needs a name that all ranks of this start share and no other start "
                "has, and no launcher left one: set MIDEPOCH_RUN_ID for all of them, or pass "
                "audit=midepoch.audit.Ledger(folder, attempt=…)."
            )
        return found

    def begin(self, pipeline: Pipeline, *, epoch: int, start: int, end: int, global_batch: int, workers: int) -> None:
        """A pass is begun: its steps are the positions [start + g·B, start + (g+1)·B) up to the end."""
        cut = pipeline.cut
        header = {
            "midepoch_ledger": VERSION,
            "attempt": self.attempt(cut),
            "stream": stream_name(pipeline),
            "order": order_name(pipeline),
            "rank": cut.index,
            "ranks": cut.count,
            "epoch": epoch,
            "start": start,
            "end": end,
            "rows": pipeline.rows,
            "global_batch": global_batch,
            "workers": workers,
            "time": round(time.time(), 3),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            self._open(cut)
            save_order(self.folder, pipeline)
        except OSError as problem:
            raise OSError(problem.errno, f"the ledger cannot be kept in {self.folder}: {problem.strerror}") from None
        self._began = self._mark = time.monotonic()
        self._write(b"\n" + json.dumps(header, separators=(",", ":")).encode() + b"\n")

    def step(self, skipped: int = 0) -> None:
        """A batch is handed over, without so many of its rows."""
        record = b"." if not skipped else b"-%d." % skipped
        now = time.monotonic()
        if now - self._mark < _MARK_SECONDS:
            self._write(record)
            return
        self._mark = now
        self._write(record + b"@%d;" % ((now - self._began) * 1000))
        self.sync()

    def sync(self) -> None:
        """Have it on disk. (A process that dies loses nothing of it in any case; a machine may.)"""
        if self._file >= 0 and self._owner == os.getpid():
            os.fsync(self._file)

    def _open(self, cut: Cut) -> None:
        if self._file >= 0 and self._owner == os.getpid():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.time_ns():020}-rank{cut.index:05}of{cut.count:05}-{secrets.token_hex(4)}{SUFFIX}"
        self._file = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        self._owner = os.getpid()

    def _write(self, record: bytes) -> None:
        if self._file < 0:
            return
        try:
            os.write(self._file, record)
        except OSError as problem:
            # What is not recorded will show as not delivered, never as proven. That is not worth the run's life.
            _log.error("the ledger in %s ends here: %s", self.folder, problem)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0 and self._owner == os.getpid():
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self._close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ledger, (str(self.folder), self._attempt)


def ledger_of(given: Any) -> Ledger | None:
    """The argument ``audit`` of a loader (a folder, a Ledger, or None) as a ledger with a file of its own."""
    if given is None:
        return None
    return Ledger(given.folder, attempt=given._attempt) if isinstance(given, Ledger) else Ledger(given)


def _ledger(folder: str, attempt: str | None) -> Ledger:
    return Ledger(folder, attempt=attempt)
