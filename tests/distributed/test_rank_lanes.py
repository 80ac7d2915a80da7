"""Ranks of a stream for real: equal steps, no hang, and a checkpoint of two that three go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_torchrun import HERE, read

import midepoch
from launch import Launch


@pytest.fixture(scope="module")
def data(make_files: Callable[..., list[str]]) -> str:
    return str(Path(make_files([40, 30, 41])[0]).parent)


def test_two_ranks_then_three(data: str, tmp_path: Path, launched: Launch) -> None:
    job = str(HERE / "lanes_job.py")
    launched(2, job, str(tmp_path), data, "train")
    first = [read(tmp_path / f"train-{rank}.json") for rank in range(2)]
    expected = sorted(id_ for id_ in (row["id"] for row in midepoch.from_files(data)) if id_ < 30 or id_ % 4 == 0)
    assert all("ranks run lanes of their own" in one["asked"] for one in first)

    for epoch in range(2):
        a, b = (one["drop"][epoch] for one in first)
        assert len(a) == len(b) > 0
        assert all(len(step) == 4 for step in a + b)
        rows = [row for step in a + b for row in step]
        assert len(set(rows)) == len(rows) and set(rows) <= set(expected)
    for kind in ("pad", "shared"):
        a, b = (one[kind] for one in first)
        assert len(a) == len(b)
        assert sorted(row for step in a + b for row in step) == expected, kind

    for a, b in zip(*(one["resumed"] for one in first), strict=True):
        assert len(a) == len(b) == len(first[0]["pad"]), "also from checkpoints where a rank has only padding left"
        assert sorted(row for step in a + b for row in step) == expected

    for full, padding in zip(*(one["one-sided"] for one in first), strict=True):
        assert sorted(row for step in full for row in step) == list(range(50))
        assert padding == [[]] * len(full), "a rank that has no output at all pads with another's"

    launched(3, job, str(tmp_path), data, "resume")
    second = [read(tmp_path / f"resume-{rank}.json")["after"] for rank in range(3)]
    assert len({len(steps) for steps in second}) == 1
    rows = [row for one in first for step in one["before"] for row in step]
    rows += [row for steps in second for step in steps for row in step]
    assert sorted(rows) == expected, "every output once, over both worlds"
