"""Weights that are set during a run, and schedules that change at a resume, belong to one run in the ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import midepoch
from midepoch import Phase, Schedule
from midepoch.audit import Ledger, WeightChange, read_run
from midepoch.cli.app import app

SCHEDULE = Schedule(
    [
        Phase("warm-up", {"web": 1}, steps=4, global_batch_size=10),
        Phase("main", {"web": 0.5, "code": 0.5}, steps=10),
        Phase("anneal", steps=4, final_weights={"code": 1}),
    ]
)


@pytest.fixture
def sources(make_files: Any) -> dict[str, midepoch.Dataset]:
    return {
        name: midepoch.from_files(make_files([300])).shuffle(seed=seed) for seed, name in enumerate(("web", "code"))
    }


def take(loader: midepoch.Loader, steps: int) -> None:
    for _ in range(steps):
        next(loader)


def shown(folder: Path) -> list[str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["audit", str(folder)])
    assert result.exit_code == 0, result.output
    return [line for line in result.output.splitlines() if line.startswith("weights")]


def test_weights_that_are_set_are_listed_and_the_run_stays_one(sources: dict[str, Any], tmp_path: Path) -> None:
    mixed = midepoch.mix(sources, {"web": 0.7, "code": 0.3}, seed=1, stop="never")
    first = mixed.loader(10, audit=Ledger(tmp_path, attempt="1"))
    take(first, 5)
    first.set_weights({"web": 1, "code": 4})
    take(first, 5)
    state = first.state_dict()
    first.set_weights({"web": 1})  # lost in a crash
    take(first, 3)
    second = mixed.loader(10, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    take(second, 2)
    second.set_weights([0.5, 0.5])
    take(second, 1)
    second.state_dict()  # which records the cursors of all steps
    run = read_run(tmp_path)
    assert run.exact and run.steps == 13 and len(run.streams) == 1
    assert run.epochs[0].once == 130 and run.epochs[0].repeated == 0
    assert run.weight_changes == [
        WeightChange(6, 0, 50, None, {"web": 0.2, "code": 0.8}),
        WeightChange(13, 0, 120, None, {"web": 0.5, "code": 0.5}),
    ]
    assert shown(tmp_path) == [
        "weights from step 6 on (epoch 0, position 50): web 20.0 %, code 80.0 %",
        "weights from step 13 on (epoch 0, position 120): web 50.0 %, code 50.0 %",
    ]
    recorded = json.loads(CliRunner().invoke(app, ["audit", str(tmp_path), "--json"]).output)
    assert [one["step"] for one in recorded["loaders"][0]["weight_changes"]] == [6, 13]


@pytest.mark.parametrize("kind", ["shuffle", "best fit", "tokens"])
def test_a_window_after_a_filter_is_completed_with_the_weights_before(tmp_path: Path, kind: str) -> None:
    """A filter between the mix and a window draws any number of rows for it."""
    rows = [{"id": range(a, a + 80), "input_ids": [[i + 1] * (1 + i % 6) for i in range(a, a + 80)]} for a in (0, 80)]
    sources = {name: midepoch.from_dict(each).shuffle(seed=2) for name, each in zip("ab", rows, strict=True)}

    def make(**options: Any) -> midepoch.Loader:
        kept = midepoch.mix(sources, [1, 1], seed=1, stop="first").filter(lambda row: row["id"] % 7 != 2)
        if kind == "shuffle":
            return kept.shuffle(seed=1, window=10).loader(3, **options)
        if kind == "best fit":
            return kept.pack(16, strategy="best_fit", window=10).loader(1, **options)
        return kept.loader(max_tokens=14, bucket_window=10, **options)

    before, loader = list(make()), make(audit=tmp_path)
    batches = iter(loader)
    next(batches)
    loader.set_weights({"a": 1, "b": 3})
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    left = [batch["input_ids"] for batch in batches]
    assert str(left[0]) == str(before[1]["input_ids"]) and str(left) != str(
        [batch["input_ids"] for batch in before[1:]]
    )
    assert str(left) == str([batch["input_ids"] for batch in resumed])
    epoch = read_run(tmp_path).epochs[0]
    assert epoch.complete and epoch.once + epoch.dropped == 160


def test_sources_without_names_are_listed_by_number(sources: dict[str, Any], tmp_path: Path) -> None:
    loader = midepoch.mix(list(sources.values()), [1, 1], seed=1).loader(10, audit=tmp_path)
    loader.set_weights([1, 3])
    take(loader, 2)
    assert read_run(tmp_path).weight_changes == [WeightChange(1, 0, 0, None, {"0": 0.25, "1": 0.75})]


def test_weights_in_a_phase_and_a_changed_schedule(sources: dict[str, Any], tmp_path: Path) -> None:
    first = midepoch.mix(sources, SCHEDULE, seed=1).loader(audit=Ledger(tmp_path, attempt="1"))
    take(first, 6)
    first.set_weights({"web": 0.1, "code": 0.9})
    take(first, 2)
    state = first.state_dict()
    *before, anneal = SCHEDULE.phases
    longer = replace(SCHEDULE, phases=[*before, replace(anneal, steps=8)])
    second = midepoch.mix(sources, longer, seed=1).loader(audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    assert len(list(second)) == 14
    run = read_run(tmp_path)
    assert run.exact and run.steps == 22 and len(run.streams) == 1
    assert run.weight_changes == [WeightChange(7, 0, 60, "main", {"web": 0.1, "code": 0.9})]
    assert shown(tmp_path) == ["weights from step 7 on (epoch 0, position 60, phase main): web 10.0 %, code 90.0 %"]
    take(second, 5)  # of the next epoch, in which the schedule has its own weights
    run = read_run(tmp_path)
    assert len(run.weight_changes) == 1
    before, after = (one.first.header.mix for one in run.generations[-2:])
    assert before is not None and before.weights_at(80) == (0.1, 0.9)  # only another phase was changed
    assert after is not None and after.weights_at(45) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("position", "phase", "weights"),
    [(0, 0, (1.0, 0.0)), (40, 1, (0.1, 0.9)), (139, 1, (0.1, 0.9)), (140, 2, (0.5, 0.5)), (10**6, 2, (0.0, 1.0))],
)
def test_the_weights_at_a_position(
    sources: dict[str, Any], tmp_path: Path, position: int, phase: int, weights: tuple[float, float]
) -> None:
    loader = midepoch.mix(sources, SCHEDULE, seed=1).loader(audit=tmp_path)
    take(loader, 5)
    loader.set_weights({"web": 0.1, "code": 0.9})
    take(loader, 1)
    mix = read_run(tmp_path).generations[-1].first.header.mix
    assert mix is not None and mix.phase_at(position) == phase
    assert mix.weights_at(position) == pytest.approx(weights, abs=0.02)


def test_weights_that_nobody_set_are_not_listed(sources: dict[str, Any], tmp_path: Path) -> None:
    take(midepoch.mix(sources, [1, 1], seed=1).loader(10, audit=tmp_path), 2)
    run = read_run(tmp_path)
    assert run.weight_changes == [] and run.generations[0].first.header.mix is None
