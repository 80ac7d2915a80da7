"""Training process that gets killed: a small model, a checkpoint every few steps, a log of the rows it received."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch

import midepoch

CHECKPOINT_EVERY = 25
VOCABULARY = 4096


def words_to_features(row: dict[str, Any]) -> dict[str, Any]:
    """Return a fixed number of hashed words for a text, enough for a model to learn its label."""
    words = [sum(word.encode()) * 31 % VOCABULARY for word in row["text"].split()]
    return {"features": (words + [0] * 16)[:16]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, type=Path, help="folder for checkpoint and log, beside the data")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--wait-at", type=int, help="step at which to wait for the kill")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(VOCABULARY, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    folder = args.run.parent
    ds = midepoch.load_dataset(
        "parquet", data_files=f"{folder}/data/*.parquet", cache_dir=folder / "cache", split="train"
    )
    ds = ds.shuffle(seed=42).map(words_to_features, remove_columns="text")
    loader = ds.loader(batch_size=64, num_workers=args.num_workers)

    step, checkpoint = 0, args.run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]

    with (args.run / "rows.log").open("a", buffering=1) as log:
        for _ in range(loader.epoch, args.epochs):
            for batch in loader:
                loss = torch.nn.functional.cross_entropy(model(batch["features"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                log.write(f"{step} {' '.join(map(str, batch['id'].tolist()))}\n")
                print(step, flush=True)
                if step % CHECKPOINT_EVERY == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "loader": loader.state_dict(), "step": step}, f"{checkpoint}.new")
                    os.replace(f"{checkpoint}.new", checkpoint)
                if step == args.wait_at:
                    signal.pause()
    torch.save({"model": model.state_dict(), "loss": loss.item()}, args.run / "final.pt")


if __name__ == "__main__":
    main()
