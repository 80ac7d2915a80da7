"""Context parallelism with ranks for real: the outputs of all parts are those of one process alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_torchrun import HERE, read

from launch import Launch


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_attention_over_the_parts_is_attention_over_the_whole(size: int, tmp_path: Path, launched: Launch) -> None:
    launched(size, str(HERE / "context_job.py"), str(tmp_path))
    said = [read(tmp_path / f"context-{rank}.json") for rank in range(size)]
    assert [each["checks"] for each in said] == [3 * 3 * 3 + 3] * size
    assert [each["slice"] for each in said] == [[rank % 2, 2] for rank in range(size)]
    assert all("the mesh has the dimensions 'dp', 'cp'; context_parallel names none of them" in e["grid"] for e in said)
    for each in said[1:]:
        outside = "this process is not in the mesh or process group given as context_parallel."
        assert each["outside"] == each["group"] == outside
