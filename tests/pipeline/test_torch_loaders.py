"""Pipelines in lanes under torch's loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from midepoch.errors import CheckpointMismatchError
from midepoch.testing import assert_resumes_exactly

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital.*"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


SLOW = pytest.mark.slow


def collate(rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([int(row["n"]) for row in rows])


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], midepoch.Dataset]]:
    folder = tmp_path_factory.mktemp("streams")
    first, second = (
        family.write(folder / name, np.random.default_rng(len(name)), rows, True)
        for name, rows in (("a", 60), ("bb", 40))
    )

    def kept() -> midepoch.Dataset:
        found: midepoch.Dataset = midepoch.from_files(first).shuffle(seed=1).filter(family.keep_most)
        return found

    return {
        "filter": kept,
        "pack": lambda: kept().pack(8, "tokens").map(family.numbered_pack).shuffle(seed=3, window=5),
        "mix": lambda: midepoch.mix([kept(), midepoch.from_files(second).shuffle(seed=2)], [2, 1], stop="all"),
    }


@pytest.mark.parametrize(("workers", "drop"), [(4, True), (4, False), (1, True)])
def test_a_dataloader_that_drops_a_batch_of_each_worker_is_warned_of(tmp_path: Path, workers: int, drop: bool) -> None:
    ds = midepoch.from_dict({"n": range(1000)})
    log, handler = logging.getLogger("midepoch"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        options: dict[str, Any] = {"num_workers": workers, "collate_fn": collate, "multiprocessing_context": "fork"}
        delivered = sum(map(len, torch.utils.data.DataLoader(ds, 128, drop_last=drop, **options)))
    finally:
        log.removeHandler(handler)
        handler.close()
    told = (tmp_path / "log").read_text()
    assert delivered == {(4, True): 512, (4, False): 1000, (1, True): 896}[workers, drop]
    assert told.count("Use ds.loader(batch_size, num_workers=4, drop_last=True)") == (workers == 4 and drop)


# pack has a filter, and tests/test_conformance.py resumes the rows of all of them at every moment.
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=() if (name, workers) in (("pack", 0), ("pack", 2), ("mix", 2)) else SLOW)
        for name in ("filter", "pack", "mix")
        for workers in (0, 2, 3)
    ],
)
def test_stateful_dataloader(name: str, workers: int, streams: dict[str, Callable[[], midepoch.Dataset]]) -> None:
    def make() -> StatefulDataLoader:
        return StatefulDataLoader(streams[name](), batch_size=5, num_workers=workers, collate_fn=collate)

    if workers == 2:  # a pool of workers takes 0.2 s: one epoch, in its middle and near its end
        assert_resumes_exactly(make, epochs=1, steps=[1, 9], tail=5)
    else:
        assert_resumes_exactly(make, steps=[1, 8, 9] if workers else [0, 1, 4, 6, 8, 9, 10, 12], tail=5)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_another_epoch_than_the_first(
    workers: int, named: bool, streams: dict[str, Callable[[], midepoch.Dataset]]
) -> None:
    def make() -> tuple[midepoch.Dataset, StatefulDataLoader]:
        stream = streams["filter"]()
        return stream, StatefulDataLoader(stream, batch_size=5, num_workers=workers, collate_fn=collate)

    stream, loader = make()
    stream.set_epoch(3)
    passing = iter(loader)
    for _ in range(4):
        next(passing)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in passing]
    stream, loader = make()
    loader.load_state_dict(state)
    if named:  # as a training loop does that names every epoch
        stream.set_epoch(3)
    assert [batch.tolist() for batch in loader] == rest
    stream.set_epoch(4)
    assert len({n for batch in loader for n in batch.tolist()}) > 40, "and then another"


def test_every_output_once_with_workers(streams: dict[str, Callable[[], midepoch.Dataset]]) -> None:
    expected = sorted(row["n"] for row in streams["filter"]())
    for workers in (1, 3):
        loader = StatefulDataLoader(streams["filter"](), batch_size=4, num_workers=workers, collate_fn=collate)
        assert sorted(int(n) for batch in loader for n in batch) == expected


def test_state_of_a_worker_is_refused_elsewhere(streams: dict[str, Callable[[], midepoch.Dataset]]) -> None:
    loader = StatefulDataLoader(streams["filter"](), batch_size=4, num_workers=2, collate_fn=collate)
    next(iter(loader))
    snapshot = loader.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]
    state = snapshot["fetcher_state"]["dataset_iter_state"]
    with pytest.raises(CheckpointMismatchError, match="worker 0 of 2"):
        streams["filter"]().load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="worker 0 of 2"):
        streams["filter"]().loader(4).load_state_dict(state)


def test_formats(streams: dict[str, Callable[[], midepoch.Dataset]], tmp_path: Path) -> None:
    packed = streams["pack"]()
    batch = next(iter(packed.loader(3)))
    assert batch["tokens"].shape == (3, 8) and batch["tokens"].dtype == torch.int32
    assert next(iter(packed.with_format("numpy").loader(3)))["segment_ids"].shape == (3, 8)
    assert next(iter(packed.with_format("arrow").loader(3))).num_rows == 3
    assert next(iter(packed.with_format("python").loader(3)))["n"][0] > 0
    assert_resumes_exactly(lambda: streams["pack"]().with_format("arrow").loader(3), epochs=1, steps=[0, 2, 5], tail=4)
