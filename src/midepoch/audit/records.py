"""The format of a ledger's files, and reading one: the passes that one process recorded, and the states it loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from midepoch.audit.documents import RecordedDocuments
from midepoch.audit.figures import Mark, read_figures
from midepoch.audit.lanes import LaneTrack
from midepoch.audit.leases import LeaseRecord, read_leases
from midepoch.audit.mixes import RecordedMix, read_mix
from midepoch.errors import StateError
from midepoch.order.intervals import Intervals
from midepoch.order.numbers import StepNumbers, steps_filled
from midepoch.order.sizes import BatchSizes

VERSION = 3
VERSION_OF_POSITIONS = 1
"""Version of the records of passes over positions."""
VERSION_OF_OTHERS = 2
"""Version of those over lanes, of batches by tokens, and of batch sizes that change. Newer: positions are excluded."""
UNKNOWN = 2**62
"""The end of an epoch whose outputs have no positions, until it is reached."""
SUFFIX = ".ledger"
LOST = b"~"
"""Recorded when the ledger could not be written any further."""

Place = tuple[int, int]
"""An epoch and a position."""

_TOKEN = re.compile(rb"-(\d+)\.|@(\d+)(?:,(\d+))?;|(\.+)|(!)|(~)|(#)|\[([\d,]*)\]|\{[^}]*\}|<[^>]*>")


class Shape(NamedTuple):
    """Fields that the ranks of one pass have in common."""

    attempt: str
    stream: str
    order: str
    epoch: int
    start: int
    ranks: int
    global_batch: int
    ends: str
    sizes: str = ""
    """Batch sizes of a rank that change, as text."""
    first_step: int = 0
    """The number of the first step in the run, if batch sizes change."""
    batches: str = ""
    """The budget of batches by tokens, as text. Then positions count batches, of which each rank gets one in a step."""
    planned: str = ""
    """The place at which the pass begins, of such batches: the start of the window, and its batches so far."""
    done: str = ""
    """Positions after the start that are not delivered, as text."""

    @property
    def amid(self) -> Amid | None:
        """Positions that are done, with the steps between them, or None if everything is delivered."""
        return _amid(self) if self.done else None

    def after(self, steps: int) -> int:
        """Return the position after a number of steps, whether the epoch has so many or not."""
        if (amid := self.amid) is not None:
            return amid.done.remaining(amid.numbers.begin(steps))
        if not self.sizes:
            return self.start + steps * self.global_batch
        sizes = BatchSizes.of_text(self.sizes)
        return self.start + self.ranks * (sizes.before(self.first_step + steps) - sizes.before(self.first_step))

    def steps_to(self, position: int) -> int:
        """Return the number of steps that reach a position."""
        if (amid := self.amid) is not None:
            return amid.numbers.count(amid.done.before(position))
        if not self.sizes:
            return -(-(position - self.start) // self.global_batch)
        sizes = BatchSizes.of_text(self.sizes)
        rows = -(-(position - self.start) // self.ranks) + sizes.before(self.first_step)
        steps = sizes.step_at(rows)
        return steps + (sizes.before(steps) < rows) - self.first_step


class Amid(NamedTuple):
    """The positions of a pass that are done, and its steps among those that remain.

    ``start``: the first position that is delivered. Numbers of steps count from the beginning of the pass, with those
    that were excluded.
    """

    start: int
    done: Intervals
    numbers: StepNumbers


@lru_cache(maxsize=64)
def _amid(shape: Shape) -> Amid:
    start, _, done = Intervals.decode(shape.done).left(shape.start, 1 << 61)
    sizes = BatchSizes((0,), (shape.global_batch,))
    if shape.sizes:
        of_rank = BatchSizes.of_text(shape.sizes)
        sizes = BatchSizes(of_rank.steps, tuple(size * shape.ranks for size in of_rank.sizes))
    first = shape.first_step + steps_filled(sizes, shape.first_step, start - shape.start)
    found = StepNumbers.of(done, start, first, sizes)
    return Amid(start, done, found)


@dataclass(frozen=True)
class Passed:
    """The record of one pass by one process: the number of steps delivered, and rows skipped in them."""

    shape: Shape
    beginning: tuple[int, int, float]
    """The number of the start, of the pass in its process, and the time."""
    process: str
    how: str
    origin: Place
    rank: int
    end: int
    rows: int
    name: str = ""
    steps: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    """(step, rows skipped), for steps with skipped rows."""
    beside: bool = False
    """True if another loader of the same rows recorded at the same time."""
    marks: tuple[Mark, ...] = ()
    is_load: bool = False
    """True if only a state was loaded, and no pass is begun yet."""
    reused: bool = False
    """True if another start had the same name."""
    lost: bool = False
    """True if the ledger could not be written any further in this pass."""
    track: LaneTrack | None = None
    """The cursors of the lanes, if positions cannot be computed."""
    lanes: int = 0
    finished: bool = False
    """True if the end of the epoch was reached, for passes without positions."""
    previous: tuple[tuple[str, int], ...] = ()
    """Files of earlier processes of this rank, and the number of their steps when this process began to record: the
    last one of a start of the same name, and the last one of another start.
    """
    workers: int | None = None
    space: str = ""
    """The machine or container of the process."""
    excluded: str = ""
    """Rows of the sources that yield nothing, as text, if positions cannot be computed."""
    excluded_places: Mapping[int, Intervals] = field(default_factory=dict)
    """Outputs by lane, or positions as those of lane 0, that ``Loader.exclude`` left out after the start."""
    seen: float | None = None
    """Time of the last step, within a second. None in ledgers of older versions."""
    sources: tuple[str, ...] = ()
    """Names of the sources, if batches have provenance."""
    documents: RecordedDocuments | None = None
    """The documents of the steps of the process, if they are recorded."""
    leases: LeaseRecord | None = None
    """Leases and acknowledgements, if its batches were leases."""
    mix: RecordedMix | None = None
    """The mix, if it has a schedule or weights that were set."""


def numbered(path: Path) -> tuple[int, str] | None:
    """Return the number of the start of a file, and the mark in its name."""
    match = re.match(r"(\d+)-([0-9a-f]{10})-rank", path.name)
    return (int(match[1]), match[2]) if match else None


def read_passes(path: Path) -> list[Passed]:
    """Return the passes in one file. An incomplete record at the end, after the death of a machine, is ignored."""
    found: list[Passed] = []
    header: dict[str, Any] | None = None
    for line in path.read_bytes().split(b"\n"):
        if line.startswith(b"{"):
            header = _header(line, path)
            if header is not None and header.get("load"):
                found.append(_passed(header, b"", path))
                header = None
        elif (record := line.split(b"\0")[0]) and header is not None:  # zeros follow the records
            found.append(_passed(header, record, path))
            header = None
    return found


def steps_in(passes: list[Passed], stream: str) -> int:
    """Count the steps of a stream."""
    return sum(one.steps for one in passes if one.shape.stream == stream)


def _header(line: bytes, path: Path) -> dict[str, Any] | None:
    try:
        header = json.loads(line.split(b"\0")[0])
    except ValueError:
        return None  # truncated, so nothing can follow
    if not isinstance(header, dict) or not isinstance(header.get("midepoch_ledger"), int):
        raise StateError(f"{path} is not a ledger of midepoch.")
    if header["midepoch_ledger"] > VERSION:
        raise StateError(f"{path} was written by a newer midepoch. Upgrade midepoch to read it.")
    return header


def _passed(header: dict[str, Any], record: bytes, path: Path) -> Passed:
    steps, beside, lost = 0, False, False
    skipped: list[tuple[int, int]] = []
    marks: list[Mark] = []
    finished = False
    for without, after, waited, dots, bang, end, over, figures in _TOKEN.findall(record):
        if without:
            skipped.append((steps, int(without)))
            steps += 1
        elif after:
            marks.append(Mark(steps, int(after), int(waited or 0)))
        elif figures and marks:
            marks[-1] = marks[-1]._replace(figures=read_figures(figures))
        steps += len(dots)
        beside, lost, finished = beside or bool(bang), lost or bool(end), finished or bool(over)
    number = (numbered(path) or (0, ""))[0]
    try:
        return Passed(
            shape=Shape(**{name: header[name] for name in Shape._fields if name in header}),
            beginning=(number, header["number"], header["time"]),
            process=header["process"],
            how=header["how"],
            origin=(header["stood"][0], header["stood"][1]),
            rank=header["rank"],
            end=header["end"],
            rows=header["rows"],
            name=header["name"],
            steps=steps,
            skipped=tuple(skipped),
            beside=beside,
            marks=tuple(marks),
            is_load=bool(header.get("load")),
            lost=lost,
            track=LaneTrack(dict(header["cursors"]), record, frozenset(header.get("ended", ())))
            if "cursors" in header
            else None,
            lanes=header.get("lanes", 0),
            finished=finished,
            previous=tuple((name, steps) for name, steps in header.get("previous", ())),
            workers=header.get("workers"),
            space=header.get("space", ""),
            excluded=header.get("excluded", ""),
            excluded_places={
                int(lane): Intervals.decode(places) for lane, places in header.get("excluded_places", {}).items()
            },
            seen=header["time"] + int(header["seen"]) / 1000 if "seen" in header else None,
            sources=tuple(header.get("sources", ())),
            documents=RecordedDocuments(path) if "sources" in header and "cursors" in header else None,
            leases=read_leases(header, record),
            mix=read_mix(header.get("mix")),
        )
    except (KeyError, ValueError, TypeError, IndexError) as problem:
        raise StateError(f"{path} is damaged: {type(problem).__name__}: {problem}") from None
