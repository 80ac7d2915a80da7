"""Tables of the command line: nothing in them is cut, in a pipe or on a narrow terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.table import Table

import midepoch
from midepoch.audit import read_runs
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.cli import common, runs

LARGE = 1_234_567_890_123
STYLE: Any = {"soft_wrap": True, "highlight": False, "markup": False}  # as the console of the commands


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
    monkeypatch.setattr(common, "console", common._Console(file=file, width=width, force_terminal=terminal, **STYLE))
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
        assert f" {number:,} " in text
    assert "not exact" in text and "…" not in text


@pytest.mark.parametrize("width", [40, 80])
def test_texts_are_folded_on_a_terminal_and_whole_in_a_pipe(width: int) -> None:
    words, number = "one two three " * 20, f"{LARGE:,}"
    for terminal in (True, False):
        table = Table("text", "word", title="a title")
        table.add_column("number", justify="right")
        table.add_row(words, "#" * 200, number)
        file = io.StringIO()
        common._Console(file=file, width=width, force_terminal=terminal, **STYLE).print(table)
        text = without_colours(file.getvalue())
        assert number in text and text.count("#") == 200 and text.count("three") == 20 and "…" not in text
        lines = [len(line) for line in text.splitlines()]
        assert max(lines) <= max(width, 51) if terminal else words.strip() in text


@pytest.mark.parametrize("columns", ["40", "80"])
def test_every_command_shows_all_in_a_pipe(columns: str, run: Path) -> None:
    """In a process of its own: the width is found when it starts."""
    data = next(run.glob("a folder*/rows.parquet"))
    state, checkpoints = f"{run / 'checkpoints'}", run / "checkpoints"
    commands = {
        "audit": ["audit", run / "run"],
        "audit --step": ["audit", run / "run", "--step", 1],
        "audit --against": ["audit", run / "run", "--against", run / "run"],
        "info": ["info", data],
        "peek": ["peek", data],
        "inspect": ["inspect", state],
        "verify": ["verify", checkpoints],
        "plan": ["plan", "--checkpoint", checkpoints, "--data", data, "--batch-size", 4, "--world-size", 1],
        "doctor": ["doctor"],
    }
    script = "import sys, json\nfrom midepoch.cli.app import app\nfor name, line in json.loads(sys.argv[1]).items():\n"
    script += (
        "    print('>>>', name, flush=True)\n    try: app(line)\n    except SystemExit as end: print('<<<', end.code)\n"
    )
    lines = {name: [str(part) for part in line] for name, line in commands.items()}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(lines)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": columns},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = {part.split("\n", 1)[0]: part for part in done.stdout.split(">>> ")[1:]}
    assert list(told) == list(commands)
    for name, text in told.items():
        assert "<<< 2" not in text, (name, text, done.stderr)
        assert "…" not in text.replace(", …", ""), (name, text)
    assert str(data) in told["info"] and "a_column_with_a_long_name" in told["peek"]
    assert str(LARGE) in told["verify"] and "extra.of_many_letters" in told["verify"]
