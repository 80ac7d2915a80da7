"""Megatron-Core's schedule and distributed checkpoints, on real ranks, killed and resumed on other numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forks import Forks
from stacks.rows import check_steps, killed, noted

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed: scripts/test-stacks megatron")

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "megatron_core_loop.py")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("stacks.megatron_cpu", "midepoch.integrations.megatron") as started:
        yield started


def test_global_batches_on_4_then_2_then_8_ranks(forks: Forks, tmp_path: Path) -> None:
    runs = []
    for ranks, die_at in ((4, 7), (2, 13)):
        killed(forks, ranks, EXAMPLE, str(tmp_path), str(die_at))
        runs.append(noted(tmp_path))
    forks.ranks(8, EXAMPLE, str(tmp_path))
    runs.append(noted(tmp_path))
    check_steps(tmp_path / "data.parquet", "tokens", runs, [(1, 7), (6, 13), (11, 20)])
