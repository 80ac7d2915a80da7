"""Worker threads: the errors, the end and the generators are those of worker processes."""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midepoch
from data import write_parquet
from forks import forked
from midepoch.errors import MapError, MidepochError, WorkerError
from midepoch.testing import same
from pairs import covering

ROWS = 200


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    return midepoch.from_files(write_parquet(tmp_path / "a.parquet", range(ROWS), 50)).shuffle(seed=3)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("midepoch-worker")]


def failing(number: int, error: BaseException) -> Any:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == number:
            raise error
        return {"twice": 2 * row["id"]}

    return fails


class Odd(Exception):
    """An error that cannot be pickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")
        self.lock = threading.Lock()


ERRORS = [ValueError("bad"), StopIteration(), SystemExit(3), KeyboardInterrupt(), Odd(1, 2)]


@pytest.mark.parametrize(
    ("error", "step", "kind"), covering(ERRORS, ["map", "filter"], ["process", "thread"], names=(repr, None, None))
)
def test_errors_come_after_the_good_batches_before_them(
    error: BaseException, step: str, kind: str, ds: midepoch.Dataset
) -> None:
    order = [row["id"] for row in ds]
    function = failing(order[103], error)
    data = ds.map(function) if step == "map" else ds.filter(lambda row: bool(function(row)))
    context = "fork" if kind == "process" else None  # the error is no part of the dataset that is sent
    loader = data.loader(10, num_workers=3, worker_type=kind, multiprocessing_context=context)
    seen: list[int] = []
    with pytest.raises((MapError, WorkerError)) as caught:
        for batch in loader:
            seen += batch["id"].tolist()
    assert seen == order[: len(seen)]
    assert len(seen) >= (100 if step == "map" else 0)
    assert isinstance(caught.value, MapError if isinstance(error, Exception) else WorkerError)
    assert loader.position == len(seen)
    loader.close()
    assert not threads()


def test_threads_end_with_the_epoch_unless_persistent(ds: midepoch.Dataset) -> None:
    mapped = ds.map(lambda row: {"twice": 2 * row["id"]})
    loader = mapped.loader(10, num_workers=3, worker_type="thread")
    assert len(list(loader)) == ROWS // 10
    assert not threads()
    with mapped.loader(10, num_workers=3, worker_type="thread", persistent_workers=True) as loader:
        first, second = list(loader), list(loader)
        assert len(threads()) == 3
        assert not same(first, second)
    assert not threads()
    next(iter(loader := mapped.loader(10, num_workers=2, worker_type="thread")))
    del loader
    gc.collect()
    assert not threads()


def test_a_break_does_not_wait_for_all_that_was_prefetched(ds: midepoch.Dataset) -> None:
    calls: list[int] = []

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["id"])
        time.sleep(0.001)
        return row

    loader = ds.map(slow).loader(10, num_workers=2, worker_type="thread", prefetch=8)
    for _ in loader:
        break
    loader.close()
    made = len(calls)
    time.sleep(0.1)
    assert len(calls) == made, "nothing runs after close()"
    assert not threads()


def test_a_fork_has_workers_of_its_own(ds: midepoch.Dataset) -> None:
    loader = ds.map(lambda row: {"twice": 2 * row["id"]}).loader(10, num_workers=2, worker_type="thread")
    running = iter(loader)
    next(running)
    second = list(ds.loader(10))[1]["id"].tolist()

    def both() -> bool:
        with pytest.raises(MidepochError, match="from which this one was forked"):
            for _ in range(100):
                next(running)
        return next(iter(loader))["id"].tolist() == second  # a pass that an error has ended was no look

    assert forked(both) == 0
    assert len(list(running)) == ROWS // 10 - 1


def noise(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "a": torch.rand(3),
        "b": torch.empty(2).uniform_(5, 6),
        "c": torch.randint(100, (1,)),
        "d": torch.randperm(5),
        "e": torch.zeros(4).normal_(),
    }


def rarely(row: dict[str, Any]) -> dict[str, Any]:
    return {"a": torch.rand(1) if row["id"] % 50 == 7 else torch.zeros(1)}


@pytest.mark.parametrize("function", [noise, rarely])
def test_draws_from_torch_are_those_of_processes_and_leave_the_callers_alone(
    function: Any, ds: midepoch.Dataset
) -> None:
    found = {}
    for kind in ("process", "thread"):
        torch.manual_seed(11)
        loader = ds.map(function).loader(10, num_workers=3, worker_type=kind)
        mine, batches = [], []
        for batch in loader:
            batches.append(batch)
            if function is noise:  # found in the first rows; later ones cost the caller's generator some numbers once
                mine.append(float(torch.rand(1)))
        found[kind] = (batches, mine)
    assert same(found["process"], found["thread"])


def test_draws_that_all_threads_share_are_refused(ds: midepoch.Dataset) -> None:
    for function, name in (
        (lambda row: {"x": random.random()}, "random"),
        (lambda row: {"x": np.random.rand()}, r"numpy\.random"),
    ):
        with pytest.raises(MidepochError, match=rf"draws from the global generator of {name}, which all threads share"):
            next(iter(ds.map(function).loader(10, num_workers=2, worker_type="thread")))
    with pytest.raises(
        MidepochError, match=r"torch\.rand_like draws random numbers that no generator can be given for"
    ):
        like = lambda row: {"x": torch.rand_like(torch.zeros(2)) + torch.rand(1)}  # noqa: E731
        next(iter(ds.map(like).loader(10, num_workers=2, worker_type="thread")))


def test_late_draws_from_shared_generators_are_noticed(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    last = [row["id"] for row in ds][-1]
    late = lambda row: {"x": random.random() if row["id"] == last else 0.0}  # noqa: E731
    with caplog.at_level(logging.WARNING, "midepoch"):
        list(ds.map(late).loader(10, num_workers=1, worker_type="thread"))
    assert len([r for r in caplog.records if "the global generator of random has changed" in r.getMessage()]) == 1


def test_the_type_is_checked(ds: midepoch.Dataset) -> None:
    with pytest.raises(ValueError, match="worker_type must be one of 'auto', 'process', 'thread', got 'threads'"):
        ds.loader(10, num_workers=2, worker_type="threads")
    with pytest.raises(ValueError, match="multiprocessing_context is for worker processes"):
        ds.loader(10, num_workers=2, worker_type="thread", multiprocessing_context="fork")


def test_a_process_exits_while_threads_work(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", range(ROWS), 50)
    script = f"""
