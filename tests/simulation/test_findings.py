"""Histories that broke a rule once. Each is the smallest one that showed it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from simulation.plans import Exit, Plan, StartPlan
from simulation.running import Simulator


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator() as running:
        yield running


PLAN = Plan(1, (), "rows", (), "uneven", remote=False, keep=None, epochs=1, edit_at=0)
ONE_STEP = StartPlan(1, 1, every=1, exit=Exit("preempt", 1))
TOGETHER = StartPlan(2, 1, every=4, connected=True)


@pytest.mark.parametrize("last", ["drop", "uneven"])
@pytest.mark.parametrize("pipeline", ["mix", "filter", "pack"])
@pytest.mark.parametrize("feature", ["exclude rows", "exclude steps", "set_weights"])
def test_ranks_whose_lanes_are_at_different_places_can_be_edited(
    feature: str, pipeline: str, last: str, simulator: Simulator
) -> None:
    """Their positions were compared: those of their own lanes, which differ."""
    plan = replace(PLAN, features=(feature,), pipeline=pipeline, starts=(ONE_STEP, TOGETHER), last=last, edit_at=2)
    assert simulator.run(plan).finding == ""


@pytest.mark.parametrize(("pipeline", "steps"), [("pack", 7), ("rows", 11), ("window", 10)])
def test_a_rank_without_a_batch_of_the_rest_is_in_the_same_pass(
    pipeline: str, steps: int, simulator: Simulator
) -> None:
    """Its second pass was compared with the first one of other ranks."""
    starts = (replace(TOGETHER, exit=Exit("preempt", steps)), replace(TOGETHER, world=3, size=3))
    assert simulator.run(replace(PLAN, pipeline=pipeline, starts=starts, epochs=2)).finding == ""
