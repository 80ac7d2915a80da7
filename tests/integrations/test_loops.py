"""Every loop of examples/, killed with kill -9 in mid-epoch and started again, sees what one run would have seen."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

import launch
import midepoch
from forks import Forks
from launch import Program

EXAMPLES = Path(__file__).parents[2] / "examples"
DIE_AT, SAVED = 47, 40  # in the second epoch
RESUMED = f"Resumed from step {SAVED}, in epoch 1\n"


def noted(folder: Path, rank: int) -> list[tuple[int, list[int]]]:
    lines = [[int(word) for word in line.split()] for line in (folder / f"rows-{rank}.txt").read_text().splitlines()]
    return [(step, rows) for step, *rows in lines]


def uninterrupted(folder: Path, rank: int, ranks: int, ends: str) -> list[tuple[int, list[int]]]:
    ds = midepoch.from_files(folder / "data.parquet").shuffle(seed=42)
    loader = ds.loader(16 // ranks, rank=rank, world_size=ranks, last_batch=ends)
    column = "input_ids" if "input_ids" in ds.column_names else "id"
    rows = [batch[column].reshape(len(batch[column]), -1)[:, 0].tolist() for _ in range(2) for batch in loader]
    return list(enumerate(rows, 1))


@pytest.mark.parametrize(
    ("name", "ranks", "ends"),
    [
        ("ddp_torchrun", 2, "drop"),
        ("fsdp2_dcp", 2, "drop"),
        pytest.param("transformers_trainer", 1, "uneven", marks=pytest.mark.slow),  # half a minute each
        ("accelerate_loop", 1, "drop"),
        ("lightning_fit", 1, "drop"),
    ],
)
def test_rows_of_a_run_that_was_killed(
    name: str, ranks: int, ends: str, program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check(program, name, ranks, ends, tmp_path)
    if name in ("ddp_torchrun", "fsdp2_dcp", "accelerate_loop"):
        assert capfd.readouterr().out.count(RESUMED) == 1  # by one of the ranks


@pytest.mark.slow
def test_rows_of_a_run_of_jax_that_was_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(launch.program, "jax_orbax", 1, "uneven", tmp_path)  # not in a fork: it has threads
    assert RESUMED in capfd.readouterr().out


def check(program: Program, name: str, ranks: int, ends: str, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    assert program(ranks, script, str(tmp_path), "--die-at", str(DIE_AT)) != 0
    assert program(ranks, script, str(tmp_path)) == 0
    for rank in range(ranks):
        whole, seen = uninterrupted(tmp_path, rank, ranks, ends), noted(tmp_path, rank)
        assert seen[:DIE_AT] == whole[:DIE_AT]
        assert seen[DIE_AT:] == whole[SAVED:]


@pytest.mark.slow  # 20 s: 14 ranks
def test_datamodule_on_other_numbers_of_ranks(framework_forks: Forks, tmp_path: Path) -> None:
    """Lightning on 4, 2 and 8 ranks, killed in between: the global batches of 4 ranks. A checkpoint every two steps."""
    check_datamodule(framework_forks.program, tmp_path)


def check_datamodule(program: Program, tmp_path: Path) -> None:
    script, steps, found = EXAMPLES / "lightning_datamodule.py", (3, 9, 12), []
    for ranks, first, last in zip((4, 2, 8), (1, 3, 9), steps, strict=True):
        die = [] if last == steps[-1] else ["--die-at", str(last)]
        assert (program(ranks, script, str(tmp_path), *die) != 0) == bool(die)
        parts = [dict(noted(tmp_path, rank)) for rank in range(ranks)]
        found += [sorted(sum((part[step] for part in parts), [])) for step in range(first, last + (not die))]
        found = found[: last - 1] if die else found
        for rank in range(ranks):
            (tmp_path / f"rows-{rank}.txt").unlink()
    train = midepoch.from_files(tmp_path / "data.parquet").slice(None, "90%").shuffle(seed=42)
    loader = train.with_lanes(4).loader(8, last_batch="drop")
    assert found == [sorted(batch["id"].tolist()) for _ in range(2) for batch in loader]


def test_rows_of_stateful_dataloader(program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its batches depend on its workers, so they are compared with those of a whole run."""
    script, whole, killed = EXAMPLES / "stateful_dataloader.py", tmp_path / "whole", tmp_path / "killed"
    assert program(1, script, str(whole)) == 0
    assert program(1, script, str(killed), "--die-at", str(DIE_AT)) == -9
    assert program(1, script, str(killed)) == 0
    assert RESUMED in capfd.readouterr().out
    expected = noted(whole, 0)
    assert noted(killed, 0) == [*islice(expected, DIE_AT), *expected[SAVED:]]
    epoch = [row for _, rows in expected[: len(expected) // 2] for row in rows]
    assert sorted(epoch) == list(range(500))


def test_examples_are_short() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in EXAMPLES.rglob("*.py")}
    assert lines
    assert not {str(path): count for path, count in lines.items() if count >= 80}
