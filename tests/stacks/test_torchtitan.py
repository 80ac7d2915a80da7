"""torchtitan's trainer and checkpoints, on real ranks, killed and resumed with other data-parallel degrees."""

from __future__ import annotations

import json
import signal
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

import midepoch
from forks import Forks
from midepoch.errors import CheckpointNotFoundError
from stacks.rows import check_page

pytest.importorskip("torchtitan", reason="torchtitan is not installed: scripts/test-stacks torchtitan")
pytest.importorskip("triton", reason="torchtitan's trainer imports triton: scripts/test-stacks torchtitan")

JOB = Path(__file__).with_name("torchtitan_job.py")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("stacks.torchtitan_cpu", "midepoch.integrations.torchtitan") as started:
        yield started


def prepare(folder: Path) -> dict[int, list[int]]:
    """Write what a run needs, and return the global batches of 20 steps, in more than three epochs."""
    Tokenizer(models.WordLevel({"?": 0, "<s>": 1, "</s>": 2}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    rows = np.random.default_rng(0).integers(0, 2048, (101, 65))
    pq.write_table(pa.table({"input_ids": list(rows)}), folder / "data.parquet", row_group_size=10)
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42).with_lanes(8)
    loader, steps = ds.loader(16, last_batch="drop"), []
    while len(steps) < 20:
        steps += [sorted(zlib.crc32(row[:-1].numpy().tobytes()) for row in batch["input_ids"]) for batch in loader]
    assert loader.epoch > 3
    return dict(enumerate(steps[:20], 1))


def steps_of(folder: Path) -> dict[int, list[int]]:
    """The sequences of each step over all ranks, and remove the notes."""
    steps: dict[int, list[int]] = defaultdict(list)
    for notes in folder.glob("seen-*.jsonl"):
        for line in notes.read_text().splitlines():
            step, seen = json.loads(line)
            steps[step] += seen
        notes.unlink()
    return {step: sorted(seen) for step, seen in sorted(steps.items())}


def test_global_batches_on_4_then_2_then_8_ranks(forks: Forks, tmp_path: Path) -> None:
    expected = prepare(tmp_path)
    for ranks, die_at, resumed in ((4, 7, 0), (2, 13, 5)):
        done = forks.world(ranks, str(JOB), str(tmp_path), "20", str(die_at))
        assert {one.returncode for one in done} == {-signal.SIGKILL}, done[0].stderr[-3000:]
        assert steps_of(tmp_path) == {step: expected[step] for step in range(resumed + 1, die_at + 1)}
    forks.ranks(8, str(JOB), str(tmp_path), "20", "0")
    assert steps_of(tmp_path) == {step: expected[step] for step in range(11, 21)}


def test_page(forks: Forks, tmp_path: Path) -> None:
    check_page(forks, tmp_path)


def test_config(tmp_path: Path) -> None:
    from midepoch.integrations.torchtitan import MidepochDataLoader

    prepare(tmp_path)
    ds = midepoch.from_files(tmp_path / "data.parquet")
    place = {"dp_rank": 0, "dp_world_size": 2, "tokenizer": "of the trainer", "seq_len": 64, "local_batch_size": 4}
    asked = []
    made = MidepochDataLoader.Config(data=lambda *arguments: asked.append(arguments) or ds, infinite=False)
    assert len(list(made.build(**place))) == 101 // 8 and asked == [("of the trainer", 64)]
    assert len(list(MidepochDataLoader.Config(data=ds, epochs=2, num_workers=1).build(**place))) == 2 * (101 // 8)
    own = MidepochDataLoader.Config(data=ds, to_batch=sorted, loader={"last_batch": "uneven"})
    assert next(iter(own.build(**place))) == ["input_ids"]
    with pytest.raises(ValueError, match="multiple of micro-batch × data-parallel ranks = 4 × 2, got 12"):
        MidepochDataLoader.Config(data=ds, global_batch_size=12).build(**place)
    with pytest.raises(TypeError, match="must be a Dataset, or a function of tokenizer and seq_len, got 'c4'"):
        MidepochDataLoader.Config(data="c4").build(**place)
    with pytest.raises(ValueError, match="expected sequences of 32 tokens, got 64"):
        next(iter(MidepochDataLoader.Config(data=ds).build(**{**place, "seq_len": 32})))
    with pytest.raises(CheckpointNotFoundError, match="only \\['dp_rank_0', 'world_size'\\]"):
        MidepochDataLoader.Config(data=ds).build(**place).load_state_dict({"dp_rank_0": b"", "world_size": 2})
