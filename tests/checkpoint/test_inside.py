"""midepoch's states inside other people's checkpoints: torch's, Orbax', and as seed 003 writes its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from flax import nnx

import midepoch
from midepoch.checkpoint import CheckpointMismatchError, PipelineCheckpoint
from midepoch.checkpoint.orbax import DataRestore, DataSave
from midepoch.testing import same
from midepoch.typing import CheckpointableIterator

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled.*"),
    pytest.mark.filterwarnings("ignore:.*[Ss]harding.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def make(files: Any, seed: int = 1) -> midepoch.Loader:
    return midepoch.from_files(files).shuffle(seed=seed).with_format("numpy").loader(batch_size=5)


def test_a_loader_in_a_distributed_checkpoint_of_torch(small_files: Any, tmp_path: Path) -> None:
    loader, model = make(small_files), torch.nn.Linear(3, 2)
    passing = iter(loader)
    for _ in range(3):
        next(passing)
    dcp.save({"model": model, "data": loader}, checkpoint_id=tmp_path / "dcp")
    expected = list(passing)
    other, fresh = make(small_files), torch.nn.Linear(3, 2)
    dcp.load({"model": fresh, "data": other}, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(model.weight, fresh.weight)
    assert same(list(other), expected)
    with pytest.raises(Exception, match="seed"):
        dcp.load({"model": fresh, "data": make(small_files, seed=2)}, checkpoint_id=tmp_path / "dcp")


def test_a_loader_in_an_orbax_checkpoint(small_files: Any, tmp_path: Path) -> None:
    loader, params = make(small_files), {"w": jnp.arange(6.0)}
    passing = iter(loader)
    for _ in range(3):
        next(passing)
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(3, args=ocp.args.Composite(model=ocp.args.StandardSave(params), data=DataSave(loader)))
        manager.wait_until_finished()
        expected = list(passing)
        other = make(small_files)
        found = manager.restore(
            3, args=ocp.args.Composite(model=ocp.args.StandardRestore(params), data=DataRestore(other))
        )
        assert jnp.array_equal(found.model["w"], params["w"]) and found.data is other
        assert same(list(other), expected)
        with pytest.raises(CheckpointMismatchError, match="seed"):
            manager.restore(3, args=ocp.args.Composite(data=DataRestore(make(small_files, seed=2))))


# Seed 003, as its reader would type it


class TrainingPipeline(CheckpointableIterator[dict]):
    def __init__(self, source: Any, batch_size: int, seed: int) -> None:
        self.source = source
        self.batch_size = batch_size
        self.rng = jax.random.key(seed)
        self.epoch = 0
        self.step = 0
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < len(self.source):
            self.rng, key = jax.random.split(self.rng)
            rows = self.source[self.position : self.position + self.batch_size]
            yield {"image": rows + jax.random.uniform(key)}
            self.step += 1
            self.position += self.batch_size
        self.epoch, self.position = self.epoch + 1, 0

    def get_state(self) -> dict:
        """Return complete state for checkpointing."""
        return {
            "rng": jax.random.key_data(self.rng),
            "epoch": self.epoch,
            "step": self.step,
            "position": self.position,
        }

    def set_state(self, state: dict) -> None:
        """Restore from checkpoint state."""
        self.rng = jax.random.wrap_key_data(state["rng"])
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.position = state["position"]


def create_pipeline(seed: int = 42) -> TrainingPipeline:
    return TrainingPipeline(jnp.arange(1000.0), 7, seed)


def test_a_pipeline_of_the_texts_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline_ckpt = PipelineCheckpoint(tmp_path / "pipeline")
    model_ckpt = ocp.PyTreeCheckpointer()
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def save_training_state(step: int, pipeline: Any, model: Any) -> None:
        pipeline_ckpt.save(
            pipeline,
            step=step,
            metadata={"epoch": pipeline.epoch},
            keep=3,
        )
        model_ckpt.save(tmp_path / f"model/step_{step}", nnx.to_pure_dict(nnx.state(model)))
        print(f"Saved checkpoint at step {step}")

    pipeline = create_pipeline()
    step = 0
    for epoch in range(2):
        pipeline.epoch = epoch
        for _ in pipeline:
            step += 1
            if step % 50 == 0:
                save_training_state(step, pipeline, model)
            if step == 230:
                break
    assert capsys.readouterr().out.splitlines() == [f"Saved checkpoint at step {step}" for step in (50, 100, 150, 200)]
    assert pipeline_ckpt.steps() == [100, 150, 200]
    assert pipeline_ckpt.metadata(200) == {"epoch": 1}

    resumed = create_pipeline()
    restored_step = PipelineCheckpoint(f"{tmp_path}/pipeline").restore_latest(resumed)
    assert restored_step == 200
    assert (resumed.epoch, resumed.position) == (1, (200 - 143 - 1) * 7)
    assert isinstance(resumed, CheckpointableIterator)


def test_the_texts_verification(tmp_path: Path) -> None:
    """Its pipeline moves on when the next batch is asked for, so that the batch in hand comes again."""
    checkpoint = PipelineCheckpoint(tmp_path)
    pipeline1 = create_pipeline(seed=42)
    for i, batch in enumerate(pipeline1):
        if i == 50:
            state = pipeline1.get_state()
            state["rng"] = jax.random.key_data(pipeline1.rng)
            checkpoint.save(pipeline1, step=50)
            batch_at_50 = batch
            break
    pipeline2 = create_pipeline(seed=42)
    checkpoint.restore_latest(pipeline2)
    assert pipeline2.position == 50 * 7 and pipeline2.step == 50
    restored = next(iter(pipeline2))
    assert jnp.array_equal(jnp.floor(batch_at_50["image"]), jnp.floor(restored["image"]))


def test_with_a_loader_of_midepoch_the_next_batch_comes(small_files: Any, tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    pipeline1 = make(small_files)
    batches = iter(pipeline1)
    for batch in itertools.islice(batches, 3):
        held = batch
    checkpoint.save(pipeline1, step=3)
    following = next(batches)
    pipeline2 = make(small_files)
    checkpoint.restore_latest(pipeline2)
    found = next(iter(pipeline2))
    assert np.array_equal(found["id"], following["id"]) and not np.array_equal(found["id"], held["id"])
