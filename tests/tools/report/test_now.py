"""The dashboard of a run: whether it runs, how fast and how far, of what; and nothing that is not known."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import midepoch
from clock import Clock
from data import Numbers
from forks import forked
from midepoch.audit import Ledger, read_run
from midepoch.tools.report import collect
from midepoch.tools.report.now import _state, now


def look(folder: Path, clock: Clock, **changes: Any) -> dict[str, Any]:
    return now(read_run(folder, **changes), clock.time())


def test_a_run_that_runs_then_rests_then_ends(numbers: Numbers, tmp_path: Path, clock: Clock) -> None:
    loader = numbers(0, 400).with_format("numpy").loader(4, audit=tmp_path)
    for _ in range(51):
        next(loader)
        clock.now += 0.5
    clock.now -= 0.5
    found = look(tmp_path, clock)
    assert found["state"] == "running" and found["last"] == pytest.approx(clock.time(), abs=1.0)
    assert found["progress"] == pytest.approx(0.51) and found["eta"] == pytest.approx(49 * 0.5)
    assert found["rows_per_second"] == pytest.approx(8.0) and (found["batch"], found["ranks"], found["workers"]) == (
        4,
        1,
        0,
    )
    for name in ("tokens_per_second", "padding", "packing", "blocks_ready"):
        assert found[name] is None, name
    assert found["sources"] == []
    clock.now += 59
    found = look(tmp_path, clock)
    assert found["state"] == "quiet" and clock.time() - found["last"] == pytest.approx(59, abs=1.0)
    list(loader)
    assert look(tmp_path, clock)["progress"] == 1.0 and look(tmp_path, clock)["eta"] is None


@pytest.mark.parametrize(
    ("age", "pace", "gone", "state"),
    [
        (1, 0.1, False, "running"),
        (9, 0.1, None, "running"),
        (-5, 0.1, None, "running"),  # the clock of another machine
        (59, 0.1, False, "quiet"),
        (59, 0.1, None, "quiet"),
        (61, 0.1, None, "stopped"),
        (1, 0.1, True, "stopped"),
        (59, 30.0, False, "running"),  # its steps take that long
        (10_000, 0.1, False, "quiet"),
    ],
)
def test_states(age: float, pace: float, gone: bool | None, state: str) -> None:
    assert _state(age, pace, gone) == state


@pytest.mark.parametrize(("steps", "state"), [(5, "stopped"), (10, "finished")])
def test_a_run_that_was_killed(numbers: Numbers, tmp_path: Path, steps: int, state: str) -> None:
    ds = numbers(0, 100).with_format("numpy")

    def train() -> None:
        loader = ds.loader(10, audit=tmp_path)
        for _ in range(steps):
            next(loader)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(train) == -signal.SIGKILL
    (run,) = collect(tmp_path)["runs"]
    assert run["now"]["state"] == state and run["now"]["eta"] is None and run["steps"] == steps
    assert [one["state"] for one in run["now"]["by_rank"]] == ["stopped"]


def test_one_rank_of_several_stops(numbers: Numbers, tmp_path: Path, clock: Clock) -> None:
    ds = numbers(0, 400).with_format("numpy")
    loaders = [ds.loader(4, rank=rank, world_size=3, audit=Ledger(tmp_path, attempt="1")) for rank in range(2)]
    for step in range(20):
        for loader in loaders[: 1 if step > 9 else 2]:
            next(loader)
        clock.now += 3.0
    found = look(tmp_path, clock)
    states = {one["rank"]: one["state"] for one in found["by_rank"]}
    assert states == {0: "running", 1: "quiet"} and found["state"] == "quiet" and found["missing"] == [2]
    assert found["rows_per_second"] is None  # of one rank it is not known
    assert found["by_rank"][0]["rows_per_second"] == pytest.approx(4 / 3) and found["by_rank"][0]["steps"] == 20


@pytest.mark.parametrize("stop", ["first", "all", "never"])
def test_sources_of_a_mix(numbers: Numbers, tmp_path: Path, clock: Clock, stop: str) -> None:
    parts = {"web": numbers(0, 200).shuffle(seed=1), "code": numbers(200, 240).shuffle(seed=2)}
    mixed = midepoch.mix(parts, {"web": 3, "code": 1}, seed=3, stop=stop).with_format("numpy")
    loader = mixed.loader(4, audit=tmp_path)
    for _ in range(30):
        next(loader)
        clock.now += 1.0
    loader.state_dict()  # with it, the cursors are written
    found = look(tmp_path, clock)
    assert [(one["name"], one["consumed"], one["rows"], one["weight"]) for one in found["sources"]] == [
        ("web", 90, 200, 0.75),
        ("code", 30, 40, 0.25),
    ]
    assert [one["share"] for one in found["sources"]] == [0.75, 0.25]
    assert found["progress"] == {"first": 0.75, "all": 0.45, "never": None}[stop]
    left = {"first": 10, "all": 110 / 3, "never": None}[stop]
    assert found["eta"] == (None if left is None else pytest.approx(left, rel=0.1))


def test_names_of_sources(numbers: Numbers, tmp_path: Path) -> None:
    a, b, c = (numbers(first, first + 20).with_format("numpy") for first in (0, 20, 40))
    inner = midepoch.mix({"x": a, "y": b}, {"x": 1, "y": 1})
    for folder, ds, names, weights in (
        ("named", midepoch.mix({"text": inner, "code": c}, {"text": 1, "code": 3}), ["text/x", "text/y", "code"], [0.125, 0.125, 0.75]),
        ("files", midepoch.mix([a, b]), ["0-20.arrow", "20-40.arrow"], [0.5, 0.5]),
        ("twice", midepoch.mix([a, a.shuffle(seed=1)]), ["source 0", "source 1"], [0.5, 0.5]),
        ("concat", midepoch.concat([a, b]), ["0-20.arrow", "20-40.arrow"], [None, None]),
    ):  # fmt: skip
        next(ds.loader(2, audit=tmp_path / folder))
        (run,) = collect(tmp_path / folder)["runs"]
        assert [one["name"] for one in run["now"]["sources"]] == names == run["data"]["sources"]
        assert [one["weight"] for one in run["now"]["sources"]] == weights


def test_a_source_that_is_iterated_again_counts_each_time(numbers: Numbers, tmp_path: Path) -> None:
    mixed = midepoch.mix([numbers(0, 90), numbers(90, 100)], stop="all").with_format("numpy").with_lanes(2)
    loader = mixed.loader(4, audit=tmp_path)
    for _ in range(12):
        next(loader)
    loader.state_dict()
    (run,) = collect(tmp_path)["runs"]
    assert [one["consumed"] for one in run["now"]["sources"]] == [24, 24]
    assert run["now"]["progress"] == pytest.approx(24 / 90)


def test_padding_and_packing(docs: midepoch.Dataset, tmp_path: Path, clock: Clock) -> None:
    def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
        import numpy as np

        mask = np.arange(8)[None, :] < np.array([2, 6] * (len(rows) // 2))[:, None]
        return {"input_ids": np.ones(mask.shape, np.int64), "attention_mask": mask}

    loader = docs.select_columns(["id"]).loader(10, collate_fn=padded, audit=tmp_path / "padded")
    packed = docs.select_columns(["tokens"]).with_format("numpy").pack(64, "tokens", strategy="best_fit")
    packs = packed.loader(4, audit=tmp_path / "packed")
    for _ in range(12):
        next(loader)
        next(packs)
        clock.now += 1.0
    found = look(tmp_path / "padded", clock)
    assert (
        found["padding"] == pytest.approx(0.5)
        and found["tokens_per_second"] == pytest.approx(40)
        and found["packing"] is None
    )
    found = look(tmp_path / "packed", clock)
    assert found["progress_at_least"] and found["eta"] is None  # all are of one group: how far it is cannot be known
    assert found["padding"] is None and 0.5 < found["packing"] <= 1.0 and not found["tokens_are_padded"]
    assert found["tokens_per_second"] == pytest.approx(4 * 64 * found["packing"], rel=0.05)


def test_the_rate_at_the_end_of_an_epoch_is_no_spike(numbers: Numbers, tmp_path: Path, clock: Clock) -> None:
    """A step of an epoch's end that was ready at once, and a rest of an epoch of two steps: neither is a speed."""
    ds = numbers(0, 640).shuffle(seed=1).with_format("numpy")
    loader = ds.loader(64, audit=Ledger(tmp_path, attempt="1"))
    for step in range(1, 10):
        next(loader)
        clock.now += 0.014 if step == 9 else 0.365
    state = loader.state_dict()
    list(loader)
    again = ds.loader(32, audit=Ledger(tmp_path, attempt="2"))
    again.load_state_dict(state)
    for _ in range(2):
        next(again)
        clock.now += 0.014
    assert next(again, None) is None
    for _ in range(20):
        next(again)
        clock.now += 0.1825
    (run,) = collect(tmp_path)["runs"]
    rates = [point[1] for curve in run["speed"] for point in curve["points"]]
    assert run["exact"] and len(rates) >= 4 and all(150 < rate < 220 for rate in rates), rates


def test_speed_is_one_curve_for_each_start_and_rank(numbers: Numbers, tmp_path: Path, clock: Clock) -> None:
    loader = numbers(0, 40).with_format("numpy").loader(4, audit=tmp_path)
    for _ in range(3):
        for _ in loader:
            clock.now += 0.5
        clock.now += 100  # a validation, which is not its time
    (run,) = collect(tmp_path)["runs"]
    (curve,) = run["speed"]
    assert {point[4] for point in curve["points"]} == {0, 1, 2}
    assert all(point[1] == pytest.approx(8.0) for point in curve["points"])


def test_a_start_that_left_its_pass_and_continued_is_one_piece(numbers: Numbers, tmp_path: Path) -> None:
    loader = numbers(0, 40).shuffle(seed=1).with_format("numpy").loader(4, audit=tmp_path)
    for _ in range(2):
        for step, _ in enumerate(loader):
            if step == 2:
                break
    (run,) = collect(tmp_path)["runs"]
    assert [(piece["from"], piece["to"]) for piece in run["epochs"][0]["pieces"]] == [(0, 24)] and len(
        run["passes"]
    ) == 2
