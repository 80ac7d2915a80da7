"""Pipelines that change the number of rows: filters, packings, mixes. What a rank of one does, and what must hold.

Ranks are connected by torch.distributed, as ranks that run lanes of their own agree on their steps through it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from chaos.trial import EPOCHS, Logs, Start
from midepoch.audit import Run, read_run

Output = tuple[int, ...]


def kept(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3)


def split(rows: dict[str, Any]) -> dict[str, Any]:
    """Every row of an odd number comes as two, which differ in their sign."""
    return {"id": [sign * number for number in rows["id"] for sign in ((1, -1) if number % 2 else (1,))]}


def first_token(row: dict[str, Any]) -> dict[str, Any]:
    return {"first": row["id"] * 10}


KINDS = ("filter", "batched", "concat", "best_fit", "mix", "packed mix")


@dataclass(frozen=True)
class StreamPipeline:
    """Which data, in which order, through which stages."""

    files: tuple[int, ...]
    block: int
    kind: str
    parquet: bool
    shuffled: bool
    seed: int
    lanes: int | None
    length: int

    @staticmethod
    def draw(random_: random.Random) -> StreamPipeline:
        return StreamPipeline(
            files=tuple(random_.randint(80, 250) for _ in range(random_.randint(2, 4))),
            block=random_.randint(3, 40),
            kind=random_.choice(KINDS),
            parquet=random_.random() < 0.3,
            shuffled=random_.random() < 0.7,
            seed=random_.randrange(1000),
            lanes=random_.choice([None, 1, 2, 6, 12]),
            length=random_.randint(4, 16),
        )

    @property
    def about(self) -> str:
        return f"stream ({self.kind}, {self.lanes} lanes)"

    def write(self, folder: Path) -> None:
        """Rows are told apart by their ids, and tokens by theirs, over all files."""
        first = 1
        for number, rows in enumerate(self.files):
            (folder / str(number)).mkdir(parents=True)
            ids = np.arange(first, first + rows)
            tokens = [[10 * i + k for k in range(1 + i % 7)] for i in ids.tolist()]
            table = pa.table({"id": ids, "input_ids": pa.array(tokens, pa.list_(pa.int64()))})
            first += rows
            if self.parquet:
                pq.write_table(table, folder / str(number) / "rows.parquet", row_group_size=self.block)
                continue
            path = str(folder / str(number) / "rows.arrow")
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=self.block)

    def open(self, folder: Path) -> Any:
        parts = [self._source(folder / str(number)) for number in range(len(self.files))]
        if "mix" in self.kind:
            ds: Any = midepoch.mix(parts, weights=range(1, len(parts) + 1), seed=self.seed)
        else:
            ds = self._source(folder)
        if self.kind == "filter":
            ds = ds.filter(kept).map(first_token)
        elif self.kind == "batched":
            ds = ds.select_columns("id").map(split, batched=True, batch_size=7, one_to_one=False)
        elif self.kind in ("concat", "best_fit", "packed mix"):
            strategy = "best_fit" if self.kind == "best_fit" else "concat"
            ds = ds.filter(kept).pack(self.length, strategy=strategy, window=16)
        if self.lanes is not None:
            ds = ds.with_lanes(self.lanes)
        return ds.with_format("numpy")

    def _source(self, folder: Path) -> Any:
        cache = folder.parent if folder.name == "data" else folder.parent.parent
        ds = midepoch.from_files(folder, index_dir=cache / "index", cache_dir=cache / "blocks")
        return ds.shuffle(self.seed) if self.shuffled else ds

    def loader(self, start: Start, rank: int, folder: Path) -> Any:
        import torch.distributed as dist

        store = f"file://{folder / f'store-{start.number:04}'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=start.world)
        return self.open(folder / "data").loader(start.batch, start.workers, last_batch="pad", audit=folder / "ledger")

    def outputs(self, batch: Any) -> list[Output]:
        """What tells the outputs of a batch apart: ids, or the tokens of a sequence."""
        real = ~batch["is_padding"] if "is_padding" in batch else np.ones(len(next(iter(batch.values()))), bool)
        if "segment_ids" not in batch:
            return [(int(number),) for number in batch["id"][real]]
        pairs = zip(batch["input_ids"][real], batch["segment_ids"][real], strict=True)
        return [tuple(int(token) for token in tokens[segments > 0]) for tokens, segments in pairs]

    def prove(self, logs: Logs, folder: Path) -> tuple[int, int]:
        """Every lane of every epoch delivered its outputs in order, none lost and none twice.

        Returns how many outputs there were, and how many more came again after a crash.
        """
        history, made, lanes = logs.history, logs.made, logs.lanes
        kept_outputs = 0
        for epoch in range(EPOCHS):
            places = self._places(folder, lanes, epoch)
            next_of: dict[int, int] = defaultdict(int)
            for step in sorted(history):
                found: dict[int, list[int]] = defaultdict(list)
                for of_epoch, outputs in history[step][1].values():
                    for output in outputs if of_epoch == epoch else ():
                        lane, number = places[tuple(output)]
                        found[lane].append(number)
                for lane, numbers in found.items():
                    expected = list(range(next_of[lane], next_of[lane] + len(numbers)))
                    assert sorted(numbers) == expected, f"step {step}, lane {lane}: {sorted(numbers)}, not {expected}"
                    next_of[lane] += len(numbers)
            assert sum(next_of.values()) == len(places), f"epoch {epoch}: {len(places) - sum(next_of.values())} lost"
            kept_outputs += len(places)
        self._check_ledger(read_run(folder), history)
        return kept_outputs, made - kept_outputs

    def _check_ledger(self, run: Run, history: dict[int, Any]) -> None:
        """The ledger alone proves the same, and names the rows of a step."""
        assert run.exact and all(epoch.complete for epoch in run.epochs), (run.problems, run.epochs)
        assert run.steps == len(history), (run.steps, len(history))
        rows = sum(self.files)
        assert all(epoch.once + epoch.dropped == rows for epoch in run.epochs), run.epochs
        if "mix" not in self.kind:
            assert all(epoch.once == rows for epoch in run.epochs), run.epochs
        if self.kind == "filter":
            filtered = rows // 3
            assert all(epoch.filtered == filtered for epoch in run.epochs), (filtered, run.epochs)
        for step in sorted(history)[:: max(1, len(history) // 4)]:
            named = {one.row + 1 for one in run.rows_of_step(step)}
            for _, outputs in history[step][1].values():
                if self.kind == "filter":
                    assert {output[0] for output in outputs} <= named, f"step {step}"
                elif self.kind in ("concat", "best_fit"):
                    assert {token // 10 for output in outputs for token in output} <= named, f"step {step}"

    def _places(self, folder: Path, lanes: int, epoch: int) -> dict[Output, tuple[int, int]]:
        """The lane of every output, and its number there, by an uninterrupted run of each lane by itself."""
        found: dict[Output, tuple[int, int]] = {}
        for lane in range(lanes):
            loader = (
                self.open(folder / "data").with_lanes(lanes).loader(5, rank=lane, world_size=lanes, last_batch="uneven")
            )
            loader.set_epoch(epoch)
            outputs = [output for batch in loader for output in self.outputs(batch)]
            found |= {output: (lane, number) for number, output in enumerate(outputs)}
        self._check_by_arithmetic(set(found))
        return found

    def _check_by_arithmetic(self, outputs: set[Output]) -> None:
        """Where it follows from the data alone, the outputs must be just those."""
        ids = np.arange(1, sum(self.files) + 1).tolist()
        if self.kind == "filter":
            assert outputs == {(i,) for i in ids if i % 3}
        elif self.kind == "batched":
            assert outputs == {(sign * i,) for i in ids for sign in ((1, -1) if i % 2 else (1,))}
        elif self.kind in ("concat", "best_fit"):
            tokens = [token for output in outputs for token in output]
            assert sorted(tokens) == [10 * i + k for i in ids if i % 3 for k in range(1 + i % 7)]
