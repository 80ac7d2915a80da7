"""Templates: containers come back as the types of the template, whatever libraries are imported."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from forks import Forks
from midepoch.checkpoint import CheckpointMismatchError, PipelineCheckpoint
from midepoch.checkpoint.arrays import ArraySpec, make_array
from midepoch.checkpoint.stateful import fit


def test_containers_do_not_depend_on_whether_jax_is_imported(tmp_path: Path, torch_forks: Forks) -> None:
    pytest.importorskip("jax")

    def job(*arguments: str) -> str:
        [done] = torch_forks.run([str(Path(__file__).with_name("containers_job.py")), *arguments])
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    folders = [str(tmp_path / jax) for jax in ("with", "without")]
    for folder, jax in zip(folders, ("with", "without"), strict=True):
        job("save", jax, folder)
    one, two = job("restore", "without", *folders), job("restore", "with", *folders)
    assert one == two
    lines = one.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :], "nor on whether it was when they were saved"
    model, plain, same_array, same_container, *_ = lines
    for kind in (
        "OrderedDict(None: b=Tensor of 7.0, a=ndarray of 7.0)",
        "defaultdict(list: a=Tensor of 7.0)",
        "UserDict(None: a=ndarray of 7.0)",
        "Named(None: a=",
        "Pair(Tensor of 7.0, OrderedDict(None: x=",
        "list(OrderedDict(None: x=Tensor of 7.0))",
        "mappingproxy(None: a=ndarray of 7.0)",
    ):
        assert kind in model
    for kind in (
        "OrderedDict(None: b=7, a=list(7))",
        "defaultdict(list: a=list(7), more=OrderedDict(None: x=7))",
        "UserDict(None: a=7)",
        "Counter(None: a=7)",
        "Size(7, 3)",
        "tuple(7, OrderedDict(None: x=7))",
    ):
        assert kind in plain
    assert same_array == same_container == "True"
    assert lines[4] == model and f"dict(None: plain={lines[5]})" == plain
    assert one.count("(3000,)") == one.count("(2999,)") == 2, "refused"


@pytest.mark.parametrize("container", [OrderedDict, lambda **values: defaultdict(list, values), UserDict, dict])
def test_arrays_in_any_mapping_are_checked_and_filled(container: type, tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, {"inner": container(w=torch.ones(5))}, step=1)
    tree = {"inner": container(w=torch.zeros(5))}
    inner, weight = tree["inner"], tree["inner"]["w"]
    checkpoint.restore_latest(None, tree)
    assert tree["inner"] is inner and inner["w"] is weight and bool((weight == 1).all())
    with pytest.raises(CheckpointMismatchError):
        checkpoint.restore_latest(None, {"inner": container(w=torch.zeros(6))})
    with pytest.raises(CheckpointMismatchError):
        checkpoint.restore_latest(None, {"inner": container(other=torch.zeros(5))})


def test_plain_values_may_be_more_than_in_the_template() -> None:
    like = {"history": OrderedDict(), "best": 0, "sizes": [OrderedDict(a=1)]}
    found = fit(like, {"history": {"a": 1}, "best": {"b": 2}, "sizes": [{"a": 2}, {"c": 3}]}, "extra")
    assert found == {"history": {"a": 1}, "best": {"b": 2}, "sizes": [{"a": 2}, {"c": 3}]}
    assert [type(found["history"]), type(found["sizes"][0]), type(found["sizes"][1])] == [
        OrderedDict,
        OrderedDict,
        dict,
    ]
    assert like == {"history": {}, "best": 0, "sizes": [{"a": 1}]}, "the template stays"


def test_states_of_optax_come_back_as_their_classes(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    parameters = {"w": jax.numpy.ones(3000), "inner": OrderedDict(b=jax.numpy.ones(3))}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    state = optimizer.init(parameters)
    _, state = optimizer.update(parameters, state, parameters)
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(None, {"state": state}, step=1)
    like = {"state": optimizer.init(parameters)}
    checkpoint.restore_latest(None, like)
    assert jax.tree_util.tree_structure(like["state"]) == jax.tree_util.tree_structure(state)
    assert all(map(np.array_equal, jax.tree_util.tree_leaves(like), jax.tree_util.tree_leaves(state)))


def test_none_in_a_template_accepts_any_value(tmp_path: Path) -> None:
    checkpoint = PipelineCheckpoint(tmp_path)
    checkpoint.save(step=1, extra={"s": {"best": None, "lr": 0.1, "losses": [1.0, 2.0], "w": np.ones(2)}})
    found = {"best": None, "lr": 0.0, "losses": [], "w": np.zeros(2)}
    checkpoint.restore_latest(extra={"s": found})
    assert found["losses"] == [1.0, 2.0] and found["best"] is None and found["lr"] == 0.1
    checkpoint.save(step=2, extra={"s": {"best": np.float32(3), "history": {"a": 1}}})
    found = {"best": None, "history": {}}
    checkpoint.restore_latest(extra={"s": found})
    assert found["best"] == 3 and found["history"] == {"a": 1}


def test_numbers_of_64_bits_are_refused_not_truncated() -> None:
    saved = make_array(ArraySpec("jax", "int64", (3,)), np.array([2**40, 1, 2]).view(np.uint8))
    assert np.asarray(saved).tolist() == [2**40, 1, 2]
    with pytest.raises(CheckpointMismatchError, match="int64"):
        fit(jnp.zeros(3, jnp.int32), saved, "x")
