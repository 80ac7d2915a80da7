"""Batches in shared memory: none is overwritten while anybody has it, and little memory is used."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import midepoch
from data import write_parquet
from forks import forked
from midepoch.loader import transport

ROWS = 400


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    return midepoch.from_files(write_parquet(tmp_path / "a.parquet", range(ROWS), 50)).shuffle(seed=3)


def image(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full((3, 32, 32), row["id"] % 251, np.uint8), "id": row["id"]}


def holds(batch: dict[str, Any]) -> bool:
    return bool((batch["x"] == (batch["id"] % 251).reshape(-1, 1, 1, 1)).all())


def mapped() -> list[str]:
    """The mappings of this process that are shared memory of midepoch."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:midepoch" in line]


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at /proc")


@pytest.mark.parametrize("kind", ["torch", "numpy", "arrow"])
@pytest.mark.parametrize("step", ["map", "flat_map"])
def test_all_batches_that_are_kept_are_correct(kind: str, step: str, ds: midepoch.Dataset) -> None:
    data = ds.map(image) if step == "map" else ds.flat_map(lambda row: [image(row)])
    if kind == "arrow":
        data = data.map(lambda row: {"x": row["x"].reshape(-1).tolist(), "id": row["id"]})
    loader = data.with_format(kind).loader(8, num_workers=2, prefetch=2)
    kept = list(loader)
    loader.close()
    gc.collect()
    if kind == "arrow":
        kept = [{name: np.stack(batch[name].to_numpy()) for name in ("x", "id")} for batch in kept]
        kept = [{"x": batch["x"].reshape(-1, 3, 32, 32), "id": batch["id"]} for batch in kept]
    assert len(kept) == ROWS // 8
    assert all(map(holds, kept))
    assert sorted(int(i) for batch in kept for i in batch["id"]) == list(range(ROWS))


@linux
def test_a_part_of_a_batch_keeps_its_memory(ds: midepoch.Dataset) -> None:
    """A row, a view of a view, an array of a tensor: whatever is left of a batch is never overwritten."""
    before = len(mapped())
    loader = ds.map(image).loader(8, num_workers=1, prefetch=1)
    parts: list[tuple[int, Any]] = []
    views: list[Callable[[Any], Any]] = [
        lambda x: x[3],
        lambda x: x[3].reshape(-1)[5:],
        lambda x: x.numpy()[3, 1],
        lambda x: memoryview(x.numpy()[3, 1:2]),
        lambda x: pa.array(x.numpy()[3].reshape(-1)),
    ]
    for i, batch in enumerate(loader):
        parts.append((int(batch["id"][3]), views[i % len(views)](batch["x"])))
        del batch
    loader.close()
    for number, part in parts:
        assert set(np.asarray(part).reshape(-1).tolist()) == {number % 251}
    del parts, part
    gc.collect()
    assert len(mapped()) == before, "and it is given back with the last part"


