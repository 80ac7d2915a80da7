"""Resumable training with JAX (Flax nnx and optax): train, be killed with kill -9, resume, prove that nothing was lost.

python examples/resumable_training_jax.py
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
from flax import nnx

import midepoch
from midepoch.checkpoint import PipelineCheckpoint

ROWS, BATCH, EPOCHS, EVERY = 21_248, 32, 5, 1000


def noisy(row: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"image": row["image"] + 0.1 * rng.standard_normal(16, dtype=np.float32)}


def create_model(rngs: nnx.Rngs) -> nnx.Sequential:
    drop = nnx.Dropout(0.2, rngs=rngs)  # its key is a part of the model's state, and saved with it
    return nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.relu, drop, nnx.Linear(32, 2, rngs=rngs))


@nnx.jit  # type: ignore[untyped-decorator]
def train_step(model: nnx.Sequential, optimizer: nnx.Optimizer, image: np.ndarray, label: np.ndarray) -> jax.Array:
    def loss_of(model: nnx.Sequential) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(image), label).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(folder: Path | str, data: Path | str, die_at: int | None = None) -> tuple[jax.Array, nnx.State]:
    ds = midepoch.from_files(data).with_format("numpy").shuffle(seed=42).map(noisy, with_generator=True)
    pipeline, model = ds.loader(batch_size=BATCH), create_model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    checkpoint = PipelineCheckpoint(folder, keep=3)
    losses, step = [], checkpoint.restore_latest(pipeline, model, optimizer) or 0
    if step:
        print(f"Resumed from step {step}\n  Epoch: {pipeline.epoch}\n  Position: {pipeline.position}", flush=True)
    while pipeline.epoch < EPOCHS:
        for batch in pipeline:
            loss = train_step(model, optimizer, batch["image"], batch["label"])
            losses.append(loss)
            step += 1
            if step % EVERY == 0:
                checkpoint.save(pipeline, model, optimizer, step=step, metadata={"epoch": pipeline.epoch, "loss": loss})
                print(f"Saved checkpoint at step {step}", flush=True)
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return jnp.stack(losses), nnx.to_pure_dict(nnx.state(model, nnx.Param))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "data.parquet"), Path(folder, "run")
        images = np.random.default_rng(0).standard_normal((ROWS, 16), dtype=np.float32)
        pq.write_table(pa.table({"image": list(images), "label": (images.sum(1) > 0).astype(np.int64)}), data)
        assert subprocess.run([sys.executable, __file__, str(run), str(data), "2345"]).returncode == -signal.SIGKILL
        resumed, whole = train(run, data), train(Path(folder, "uninterrupted"), data)
        same = jax.tree.all(jax.tree.map(jnp.array_equal, resumed[1], whole[1]))  # every weight
        print(f"Deterministic restoration: {same and jnp.array_equal(resumed[0], whole[0][2000:])}")  # and every loss


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 1 else main()
