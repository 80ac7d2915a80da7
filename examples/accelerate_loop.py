"""Accelerate: ``save_state`` and ``load_state`` hold the place in the data, gradient accumulation and all.

accelerate launch examples/accelerate_loop.py run --die-at 47      # or python, or torchrun
accelerate launch examples/accelerate_loop.py run
"""

import argparse
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator

import midepoch
from midepoch.integrations.accelerate import prepare

ROWS, BATCH, EPOCHS, EVERY = 512, 16, 2, 10


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        table = {"id": np.arange(ROWS), "image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}
        pq.write_table(pa.table(table), path)


def train(folder: Path, die_at: int | None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with accelerator.main_process_first():
        make_data(folder / "data.parquet")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    loader = prepare(accelerator, ds.loader(BATCH, num_workers=1, last_batch="drop"))
    step = max((int(path.name) for path in folder.glob("checkpoints/*")), default=0)
    if step:
        accelerator.load_state(str(folder / "checkpoints" / str(step)))
        accelerator.print(f"Resumed from step {step}, in epoch {loader.epoch}", flush=True)
    with open(folder / f"rows-{accelerator.process_index}.txt", "a", buffering=1) as seen:
        while loader.epoch < EPOCHS:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                step += 1
                print(step, *batch["id"].tolist(), file=seen)
                if step % EVERY == 0 and accelerator.sync_gradients:  # gradients that wait would not be saved
                    accelerator.save_state(str(folder / "checkpoints" / str(step)))
                if step == die_at:
                    signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    args = parser.parse_args()
    train(args.folder, args.die_at)
