"""The commands on tables and tokens, which the option --format names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from commands import of_json, refused

import midepoch
from token_files import random_documents, write_megatron


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(100, dtype=np.uint16).tobytes())
    found = of_json("info", path, "--format", "tokens:uint16:8")
    assert found["rows"] == 12
    assert of_json("index", path, "--format", "tokens:uint16:8")["rows"] == 12
    assert of_json("info", path, "--format", "tokens:uint16:8", "--split", "all[:50%]")["rows"] == 6
    assert "[8, 9, 10" in json.dumps(of_json("peek", path, "--position", 1, "-n", 1, "--format", "tokens:uint16:8"))
    assert "tokens:LENGTH or tokens:DTYPE:LENGTH, got 'tokens'" in refused("info", path, "--format", "tokens")
    assert "pass --format tokens:DTYPE:LENGTH" in refused("info", path)
    assert "--split can only choose a part" in refused("info", path, "--format", "tokens:8", "--split", "train")


def test_megatron(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "data", random_documents(20, "uint16"), "uint16")
    assert of_json("info", prefix, "--format", "megatron")["rows"] == 20
    assert "pass --format megatron" in refused("info", f"{prefix}.idx")
    loader = midepoch.from_megatron(prefix).shuffle(seed=1).loader(2)
    next(loader)
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    found = of_json("plan", "--checkpoint", state, "--world-size", 2, "--batch-size", 2, "--data", prefix, "--format",
                    "megatron")  # fmt: skip
    assert found["position"] == 2
    assert "takes no value, got 'megatron:8'" in refused("info", prefix, "--format", "megatron:8")


def test_a_delta_table(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    table = tmp_path / "table"
    deltalake.write_deltalake(str(table), pa.table({"n": list(range(30))}))
    assert of_json("info", table, "--format", "delta")["rows"] == 30
    assert "pass --format delta." in refused("info", table)
    assert "takes one table, got 2 paths" in refused("info", table, table, "--format", "delta")


def test_a_lance_table(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance")
    table = tmp_path / "table.lance"
    lance.write_dataset(pa.table({"n": list(range(30))}), str(table))
    assert of_json("info", table, "--format", "lance")["rows"] == 30
    assert of_json("peek", table, "--format", "lance", "-n", 1)
    assert "pass --format lance." in refused("info", table)


def test_csv_files_with_another_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1;2\n")
    names = [each["name"] for each in of_json("info", tmp_path / "a.csv", "--format", "csv:;")["columns"]]
    assert names == ["a", "b"]
    assert "pass --format $'csv:;'." in refused("info", tmp_path / "a.csv")
    assert "delimiter must be one ASCII character" in refused("info", tmp_path / "a.csv", "--format", "csv:")
