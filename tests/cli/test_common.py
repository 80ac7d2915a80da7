"""Output of the command line: as wide as the terminal or COLUMNS, also in a pipe, and nothing in it is cut."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call
from rich.console import Console

import midepoch
from midepoch.audit import Ledger, read_runs
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.cli import common, runs
from midepoch.cli.app import COMMANDS
from midepoch.demo.__main__ import progress_of

LARGE = 1_234_567_890_123


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run over a file with a long name, with a ledger, a state and a checkpoint."""
    folder = tmp_path / "a folder with a name that is longer than a narrow terminal is wide"
    folder.mkdir()
    pq.write_table(pa.table({"a_column_with_a_long_name": np.arange(40)}), folder / "rows.parquet")
    loader = midepoch.from_files(str(folder / "rows.parquet")).loader(4, audit=str(tmp_path / "run"))
    next(loader)
    PipelineCheckpoint(tmp_path / "checkpoints").save(loader, step=LARGE, extra={"of_many_letters": 1, "another": 2})
    loader.close()
    return tmp_path


def shown(monkeypatch: pytest.MonkeyPatch, width: int, terminal: bool, action: Any) -> str:
    file = io.StringIO()
    monkeypatch.setattr(common, "console", common._Console(file=file, width=width, force_terminal=terminal))
    action()
    return without_colours(file.getvalue())


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80])
def test_numbers_of_an_audit_are_whole(width: int, terminal: bool, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = read_runs(run / "run")
    counts = {name: LARGE + number for number, name in enumerate(("rows", "once", "repeated", "never", "steps"))}
    rare = {name: LARGE + 10 + number for number, name in enumerate(("dropped", "pending", "skipped", "again"))}
    proof = replace(found.epochs[0], **counts, **rare)
    found.__dict__["epochs"] = [proof]
    text = shown(monkeypatch, width, terminal, lambda: runs._show_proof(found, several=False))
    for number in (*counts.values(), *rare.values()):
        assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", text)
    assert "not exact" in text and "…" not in text
    assert max(map(len, text.splitlines()[1:])) <= width  # the first is the path of the run


@pytest.mark.parametrize("width", [40, 60, 80])
def test_texts_are_folded_on_a_terminal_and_in_a_pipe(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words, number = "one two three " * 20, f"{LARGE:,}"
    for terminal in (True, False):
        row = {"text": words, "word": "#" * 200, "number": LARGE}
        text = shown(monkeypatch, width, terminal, lambda row=row: common.print_table([row], title="a title"))
        assert number in text and text.count("#") == 200 and text.count("three") == 20 and "…" not in text
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80])
def test_a_long_name_leaves_room_for_its_value(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"name": "a_column_with_a_name_" * 3, "value": "one two three " * 20, "type": "list<element: string>"},
        {"name": "id", "value": 7, "type": "int64"},
    ]
    text = shown(monkeypatch, width, False, lambda: common.print_table(rows, header=False))
    assert text.count("three") == 20 and len(text.splitlines()) < 30
    assert "a_column_with_a_name_" * 3 in unfolded(text) and max(map(len, text.splitlines())) <= width
    short = [{"name": "of these rejected", "value": "one two three " * 20}]
    assert "│ of these rejected │" in shown(monkeypatch, width, False, lambda: common.print_table(short, header=False))


def test_rows_of_one_of_several_loaders_say_whose_they_are(tmp_path: Path) -> None:
    for name, rows in (("train", 8), ("validation", 4)):
        list(midepoch.from_dict({"id": list(range(rows))}).loader(2, audit=Ledger(tmp_path / "run", name=name)))
    assert call("audit", tmp_path / "run", "--step", 1).stdout.startswith("step 1, loader train\n")
    of_valid = call("audit", tmp_path / "run", "--row", 3, "--stream", "validation").stdout
    assert of_valid.startswith("row 3, loader validation\n")


