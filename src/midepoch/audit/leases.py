"""Leases in a ledger: which of them were acknowledged.

A pass of leases has ``leases`` in its first line: the steps that it leaves out because this rank has acknowledged
them. Among its steps are records in angle brackets, written when acknowledgements are settled:
``<a3-9,12;0:192-640>``, the steps, and by lane their outputs, or as lane 0 their turns (the numbers of their positions
among those that the pass delivers). ``r`` instead of ``a``: they were rejected. ``<u>``: all that were out are
returned. An acknowledgement is recorded before it is in a state, so that one without a record is in no state either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from midepoch.order.intervals import EMPTY, Intervals

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
