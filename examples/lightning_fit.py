"""Lightning: every checkpoint holds the position in the data, and ``ckpt_path`` resumes there, in mid-epoch.

python examples/lightning_fit.py run --die-at 47      # or under torchrun, with --devices
python examples/lightning_fit.py run
"""

import argparse
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import midepoch
from midepoch.integrations.lightning import ResumableData

ROWS, BATCH, EPOCHS, EVERY = 500, 16, 2, 10


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        table = {"id": np.arange(ROWS), "image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}
        pq.write_table(pa.table(table), path)


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, folder: Path, die_at: int | None) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        self.folder, self.die_at = folder, die_at

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if self.global_step == self.die_at:
            signal.raise_signal(signal.SIGKILL)
        with open(self.folder / f"rows-{self.global_rank}.txt", "a") as seen:
            print(self.global_step + 1, *batch["id"].tolist(), file=seen)
        return torch.nn.functional.cross_entropy(self.layers(batch["image"]), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: Path, die_at: int | None, devices: int) -> None:
    make_data(folder / "data.parquet")
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    data = ResumableData(lambda: ds.loader(BATCH, num_workers=1, last_batch="drop"))  # made when the ranks are there
    saving = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=EVERY, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=EPOCHS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(folder, die_at), datamodule=data, ckpt_path="last")  # from the beginning if there is none


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    train(args.folder, args.die_at, args.devices)
