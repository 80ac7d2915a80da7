"""Levanter: its trainer, loader and checkpoints, on rows in place. A resume on other devices has the same batches.

python examples/levanter_train.py run --devices 4 --die-at 7    # devices are simulated on the CPU
python examples/levanter_train.py run --devices 2               # resumes
"""

import argparse
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, BATCH, STEPS, EVERY = 60, 8, 16, 2


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.random.default_rng(0).standard_normal((ROWS, 8), dtype=np.float32)
        pq.write_table(pa.table({"id": np.arange(ROWS), "image": list(images)}), path)


def watched(batches: Any, step: int, folder: Path, die_at: int | None) -> Iterator[Any]:
    """Write down the rows of each step, and be killed on request."""
    with open(folder / "rows.txt", "a", buffering=1) as seen:
        for batch in batches:
            if step == die_at:
                signal.raise_signal(signal.SIGKILL)
            step += 1
            print(step, *batch["id"].array.tolist(), file=seen)
            yield batch


def train(folder: Path, die_at: int | None) -> None:
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import optax
    from levanter.checkpoint import CheckpointerConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig

    import midepoch
    from midepoch.integrations.levanter import Positions

    def example(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": hax.named(row["id"], ()), "image": hax.named(row["image"], "pixel")}

    def loss_of(model: Any, batch: Any, **_: Any) -> Any:
        images = batch["image"].array
        return jnp.square(jax.vmap(model)(images)[:, 0] - images.sum(axis=1)).mean()

    make_data(folder / "data.parquet")
    saver = CheckpointerConfig(str(folder / "checkpoints"), save_interval=timedelta(days=1), keep=[{"every": EVERY}])
    quiet = {"tracker": NoopConfig(), "log_jaxprs": False, "log_xla_hlo": False}
    config = TrainerConfig(id="run", train_batch_size=BATCH, num_train_steps=STEPS, checkpointer=saver, **quiet)
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    model = eqx.nn.Linear(8, 1, key=jax.random.PRNGKey(1))
    with Trainer(config, optax.adam(1e-2), loss_of) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model=model)  # restores the last checkpoint, if any
        batches = trainer.data_loader(Positions(ds).map(example)).iter_from_step(state.step)
        trainer.train(state, watched(batches, int(state.step), folder, die_at))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    parser.add_argument("--devices", type=int, default=4)
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    train(options.folder, options.die_at)
