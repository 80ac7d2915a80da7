"""Histories that broke a rule once. Each is the smallest one that showed it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace

import pytest

from simulation.cluster import Fault
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


@pytest.mark.parametrize("pipeline", ["rows", "filter", "pack"])
def test_a_sample_that_is_the_last_batch_of_its_epoch_is_trained_on(pipeline: str, simulator: Simulator) -> None:
    """With positions, ``set_epoch`` began the epoch again. With lanes, the ledger counted the batch twice."""
    whole = simulator.run(replace(PLAN, pipeline=pipeline, starts=(replace(ONE_STEP, size=4, exit=None),)))
    steps = {"rows": 6, "filter": 6, "pack": 4}[pipeline]
    starts = (StartPlan(1, 4, every=1, exit=Exit("preempt", steps - 1)), StartPlan(1, 4, every=1, looks=True))
    assert whole.finding == simulator.run(replace(PLAN, pipeline=pipeline, starts=starts)).finding == ""


@pytest.mark.parametrize("features", [(), ("lease",), ("steps_per_epoch",)])
@pytest.mark.parametrize("pipeline", ["rows", "filter"])
def test_a_run_comes_back_to_a_branch_that_it_left(
    pipeline: str, features: tuple[str, ...], simulator: Simulator
) -> None:
    """A start goes back to its first checkpoint and saves nothing: the next restores the latest of the first one."""
    starts = (
        StartPlan(1, 2, every=2, exit=Exit("preempt", 7)),
        StartPlan(1, 3, every=50, older=0.0, exit=Exit("exit", 4)),
        StartPlan(1, 2, every=4),
    )
    assert simulator.run(replace(PLAN, pipeline=pipeline, features=features, starts=starts)).finding == ""


def test_a_run_comes_back_to_the_end_of_an_epoch(simulator: Simulator) -> None:
    """The state of the next epoch claims no units of its own. It was taken for one of the branch in progress."""
    features = ("exclude steps", "lease", "steps_per_epoch")
    starts = (
        StartPlan(1, 3, every=2),
        StartPlan(1, 3, every=50, older=0.0, exit=Exit("kill", 3)),
        StartPlan(1, 3, every=5),
    )
    assert simulator.run(replace(PLAN, features=features, last="drop", starts=starts)).finding == ""


def test_an_interrupt_while_a_sample_is_collected(simulator: Simulator) -> None:
    """Python drops it. The pass was not noted as left then, so that the next one continued after the sample."""
    fault = Fault("interrupt", 0, 1, "ledger", verb="truncate")
    starts = (StartPlan(1, 3, every=1, looks=True, faults=(fault,)), StartPlan(1, 3, every=3))
    plan = replace(PLAN, features=("exclude steps", "provenance"), pipeline="filter", last="drop", starts=starts)
    outcome = simulator.run(plan)
    assert outcome.finding == "" and "interrupt at truncate" in outcome.report()


@pytest.mark.parametrize("pipeline", ["rows", "filter", "mix", "pack"])
def test_a_start_that_only_finds_the_end_of_an_epoch_is_a_branch(pipeline: str, simulator: Simulator) -> None:
    """Its state named the branch before, in which the outputs that are too few for a batch were not dropped yet."""
    begin = StartPlan(1, 4, every=2, exit=Exit("preempt", {"pack": 3}.get(pipeline, 5)))
    starts = (begin, replace(begin, chooses=True, exit=None), replace(begin, every=3, exit=None))
    plan = replace(PLAN, pipeline=pipeline, last="drop", starts=starts, edit_at=1)
    found = [replace(plan, starts=starts[:1] + (starts[1],) * more + starts[2:]) for more in range(1, 4)]
    assert [simulator.run(each).finding for each in found] == [""] * 3


@pytest.mark.parametrize(("features", "last", "second"), [((), "uneven", 2), (("lease", "steps_per_epoch"), "drop", 1)])
def test_a_run_comes_back_to_a_branch_of_ranks_at_different_steps(
    features: tuple[str, ...], last: str, second: int, simulator: Simulator
) -> None:
    """Ranks may have different numbers of steps, and save in different passes: the audit took none of them."""
    whole = StartPlan(2, 2, every=2 if features else 4, connected=bool(features))
    for older, later in zip((0.0, 0.2, 0.4, 0.6, 0.8), (0.3, 0.5, 0.7, 0.3, 0.5), strict=True):
        back = replace(whole, world=second, every=50, older=older, exit=Exit("kill", 1))
        for again in (None, later):
            starts = (whole, back, replace(whole, world=1, every=5, older=again))
            plan = replace(
                PLAN, pipeline="filter", features=features, last=last, epochs=2 - bool(features), starts=starts
            )
            assert simulator.run(plan).finding == "", plan


def test_a_rank_without_a_batch_of_the_last_step_takes_a_sample(simulator: Simulator) -> None:
    """It found none, and ``set_epoch`` began the epoch again: on this rank alone."""
    ranks = StartPlan(3, 3, every=1, exit=Exit("preempt", 1))
    plan = replace(PLAN, features=("exclude rows", "exclude steps"), pipeline="window")
    plan = replace(plan, starts=(ranks, replace(ranks, every=5, looks=True, exit=None)))
    assert simulator.run(plan).finding == ""


def test_a_sync_that_failed_and_a_loss_of_power_leave_the_checkpoint_that_was_saved_before(
    simulator: Simulator,
) -> None:
    """The step was seen, so the next start removed the copy that it had replaced. Then its name was lost, too."""
    starts = (
        StartPlan(1, 4, every=1),
        StartPlan(1, 3, every=4, faults=(Fault("error", 0, 4, "checkpoint", errno.EIO, verb="sync"),)),
        StartPlan(1, 2, every=4, faults=(Fault("power", 0, 3, "checkpoint", verb="rename"),)),
        StartPlan(1, 3, every=3),
    )
    plan = replace(PLAN, starts=starts, keep=2)
    outcomes = [simulator.run(replace(plan, seed=seed)) for seed in range(40)]
    assert [outcome.finding for outcome in outcomes if outcome.finding] == []
    assert sum("power at rename" in outcome.report() for outcome in outcomes) > 20


def test_a_rank_that_has_acknowledged_all_waits_for_the_leases_of_others(simulator: Simulator) -> None:
    """After a restore it went on to the next epoch, and no state could hold that and the leases of this one."""
    ranks = StartPlan(2, 2, every=4, connected=True, tolerant=False, exit=Exit("preempt", 4))
    starts = (ranks, replace(ranks, every=1, exit=None))
    plan = replace(PLAN, features=("exclude rows", "lease"), pipeline="pack", last="drop", starts=starts, remote=True)
    assert [simulator.run(replace(plan, seed=seed)).finding for seed in range(8)] == [""] * 8


def test_a_rank_without_a_lease_of_the_rest_begins_the_next_epoch_of_the_data(simulator: Simulator) -> None:
    """It said that the epoch has no batch."""
    starts = (StartPlan(3, 1, every=1, connected=True, exit=Exit("kill", 4)), StartPlan(2, 3, every=4, connected=True))
    plan = replace(PLAN, features=("lease", "steps_per_epoch", "tokens at run time"), last="drop", starts=starts)
    assert [simulator.run(replace(plan, seed=seed)).finding for seed in range(8)] == [""] * 8


@pytest.mark.parametrize("feature", ["set_weights", "exclude rows"])
def test_a_state_saved_where_a_changed_run_found_the_end(feature: str, simulator: Simulator) -> None:
    """The outputs that were too few for a batch were not those of that state, and counted as lost."""
    whole = StartPlan(3, 3, every=1, connected=True)
    starts = (whole, StartPlan(1, 3, every=3, older=0.5, connected=True))
    plan = replace(PLAN, features=(feature,), pipeline="mix", starts=starts, last="drop", keep=1, edit_at=2)
    assert [simulator.run(replace(plan, seed=seed)).finding for seed in range(4)] == [""] * 4


def test_a_start_that_forgets_to_restore_spares_the_steps_also_if_they_could_not_be_listed(
    simulator: Simulator,
) -> None:
    """One listing failed, and what could not be seen was not spared for the rest of the start."""
    starts = (
        StartPlan(1, 4, every=2),
        StartPlan(1, 4, every=1, forgets=True, faults=(Fault("throttle", 0, 2, "store", count=2),)),
        StartPlan(1, 4, every=4),
    )
    plan = replace(PLAN, starts=starts, remote=True, keep=2)
    assert [simulator.run(replace(plan, seed=seed)).finding for seed in range(5)] == [""] * 5


def test_leases_of_planned_batches_are_taken_again_with_workers(simulator: Simulator) -> None:
    """What was left of the plan could not be sent to workers."""
    starts = (StartPlan(1, 2, every=4, workers=2, pauses=True),)
    plan = replace(PLAN, features=("lease", "tokens, planned"), starts=starts)
    assert [simulator.run(replace(plan, seed=seed)).finding for seed in range(8)] == [""] * 8


UNREADABLE = [Fault("error", 0, at, "checkpoint", errno.EIO, reads=True) for at in range(4, 14)]


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_start_that_forgets_to_restore_spares_the_steps_also_if_one_could_not_be_read(
    fault: Fault, simulator: Simulator
) -> None:
    """A step whose manifest could not be read for a moment was not spared."""
    starts = (
        StartPlan(1, 2, every=4),
        StartPlan(1, 2, every=4, forgets=True, faults=(fault,), exit=Exit("exit", 5)),
        StartPlan(1, 2, every=4),
    )
    assert simulator.run(replace(PLAN, pipeline="pack", starts=starts, keep=1)).finding == ""


def test_a_start_that_forgets_to_restore_spares_the_steps_also_if_its_first_save_failed(simulator: Simulator) -> None:
    """Only the next one could look for them, which was after the last of them."""
    throttled = Fault("throttle", 0, 2, "store")
    starts = (
        StartPlan(1, 4, every=1, exit=Exit("preempt", 5)),
        StartPlan(1, 4, every=3, forgets=True, faults=(throttled,)),
        StartPlan(1, 4, every=5),
    )
    plan = replace(PLAN, pipeline="filter", starts=starts, remote=True, keep=1)
    assert [simulator.run(replace(plan, seed=seed)).finding for seed in range(4)] == [""] * 4


@pytest.mark.parametrize("at", [94, 95, 96])
def test_the_latest_step_is_the_latest_also_if_the_one_before_could_not_be_read(at: int, simulator: Simulator) -> None:
    """It got the number of an earlier commit, and the next start continued with the step before it."""
    fault = Fault("error", 0, at, "checkpoint", errno.EIO, reads=True)
    starts = (StartPlan(1, 3, every=3, faults=(fault,), tolerant=False), StartPlan(1, 3, every=4, saves_first=True))
    plan = replace(PLAN, features=("set_weights",), pipeline="mix", starts=starts, keep=1, edit_at=2)
    assert simulator.run(plan).finding == ""


@pytest.mark.parametrize("pipeline", ["rows", "window", "filter"])
def test_ranks_restore_in_the_same_process_after_the_last_batch_of_one_of_them(
    pipeline: str, simulator: Simulator
) -> None:
    """One rank had no batch of that pass, another one had and left it: their passes were numbered differently."""
    # Five batches are left of 23 rows with rows=…; with a filter, the lanes of the ranks differ by themselves.
    sizes = {"rows": (5, 5), "window": (5, 5), "filter": (2, 2)}[pipeline]
    for step in range(2, 6):
        starts = (
            StartPlan(2, sizes[0], every=2, exit=Exit("preempt", step), connected=True),
            StartPlan(2, sizes[1], every=step + 1, returns=step + 1, connected=True),
        )
        plan = replace(PLAN, pipeline=pipeline, starts=starts, epochs=2)
        assert [simulator.run(replace(plan, seed=seed)).finding for seed in range(2)] == [""] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_the_end_of_an_epoch_that_was_left_is_restored_in_the_same_process(world: int, simulator: Simulator) -> None:
    """In lanes, the audit did not find the branch of a state that had left that epoch, and said that rows were lost."""
    first = StartPlan(4, 1, every=3, faults=(Fault("interrupt", 0, 68, "store"),), workers=1, connected=True)
    # It is interrupted when it looks for another batch, and saves at the end of the epoch.
    second = StartPlan(1, 4, every=4, faults=(Fault("interrupt", 0, 29),), workers=1, connected=True)
    last = StartPlan(world, 2, every=3, older=0.665, returns=3, workers=1, connected=True)
    plan = replace(PLAN, seed=3100070261, pipeline="filter", last="pad", epochs=2, remote=True)
    assert simulator.run(replace(plan, starts=(first, second, last))).finding == ""


def test_leases_of_an_epoch_that_was_left_are_counted(simulator: Simulator) -> None:
    """As above: 4 of 22 rows were counted."""
    first = StartPlan(1, 3, every=1, faults=(Fault("interrupt", 0, 1, "ledger"),), returns=5)
    second = replace(first, size=2, every=2, faults=(Fault("interrupt", 0, 16, "ledger"),), saves_first=True)
    starts = (first, second, StartPlan(1, 2, every=3, older=0.3, returns=3))
    plan = replace(PLAN, seed=3100064275, features=("lease", "provenance"), pipeline="window", starts=starts)
    assert simulator.run(replace(plan, epochs=2, remote=True, keep=1)).finding == ""


def test_a_start_with_nothing_left_to_do_continues_the_branch_that_it_restored(simulator: Simulator) -> None:
    """A pass without a batch was no branch, and the audit stayed with a start that had forgotten to restore."""
    whole = StartPlan(2, 3, every=2, tolerant=False, connected=True)
    starts = (
        replace(whole, exit=Exit("preempt", 5, 1), older=0.64, chooses=True, returns=3),
        replace(whole, every=4, exit=Exit("exit", 4), chooses=True, returns=5, tolerant=True),
        replace(whole, exit=Exit("kill", 3, 1), looks=True, forgets=True, tolerant=True),
        replace(whole, world=1, every=4, returns=3, tolerant=True),
    )
    plan = replace(PLAN, seed=3100077143, features=("set_weights",), pipeline="mix", starts=starts, last="drop", keep=2)
    assert simulator.run(replace(plan, remote=True, has_model=True, in_background=True)).finding == ""


@pytest.mark.parametrize("returns", [None, 5])
def test_the_last_epoch_of_planned_tokens_is_over(returns: int | None, simulator: Simulator) -> None:
    """Its batches had not been counted, so that what ``last_batch="drop"`` leaves out was to come."""
    start = StartPlan(3, 2, every=3, returns=returns, window=4)
    plan = replace(PLAN, seed=3600005893, features=("tokens, planned",), last="drop", starts=(start,), epochs=2)
    assert simulator.run(replace(plan, remote=True)).finding == ""


def test_excluded_rows_of_a_pass_that_was_taken_back_count_once(simulator: Simulator) -> None:
    """Those of the next step counted, too, if the pass had come to the end of the epoch."""
    whole = StartPlan(1, 4, every=1, connected=True)
    last = replace(whole, every=3, saves_first=True)
    starts = (whole, replace(whole, every=2, forgets=True), last, replace(last, older=0.36, chooses=True))
    plan = replace(PLAN, features=("exclude rows",), pipeline="filter", starts=starts, last="pad", keep=2, edit_at=1)
    assert simulator.run(plan).finding == ""
