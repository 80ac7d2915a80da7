"""States where training frameworks and runs keep them, found by ``midepoch inspect``, ``plan`` and ``diff``."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner, Result

import midepoch
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.cli.app import app


def call(*arguments: Any) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(argument) for argument in arguments])


def inspected(*arguments: Any) -> Any:
    done = call("inspect", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments: Any) -> str:
    done = call("inspect", *arguments)
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    return done.stderr


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    pq.write_table(pa.table({"id": list(range(40))}), tmp_path / "rows.parquet")
    return midepoch.from_files(str(tmp_path / "rows.parquet")).shuffle(seed=1)


def state_at(ds: midepoch.Dataset, batches: int) -> Any:
    loader = ds.loader(4)
    for _ in range(batches):
        next(loader)
    return loader.state_dict()


@pytest.fixture
def output(ds: midepoch.Dataset, tmp_path: Path) -> Path:
    """The output folder of a Trainer, with checkpoints whose numbers do not sort as text."""
    for step in (2, 9, 10):
        folder = tmp_path / "output" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "midepoch.json").write_text(json.dumps({"data": state_at(ds, step), "total_batch": 4}))
        (folder / "trainer_state.json").write_text("{}")
    return tmp_path / "output"


def test_output_of_the_trainer(output: Path, tmp_path: Path) -> None:
    latest = inspected(output)
    assert latest["step"] == 10 and latest["position"] == 40 and "checkpoint-10" in latest["place"]
    assert inspected(output, "--step", 2)["position"] == 8
    one = inspected(output / "checkpoint-9")
    assert one["step"] == 9 and one["position"] == 36
    assert "There are: 2, 9, 10" in refused(output, "--step", 3)
    planned = call("plan", "--checkpoint", output, "--step", 2, "--world-size", 2, "--batch-size", 4, "--json")
    assert planned.exit_code == 0 and json.loads(planned.stdout)["position"] == 8
    same = call("diff", output, output, "--step", 2, "--other-step", 9)
    assert same.exit_code == 0 and "each can be loaded" in same.output
    (output / "checkpoint-10" / "midepoch.json").write_text("{")
    assert "is not JSON" in refused(output)
    assert "expected one state" in refused(output / "checkpoint-9" / "trainer_state.json")


def test_the_state_of_one_of_several_ranks(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """A resume needs all of them, which the position does not show."""
    filtered = ds.filter(lambda row: True)
    for made, whose in ((filtered, "one of several ranks, with 1 of 2 lanes"), (midepoch.mix([ds, ds]), None)):
        loaders = [made.loader(2, rank=rank, world_size=2, last_batch="uneven") for rank in range(2)]
        states = [(next(loader), loader.state_dict())[1] for loader in loaders]
        for state, expected in ((states[0], whose), (states, None)):
            (tmp_path / "state.json").write_text(json.dumps(state))
            assert (inspected(tmp_path / "state.json")["whose"] or "").partition(":")[0] == (expected or "")
    loader = ds.loader(2, rank=1, world_size=2)
    with loader.lease() as leases:
        next(leases).ack()
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    assert inspected(tmp_path / "state.json")["whose"] == "rank 1 of 2: a resume needs the states of all ranks"


def test_folder_of_a_run(ds: midepoch.Dataset, tmp_path: Path) -> None:
    loader = ds.loader(4, audit=str(tmp_path / "run"))
    next(loader)
    PipelineCheckpoint(tmp_path / "run" / "checkpoints").save(loader, step=1)
    assert inspected(tmp_path / "run")["position"] == inspected(tmp_path / "run" / "checkpoints")["position"] == 4
    assert "complete" in call("verify", tmp_path / "run").output


def test_folder_of_accelerate(ds: midepoch.Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "midepoch-train.json").write_text(json.dumps(state_at(ds, 3)))
    assert inspected(folder)["position"] == 12
    (folder / "midepoch-other.json").write_text(json.dumps(state_at(ds, 5)))
    assert "Choose one with --part: other, train" in refused(folder)
    assert inspected(folder, "--part", "other")["position"] == 20


def test_checkpoints_of_lightning_run_no_code(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """A real one is inspected in tests/integrations/test_lightning_direct.py."""
    folder = tmp_path / "lightning"
    folder.mkdir()
    for step in (3, 5):
        data = {"train": state_at(ds, step), "global_batch": 4}
        torch.save({"global_step": step, "ResumableData": data}, folder / f"epoch=0-step={step}.ckpt")
    assert inspected(folder, "--step", 3)["position"] == 12 and inspected(folder, "--step", 5)["position"] == 20
    assert "there is no checkpoint in" in refused(folder, "--step", 4)
    torch.save({"ResumableData": _Runs(tmp_path / "ran")}, folder / "evil.ckpt")
    assert "cannot be read without running code" in refused(folder / "evil.ckpt")
    assert not (tmp_path / "ran").exists()
    torch.save({"state_dict": {}}, folder / "bare.ckpt")
    assert "written without ResumableData" in refused(folder / "bare.ckpt")


class _Runs:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_sources_of_a_mix_are_named(ds: midepoch.Dataset, tmp_path: Path) -> None:
    inner = midepoch.mix({"web": ds, "code": ds.filter(_always)}, weights={"web": 0.7, "code": 0.3}, seed=1)
    mixed = midepoch.mix([inner, ds], weights=[0.5, 0.5], seed=1)
    (tmp_path / "state.json").write_text(json.dumps(state_at(mixed, 1)))
    shown = call("inspect", tmp_path / "state.json").output
    names = ("source 0: ", "source 0/web: 40 rows, weight 0.7", "source 0/code: 40 rows, filter", "source 1: 40 rows")
    assert all(name in shown for name in names), shown


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "which is empty" in refused(tmp_path / "empty")
    (tmp_path / "notes.txt").write_text("hello")
    assert "which contains empty, notes.txt" in refused(tmp_path)
    assert "is not JSON" in refused(tmp_path / "notes.txt")
    told = call("audit", tmp_path).stderr
    assert "a folder of its own, not that of the data" in told and f"audit='{tmp_path}'" not in told


def _always(_: Any) -> bool:
    return True


def test_states_of_all_ranks(tmp_path: Path) -> None:
    """Each rank saves its own lanes. The commands read them all, on whatever number of ranks."""
    pq.write_table(pa.table({"input_ids": [[number] * 9 for number in range(60)]}), tmp_path / "rows.parquet")
    packed = midepoch.from_files(tmp_path / "rows.parquet").pack(8, pad=-1).with_lanes(2)

    def save(rank: int) -> None:
        loader = packed.loader(4, rank=rank, world_size=2, last_batch="uneven")
        for _ in range(3):
            next(loader)
        PipelineCheckpoint(tmp_path / "saved", rank=rank, world_size=2).save(loader, step=3)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, range(2)))
    for ranks in (1, 2, 3):
        found = inspected(tmp_path / "saved", "--world-size", ranks)
        assert (found["step"], found["position"]) == (3, 2 * 3 * 4)
    assert call("plan", "--checkpoint", tmp_path / "saved", "--world-size", 3, "--batch-size", 4).exit_code == 0
    assert call("diff", tmp_path / "saved", tmp_path / "saved").exit_code == 0
    assert "called 'model'" in refused(tmp_path / "saved", "--part", "model")
