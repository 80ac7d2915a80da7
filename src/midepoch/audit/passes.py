"""Reading the ledger: the passes of every process, and which of them belong together."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from midepoch.audit.ledger import SUFFIX, VERSION
from midepoch.errors import DataNotFoundError, StateError


class Shape(NamedTuple):
    """What the ranks of one pass have in common."""

    attempt: str
    stream: str
    order: str
    epoch: int
    start: int
    ranks: int
    global_batch: int


@dataclass(frozen=True)
class Passed:
    """What one process recorded of one pass: so many steps handed over, so many rows passed over."""

    shape: Shape
    rank: int
    end: int
    rows: int
    time: float
    steps: int
    skipped: int
    header: dict[str, Any] = field(compare=False, repr=False)
    marks: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)
    """(steps so far, milliseconds since the beginning), now and then."""


@dataclass
class Generation:
    """All ranks' records of one pass. ``until`` is where the run left it: what lies behind was made again later."""

    shape: Shape
    time: float
    end: int
    rows: int
    steps: dict[int, int]
    skipped: int
    until: int
    missing: tuple[int, ...] = ()

    def reached(self, rank: int) -> int:
        """The position up to which a rank got its rows, as the run went on."""
        shape = self.shape
        return min(shape.start + self.steps.get(rank, 0) * shape.global_batch, self.end, self.until)

    @property
    def common(self) -> int:
        """The position up to which all ranks got their rows."""
        return self.shape.start if self.missing else min(map(self.reached, self.steps))

    @property
    def frontier(self) -> int:
        """The position that the rank ahead of all others reached."""
        return max(map(self.reached, self.steps))


def ledger_folder(run: str | Path) -> Path:
    """The folder with the ledger of a run: itself, or ``ledger`` in it."""
    given = Path(run).expanduser()
    for folder in (given, given / "ledger"):
        if any(folder.glob(f"*{SUFFIX}")):
            return folder
    raise DataNotFoundError(f"there is no ledger in {given}: make loaders with audit={str(given)!r} to keep one.")


def read_generations(folder: Path) -> list[Generation]:
    """All passes over all processes and starts, in the order in which they were begun."""
    groups: dict[tuple[Shape, int], list[Passed]] = defaultdict(list)
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        passes = read_passes(path)
        left = Counter(one.shape for one in passes)
        for one in passes:
            # Counted from the last: a rank may have had a look at the first batch that the others did not have.
            left[one.shape] -= 1
            groups[one.shape, left[one.shape]].append(one)
    found = [_together(shape, passes) for (shape, _), passes in groups.items()]
    return sorted(found, key=lambda one: (one.time, one.shape))


def _together(shape: Shape, passes: list[Passed]) -> Generation:
    steps: dict[int, int] = {}
    skipped: dict[int, int] = {}
    for one in passes:  # several processes of one rank (tensor parallelism) see the same rows
        steps[one.rank] = max(steps.get(one.rank, 0), one.steps)
        skipped[one.rank] = max(skipped.get(one.rank, 0), one.skipped)
    missing = tuple(rank for rank in range(shape.ranks) if rank not in steps)
    end = max(one.end for one in passes)
    time = min(one.time for one in passes)
    return Generation(shape, time, end, passes[0].rows, steps, sum(skipped.values()), end, missing)


def read_passes(path: Path) -> list[Passed]:
    """The passes in one file. What a dying machine left behind the last whole record is not counted."""
    found: list[Passed] = []
    header: dict[str, Any] | None = None
    for line in path.read_bytes().split(b"\n"):
        if line.startswith(b"{"):
            header = _header(line, path)
        elif line and header is not None:
            found.append(_passed(header, line.split(b"\0")[0], path))
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
    steps = skipped = 0
    marks = []
    try:
        if record.strip(b"."):
            for piece in record.replace(b"@", b" @").replace(b";", b" ").replace(b"-", b" -").split():
                if piece.startswith(b"@"):
                    marks.append((steps, int(piece[1:])))
                elif piece.startswith(b"-"):
                    number, dot, rest = piece[1:].partition(b".")
                    skipped += int(number) if dot else 0
                    steps += len(dot) + rest.count(b".")
                else:
                    steps += piece.count(b".")
        else:
            steps = len(record)
        shape = Shape(*(header[name] for name in Shape._fields))
        return Passed(
            shape, header["rank"], header["end"], header["rows"], header["time"], steps, skipped, header, tuple(marks)
        )
    except (KeyError, ValueError, TypeError) as problem:
        raise StateError(f"{path} is damaged: {type(problem).__name__}: {problem}") from None
