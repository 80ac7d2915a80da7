"""torchdata's StatefulDataLoader over a dataset: its state is exact too, if num_workers stays what it was.

python examples/stateful_dataloader.py run --die-at 47
python examples/stateful_dataloader.py run
"""

import argparse
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

ROWS, BATCH, EPOCHS, EVERY = 500, 16, 2, 10


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        table = {"id": np.arange(ROWS), "image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}
        pq.write_table(pa.table(table), path)


def train(folder: Path, die_at: int | None) -> None:
    make_data(folder / "data.parquet")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42).with_format("torch")
    loader = StatefulDataLoader(ds, batch_size=BATCH, num_workers=2)
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=3)
    step = checkpoint.restore_latest(loader, model, optimizer) or 0
    begun = checkpoint.metadata(step)["epoch"] if step else 0
    if step:
        print(f"Resumed from step {step}, in epoch {begun}", flush=True)
    with open(folder / "rows-0.txt", "a", buffering=1) as seen:
        for epoch in range(begun, EPOCHS):
            ds.set_epoch(epoch)  # a dataset does not go to the next epoch by itself
            for batch in loader:
                loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                print(step, *batch["id"].tolist(), file=seen)
                if step % EVERY == 0:
                    checkpoint.save(loader, model, optimizer, step=step, metadata={"epoch": epoch})
                if step == die_at:
                    signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    args = parser.parse_args()
    train(args.folder, args.die_at)
