"""The proof against a brute-force model, over random histories with loss and repetition injected.

Ranks are loaders of one process. The model keeps what each batch had, and which batches the weights have seen: those
before the last state that was loaded, and those since then. A start loads the last state or any earlier one, also of a
branch of the run that was left. A fault is a state that was moved ahead (rows are lost), or
an epoch that is begun again without a state (rows are repeated). Every fault is found, and no clean history is accused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.audit import Ledger, read_run

ROWS = 40


def rows() -> midepoch.Dataset:
    numbers = list(range(ROWS))
    return midepoch.from_dict({"id": numbers, "length": [1 + n % 6 for n in numbers]}).shuffle(seed=5)


def odd_or_small(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 or row["id"] < 25)


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": [row["id"] for row in found]}


def of_length(row: dict[str, Any]) -> int:
    return int(row["length"])


MAKERS: dict[str, Callable[..., midepoch.Loader]] = {
    "rows": lambda size, **kw: rows().loader(size, **kw),
    "sizes": lambda size, **kw: rows().loader({0: size, 4: size + 1}, **kw),
    "tokens": lambda size, **kw: rows().loader(
        max_tokens=6 * size, length="length", collate_fn=together, bucket_window=15, **kw
    ),
    "filter": lambda size, **kw: rows().filter(odd_or_small).with_lanes(2).loader(size, **kw),
    "window": lambda size, **kw: rows().filter(odd_or_small).shuffle(seed=1, window=6).with_lanes(1).loader(size, **kw),
    "run time": lambda size, **kw: (
        rows()
        .filter(odd_or_small)
        .with_lanes(2)
        .loader(max_tokens=12, length=of_length, collate_fn=together, bucket_window=9, **kw)
    ),
}
_WITH_POSITIONS = [("rows", "lost", 8), ("sizes", "lost", 8)]
IN_LANES = ("filter", "window", "run time")


def ids(batch: Any) -> list[int]:
    return [int(each) for each in batch["id"]]


class Model:
    """Random starts of a run. ``kept``: the rows that the weights have seen, by epoch."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.folder, self.draw = name, folder, np.random.default_rng(seed)
        self.kept: list[tuple[int, list[int]]] = []
        self.saves: list[tuple[Any, list[tuple[int, list[int]]]]] = [(None, [])]
        self.starts, self.fault, self.reached = 0, "", 0

    def start(self, fault: str = "") -> None:
        """Start with other ranks, load a state, take some steps, and die."""
        self.starts += 1
        world = int(self.draw.integers(1, 4))
        size = int(self.draw.integers(1, 4))
        ledger = Ledger(self.folder, attempt=str(self.starts))
        ranks = [
            MAKERS[self.name](size, rank=rank, world_size=world, last_batch="uneven", audit=ledger)
            for rank in range(world)
        ]
        any_branch = not fault and self.draw.random() < 0.4
        state, self.kept = self.saves[int(self.draw.integers(len(self.saves))) if any_branch else -1]
        self.kept = list(self.kept)
        if state is not None:
            if fault == "lost":
                state = self._moved(state)
            for loader in ranks:
                loader.load_state_dict(json.loads(json.dumps(state)))
        if self.draw.random() < 0.3 and not fault and self.name in ("rows", "filter", "window"):
            numbers = self.draw.integers(0, ROWS, 2).tolist()
            for loader in ranks:
                loader.exclude(rows=numbers)
        passes, over = [iter(loader) for loader in ranks], False
        for step in range(int(self.draw.integers(2, 6))):
            batches = [next(one, None) for one in passes]
            over = any(batch is None for batch in batches)
            self._keep(ranks, batches)
            if over:  # to the end of the epoch, each by itself
                for loader, one in zip(ranks, passes, strict=True):
                    for batch in one:
                        self._keep([loader], [batch])
                break
            if step == 0 or self.draw.random() < 0.5:
                self.saves.append(([loader.state_dict() for loader in ranks], list(self.kept)))
        self.reached = max(self.reached, ranks[0].state_dict()["position"])
        if over:
            self.saves.append(([loader.state_dict() for loader in ranks], list(self.kept)))
        elif fault == "repeated":  # begun again, without a state
            for loader in ranks:
                loader.set_epoch(self.kept[-1][0])
                for _, batch in zip(range(2), loader, strict=False):
                    self._keep([loader], [batch])
            self.fault = "repeated"

    def _keep(self, ranks: list[midepoch.Loader], batches: list[Any]) -> None:
        for loader, batch in zip(ranks, batches, strict=True):
            if batch is not None:
                self.kept.append((loader.state_dict()["epoch"], ids(batch)))

    def _moved(self, states: list[Any]) -> list[Any]:
        """Return states some rows ahead of all that was delivered."""
        ahead = self.reached + int(self.draw.integers(1, 6))
        if dict(states[0]["more"]).keys() - {"branches"} or not states[0]["position"] < ahead < ROWS:
            return states
        self.fault = "lost"
        return [{**one, "position": ahead, "cursor": [[0, ahead]]} for one in states]


@pytest.mark.parametrize(
    ("name", "fault", "seeds"),
    [
        *((name, "", 4) for name in MAKERS),
        *((name, "repeated", 3) for name in MAKERS),
        *_WITH_POSITIONS,
        *(pytest.param(name, fault, 30, marks=pytest.mark.slow) for name in MAKERS for fault in ("", "repeated")),
    ],
)
def test_every_fault_is_found_and_nothing_else(name: str, fault: str, seeds: int, tmp_path: Path) -> None:
    found = 0
    for seed in range(seeds):
        model = Model(name, tmp_path / str(seed), seed)
        for number in range(4):
            model.start(fault if number == 2 else "")
            if model.fault:
                break
        run = read_run(tmp_path / str(seed))
        by_epoch: dict[int, Counter[int]] = {}
        for epoch, batch in model.kept:
            by_epoch.setdefault(epoch, Counter()).update(batch)
        about = (seed, run.problems, run.epochs, model.fault)
        if model.fault:
            found += 1
            assert not run.exact, about
            continue
        assert run.exact, about
        for proof in run.epochs:
            seen = by_epoch.get(proof.epoch, Counter())
            assert max(seen.values(), default=1) == 1
            if name not in IN_LANES:
                assert proof.once == len(seen), about
            assert not proof.repeated and not proof.never, about
    assert found >= (2 if fault else 0)
