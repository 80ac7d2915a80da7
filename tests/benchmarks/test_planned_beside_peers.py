"""benchmarks/planned: figures count what they say, contenders deliver every row, and a killed run is resumed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmark_runs import ROOT, run

pytest.importorskip("torch")

sys.path.insert(0, str(ROOT))

from benchmarks.planned import data, figures, legs
from benchmarks.planned.contenders import CONTENDERS, Setting, installed

ROWS = 1_500


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    path = tmp_path_factory.mktemp("planned") / "ids.arrow"
    data.write_ids(path, ROWS)
    return Setting(path, ROWS, window=400)


def arrays(*batches: list[int]) -> list[figures.Rows]:
    return [np.array(batch) for batch in batches]


def test_padding_is_the_share_of_padded_batches() -> None:
    lengths = np.array([4, 2, 3, 3])
    assert figures.padding(arrays([0, 1], [2, 3]), lengths) == pytest.approx(2 / 14)
    assert figures.padding(arrays([0], [1], [2, 3]), lengths) == 0


def test_spread_is_of_the_slowest_rank() -> None:
    lengths = np.array([4, 2, 3, 3])
    found = figures.spread([arrays([0], [2]), arrays([1], [3])], lengths)
    assert (found.mean, found.total) == (pytest.approx((1 / 3 + 0) / 2), pytest.approx(7 / 6 - 1))
    squares = figures.spread([arrays([0], [2]), arrays([1], [3])], lengths, 2)
    assert squares.total == pytest.approx((16 + 9) / (10 + 9) - 1)
    varlen = figures.spread([arrays([0, 1]), arrays([2, 3])], lengths, padded=False)
    assert varlen.mean == 0


def test_randomness_sees_batches_that_come_again() -> None:
    lengths = np.arange(1, 9)
    first = arrays([0, 1], [4, 5], [2, 3], [6, 7])
    assert figures.randomness(first, first, lengths).again == 1
    assert figures.randomness(first, arrays([0, 1], [2, 4], [3, 5], [6, 7]), lengths).again == 0.5
    assert figures.randomness(sorted(first, key=lambda rows: rows[0]), first, lengths).neighbours > 0.9


def test_delivered_counts_lost_and_repeated_rows() -> None:
    assert figures.delivered(arrays([0, 1, 1], [1, 3]), 5) == (2, 2)


@pytest.mark.parametrize("name", CONTENDERS)
def test_ranks_deliver_every_row(name: str, setting: Setting) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    ranks = legs.take(name, setting, 3).ranks
    assert figures.delivered([rows for rank in ranks for rows in rank], ROWS) == (0, 0)
    if name.startswith("midepoch"):
        assert figures.padded_tokens([rows for rank in ranks for rows in rank], setting.lengths).max() <= data.BUDGET


def test_a_killed_run_is_resumed_on_other_ranks(setting: Setting) -> None:
    found = legs.resumed("midepoch, tokens", setting, (2, 3), 11)
    assert (found.result, found.error) == ((0, 0), "") and found.state_bytes < 1024
    assert legs.resumed("midepoch", setting, (2, 2), 11).exact


def test_steps_that_are_skipped_lose_rows_on_other_ranks(setting: Setting) -> None:
    first = legs.take("torch", setting, 2, 11)
    for world, lost in ((2, 0), (3, 11 * setting.batch_size)):
        second = legs.take("torch", setting, world, states=first.states)
        found = figures.delivered([*first.steps(), *second.steps()], ROWS)
        assert found.repeated == 0 and lost - setting.batch_size < found.lost <= lost


def test_a_run_that_fails_is_reported(setting: Setting) -> None:
    with pytest.raises(RuntimeError, match="KeyError"):
        legs.resumed("no such contender", setting, (2, 2), 1)


def test_all_parts_run(tmp_path: Path, python: str) -> None:
    words = ["--rows", "1000", "--first-rows", "1000", "--rounds", "1", "--seconds", "0.05", "--dir", str(tmp_path)]
    words += ["--only", "padding,planning,first,peers", "--contender", "midepoch, tokens"]
    printed = run(python, "-m", "benchmarks.planned", *words)
    for text in (
        "varlen, quadratic",
        "beyond plain",
        "resumed, 3 ranks",
        "midepoch, tokens           0 / 0;  0 / 0, exact",
    ):
        assert text in printed
    assert not list(tmp_path.iterdir())