def test_sentences_are_wrapped_between_words_and_addresses_are_whole() -> None:
    file = io.StringIO()
    address = "http://127.0.0.1:8765/" + "a" * 80
    common.say(f"{'word ' * 20}{address} (Ctrl-C stops it)", to=common._Console(file=file, width=40))
    lines = file.getvalue().splitlines()
    assert address in lines and max(len(line) for line in lines if line != address) <= 40


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A run over chats and documents, packed, restarted, with excluded documents: all columns of the tables."""
    chat = [{"role": "user", "content": "a question " * 30}, {"role": "assistant", "content": "an answer " * 60}]
    rows = {"input_ids": [[1] * (5 + number % 20) for number in range(300)], "messages": [chat] * 300}
    pq.write_table(pa.table(rows), tmp_path / "chats.parquet", row_group_size=50)
    ds = midepoch.from_files(str(tmp_path / "chats.parquet")).shuffle(seed=1).select_columns("input_ids")
    mixed = midepoch.mix({"a": ds.take(150), "b": ds.skip(150)}, {"a": 0.5, "b": 0.5}, seed=2, stop="all")
    loader = mixed.pack(16, pad=0).loader(8, last_batch="drop", provenance=True, audit=str(tmp_path / "packed"))
    for _ in range(3):
        next(loader)
    PipelineCheckpoint(tmp_path / "packed" / "checkpoints").save(loader, step=3)
    state = loader.state_dict()
    next(loader)
    loader.load_state_dict(state)
    loader.exclude(rows={"a": [3, 4, 5]})
    for _ in loader:
        pass
    (tmp_path / "run.yaml").write_text(
        "phases:\n  - {name: main, weights: {web: 0.75, code: 0.25}, rows: 3000}\n"
        "  - {name: anneal, weights: {code: 1}, rows: 100}\n"
    )
    (tmp_path / "state.json").write_text(json.dumps(midepoch.from_files(str(tmp_path / "chats.parquet")).state_dict()))
    return tmp_path


def is_table(line: str) -> bool:
    return line[:1] in "│┃┏┡├└┌" and bool(line)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_table_of_any_command_is_broken(columns: int, packed: Path, run: Path, python: str) -> None:
    """All lines of a table have one length, and nothing but a word of its own is wider than the terminal."""
    data, saved, wide = packed / "chats.parquet", packed / "packed", next(run.glob("a folder*/rows.parquet"))
    commands = {
        "audit": ["audit", saved],
        "audit --step": ["audit", saved, "--step", 4],
        "audit --row": ["audit", saved, "--row", "a:30"],
        "audit of rows": ["audit", run / "run", "--step", 1],
        "audit --against": ["audit", run / "run", "--against", run / "run"],
        "info": ["info", data],
        "info of a long name": ["info", wide],
        "peek": ["peek", data, "-n", 2],
        "index": ["index", data],
        "bench": ["bench", data, "--columns", "input_ids", "--batch-size", 64, "--workers", 0, "--seconds", 0.1],
        "inspect": ["inspect", saved],
        "diff": ["diff", saved, packed / "state.json"],
        "verify": ["verify", saved / "checkpoints"],
        "verify of large numbers": ["verify", run / "checkpoints"],
        "plan": ["plan", "--checkpoint", saved, "--world-size", 2, "--batch-size", 4],
        "plan of rows": ["plan", "--checkpoint", run, "--data", wide, "--batch-size", 16, "--world-size", 1],
        "plan --schedule": ["plan", "--schedule", packed / "run.yaml", "--source", f"web={data}"],
        "report": ["report", saved, "-o", packed / "report.html"],
        "doctor": ["doctor"],
        "help": ["--help"],
        **{f"{one.__name__} --help": [one.__name__, "--help"] for panel in COMMANDS.values() for one in panel},
    }
    for name, text in told_in_a_pipe(python, commands, columns).items():
        lines = text.splitlines()
        wide_lines = [line for line in lines if len(line) > columns and (is_table(line) or " " in line.strip())]
        assert not wide_lines, (name, wide_lines)
        for line, following in pairwise(lines):
            if is_table(line) and is_table(following) and following[0] not in "┏┌":
                assert len(line) == len(following), (name, line, following)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_progress_of_the_demo_is_whole(columns: int) -> None:
    file = io.StringIO()
    with progress_of(Console(file=file, width=columns)) as progress:
        progress.add_task("3. resumed at step 1000 with 3 workers", total=1500, completed=1500)
    (line,) = file.getvalue().splitlines()
    assert len(line.rstrip()) <= columns and "…" not in line and re.search(r"workers ━+ 1500/1500 0:00:00", line)


def told_in_a_pipe(python: str, commands: dict[str, list[Any]], columns: int) -> dict[str, str]:
    """Run commands in a process of their own, whose output is a pipe."""
    # Calling the app would make all commands again for each line, 0.1 s.
    script = (
        "import sys, json\nfrom midepoch.cli.app import app\nfrom typer.main import get_command\ncommand = get_command(app)\n"
        "for name, line in json.loads(sys.argv[1]).items():\n    print('>>>', name, flush=True)\n"
        "    try: command(line)\n    except SystemExit as end: print('<<<', end.code)\n"
    )
    lines = {name: [str(part) for part in line] for name, line in commands.items()}
    done = subprocess.run(
        [python, "-c", script, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = dict(part.split("\n", 1) for part in done.stdout.split(">>> ")[1:])
    assert list(told) == list(commands)
    for name, text in told.items():
        assert "<<< 2" not in text, (name, text, done.stderr)
    return told


@pytest.mark.parametrize("columns", [40, 80])
def test_every_command_shows_all_in_a_pipe(columns: int, run: Path, python: str) -> None:
    data = next(run.glob("a folder*/rows.parquet"))
    state, checkpoints = f"{run / 'checkpoints'}", run / "checkpoints"
    told = told_in_a_pipe(
        python,
        {
            "audit": ["audit", run / "run"],
            "audit --step": ["audit", run / "run", "--step", 1],
            "audit --against": ["audit", run / "run", "--against", run / "run"],
            "info": ["info", data],
            "peek": ["peek", data],
            "inspect": ["inspect", state],
            "verify": ["verify", checkpoints],
            "plan": ["plan", "--checkpoint", checkpoints, "--data", data, "--batch-size", 4, "--world-size", 1],
            "doctor": ["doctor"],
        },
        columns,
    )
    for name, text in told.items():
        assert "…" not in text.replace(", …", ""), (name, text)
    assert unfolded(str(data)) in unfolded(told["info"]) and "a_column_with_a_long_name" in told["peek"]
    assert str(LARGE) in told["verify"] and "extra.of_many_letters" in unfolded(told["verify"])


def unfolded(text: str) -> str:
    """Return the cells of tables column after column, without the lines and spaces at which they are folded."""
    rows = [line.strip("│").split("│") for line in text.splitlines()]
    most = max(map(len, rows))
    return "\n".join(re.sub(r"\s", "", "".join(row[at] for row in rows if at < len(row))) for at in range(most))


def test_columns_count_when_something_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the module is imported: its console is made then."""
    for terminal in ("dumb", "xterm"):
        monkeypatch.setenv("TERM", terminal)
        for columns in ("60", "120"):
            monkeypatch.setenv("COLUMNS", columns)
            console = common._Console()
            monkeypatch.setenv("COLUMNS", "100")
            assert console.width == common.console.width == 100
