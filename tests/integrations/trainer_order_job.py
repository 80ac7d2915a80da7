"""Runs of Hugging Face's Trainer over datasets that are not shuffled: in which order they train, and what is logged.

python trainer_order_job.py FOLDER: rows of every step, rows of evaluation and messages of each case, in FOLDER/order.json
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

import midepoch
from midepoch.integrations.transformers import ResumableTrainer

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "logging_strategy": "no",
    "log_level": "error",
    "save_strategy": "no",
    "max_steps": 9,
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.rows: dict[bool, list[list[int]]] = {True: [], False: []}

    def forward(self, id: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.rows[self.training].append(id.tolist())
        return {"loss": (self.layer(x) ** 2).mean(), "logits": id}


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not (message := record.getMessage()).startswith("rank "):  # how the rank was found
            self.texts.append([record.levelname, message])


def data_of(ds: midepoch.Dataset, kind: str) -> midepoch.Dataset:
    if kind == "stream":
        return ds.filter(lambda row: row["id"] >= 0)
    if kind == "half shuffled":
        return midepoch.mix([ds.shuffle(seed=1), ds])
    if kind == "begun":
        rows = iter(ds)
        for _ in range(5):
            next(rows)
        begun = ds.skip(0)
        begun.load_state_dict(ds.state_dict())
        return begun
    return ds


def run(folder: Path, case: str, *, checkpoint: str | None = None, kind: str = "rows", **options: Any) -> Any:
    ds = midepoch.from_files(folder / "data.parquet")
    data = data_of(ds, kind)
    args = TrainingArguments(str(folder / case), **{**COMMON, **options})
    messages, model = Messages(), Model()
    log = logging.getLogger("midepoch")
    log.setLevel(logging.INFO)
    log.addHandler(messages)
    try:
        trainer = ResumableTrainer(model, args, train_dataset=data, eval_dataset=ds)
        trainer.can_return_loss = True
        if checkpoint is None:
            trainer.get_train_dataloader()  # made again by train: the message comes once
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.evaluate()
    except ValueError as problem:
        return {"refused": str(problem)}
    finally:
        log.removeHandler(messages)
    return {"rows": model.rows[True], "evaluated": model.rows[False], "messages": messages.texts}


def main(folder: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 1}
    sequential = {"train_sampling_strategy": "sequential"}
    result = {
        "data_seed": run(folder, "data_seed", data_seed=7, **saved),
        "seed": run(folder, "seed", seed=11),
        "sequential": run(folder, "sequential", **sequential, **saved),
        "stream": run(folder, "stream", kind="stream"),
        "half shuffled": run(folder, "half shuffled", kind="half shuffled"),
        "begun": run(folder, "begun", kind="begun", max_steps=3),
        "sequential stream": run(folder, "sequential stream", kind="stream", **sequential),
        "lengths": run(folder, "lengths", train_sampling_strategy="group_by_length"),
        "rebalance": run(folder, "rebalance", train_sampling_strategy="batch_rebalance"),
        "split": run(folder, "split", accelerator_config={"split_batches": True}),
        "dispatch": run(folder, "dispatch", accelerator_config={"dispatch_batches": True}),
    }
    for step in (3, 8):  # in the first epoch of 7 batches, and in the second
        at = f"checkpoint-{step}"
        result[f"shuffled from {step}"] = run(folder, "again", checkpoint=str(folder / "data_seed" / at), data_seed=1)
        result[f"in order from {step}"] = run(folder, "again", checkpoint=str(folder / "sequential" / at))
    (folder / "order.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
