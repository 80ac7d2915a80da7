"""A generated family of pipelines: every one resumes exactly, on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from family import check, generated

COUNT = int(os.environ.get("PIPELINES", "2000"))


# Those that take longest (windows of windows, with workers), and those whose branches others take.
SLOW = (5, 7, 9, 10, 12, 14, 16, 17, 18, 19, 20, 21, 22)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s in SLOW else ()) for s in range(24)])
def test_generated_pipelines(seed: int, tmp_path: Path) -> None:
    assert check(generated(seed, tmp_path / "data"), seed, workers=seed % 6 == 0, tail=8) > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_many_generated_pipelines(part: int, tmp_path: Path) -> None:
    """PIPELINES of them, 2,000 unless it is set, in 8 parts."""
    for seed in range(1000 + part, 1000 + COUNT, 8):
        case = generated(seed, tmp_path / str(seed))
        try:
            check(case, seed, workers=seed % 20 == 0)
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {case.text}: {type(problem).__name__}: {problem}") from problem
