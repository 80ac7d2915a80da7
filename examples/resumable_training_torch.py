"""Resumable training with PyTorch: train, be killed with kill -9, resume, and prove that nothing was lost.

python examples/resumable_training_torch.py
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import midepoch
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.typing import CheckpointableIterator

ROWS, BATCH, EPOCHS, EVERY = 21_248, 32, 5, 1000


def noisy(row: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"image": row["image"] + 0.1 * rng.standard_normal(16, dtype=np.float32)}


def create_pipeline(data: Path | str) -> midepoch.Loader:
    ds = midepoch.from_files(data).with_format("numpy").shuffle(seed=42).map(noisy, with_generator=True)
    return ds.with_format("torch").loader(batch_size=BATCH, num_workers=1)


def create_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(folder: Path | str, data: Path | str, die_at: int | None = None) -> tuple[list[float], dict[str, object]]:
    pipeline, (model, optimizer) = create_pipeline(data), create_model()
    assert isinstance(pipeline, CheckpointableIterator)  # part 1: every loader of midepoch is one
    checkpoint = PipelineCheckpoint(folder, keep=3)  # part 2: data, model, optimizer, RNG, together or not at all
    step = checkpoint.restore_latest(pipeline, model, optimizer) or 0  # part 4
    if step:
        print(f"Resumed from step {step}\n  Epoch: {pipeline.epoch}\n  Position: {pipeline.position}", flush=True)
    losses = []
    while pipeline.epoch < EPOCHS:  # part 3
        for batch in pipeline:
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step % EVERY == 0:
                checkpoint.save(pipeline, model, optimizer, step=step, metadata={"epoch": pipeline.epoch})
                print(f"Saved checkpoint at step {step}", flush=True)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)  # no warning, no cleaning up
    return losses, model.state_dict()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "data.parquet"), Path(folder, "run")
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        pq.write_table(pa.table({"image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}), data)
        command = [sys.executable, __file__, str(run), str(data), "2345"]
        assert subprocess.run(command).returncode == -signal.SIGKILL
        resumed = train(run, data)
        whole = train(Path(folder, "uninterrupted"), data)  # part 5: verification
        same = all(torch.equal(a, b) for a, b in zip(resumed[1].values(), whole[1].values(), strict=True))
        print(f"Deterministic restoration: {same and resumed[0] == whole[0][2000:]}")  # every weight and every loss


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 1 else main()
