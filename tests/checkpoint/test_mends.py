"""What reviews have broken, once each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx
from flax.training.train_state import TrainState

import midepoch
from midepoch.checkpoint import CheckpointError, CheckpointMismatchError, PipelineCheckpoint
from midepoch.checkpoint.arrays import ArraySpec, make_array
from midepoch.checkpoint.matching import fit
from midepoch.testing import same

BACKENDS = ["files", "orbax", "dcp"]


def adam(seed: int = 0, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters(), **{"lr": 0.1, **options})


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_saving_changes_nothing(backend: str, tmp_path: Path) -> None:
    model, optimizer = adam()
    PipelineCheckpoint(tmp_path, backend=backend).save(None, model, optimizer, step=1)
    assert not optimizer.state
    other, other_optimizer = adam(1)
    step(other, other_optimizer)
    assert PipelineCheckpoint(tmp_path, backend=backend).restore_latest(None, other, other_optimizer) == 1
    assert not other_optimizer.state and same(values(model), values(other))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lr", [np.float64(0.05), torch.tensor(0.05), 0.05], ids=["numpy", "tensor", "float"])
def test_learning_rates_of_any_kind(backend: str, lr: Any, tmp_path: Path) -> None:
    model, optimizer = adam()
    optimizer.param_groups[0]["lr"] = lr
    step(model, optimizer)
    PipelineCheckpoint(tmp_path, backend=backend).save(None, model, optimizer, step=1)
    other, other_optimizer = adam(1)
    PipelineCheckpoint(tmp_path, backend=backend).restore_latest(None, other, other_optimizer)
    found = other_optimizer.param_groups[0]["lr"]
    assert type(found) is type(lr) and float(found) == float(lr)
    step(model, optimizer)
    step(other, other_optimizer)
    assert same(values(model), values(other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_of_another_kind_is_refused(backend: str, tmp_path: Path) -> None:
    model, optimizer = adam()
    step(model, optimizer)
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, model, optimizer, step=1, extra={"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3)})
    other, _ = adam(1)
    before = values(other)
    with pytest.raises(CheckpointMismatchError, match="kind of optimizer"):
        checkpoint.restore_latest(None, other, torch.optim.SGD(other.parameters(), momentum=0.9))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(other.parameters(), lr=1), 5)
    with pytest.raises(CheckpointMismatchError, match="class of schedule"):
        checkpoint.restore_latest(None, other, extra={"schedule": cosine})
    assert same(before, values(other))
    with pytest.raises(CheckpointMismatchError, match="dtype"):
        checkpoint.restore_latest(None, other.to(torch.float64))
    assert same({name: value.double() for name, value in before.items()}, values(other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_extra_that_refuses_leaves_the_model_alone(backend: str, tmp_path: Path) -> None:
    class Bad:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("no")

    model, _ = adam()
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, model, step=1, extra={"bad": Bad()})
    other, _ = adam(1)
    before = values(other)
    with pytest.raises(CheckpointError, match="bad refused"):
        checkpoint.restore_latest(None, other, extra={"bad": Bad()})
    assert same(before, values(other))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", [{}, {"i": 3}, torch.nn.Identity()], ids=["empty", "number", "identity"])
def test_models_without_arrays(backend: str, model: Any, tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, model, step=1)
    assert checkpoint.restore_latest(None, {"i": 0} if model == {"i": 3} else model) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "keys",
    [("a", "a.b"), ("a.b", "a"), ("a/b", "c//d"), ("../x", "."), ("..", "a."), ("%2e", "."), ("é", " "), ("", "_")],
    ids=str,
)
def test_names_of_any_kind(backend: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    tree = {key: np.full(50, float(number)) for number, key in enumerate(keys)}
    tree["nested"] = {"a": {"b": np.ones(3)}, "a.b": np.zeros(3)}  # type: ignore[dict-item]
    checkpoint = PipelineCheckpoint(tmp_path, backend=backend)
    checkpoint.save(None, tree, step=1)
    assert same(checkpoint.read(1, "model"), tree)
    fresh = {key: np.zeros(50) for key in keys} | {"nested": {"a": {"b": np.zeros(3)}, "a.b": np.ones(3)}}
    checkpoint.restore_latest(None, fresh)
    assert same(fresh, tree)


def test_none_is_a_value_and_takes_any(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, extra={"s": {"best": None, "lr": 0.1, "losses": [1.0, 2.0], "w": np.ones(2)}})
    found = {"best": None, "lr": 0.0, "losses": [], "w": np.zeros(2)}
    checkpoint.restore_latest(extra={"s": found})
    assert found["losses"] == [1.0, 2.0] and found["best"] is None and found["lr"] == 0.1
    checkpoint.save(step=2, extra={"s": {"best": np.float32(3), "history": {"a": 1}}})
    found = {"best": None, "history": {}}
    checkpoint.restore_latest(extra={"s": found})
    assert found["best"] == 3 and found["history"] == {"a": 1}


@pytest.mark.parametrize("backend", ["files", "orbax"])
def test_rngs_and_train_states_of_flax(backend: str, tmp_path: Path) -> None:
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


def test_numbers_of_64_bits_are_refused_not_cut() -> None:
    saved = make_array(ArraySpec("jax", "int64", (3,)), np.array([2**40, 1, 2]).view(np.uint8))
    assert np.asarray(saved).tolist() == [2**40, 1, 2]
    with pytest.raises(CheckpointMismatchError, match="int64"):
        fit(jnp.zeros(3, jnp.int32), saved, "x")


def test_weak_types_come_back(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, extra={"lr": {"a": jnp.asarray(0.1), "b": jnp.float32(0.1)}})
    found = checkpoint.read(1, "lr")
    assert found["a"].weak_type and not found["b"].weak_type
    assert (jnp.ones(2, jnp.bfloat16) * found["a"]).dtype == jnp.bfloat16


def test_views_that_are_another_tensor(tmp_path: Path) -> None:
    x = torch.randn(3000, dtype=torch.complex64)
    tree = {"a": x, "b": x.conj(), "c": x.imag, "d": x.conj().imag}
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, model=tree)
    assert all(
        torch.equal(checkpoint.read(1, "model")[name], value.resolve_conj().resolve_neg())
        for name, value in tree.items()
    )


def test_keys_that_look_alike_and_odd_values(tmp_path: Path) -> None:
    tree = {1: np.ones(2), "1": np.zeros(2), "c": Counter({5: 2}), "big": 10**6000, "s": np.str_("")}
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, extra={"t": tree})
    found = {1: np.full(2, 9.0), "1": np.full(2, 9.0), "c": Counter(), "big": 0, "s": ""}
    checkpoint.restore_latest(extra={"t": found})
    assert found[1].tolist() == [1, 1] and found["1"].tolist() == [0, 0]
    assert isinstance(found["c"], Counter) and found["c"][5] == 2 and found["big"] == 10**6000
    with pytest.raises(TypeError, match="masked"):
        checkpoint.save(extra={"m": np.ma.masked_array([1, 2], [True, False])})


def test_lazy_modules_and_models_with_a_state_of_their_own(tmp_path: Path) -> None:
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


def test_other_generators_of_numpy(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        checkpoint = PipelineCheckpoint(tmp_path)
        checkpoint.save(step=1)
        expected = np.random.rand()
        np.random.set_bit_generator(before)
        assert checkpoint.restore_latest() == 1
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(before)


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
def test_wrong_arguments_are_told(arguments: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"pipeline: a|expected a model|Pass it by itself"):
        PipelineCheckpoint(tmp_path).save(*arguments)
    with pytest.raises(TypeError, match="extra: expected a dict"):
        PipelineCheckpoint(tmp_path).save(extra=[1])


def test_pipelines_that_are_no_match(small_files: Any, tmp_path: Path) -> None:
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


def test_one_pass_for_a_structured_dataset_and_its_loader(tmp_path: Path) -> None:
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
