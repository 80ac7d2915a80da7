"""The data rank of a process in a JAX mesh. Devices of other processes are stood in for: only their number is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import midepoch
from midepoch.distributed.world import World, find_world


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "stub"


def mesh_of(processes: Any, names: tuple[str, ...]) -> Mesh:
    table = np.asarray(processes)
    devices = np.empty(table.shape, dtype=object)
    for number, place in enumerate(np.ndindex(*table.shape)):
        devices[place] = Device(number, int(table[place]))
    return Mesh(devices, names)


@pytest.mark.parametrize(
    ("processes", "names", "data", "ranks"),
    [
        ([[0, 1], [2, 3]], ("data", "model"), "data", [0, 0, 1, 1]),  # tensor parallelism over two processes
        ([[0, 1], [2, 3]], ("model", "data"), "data", [0, 1, 0, 1]),
        ([[0, 0], [1, 1], [2, 2], [3, 3]], ("data", "model"), "data", [0, 1, 2, 3]),
        ([[[0, 0], [1, 1]], [[2, 2], [3, 3]]], ("replica", "fsdp", "tensor"), ("replica", "fsdp"), [0, 1, 2, 3]),
        ([0, 0, 1, 1], ("data",), (), [0, 1]),
        ([[0, 1, 2, 3]], ("data", "model"), "data", [0, 0, 0, 0]),
    ],
)
def test_processes_share_data(
    processes: Any, names: tuple[str, ...], data: Any, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of(processes, names)
    for process, rank in enumerate(ranks):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert find_world(data_parallel=(mesh, data) if data else mesh) == World(rank, max(ranks) + 1)


def test_processes_that_overlap_in_part_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of([[0, 1], [1, 2]], ("data", "model"))
    with pytest.raises(midepoch.WorldError, match="have the same indices or none in common"):
        find_world(data_parallel=(mesh, "data"))
    monkeypatch.setattr(jax, "process_index", lambda: 7)
    with pytest.raises(
        midepoch.WorldError, match="this process is not in the mesh or process group given as data_parallel"
    ):
        find_world(data_parallel=(mesh_of([0, 1], ("data",)), "data"))
