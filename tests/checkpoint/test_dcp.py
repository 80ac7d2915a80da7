"""The parts of the tensors of a DCP folder, as midepoch and as strangers write them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from characters import ENCODABLE
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.checkpoint.arrays import ArraySpec, spec_of
from midepoch.checkpoint.dcp import _metadata
from midepoch.errors import CheckpointDamagedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones((), dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dcp")
    PipelineCheckpoint(root, backend="dcp").save(None, TENSORS, step=1)
    return root / "step_1/arrays"


@pytest.fixture
def specs() -> dict[str, ArraySpec]:
    return {name: spec_of(tensor) for name, tensor in TENSORS.items()}


def test_the_parts_are_those_of_torch(folder: Path, specs: dict[str, ArraySpec]) -> None:
    expected, result = pickle.loads((folder / ".metadata").read_bytes()), _metadata(folder, "model", specs)
    assert result.storage_data == expected.storage_data
    assert result.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, entry in expected.state_dict_metadata.items():
        own = result.state_dict_metadata[name]
        assert (own.size, own.chunks, own.properties.dtype) == (entry.size, entry.chunks, entry.properties.dtype)


def test_torch_reads_the_folder_without_midepoch(folder: Path) -> None:
    found = {f"model.{name}": torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in TENSORS.items())


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    parts = json.loads((folder / "parts.json").read_text())
    result = change(parts)
    (target / "parts.json").write_text(json.dumps(parts if result is None else result))
    return target


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda parts: [parts],
    "a tensor is missing": lambda parts: parts.pop("model.a") and None,
    "no part": lambda parts: parts["model.a"].clear(),
    "half of a tensor": lambda parts: parts["model.a"][0].__setitem__(1, [3, 2]),
    "another number of axes": lambda parts: parts["model.a"][0].__setitem__(1, [12]),
    "negative": lambda parts: parts["model.a"][0].__setitem__(0, [-1, 0]),
    "huge": lambda parts: parts["model.a"][0].__setitem__(4, 2**63),
    "a truth value": lambda parts: parts["model.a"][0].__setitem__(3, True),
    "a text": lambda parts: parts["model.a"][0].__setitem__(0, "00"),
    "a part of four values": lambda parts: parts["model.a"][0].pop() and None,
    **{
        f"a file named {name!r}": lambda parts, name=name: parts["model.a"][0].__setitem__(2, name)  # type: ignore[misc]
        for name in ("../a.distcp", "/etc/passwd", "..", "", "a\0b", "a\\b", ["a"], None)
    },
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_parts_are_refused(change: Any, folder: Path, specs: dict[str, ArraySpec], tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match="parts of the tensors"):
        _metadata(changed(folder, tmp_path, change), "model", specs)


@pytest.mark.parametrize(
    "data", [b"", b"[" * 100_000, b"\xff", pickle.dumps({})], ids=["empty", "deep", "bytes", "pickle"]
)
def test_anything_but_json_is_refused(data: bytes, specs: dict[str, ArraySpec], tmp_path: Path) -> None:
    (tmp_path / "parts.json").write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match="parts of the tensors"):
        _metadata(tmp_path, "model", specs)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(ENCODABLE, max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["model.a", "x"]), inner, max_size=2),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=json_values)
def test_no_value_in_place_of_a_part_is_taken(
    value: Any, folder: Path, specs: dict[str, ArraySpec], tmp_path: Path
) -> None:
    target = changed(folder, tmp_path, lambda parts: parts.__setitem__("model.a", value))
    with pytest.raises(CheckpointDamagedError):
        _metadata(target, "model", specs)
