"""The format of a ledger's files: the first line of a pass, and reading what one process recorded.

A pass is a line of JSON, its *header*, followed by one byte for each step. The header has the cursor at which the pass
begins, as a state has it, and the settings of its batches. So the units of every step follow from it: the third ``.``
after ``{"epoch": 0, "steps": 0, "unit": "rows", "cursor": {}, "size": "4", "ranks": 2, "rank": 1, …}`` is the delivery
of the positions 17, 19, 21 and 23. In lanes, the units of a step are recorded with it (``midepoch.audit.lanes``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from midepoch.audit.documents import RecordedDocuments
from midepoch.audit.lanes import LaneTrack
from midepoch.audit.orders import RecordedMix, mix_of, order_name, read_mix
from midepoch.errors import StateError
from midepoch.order.budget import BatchSizes
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor
from midepoch.pipeline.plans import UNKNOWN
from midepoch.pipeline.spec import PipelineSpec
from midepoch.state.format import cursor_from_json, cursor_to_json, excluded_from_json


class Figures(NamedTuple):
    """Sums of one rank in a pass. None if not known.

    Rows, tokens, slots and blocks are counted from the first batch on, as the time is; work from before it.
    """

    rows: int | None = None
    """Delivered rows, or outputs."""
    tokens: int | None = None
    """Tokens in them, without padding."""
    slots: int | None = None
    """Places for tokens in them, with padding."""
    read: int | None = None
    """Milliseconds of work, over all workers: finding, fetching, decoding and gathering rows."""
    map: int | None = None
    """Running the user's maps and filters."""
    combine: int | None = None
    """Mixing, packing and grouping rows, and reading them if that is not measured apart. Not known with workers."""
    collate: int | None = None
    """Assembling batches."""
    transport: int | None = None
    """Sending batches from workers. Not known without workers."""
    blocks: int | None = None
    """Requested blocks that have to be fetched or decoded."""
    ready: int | None = None
    """Number of those that were ready when requested."""
    packed: int | None = None
    """Tokens in the packed sequences that were made. Not known without packing."""
    places: int | None = None
    """Places for tokens in those."""

    def minus(self, other: Figures) -> Figures:
        """Return the increase of each figure since earlier ones."""
        return Figures(*(None if a is None else max(0, a - (b or 0)) for a, b in zip(self, other, strict=True)))

    def plus(self, other: Figures) -> Figures:
        """Return the sums, of figures that are known in one of them."""
        pairs = zip(self, other, strict=True)
        return Figures(*(None if a is None and b is None else (a or 0) + (b or 0) for a, b in pairs))

    def counted_from(self, delivered: Figures) -> Figures:
        """Return these as a base, but with the rows, tokens, slots and blocks of later ones."""
        names = ("rows", "tokens", "slots", "blocks", "ready")  # the first block is never ready
        return self._replace(**{name: getattr(delivered, name) for name in names})

    def record(self) -> bytes:
        """Return the bytes to write after a mark."""
        return b"[%b]" % ",".join("" if value is None else str(value) for value in self).encode()


def read_figures(text: bytes) -> Figures:
    """Return the figures between the brackets."""
    values = [int(value) if value else None for value in text.split(b",")]
    return Figures(*values[: len(Figures._fields)])


class MeasuredFigures(Protocol):
    """The measurements of a loader, as far as the ledger records them."""

    @property
    def all_waited(self) -> float:
        """Seconds that the model has waited for data since the loader was created."""

    def figures(self) -> Figures:
        """Return the sums since the loader was created."""


class Mark(NamedTuple):
    """An occasional record of a pass: steps so far, milliseconds since its first batch, milliseconds waited."""

    steps: int
    elapsed: int
    waited: int
    figures: Figures | None = None
    """None in ledgers of older versions."""


_RECORD = re.compile(rb"<([aru])([^>]*)>|\.")