import midepoch, time, numpy as np
def slow(row):
    time.sleep(0.01)
    return {{"x": np.zeros(20000)}}
ds = midepoch.from_files({str(path)!r}).map(slow)
kept = [next(iter(ds.loader(4, num_workers=2, worker_type=kind))) for kind in ("thread", "process")]
batches = iter(ds.loader(4, num_workers=2, worker_type="thread"))
kept.append(next(batches))
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def beta(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "x": torch.distributions.Beta(1.0, 2.0).sample(),
        "y": torch.binomial(torch.tensor([5.0]), torch.tensor([0.5])),
    }


def seeds_itself(row: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(row["id"])
    return {"x": torch.rand(1)}


def layer(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.nn.functional.gumbel_softmax(torch.ones(3))}


def test_draws_from_torch_that_cannot_be_replaced_are_refused(ds: midepoch.Dataset) -> None:
    found = []
    for kind in ("process", "thread"):
        torch.manual_seed(11)
        found.append(list(ds.map(beta).loader(10, num_workers=2, worker_type=kind)))
    assert same(*found)
    for function in (seeds_itself, layer):
        state = torch.get_rng_state()
        with pytest.raises(MidepochError, match="draws from the global generator of torch, which all threads share"):
            next(iter(ds.map(function).loader(10, num_workers=2, worker_type="thread")))
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_collate_fn_that_draws_is_refused(draw: Any, ds: midepoch.Dataset) -> None:
    collate = lambda rows: {"x": [draw() for _ in rows]}  # noqa: E731
    with pytest.raises(MidepochError, match="collate_fn draws from the global generator of"):
        next(iter(ds.loader(10, num_workers=2, worker_type="thread", collate_fn=collate)))


def test_the_trial_leaves_no_trace(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    first = [row["id"] for row in ds][2]

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == first:
            raise ValueError("bad")
        return row

    with caplog.at_level(logging.WARNING, "midepoch"):
        loader = ds.map(fails, on_error="skip").loader(10, num_workers=2, worker_type="thread")
        assert sum(len(batch["id"]) for batch in loader) == ROWS - 1
    assert loader.skipped == 1
    assert len([r for r in caplog.records if "bad" in r.getMessage()]) == 1
    with pytest.raises(WorkerError, match="was stopped by SystemExit"):
        list(ds.map(failing(first, SystemExit(0))).loader(10, num_workers=2, worker_type="thread"))
