"""benchmarks/resume.py: lost and repeated rows are counted as they are, with the real loader and real ranks."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

import midepoch
from benchmark_runs import ROOT

pytest.importorskip("torch")
pytest.importorskip("datasets")
pytest.importorskip("rich")

sys.path.insert(0, str(ROOT))

from benchmarks import data
from benchmarks.resuming import Topology, cases, launch

ROWS = 1_152


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> launch.Data:
    found = launch.Data(tmp_path_factory.mktemp("data"), ROWS / data.TEXT_ROWS)
    data.load(found.data_dir, found.scale)
    return found


def ranks_in_turn(dataset: launch.Data, change: Callable[[dict[str, object]], object]) -> cases.Run:
    """All ranks of a leg in this process; `change` is applied to each state that is saved."""
    rows = midepoch.from_files(list(data.load(dataset.data_dir, dataset.scale).text.arrow)).shuffle(seed=1)

    def run(topology: Topology, states: list[bytes], steps: int | None) -> launch.Leg:
        batches, saved = [], []
        for rank in range(topology.world_size):
            loader = rows.loader(topology.batch_size, rank=rank, world_size=topology.world_size)
            if states and (state := pickle.loads(states[0])):
                loader.load_state_dict(state)
            batches.append([batch["id"].tolist() for batch in islice(loader, steps)])
            saved.append(pickle.dumps(change(loader.state_dict())))
        return launch.Leg(batches, saved, 0.0, [])

    return run


def test_exact_resumes_lose_nothing(dataset: launch.Data) -> None:
    outcomes = cases.measure(ranks_in_turn(dataset, lambda state: state), ROWS)
    assert set(outcomes) == {cases.UNINTERRUPTED, *(case.name for case in cases.CASES)}
    assert {(outcome.lost, outcome.repeated, outcome.error) for outcome in outcomes.values()} == {(0, 0, "")}
    assert [name for name, outcome in outcomes.items() if outcome.exact] == ["same settings", "same settings, odd step"]


def test_a_state_that_is_not_loaded_repeats_rows(dataset: launch.Data) -> None:
    outcomes = cases.measure(ranks_in_turn(dataset, lambda state: None), ROWS)
    assert str(outcomes["ranks 2 → 3"]) == f"0 / {ROWS // 2}"
    assert str(outcomes["same settings"]) == f"0 / {ROWS // 2}, other order"
    assert str(outcomes[cases.UNINTERRUPTED]) == "0 / 0"


def test_a_state_of_one_rank_ahead_loses_rows(dataset: launch.Data) -> None:
    position = "position"

    def ahead(state: dict[str, object]) -> dict[str, object]:
        assert isinstance(state[position], int)
        later = state[position] + 48
        return {**state, position: later, "cursor": [[0, later]]}

    outcomes = cases.measure(ranks_in_turn(dataset, ahead), ROWS, [cases.CASES[0], cases.CASES[6]])
    assert str(outcomes["same settings"]) == "48 / 0, other order"
    assert str(outcomes["ranks 2 → 3 → 2"]) == "96 / 0"


def test_ids_that_do_not_exist_are_an_error() -> None:
    assert cases.count([0, 0, 2, 1, 2, 2], 5) == (2, 3)
    with pytest.raises(ValueError, match=r"ids must be in \[0, 5\), got \[5\]"):
        cases.count([0, 5], 5)


def test_the_first_error_of_a_rank_ends_a_leg(dataset: launch.Data) -> None:
    with pytest.raises(launch.LegError, match="ValueError: contender must be one of midepoch"):
        launch.run_leg("nobody", dataset, Topology(1, 0, 24), states=[], steps=1)


@pytest.mark.slow
def test_real_ranks(dataset: launch.Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in processes of their own, and three after them: every row once, and no process is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # named in the arguments of every rank and worker
    two, three = Topology(2, 1, 24), Topology(3, 0, 24)
    steps = ROWS // two.global_batch // 2
    before = launch.run_leg("midepoch", dataset, two, states=[], steps=steps, save=True, following=True)
    after = launch.run_leg("midepoch", dataset, three, states=before.states, steps=None)
    assert [len(rank) for rank in before.batches] == [steps] * 2
    assert cases.count(before.ids() + after.ids(), ROWS) == (0, 0)
    assert set(before.following) <= {row for rank in after.batches for row in rank[0]}
    assert before.first > 0
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running
