"""A loader against a plain model, by random calls: next, break, iter, save, load, set_epoch, exclude, lease.

The model is a list: what is left of the epoch, in order. Each class of pipelines is checked by the same rules.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import midepoch

ROWS = 26
EPOCHS = 4


def rows(first: int = 0, count: int = ROWS) -> midepoch.Dataset:
    numbers = list(range(first, first + count))
    return midepoch.from_dict({"id": numbers, "input_ids": [[n] * (1 + n % 4) for n in numbers]}).select_columns("id")


def tokens() -> midepoch.Dataset:
    return midepoch.from_dict({"input_ids": [[n] * (1 + n % 4) for n in range(ROWS)]}).shuffle(seed=3)


def not_5(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 7 != 5)


def next_id(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] + 1000}


def next_ids(columns: dict[str, Any]) -> dict[str, Any]:
    return {"id": [number + 1000 for number in columns["id"]]}


def some(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": 10 * row["id"] + copy} for copy in range(row["id"] % 3)]


Make = Callable[[], midepoch.Dataset]
PIPELINES: dict[str, Make] = {
    "in order": rows,
    "rows": lambda: rows().shuffle(seed=1),
    "window": lambda: rows().shuffle(seed=1, scope="window", window=2),
    "weighted": lambda: rows().weighted("id", seed=1),
    "map": lambda: rows().shuffle(seed=1).map(next_id),
    "batched map": lambda: rows().shuffle(seed=1).map(next_ids, batched=True, batch_size=4),
    "filter": lambda: rows().shuffle(seed=1).filter(not_5),
    "flat map": lambda: rows().shuffle(seed=1).flat_map(some),
    "groups": lambda: rows().filter(not_5).map(next_ids, batched=True, batch_size=3),
    "shuffled outputs": lambda: rows().filter(not_5).shuffle(seed=2, window=5),
    "concat": lambda: midepoch.concat([rows(0, 10).filter(not_5), rows(50, 12).shuffle(seed=1)]),
    "zip": lambda: midepoch.zip([rows().shuffle(seed=1), rows(100).rename_column("id", "other")]),
    "mix": lambda: midepoch.mix([rows(0, 18).shuffle(seed=1), rows(50, 9)], [2, 1], seed=1),
    "mix of all": lambda: midepoch.mix([rows(0, 12).filter(not_5), rows(50, 9)], [1, 1], seed=1, stop="all"),
    "pack": lambda: tokens().pack(5),
    "best fit": lambda: tokens().pack(8, strategy="best_fit", window=6, pad=-1),
}
OF_ROWS = ("in order", "rows", "window", "filter")
"""Those whose outputs are rows with their own numbers: the model knows which of them are excluded."""


def values(batch: Any) -> list[Any]:
    column = batch["id"] if "id" in batch else batch["input_ids"]
    return [value.tolist() for value in column]


class Machine(RuleBasedStateMachine):
    name: str
    dataset: midepoch.Dataset
    epochs: list[list[Any]]

    @initialize(size=st.integers(1, 5))
    def make(self, size: int) -> None:
        self.loader, self.size, self.batches = self.new(size), size, None
        self.epoch, self.left, self.steps, self.in_pass = 0, list(self.epochs[0]), 0, 0
        self.gone: set[Any] = set()
        self.saved: list[Any] = []

    def new(self, size: int, workers: int = 0, world: int = 1, rank: int = 0) -> midepoch.Loader:
        kind = "thread" if workers else "auto"
        return self.dataset.loader(size, workers, worker_type=kind, last_batch="uneven", rank=rank, world_size=world)

    def of_epoch(self, epoch: int) -> list[Any]:
        return [value for value in self.epochs[epoch] if not self.gone or value not in self.gone]

    def check(self) -> None:
        assert self.loader.steps == self.steps

    @rule()
    @precondition(lambda self: self.epoch < EPOCHS - 1)
    def take(self) -> None:
        """``next(loader)`` continues; at the end of an epoch it stops once."""
        batch = next(self.loader, None)
        if not self.left:
            assert batch is None or not self.in_pass
            if batch is None:
                batch = next(self.loader)
            self.epoch, self.left, self.in_pass = self.epoch + 1, self.of_epoch(self.epoch + 1), 0
        assert batch is not None and values(batch) == self.left[: self.size]
        self.left, self.steps, self.in_pass = self.left[self.size :], self.steps + 1, self.in_pass + 1
        self.check()

    @rule()
    def save(self) -> None:
        state = json.loads(json.dumps(self.loader.state_dict()))
        self.saved = [*self.saved[-3:], (state, self.epoch, list(self.left), self.steps, set(self.gone))]

    @rule(choice=st.integers(0, 3), size=st.integers(1, 5), workers=st.integers(0, 2))
    @precondition(lambda self: self.saved)
    def load(self, choice: int, size: int, workers: int) -> None:
        state, self.epoch, self.left, self.steps, self.gone = self.saved[choice % len(self.saved)]
        self.left, self.gone, self.size, self.in_pass = list(self.left), set(self.gone), size, 0
        self.loader.close()
        self.loader = self.new(size, workers)
        self.loader.load_state_dict(state)
        self.check()

    @rule(world=st.integers(2, 3), size=st.integers(1, 3))
    @precondition(lambda self: self.left)
    def other_world(self, world: int, size: int) -> None:
        """All ranks together have the rest of the epoch, dealt in turn, and nothing else."""
        state = self.loader.state_dict()
        dealt = []
        for rank in range(world):
            loader = self.new(size, rank=rank, world=world)
            loader.load_state_dict(state)
            dealt.append([value for batch in loader if loader.epoch is not None for value in values(batch)])
        assert sorted(map(str, sum(dealt, []))) == sorted(map(str, self.left))

    @rule(steps=st.sets(st.integers(1, 4), min_size=1, max_size=2))
    @precondition(lambda self: self.left)
    def exclude_steps(self, steps: set[int]) -> None:
        batches = [self.left[at : at + self.size] for at in range(0, len(self.left), self.size)]
        numbers = [self.steps + step for step in steps]
        if max(steps) > len(batches):
            with pytest.raises(ValueError, match="is not in epoch"):
                self.loader.exclude(steps=numbers)
            return
        count = self.loader.exclude(steps=numbers)
        kept = [batch for number, batch in enumerate(batches, 1) if number not in steps]
        assert count == len(self.left) - sum(map(len, kept))
        self.left = [value for batch in kept for value in batch]
        self.check()

    @rule(numbers=st.sets(st.integers(0, ROWS - 1), min_size=1, max_size=3))
    @precondition(lambda self: self.name in OF_ROWS and self.left)
    def exclude_rows(self, numbers: set[int]) -> None:
        self.loader.exclude(rows=numbers)
        self.gone |= numbers
        self.left = [value for value in self.left if value not in numbers]

    @rule(count=st.integers(1, 4), acked=st.sets(st.integers(0, 3)))
    @precondition(lambda self: self.left)
    def lease(self, count: int, acked: set[int]) -> None:
        """What is not acknowledged is delivered again, first."""
        self.again()  # else a pass of one batch would be a look
        with self.loader.lease() as items:
            leases = [lease for _, lease in zip(range(count), items, strict=False)]
            taken = [values(lease.batch) for lease in leases]
            assert [value for batch in taken for value in batch] == self.left[: sum(map(len, taken))]
            for number in acked:
                if number < len(leases):
                    leases[number].ack()
        done = [number for number in acked if number < len(leases)]
        kept = [batch for number, batch in enumerate(taken) if number not in done]
        rest = self.left[sum(map(len, taken)) :]
        self.left, self.steps = [value for batch in kept for value in batch] + rest, self.steps + len(done)
        self.again()
        self.check()

    def again(self) -> None:
        """Continue with a new loader."""
        state = json.loads(json.dumps(self.loader.state_dict()))
        self.loader.close()
        self.loader, self.in_pass = self.new(self.size), 0
        self.loader.load_state_dict(state)

    @rule(epoch=st.integers(0, EPOCHS - 2))
    def set_epoch(self, epoch: int) -> None:
        """It begins an epoch at its first row. (That of a loaded state would resume: a new loader has none.)"""
        self.loader.close()
        self.loader = self.new(self.size)
        if self.gone:
            self.loader.exclude(rows=self.gone)
        self.loader.set_epoch(epoch)
        self.epoch, self.left, self.steps, self.in_pass = epoch, self.of_epoch(epoch), 0, 0
        self.check()

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            self.loader.close()


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_loader_does_what_a_list_would(name: str, examples: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "midepoch")
    dataset = PIPELINES[name]().with_lanes(1)
    whole = dataset.loader(1)
    epochs = [[value for batch in whole for value in values(batch)] for _ in range(EPOCHS)]
    machine = type("Named", (Machine,), {"name": name, "dataset": dataset, "epochs": epochs})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    chosen = settings(
        max_examples=examples,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=checks,
        phases=(Phase.explicit, Phase.generate),  # a failure prints its calls: shrinking them takes minutes
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]
