"""Draws of rows by weight, each a function of the seed, the epoch and the position.

Every result is the same on every architecture. Probabilities are integers, and their sums are exact. Floating-point
numbers are only combined by single operations that IEEE 754 defines to the last bit. The logarithm is computed here,
because those of C libraries differ.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch.order.bijection import check_seed, derive, hashed

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

_BITS = 62
"""Probabilities are multiples of about 2**-62, so that sums of them fit 64-bit integers."""
_CHUNK = 1 << 20
_SMALLEST = 2.0**-1000
"""Weights below this share of the largest count as this share, without replacement: quotients stay finite."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True, eq=False)
class Weighted:
    """Description of a draw of ``samples`` rows an epoch, by one weight for each chosen row.

    With ``replacement``, every position draws from all rows. Without, a row comes at most once an epoch, and heavier
    rows tend to come earlier. Memory: 8 bytes a row for the weights. With replacement, a table of 12 bytes a row (16
    from 2**31 rows on); without, 8 bytes a sample for the order of the current epoch.
    """

    weights: Float64Array
    seed: int
    samples: int
    replacement: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_seed(self.seed))
        weights = checked(self.weights)
        weights.flags.writeable = False
        object.__setattr__(self, "weights", weights)
        most = (2**63 - 1) // len(weights) if self.replacement else int(np.count_nonzero(weights))
        if not 1 <= self.samples <= most:
            why = "the number of rows with a positive weight" if not self.replacement else "2**63 / rows"
            raise ValueError(f"num_samples must be in [1, {most}] ({why}), got {self.samples}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Weighted, (self.weights, self.seed, self.samples, self.replacement)  # without the table

    @property
    def scope(self) -> str:
        """Name of this kind of order. It is part of the state."""
        return "weighted" if self.replacement else "weighted without replacement"

    @property
    def text(self) -> str:
        """The order in words."""
        return f"{self.scope} (seed={self.seed})"

    @cached_property
    def digest(self) -> str:
        """Short name that identifies the weights. It is part of the state."""
        stored = self.weights.astype("<f8", copy=False)
        return f"{len(stored)} weights {hashlib.blake2b(stored.tobytes(), digest_size=8).hexdigest()}"

    @cached_property
    def table(self) -> AliasTable:
        """The table of the draws with replacement, made when the first row is drawn."""
        return AliasTable(self.weights)

    def seeded(self, seed: int) -> Weighted:
        """Return the same draw with another seed. The table is not made again."""
        other = replace(self, seed=seed)
        if "table" in self.__dict__:
            other.__dict__["table"] = self.table
        return other

    def at(self, epoch: int) -> Draws | DrawnOnce:
        """Return the draws of an epoch."""
        return Draws(self, epoch) if self.replacement else DrawnOnce(self, epoch)


class Draws:
    """Rows drawn with replacement: position p draws by a hash of (seed, epoch, p)."""

    def __init__(self, weighted: Weighted, epoch: int) -> None:
        self._table, self._samples = weighted.table, weighted.samples
        self._key = np.uint64(derive(weighted.seed, epoch, "weighted", words=1)[0])

    def __call__(self, sequence: Int64Array) -> Int64Array:
        return self._table(hashed(sequence, self._key))

    def find(self, row: int) -> Int64Array:
        """Return all sequence indices of a row. Draws the entire epoch: about 0.1 s for each million rows."""
        found = [np.zeros(0, np.int64)]
        for start in range(0, self._samples, _CHUNK):
            drawn = self(np.arange(start, min(start + _CHUNK, self._samples), dtype=np.int64))
            found.append(start + np.flatnonzero(drawn == row))
        return np.concatenate(found)


class DrawnOnce:
    """Rows drawn without replacement: sorted by exponential variates of rate weight (Efraimidis and Spirakis).

    It has the distribution of drawing one row after the other from those that are left. The variates are a hash of
    (seed, epoch, row). Sorting takes about 2 s for 10**7 rows, once an epoch in every process.
    """

    def __init__(self, weighted: Weighted, epoch: int) -> None:
        key = np.uint64(derive(weighted.seed, epoch, "weighted once", words=1)[0])
        rows = np.flatnonzero(weighted.weights > 0)
        uniform = ((hashed(rows, key) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        shares = np.maximum(_normalized(weighted.weights)[rows], _SMALLEST)
        self._rows = rows[np.argsort(-logarithm(uniform) / shares, kind="stable")[: weighted.samples]]

    def __call__(self, sequence: Int64Array) -> Int64Array:
        return self._rows[sequence]

    def find(self, row: int) -> Int64Array:
        """Return the sequence index of a row, if it was drawn."""
        return np.flatnonzero(self._rows == row)


class AliasTable:
    """Table from which a row is drawn in constant time, with a probability proportional to its weight.

    The interval [0, n * 2**k) is cut into n slots. Slot i belongs to row i up to ``_limits[i]``, and from there on to
    row ``_aliases[i]``. A row's parts add up to its weight, to 15 digits and about 2**-50.
    """

    __slots__ = ("_aliases", "_limits", "_shift", "_total")

    def __init__(self, weights: Float64Array) -> None:
        n = len(weights)
        self._shift = np.uint64(_BITS - (n - 1).bit_length())
        size = 1 << int(self._shift)
        self._total = n * size
        shares = _integers(weights, self._total)
        light, heavy = np.flatnonzero(shares < size), np.flatnonzero(shares >= size)
        # What light rows leave free of their slots, and what heavy ones have beyond theirs, both added up in the order
        # of the rows. A heavy row fills the slots of light ones until it has no more than a slot; what it then lacks of
        # its own slot, the next heavy row gives.
        free = np.concatenate([[0], np.cumsum(size - shares[light])])
        beyond = np.cumsum(shares[heavy] - size)
        kind = np.int32 if n < 2**31 else np.int64
        self._limits, self._aliases = shares, np.arange(n, dtype=kind)
        self._aliases[light] = heavy[np.searchsorted(beyond, free[:-1], side="right")] if len(light) else 0
        self._limits[heavy] = size + beyond - free[np.searchsorted(free, beyond, side="left")]
        self._aliases[heavy[:-1]] = heavy[1:]

    def __call__(self, words: UInt64Array) -> Int64Array:
        """Map uniform 64-bit words to rows."""
        points = _high_product(words, self._total)
        slots = (points >> self._shift).astype(np.int64)
        inside = (points & np.uint64((1 << int(self._shift)) - 1)).astype(np.int64)
        return np.where(inside < self._limits[slots], slots, self._aliases[slots])


def checked(weights: Any) -> Float64Array:
    """Return weights as a new array. Raise TypeError or ValueError unless they are finite, not negative, not all 0."""
    try:
        found = np.asarray(weights, dtype=np.float64) + 0.0  # a copy, in which -0.0 is 0.0
    except (TypeError, ValueError) as problem:
        raise TypeError(f"weights must be numbers, got {weights!r:.60}") from problem
    if found.ndim != 1:
        raise ValueError(f"expected one weight for each row, got an array of shape {found.shape}")
    bad = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(bad):
        raise ValueError(f"weights must be finite and not negative, got {found[bad[0]]} for row {bad[0]}")
    if not found.any():
        raise ValueError(f"at least one of the {len(found)} weights must be positive")
    return found


def _normalized(weights: Float64Array) -> Float64Array:
    """Return the weights times a power of two, so that the largest is in [0.5, 1)."""
    exponent = int(np.frexp(weights.max())[1])
    return np.ldexp(weights, -exponent)


def _integers(weights: Float64Array, total: int) -> Int64Array:
    """Return positive integers in proportion to the weights, 0 for 0, with exactly this sum."""
    positive = weights > 0
    shares = _normalized(weights)
    # Less than the total by more than rounding can add: one unit for each tiny weight, and 2**-52 of each share.
    factor = float(Fraction(total - len(weights) - (total >> 51)) / _exact_sum(shares))
    found = (shares * factor).astype(np.int64)
    np.maximum(found, 1, out=found, where=positive)
    rows = np.flatnonzero(positive)
    more, first = divmod(total - int(found.sum()), len(rows))
    found[rows] += more
    found[rows[:first]] += 1
    return found


def _exact_sum(values: Float64Array) -> Fraction:
    """Return the sum without any rounding: by exponent, in integers."""
    total = Fraction(0)
    for start in range(0, len(values), _CHUNK):  # 2**20 numbers of 27 bits: sums below 2**53 are exact
        mantissas, exponents = np.frexp(values[start : start + _CHUNK])
        whole = (mantissas * 2.0**53).astype(np.int64)
        lowest = int(exponents.min())
        high = np.bincount(exponents - lowest, weights=(whole >> 27).astype(np.float64))
        low = np.bincount(exponents - lowest, weights=(whole & ((1 << 27) - 1)).astype(np.float64))
        for i in np.flatnonzero(high + low).tolist():
            total += ((int(high[i]) << 27) + int(low[i])) * Fraction(2) ** (lowest + i - 53)
    return total


def _high_product(words: UInt64Array, factor: int) -> UInt64Array:
    """Return the upper 64 bits of the products of 64-bit words and a factor."""
    low, high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    words_low, words_high = words & _LOW, words >> _HALF
    middle = words_high * low + ((words_low * low) >> _HALF)
    other = words_low * high + (middle & _LOW)
    product: UInt64Array = words_high * high + (middle >> _HALF) + (other >> _HALF)
    return product


def logarithm(values: Float64Array) -> Float64Array:
    """Return natural logarithms of numbers in (0, 1), to about 2**-51, equal to the last bit on every machine."""
    mantissas, exponents = np.frexp(values)
    below = mantissas < 0.7071067811865476
    mantissas = np.where(below, 2 * mantissas, mantissas)
    exponents = exponents - below
    ratio = (mantissas - 1) / (mantissas + 1)  # ln m = 2 artanh(ratio), |ratio| < 0.1716
    square = ratio * ratio
    series = np.full_like(ratio, 1 / 23)
    for odd in range(21, 0, -2):
        series *= square
        series += 1 / odd
    logarithms: Float64Array = exponents * 0.6931471805599453 + 2 * ratio * series
    return logarithms
