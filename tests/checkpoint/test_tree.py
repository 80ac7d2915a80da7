"""Trees of values there and back, and what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from characters import ENCODABLE
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.checkpoint.stateful import fit
from midepoch.checkpoint.tree import array_specs, decode, encode
from midepoch.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError


def there_and_back(tree: Any, tmp_path: Path, **options: Any) -> Any:
    """Through real files."""
    checkpoint = PipelineCheckpoint(tmp_path / "checkpoints", **options)
    step = checkpoint.save(extra={"tree": tree})
    return checkpoint.read(step, "tree")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b)
        )
    if isinstance(a, (np.ndarray, np.generic)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(ENCODABLE)
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(ENCODABLE) | st.integers() | st.tuples(st.integers(), st.text(ENCODABLE)), inner, max_size=4
        )
        | st.sets(st.integers() | st.text(ENCODABLE), max_size=4)
    ),
    max_leaves=12,
)
arrays = hnp.arrays(
    hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
)


@given(tree=plain | st.dictionaries(st.text(ENCODABLE), plain | arrays, max_size=4), inline=st.sampled_from([0, 8192]))
def test_any_tree_comes_back(tree: Any, inline: int) -> None:
    encoded = encode(tree, "tree", inline=inline)
    text = json.loads(json.dumps(encoded.json, allow_nan=False))
    assert array_specs(text).keys() == encoded.arrays.keys()
    from midepoch.checkpoint.arrays import find_arrays, write_arrays
    from midepoch.checkpoint.files import BytesSource, ChecksumSink
    from midepoch.checkpoint.tree import StoredTree

    class Sink(bytearray):
        def write(self, data: memoryview) -> None:
            self.extend(data)

    sink = Sink()
    if encoded.arrays:
        write_arrays(ChecksumSink(sink), encoded.arrays)
    source = BytesSource(np.frombuffer(sink, np.uint8))
    stored = find_arrays(source, array_specs(text).items()) if encoded.arrays else {}
    assert same(_native(tree), StoredTree(text, stored).read())


def _native(tree: Any) -> Any:
    """Byte order is the one thing that does not come back: values do, in this machine's order."""
    if isinstance(tree, np.ndarray):
        return tree.astype(tree.dtype.newbyteorder("="))
    if isinstance(tree, dict):
        return {key: _native(value) for key, value in tree.items()}
    return tree


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "uint16",
        "uint32",
        "uint64",
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (300, 77)])
def test_torch_tensors_of_every_dtype(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = torch.randint(0, 2 if dtype == "bool" else 255, (size,), dtype=torch.uint8)
    tensor = raw.view(kind).reshape(shape) if size else torch.empty(shape, dtype=kind)
    found = there_and_back({"a": tensor}, tmp_path)["a"]
    assert found.dtype == kind
    assert found.shape == tensor.shape
    assert not size or torch.equal(found.reshape(-1).view(torch.uint8), raw)


def test_odd_torch_tensors(tmp_path: Path) -> None:
    base = torch.arange(20000.0).reshape(100, 200)
    tree = {
        "transposed": base.T,
        "strided": base[::3, ::7],
        "expanded": torch.ones(1, 5000).expand(3, 5000),
        "conjugate": torch.randn(2000, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(base.clone()),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
    }
    found = there_and_back(tree, tmp_path)
    for name in ("transposed", "strided", "expanded", "conjugate", "parameter"):
        assert torch.equal(found[name], tree[name].detach().resolve_conj()), name
    assert found["dtype"] is torch.bfloat16
    assert found["device"] == torch.device("cpu")
    assert found["size"] == (2, 3)


def test_tied_weights_are_stored_once_and_stay_equal(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 500, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(model=model, step=1)
    assert (tmp_path / "step_1/model.safetensors").stat().st_size < 500 * 64 * 4 * 1.1
    checkpoint.restore_latest(model=other)
    assert torch.equal(model.embed.weight, other.head.weight)
    assert other.head.weight is other.embed.weight


def test_jax_and_numpy_values(tmp_path: Path) -> None:
    tree = {
        "bf16": jnp.ones((70, 80), jnp.bfloat16),
        "ml": np.ones(9000, ml_dtypes.bfloat16),
        "key": jax.random.key(7),
        "old key": jax.random.PRNGKey(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "scalar": jnp.float32(2.5),
        "numpy scalar": np.float32(1.5),
        "times": np.array(["2026-01-01", "NaT"], "M8[ns]"),
        "big endian": np.arange(5, dtype=">i4"),
    }
    found = there_and_back(tree, tmp_path)
    assert isinstance(found["bf16"], jax.Array)
    assert found["bf16"].dtype == jnp.bfloat16
    assert found["ml"].dtype == ml_dtypes.bfloat16
    assert found["key"] == tree["key"]
    assert jnp.array_equal(found["old key"], tree["old key"])
    assert jnp.array_equal(jax.random.uniform(found["keys"][1]), jax.random.uniform(tree["keys"][1]))
    assert type(found["numpy scalar"]) is np.float32
    assert found["numpy scalar"] == 1.5
    assert found["big endian"].tolist() == [0, 1, 2, 3, 4]
    assert found["times"].tobytes() == tree["times"].tobytes()


class Pair(NamedTuple):
    left: Any
    right: Any


def test_classes_come_back_from_a_template_only(tmp_path: Path) -> None:
    params = {"w": jnp.arange(3000.0), "b": jnp.zeros(3)}
    state = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params)
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(extra={"opt": state, "pair": Pair(1, [np.ones(3)])}, step=1)
    assert checkpoint.read(1, "pair")["left"] == 1
    found = checkpoint.read(
        1, "opt", like=optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(jax.tree.map(jnp.zeros_like, params))
    )
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, found, state))
    with pytest.raises(CheckpointMismatchError, match="opt"):
        checkpoint.read(1, "opt", like=optax.sgd(1e-3, momentum=0.9).init(params))
    with pytest.raises(CheckpointMismatchError, match=r"w"):
        checkpoint.read(
            1, "opt", like=optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init({"w": jnp.zeros(2), "b": jnp.zeros(3)})
        )


def test_files_are_read_by_safetensors_itself(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(torch.bfloat16)
    checkpoint.save(model=model, step=1)
    found = safetensors.torch.load_file(tmp_path / "step_1/model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    checkpoint.save(model={"a": {"b": np.arange(5000)}}, step=2)
    assert safetensors.numpy.load_file(tmp_path / "step_2/model.safetensors")["a.b"][-1] == 4999


class Opaque:
    pass


@pytest.mark.parametrize(
    "value",
    [Opaque(), len, np.array([Opaque()]), torch.eye(3).to_sparse()],
    ids=["class", "function", "objects", "sparse"],
)
def test_what_needs_pickle_is_refused_on_both_sides(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extra.tree.inner.0 is .*allow_pickle"):
        there_and_back({"inner": [value]}, tmp_path)
    assert PipelineCheckpoint(tmp_path / "checkpoints").steps() == []
    trusting = PipelineCheckpoint(tmp_path / "checkpoints", allow_pickle=True)
    trusting.save(extra={"tree": {"inner": [value]}}, step=1)
    with pytest.raises(CheckpointError, match="allow_pickle"):
        PipelineCheckpoint(tmp_path / "checkpoints").read(1, "tree")
    with pytest.raises(CheckpointError, match="allow_pickle"):
        PipelineCheckpoint(tmp_path / "checkpoints").restore_latest(extra={"tree": {}})
    assert type(trusting.read(1, "tree")["inner"][0]) is type(value)


@pytest.mark.parametrize(
    "json",
    [
        {"$": "nonsense"},
        {"$": "array"},
        {"$": "array", "of": "numpy", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"$": "array", "of": "numpy", "dtype": "float32", "shape": [10**30], "data": ""},
        {"$": "array", "of": "numpy", "dtype": "float32", "shape": [-1], "data": ""},
        {"$": "array", "of": "torch", "dtype": "load", "shape": [1], "data": "AA=="},
        {"$": "array", "of": "os", "dtype": "float32", "shape": [1], "data": "AAAAAA=="},
        {"$": "torch.dtype", "is": "load"},
        {"$": "torch.device", "is": "nowhere"},
        {"$": "tuple"},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": ["unhashable"]},
        {"$": "float", "is": "many"},
        {"$": "bytes", "data": "ä"},
        {"$": "complex", "items": [1, 2, 3]},
    ],
    ids=str,
)
def test_hostile_trees_are_refused(json: Any) -> None:
    with pytest.raises(CheckpointDamagedError):
        decode(json, {})


def test_templates_refuse_what_does_not_fit() -> None:
    for like, tree in [
        ({"a": np.zeros(3), "b": 1}, {"a": np.zeros(3)}),
        ({"a": np.zeros(3)}, {"a": np.zeros(4)}),
        ({"a": np.zeros(3)}, {"a": np.zeros(3, np.int32)}),
        ({"a": np.zeros(3)}, {"a": 1}),
        ([1, 2], {"x": 1}),
        ([np.zeros(1)], [np.zeros(1), np.zeros(1)]),
        ((1, 2), {"x": 1}),
        (Pair(1, 2), {"left": 1}),
    ]:
        with pytest.raises(CheckpointMismatchError):
            fit(like, tree, "x")


def test_weak_types_come_back(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, extra={"lr": {"a": jnp.asarray(0.1), "b": jnp.float32(0.1)}})
    found = checkpoint.read(1, "lr")
    assert found["a"].weak_type and not found["b"].weak_type
    assert (jnp.ones(2, jnp.bfloat16) * found["a"]).dtype == jnp.bfloat16


def test_views_with_other_values_are_not_tied(tmp_path: Path) -> None:
    x = torch.randn(3000, dtype=torch.complex64)
    tree = {"a": x, "b": x.conj(), "c": x.imag, "d": x.conj().imag}
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, model=tree)
    assert all(
        torch.equal(checkpoint.read(1, "model")[name], value.resolve_conj().resolve_neg())
        for name, value in tree.items()
    )


def test_keys_that_look_alike_stay_apart(tmp_path: Path) -> None:
    tree = {1: np.ones(2), "1": np.zeros(2), "c": Counter({5: 2}), "big": 10**6000, "s": np.str_("")}
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, extra={"t": tree})
    found = {1: np.full(2, 9.0), "1": np.full(2, 9.0), "c": Counter(), "big": 0, "s": ""}
    checkpoint.restore_latest(extra={"t": found})
    assert found[1].tolist() == [1, 1] and found["1"].tolist() == [0, 0]
    assert isinstance(found["c"], Counter) and found["c"][5] == 2 and found["big"] == 10**6000
    with pytest.raises(TypeError, match="masked"):
        checkpoint.save(extra={"m": np.ma.masked_array([1, 2], [True, False])})
