"""The dataloader in the layouts of torchtitan's modules, as fakes. tests/stacks/test_torchtitan.py runs the real one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import midepoch

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is not None, reason="torchtitan is installed: no fakes")
SIZES = {
    "0.3": {"seq_len": 64, "local_batch_size": 4},
    "august": {"max_context_length": 64, "num_tokens_per_batch": 256},
    "september": {"max_context_length": 64, "num_tokens_per_batch": 256},
}
"""Arguments with which the trainer of each version builds a dataloader: 4 rows of 64 tokens."""


class BaseDataLoader:
    @dataclass(kw_only=True, slots=True)
    class Config:
        pass


def fake(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    return module


@pytest.fixture(params=list(SIZES))
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    version = str(request.param)
    layout = {"BaseDataLoader": BaseDataLoader}
    if version != "0.3":
        layout["TrainerBatch"] = tuple[dict[str, Any], torch.Tensor] if version == "august" else dict[str, Any]
    path = "torchtitan.components.dataloader" if version == "0.3" else "torchtitan.components.data.loader"
    parts = path.split(".")
    modules = {name: fake(name) for name in (".".join(parts[:count]) for count in range(1, len(parts)))}
    modules |= {path: fake(path, **layout), "tyro": fake("tyro", conf=fake("conf", Suppress=Annotated))}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "midepoch.integrations.torchtitan", raising=False)
    yield version
    sys.modules.pop("midepoch.integrations.torchtitan", None)


def test_a_dataloader_for_every_version(version: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 2048, (101, 65))
    pq.write_table(pa.table({"input_ids": list(rows)}), tmp_path / "data.parquet")
    cls: Any = importlib.import_module("midepoch.integrations.torchtitan").MidepochDataLoader
    ds = midepoch.from_files(tmp_path / "data.parquet")
    config = cls.Config(data=ds)
    place = {"dp_rank": 1, "dp_world_size": 2, "tokenizer": None, **SIZES[version]}
    loader = cls(config, **place)
    batches = iter(loader)
    batch = next(batches)
    inputs, labels = (batch, batch["labels"]) if version == "september" else batch
    shape = (4, 64) if version == "0.3" else (256,)
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == shape
    first = next(iter(ds.loader(4, rank=1, world_size=2, last_batch="drop")))["input_ids"]
    assert inputs["input"].reshape(4, 64).tolist() == first[:, :-1].tolist()
    assert labels.reshape(4, 64).tolist() == first[:, 1:].tolist()
    assert inputs["positions"].reshape(4, 64)[3].tolist() == list(range(64))
    extra = {"labels", "num_valid_tokens"} if version == "september" else set()
    assert set(inputs) == {"input", "positions"} | extra
    assert inputs.get("num_valid_tokens", 256) == 256
    resumed = cls(config, **place)
    resumed.load_state_dict(loader.state_dict())
    assert str(next(iter(resumed))) == str(next(batches))
    once = {"infinite": False} if version == "0.3" else {"repeat": False}
    assert len(list(cls(replace(config, **once), **place))) == 101 // 8


def test_tokens_that_are_no_rows_are_refused(version: str, tmp_path: Path) -> None:
    if version == "0.3":
        pytest.skip("it passes rows")
    cls: Any = importlib.import_module("midepoch.integrations.torchtitan").MidepochDataLoader
    with pytest.raises(ValueError, match="multiple of max_context_length=64, got 100. Change"):
        cls(cls.Config(), dp_rank=0, dp_world_size=1, tokenizer=None, max_context_length=64, num_tokens_per_batch=100)
