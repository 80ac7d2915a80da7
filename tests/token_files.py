"""Files of tokens for tests, written byte by byte as their formats define them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[float]]],
    dtype: str = "int32",
    modes: Sequence[int] | None = None,
) -> str:
    """Write documents, each a list of sequences, and return the prefix."""
    lengths, pointers, ends, at = [], [], [0], 0
    with open(f"{prefix}.bin", "wb") as file:
        for document in documents:
            for sequence in document:
                data = np.asarray(sequence, dtype).tobytes()
                file.write(data)
                lengths.append(len(sequence))
                pointers.append(at)
                at += len(data)
            ends.append(len(lengths))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(ends)))
        for values, kind in ((lengths, "<i4"), (pointers, "<i8"), (ends, "<i8"), (modes or [], "i1")):
            file.write(np.array(values, kind).tobytes())
    return str(prefix)


def random_documents(count: int, dtype: str, seed: int = 0, longest: int = 20) -> list[list[Any]]:
    """Return documents of one sequence each, some of them empty."""
    rng = np.random.default_rng(seed)
    most = 100 if np.dtype(dtype).kind == "f" else min(np.iinfo(dtype).max, 60_000)
    return [[rng.integers(0, most, rng.integers(0, longest)).astype(dtype)] for _ in range(count)]
