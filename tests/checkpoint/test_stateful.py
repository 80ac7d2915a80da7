"""Objects with a state: what is saved of them, what fits them, and wrong arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from flax import linen, nnx
from flax.training.train_state import TrainState

import midepoch
from midepoch.checkpoint import (
    CheckpointMismatchError,
    PipelineCheckpoint,
)


@pytest.mark.parametrize("backend", ["files", "orbax"])
def test_rngs_and_train_states_of_flax_come_back(backend: str, tmp_path: Path) -> None:
    rngs = nnx.Rngs(0)
    rngs.default()
    layer = linen.Dense(3)
    params = layer.init(jax.random.key(0), jnp.ones((1, 4)))["params"]

    def fresh() -> TrainState:
        return TrainState.create(apply_fn=layer.apply, params=params, tx=optax.adam(0.1))

    state = fresh()
    state = jax.jit(lambda s: s.apply_gradients(grads=s.params))(state)
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, rngs, step=1, extra={"state": state})
    other = nnx.Rngs(1)
    holder = {"state": fresh()}
    assert checkpoint.restore_latest(None, other, extra={}) == 1
    assert jnp.array_equal(jax.random.key_data(rngs.default()), jax.random.key_data(other.default()))
    checkpoint.save(None, {"ts": state}, step=2)
    found = {"ts": fresh()}
    assert checkpoint.restore_latest(None, found) == 2
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found["ts"].params, state.params))
    assert int(found["ts"].step) == 1 and jax.tree.structure(found["ts"].opt_state) == jax.tree.structure(
        state.opt_state
    )
    assert jax.tree.structure(checkpoint.read(1, "state", like=holder["state"]).opt_state) == jax.tree.structure(
        state.opt_state
    )


def test_lazy_modules_and_custom_state_dicts_come_back(tmp_path: Path) -> None:
    model = torch.nn.LazyLinear(3)
    model(torch.ones(1, 4))

    class Own(torch.nn.Linear):
        def get_state(self) -> Any:
            return {"x": 1}

        def set_state(self, state: Any) -> None:
            raise AssertionError

    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, model, step=1)
    fresh = torch.nn.LazyLinear(3)
    checkpoint.restore_latest(None, fresh)
    assert torch.equal(fresh.weight, model.weight)
    one, two = Own(2, 2), Own(2, 2)
    checkpoint.save(None, one, step=2)
    checkpoint.restore_latest(None, two)
    assert torch.equal(one.weight, two.weight)


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.nn.Linear(1, 1),),
        ([1, 2],),
        (torch.utils.data.DataLoader([1, 2]),),
        (iter([1]),),
        (None, 5),
        (None, torch.nn.Linear),
        (None, {"a": torch.nn.Linear(1, 1)}),
    ],
    ids=lambda value: str(type(value[-1]).__name__),
)
def test_wrong_arguments_are_named(arguments: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"pipeline: a|expected a model|Pass it by itself"):
        PipelineCheckpoint(tmp_path).save(*arguments)
    with pytest.raises(TypeError, match="extra: expected a dict"):
        PipelineCheckpoint(tmp_path).save(extra=[1])


def test_the_state_of_another_pipeline_is_refused(small_files: Any, tmp_path: Path) -> None:
    class One:
        def __init__(self) -> None:
            self.state = {"x": 1}

        def get_state(self) -> Any:
            return self.state

        def set_state(self, state: Any) -> None:
            self.state = state

    class Two(One):
        pass

    loader = midepoch.from_files(small_files).loader(batch_size=5)
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(One(), step=1)
    with pytest.raises(CheckpointMismatchError, match="class of data"):
        checkpoint.restore_latest(Two())
    with pytest.raises(CheckpointMismatchError, match="another pipeline"):
        checkpoint.restore_latest(loader)
    checkpoint.save(loader, step=2)
    with pytest.raises(CheckpointMismatchError, match="class of data"):
        checkpoint.restore_latest(One())


def test_a_structured_dataset_and_its_loader_share_a_pass(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": range(40)}), tmp_path / "x.parquet")
    loader, dataset = midepoch.StructuredDataset.create_dataloader(
        tmp_path / "x.parquet", "parquet", batch_size=4, num_workers=0
    )
    first, second = next(loader)["id"].tolist(), next(dataset)["id"].tolist()
    assert (first, second) == ([0, 1, 2, 3], [4, 5, 6, 7])
    state = dataset.get_state()
    third = next(loader)["id"].tolist()
    dataset.set_state(state)
    assert next(loader)["id"].tolist() == third == [8, 9, 10, 11]


@pytest.mark.filterwarnings("ignore:.*set_vital.*")
def test_a_restore_does_not_request_the_state_of_a_stateful_dataloader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start its workers to answer."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    checkpoint = PipelineCheckpoint(tmp_path)
    loader = StatefulDataLoader(list(range(20)), batch_size=2)
    next(iter(loader))
    checkpoint.save(loader, step=1)
    fresh = StatefulDataLoader(list(range(20)), batch_size=2, num_workers=0)
    monkeypatch.setattr(StatefulDataLoader, "state_dict", lambda _: pytest.fail("asked"))
    assert checkpoint.restore_latest(fresh) == 1
    assert next(iter(fresh)).tolist() == [2, 3]
