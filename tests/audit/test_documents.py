"""The documents of each step in the ledger: what the batches said, after any crash, and without the data."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents_job import mixed, said
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import midepoch
from data import documents, write_arrow
from launch import Program
from midepoch.audit import Ledger, read_run
from midepoch.audit.documents import DocumentRecorder, RecordedDocuments, decoded, encoded
from midepoch.audit.journal import records_in
from midepoch.cli.app import app
from midepoch.errors import DataNotFoundError
from midepoch.transforms.provenance import DocumentTable

JOB = Path(__file__).with_name("documents_job.py")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    tables = {"a": documents(150), "b": documents(90)}
    return [str(write_arrow(tmp_path / f"{name}.arrow", table, 17)) for name, table in tables.items()]


def listed(run: Any, step: int) -> list[list[Any]]:
    found = run.documents_of_step(step)
    assert all(one.name == ("web", "code")[one.source] and one.step == step for one in found)
    return [[one.sequence, one.source, one.row, one.start, one.stop, one.offset] for one in found]


def test_the_ledger_names_the_documents_of_every_step_after_kills(
    files: list[str], tmp_path: Path, program: Program
) -> None:
    """The step after the saved state is lost in each crash, and delivered again after the resume."""
    for attempt, steps in enumerate((4, 6, 5)):
        assert program(1, JOB, str(tmp_path), str(attempt), str(steps), *files) == -signal.SIGKILL
    seen = json.loads((tmp_path / "last.json").read_text())
    for path in files:
        Path(path).unlink()  # the ledger alone is enough
    run = read_run(tmp_path / "run")
    assert run.steps == len(seen) == 3 + 5 + 5
    for step, expected in enumerate(seen, 1):
        assert listed(run, step) == expected
    rows = {(source, row) for step in seen for _, source, row, *_ in step}
    for source, row in sorted(rows)[::7]:
        deliveries = [
            (number, *piece) for number, step in enumerate(seen, 1) for piece in step if piece[1:3] == [source, row]
        ]
        found = run.documents_of_row(row, ("web", "code")[source])
        assert found is not None
        assert found == run.documents_of_row(row, source)
        assert [(d.step, d.sequence, d.source, d.row, d.start, d.stop, d.offset) for d in found] == deliveries
        assert all(str(tmp_path) in one.place for one in found)


def test_the_command_prints_documents_and_their_tokens(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    batches = list(mixed(*files).loader(3, provenance=True, audit=tmp_path / "run"))

    def call(*arguments: Any) -> Any:
        return CliRunner().invoke(app, ["audit", str(tmp_path / "run"), *map(str, arguments)])

    found = json.loads(call("--step", 2, "--json").stdout)
    keys = ("sequence", "source", "row", "start", "stop", "offset")
    assert [[one[key] for key in keys] for one in found] == said(batches[1])
    shown = call("--step", 2).output
    first = found[0]
    assert f"{first['start']} to {first['stop']}" in shown
    assert first["name"] in shown
    name, row = first["name"], first["row"]
    assert any(one["step"] == 2 for one in json.loads(call("--row", f"{name}:{row}", "--json").stdout))
    for arguments in ([f"{name}:{row}"], [row, "--source", first["source"]]):
        lines = call("--row", *arguments).output.splitlines()
        assert lines[0] == f"row {name}:{row}" and any(re.match(r"│ +2 │", line) for line in lines)
    assert json.loads(call("--row", row, "--source", first["source"], "--json").stdout)
    assert "there is no source 'books'" in call("--row", "books:1").output
    assert "there is no row 9999: source web has" in call("--row", "web:9999").output
    assert "takes the number of a row" in call("--row", "web:x").output


def test_without_provenance_the_ledger_has_no_documents(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    list(mixed(*files).loader(3, audit=tmp_path / "run"))
    assert not list((tmp_path / "run").glob("*.documents"))
    run = read_run(tmp_path / "run")
    assert run.documents_of_step(2) is None
    assert run.documents_of_row(2) is None
    shown = CliRunner().invoke(app, ["audit", str(tmp_path / "run"), "--step", "2"]).output
    assert "provenance=True) records each document" in " ".join(shown.split())
    named = CliRunner().invoke(app, ["audit", str(tmp_path / "run"), "--row", "web:2"])
    assert "names of sources are recorded with provenance=True" in named.output


@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_are_not_packed(world: int, files: list[str], tmp_path: Path) -> None:
    """Padding is not a document of a step, and every rank records its own rows."""
    a, b = (midepoch.from_files(path).select_columns("id").shuffle(seed=1) for path in files)
    mix = midepoch.mix({"web": a, "code": b}, seed=3).with_lanes(1)
    loaders = [
        mix.loader(
            7,
            rank=rank,
            world_size=world,
            last_batch="pad",
            provenance=True,
            audit=Ledger(tmp_path / "run", attempt="1"),
        )
        for rank in range(world)
    ]
    seen = [list(loader) for loader in loaders]
    run = read_run(tmp_path / "run")
    for step in range(1, run.steps + 1):
        expected = [
            (rank, int(source), int(row))
            for rank, batches in enumerate(seen)
            for batch in [batches[step - 1]]
            for source, row, padding in zip(*batch["doc_ids"].values(), batch["is_padding"], strict=True)
            if not padding
        ]
        found = run.documents_of_step(step)
        assert found is not None
        assert [(one.rank, one.source, one.row) for one in found] == expected
        assert all(one.stop is None for one in found)


def test_documents_after_steps_that_are_excluded_in_the_middle_of_a_pass(files: list[str], tmp_path: Path) -> None:
    loader = mixed(*files).loader(3, provenance=True, audit=tmp_path / "run")
    batches = iter(loader)
    seen = [said(next(batches)) for _ in range(4)]
    loader.exclude(steps=range(6, 9))
    seen += [said(batch) for batch in batches]
    run = read_run(tmp_path / "run")
    assert run.steps == len(seen)
    assert [listed(run, step) for step in range(1, run.steps + 1)] == seen


def test_a_record_counts_only_if_it_is_complete(files: list[str], tmp_path: Path) -> None:
    list(islice(mixed(*files).loader(3, provenance=True, audit=tmp_path / "run"), 6))
    (path,) = (tmp_path / "run").glob("*.documents")
    content = path.read_bytes()
    for end in range(len(content) - 1, len(content) - 17, -5):
        path.write_bytes(content[:end])
        run = read_run(tmp_path / "run")
        assert listed(run, 5)
        with pytest.raises(DataNotFoundError, match="documents of step 6 on rank 0 are not recorded"):
            run.documents_of_step(6)
    path.write_bytes(content[:-7] + b"\xff\xff\xff" + content[-4:])
    with pytest.raises(DataNotFoundError, match="not recorded"):
        read_run(tmp_path / "run").documents_of_step(6)
    path.unlink()
    with pytest.raises(DataNotFoundError, match="not recorded"):
        read_run(tmp_path / "run").documents_of_step(1)


def test_damaged_documents_are_not_named(files: list[str], tmp_path: Path) -> None:
    """Records of documents are checked when they are read, so damage of one leaves the steps of others."""
    loader = mixed(*files).loader(3, provenance=True, audit=tmp_path / "run")
    seen = [said(batch) for batch in loader]
    (path,) = (tmp_path / "run").glob("*.documents")
    content = path.read_bytes()
    chunks = [
        range(record.place, record.place + 16 + len(record.content))
        for record in records_in(content)
        if record.kind == b"docs"
    ]
    assert len(chunks) > 1
    for place in (chunks[0][8], chunks[0][16 + 6], chunks[0][-1]):  # the checksum, a source, the last length
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        run = read_run(tmp_path / "run")
        with pytest.raises(DataNotFoundError, match="documents of step 1 on rank 0 are not recorded"):
            run.documents_of_step(1)
        assert listed(run, run.steps) == seen[-1]
        assert not [one for one in run.documents_of_row(seen[0][0][2], seen[0][0][1]) or [] if one.step == 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("how", ["no such call", "no such file system", "no mapping"])
def test_files_that_cannot_be_mapped_are_written_to(
    how: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    loader = mixed(*files).loader(4, provenance=True, audit=tmp_path / "run")
    with monkeypatch.context() as patch:
        if how == "no such call":
            patch.delattr(os, "posix_fallocate")
        else:
            patch.setattr(*((os, "posix_fallocate") if how == "no such file system" else (mmap, "mmap")), refuse)
        seen = [said(batch) for batch in islice(loader, 9)]
    assert loader._ledger is not None and isinstance(loader._ledger.counters, list)
    run = read_run(tmp_path / "run")
    assert run.steps == 9 and not run.problems
    assert [listed(run, step) for step in range(1, 10)] == seen


def test_a_full_disk_ends_the_records_of_a_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder, traced = DocumentRecorder(), DocumentTable.of_rows(np.arange(5), 0)
    (tmp_path / "y.documents").symlink_to("/dev/full")
    recorder.begin(tmp_path / "y.ledger", 1)
    recorder.write(0, traced)
    recorder.write(1, traced)
    assert caplog.text.count("the next steps of this pass are not recorded") == 1
    (tmp_path / "y.documents").unlink()
    recorder.begin(tmp_path / "y.ledger", 2)
    recorder.write(0, traced)
    records = RecordedDocuments(tmp_path / "y.ledger")
    assert records.of(1, 0) is None
    assert records.of(2, 0) is not None


@st.composite
def tables(draw: st.DrawFn) -> DocumentTable:
    counts = draw(st.lists(st.integers(1, 5), max_size=6))
    size = sum(counts)

    def column(least: int, most: int, dtype: type) -> Any:
        return np.array(draw(st.lists(st.integers(least, most), min_size=size, max_size=size)), dtype)

    edges = np.append(0, np.cumsum(np.array(counts, np.int64)))
    source, row = column(0, 2**15 - 1, np.int16), column(0, draw(st.sampled_from([2**20, 2**38, 2**50])), np.int64)
    columns = (source, row, column(0, 2**31 - 1, np.int32), column(-1, 2**31 - 2, np.int32))
    return DocumentTable.of_columns(edges, columns)


@given(tables())
@settings(max_examples=150)
def test_records_are_read_as_they_were_written(table: DocumentTable) -> None:
    found = decoded(encoded(table))
    assert found.bounds.tolist() == table.bounds.tolist()
    for column, expected in zip(found.columns, table.columns, strict=True):
        assert column.tolist() == expected.tolist()
        assert column.dtype == expected.dtype


def test_documents_in_the_ledger_take_14_bytes_and_steps_48_at_most(files: list[str], tmp_path: Path) -> None:
    batches = list(mixed(*files).loader(8, provenance=True, audit=tmp_path / "run"))
    (path,) = (tmp_path / "run").glob("*.documents")
    documents = sum(len(batch["doc_ids"]["row"]) for batch in batches)
    assert path.stat().st_size <= 14 * documents + 48 * len(batches)
