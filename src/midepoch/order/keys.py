"""Keys of the keyed permutations, from (seed, epoch, purpose, index)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PURPOSE = {
    "rows": 1,
    "blocks": 2,
    "window": 3,
    "files": 4,
    "map": 5,
    "mix": 6,
    "outputs": 7,
    "functions": 8,
    "collate": 9,
    "split": 10,
    "weighted": 11,
    "weighted once": 12,
    "batches": 13,
    "schedule": 14,
}
"""Numbers that are a permanent part of the order: never renumber, only add."""


def derive(seed: int, epoch: int, purpose: str, index: int = 0, *, words: int = 8) -> npt.NDArray[np.uint64]:
    """Return independent 64-bit words for each (seed, epoch, purpose, index).

    The four are hashed as fixed-width fields, so that seed 1 epoch 1 is unrelated to seed 2 epoch 0.
    """
    mask = 0xFFFFFFFF
    entropy = (seed & mask, seed >> 32, epoch & mask, epoch >> 32, PURPOSE[purpose], index & mask, index >> 32)
    return np.random.SeedSequence(entropy).generate_state(words, np.uint64).astype(np.uint64, copy=False)


def derive_many(seed: int, epoch: int, purpose: str, indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return two words for each index, the same as ``derive(…, words=2)``, for all in one call.

    It is numpy's ``SeedSequence``, whose algorithm is fixed, over arrays.
    """
    mask = 0xFFFFFFFF
    fixed = [seed & mask, seed >> 32, epoch & mask, epoch >> 32, PURPOSE[purpose]]
    words = [np.full(len(indices), word, np.uint32) for word in fixed]
    words += [(indices & np.uint64(mask)).astype(np.uint32), (indices >> np.uint64(32)).astype(np.uint32)]
    absorb = _Hash(0x43B0D7E5, 0x931E8875)
    pool = [absorb(word) for word in words[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = _mixed(pool[target], absorb(pool[source]))
    for word in words[4:]:
        for target in range(4):
            pool[target] = _mixed(pool[target], absorb(word))
    emit = _Hash(0x8B51F9DD, 0x58F38DED)
    low = [emit(word).astype(np.uint64) for word in pool]
    return np.stack([low[0] | low[1] << np.uint64(32), low[2] | low[3] << np.uint64(32)], axis=1)


class _Hash:
    """Hashing of 32-bit words with a constant that changes with every call."""

    def __init__(self, constant: int, factor: int) -> None:
        self._constant, self._factor = constant, factor

    def __call__(self, word: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        word = word ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & 0xFFFFFFFF
        word = word * np.uint32(self._constant)
        return word ^ (word >> np.uint32(16))


def _mixed(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    word: npt.NDArray[np.uint32] = a * np.uint32(0xCA01F9DD) - b * np.uint32(0x4973F715)
    return word ^ (word >> np.uint32(16))


def check_seed(seed: int) -> int:
    """Return the seed as an int. Raise TypeError or ValueError unless it is an integer in [0, 2**64)."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if not 0 <= int(seed) < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return int(seed)
