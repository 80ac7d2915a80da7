from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.audit import Ledger
from midepoch.checkpoint import PipelineCheckpoint

FILES, ROWS = 4, 250


@pytest.fixture
def files(tmp_path: Path) -> str:
    """1,000 rows in 4 files of 10 blocks; the label is constant in each file."""
    for i in range(FILES):
        table = pa.table({"id": np.arange(i * ROWS, (i + 1) * ROWS), "label": np.full(ROWS, i)})
        pq.write_table(table, tmp_path / f"p{i}.parquet", row_group_size=25)
    return str(tmp_path / "*.parquet")


@pytest.fixture
def run_folder(files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """2 ranks, then 3 from behind step 20 of 30, to the end of the epoch and 4 steps into the next; one checkpoint."""
    monkeypatch.setattr("midepoch.audit.ledger._MARK_SECONDS", 0.0)
    folder, state = tmp_path / "run", None
    ds = midepoch.from_files(files).shuffle(seed=1)
    for world, steps in ((2, 30), (3, 24)):
        loaders = [
            ds.loader(10, rank=rank, world_size=world, audit=Ledger(folder, attempt=str(world)), ends="drop")
            for rank in range(world)
        ]
        for rank, loader in enumerate(loaders):
            if state is not None:
                loader.load_state_dict(state)
            for step in range(1, steps + 1):
                while next(loader, None) is None:
                    pass
                if world == 2 and rank == 0 and step == 20:
                    kept = loader.state_dict()
        state = kept
    PipelineCheckpoint(folder / "checkpoints").save(loaders[0], step=20)
    return folder
