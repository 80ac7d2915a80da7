"""Trainer, Accelerate and Lightning, resumed from every checkpoint of a run, on one rank and on two: the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from launch import Program

HERE = Path(__file__).parent
ROWS, BATCH = 26, 4
Read = Callable[..., dict[str, Any]]


def runs_of(program: Program, name: str, folder: Path, alone: str = "alone") -> Read:
    """Run a job on two ranks and alone (which goes on with what two ranks saved); what it noted, by case and rank."""
    values = np.random.default_rng(0).standard_normal((ROWS, 4), dtype=np.float32)
    pq.write_table(pa.table({"id": np.arange(ROWS), "x": list(values)}), folder / "data.parquet")
    job = HERE / f"{name}_job.py"
    assert program(2, job, str(folder), "ranks") == 0
    assert program(1, job, str(folder), alone) == 0

    def read(case: str, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / f"{case}-{rank}.json").read_text())
        return found

    return read


def uninterrupted(folder: Path, count: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
    """The first batches of the loader itself, over epochs."""
    loader = midepoch.from_files(folder / "data.parquet").shuffle(seed=3).loader(BATCH, rank=rank, world_size=ranks)
    return list(islice((found["id"].tolist() for _ in range(10) for found in loader), count))


def global_batches(folder: Path, count: int) -> list[list[int]]:
    """The rows of the first steps of two ranks together."""
    return [sorted(a + b) for a, b in zip(*(uninterrupted(folder, count, rank, 2) for rank in range(2)), strict=True)]


def check(result: dict[str, Any], *, weights: bool = True, stands: Callable[[Any], Any] = lambda stand: stand) -> None:
    """Every resumed run went on as the whole one did: rows, what the framework counts, and in the end the model."""
    whole = result.pop("whole")
    assert len(result) > 1
    for name, resumed in result.items():
        at = int(name.split("-")[0])
        if "after" in name:  # Lightning takes an epoch in which it was told to stop for complete, and makes one less
            assert resumed["rows"] == whole["rows"][at:][: len(resumed["rows"])], name
            assert resumed["rows"] or at == len(whole["rows"]), name
            continue
        assert resumed["rows"] == whole["rows"][at:], name
        assert [stands(one) for one in resumed["stands"]] == [stands(one) for one in whole["stands"][at:]], name
        if weights and "failed" not in name:
            assert resumed["weights"] == whole["weights"], name


def flat(steps: list[list[list[int]]]) -> list[list[int]]:
    """The batches of steps of several."""
    return [batch for step in steps for batch in step]


def test_transformers(program: Program, tmp_path: Path) -> None:
    read = runs_of(program, "trainer", tmp_path)
    for case in ("epochs", "steps", "accumulated"):
        batches = flat(read(case)["whole"]["rows"])
        assert batches == uninterrupted(tmp_path, len(batches)), case
        check(read(case))
    check(read("options"))
    assert len(read("options")["whole"]["rows"]) == 12
    assert read("epochs")["whole"]["stands"][-1] == [14, 2.0]
    assert read("accumulated")["whole"]["stands"][2] == [3, 1.0]
    check(read("stream"), stands=lambda stand: stand[0])  # its epochs have no length
    for rank in range(2):
        batches = flat(read("ranks", rank)["whole"]["rows"])
        assert batches == uninterrupted(tmp_path, 8, rank, 2)
        check(read("ranks", rank))
        check(read("ranks of a stream", rank), stands=lambda stand: stand[0])
    for case in ("epochs", "ranks"):
        assert read(case)["whole"]["evaluated"] == list(range(ROWS))
    # Two ranks before the third step, one behind it.
    together = global_batches(tmp_path, 8)[3:]
    for case in ("same global batch", "accumulated instead"):
        went_on = read(case)["3"]
        assert [sorted(sum(step, [])) for step in went_on["rows"]] == together, case
        assert went_on["stands"][-1] == [8, 2.0]

    refused = json.loads((tmp_path / "refusals.json").read_text())
    assert "Leave it out" in refused["ignored"]
    assert "a step had 4 rows over all ranks when this was saved, and has 8 now" in refused["larger steps"]
    assert "has 2 now" in refused["smaller steps"]
    assert "does not contain the position in the data" in refused["no state"]
    assert "loader_options" in refused["a loader"]
    assert "steps_per_epoch=… to the loader, or TrainingArguments(max_steps=…)" in refused["epochs of tokens"]


def test_accelerate(program: Program, tmp_path: Path) -> None:
    read = runs_of(program, "accelerate", tmp_path)
    for case in ("rows", "workers"):
        assert read(case)["whole"]["rows"] == uninterrupted(tmp_path, 10)
        assert [index for index, (_, last) in enumerate(read(case)["whole"]["stands"]) if last] == [6]
        check(read(case))
    check(read("stream"))
    for rank in range(2):
        assert read("ranks", rank)["whole"]["rows"] == uninterrupted(tmp_path, 10, rank, 2)
        check(read("ranks", rank))
        check(read("ranks of a stream", rank))
    went_on = read("elsewhere")["2"]["rows"]  # 16 rows were seen by two ranks
    assert sorted(sum(went_on[:3], [])) == sorted(sum(global_batches(tmp_path, 4)[2:], []))
    refused = json.loads((tmp_path / "refusals.json").read_text())
    assert refused["prepared plainly"] and refused["model untouched"]
    assert "name=" in refused["same name"]
    assert "does not contain the position in the data" in refused["no state"]
    assert refused["other data"] == "seed"
    assert "the optimizer has a state already" in " ".join(refused["prepared late"])
    assert "a batch is fetched ahead" in refused["edited"]
    assert refused["steps"] == [1, 2] and "load_state continues" in refused["skipped"]
    for left in refused["left"]:  # by the rule of all loaders; what is fetched ahead counts for nothing
        at, epoch = left["at"], uninterrupted(tmp_path, 7)
        assert left["epochs"] == [0] * at and left["state"] == [0, 4 * at], at
        assert left["again"] == (epoch if at == 1 else epoch[at:]), at


@pytest.mark.slow  # half a minute; tests/integrations/lightning_job.py
@pytest.mark.parametrize("alone", ["alone", "all"])
def test_lightning(alone: str, program: Program, tmp_path: Path) -> None:
    read = runs_of(program, "lightning", tmp_path, alone)
    for case in ("rows", "workers", "limited", *(("accumulated",) if alone == "all" else ())):
        rows = read(case)["whole"]["rows"]
        assert rows == uninterrupted(tmp_path, len(rows)), case
        check(read(case))
    assert read("rows")["whole"]["validated"][-ROWS:] == list(range(ROWS))
    assert read("rows")["whole"]["stands"][6:8] == [[0, 6], [1, 0]]
    if alone == "all":
        check(read("limited stream"))
    for case in ("stream", *(("reloaded stream",) if alone == "all" else ())):
        check(read(case), stands=lambda stand: stand[0])  # behind an epoch of no known length Lightning counts on
    for rank in range(2):
        assert read("ranks", rank)["whole"]["rows"] == uninterrupted(tmp_path, 8, rank, 2)
        check(read("ranks", rank))
        check(read("ranks of a stream", rank), stands=lambda stand: stand[0])
    refused = json.loads((tmp_path / "refusals.json").read_text())
    assert "does not contain the position in the data" in refused["no state"]
    assert "a step had 4 rows over all ranks when this was saved, and has 8 now" in refused["larger steps"]
    whole = uninterrupted(tmp_path, 9)
    assert refused["second trainer"] == [whole[:5], whole[:2], whole[:9]]
