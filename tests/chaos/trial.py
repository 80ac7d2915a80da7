"""One pipeline and how it is run: drawn from a seed, the same every time. And a rank of it, as a process."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

EPOCHS = 2
WORLDS, WORKERS, BATCHES, INTERVALS = (1, 6), (0, 4), (1, 9), (1, 12)


def tripled(row: dict[str, Any]) -> dict[str, Any]:
    return {"tripled": row["id"] * 3}


def summed(rows: dict[str, Any]) -> dict[str, Any]:
    return {"first": [rows["id"][0]] * len(rows["id"])}


def noisy(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {"noise": generator.random()}


@dataclass(frozen=True)
class Pipeline:
    """Which data, in which order, through which maps."""

    files: tuple[int, ...]
    block: int
    kind: str
    scope: str | None
    seed: int
    window: int
    lanes: int | None
    cut: tuple[int, int | None]
    map: str

    @staticmethod
    def draw(random_: random.Random) -> Pipeline:
        files = tuple(random_.randint(1, 90) for _ in range(random_.randint(1, 6)))
        return Pipeline(
            files=(*files, 60),
            block=random_.randint(1, 40),
            kind=random_.choice(["arrow", "arrow", "parquet"]),
            scope=random_.choice([None, "rows", "rows", "window", "files"]),
            seed=random_.randrange(1000),
            window=random_.randint(1, 5),
            lanes=random_.choice([None, None, 1, 2, 6, 12]),
            cut=random_.choice([(0, None), (0, None), (7, None), (3, sum(files) + 20)]),
            map=random_.choice(["none", "none", "map", "batched", "generator"]),
        )

    @property
    def about(self) -> str:
        return f"dataset ({self.kind}, {self.scope})"

    def write(self, folder: Path) -> None:
        folder.mkdir()
        first = 0
        for number, rows in enumerate(self.files):
            table = pa.table({"id": np.arange(first, first + rows), "text": [f"row {i}" for i in range(rows)]})
            first += rows
            if self.kind == "parquet":
                pq.write_table(table, folder / f"{number:03}.parquet", row_group_size=self.block)
                continue
            path = str(folder / f"{number:03}.arrow")
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=self.block)

    def open(self, folder: Path) -> midepoch.Dataset:
        ds = midepoch.from_files(folder, index_dir=folder.parent / "index", cache_dir=folder.parent / "blocks")
        ds = ds.slice(*self.cut)
        if self.scope is not None:
            ds = ds.shuffle(self.seed, self.scope, self.window)
        if self.lanes is not None:
            ds = ds.with_lanes(self.lanes)
        if self.map == "map":
            ds = ds.map(tripled)
        elif self.map == "batched":
            ds = ds.map(summed, batched=True, batch_size=7)
        elif self.map == "generator":
            ds = ds.map(noisy, with_generator=True)
        return ds.with_format("numpy")

    def loader(self, start: Start, rank: int, folder: Path) -> Any:
        return self.open(folder / "data").loader(
            start.batch,
            start.workers,
            rank=rank,
            world_size=start.world,
            last_batch=start.last_batch,
            audit=folder / "ledger",
        )

    def outputs(self, batch: Any) -> list[int]:
        """The ids of the rows of a batch."""
        ids: list[int] = (batch["id"][~batch["is_padding"]] if "is_padding" in batch else batch["id"]).tolist()
        return ids


@dataclass(frozen=True)
class Start:
    """How a run is started: on how many ranks and workers, with which batches, saved how often."""

    number: int
    world: int
    workers: int
    batch: int
    interval: int
    last_batch: str
    mode: str

    @staticmethod
    def draw(number: int, random_: random.Random) -> Start:
        return Start(
            number,
            world=random_.randint(*WORLDS),
            workers=random_.choice([0, 0, random_.randint(*WORKERS)]),
            batch=random_.randint(*BATCHES),
            interval=random_.randint(*INTERVALS),
            last_batch=random_.choice(["pad", "pad", "drop"]),
            mode=random_.choice(["sync", "sync", "async"]),
        )


class Logs(NamedTuple):
    """What the ranks of all starts logged."""

    history: dict[int, tuple[Start, dict[int, tuple[int, list[Any]]]]]
    """By step, the start that made it last, and by rank the epoch and the outputs."""
    made: int
    """Outputs delivered, also those that were lost with a crash."""
    starts: int
    """Starts that got anywhere."""
    lanes: int
    """Of the order that all of them followed, since the last one that began from the beginning."""


def be_rank(pipeline: Any, start: Start, rank: int, folder: Path) -> None:
    """Train, saving now and then, until the epochs are over. What is delivered is logged, output by output."""
    os.environ["MIDEPOCH_RUN_ID"] = f"start {start.number}"
    log = os.open(folder / f"log-{start.number:04}-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    loader = pipeline.loader(start, rank, folder)
    checkpoint = PipelineCheckpoint(
        folder / "checkpoints",
        keep=2,
        rank=rank,
        world_size=start.world,
        async_save=start.mode == "async",
        timeout=60,
    )
    progress: dict[str, Any] = {"step": 0}
    step = checkpoint.restore_latest(loader, progress) or 0
    assert progress["step"] == step
    _write(log, {"from": step, "lanes": loader.state_dict()["lanes"]})
    pace = random.Random(start.number * 100 + rank)
    while loader.epoch < EPOCHS:
        for batch in loader:
            step += 1
            epoch = loader._run.cursor.epoch  # loader.epoch may be the old one until the first batch after a restore
            _write(log, {"step": step, "epoch": epoch, "outputs": pipeline.outputs(batch)})
            time.sleep(pace.random() * 0.002)
            if step % start.interval == 0:
                checkpoint.save(loader, {"step": step}, step=step)
    checkpoint.save(loader, {"step": step}, step=step)
    checkpoint.wait()
    _write(log, {"done": step})


def _write(log: int, entry: dict[str, Any]) -> None:
    os.write(log, json.dumps(entry).encode() + b"\n")
