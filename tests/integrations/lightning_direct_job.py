"""Runs of Lightning's Trainer with a loader given directly, and with ResumableData: the warnings of each.

python lightning_direct_job.py FOLDER: warnings of midepoch for each case, in FOLDER/warnings.json
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import midepoch
from midepoch.integrations.lightning import ResumableData


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.validated: list[int] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return (self.layer(batch["id"].float()[:, None]) ** 2).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated += batch["id"].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(folder: Path, *, checkpoint: bool = False, **data: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, default_root_dir=str(folder), enable_checkpointing=False, **quiet
    )
    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(model, **data)
    if checkpoint:
        trainer.save_checkpoint(folder / "step=4.ckpt")
    texts = [str(one.message) for one in caught]
    return {"warnings": [text for text in texts if "midepoch" in text], "validated": model.validated}


def main(folder: Path) -> None:
    ds = midepoch.from_files(folder / "data.parquet")
    mixed = midepoch.mix({"web": ds, "code": ds.shuffle(seed=1)}, weights={"web": 0.7, "code": 0.3}, seed=1).take(8)
    result = {
        "direct": fit(folder, train_dataloaders=ds.loader(4), val_dataloaders=ds.loader(4)),
        "datamodule": fit(folder, datamodule=ResumableData(lambda: ds.loader(4), val=lambda: ds.loader(4))),
        "mix": fit(folder, datamodule=ResumableData(lambda: mixed.loader(4)), checkpoint=True),
    }
    for _ in ds.loader(4):  # not by Lightning, though it is imported
        pass
    (folder / "warnings.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
