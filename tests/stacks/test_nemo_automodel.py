"""NeMo Automodel's recipe, scheduler and checkpoints, on real ranks, killed and resumed on other numbers of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forks import Forks
from stacks.rows import check_page, check_steps, killed, noted

pytest.importorskip("nemo_automodel", reason="NeMo Automodel is not installed: scripts/test-stacks nemo_automodel")

JOB = str(Path(__file__).with_name("nemo_automodel_job.py"))


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("stacks.automodel_cpu", "midepoch.integrations.nemo_automodel") as started:
        yield started


def test_global_batches_on_4_then_2_then_8_ranks(forks: Forks, tmp_path: Path) -> None:
    runs = []
    for ranks, die_at in ((4, 9), (2, 17)):  # saved at 6, where an epoch ends, and at 15
        killed(forks, ranks, JOB, str(tmp_path), str(die_at))
        runs.append(noted(tmp_path))
    forks.ranks(8, JOB, str(tmp_path), "0")
    runs.append(noted(tmp_path))
    check_steps(tmp_path / "data.parquet", "input_ids", runs, [(1, 9), (7, 17), (16, 20)])


def test_page(forks: Forks, tmp_path: Path) -> None:
    check_page(forks, tmp_path)


def test_config(forks: Forks, tmp_path: Path) -> None:
    (done,) = forks.run([str(Path(__file__).with_name("nemo_automodel_config_job.py")), str(tmp_path)])
    assert done.returncode == 0, done.stderr[-3000:]
