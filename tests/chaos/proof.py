"""What must hold after a trial: by the log of row ids, and by the ledger, each on its own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from chaos.streams import StreamPipeline
from chaos.trial import EPOCHS, Logs, Pipeline, Start
from midepoch.audit import read_run


class Verdict(NamedTuple):
    """Outputs delivered in the history, outputs delivered again after a crash, starts that got anywhere."""

    rows: int
    again: int
    starts: int


class _Log(NamedTuple):
    restored: int
    lanes: int
    steps: dict[int, tuple[int, list[Any]]]


def prove(pipeline: Any, starts: list[Start], folder: Path, seed: int) -> Verdict:
    """Raises AssertionError with what was lost, repeated, or told differently by the ledger."""
    logs = read_logs(folder, starts)
    if isinstance(pipeline, StreamPipeline):
        return Verdict(*pipeline.prove(logs, folder), logs.starts)
    kept = _check_order(pipeline, logs.history, starts, folder, logs.lanes)
    _check_ledger(logs.history, folder, logs.made - kept, starts, seed)
    return Verdict(kept, logs.made - kept, logs.starts)


def read_logs(folder: Path, starts: list[Start]) -> Logs:
    begun = [(start, logs) for start in starts if (logs := _logs(folder, start))]
    for start, logs in begun:
        assert len({log.restored for log in logs.values()}) == 1, f"ranks of {start} restored different steps"
    history: dict[int, tuple[Start, dict[int, tuple[int, list[Any]]]]] = {}
    made = 0
    for start, logs in begun:
        (restored,) = {log.restored for log in logs.values()}
        history = {step: found for step, found in history.items() if step <= restored}
        for rank, log in logs.items():
            for step, (epoch, outputs) in log.steps.items():
                made += len(outputs)
                history.setdefault(step, (start, {}))[1][rank] = (epoch, outputs)
    assert sorted(history) == list(range(1, len(history) + 1)), "a step is missing"
    (lanes,) = {log.lanes for log in begun[-1][1].values()}
    return Logs(history, made, len(begun), lanes)


def _logs(folder: Path, start: Start) -> dict[int, _Log]:
    found = {}
    for rank in range(start.world):
        path = folder / f"log-{start.number:04}-{rank}"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        entries = [json.loads(line) for line in lines]
        if entries:
            steps = {entry["step"]: (entry["epoch"], entry["outputs"]) for entry in entries if "step" in entry}
            found[rank] = _Log(entries[0]["from"], entries[0]["lanes"], steps)
    return found


def _check_order(pipeline: Pipeline, history: dict[int, Any], starts: list[Start], folder: Path, lanes: int) -> int:
    """Every rank had at every step its rows of an uninterrupted run: they are dealt from rank 0 on."""
    ds = pipeline.open(folder / "data")
    if pipeline.lanes is None and pipeline.kind == "parquet":
        ds = ds.with_lanes(lanes)  # where blocks are decoded, the first start chooses
    kept = at = epoch = 0
    order = _order(ds, 0)
    assert len(set(order)) == len(order) == len(ds)
    for step in sorted(history):
        start, ranks = history[step]
        if next(iter(ranks.values()))[0] != epoch:
            _check_rest(len(order) - at, [start, history[step - 1][0]], epoch)
            at, epoch = 0, epoch + 1
            order = _order(ds, epoch)
            assert len(set(order)) == len(order) == len(ds)
        stop = min(at + start.world * start.batch, len(order))
        for rank in range(start.world):
            expected = order[at + rank : stop : start.world]
            found_epoch, ids = ranks.get(rank, (epoch, []))
            assert found_epoch == epoch, f"step {step}: rank {rank} is in epoch {found_epoch}, not {epoch}"
            assert ids == expected, f"step {step} of {start}, rank {rank}: {ids} instead of {expected}"
            kept += len(ids)
        at = stop
    assert epoch == EPOCHS - 1
    _check_rest(len(order) - at, [starts[-1]], epoch)
    return kept


def _check_rest(left: int, starts: list[Start], epoch: int) -> None:
    """Rows may be left over at the end of an epoch only if they are no whole batch of a start that drops such."""
    dropped = any(start.last_batch == "drop" and left < start.world * start.batch for start in starts)
    assert left == 0 or dropped, f"epoch {epoch}: {left} rows lost"


def _order(ds: Any, epoch: int) -> list[int]:
    ds.set_epoch(epoch)
    return [int(row["id"]) for row in ds]


def _check_ledger(history: dict[int, Any], folder: Path, again: int, starts: list[Start], seed: int) -> None:
    run = read_run(folder)
    assert run.exact, [epoch for epoch in run.epochs if not epoch.exact]
    assert all(epoch.complete for epoch in run.epochs), run.epochs
    assert run.steps == len(history), (run.steps, len(history))
    assert not run.problems, run.problems
    # The ledger is written as a batch is handed over, the log by who gets it: a rank may die in between.
    most = again + sum(start.world * start.batch for start in starts)
    assert again <= sum(epoch.again for epoch in run.epochs) <= most
    for step in random.Random(seed).sample(sorted(history), min(5, len(history))):
        start, ranks = history[step]
        found: dict[int, list[int]] = {rank: [] for rank in range(start.world)}
        for one in run.rows_of_step(step):
            found[one.rank].append(int(run.order.source.in_source(_array(one.row))[0]))
            assert step in [other.step for other in run.steps_of_row(one.row)]
        assert found == {rank: ranks.get(rank, (0, []))[1] for rank in range(start.world)}


def _array(row: int) -> Any:
    import numpy as np

    return np.array([row])
