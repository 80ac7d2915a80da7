"""The command line as users run it: tables, JSON, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import call, of_json, refused

import midepoch
from data import write_parquet
from midepoch.audit import Ledger
from midepoch.checkpoint import PipelineCheckpoint
from states import at_row


@pytest.fixture
def run(small_files: list[str], tmp_path: Path) -> Path:
    """Two ranks for three steps, then three ranks to the end of the epoch and a step into the next."""
    ds, state = midepoch.from_files(small_files).shuffle(seed=1), None
    for world, steps in ((2, 3), (3, 6)):
        ledger = Ledger(tmp_path / "run", attempt=str(world))
        loaders = [ds.loader(3, rank=r, world_size=world, audit=ledger, last_batch="pad") for r in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            for _ in range(steps if world == 2 else 3):
                next(loader)
            if world == 3:
                assert next(loader, None) is None
                next(loader)
        state = loaders[0].state_dict()
    PipelineCheckpoint(tmp_path / "checkpoints").save(loaders[0], step=7)
    (tmp_path / "state.json").write_text(json.dumps(state))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["head", "a.parquet"], "No such command 'head'. Did you mean peek?"),
        (["tables"], "There are: info, peek, index"),
        (["peek", "a.parquet", "--rows", "5"], "-n"),
        (["peek", "a.parquet", "--columns", "x", "y"], "columns are separated by commas: --columns x,y"),
        (["peek", "a.parquet", "--columns", "text"], "--columns: no column 'text'. There are: x"),
        (["peek", "made.py:make"], "made.py:make is a function, and not data: pass it as --dataset made.py:make"),
        (["inspect", "made.py:make"], "made.py:make is a function, and not data"),
        (["plan", "checkpoints"], "need the name of an option, such as --checkpoint FOLDER"),
        (["inspect", "a.parquet"], "is data (parquet), not a state. Use `midepoch info`"),
        (["inspect", "a.pt"], "file of torch.save. Write the state that is in it as JSON"),
        (
            ["diff", "a.json", "--dataset", "made.py:ds"],
            "'ds' in made.py is a dataset. Name a function without arguments",
        ),
        (["diff", "a.json", "--dataset", "made.py:make"], "must be a function without arguments: missing a required"),
    ],
)
def test_commands_as_people_type_them_first(
    given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"x": [1], "y": [2]}), "a.parquet")
    torch.save({"a": 1}, "a.pt")
    Path("a.json").write_text(json.dumps(midepoch.from_dict({"x": [1]}).state_dict()))
    Path("made.py").write_text("import midepoch\nds = midepoch.from_dict({'x': [1]})\ndef make(path): return ds\n")
    assert says in " ".join(call(*given).output.split())


def test_columns_may_have_spaces_between_them(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [2], "z": [3]}), tmp_path / "a.parquet")
    assert call("peek", tmp_path / "a.parquet", "--columns", "x y").output.count("int64") == 2


def test_audit(run: Path) -> None:
    found = call("audit", run / "run")
    assert found.exit_code == 0, found.output
    assert "complete" in found.output and "exact so far" in found.output and "ranks: 2 → 3" in found.output
    told = of_json("audit", run / "run")
    assert told["exact"]
    (told,) = told["loaders"]
    assert told["steps"] == 7 and told["world_sizes"] == [2, 3]
    assert [epoch["once"] for epoch in told["epochs"]] == [37, 9]
    rows = of_json("audit", run / "run", "--step", 4)
    assert len(rows) == 9 and {row["rank"] for row in rows} == {0, 1, 2} and rows[0]["position"] == 18
    assert rows[0]["place"].startswith("row ") and ".arrow" in rows[0]["place"]
    assert of_json("audit", run / "run", "--row", rows[0]["row"])[0]["step"] == 4
    assert "where it is" in call("audit", run / "run", "--row", 5).output
    assert of_json("audit", run / "run", "--against", run / "run") == {"first": 37, "second": 37, "both": 37}
    assert "37" in call("audit", run / "run", "--against", run / "run").output


def test_a_row_from_memory_is_shown_without_the_folder_of_the_cache(tmp_path: Path) -> None:
    next(midepoch.from_list([{"x": 1}, {"x": 2}]).loader(1, audit=str(tmp_path)))
    shown = call("audit", tmp_path, "--step", 1).output
    assert "row 0 of part-00000.arrow" in " ".join(shown.replace("│", " ").split()), shown


def test_audit_finds_what_is_wrong_and_says_what_cannot_be_looked_at(small_files: list[str], tmp_path: Path) -> None:
    ds = midepoch.from_files(small_files)
    for number, position in enumerate([0, 10]):
        loader = ds.loader(3, audit=Ledger(tmp_path, attempt=str(number)))
        loader.load_state_dict(at_row(loader.state_dict(), position))
        next(loader)
        next(loader)
    found = call("audit", tmp_path)
    assert found.exit_code == 1 and "not exact" in found.output and "positions 6, 7, 8, 9" in found.output
    found = call("audit", tmp_path / "nothing")
    assert found.exit_code == 2 and "there is no ledger in" in found.output
    assert call("audit", tmp_path, "--step", 99).exit_code == 2
    assert call("audit", tmp_path, "--step", 1, "--row", 1).exit_code == 2


def test_plan_tells_what_the_resume_does(run: Path, small_files: list[str]) -> None:
    """The rows it names are the rows that come."""
    options = ["--checkpoint", run / "checkpoints", "--world-size", 5, "--batch-size", 2, "--num-workers", 4]
    told = of_json("plan", *options, "--steps", 9, "--machines", 5)
    assert told["accepted"] and told["checked"] == "index" and told["step"] == 7
    assert (told["epoch"], told["position"], told["rows"], told["steps_left"]) == (1, 9, 37, 3)
    assert told["steps_per_epoch"] == 4
    ds = midepoch.from_files(small_files).shuffle(seed=1)
    for rank in range(5):
        loader = ds.loader(2, rank=rank, world_size=5)
        loader.load_state_dict(json.loads((run / "state.json").read_text()))
        rows = [batch["id"].tolist() for batch in loader]
        assert [batch[rank] for batch in told["batches"]][: len(rows)] == rows
    assert sum(machine["rows"] for machine in told["machines"]) == 28
    assert all(machine["blocks"] > 0 and machine["bytes"] > 0 for machine in told["machines"])
    shown = call("plan", *options)
    assert shown.exit_code == 0 and "accepted" in shown.output and "3 steps left in this epoch" in shown.output
    assert "epoch 1, position 9 of 37" in shown.output


@pytest.mark.parametrize("ends", ["drop", "pad", "uneven"])
def test_plan_at_the_end_of_an_epoch(small_files: list[str], tmp_path: Path, ends: str) -> None:
    loader = midepoch.from_files(small_files).loader(6)
    for _ in range(6):
        next(loader)
    (tmp_path / "state.json").write_text(json.dumps([loader.state_dict()] * 2))  # of two ranks
    told = of_json(
        "plan", "--checkpoint", tmp_path / "state.json", "--world-size", 3, "--batch-size", 4, "--last-batch", ends
    )
    expected = {"drop": (1, 3, 0, 1, 0), "pad": (0, 1, 11, 0, 0), "uneven": (0, 1, 0, 0, 2)}[ends]
    keys = ("epoch", "steps_left", "padded", "dropped", "ranks_left_out")
    assert tuple(told[key] for key in keys) == expected


def test_plan_against_files_and_code(run: Path, small_files: list[str], tmp_path: Path) -> None:
    options = ["plan", "--checkpoint", run / "state.json", "--world-size", 2, "--batch-size", 3]
    folder = Path(small_files[0]).parent
    assert of_json(*options, "--data", folder / "*.arrow")["checked"] == "dataset"
    refused = call(*options, "--data", small_files[0])
    assert refused.exit_code == 1 and "refused" in refused.output and "data differs" in refused.output
    script = tmp_path / "train.py"
    text = "import midepoch\ndef make(): return midepoch.from_files({!r}).shuffle(seed={}).loader(4)\n"
    script.write_text(text.format(str(folder), 1))
    assert of_json(*options, "--dataset", f"{script}:make")["accepted"]
    script.write_text(text.format(str(folder), 2))
    told = of_json(*options, "--dataset", f"{script}:make")
    assert not told["accepted"] and "seed differs" in told["problem"]
    assert call(*options, "--dataset", f"{script}:other").exit_code == 2
    assert call(*options, "--dataset", "train").exit_code == 2


def test_plan_says_what_it_cannot_know(
    run: Path, small_files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--world-size", 2, "--batch-size", 3]
    nothing = call("plan", "--checkpoint", tmp_path / "none", *options)
    assert nothing.exit_code == 2 and "none does not exist. Pass a state as a JSON file" in nothing.output
    (tmp_path / "x.json").write_text("{}")
    assert call("plan", "--checkpoint", tmp_path / "x.json", *options).exit_code == 2
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "empty"))
    told = of_json("plan", "--checkpoint", run / "state.json", *options)
    assert told["checked"] == "nothing" and "not found among the indexes" in told["notes"][0]
    assert len(told["batches"]) == 3  # by rows, the order is in the state alone
    picked = midepoch.from_files(small_files).select([3, 1, 2]).loader(1).state_dict()
    (tmp_path / "picked.json").write_text(json.dumps(picked))
    told = of_json("plan", "--checkpoint", tmp_path / "picked.json", *options)
    assert not told["batches"] and any("Pass the dataset" in note for note in told["notes"])
    assert (
        call(
            "plan", "--checkpoint", run / "state.json", "--world-size", 3, "--batch-size", 1, "--machines", 2
        ).exit_code
        == 2
    )


def test_plan_of_lanes_gives_each_machine_its_own_blocks(tmp_path: Path) -> None:

    write_parquet(tmp_path / "x.parquet", np.arange(400), 10)
    ds = midepoch.from_files(tmp_path / "x.parquet").shuffle(seed=1, window=2).with_lanes(4)
    from midepoch.tools.plan import plan_resume

    plan = plan_resume(ds.state_dict(), ds, world_size=4, batch_size=5, machines=4)
    assert [machine.blocks for machine in plan.machines] == [10, 10, 10, 10]
    other = plan_resume(ds.state_dict(), ds, world_size=3, batch_size=5, machines=3)
    assert [machine.blocks for machine in other.machines] == [40, 40, 40]  # lanes that are nobody's own
    later = at_row(ds.state_dict(), 200)
    assert [m.blocks for m in plan_resume(later, ds, world_size=4, batch_size=5, machines=4).machines] == [6, 6, 6, 6]


def test_the_command_is_installed() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "midepoch"), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "audit" in done.stdout and "plan" in done.stdout


def test_version_and_help_as_commands() -> None:
    assert call("version").output == call("--version").output
    assert call("help").output == call("--help").output
    assert call("help", "audit").output == call("audit", "--help").output != call("help").output


def test_a_ledger_that_is_empty_or_damaged_names_the_way_out(run: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "damaged" / next(run.rglob("*.ledger")).name
    ledger.parent.mkdir()
    ledger.write_bytes(b"")
    assert "has no step yet. Pass a run that has trained a batch" in refused("audit", ledger.parent)
    ledger.write_bytes(b"nothing of ours")
    assert "is not a ledger of midepoch. Move it out of the folder" in refused("audit", ledger.parent)
