"""What a loader measures of itself."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.loader.meter import Meter, remedy, weight
from midepoch.stats import Stats, to_tensorboard

ROWS = 1000


@pytest.fixture
def files(tmp_path: Path) -> str:
    table = pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS, dtype=np.float32)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    return str(tmp_path / "a.parquet")


def nothing(row: dict[str, Any]) -> dict[str, Any]:
    return {"y": row["id"]}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["rows", "maps", "stream"])
def test_counts_every_row(files: str, workers: int, kind: str) -> None:
    ds: Any = midepoch.from_files(files).shuffle(seed=1, scope="rows")
    ds = {"rows": ds, "maps": ds.map(nothing), "stream": ds.filter(lambda row: row["id"] % 2 == 0)}[kind]
    rows, columns = (ROWS // 2, 2) if kind == "stream" else (ROWS, 3 if kind == "maps" else 2)
    with ds.loader(30, num_workers=workers) as loader:
        for _ in range(2):
            batches = list(loader)
        stats = loader.stats()
        assert (stats.batches, stats.rows, stats.passes) == (2 * len(batches), 2 * rows, 2)
        assert stats.bytes == 2 * rows * (8 * columns - 4)
        assert stats.seconds > 0 and 0 < stats.waited <= stats.seconds and stats.first_batch > 0
        assert stats.stages["read"] > 0 and (stats.stages["functions"] > 0) == (kind != "rows")
        assert 0 < stats.blocks_there <= stats.blocks
        assert loader.stats(reset=True) == stats and loader.stats().batches == 0
        next(iter(loader))
        assert loader.stats().batches == 1


def test_files_that_are_mapped_have_no_cache(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink:
        table = pa.table({"id": np.arange(ROWS)})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    loader = midepoch.from_files(str(tmp_path / "a.arrow")).shuffle(seed=1).loader(10)
    list(loader)
    assert loader.stats().cache_hits is None
    assert loader.stats().stages["read"] == loader.stats().waited


class Clock:
    """A loader and its consumer, as the meter sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.meter = 100.0, Meter(0)
        monkeypatch.setattr("midepoch.loader.meter.perf_counter", lambda: self.now)

    def batches(self, count: int, *, waits: float, works: float) -> None:
        for _ in range(count):
            asked, self.now = self.now, self.now + waits
            self.meter.delivered(asked, 10, None)
            self.now += works


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_tells_waiting_from_working(clock: Clock) -> None:
    clock.batches(1, waits=50.0, works=3.0)  # the first batch starts workers: that is no waiting
    clock.batches(10, waits=1.0, works=3.0)
    clock.now += 1000  # between two epochs
    clock.meter.begin()
    clock.batches(1, waits=5.0, works=3.0)
    clock.batches(10, waits=1.0, works=3.0)
    stats = clock.meter.stats()
    assert (stats.seconds, stats.waited, stats.first_batch) == (80.0, 20.0, 5.0)
    assert stats.waited_share == 0.25 and stats.rows_per_second == pytest.approx(200 / 80)


def test_a_model_that_waits_is_told_once(clock: Clock, caplog: Any) -> None:
    clock.meter.timings.functions = 1.0
    with caplog.at_level(logging.WARNING, "midepoch"):
        clock.batches(5, waits=1.0, works=2.0)
        assert not caplog.records  # too early to tell
        clock.batches(100, waits=1.0, works=2.0)
    (record,) = caplog.records
    assert "the model waits for data 33 % of the time (3 rows/s)" in record.getMessage()
    assert "running your functions: use num_workers=" in record.getMessage()


@pytest.mark.parametrize(("waits", "works"), [(0.1, 2.0), (1.0, 0.01)])
def test_nothing_is_said_without_waiting_or_without_a_model(
    clock: Clock, caplog: Any, waits: float, works: float
) -> None:
    with caplog.at_level(logging.WARNING, "midepoch"):
        clock.batches(100, waits=waits, works=works)
    assert not caplog.records


def test_remedies_name_what_takes_the_time() -> None:
    def told(workers: int, **stages: float) -> str:
        return remedy(Stats(stages={"read": 0.0, "functions": 0.0, "present": 0.0, **stages}), workers)

    assert "num_workers=" in told(0, read=1.0)
    assert "batched=True" in told(1000, functions=1.0)
    assert "collate_columns=True" in told(1000, present=1.0)
    assert "select_columns()" in told(1000, read=1.0)
    assert "cache_bytes" in remedy(Stats(stages={"read": 1.0}, blocks=10, blocks_there=2), 0)


