"""Reading the ledger: the passes of every process, and which of them belong together."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from midepoch.audit.ledger import SUFFIX, VERSION, numbered
from midepoch.errors import DataNotFoundError, StateError

Place = tuple[int, int]
"""An epoch and a position."""

_TOKEN = re.compile(rb"-(\d+)\.|@(\d+)(?:,(\d+))?;|(\.+)|(!)")


class Shape(NamedTuple):
    """What the ranks of one pass have in common."""

    attempt: str
    stream: str
    order: str
    epoch: int
    start: int
    ranks: int
    global_batch: int
    ends: str


@dataclass(frozen=True)
class Passed:
    """What one process recorded of one pass: so many steps handed over, some with rows passed over."""

    shape: Shape
    beginning: tuple[int, int, float]
    """The number of the start, of the pass in its process, and the time."""
    process: str
    how: str
    stood: Place
    rank: int
    end: int
    rows: int
    name: str = ""
    steps: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    """(step, rows passed over), where there were any."""
    beside: bool = False
    """Whether another loader of the same rows recorded at the same time."""
    marks: tuple[tuple[int, int, int], ...] = ()
    """(steps so far, milliseconds since the beginning, milliseconds waited for data), now and then."""


@dataclass
class Generation:
    """All ranks' records of one pass. ``until`` is where the run left it: what lies behind was made again later."""

    shape: Shape
    beginning: tuple[int, int, int]
    """The number of the start, and the largest and least of the pass in its processes: what passes are ordered by."""
    hows: dict[int, str]
    """How each rank came to it: with a "fresh" loader, a "loaded" state, or going "on"."""
    stood: Place
    end: int
    rows: int
    name: str
    steps: dict[int, int]
    skipped: dict[int, tuple[tuple[int, int], ...]]
    until: int
    beside: bool = False
    missing: tuple[int, ...] = field(default=())
    hosts: frozenset[str] = frozenset()
    times: tuple[float, float] = (0.0, 0.0)
    """When something was recorded first and last, as far as that is told."""
    marks: dict[int, tuple[float, tuple[tuple[int, int, int], ...]]] = field(default_factory=dict)
    """By rank, when it began, and (steps so far, milliseconds since, milliseconds waited for data), now and then."""

    @property
    def how(self) -> str:
        """How the run came to it: if one rank loaded a state, all are taken to have."""
        return next(how for how in ("loaded", "fresh", "on") if how in self.hows.values())

    @property
    def place(self) -> Place:
        return (self.shape.epoch, self.shape.start)

    @property
    def behind(self) -> Place:
        """The place behind all that was kept of it."""
        return (self.shape.epoch, self.frontier)

    @property
    def is_look(self) -> bool:
        """Whether no rank was handed more than a first batch, of several."""
        return max(self.steps.values()) <= 1 and self.shape.start + self.shape.global_batch < self.end

    def made(self, rank: int) -> int:
        """The position up to which a rank was handed its rows, whether the run kept them or not."""
        return min(self.shape.start + self.steps.get(rank, 0) * self.shape.global_batch, self.end)

    def reached(self, rank: int) -> int:
        """The position up to which a rank got its rows, as the run went on."""
        return min(self.made(rank), self.until)

    @property
    def common(self) -> int:
        """The position up to which all ranks got their rows."""
        return self.shape.start if self.missing else min(map(self.reached, self.steps))

    @property
    def frontier(self) -> int:
        """The position that the rank ahead of all others reached."""
        return max(map(self.reached, self.steps))

    @property
    def kept_steps(self) -> int:
        """Steps that were made, up to where the run left the pass."""
        return -(-(self.frontier - self.shape.start) // self.shape.global_batch)

    @property
    def kept_skipped(self) -> int:
        """Rows passed over in those."""
        return sum(rows for of_rank in self.skipped.values() for step, rows in of_rank if step < self.kept_steps)


def ledger_folder(run: str | Path) -> Path:
    """The folder with the ledger of a run: itself, or ``ledger`` in it."""
    given = Path(run).expanduser()
    for folder in (given, given / "ledger"):
        if any(folder.glob(f"*{SUFFIX}")):
            return folder
    raise DataNotFoundError(f"there is no ledger in {given}: make loaders with audit={str(given)!r} to keep one.")


def read_generations(folder: Path) -> list[Generation]:
    """All passes over all processes and starts, in the order in which they were begun."""
    of_process: dict[tuple[str, int], list[Passed]] = defaultdict(list)
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        for one in read_passes(path):
            of_process[one.process, one.rank].append(one)
    groups: dict[tuple[Shape, int], list[Passed]] = defaultdict(list)
    for passes in of_process.values():
        passes.sort(key=lambda one: one.beginning)
        left = Counter(one.shape for one in passes)
        for one in passes:
            # Counted from the last: a rank may have had a look at the first batch that the others did not have.
            left[one.shape] -= 1
            groups[one.shape, left[one.shape]].append(one)
    found = [_together(shape, passes) for (shape, _), passes in groups.items()]
    return sorted(found, key=lambda one: one.beginning)


def _together(shape: Shape, passes: list[Passed]) -> Generation:
    of_rank: dict[int, Passed] = {}
    for one in passes:  # several processes of one rank (tensor parallelism) see the same rows
        if one.rank not in of_rank or one.steps > of_rank[one.rank].steps:
            of_rank[one.rank] = one
    starts, numbers, times = zip(*(one.beginning for one in passes), strict=True)
    end = max(one.end for one in passes)
    return Generation(
        shape,
        (min(starts), max(numbers), min(numbers)),
        {rank: one.how for rank, one in of_rank.items()},
        min(one.stood for one in passes),
        end,
        passes[0].rows,
        passes[0].name,
        {rank: one.steps for rank, one in of_rank.items()},
        {rank: one.skipped for rank, one in of_rank.items() if one.skipped},
        end,
        any(one.beside for one in passes),
        tuple(rank for rank in range(shape.ranks) if rank not in of_rank),
        frozenset(one.process.rsplit("-", 2)[0] for one in passes),
        (min(times), max(one.beginning[2] + (one.marks[-1][1] / 1000 if one.marks else 0) for one in passes)),
        {rank: (one.beginning[2], one.marks) for rank, one in of_rank.items()},
    )


def read_passes(path: Path) -> list[Passed]:
    """The passes in one file. What a dying machine left behind the last whole record is not counted."""
    found: list[Passed] = []
    header: dict[str, Any] | None = None
    for line in path.read_bytes().split(b"\n"):
        if line.startswith(b"{"):
            header = _header(line, path)
        elif (record := line.split(b"\0")[0]) and header is not None:  # zeros stand behind what was written
            found.append(_passed(header, record, path))
            header = None
    return found


def _header(line: bytes, path: Path) -> dict[str, Any] | None:
    try:
        header = json.loads(line)
    except ValueError:
        return None  # cut short, so nothing can follow
    if not isinstance(header, dict) or not isinstance(header.get("midepoch_ledger"), int):
        raise StateError(f"{path} is not a ledger of midepoch.")
    if header["midepoch_ledger"] > VERSION:
        raise StateError(f"{path} was written by a newer midepoch: upgrade to read it.")
    return header


def _passed(header: dict[str, Any], record: bytes, path: Path) -> Passed:
    steps, beside = 0, False
    skipped: list[tuple[int, int]] = []
    marks: list[tuple[int, int, int]] = []
    for without, after, waited, dots, bang in _TOKEN.findall(record):
        if without:
            skipped.append((steps, int(without)))
            steps += 1
        elif after:
            marks.append((steps, int(after), int(waited or 0)))
        steps += len(dots)
        beside = beside or bool(bang)
    number = (numbered(path) or (0, ""))[0]
    try:
        return Passed(
            shape=Shape(*(header[name] for name in Shape._fields)),
            beginning=(number, header["number"], header["time"]),
            process=header["process"],
            how=header["how"],
            stood=(header["stood"][0], header["stood"][1]),
            rank=header["rank"],
            end=header["end"],
            rows=header["rows"],
            name=header["name"],
            steps=steps,
            skipped=tuple(skipped),
            beside=beside,
            marks=tuple(marks),
        )
    except (KeyError, ValueError, TypeError, IndexError) as problem:
        raise StateError(f"{path} is damaged: {type(problem).__name__}: {problem}") from None