class LeaseSteps(NamedTuple):
    """The steps of a pass of leases: those that it leaves out, of the plan or, in lanes, of the pass.

    ``first``: the number of its first step, in lanes.
    """

    left_out: Intervals
    first: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the field ``leases`` of a pass."""
        return {"acked": self.left_out.encode(), "first": self.first}


def record_of(kind: str, steps: Intervals, units: Mapping[int, Intervals]) -> bytes:
    """Return the record of acknowledged (``a``) or rejected (``r``) steps, and of their outputs or turns."""
    lanes = "|".join(f"{lane}:{_ranges(some)}" for lane, some in units.items())
    return f"<{kind}{_ranges(steps)};{lanes}>".encode()


RETURNED = b"<u>"


def _ranges(some: Intervals) -> str:
    pairs = zip(some.starts.tolist(), (some.stops - 1).tolist(), strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def _intervals(text: str) -> Intervals:
    pairs = [each.partition("-")[::2] for each in text.split(",") if each]
    return Intervals.of([int(first) for first, _ in pairs], [int(last or first) + 1 for first, last in pairs])


class LeaseRecord(NamedTuple):
    """The leases of one pass by one process. Units are outputs of lanes, or turns as those of lane 0."""

    delivered: Intervals
    """Numbers of its steps."""
    finished: Intervals
    """Numbers of steps that are acknowledged."""
    acked: Mapping[int, Intervals]
    rejected: Mapping[int, Intervals]
    returned: bool
    first: int = 0
    """The number of the first step of the pass, in lanes."""

    def has(self, step: int) -> bool:
        """Return True if a step of the pass was delivered. One that was acknowledged before is left out."""
        return self.delivered.contains_one(self.first + step)


def read_leases(header: Mapping[str, Any], record: bytes) -> LeaseRecord | None:
    """Return the leases of a pass, or None if it had none."""
    if (field := header.get("leases")) is None:
        return None
    acked: dict[int, list[Intervals]] = {}
    rejected: dict[int, list[Intervals]] = {}
    delivered, steps, returned = 0, EMPTY, False
    for kind, text in _RECORD.findall(record):
        if not kind:
            delivered, returned = delivered + 1, False
        elif kind == b"u":
            returned = True
        else:
            of_steps, _, lanes_of_units = text.decode().partition(";")
            steps = steps.union(_intervals(of_steps))
            for part in filter(None, lanes_of_units.split("|")):
                lane, _, units = part.partition(":")
                acked.setdefault(int(lane), []).append(_intervals(units))
                if kind == b"r":
                    rejected.setdefault(int(lane), []).append(_intervals(units))
    first = field.get("first", 0)
    return LeaseRecord(
        _steps(delivered, Intervals.decode(field.get("acked", "")), first if header["unit"] == "outputs" else None),
        steps,
        {lane: EMPTY.union(*some) for lane, some in acked.items()},
        {lane: EMPTY.union(*some) for lane, some in rejected.items()},
        returned,
        first,
    )


def _steps(delivered: int, left_out: Intervals, first: int | None) -> Intervals:
    """Return the numbers of the first steps of a pass. ``first``: that of the first one, in lanes."""
    if first is None:
        return Intervals.from_positions(left_out.remaining(np.arange(delivered)))
    own = Intervals.of(0, delivered).minus(left_out)
    return Intervals.of(own.starts + first, own.stops + first)


VERSION = 4
SUFFIX = ".ledger"

LOST = b"~"
"""Recorded when the ledger could not be written any further."""

_TOKEN = re.compile(rb"-(\d+)\.|@(\d+)(?:,(\d+))?;|(\.+)|(!)|(~)|(#)|\[([\d,]*)\]|\{[^}]*\}|<[^>]*>")


class RecordedBatching(NamedTuple):
    """The settings of batches that a header records. ``size``: rows of a rank, or sizes by step as text."""

    size: str
    ends: str
    budget: str = ""

    @property
    def sizes(self) -> int | BatchSizes:
        """The rows of a rank in a step."""
        return BatchSizes.of_text(self.size) if ":" in self.size else int(self.size)


class Shape(NamedTuple):
    """Fields that the ranks of one pass have in common."""

    attempt: str
    stream: str
    order: str
    epoch: int
    start: int
    """The position at which it begins. 0 in lanes, where ranks may have different ones."""
    ranks: int
    batching: RecordedBatching
    steps: int = 0
    """Steps of the run before it. 0 in lanes, where ranks may have different numbers."""

    @property
    def global_batch(self) -> int:
        """Rows of a step, of all ranks: the most, if sizes change."""
        sizes = self.batching.sizes
        return self.ranks * (sizes if isinstance(sizes, int) else max(sizes.sizes))


def header_of(
    spec: PipelineSpec,
    cursor: Cursor,
    origin: Cursor,
    batching: RecordedBatching,
    until: int,
    leased: LeaseSteps | None,
) -> dict[str, Any]:
    """Return what all passes record. ``origin``: where the run was before. ``until``: units of the epoch, if known."""
    shard = spec.shard
    return {
        "midepoch_ledger": VERSION,
        "order": order_name(spec),
        "stood": [origin.epoch, origin.steps],
        "rank": shard.index,
        "ranks": shard.count,
        "epoch": cursor.epoch,
        "steps": cursor.steps,
        "unit": spec.unit,
        "cursor": cursor_to_json(cursor if spec.unit == "rows" else cursor.without_stages()),
        "end": until,
        "rows": spec.rows,
        "size": batching.size,
        "ends": batching.ends,
        **({"budget": batching.budget} if batching.budget else {}),
        **({"excluded": spec.excluded_texts} if spec.excluded else {}),
        **({} if leased is None else {"leases": leased.to_json()}),
        **mix_of(spec.node, cursor.epoch),
    }


@dataclass(frozen=True)
class Passed:
    """The record of one pass by one process: the number of steps delivered, and rows skipped in them."""

    shape: Shape
    cursor: Cursor
    """The cursor at which it began. In lanes, without those of their stages, which ``track`` has."""
    unit: str
    beginning: tuple[int, int, float]
    """The number of the start, of the pass in its process, and the time."""
    process: str
    how: str
    origin: tuple[int, int]
    """The epoch and step at which the run was before."""
    rank: int
    end: int
    """Units of the epoch, if they are known, else UNKNOWN."""
    rows: int
    name: str
    steps: int
    skipped: tuple[tuple[int, int], ...]
    """(step, rows skipped), for steps with skipped rows."""
    beside: bool
    """True if another loader of the same rows recorded at the same time."""
    marks: tuple[Mark, ...]
    is_load: bool
    """True if only a state was loaded, and no pass is begun yet."""
    lost: bool
    """True if the ledger could not be written any further in this pass."""
    track: LaneTrack | None
    """The cursors of the lanes, if positions cannot be computed."""
    lanes: int
    finished: bool
    """True if the end of the epoch was reached."""
    previous: tuple[tuple[str, int], ...]
    """Files of earlier processes of this rank, and the number of their steps when this process began to record: the
    last one of a start of the same name, and the last one of another start.
    """
    workers: int | None
    space: str
    """The machine or container of the process."""
    excluded: list[Any]
    """Rows of the sources that are not delivered."""
    seen: float
    """Time of the last step, within a second."""
    sources: tuple[str, ...]
    """Names of the sources, if batches have provenance."""
    documents: RecordedDocuments | None
    """The documents of the steps of the process, if they are recorded."""
    leases: LeaseRecord | None
    """Leases and acknowledgements, if its batches were leases."""
    mix: RecordedMix | None
    """The mix, if it has a schedule or weights that were set."""
    reused: bool = False
    """True if another start had the same name."""

    def finds_the_end_of(self, before: Passed) -> bool:
        """Return True if the run continued with it after another pass of its epoch, and nothing was left."""
        continues = self.how == "on" and self.shape == before.shape and self.leases is None and not before.is_load
        edited = any(lane.excluded for lane in self.cursor.lanes.values()) or self.excluded != before.excluded
        return continues and self.finished and not self.steps and not before.finished and not edited

    def excluded_rows(self, sources: int) -> tuple[Intervals, ...]:
        """Return the excluded rows of each source."""
        return excluded_from_json(self.excluded, sources)


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
    if header["midepoch_ledger"] != VERSION:
        age = "a newer" if header["midepoch_ledger"] > VERSION else "an earlier development"
        raise StateError(f"{path} was written by {age} version of midepoch. Read it with that version.")
    return header


def _passed(header: dict[str, Any], record: bytes, path: Path) -> Passed:
    steps, beside, lost, finished = 0, False, False, False
    skipped: list[tuple[int, int]] = []
    marks: list[Mark] = []
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
    try:
        unit = header["unit"]
        lanes = cursor_from_json(header["cursor"], unit, header.get("lanes", 1))
        cursor = Cursor(header["epoch"], lanes, header["steps"])
        in_lanes = unit == "outputs"
        shape = Shape(
            header["attempt"],
            header["stream"],
            header["order"],
            header["epoch"],
            0 if in_lanes else cursor.position,
            header["ranks"],
            RecordedBatching(header["size"], header["ends"], header.get("budget", "")),
            0 if in_lanes or "leases" in header else header["steps"],
        )
        return Passed(
            shape=shape,
            cursor=cursor,
            unit=unit,
            beginning=((numbered(path) or (0, ""))[0], header["number"], header["time"]),
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
            track=LaneTrack(dict(header["cursors"]), record, frozenset(header["ended"])) if in_lanes else None,
            lanes=header.get("lanes", 0),
            finished=finished,
            previous=tuple((name, count) for name, count in header.get("previous", ())),
            workers=header.get("workers"),
            space=header.get("space", ""),
            excluded=header.get("excluded", []),
            seen=header["time"] + int(header.get("seen", "0")) / 1000,
            sources=tuple(header.get("sources", ())),
            documents=RecordedDocuments(path) if "sources" in header and in_lanes else None,
            leases=read_leases(header, record),
            mix=read_mix(header.get("mix")),
        )
    except (KeyError, ValueError, TypeError, IndexError) as problem:
        raise StateError(
            f"{path} is damaged: {type(problem).__name__}: {problem}. Move it to another folder to read the rest."
        ) from None


def batching_of(
    size: int, sizes: BatchSizes | None, last_batch: str | None, budget: str, *, planned: bool
) -> RecordedBatching:
    """Return the settings of batches as a header records them."""
    ends = last_batch or ("dealt" if planned else "uneven")
    return RecordedBatching(str(size) if sizes is None else sizes.text, ends, budget)


__all__ = ["LOST", "SUFFIX", "UNKNOWN", "Passed", "RecordedBatching", "Shape", "header_of", "read_passes"]