def test_hooks(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.loader.meter._LOOK_SECONDS", 0.0)
    seen: list[tuple[int, int]] = []
    loader = midepoch.from_files(files).loader(100)
    loader.on_stats(lambda stats, batches: seen.append((stats.rows, batches)), every=0)
    list(loader)
    assert seen == [(100 * n, n) for n in range(1, 11)]
    loader.stats(reset=True)
    batches = iter(loader)
    next(batches)
    next(batches)
    assert seen[-1] == (100, 11)
    with pytest.raises(TypeError, match="expected a hook, a function"):
        loader.on_stats("tensorboard")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every"):
        loader.on_stats(print, every=-1)


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_what_a_hook_raises_loses_no_batch(files: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.loader.meter._LOOK_SECONDS", 0.0)

    def hook(stats: Stats, batches: int) -> None:
        if batches == 3:
            raise ConnectionError("no answer")

    ds: Any = midepoch.from_files(files)
    ds = ds.filter(lambda row: row["id"] >= 0) if kind == "stream" else ds
    loader = ds.loader(100)
    loader.on_stats(hook, every=0)
    seen = []
    with pytest.raises(ConnectionError):
        for batch in loader:
            seen += batch["id"].tolist()
    resumed = ds.loader(100)
    resumed.load_state_dict(loader.state_dict())
    assert seen + [row for batch in resumed for row in batch["id"].tolist()] == list(range(ROWS))


def test_tensorboard(files: str, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loader = midepoch.from_files(files).loader(100)
    list(loader)
    with tensorboard.SummaryWriter(tmp_path / "logs") as writer:
        to_tensorboard(writer)(loader.stats(), 10)
    found = accumulator.EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    (event,) = found.Scalars("data/rows_per_second")
    assert event.step == 10 and event.value == pytest.approx(loader.stats().rows_per_second, rel=1e-5)
    assert "data/cache_hits" in found.Tags()["scalars"]


WANDB = """
import json, sys
import wandb
import midepoch
from midepoch.stats import to_wandb

loader = midepoch.from_files(sys.argv[1]).loader(100)
list(loader)
run = wandb.init(mode="offline", dir=sys.argv[2], project="tests")
hook = to_wandb(run, "train/")
for step in range(3):
    hook(loader.stats(), 10 * step)
    run.log({"loss": step})
print("summary", json.dumps({"step": run.step, **{name: run.summary[name] for name in ("loss", "train/batches", "train/waited_share")}}))
run.finish()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_shows_them_beside_the_loss(files: str, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    command = [sys.executable, "-W", "ignore", "-c", WANDB, files, str(tmp_path / "wandb")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("summary")]
    summary = json.loads(line.removeprefix("summary"))
    assert summary["step"] == 3 and summary["loss"] == 2  # the hook moves no step of W&B's
    assert summary["train/batches"] == 20 and 0 < summary["train/waited_share"] <= 1


def test_weights_of_batches() -> None:
    assert weight({"a": np.zeros(3, dtype=np.int32), "b": ["ab", "cd"], "c": [1.0, 2]}) == 12 + 4 + 16
    assert weight([{"a": "x" * 10}] * 64) == 640
    assert weight(None) == weight([]) == 0


def test_rates_leave_out_the_first_batch() -> None:
    meter = Meter(0)
    assert meter.stats().rows_per_second == 0.0 and meter.stats().waited_share == 0.0
    assert Stats(batches=3, rows=30, seconds=2.0, passes=1).rows_per_second == 10.0


def test_progress_hands_over_every_batch(files: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = midepoch.from_files(files).loader(100)
    assert len(list(loader.progress())) == 10
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("midepoch._internal.progress.watched", lambda: True)
    monkeypatch.setattr("midepoch._internal.progress._EVERY", 0.0)
    seen = []
    for batch in loader.progress(done=0):
        seen += batch["id"].tolist()
        assert loader.position == len(seen)  # the state follows what was handed over
        if len(seen) == 500:
            break
    shown = capsys.readouterr().err.replace("\n", "\r").split("\r")
    assert "epoch 1 █████████░░░░░░░░░░░░░░░ 4/10 batches" in shown[-2]  # the fifth one is still in the loop
    assert "rows/s" in shown[-2]
    stream = midepoch.from_files(files).filter(lambda row: row["id"] < 100).loader(10)
    assert len(list(stream.progress())) == 10
    assert "epoch 0" in capsys.readouterr().err


def test_notebooks_show_where_they_are(files: str) -> None:
    loader = midepoch.from_files(files).loader(100)
    next(loader)
    text = loader._repr_html_()
    assert "position 100 of 1,000" in text and "width:10.00%" in text and "1 batches, 100 rows" in text
    stream = midepoch.from_files(files).filter(lambda row: row["id"] < 100).loader(10)
    next(stream)
    assert "filter" in stream._repr_html_()


def test_a_terminal_that_goes_away_ends_nothing(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class SourceRemoved:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("midepoch._internal.progress._EVERY", 0.0)
    for stderr in (SourceRemoved(), None, object()):
        monkeypatch.setattr(sys, "stderr", stderr)
        loader = midepoch.from_files(files).loader(100)
        assert sum(len(batch["id"]) for batch in loader.progress()) == ROWS
