"""Row lengths, for the tests of their values and of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import midepoch
from midepoch.sources import Source
from midepoch.sources.lengths import RowLengths

VALUES = [None, "", "a", "é" * 3, "word " * 60, None, "x" * 70_000, "end"]


def source_of(path: Path, folder: Path | None = None, **options: Any) -> Source:
    """The source of a file, with its index in a folder."""
    return midepoch.from_files(path, index_dir=folder, **options).pipeline.source


def everything(lengths: RowLengths) -> list[int]:
    """All lengths, which the totals are of."""
    found = lengths.of(np.arange(len(lengths)))
    assert found.dtype == np.int64
    assert lengths.total == found.sum()
    assert lengths.longest == found.max(initial=0)
    return list(found.tolist())


def expected(values: list[Any]) -> list[int]:
    """The lengths of values: bytes of texts, 0 for null."""
    return [0 if v is None else len(v.encode()) if isinstance(v, str) else len(v) for v in values]


def sidecars(folder: Path) -> list[Path]:
    """The files of lengths in a folder."""
    return sorted(folder.glob("*.midepoch-lengths"))
