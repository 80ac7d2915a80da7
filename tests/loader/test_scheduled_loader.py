"""Loaders of a schedule: epochs, weights that are set, leases, batches by tokens, and damaged states."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest

import midepoch
from midepoch import CheckpointMismatchError, Phase, Schedule
from midepoch.errors import StateError
from test_schedule import Sources, packed, rows, source_of, whole
from test_schedule import sources as documents  # noqa: F401  (a fixture)


@pytest.fixture
def sources(documents: Sources) -> Sources:  # noqa: F811
    return documents


def test_every_epoch_begins_with_the_first_phase(sources: Sources) -> None:
    loader = packed(sources).loader()
    shapes = [batch["input_ids"].shape for batch in loader]
    state = loader.state_dict()
    second = [batch["input_ids"].tolist() for batch in loader]
    assert [(len(batch), len(batch[0])) for batch in second] == shapes and loader.steps == 2 * len(shapes)
    resumed = packed(sources).loader()
    resumed.load_state_dict(state)
    assert [batch["input_ids"].tolist() for batch in resumed] == second
    by_steps = iter(packed(sources).loader(steps_per_epoch=len(shapes) + 3))
    assert [batch["input_ids"].shape for batch in by_steps] == [*shapes, *shapes[:3]]


@pytest.mark.parametrize("schedule", [True, False])
def test_weights_that_are_set_after_every_batch_do_not_prolong_the_epoch(schedule: bool, sources: Sources) -> None:
    loader = rows(sources).loader() if schedule else midepoch.mix(sources, [1, 1, 1], seed=3).loader(12)
    steps, expected = 0, 24 if schedule else 5
    for _ in loader:
        loader.set_weights([1, 1, 1])
        steps += 1
    assert steps == expected and loader.epoch == 1


WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1, "multiprocessing_context": "spawn"},
    {"num_workers": 2, "worker_type": "thread"},
]


@pytest.mark.parametrize("workers", WORKERS, ids=["spawn", "thread"])
def test_workers_of_any_kind_deliver_the_same_run(workers: dict[str, Any], sources: Sources) -> None:
    """Phases, excluded steps, weights that are set, provenance and leases, in one run."""

    def run(**options: Any) -> list[Any]:
        with packed(sources).loader(provenance=True, **options) as loader:
            loader.exclude(steps=range(4, 6))
            batches = [next(loader) for _ in range(7)]
            loader.set_weights({"code": 0.8, "web": 0.2})
            batches += [next(loader) for _ in range(3)]
            state = loader.state_dict()
        with packed(sources).loader(provenance=True, **options) as loader:
            loader.load_state_dict(state)
            with loader.lease() as items:
                kept, later = next(items), next(items)
                assert later.ack()
                batches.append(later.batch)
            assert kept.id != later.id
            batches += list(loader)
        return [
            (batch["input_ids"].tolist(), {k: v.tolist() for k, v in batch["doc_ids"].items()}) for batch in batches
        ]

    expected = run()
    assert sum(len(docs["row"]) for _, docs in expected) > len(expected) and run(**workers) == expected


def lease(loader: midepoch.Loader, count: int, kept: list[int]) -> tuple[list[Any], list[Any]]:
    """Lease batches, and acknowledge all but some. Return those that are acknowledged, and the others."""
    with loader.lease() as items:
        leases = [next(items) for _ in range(count)]
        for number, one in enumerate(leases):
            assert number in kept or one.ack()
    batches = [one.batch["input_ids"].tolist() for one in leases]
    return [each for number, each in enumerate(batches) if number not in kept], [batches[number] for number in kept]


def test_leases_keep_the_steps_of_a_schedule(sources: Sources) -> None:
    steps = [batch["input_ids"].tolist() for batch in packed(sources).loader()]
    loader = packed(sources).loader()
    assert lease(loader, 9, [4, 7]) == ([*steps[:4], *steps[5:7], steps[8]], [steps[4], steps[7]])
    assert loader.steps == 7
    resumed = packed(sources).loader()
    resumed.load_state_dict(loader.state_dict())
    assert [batch["input_ids"].tolist() for batch in resumed] == [steps[4], steps[7], *steps[9:]]


def test_ranks_that_lease_at_their_own_pace_complete_each_phase(sources: Sources) -> None:
    expected = Counter(map(tuple, chain.from_iterable(whole(packed(sources)))))
    loaders = [packed(sources).loader(rank=rank, world_size=2, last_batch="uneven") for rank in range(2)]
    found = Counter(
        tuple(row)
        for loader, count in zip(loaders, (11, 3), strict=True)
        for batch in lease(loader, count, [1])[0]
        for row in batch
    )
    states = [loader.state_dict() for loader in loaders]
    for size in (1, 2, 3):
        rest: Counter[Any] = Counter()
        for rank in range(size):
            resumed = packed(sources).loader(rank=rank, world_size=size, last_batch="uneven")
            resumed.load_state_dict(states)
            rest.update(tuple(row) for batch in resumed for row in batch["input_ids"].tolist())
        assert found + rest == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("names", []), ("names", [[], {}, 1]), ("names", ["x", "y", "z"]), ("schedule", "[[["), ("learned", [0])],
)
def test_a_damaged_description_of_a_schedule_is_refused(name: str, value: Any, sources: Sources) -> None:
    loader = rows(sources).loader()
    next(loader)
    state = loader.state_dict()
    parts = [list(pair) for pair in (dict(state["parts"]) | {name: value}).items()]
    with pytest.raises((StateError, CheckpointMismatchError)):
        rows(sources).loader().load_state_dict({**state, "parts": parts})


def test_batches_by_tokens_of_a_schedule(sources: Sources) -> None:
    schedule = Schedule([Phase("first", {"web": 1}, rows=30), Phase("second", {"code": 1}, rows=60)])

    def make() -> midepoch.Loader:
        return midepoch.mix(sources, schedule, seed=3).loader(max_tokens=150, length="input_ids")

    batches, loader = [batch["id"].tolist() for batch in make()], make()
    assert [source_of(number) for number in chain.from_iterable(batches)].count("code") == 60
    begun = [next(loader)["id"].tolist() for _ in range(5)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert begun + [batch["id"].tolist() for batch in resumed] == batches


def test_a_share_may_be_tiny_in_every_phase(sources: Sources) -> None:
    phases = [Phase(name, {"web": 1, "code": 1e-6}, rows=50) for name in ("first", "second")]
    batches = rows(sources, Schedule(phases)).loader(10)
    assert {source_of(int(number)) for batch in batches for number in batch["id"]} == {"web"}
