"""Runs of Hugging Face's Trainer: a whole one that saves at every step, and one resumed from each of its checkpoints.

python trainer_job.py FOLDER (alone | ranks): what each step saw, as JSON, in FOLDER/CASE-RANK.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainingArguments

import midepoch
from midepoch.errors import CheckpointNotFoundError
from midepoch.integrations.transformers import ResumableTrainer

ROWS, EARLY = 26, 5
ALONE: dict[str, dict[str, Any]] = {
    "epochs": {"num_train_epochs": 2},  # 7 batches in an epoch, the last of 2 rows
    "steps": {"max_steps": 10, "dataloader_num_workers": 2},
    "accumulated": {"num_train_epochs": 2, "gradient_accumulation_steps": 3},
    "options": {"num_train_epochs": 2},
    "stream": {"max_steps": 8, "gradient_accumulation_steps": 2},
}
RANKS: dict[str, dict[str, Any]] = {
    "ranks": {"num_train_epochs": 2},  # 4 global batches of 8 rows, the last of 2
    "ranks of a stream": {"max_steps": 5, "dataloader_drop_last": True},
}
ELSEWHERE: dict[str, dict[str, Any]] = {  # on one rank, from a checkpoint of two
    "same global batch": {"num_train_epochs": 2, "per_device_train_batch_size": 8},
    "accumulated instead": {"num_train_epochs": 2, "gradient_accumulation_steps": 2},
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, id: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(self.dropout(x)) ** 2).mean(), "logits": id}


class Watched(ResumableTrainer):
    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        self.seen[-1].append(inputs["id"].tolist())
        return super().training_step(model, inputs, *rest)


class Steps(TrainerCallback):
    trainer: Any = None

    def __init__(self, seen: list[Any], stands: list[Any]) -> None:
        self.seen, self.stands = seen, stands

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Saves where the batches of a step have been taken and not trained on, as on a signal."""
        if state.global_step == EARLY and args.save_strategy == "steps":
            next(iter(self.trainer.get_train_dataloader()))  # a look at a batch is nobody's business
            self.trainer._save_checkpoint(self.trainer.model, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stands.append([state.global_step, state.epoch])
        self.seen.append([])


def data(folder: Path, case: str) -> Any:
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=3)
    if "stream" in case:
        return ds.filter(lambda row: row["id"] % 5 > 0)
    return ds


def metrics(found: Any) -> dict[str, Any]:
    return {"rows": sorted(np.asarray(found.predictions).ravel().tolist())}


def run(folder: Path, case: str, options: dict[str, Any], checkpoint: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    always = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "use_cpu": True, "report_to": []}
    quiet = {"disable_tqdm": True, "logging_strategy": "no", "log_level": "error"}
    saving = "steps" if checkpoint is None else "no"
    args = TrainingArguments(str(folder / case), save_strategy=saving, save_steps=1, **{**always, **quiet, **options})
    seen: list[Any] = [[]]
    stands: list[Any] = []
    watching = Steps(seen, stands)
    trainer = watching.trainer = Watched(
        Model(),
        args,
        train_dataset=data(folder, case),
        eval_dataset=midepoch.from_files(folder / "data.parquet"),
        callbacks=[watching],
        loader_options=LOADER_OPTIONS.get(case),
        compute_metrics=metrics,
    )
    trainer.can_return_loss = True
    trainer.seen = seen
    trainer.train(resume_from_checkpoint=checkpoint)
    weights = torch.cat([part.detach().ravel() for part in trainer.model.parameters()]).tolist()
    result = {"rows": seen[:-1], "stands": stands, "left": seen[-1], "weights": weights}
    if checkpoint is None and case in ("epochs", "ranks"):
        result["evaluated"] = trainer.evaluate()["eval_rows"]
    return result


LOADER_OPTIONS: dict[str, Any] = {"options": {"last_batch": "drop"}, "known": {"max_tokens": 64, "length": [8] * ROWS}}


def refusals(folder: Path) -> dict[str, str]:
    """What is said where rows would be lost or repeated."""
    found, checkpoint = {}, folder / "epochs" / "checkpoint-2"
    for name, options in (
        ("ignored", {"ignore_data_skip": True}),
        ("larger steps", {"gradient_accumulation_steps": 2}),
        ("smaller steps", {"per_device_train_batch_size": 2}),
        ("no state", {}),
    ):
        if name == "no state":
            (checkpoint / "midepoch.json").unlink()
        try:
            run(folder, "epochs", {**ALONE["epochs"], **options}, checkpoint)
        except (ValueError, CheckpointNotFoundError) as problem:
            found[name] = str(problem)
    try:
        run(folder, "known", ALONE["epochs"])
    except ValueError as problem:
        found["epochs of tokens"] = str(problem)
    try:
        ResumableTrainer(Model(), train_dataset=data(folder, "epochs").loader(4))
    except TypeError as problem:
        found["a loader"] = str(problem)
    return found


def main(folder: Path, where: str) -> None:
    rank = os.environ.get("RANK", "0")
    for case, options in {"alone": ALONE, "ranks": RANKS}[where].items():
        result = {"whole": run(folder, case, options)}
        steps = len(result["whole"]["rows"])
        some = {1, steps // 2, EARLY, steps - 1}
        for step in range(1, steps, 2) if case == "epochs" else sorted(some & {*range(steps)}):
            result[str(step)] = run(folder, case, options, folder / case / f"checkpoint-{step}")
        (folder / f"{case}-{rank}.json").write_text(json.dumps(result))
    if where == "alone":
        for case, options in ELSEWHERE.items():
            result = {"3": run(folder, case, options, folder / "ranks" / "checkpoint-3")}
            (folder / f"{case}-{rank}.json").write_text(json.dumps(result))
        (folder / "refusals.json").write_text(json.dumps(refusals(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    if torch.distributed.is_initialized():  # or a rank that ends first may take the other with it
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
