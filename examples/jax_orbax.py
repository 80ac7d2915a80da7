"""JAX and Flax with Orbax' own CheckpointManager: the place in the data is an item beside the model.

python examples/jax_orbax.py run --die-at 47
python examples/jax_orbax.py run
"""

import argparse
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pyarrow as pa
import pyarrow.parquet as pq
from flax import nnx

import midepoch
from midepoch.checkpoint.orbax import DataRestore, DataSave

ROWS, BATCH, EPOCHS, EVERY = 500, 16, 2, 10


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        table = {"id": np.arange(ROWS), "image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}
        pq.write_table(pa.table(table), path)


def update(model: nnx.Module, optimizer: Any, image: jax.Array, label: jax.Array) -> jax.Array:
    def loss_of(model: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(image), label).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(folder: Path, die_at: int | None) -> None:
    make_data(folder / "data.parquet")
    loader = midepoch.from_files(folder / "data.parquet").with_format("numpy").shuffle(seed=42).loader(BATCH)
    rngs, train_step = nnx.Rngs(0), nnx.jit(update)
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 2, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    manager = ocp.CheckpointManager(folder / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=3))
    step = manager.latest_step() or 0
    if step:
        state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
        restored = manager.restore(step, args=ocp.args.Composite(model=state, data=DataRestore(loader)))
        nnx.update((model, optimizer), restored.model)
        print(f"Resumed from step {step}, in epoch {loader.epoch}", flush=True)
    with open(folder / "rows-0.txt", "a", buffering=1) as seen:
        while loader.epoch < EPOCHS:
            for batch in loader:
                train_step(model, optimizer, batch["image"], batch["label"])
                step += 1
                print(step, *batch["id"].tolist(), file=seen)
                if step % EVERY == 0:
                    state = ocp.args.StandardSave(nnx.state((model, optimizer)))
                    manager.save(step, args=ocp.args.Composite(model=state, data=DataSave(loader)))
                if step == die_at:
                    manager.wait_until_finished()  # of a save that is under way when a run is killed nothing is left
                    signal.raise_signal(signal.SIGKILL)
    manager.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    args = parser.parse_args()
    train(args.folder.resolve(), args.die_at)
