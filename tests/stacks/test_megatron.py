"""Megatron-Core's schedule and distributed checkpoints, on real ranks, killed and resumed on other numbers of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from forks import Forks
from stacks.rows import check_page, check_steps, killed, noted

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed: scripts/test-stacks megatron")

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "megatron_core_loop.py")
JOB = str(Path(__file__).with_name("megatron_job.py"))


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


def test_packed_sequences_with_tensor_parallelism(forks: Forks, tmp_path: Path) -> None:
    """4 ranks with 2 for each tensor, then 4 for data. Each has lanes of its own, and the state is that of all."""
    random = np.random.default_rng(0)
    documents = [random.integers(1, 1000, random.integers(1, 30)) for _ in range(200)]
    pq.write_table(pa.table({"input_ids": documents}), tmp_path / "data.parquet", row_group_size=20)
    forks.ranks(4, JOB, str(tmp_path), "2", "1", "5")
    assert len({path.read_text() for path in tmp_path.glob("state-*.json")}) == 1
    seen = noted(tmp_path)
    forks.ranks(4, JOB, str(tmp_path), "1", "6", "12")
    seen |= noted(tmp_path)

    ds = midepoch.from_files(tmp_path / "data.parquet").shuffle(seed=42).with_lanes(4).pack(9, eos=0)
    steps = islice(ds.loader(8, last_batch="drop"), 12)
    names = [sorted(zlib.crc32(row[:-1].numpy().tobytes()) for row in batch["input_ids"]) for batch in steps]
    assert seen == dict(enumerate(names, 1))


def test_page(forks: Forks, tmp_path: Path) -> None:
    check_page(forks, tmp_path)
