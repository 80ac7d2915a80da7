"""Rows that the ledger names for a step, without provenance: all that its outputs are of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import midepoch
from midepoch.audit import read_run
from midepoch.errors import DataNotFoundError


def source(number: int, count: int) -> midepoch.Dataset:
    """Rows whose tokens name the source and the row: 1,000 × source + row."""
    lengths = [1 + (7 * row + number) % 9 for row in range(count)]
    columns = {"input_ids": [[1000 * number + row] * length for row, length in enumerate(lengths)], "length": lengths}
    return midepoch.from_dict(columns).shuffle(seed=number + 1)


def keeps(row: dict[str, Any]) -> bool:
    return bool(row["input_ids"][0] % 3 != 1)


def token_count(row: dict[str, Any]) -> int:
    return len(row["input_ids"])


def rows_only(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [[int(token) for token in row["input_ids"] if token >= 0] for row in rows]


def mixed(*parts: midepoch.Dataset, stop: str = "all") -> midepoch.Dataset:
    return midepoch.mix(parts, [3, 1, 1][: len(parts)], seed=4, stop=stop)


BEST_FIT = {"strategy": "best_fit", "pad": -1, "window": 4}
PIPELINES: dict[str, Callable[[], midepoch.Dataset]] = {
    "window of a mix": lambda: mixed(source(0, 17), source(1, 11)).shuffle(seed=5, window=7).with_lanes(2),
    "packed mix": lambda: mixed(source(0, 17), source(1, 11)).pack(16, pad=-1).with_lanes(2),
    "packed mix of filters": lambda: mixed(source(0, 40).filter(keeps), source(1, 7)).pack(8, pad=-1),
    "concatenation in best fit": lambda: midepoch.concat([source(0, 18).filter(keeps), source(1, 11)]).pack(
        16, **{**BEST_FIT, "window": 10}
    ),
    "window of packs": lambda: source(0, 40).pack(8, pad=-1).shuffle(seed=8, window=3),
    "window of best fit": lambda: source(0, 40).pack(8, **BEST_FIT).shuffle(seed=8, window=3),
    "mix of best fit": lambda: mixed(source(0, 40).pack(8, **BEST_FIT), source(1, 9).pack(8, **BEST_FIT)),
}


def delivered(ds: midepoch.Dataset, folder: Path, **options: Any) -> dict[int, set[tuple[int, int]]]:
    """By step, the sources and rows of what came in two epochs, with a break in the first."""
    loader = ds.loader(collate_fn=rows_only, audit=folder, **{"batch_size": 1, **options})
    found = {}
    for most in (5, 1000, 1000):
        for _, batch in zip(range(most), loader, strict=False):
            found[loader.steps] = {divmod(token, 1000) for output in batch for token in output}
    loader.close()
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_all_rows_of_a_step_are_named(name: str, tmp_path: Path) -> None:
    check_named(delivered(PIPELINES[name](), tmp_path), tmp_path)


def test_rows_of_several_passes_over_a_small_source_are_named(tmp_path: Path) -> None:
    ds = mixed(source(0, 12).filter(keeps), source(1, 4), source(2, 2)).with_lanes(1)
    check_named(delivered(ds, tmp_path, batch_size=30), tmp_path)


def test_all_rows_of_a_batch_by_tokens_are_named(tmp_path: Path) -> None:
    options = {"batch_size": None, "max_tokens": 20, "length": token_count, "bucket_window": 8}
    check_named(delivered(PIPELINES["window of a mix"](), tmp_path, **options), tmp_path)


def check_named(came: dict[int, set[tuple[int, int]]], folder: Path) -> None:
    run, unknown = read_run(folder), 0
    assert run.exact and run.steps == len(came)
    for step, rows in came.items():
        try:
            named = {(one.source, one.row) for one in run.rows_of_step(step)}
        except DataNotFoundError:  # of the last groups of an epoch
            unknown += 1
            continue
        assert rows <= named, f"step {step}: {sorted(rows - named)} are not named"
    assert unknown < len(came) / 4


def test_rows_of_a_group_are_refused_before_its_end(tmp_path: Path) -> None:
    ds = source(0, 40).filter(keeps).shuffle(seed=3, window=20).with_lanes(1)
    loader = ds.loader(4, collate_fn=rows_only, audit=tmp_path)
    steps = iter(loader)
    next(steps), next(steps)
    loader.state_dict()
    with pytest.raises(DataNotFoundError, match=r"rows of step 1 are not known.*provenance=True"):
        read_run(tmp_path).rows_of_step(1)
    for _ in range(4):
        next(steps)
    loader.state_dict()
    assert len(read_run(tmp_path).rows_of_step(1)) >= 20


def test_a_source_that_had_no_output_in_a_step_is_not_named(tmp_path: Path) -> None:
    came = delivered(PIPELINES["mix of best fit"](), tmp_path)
    run = read_run(tmp_path)
    for step in [step for step in came if step < 20]:
        assert {one.source for one in run.rows_of_step(step)} == {number for number, _ in came[step]}


def test_an_excluded_row_counts_once_if_a_mix_iterates_its_source_again(tmp_path: Path) -> None:
    ds = midepoch.mix({"a": source(0, 40), "b": source(1, 5)}, [1, 1], seed=4, stop="all").with_lanes(1)
    loader = ds.loader(3, collate_fn=rows_only, audit=tmp_path)
    loader.exclude(rows={"a": [1, 2], "b": [3]})
    assert len([output for batch in loader for output in batch]) > 60
    (epoch,) = read_run(tmp_path).epochs
    assert (epoch.rows, epoch.once, epoch.excluded) == (45, 42, 3) and epoch.complete
