"""Lightning with a DataModule of your own: train and validation data in place, and an exact resume on other ranks.

python examples/lightning_datamodule.py run --devices 4 --die-at 7
python examples/lightning_datamodule.py run --devices 2                   # resumes, with the same rows in every step
"""

import argparse
import os
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

ROWS, GLOBAL_BATCH, EPOCHS, EVERY = 60, 8, 2, 2


class Images(ResumableData):
    """The data of the run. Its position is part of every checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(self.make_train, self.make_val)
        self.path = folder / "data.parquet"

    def prepare_data(self) -> None:  # called on one rank
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
            table = {"id": np.arange(ROWS), "image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}
            pq.write_table(pa.table(table), self.path)

    def make_train(self) -> midepoch.Loader:  # called when the ranks are running
        train = midepoch.from_files(self.path).slice(None, "90%").shuffle(seed=42)
        return train.loader(GLOBAL_BATCH // self.trainer.world_size, last_batch="drop")

    def make_val(self) -> midepoch.Loader:
        return midepoch.from_files(self.path).slice("90%").loader(1, last_batch="pad")


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

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("loss", torch.nn.functional.cross_entropy(self.layers(batch["image"]), batch["label"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    args = parser.parse_args()
    saving = ModelCheckpoint(args.folder / "checkpoints", every_n_train_steps=EVERY, save_last=True)
    options = {"max_epochs": EPOCHS, "callbacks": [saving], "logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=args.devices, **options)
    trainer.fit(Model(args.folder, args.die_at), datamodule=Images(args.folder), ckpt_path="last")
