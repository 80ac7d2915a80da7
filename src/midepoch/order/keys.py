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
}
"""Numbers that are a permanent part of the order: never renumber, only add."""


def derive(seed: int, epoch: int, purpose: str, index: int = 0, *, words: int = 8) -> npt.NDArray[np.uint64]:
    """Return independent 64-bit words for each (seed, epoch, purpose, index).

    The four are hashed as fixed-width fields, so that seed 1 epoch 1 is unrelated to seed 2 epoch 0.
    """
    mask = 0xFFFFFFFF
    entropy = (seed & mask, seed >> 32, epoch & mask, epoch >> 32, PURPOSE[purpose], index & mask, index >> 32)
    return np.random.SeedSequence(entropy).generate_state(words, np.uint64).astype(np.uint64, copy=False)


def check_seed(seed: int) -> int:
    """Return the seed as an int. Raise TypeError or ValueError unless it is an integer in [0, 2**64)."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    if not 0 <= int(seed) < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return int(seed)
