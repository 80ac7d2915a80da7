"""The records of a ledger: the header of a pass, what follows it, and reading what one process recorded.

A pass is a *header* in JSON, followed by counters. The header has the cursor at which the pass begins, as a state has
it, and the settings of its batches. So the units of every step follow from it, and the number of steps is all that has
to be counted: step 3 of ``{"unit": "rows", "cursor": [0, 0, []], "batching": ["4", …], "ranks": 2, "rank": 1, …}`` is
the delivery of the positions 17, 19, 21 and 23. In lanes, the units of steps are recorded as well
(``midepoch.audit.lanes``). Records about some steps may follow: skipped rows, times and figures, acknowledgements of
leases, and the end of the epoch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from midepoch.audit.documents import RecordedDocuments
from midepoch.audit.journal import COUNTERS, ENDED, Record, is_cut, records_in
from midepoch.audit.lanes import CURSORS, LaneTrack
from midepoch.audit.orders import RecordedMix
from midepoch.errors import StateError
from midepoch.order.budget import BatchSizes
from midepoch.order.intervals import EMPTY, Intervals
from midepoch.pipeline.cursor import Cursor
from midepoch.state.format import cursor_from_json, cursor_to_json, excluded_from_json

VERSION = 7
SUFFIX = ".ledger"
HEADER, MARK, SKIPPED, OVER, ACKED, RETURNED = b"pass", b"mark", b"skip", b"over", b"acks", b"back"
SAVED = b"save"
"""A state was saved. The number of the record is that of the steps before it."""


class Count(IntEnum):
    """The counters of a pass."""

    STEPS = 0
    """Steps delivered."""
    SEEN = 1
    """Milliseconds from the time of the header to the last step, within a second."""
    LOST = 2
    """1 if the ledger could not be written any further, or a pass before this one could not be recorded."""
    BESIDE = 3
    """1 if another loader of the same rows recorded at the same time."""


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


class MeasuredFigures(Protocol):
    """The measurements of a loader that the ledger records."""

    @property
    def all_waited(self) -> float:
        """Seconds that the model has waited for data since the loader was created."""

    @property
    def last_delivery(self) -> float | None:
        """Time of the last delivery of a batch, by ``time.perf_counter``."""

    def figures(self) -> Figures:
        """Return the sums since the loader was created."""


class Mark(NamedTuple):
    """An occasional record of a pass: steps so far, milliseconds since its first batch, milliseconds waited."""

    steps: int
    elapsed: int
    waited: int
    figures: Figures


class LeaseSteps(NamedTuple):
    """The steps of a pass of leases: those that it leaves out, of the plan or, in lanes, of the pass.

    ``first``: the number of its first step, in lanes.
    """

    left_out: Intervals
    first: int = 0


def acknowledgement(steps: Intervals, units: Mapping[int, Intervals], *, rejected: bool) -> bytes:
    """Return the record of acknowledged or rejected steps, and of their outputs or turns."""
    of_steps, *of_lanes = ([some.starts.tolist(), some.stops.tolist()] for some in (steps, *units.values()))
    return json.dumps([rejected, of_steps, dict(zip(units, of_lanes, strict=True))]).encode()


class LeaseRecord(NamedTuple):
    """The leases of one pass by one process. Units are outputs of lanes, or turns as those of lane 0."""

    delivered: Intervals
    """Numbers of its steps."""
    finished: Intervals
    """Numbers of steps that are acknowledged."""
    acked: Mapping[int, Intervals]
    rejected: Mapping[int, Intervals]
    returned: bool
    first: int
    """The number of the first step of the pass, in lanes."""

    @staticmethod
    def of(header: PassHeader, steps: int, acks: Iterable[Any], returns: Iterable[int]) -> LeaseRecord:
        """Return the leases of a pass of so many steps, by its records of acknowledgements and returns."""
        assert header.leases is not None
        left_out, first = header.leases
        if header.lanes:
            own = Intervals.of(0, steps).minus(left_out)
            delivered = Intervals.of(own.starts + first, own.stops + first)
        else:
            delivered = Intervals.from_positions(left_out.remaining(np.arange(steps)))
        finished = EMPTY
        acked: dict[int, Intervals] = {}
        rejected: dict[int, Intervals] = {}
        for is_rejected, of_steps, of_lanes in acks:
            finished = finished.union(Intervals.of(*of_steps))
            for units in (acked, rejected) if is_rejected else (acked,):
                for lane, some in of_lanes.items():
                    units[int(lane)] = units.get(int(lane), EMPTY).union(Intervals.of(*some))
        returned = [*returns][-1:] == [steps]  # else more were delivered after that
        return LeaseRecord(delivered, finished, acked, rejected, returned, first)

    def has(self, step: int) -> bool:
        """Return True if a step of the pass was delivered. One that was acknowledged before is left out."""
        return self.delivered.contains_one(self.first + step)


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


@dataclass(frozen=True)
class PassHeader:
    """The first record of a pass, or the record that a state was loaded."""

    attempt: str
    branch: str
    """The branch of the run: from a state that was loaded to the next."""
    origins: Sequence[str]
    """The branches in which the state was saved that was loaded, if they are known."""
    stream: str
    order: str
    name: str
    process: str
    space: str
    """The machine or container of the process."""
    number: int
    """The number of the pass in its process."""
    time: float
    previous: Sequence[tuple[str, int]]
    """Files of earlier processes of this rank, and the number of their steps when this process began to record: the
    last one of a start of the same name, and the last one of another start.
    """
    how: str
    """The way in which the run came to it: it is "fresh", a state was "loaded", or it is "on" its way."""
    is_load: bool
    """True if only a state was loaded, and no pass is begun yet."""
    rank: int
    ranks: int
    workers: int
    cursor: Cursor
    """The cursor at which it begins. In lanes, without those of their stages."""
    lanes: int
    """The number of lanes, or 0 if positions can be computed."""
    places: Sequence[tuple[int, Any]]
    """Its own lanes, and the place of each (``midepoch.audit.lanes``)."""
    end: int
    """Units of the epoch, if they are known, else UNKNOWN."""
    rows: int
    batching: RecordedBatching
    excluded: Sequence[Any]
    """Rows of the sources that are not delivered."""
    leases: LeaseSteps | None
    """Its steps, if batches are leases."""
    mix: RecordedMix | None
    """The mix, if it has a schedule or weights that were set."""
    sources: Sequence[str]
    """Names of the sources, if batches have provenance."""
    version: int = VERSION

    def to_json(self) -> bytes:
        """Return the content of its record."""
        cursor = [self.cursor.epoch, self.cursor.steps, cursor_to_json(self.cursor)]
        leases = None if self.leases is None else [self.leases.left_out.encode(), self.leases.first]
        fields = {**vars(self), "cursor": cursor, "leases": leases, "mix": self.mix and asdict(self.mix)}
        return json.dumps(fields, separators=(",", ":")).encode()

    @staticmethod
    def from_json(content: bytes) -> PassHeader:
        """Return the header of a record. Raises StateError if another version has written it."""
        fields = json.loads(content)
        if fields["version"] != VERSION:
            age = "a newer" if fields["version"] > VERSION else "an earlier development"
            raise StateError(f"it was written by {age} version of midepoch. Read it with that version")
        (epoch, steps, lanes), leases, mix = fields["cursor"], fields["leases"], fields["mix"]
        unit = "outputs" if fields["lanes"] else "rows"
        found = {
            "cursor": Cursor(epoch, cursor_from_json(lanes, unit, fields["lanes"]), steps),
            "batching": RecordedBatching(*fields["batching"]),
            "leases": None if leases is None else LeaseSteps(Intervals.decode(leases[0]), leases[1]),
            "mix": None if mix is None else RecordedMix(**mix),
        }
        return PassHeader(**{**fields, **found})

    @property
    def shape(self) -> Shape:
        """Its fields that ranks have in common."""
        position = 0 if self.lanes else self.cursor.position
        steps = 0 if self.lanes or self.leases else self.cursor.steps
        common = (self.attempt, self.stream, self.order, self.cursor.epoch, position, self.ranks, self.batching)
        return Shape(*common, steps)

    def excluded_rows(self, sources: int) -> tuple[Intervals, ...]:
        """Return the excluded rows of each source."""
        return excluded_from_json(self.excluded, sources)


@dataclass(frozen=True)
class Passed:
    """The record of one pass by one process: its header, and what followed."""

    header: PassHeader
    records: Sequence[Record]
    path: Path
    most_steps: int | None = None
    """The number of its first steps, if only these count."""
    found_end: float = 0.0
    """Time at which a pass after it found that nothing is left of the epoch."""
    reused: bool = False
    """True if another start had the same name."""

    def _contents(self, kind: bytes) -> list[Any]:
        return [json.loads(bytes(record.content)) for record in self.records if record.kind == kind]

    @cached_property
    def shape(self) -> Shape:
        """Its fields that ranks have in common."""
        return self.header.shape

    @cached_property
    def start(self) -> int:
        """The number of the start."""
        return (numbered(self.path) or (0, ""))[0]

    @cached_property
    def counters(self) -> Sequence[int]:
        """Its counters (``Count``)."""
        return next((record.counters for record in self.records if record.kind == COUNTERS), [0] * len(Count))

    @cached_property
    def steps(self) -> int:
        """The number of steps delivered."""
        return self.counters[Count.STEPS] if self.most_steps is None else self.most_steps

    @cached_property
    def skipped(self) -> Sequence[tuple[int, int]]:
        """(step, rows skipped), for steps with skipped rows."""
        return self._contents(SKIPPED)

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """Its occasional records."""
        return tuple(Mark(*mark)._replace(figures=Figures(*mark[3])) for mark in self._contents(MARK))

    @property
    def last_time(self) -> float:
        """Time of the last step, as far as it is known: within a second."""
        counted = max(self.counters[Count.SEEN], self.marks[-1].elapsed if self.marks else 0)
        return max(self.found_end, self.header.time + counted / 1000)

    @cached_property
    def finished(self) -> bool:
        """True if the end of the epoch was reached, where it is not known before."""
        return any(record.kind == OVER for record in self.records)

    @cached_property
    def track(self) -> LaneTrack | None:
        """The cursors of its lanes, if positions cannot be computed."""
        if not self.header.lanes:
            return None
        places, lanes = dict(self.header.places), self.header.cursor.lanes
        ended = frozenset(number for number in places if number in lanes and lanes[number].ended)
        ends = self._contents(OVER)
        records = [record for record in self.records if record.kind == CURSORS]
        return LaneTrack(places, ended, self.steps, records, dict(ends[-1]) if ends else None)

    @cached_property
    def leases(self) -> LeaseRecord | None:
        """Leases and acknowledgements, if its batches were leases."""
        if self.header.leases is None:
            return None
        return LeaseRecord.of(self.header, self.steps, self._contents(ACKED), self._contents(RETURNED))

    @property
    def records_documents(self) -> bool:
        """True if the documents of its steps are recorded."""
        return bool(self.header.sources) and self.header.lanes > 0

    @cached_property
    def documents(self) -> RecordedDocuments:
        """The documents of the steps of the process."""
        return RecordedDocuments(self.path)

    @cached_property
    def saves(self) -> list[tuple[int, int]]:
        """The steps before each state that was saved, and the number of records before it."""
        return [(record.number, place) for place, record in enumerate(self.records) if record.kind == SAVED]

    def until(self, steps: int, stop: int | None = None) -> Passed:
        """Return the record as it was after some steps. ``stop``: only with so many of its records."""
        kept = [record for record in self.records[:stop] if record.kind != OVER or steps >= self.steps]
        return replace(self, records=kept, most_steps=min(max(steps, 0), self.steps))

    def with_end(self, found: Passed) -> Passed:
        """Return the record with the end of the epoch that a pass after it has found, and the states saved there."""
        ends = [one._replace(number=self.steps) for one in found.records if one.kind in (OVER, SAVED)]
        return replace(self, records=[*self.records, *ends], found_end=found.last_time)

    def finds_the_end_of(self, before: Passed) -> bool:
        """Return True if the run continued with it after another pass of its epoch, and nothing was left."""
        own, other = self.header, before.header
        continues = own.how == "on" and own.shape == other.shape and own.leases is None and not other.is_load
        edited = any(lane.excluded for lane in own.cursor.lanes.values()) or own.excluded != other.excluded
        return continues and self.finished and not self.steps and not before.finished and not edited


def numbered(path: Path) -> tuple[int, str] | None:
    """Return the number of the start of a file, and the mark in its name."""
    match = re.match(r"(\d+)-([0-9a-f]{10})-rank", path.name)
    return (int(match[1]), match[2]) if match else None


class LedgerFile(NamedTuple):
    """The passes in one file of a ledger. ``is_cut``: the end of the file is missing."""

    passes: list[Passed]
    is_cut: bool


def read_file(path: Path) -> LedgerFile:
    """Return what one process recorded. A damaged record, after the death of a machine, ends it."""
    data, found = path.read_bytes(), []
    records = list(takewhile(lambda record: record.is_intact, records_in(data)))
    # One that begins with its end could not be written any further before the first record.
    if data[:1].strip(b"\0") and not any(kind.startswith(data[:4]) for kind in (HEADER, ENDED)):
        raise StateError(f"{path} is not a ledger of midepoch. Move it out of the folder, or pass that of another run.")
    firsts = [place for place, record in enumerate(records) if record.kind == HEADER]
    try:
        for first, stop in pairwise([*firsts, len(records)]):
            header = PassHeader.from_json(bytes(records[first].content))
            passed = Passed(header, records[first + 1 : stop], path)
            recorded = any(each.kind in (OVER, ACKED, RETURNED) for each in passed.records)
            if header.is_load or passed.steps or passed.counters[Count.LOST] or recorded:
                found.append(passed)
    except StateError as problem:
        raise StateError(f"{path} cannot be read: {problem}.") from None
    return LedgerFile(found, is_cut(data))


def steps_in(passes: list[Passed], stream: str) -> int:
    """Count the steps of a stream."""
    return sum(one.steps for one in passes if one.header.stream == stream)
