"""Fingerprints of files that are too large to be read completely: their size, their ends, and pieces in between."""

from __future__ import annotations

import hashlib

import numpy as np

from midepoch.sources.stores import OpenFile

_PIECES = 32
_PIECE = 4096


def fingerprint(file: OpenFile, about: str) -> str:
    """Return a fingerprint of a file's contents. ``about`` is how they are read."""
    digest = hashlib.blake2b(f"{about} {file.size}\0".encode(), digest_size=16)
    last = max(0, file.size - _PIECE)
    for start in np.unique(np.linspace(0, last, _PIECES + 2).astype(np.int64)).tolist():
        digest.update(file.read_at(_PIECE, start))
    return digest.hexdigest()
