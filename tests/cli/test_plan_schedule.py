"""``midepoch plan --schedule``, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import commands
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from midepoch import Phase, Schedule

pytest.importorskip("yaml")

ROWS = {"web": 400, "code": 100, "math": 20}
call = partial(commands.call, "plan", columns=80)
of_json, refused = (partial(command, "plan") for command in (commands.of_json, commands.refused))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in ROWS.items():
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"input_ids": [[1] * 10] * rows}), tmp_path / name / "0.parquet", row_group_size=50)
    schedule(max_passes={"math": 2}).save("run.yaml")
    return tmp_path / "run.yaml"


def schedule(**options: Any) -> Schedule:
    return Schedule(
        [
            Phase("warm-up", {"web": 1}, steps=10, global_batch_size=8),
            Phase("main", {"web": 0.75, "code": 0.25}, steps=20),
            Phase("anneal", {"web": 1, "math": 1}, steps=20),
        ],
        **{"sources": {name: name for name in ROWS}, **options},
    )


def test_json_has_all_numbers(run: Path) -> None:
    told = of_json("--schedule", run)
    assert (told["unit"], told["exact"], told["steps"], told["problem"]) == ("rows", True, 50, None)
    assert told["sizes"] == {name: {"rows": rows, "tokens": 10 * rows} for name, rows in ROWS.items()}
    assert [[use["rows"] for use in phase["uses"]] for phase in told["phases"]] == [
        [80, 0, 0],
        [120, 40, 0],
        [120, 0, 40],
    ]
    assert [use["tokens"] for use in told["totals"]] == [3200, 400, 400]
    assert [use["passes"] for use in told["totals"]] == [0.8, 0.4, 2.0]
    (cap,) = told["caps"]
    assert (cap["source"], cap["phase"], cap["shares"]) == ("math", "anneal", {"web": 1.0}) and 240 < cap[
        "position"
    ] < 400
    shared = of_json("--schedule", run, "--ranks", 4)
    assert [use["rows"] for use in shared["totals"]] == [320, 40, 40] and shared["ranks"] == 4


def test_tables_and_picture_fit_into_80_columns(run: Path) -> None:
    shown = call("--schedule", run)
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0] == "3 phases: 400 rows, 50 steps; rows are exact"
    assert all(len(line) <= 80 for line in lines if not line.startswith("math reaches"))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert ["main", "20", "8", "", "160", "1,600"] in cells
    assert ["anneal", "web", "75.0 %", "120", "1,200", "0.30"] in cells
    assert ["", "math", "10.0 %", "40", "400", "2.00 of 2"] in cells
    assert "math reaches its limit of 2 passes in phase 'anneal' at " in shown.output
    warm_up, main, anneal, legend = lines[lines.index("share of rows") + 1 :][:4]
    assert warm_up == "warm-up " + "█" * 72 and main == "main    " + "█" * 54 + "▒" * 18
    assert anneal == "anneal  " + "█" * 54 + "░" * 18 and legend.split() == ["██", "web", "▒▒", "code", "░░", "math"]


def test_a_terminal_without_unicode(run: Path) -> None:
    command = [sys.executable, "-m", "midepoch", "plan", "--schedule", str(run)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=300, env=environment, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode("ascii")
    assert "warm-up ####" in shown and "## web   .. code   ++ math" in shown


def test_sources_are_those_of_the_file_or_of_the_options(run: Path) -> None:
    schedule(sources={}, max_passes={"math": 2}).save(run)
    told = of_json("--schedule", run)
    assert [use["passes"] for use in told["totals"]] == [None] * 3 and not told["caps"]
    assert told["notes"] == [
        "max_passes of math cannot be checked without the data.",
        "passes over web, code, math are not counted. Name the paths of these sources.",
    ]
    shown = call("--schedule", run)
    assert "note: max_passes of math cannot" in shown.output and shown.exit_code == 1
    told = of_json("--schedule", run, "--source", "math=math/*.parquet", "--source", f"web={run.parent / 'web'}")
    assert set(told["sizes"]) == {"math", "web"} and told["caps"]
    assert "--source maths: the sources of" in refused("--schedule", run, "--source", "maths=math")
    assert "--source takes NAME=PATH, got 'math'" in refused("--schedule", run, "--source", "math")
    assert "is given twice" in refused("--schedule", run, "--source", "web=web", "--source", "web=code")
    for path in ("./nowhere", "nowhere"):
        message = refused("--schedule", run, "--source", f"web={path}")
        assert (
            message.startswith("midepoch: source 'web': ") and "nowhere" in message and "--source web=PATH" in message
        )
        assert "--split" not in message
    assert "'nothing'" in refused("--schedule", run, "--source", "web=web", "--column", "nothing")


def test_ranks_that_a_loader_refuses_are_refused(run: Path) -> None:
    Schedule([Phase("all", {"web": 1}, steps=2, global_batch_size=64)]).save(run)
    assert call("--schedule", run, "--ranks", 4).exit_code == 0
    message = refused("--schedule", run, "--ranks", 3)
    assert "phase 'all': a global batch of 64 rows cannot be divided equally among 3 ranks. Use a multiple" in message


def test_tokens_are_called_estimated(run: Path) -> None:
    packed = [Phase("all", {"web": 1}, tokens=11_000, sequence_length=10), Phase("more", tokens=99_000_000)]
    Schedule(packed, sources={"web": "web"}).save(run)
    shown = call("--schedule", run, "--eos").output
    assert "rows are estimated from the weights and the mean lengths of documents" in " ".join(shown.split())
    assert "1,000" in shown and "9,000,000" in shown and "99.00 M" in shown
    told = of_json("--schedule", run)
    assert not told["exact"] and told["phases"][0]["uses"][0]["rows"] == 1100


def test_text_needs_a_tokenizer(run: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save("tokenizer.json")
    for name, column in (("pages", "text"), ("files", "content")):
        pq.write_table(pa.table({column: ["one two three"] * 100, "id": range(100)}), f"{name}.parquet")
    phases = [Phase("all", {"web": 1, "code": 1}, tokens=540)]
    sources = {"web": "pages.parquet", "code": "files.parquet"}
    Schedule(phases, sources=sources, max_passes={"web": 1}).save(run)
    given = ("--tokenizer", "tokenizer.json", "--column", "code=content")
    told = of_json("--schedule", run, *given)
    assert [use["passes"] for use in told["totals"]] == [0.9, 0.9] and told["unchecked"] == []
    assert call("--schedule", run, *given).exit_code == 0
    blank = call("--schedule", run)
    assert blank.exit_code == 1 and "--tokenizer" in blank.output and "Name the paths" not in blank.output
    assert "'text' is text" in refused("--schedule", run, "--column", "text")
    assert "'content'" in refused("--schedule", run, "--tokenizer", "tokenizer.json", "--column", "content")
    assert "--column x: the sources" in refused("--schedule", run, "--column", "x=text")
    message = refused("--schedule", run, "--tokenizer", "none.json")
    assert "--tokenizer none.json" in message and "Name a tokenizer.json, a folder or a model of the Hub" in message
    assert "--tokenizer requires --schedule" in refused("--checkpoint", run, "--world-size", 1, "--tokenizer", "a")


def test_a_run_that_cannot_be_completed_exits_with_1(run: Path) -> None:
    schedule(max_passes={"math": 1, "web": 1, "code": 1}).save(run)
    assert of_json("--schedule", run)["problem"] is None  # 340 rows of web are enough
    schedule(max_passes={"math": 1, "web": 1}, sources={"web": "code", "code": "code", "math": "math"}).save(run)
    shown = call("--schedule", run)
    assert shown.exit_code == 1
    text = " ".join(shown.output.split())
    assert "problem: phase 'anneal' cannot be filled: all of its sources have reached max_passes at " in text
    assert "no other source is left" in text and call("--schedule", run, "--json").exit_code == 1


def test_errors_name_the_file(run: Path) -> None:
    assert "there is no file nothing.yaml." in refused("--schedule", "nothing.yaml")
    run.write_text("phases: [{name: main, weights: {web: 1}, row: 5}]")
    assert f"{run}: phase 'main' has no field 'row'. Did you mean 'rows'?" in refused("--schedule", run)
    assert "Use one of them" in refused("--schedule", run, "--checkpoint", run)
    assert "plan needs --checkpoint. Use --checkpoint and --world-size, or --schedule" in refused("--world-size", 1)
    assert "plan needs --world-size" in refused("--checkpoint", run)
    assert "--column requires --schedule" in refused("--checkpoint", run, "--world-size", 1, "--column", "a")


def test_names_and_bars_of_any_length_share_the_width(run: Path) -> None:
    long = "a phase with a name that is longer than half of a narrow terminal"
    Schedule([Phase(long, {"web": 1, "code": 1}, rows=10), Phase("open", {"web": 1})]).save(run)
    lines = call("--schedule", run).output.splitlines()
    first, second = lines[lines.index("share of rows") + 1 :][:2]
    assert first.startswith(long[:19] + "… ") and first.endswith("█▒" + "▒" * 28) and len(first) == 80
    assert second == "open".ljust(21) + "█" * 59  # without an end


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_legend_of_long_names_keeps_each_beside_its_sign(columns: int, run: Path) -> None:
    names = {f"a-source-with-a-name-that-is-long-{number}": 1 for number in range(3)}
    Schedule([Phase("a phase with a name that is long", names, rows=9)], sources=dict.fromkeys(names, "web")).save(run)
    lines = call("--schedule", run, columns=columns).output.splitlines()
    begin, end = lines.index("share of rows") + 2, lines.index("consumption")
    legend = lines[begin:end]
    assert max(map(len, legend)) <= columns
    for name, sign in zip(names, "█▒░", strict=True):
        assert any(f"{2 * sign} {name}" in line for line in legend)
    assert len({len(line) - len(line.lstrip()) for line in legend}) == 1
