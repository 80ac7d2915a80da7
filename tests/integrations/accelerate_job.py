"""Runs under Accelerate: a whole one that saves at every step, and one resumed from each of its checkpoints.

python accelerate_job.py FOLDER (alone | ranks): what each step saw, as JSON, in FOLDER/CASE-RANK.json
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState

import midepoch
from midepoch.errors import CheckpointMismatchError, CheckpointNotFoundError
from midepoch.integrations.accelerate import prepare

STEPS = 10


def loader_of(folder: Path, case: str, seed: int = 3) -> Any:
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=seed)
    if "stream" in case:
        kept = ds.filter(lambda row: row["id"] % 5 > 0)
        return kept.loader(2, last_batch="drop") if "ranks" in case else kept.loader(4)
    return ds.loader(4, num_workers=2 if case == "workers" else 0)


def fresh(folder: Path, case: str) -> tuple[Any, Any, Any, Any]:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return accelerator, model, optimizer, prepare(accelerator, loader_of(folder, case))


def run(folder: Path, case: str, checkpoint: Path | None = None) -> dict[str, Any]:
    accelerator, model, optimizer, loader = fresh(folder, case)
    step = 0
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        step = int(checkpoint.name)
    rows: list[Any] = []
    stands: list[Any] = []
    while step < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(batch["x"]) ** 2).mean())
                optimizer.step()
                optimizer.zero_grad()
            rows.append(batch["id"].tolist())
            stands.append([accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader])
            step += 1
            # Gradients that wait for the next batch are in no checkpoint of Accelerate's.
            if checkpoint is None and accelerator.sync_gradients:
                accelerator.save_state(str(folder / case / str(step)))
            if step == STEPS:
                break
    return {
        "rows": rows,
        "stands": stands,
        "weights": torch.cat([p.detach().ravel() for p in model.parameters()]).tolist(),
    }


def refusals(folder: Path) -> dict[str, Any]:
    """What is refused, and what a plain ``accelerator.prepare`` does."""
    accelerator, model, _, _ = fresh(folder, "rows")
    plain = loader_of(folder, "rows")
    found: dict[str, Any] = {"prepared plainly": accelerator.prepare(plain) is plain}
    try:
        prepare(accelerator, plain)
    except ValueError as problem:
        found["same name"] = str(problem)
    prepare(accelerator, loader_of(folder, "rows", seed=4), name="other")
    before = [part.tolist() for part in model.parameters()]
    try:
        accelerator.load_state(str(folder / "rows" / "2"))
    except CheckpointNotFoundError as problem:
        found["no state"] = str(problem)
    os.symlink("midepoch-train.json", folder / "rows" / "2" / "midepoch-other.json")
    try:
        accelerator.load_state(str(folder / "rows" / "2"))
    except CheckpointMismatchError as problem:
        found["other data"] = problem.field
    found["left"] = [left(folder, at) for at in (3, 6)]
    found["model untouched"] = before == [part.tolist() for part in model.parameters()]
    AcceleratorState._reset_state()
    late = Accelerator(cpu=True)
    late.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    late.load_state(str(folder / "rows" / "2"))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("midepoch").addHandler(handler)
    loader = prepare(late, plain)
    found["prepared late"] = said
    batches = iter(loader)
    next(batches)
    found["steps"] = [loader.steps, loader.loader.steps]  # one is fetched ahead
    try:
        loader.exclude(rows=[1])
    except AttributeError as problem:
        found["edited"] = str(problem)
    try:
        skip_first_batches(loader, 1)
    except AttributeError as problem:
        found["skipped"] = str(problem)
    return found


def left(folder: Path, at: int) -> dict[str, Any]:
    """A pass of 7 batches that is left by a break, and the next one."""
    loader = fresh(folder, "rows")[3]
    epochs = []
    for _ in loader:
        epochs.append(loader.epoch)
        if len(epochs) == at:
            break
    state = loader.state_dict()
    again = [batch["id"].tolist() for batch in loader]
    return {"at": at, "epochs": epochs, "state": [state["epoch"], state["position"]], "again": again}


def main(folder: Path, where: str) -> None:
    rank = os.environ.get("RANK", "0")
    for case in {"alone": ["rows", "workers", "stream"], "ranks": ["ranks", "ranks of a stream"]}[where]:
        result = {"whole": run(folder, case)}
        for checkpoint in sorted(folder.glob(f"{case}/*")):
            if int(checkpoint.name) < STEPS:
                result[checkpoint.name] = run(folder, case, checkpoint)
        (folder / f"{case}-{rank}.json").write_text(json.dumps(result))
    if where == "alone":
        result = {"2": run(folder, "ranks", folder / "ranks" / "2")}
        (folder / "elsewhere-0.json").write_text(json.dumps(result))
        (folder / "refusals.json").write_text(json.dumps(refusals(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    if torch.distributed.is_initialized():  # or a rank that ends first may take the other with it
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
