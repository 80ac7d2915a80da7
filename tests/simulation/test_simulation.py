"""Seeds of the simulator, and the simulator itself: it repeats a history exactly, and finds bugs that are planted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from simulation.history import folder_in_memory, uninterrupted
from simulation.ledgers import audited, plan_of
from simulation.plans import draw
from simulation.planted import PLANTED, RARE, SOON
from simulation.running import Simulator, shrink

SEEDS = range(7_000_000, 7_000_030)
"""About 3 s. ``scripts/simulate --count N --from SEED`` runs more."""
WITHIN = 100
"""Histories in which a planted bug is found. Those in RARE need up to 10,000, and are slow tests."""


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with Simulator() as running:
        yield running


def test_no_history_breaks_a_rule(simulator: Simulator) -> None:
    outcomes = [simulator.run(seed) for seed in SEEDS]
    assert [outcome.report() for outcome in outcomes if outcome.finding] == []
    assert sum(outcome.struck for outcome in outcomes) > 0.8 * len(outcomes)


def test_a_history_is_a_function_of_its_seed(simulator: Simulator) -> None:
    """Also in other processes, with other orders of sets, and after other histories."""
    seeds = SEEDS[:4]
    script = (
        "from simulation.running import Simulator\n"
        f"with Simulator() as one: print(*(one.run(seed).digest for seed in {list(seeds)}))"
    )
    found = " ".join(simulator.run(seed).digest for seed in seeds)
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found and os.environ.get("PYTHONHASHSEED") != "1"


def test_the_disk_keeps_what_was_synced_and_loses_the_rest() -> None:
    """Of a file and a name without a sync, a loss of power keeps anything; of others, everything."""
    from simulation.cluster import Cluster
    from simulation.disk import Disk

    contents: set[tuple[str, bytes]] = set()
    for seed in range(40):
        with folder_in_memory() as folder:
            disk = Disk(folder, Cluster(seed))
            for name in ("safe", "unsafe"):
                number = disk.open(folder / name, os.O_WRONLY | os.O_CREAT)
                disk.pwrite(number, b"content", 0)
                if name == "safe":
                    disk.fsync(number)
                    disk.fsync(disk.open(folder, os.O_RDONLY))
                disk.close(number)
            disk.lose_power()
            assert (folder / "safe").read_bytes() == b"content"
            unsafe = folder / "unsafe"
            contents.add(("there", unsafe.read_bytes()) if unsafe.exists() else ("gone", b""))
    assert {("gone", b""), ("there", b""), ("there", b"content")} <= contents


def _finds(simulator: Simulator, name: str, within: int) -> int | None:
    """Return the first seed that finds a planted bug."""
    uninterrupted.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        PLANTED[name](patch)
        seeds = (SOON.get(name, 0), *range(within))
        found = next((seed for seed in seeds if simulator.run(seed).finding), None)
    uninterrupted.cache_clear()
    return found


@pytest.mark.parametrize("name", [name for name in PLANTED if name not in RARE])
def test_a_planted_bug_is_found(name: str, simulator: Simulator) -> None:
    assert _finds(simulator, name, WITHIN) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_a_planted_bug_that_rarely_shows_is_found(name: str, simulator: Simulator) -> None:
    assert _finds(simulator, name, 10_000) is not None


def test_a_failure_is_shrunk(simulator: Simulator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        PLANTED["a short write"](patch)
        outcome = next(found for seed in range(100) if (found := simulator.run(seed)).finding)
        smaller = shrink(simulator, outcome)
    assert smaller.finding and len(str(smaller.plan)) <= len(str(outcome.plan))


def test_faults_of_all_kinds_are_drawn() -> None:
    plans = [draw(seed) for seed in range(2000)]
    kinds = {fault.kind for plan in plans for start in plan.starts for fault in start.faults}
    assert kinds == {
        "kill",
        "power",
        "interrupt",
        "error",
        "jump",
        "throttle",
        "lost answer",
        "twice",
        "slow",
        "worker",
    }
    assert all(not start.faults and start.exit is None for start in (plan.starts[-1] for plan in plans))
    assert {feature for plan in plans for feature in plan.features} >= {"lease", "schedule", "tokens, planned"}


def test_a_changed_ledger_is_found(simulator: Simulator) -> None:
    """Of positions, every change of a step. In lanes some are not found."""
    seeds = range(10)
    accused, found, missed = audited(simulator, seeds)
    assert accused == 0, "a clean run"
    assert set(found["cut"]) <= {"accused", "refused"} and sum(found["cut"].values()) == len(seeds)
    for name in ("swap", "remove", "mix"):
        assert missed[name] == [], name
    for name in ("drop", "forge"):
        assert [seed for seed in missed[name] if plan_of(seed).pipeline == "rows"] == [], name


def test_a_seed_is_replayed(python: str) -> None:
    """By the command, which says what came of it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([python, "-m", "simulation", "5"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "all rules hold" in done.stdout, done.stdout + done.stderr
