"""Counts of deliveries of each position of an epoch, by arithmetic on ranges instead of lists of 10⁹ positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.passes import Generation
from midepoch.order.intervals import EMPTY, Intervals

Int64Array = npt.NDArray[np.int64]
_CHUNK = 1 << 20


class Piece(NamedTuple):
    """The positions in [start, stop) that are one of ``residues`` modulo ``modulus``, or all if None.

    Positions that are ``done`` are not among them, and are not counted for the residues.
    """

    start: int
    stop: int
    modulus: int = 1
    residues: tuple[int, ...] | None = None
    done: Intervals = EMPTY


class Counts(NamedTuple):
    """Numbers of positions delivered once, more than once, never; and the first few of the latter two."""

    once: int
    repeated: int
    never: int
    examples: tuple[int, ...] = ()


def pieces_of(generation: Generation) -> Iterator[Piece]:
    """Yield the positions delivered to the ranks of a pass: one range for all of them, and the rest rank by rank."""
    start, common, ranks = generation.shape.start, generation.common, generation.shape.ranks
    amid = generation.shape.amid
    done = EMPTY if amid is None else amid.done
    start = start if amid is None else amid.start
    if common > start:
        yield Piece(start, common, done=done)
    ahead: dict[int, list[int]] = {}
    for rank in generation.steps:
        if (reached := generation.reached(rank)) > common:
            ahead.setdefault(reached, []).append(rank)
    for reached, which in ahead.items():
        yield Piece(common, reached, ranks, tuple(sorted(which)), done)


def count(pieces: Iterable[Piece], start: int, stop: int, examples: int = 10) -> Counts:
    """Count the deliveries of the positions [start, stop)."""
    inside = [piece for piece in pieces if piece.start < stop and piece.stop > start]
    edges = sorted({start, stop, *(min(max(edge, start), stop) for piece in inside for edge in piece[:2])})
    begin = sorted(inside, key=lambda piece: piece.start)
    finish = sorted(inside, key=lambda piece: piece.stop)
    active: list[Piece] = []
    once = repeated = never = at_begin = at_finish = 0
    found: list[int] = []
    for low, high in pairwise(edges):
        while at_begin < len(begin) and begin[at_begin].start <= low:
            active.append(begin[at_begin])
            at_begin += 1
        while at_finish < len(finish) and finish[at_finish].stop <= low:
            active.remove(finish[at_finish])
            at_finish += 1
        here = _count_evenly(active, low, high, examples - len(found))
        once, repeated, never = once + here.once, repeated + here.repeated, never + here.never
        found += here.examples
    return Counts(once, repeated, never, tuple(found))


def _count_evenly(active: list[Piece], low: int, high: int, examples: int) -> Counts:
    """Count within [low, high), in which the same pieces are active."""
    if len(active) == 1 and active[0].residues is None:
        never = active[0].done.count(low, high)
        left_out = active[0].done.from_(low).before_(high) if never else EMPTY
        return Counts(high - low - never, 0, never, tuple(left_out.first(max(0, examples))))
    if any(piece.done for piece in active):
        return _count_one_by_one(active, low, high, examples)
    moduli = {piece.modulus for piece in active if piece.residues is not None}
    if len(moduli) > 1:  # only if two worlds of different sizes had the same rows
        return _count_one_by_one(active, low, high, examples)
    modulus = next(iter(moduli), 1)
    times = np.zeros(modulus, dtype=np.int64)
    for piece in active:
        times[slice(None) if piece.residues is None else list(piece.residues)] += 1
    residue = np.arange(modulus)
    # Number of positions of each residue in [low, high).
    sizes = (high - residue + modulus - 1) // modulus - (low - residue + modulus - 1) // modulus
    bad = np.flatnonzero(times != 1)
    span = modulus * np.arange(min(max(0, examples), -(-(high - low) // modulus)))
    first = np.sort((low + (bad - low) % modulus)[:examples, None] + span, axis=None)
    return Counts(
        int(sizes[times == 1].sum()),
        int(sizes[times > 1].sum()),
        int(sizes[times == 0].sum()),
        tuple(first[first < high][: max(0, examples)].tolist()),
    )


def _count_one_by_one(active: list[Piece], low: int, high: int, examples: int) -> Counts:
    once = repeated = never = 0
    found: list[int] = []
    for begin in range(low, high, _CHUNK):
        positions = np.arange(begin, min(begin + _CHUNK, high))
        times = np.sum([covers(piece, positions) for piece in active], axis=0, dtype=np.int64)
        once += int((times == 1).sum())
        repeated += int((times > 1).sum())
        never += int((times == 0).sum())
        found += positions[times != 1][: max(0, examples - len(found))].tolist()
    return Counts(once, repeated, never, tuple(found))


def covers(piece: Piece, positions: Int64Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the positions in a piece."""
    inside = (positions >= piece.start) & (positions < piece.stop)
    if piece.done:
        inside &= ~piece.done.contains(positions)
        positions = piece.done.before(positions)
    return inside if piece.residues is None else inside & np.isin(positions % piece.modulus, piece.residues)


def never_in(pieces: Iterable[Piece], some: Intervals, start: int, stop: int) -> int:
    """Count the positions of a set, in [start, stop), that are in none of the pieces."""
    pieces, total = list(pieces), 0
    wanted = some.from_(start).before_(stop).positions()
    for first in range(0, len(wanted), _CHUNK):
        positions = wanted[first : first + _CHUNK]
        covered = np.zeros(len(positions), np.bool_)
        for piece in pieces:
            covered |= covers(piece, positions)
        total += int((~covered).sum())
    return total


def positions_in(pieces: Iterable[Piece]) -> Iterator[Int64Array]:
    """Yield all positions of the pieces, in chunks."""
    for piece in pieces:
        for begin in range(piece.start, piece.stop, _CHUNK):
            positions = np.arange(begin, min(begin + _CHUNK, piece.stop))
            yield positions[covers(piece, positions)]