@linux
def test_memory_is_bounded_and_used_again(ds: midepoch.Dataset) -> None:
    loader = ds.map(image).loader(8, num_workers=2, prefetch=2, persistent_workers=True)
    addresses = set()
    for _ in range(3):
        for batch in loader:
            addresses.add(batch["x"].data_ptr() // 4096)
            assert holds(batch)
    assert len(mapped()) == 2, "one mapping for each worker"
    assert len(addresses) <= 2 * (2 + transport.held_per_worker(2)), "and no batch was copied"
    loader.close()


def growing(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full((1 + row["id"]) * 50, row["id"]), "id": row["id"]}


def test_memory_grows_with_the_batches(tmp_path: Path) -> None:
    ds = midepoch.from_files(write_parquet(tmp_path / "a.parquet", range(200), 50)).map(growing)
    kept = list(ds.loader(1, num_workers=2, prefetch=3))
    for batch in kept:
        number = int(batch["id"])
        assert batch["x"].shape == (1, (1 + number) * 50)
        assert (batch["x"] == number).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_keeps_the_batches_that_it_has(ds: midepoch.Dataset) -> None:
    """The memory is shared with it: what it holds must not change when this process goes on."""
    loader = ds.map(image).loader(8, num_workers=1, prefetch=1)
    batches = iter(loader)
    held = [next(batches)]
    numbers = held[0]["id"].tolist()
    go, told = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.read(go, 1)
            status = 0 if holds(held[0]) and held[0]["id"].tolist() == numbers else 1
        finally:
            os._exit(status)
    held.clear()
    for _ in range(12):
        assert holds(next(batches))
    os.write(told, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader.close()


VALUES: dict[str, Callable[[int], Any]] = {
    "bfloat16": lambda i: torch.full((64, 64), i, dtype=torch.bfloat16),
    "bool": lambda i: torch.full((200, 200), bool(i % 2)),
    "complex": lambda i: torch.full((64, 64), i, dtype=torch.complex64),
    "transposed": lambda i: torch.arange(20000).reshape(100, 200).T + i,
    "empty": lambda i: torch.zeros(0, 5) + i,
    "gradient": lambda i: torch.full((64, 64), float(i), requires_grad=True),
    "sparse": lambda i: torch.eye(5).to_sparse() * (i + 1),
    "strings": lambda i: np.array([str(i)] * 5000),
    "objects": lambda i: {"deep": [(np.full(9000, i), "text", None)]},
    "swapped": lambda i: np.full(9000, i, ">i4"),
    "fortran": lambda i: np.asfortranarray(np.arange(20000).reshape(100, 200) + i),
}


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_values_of_any_kind_arrive_as_they_were(kind: str, ds: midepoch.Dataset) -> None:
    def collated(rows: list[Any]) -> list[Any]:
        return [(name, row["id"], make(row["id"])) for row in rows for name, make in VALUES.items()]

    loader = ds.take(40).loader(2, num_workers=2, worker_type=kind, collate_fn=collated)
    rows = [row for batch in loader for row in batch]
    assert len(rows) == 40 * len(VALUES)
    for name, number, value in rows:
        expected = VALUES[name](number)
        if isinstance(expected, torch.Tensor):
            assert value.dtype == expected.dtype
            assert value.shape == expected.shape
            assert torch.equal(value.detach().to_dense(), expected.detach().to_dense())
        elif isinstance(expected, np.ndarray):
            assert value.dtype == expected.dtype
            assert np.array_equal(value, expected)
        else:
            assert np.array_equal(value["deep"][0][0], expected["deep"][0][0])
            assert value["deep"][0][1:] == ("text", None)


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_intervals_arrive_as_they_were(kind: str, tmp_path: Path) -> None:
    intervals = [pa.MonthDayNano([i, -i, i]) for i in range(8)] + [None]
    table = pa.table({"a": intervals, "b": [[each] for each in intervals]})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    ds = midepoch.from_files(tmp_path / "a.arrow").with_format(kind)
    delivered = [dict(row) for row in ds]
    assert [row for batch in ds.loader(3, num_workers=1, collate_fn=list) for row in batch] == delivered
    assert [row["a"] for row in delivered] == intervals
    assert [row["b"][0] for row in delivered] == intervals


def test_without_shared_memory_batches_go_through_the_pipe(
    ds: midepoch.Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(size: int) -> int:
        raise OSError(28, "No space left on device")

    log = tmp_path / "log"

    def run() -> bool:
        logging.basicConfig(filename=str(log), force=True)
        monkeypatch.setattr(transport, "unnamed_file", full)
        kept = list(ds.map(image).loader(8, num_workers=2, multiprocessing_context="fork"))
        return len(kept) == ROWS // 8 and all(map(holds, kept))

    assert forked(run) == 0
    said = re.findall(r"no shared memory for a batch of [\d,]+ bytes \(.*No space left.*\)", log.read_text())
    assert len(said) == 2, "once for each worker"


def test_a_device_needs_something_to_move(ds: midepoch.Dataset) -> None:
    for kind in ("numpy", "python", "arrow"):
        with pytest.raises(midepoch.MidepochError, match=f"moves tensors, but the format of the batches is '{kind}'"):
            ds.with_format(kind).loader(8, device="meta")
