"""Ranks that load different things are refused at the first step, whatever differs; groups of a mesh agree by
themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from differing_job import DIFFERING
from test_torchrun import HERE, read

from forks import forked
from launch import Launch
from midepoch.distributed import keyvalue
from midepoch.distributed.keyvalue import differences


@pytest.fixture(scope="module")
def data(make_files: Callable[..., list[str]]) -> tuple[str, str]:
    return str(Path(make_files([17, 23])[0]).parent), str(Path(make_files([16, 24])[0]).parent)


def test_ranks_that_differ_are_refused(data: tuple[str, str], tmp_path: Path, launched: Launch) -> None:
    launched(2, str(HERE / "differing_job.py"), str(tmp_path), *data)
    told = [read(tmp_path / f"{rank}.json") for rank in range(2)]
    for name in DIFFERING:
        field = name.removeprefix("uneven ").removeprefix("stream: ").removeprefix("mix: ")
        field = field.removeprefix("stream beside a dataset: ").removesuffix(" of another kind")
        for rank in range(2):
            text = told[rank][name]
            assert text.startswith("the ranks do not load the same data: "), (name, rank, text)
            assert f"{field} is " in text and "on rank 0 and " in text and "on rank 1" in text, (name, rank, text)
    assert [one["alike"] for one in told] == ["nothing was raised"] * 2
    assert [one["shifted dataset"] for one in told] == [[6, 6], [6]]
    assert [one["shifted stream"] for one in told] == [[2, 6], [2]]
    for one in told:
        assert len(one["waiting"]) == 3
        for text in one["waiting"]:
            assert text.startswith("the ranks do not load the same data and wait for each other: rows is 36 "), text
    assert all("scope is rows on rank 0 and window on rank 1" in one["saved"] for one in told), told


@pytest.mark.parametrize("ends", ["pad", "drop"])
def test_data_ranks_agree_beside_tensor_parallelism(
    data: tuple[str, str], tmp_path_factory: pytest.TempPathFactory, launched: Launch, ends: str
) -> None:
    out = tmp_path_factory.getbasetemp() / "mesh"
    if not out.exists():
        out.mkdir()
        launched(4, str(HERE / "differing_job.py"), str(out), *data)
    told = [read(out / f"{rank}.json") for rank in range(4)]
    assert sum("seed is " in one["twins"] for one in told) >= 2, [one["twins"] for one in told]
    steps = [one[ends] for one in told]
    assert steps[0] == steps[1] and steps[2] == steps[3], "tensor-parallel ranks get the same"
    assert len(steps[0]) == len(steps[2]) and len(steps[0]) % 6 == 0
    times = len(steps[0]) // 6
    for number in range(6):
        rows = [
            row for one in (steps[0], steps[2]) for step in one[number * times : (number + 1) * times] for row in step
        ]
        assert len(set(rows)) == len(rows)
        assert sorted(rows) == list(range(0, 40, 2)) if ends == "pad" else 12 <= len(rows) <= 20


def test_differences_show_where_long_values_differ() -> None:
    long = "map(f) → " * 40
    found = differences(
        {0: {"pipeline": f"{long}filter(a)", "rows": 3}, 2: {"pipeline": f"{long}filter(b)", "rows": 3}}
    )
    assert "filter(a) on rank 0" in found and "filter(b) on rank 2" in found and len(found) < 400
    assert differences({0: {"epoch": 1}, 1: {"epoch": 1, "position": 3}}) == ""


def test_a_name_that_is_deleted_meanwhile_is_not_waited_for() -> None:
    """A rank that continues deletes its note while another one looks at it."""

    def look() -> bool:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        other = keyvalue._store().clone()  # another connection, as another process has it
        done = False

        def write() -> None:
            while not done:
                other.set("midepoch/name", "value")
                other.delete_key("midepoch/name")

        writer = Thread(target=write)
        writer.start()
        found = {keyvalue.get("name") for _ in range(5000)}
        done = True
        writer.join()
        keyvalue.put("name", "value")
        return found == {None, "value"} and keyvalue.get("name") == "value" and keyvalue.get("other") is None

    assert forked(look) == 0


def test_stores_that_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's store of etcd, which has no other methods than these."""
    import torch.distributed as dist

    class Plain(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, bytes] = {}

        def set(self, name: str, value: str) -> None:
            self.values[name] = value.encode()

        def get(self, name: str) -> bytes:
            return self.values[name]

        def check(self, names: list[str]) -> bool:
            return all(name in self.values for name in names)

    store = Plain()
    monkeypatch.setattr(keyvalue, "_store", lambda: store)
    assert keyvalue.get("name") is None and keyvalue.first_value("name", "first") is None
    keyvalue.put("name", "value")
    assert keyvalue.get("name") == "value" and keyvalue.all_set(["name"])
    monkeypatch.setattr(keyvalue, "_store", lambda: dist.Store())
    assert keyvalue.get("name") is None
