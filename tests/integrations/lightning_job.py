"""Runs of Lightning's Trainer: a whole one that saves at every step, and one resumed from each of its checkpoints.

python lightning_job.py FOLDER (alone | ranks): what each step saw, as JSON, in FOLDER/CASE-RANK.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import midepoch
from midepoch.errors import CheckpointNotFoundError
from midepoch.integrations.lightning import ResumableData

warnings.simplefilter("ignore")
warnings.filterwarnings("error", message=".*not resumable.*")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

ALONE: dict[str, dict[str, Any]] = {
    "rows": {"max_epochs": 2},
    "workers": {"max_steps": 10},
    "accumulated": {"max_epochs": 2, "accumulate_grad_batches": 3},
    "limited": {"max_epochs": 4, "limit_train_batches": 3},
    "stream": {"max_epochs": 3},
    "limited stream": {"max_epochs": 4, "limit_train_batches": 3},
    "reloaded stream": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
}
SOME = ("rows", "workers", "limited", "stream")
RANKS: dict[str, dict[str, Any]] = {"ranks": {"max_epochs": 2}, "ranks of a stream": {"max_epochs": 3}}


def loader_of(folder: Path, case: str) -> Any:
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=3)
    if "stream" in case:
        return ds.filter(lambda row: row["id"] % 5 > 0).loader(4, last_batch="drop" if "ranks" in case else None)
    return ds.loader(4, num_workers=2 if case == "workers" else 0)


class Model(pl.LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.rows: list[Any] = []
        self.stands: list[Any] = []
        self.validated: list[int] = []
        self._fails_at = fails_at

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if len(self.rows) == self._fails_at:
            raise RuntimeError("as asked for")
        self.rows.append(batch["id"].tolist())
        self.stands.append([self.current_epoch, index])
        torch.manual_seed(int(batch["id"].sum()))  # Lightning saves no random generators
        return (self.layers(batch["x"]) ** 2).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated += batch["id"].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Saves(pl.Callback):
    """Saves behind every batch and every epoch, and where a step fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self._folder / f"{len(model.rows)}.ckpt")

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        trainer.save_checkpoint(self._folder / f"{len(model.rows)}-epoch.ckpt")

    def on_exception(self, trainer: Any, model: Any, _: BaseException) -> None:
        trainer.save_checkpoint(self._folder / f"{len(model.rows)}-failed.ckpt")


def run(
    folder: Path,
    case: str,
    options: dict[str, Any],
    checkpoint: Path | None = None,
    fails_at: int | None = None,
    **stopping: int,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model(fails_at)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    where = {"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", "1")), "default_root_dir": str(folder)}
    callbacks = [Saves(folder / case)] if checkpoint is None and "max_steps" not in stopping else []
    trainer = pl.Trainer(callbacks=callbacks, **{**quiet, **where, **options, **stopping})
    validation = midepoch.from_files(folder / "data.parquet")
    data = ResumableData(lambda: loader_of(folder, case), (lambda: validation.loader(4)) if case == "rows" else None)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    except RuntimeError as problem:
        if str(problem) != "as asked for":
            raise
    else:
        if checkpoint is None:  # with what was looked ahead thrown away
            trainer.save_checkpoint(folder / case / f"{len(model.rows)}-after.ckpt")
    weights = torch.cat([part.detach().ravel() for part in model.parameters()]).tolist()
    return {"rows": model.rows, "stands": model.stands, "weights": weights, "validated": model.validated}


def without_state(folder: Path) -> str:
    """What is said of a checkpoint that was written without the DataModule."""
    saved = torch.load(folder / "rows" / "2.ckpt", weights_only=False)
    del saved["ResumableData"]
    torch.save(saved, folder / "bare.ckpt")
    try:
        run(folder, "rows", ALONE["rows"], folder / "bare.ckpt")
    except CheckpointNotFoundError as problem:
        return str(problem)
    return "nothing"


def larger_steps(folder: Path) -> str:
    """What is said of a checkpoint whose steps were smaller."""
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=3)
    try:
        fit(ResumableData(lambda: ds.loader(8)), 20, ckpt_path=folder / "rows" / "2.ckpt", weights_only=False)
    except ValueError as problem:
        return str(problem)
    return "nothing"


def second_trainer(folder: Path) -> list[Any]:
    """Another Trainer with the same data begins anew."""
    data = ResumableData(lambda: loader_of(folder, "rows"))
    return [fit(data, steps) for steps in (5, 2, 9)]


def fit(data: ResumableData, steps: int, **how: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    model = Model()
    pl.Trainer(accelerator="cpu", max_steps=steps, enable_model_summary=False, **quiet).fit(
        model, datamodule=data, **how
    )
    return model.rows


def main(folder: Path, where: str) -> None:
    rank = os.environ.get("RANK", "0")
    some = {case: ALONE[case] for case in SOME}
    for case, options in {"all": ALONE, "alone": some, "ranks": RANKS}[where].items():
        result = {"whole": run(folder, case, options)}
        if where != "ranks":
            run(folder, case, options, fails_at=4)
            run(folder, case, options, max_steps=2)
        for checkpoint in sorted(folder.glob(f"{case}/*.ckpt")):
            result[checkpoint.stem] = run(folder, case, options, checkpoint)
        (folder / f"{case}-{rank}.json").write_text(json.dumps(result))
    if where != "ranks":
        (folder / "refusals.json").write_text(
            json.dumps(
                {
                    "no state": without_state(folder),
                    "larger steps": larger_steps(folder),
                    "second trainer": second_trainer(folder),
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    if torch.distributed.is_initialized():  # or a rank that ends first may take the other with it
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
