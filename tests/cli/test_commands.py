"""The commands about data, states, checkpoints and the machine, as users run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call, of_json, refused

import midepoch
from midepoch.errors import StateError
from midepoch.stats import Stats
from midepoch.tools.bench import Trial, advise
from midepoch.tools.describe import describe, differences
from states import at_row

COMMANDS = ["info", "peek", "index", "bench", "inspect", "diff", "verify", "plan", "report", "watch", "audit", "doctor"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))  # other tests have the same rows elsewhere
    for i in range(3):
        ids = np.arange(i * 100, (i + 1) * 100)
        table = pa.table({"id": ids, "text": [f"row {one}" for one in ids], "tokens": [[1] * 20] * 100})
        pq.write_table(table, tmp_path / f"p{i}.parquet", row_group_size=25)
    return sorted(tmp_path.glob("*.parquet"))


@pytest.fixture
def state(files: list[Path], tmp_path: Path) -> Path:
    loader = midepoch.from_files(list(map(str, files))).shuffle(seed=1, scope="rows").loader(10)
    for _ in range(6):
        next(loader)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    return tmp_path / "state.json"


def test_info(files: list[Path]) -> None:
    told = of_json("info", *files)
    assert (told["rows"], told["files"], told["blocks"], told["read"]) == (300, 3, 12, "decoded")
    assert told["bytes"] == sum(path.stat().st_size for path in files)
    assert [column["name"] for column in told["columns"]] == ["id", "text", "tokens"]
    assert told["balance"]["rows_per_block"] == {"least": 25.0, "median": 25.0, "most": 25.0}
    shown = call("info", files[0].parent / "*.parquet").output
    assert "300 rows" in shown and "p2.parquet" in shown and "list" in shown
    assert of_json("info", *files, "--split", "train[:10%]")["rows"] == 30
    assert "nothing.parquet" in refused("info", "nothing.parquet")
    assert "--split" in refused("info", "someone/something")
    assert "files have no splits" in refused("info", *files, "--split", "test")
    assert "these are files. Omit it" in refused("info", *files, "--config", "en")


def test_info_of_what_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [1, 2, 3]})}).save_to_disk(tmp_path / "saved")
    assert of_json("info", tmp_path / "saved", "--split", "train")["rows"] == 3
    assert "Choose one with --split" in refused("info", tmp_path / "saved")


def test_peek_finds_rows_by_their_numbers_and_values(tmp_path: Path) -> None:
    ids = [f"doc-{number}" for number in range(70_000)]
    meta = [{"lang": "en" if number % 2 else "de"} for number in range(70_000)]
    meta[5] = {"lang": None}
    table = {"id": ids, "meta": meta, "n": range(70_000), "a b": ["x and y"] * 70_000}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")

    def found(*arguments: Any) -> list[int]:
        told = of_json("peek", tmp_path / "rows.parquet", *arguments)
        assert [one["values"]["n"] for one in told] == [one["row"] for one in told]
        return [one["row"] for one in told]

    assert found("--row", 17) == [17]
    assert found("--row", 69_999, "--row", 0) == [69_999, 0]
    assert found("--where", "id = 'doc-17'") == [17]
    assert found("--where", 'id == "doc-69999"', "--columns", "n") == [69_999]
    assert found("--where", "meta.lang = 'en' and n >= 100", "-n", 2) == [101, 103]
    assert found("--where", "n <> 0 and n < 3") == [1, 2]
    assert found("--where", "id = 'doc-1 and 2'") == []
    assert found("--where", "meta.lang is null") == [5]
    assert found("--where", "n > 4 and meta.lang IS NOT NULL", "-n", 2) == [6, 7]
    nothing = call("peek", tmp_path / "rows.parquet", "--where", "id = 'none'")
    assert nothing.exit_code == 1 and "no row of 70,000 has id = 'none'" in nothing.output
    for arguments, problem in {
        ("--row", 70_000): "there is no row 70,000: there are 70,000 rows",
        ("--row", 1, "--where", "n = 1"): "use only one of --position, --row and --where",
        ("--row", 1, "--shuffle", 1): "without --shuffle",
        ("--row", 1, "-n", 3): "Name each row, as in --row 3 --row 4",
        ("--where", "id = 17"): "--where id = 17 does not fit the columns: id is string.",
        ("--where", "id = doc"): "a text has quotes: id = 'doc'",
        ("--where", "meta.lang = null"): "Use: meta.lang is null",
        ("--where", "ix = 1"): "there is no column 'ix'. There are: id, meta, n, a b.",
        ("--where", "n"): "--where takes comparisons such as",
        ("--where", "n = __import__('os')"): "--where takes comparisons such as",
    }.items():
        assert problem in refused("peek", tmp_path / "rows.parquet", *arguments)
    assert "For row 17, pass --row 17" in refused("peek", tmp_path / "rows.parquet", 17)


def test_peek_shows_what_training_gets(files: list[Path]) -> None:
    ds = midepoch.from_files(list(map(str, files))).shuffle(seed=5, scope="rows")
    ds.set_epoch(2)
    told = of_json("peek", *files, "--shuffle", 5, "--scope", "rows", "--epoch", 2, "--position", 17, "-n", 3)
    assert [one["values"]["id"] for one in told] == [ds[i]["id"] for i in (17, 18, 19)]
    assert [one["row"] for one in told] == [one["values"]["id"] for one in told]
    first = told[0]["values"]["id"]
    assert told[0]["place"] == f"row {first % 100} of {files[first // 100]}"
    shown = call("peek", *files, "--columns", "tokens", "-n", 1).output
    assert "(20 values)" in shown and "text" not in shown
    assert "there is no position 300" in refused("peek", *files, "--position", 300)
    assert "--shuffle" in refused("peek", *files, "--scope", "rows")
    assert "nothing" in refused("peek", *files, "--columns", "nothing")


def test_index(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unsaved = call("index", *files, "--index-dir", tmp_path / "file" / "index")
    assert unsaved.exit_code == 1 and "3 files, 12 blocks, 300 rows; the index could not be saved" in unsaved.output
    told = of_json("index", *files, "--index-dir", tmp_path / "index")
    assert told["rows"] == 300 and list((tmp_path / "index").glob("*.midepoch-index"))
    assert "3 files, 12 blocks, 300 rows" in call("index", *files, "--force").output


def test_inspect(state: Path, files: list[Path], tmp_path: Path) -> None:
    told = of_json("inspect", state, "--batch-size", 10, "--world-size", 3)
    assert (told["epoch"], told["position"], told["share"], told["steps_left"]) == (0, 60, 0.2, 8)
    (row,) = of_json("peek", *files, "--shuffle", 1, "--scope", "rows", "--position", 60, "-n", 1)
    assert told["next_row"] == row["place"]
    assert "60 of 300 rows (20.0 %)" in call("inspect", state).output
    (tmp_path / "no.json").write_text("{")
    assert "is not JSON" in refused("inspect", tmp_path / "no.json")
    (tmp_path / "other.json").write_text("[1, 2]")
    assert "one state" in refused("inspect", tmp_path / "other.json")
    assert "does not exist" in refused("inspect", tmp_path / "nowhere")


def test_inspect_and_verify_checkpoints(files: list[Path], tmp_path: Path) -> None:
    loader = midepoch.from_files(list(map(str, files))).loader(10)
    saved = midepoch.PipelineCheckpoint(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        next(loader)
        saved.save(loader, step=step)
    assert of_json("inspect", tmp_path / "checkpoints")["position"] == 30
    assert of_json("inspect", tmp_path / "checkpoints", "--step", 1)["position"] == 10
    found = call("verify", tmp_path / "checkpoints")
    assert found.exit_code == 0 and found.output.count("complete") == 3
    (damaged,) = (tmp_path / "checkpoints").glob("*3/data*.json")
    damaged.write_text(damaged.read_text().replace("3", "4"))
    found = call("verify", tmp_path / "checkpoints", "--json")
    assert found.exit_code == 1
    assert [one["problem"] is None for one in json.loads(found.stdout)] == [True, True, False]
    assert call("verify", tmp_path / "checkpoints", "--step", 2).exit_code == 0
    assert of_json("inspect", tmp_path / "checkpoints")["position"] == 20  # what restore_latest would take
    assert "has no step 9" in refused("verify", tmp_path / "checkpoints", "--step", 9)


def test_diff(state: Path, files: list[Path], tmp_path: Path) -> None:
    ds = midepoch.from_files(list(map(str, files)))
    (tmp_path / "later.json").write_text(json.dumps(at_row(json.loads(state.read_text()), 90)))
    found = call("diff", state, tmp_path / "later.json")
    assert found.exit_code == 0 and "does not matter" in found.output
    assert call("diff", state, state).output.startswith("the same position")
    (tmp_path / "other.json").write_text(json.dumps(ds.shuffle(seed=2, scope="rows").loader(1).state_dict()))
    told = of_json("diff", state, tmp_path / "other.json")
    assert not told["resumes"] and "another seed" in told["problem"]
    found = call("diff", state, "--data", files[0])
    assert found.exit_code == 1 and "would not resume" in found.output and "Nothing was changed" in found.output
    assert call("diff", state, "--data", tmp_path / "*.parquet").exit_code == 0  # in the order that the state tells of
    (tmp_path / "make.py").write_text(
        f"import midepoch\n\ndef make():\n    return midepoch.from_files({list(map(str, files))!r})"
        ".shuffle(seed=1, scope='rows').loader(7)\n\ndef other():\n    return 1\n"
        "\ndef broken():\n    return 1 / 0\n"
    )
    found = call("diff", state, "--dataset", f"{tmp_path / 'make.py'}:make")
    assert found.exit_code == 0 and "would resume" in found.output
    assert "must return a dataset" in refused("diff", state, "--dataset", f"{tmp_path / 'make.py'}:other")
    assert "no function" in refused("diff", state, "--dataset", f"{tmp_path / 'make.py'}:third")
    broken = refused("diff", state, "--dataset", f"{tmp_path / 'make.py'}:broken")
    assert "'broken' in" in broken and "make.py:10: ZeroDivisionError: division by zero" in broken
    (tmp_path / "make.py").write_text("1\nundefined\n")
    assert "make.py:2: NameError" in refused("diff", state, "--dataset", f"{tmp_path / 'make.py'}:make")
    assert "one thing to compare with" in refused("diff", state)


def test_states_of_streams(files: list[Path], tmp_path: Path) -> None:
    ds = midepoch.from_files(list(map(str, files)))
    mixed = midepoch.mix({"a": ds.filter(_even), "b": ds}, weights=[1, 3])
    loader = mixed.loader(8)
    next(loader)
    told = describe(loader.state_dict())
    assert told.stream and told.position == 8 and told.rows is None and told.share is None
    assert "weight 3" in told.sources[1] and "mix" in str(told) and "8 outputs" in told._repr_html_()
    assert not [one for one in differences(loader.state_dict(), mixed) if one.cause]
    assert [one.field for one in differences(loader.state_dict(), ds) if one.cause]
    with pytest.raises(StateError):
        describe({"midepoch": 1})
    with pytest.raises(StateError, match="is empty"):
        describe([])


def _even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 == 0)


def test_states_show_in_notebooks(state: Path) -> None:
    text = describe(json.loads(state.read_text()))._repr_html_()
    assert "width:20.00%" in text and "shuffled by rows, seed 1" in text
    assert "300 in 3 files" in midepoch.from_files(str(state.parent / "*.parquet"))._repr_html_()


def test_bench(files: list[Path], tmp_path: Path) -> None:
    told = of_json("bench", *files, "--columns", "id", "--batch-size", "10,50", "--workers", "0,1", "--seconds", 0.1)
    assert [(one["num_workers"], one["batch_size"]) for one in told["trials"]] == [(0, 10), (0, 50), (1, 10), (1, 50)]
    assert all(one["rows_per_second"] > 0 for one in told["trials"]) and told["limit"]["rows_per_second"] > 0
    assert told["recommended"]["why"]
    (tmp_path / "make.py").write_text(
        f"import midepoch\n\ndef make():\n    return midepoch.from_files({list(map(str, files))!r})"
        ".filter(lambda row: row['id'] % 2 == 0)\n"
    )
    shown = call(
        "bench", "--dataset", f"{tmp_path / 'make.py'}:make", "--workers", 0, "--seconds", 0.1, "--batch-size", 8
    )
    assert shown.exit_code == 0 and "recommended: loader(batch_size=8, num_workers=0)" in shown.output
    assert "--workers takes integers" in refused("bench", *files, "--workers", "x")
    too_large = refused("bench", *files, "--workers", 0, "--seconds", 0.1, "--batch-size", 900)
    assert "too few rows. Pass a smaller --batch-size" in too_large
    assert "pass the data" in refused("bench")


def test_bench_recommends_the_fewest_workers_that_are_as_fast() -> None:
    def trial(workers: int, size: int, speed: float) -> Trial:
        stages = {"read": 0.0, "functions": 1.0, "present": 0.0}
        return Trial(workers, size, Stats(batches=3, rows=3, seconds=2 / speed, stages=stages))

    best, why = advise([trial(0, 8, 100), trial(1, 8, 390), trial(2, 8, 400), trial(2, 64, 380)])
    assert (best.num_workers, best.batch_size) == (1, 8)
    assert "3.9 × as fast as none" in why and "your functions" in why and "no more than 5 %" in why
    assert "workers do not help" in advise([trial(0, 8, 100), trial(2, 8, 50)])[1]


def test_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))
    found = {one["what"]: one for one in of_json("doctor")}
    assert found["pyarrow"]["verdict"] == "good" and str(tmp_path) in found["index folder"]["found"]
    assert "one process" in call("doctor").output
    monkeypatch.setattr("midepoch._native.library.kernel", lambda: object())
    assert [one["found"] for one in of_json("doctor") if one["what"] == "native kernel"] == ["in use"]
    monkeypatch.setattr("midepoch._native.library.kernel", lambda: None)
    assert "none for this platform" in call("doctor", "--json").stdout
    monkeypatch.setenv("MIDEPOCH_NATIVE", "0")
    assert "switched off by MIDEPOCH_NATIVE=0" in call("doctor", "--json").stdout
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1" if name == "pyarrow" else "99")
    told = call("doctor", "--json")
    found = {one["what"]: one for one in json.loads(told.stdout)}
    assert told.exit_code == 1 and found["pyarrow"]["verdict"] == "bad" and "20 or newer" in found["pyarrow"]["remedy"]
    assert found["index folder"]["verdict"] == found["TOKENIZERS_PARALLELISM"]["verdict"] == "mind"


@pytest.mark.parametrize("command", [*COMMANDS, "demo"])
def test_help_has_examples(command: str) -> None:
    found = call(command, "--help")
    assert found.exit_code == 0 and f"midepoch {command}" in found.output
    assert (command in ("demo", "watch")) or "--json" in found.output


def test_the_command_itself(files: list[Path]) -> None:
    command = Path(sys.executable).with_name("midepoch")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout == f"midepoch {midepoch.__version__}\n"
    script = subprocess.run([command, "--show-completion", "bash"], capture_output=True, text=True, timeout=300)
    assert "complete" in script.stdout + script.stderr


def test_names_and_values_are_shown_as_they_are(tmp_path: Path) -> None:
    when = pa.array([1, 2**62], pa.timestamp("us"))
    table = pa.table({"a[x]": when, "[/]": ["\x1b]0;pwned\x07", "[red]b[/]"], "nan": [float("nan"), 1.0]})
    pq.write_table(table, tmp_path / "odd[bold]n.parquet")
    shown = call("info", tmp_path).output
    assert "timestamp[us]" in shown and "a[x]" in shown and "odd[bold]n.parquet" in shown and "[/]" in shown
    shown = call("peek", tmp_path, "--columns", "[/],nan").output
    assert "\x1b" not in shown and "\\x1b]0;pwned" in shown and "[red]b[/]" in shown and "odd[bold]n" in shown
    told = of_json("peek", tmp_path, "--columns", "nan")
    assert [one["values"]["nan"] for one in told] == [None, 1.0]
    found = call("peek", tmp_path)  # a time that Python has no word for
    assert found.exit_code == 2 and "Traceback" not in found.output and found.stderr.startswith("midepoch: ")


def test_steps_left_by_ends_and_states_of_ranks(state: Path, tmp_path: Path) -> None:
    assert of_json("inspect", state, "--batch-size", 32)["steps_left"] == 8
    assert of_json("inspect", state, "--batch-size", 32, "--last-batch", "drop")["steps_left"] == 7
    one = json.loads(state.read_text())
    (tmp_path / "ranks.json").write_text(json.dumps([at_row(one, 300), at_row(one, 0, epoch=1)]))
    told = of_json("inspect", tmp_path / "ranks.json")
    assert told["epoch"] == 1 and told["next_row"] is not None


def test_what_a_tired_person_types(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"a": 1}\n')
    told = refused("info", tmp_path)
    assert "different formats" in told
    assert of_json("info", tmp_path, "--format", "parquet")["rows"] == 300  # the way out that the message names
    assert "label: no column 'lang'. There are: id, text" in refused("report", files[0], "--label", "lang")
    assert "there is no folder" in refused("report", files[0], "-o", tmp_path / "nowhere" / "x.html")
    loader = midepoch.from_files(str(files[0])).filter(_even).loader(4)
    (tmp_path / "stream.json").write_text(json.dumps(loader.state_dict()))
    assert "Use --dataset" in refused("diff", tmp_path / "stream.json", "--data", files[0])
    assert "there is no module 'nothing'" in refused("bench", "--dataset", "nothing.at_all:make")
    assert "such as train.py:make_dataset" in refused("bench", "--dataset", "json.nothing:make")


def test_doctor_asks_for_what_the_package_asks_for() -> None:
    from midepoch.tools.doctor import _least

    asked = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f"{name}>={_least()[name]}" in asked for name in ("numpy", "pyarrow", "datasets", "jax"))
