"""Runs of Hugging Face's Trainer: a whole one that saves at every step, and one resumed from each of its checkpoints.

python trainer_job.py FOLDER CASE: what each step saw, as JSON, in FOLDER/CASE-RANK.json
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import TrainerCallback, TrainingArguments

import midepoch
from midepoch.integrations.transformers import ResumableTrainer

ROWS = 50
CASES: dict[str, dict[str, Any]] = {
    "epochs": {"num_train_epochs": 2},  # 13 batches in an epoch, the last of 2 rows
    "steps": {"max_steps": 16, "dataloader_num_workers": 2},
    "accumulated": {"num_train_epochs": 2, "gradient_accumulation_steps": 3},
    "stream": {"max_steps": 12, "gradient_accumulation_steps": 2},
    "loader": {"num_train_epochs": 2, "dataloader_drop_last": True},
    "ranks": {"num_train_epochs": 2},
    "ranks of a stream": {"max_steps": 6},
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
    def __init__(self, seen: list[Any], stands: list[Any]) -> None:
        self.seen, self.stands = seen, stands

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stands.append([state.global_step, state.epoch])
        self.seen.append([])


def data(folder: Path, case: str) -> Any:
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=3)
    if "stream" in case:
        return ds.filter(lambda row: row["id"] % 5 > 0)
    return ds.loader(6, drop_last=True) if case == "loader" else ds


def run(folder: Path, case: str, name: str, checkpoint: Path | None = None, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    out = folder / f"{case}-{name}"
    args = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="steps" if name == "whole" else "no",
        save_steps=1,
        **{**CASES[case], **more},
    )
    seen: list[Any] = [[]]
    stands: list[Any] = []
    held = midepoch.from_files(folder / "data.parquet")
    callbacks = [Steps(seen, stands)]
    trainer = Watched(
        Model(),
        args,
        train_dataset=data(folder, case),
        eval_dataset=held,
        callbacks=callbacks,
        compute_metrics=lambda found: {
            "rows": sorted(np.asarray(found.predictions).ravel().tolist()) == [*range(ROWS)]
        },
    )
    trainer.label_names, trainer.can_return_loss = [], True
    trainer.seen = seen
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    weights = [round(float(value), 6) for value in torch.cat([p.detach().ravel() for p in trainer.model.parameters()])]
    result = {"rows": seen[:-1], "stands": stands, "left": seen[-1], "weights": weights}
    if name == "whole" and case in ("epochs", "ranks"):
        result["evaluated"] = trainer.evaluate()["eval_loss"] > 0
    return result


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
    for case in sys.argv[2].split(","):
        whole = run(folder, case, "whole")
        result: dict[str, Any] = {"whole": whole}
        steps = len(whole["rows"])
        for step in range(1, steps) if rank == 0 and "RANK" not in os.environ else range(1, steps, max(1, steps // 3)):
            checkpoint = folder / f"{case}-whole" / f"checkpoint-{step}"
            result[str(step)] = run(folder, case, "resumed", checkpoint)
        (folder / f"{case}-{rank}.json").write_text(json.dumps(result))
        if "RANK" not in os.environ:
            shutil.rmtree(folder / f"{case}-whole")


if __name__ == "__main__":
    if not Path(sys.argv[1], "data.parquet").exists():
        table = {
            "id": np.arange(ROWS),
            "x": list(np.random.default_rng(0).standard_normal((ROWS, 4), dtype=np.float32)),
        }
        pq.write_table(pa.table(table), Path(sys.argv[1], "data.parquet"))
    main()
