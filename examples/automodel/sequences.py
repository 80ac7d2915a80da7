"""The dataset of recipe.yaml. Labels are the next tokens, as Automodel's loss takes them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import midepoch


def make_data(path: Path) -> None:
    """Write 101 sequences of 16 tokens. Automodel calls it first on one rank of each machine."""
    tokens = np.stack([np.arange(row, row + 17) % 128 for row in range(101)])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"input_ids": list(tokens[:, :-1]), "labels": list(tokens[:, 1:])}), path)


def from_parquet(path: str) -> midepoch.Dataset:
    if not Path(path).exists():
        make_data(Path(path))
    return midepoch.from_files(path).shuffle(seed=42).with_lanes(8)
