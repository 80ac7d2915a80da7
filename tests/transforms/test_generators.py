"""The global random generators while functions run: seeded for every row, the same on any topology, put back."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import midepoch
from data import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")

ROWS = 37


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files).select_columns(["id", "text"])


def drawn(_: Any) -> dict[str, Any]:
    return {"python": random.random(), "numpy": np.random.rand(), "torch": torch.rand(()).item()}


def drawn_late(row: dict[str, Any]) -> dict[str, Any]:
    return {"python": random.random() if row["id"] >= 30 else -1.0}


def drawn_for_all(rows: dict[str, Any]) -> dict[str, Any]:
    return {"python": [random.random() for _ in rows["id"]], "first": [rows["id"][0]] * len(rows["id"])}


def by_id(rows: Any) -> dict[int, Any]:
    return {row["id"]: {name: value for name, value in row.items() if name not in ("id", "text")} for row in rows}


def rows_of(loader: Any) -> list[dict[str, Any]]:
    return [row for batch in loader for row in batch]


PIPELINES: dict[str, Callable[[midepoch.Dataset], Any]] = {
    "map": lambda ds: ds.map(drawn),
    "shuffled map": lambda ds: ds.shuffle(seed=3).map(drawn),
    "two maps": lambda ds: ds.map(drawn).map(lambda row: {"again": random.random()}),
    "late draws": lambda ds: ds.map(drawn_late),
    "flat_map": lambda ds: ds.flat_map(lambda row: [{"id": row["id"] * 10 + i, **drawn(None)} for i in range(2)]),
    "filter": lambda ds: ds.filter(lambda row: random.random() < 0.5),
    "filter and map": lambda ds: ds.filter(lambda row: row["id"] % 2).map(drawn),
    "after a mix": lambda ds: midepoch.mix([ds.take(20), ds.skip(20)], seed=1, stop="all").map(drawn),
    "after a batch": lambda ds: ds.batch(2).unbatch(["id", "text"]).map(drawn),
}


# Processes for 2 and 3 workers, each time: the others behind -m slow.
ALWAYS = ("map", "late draws", "filter and map", "after a mix")
CASES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in PIPELINES]


@pytest.mark.parametrize("name", CASES)
def test_draws_depend_on_the_row_alone(ds: midepoch.Dataset, name: str) -> None:
    torch.manual_seed(7)
    expected = by_id(PIPELINES[name](ds))
    assert len(expected) > 5
    for size, workers in ((4, 0), (9, 2)):
        assert by_id(rows_of(PIPELINES[name](ds).loader(size, workers, collate_fn=list))) == expected
    again = PIPELINES[name](ds)
    for _ in zip(range(5), iter(again), strict=False):
        pass
    state = again.state_dict()
    torch.manual_seed(8)
    resumed = PIPELINES[name](ds)
    resumed.load_state_dict(state)
    rest = by_id(resumed)
    assert rest.items() <= expected.items(), "the seed of the run that saved the state is taken over"
    assert rest


@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_seed_is_followed(ds: midepoch.Dataset, workers: int) -> None:
    found = []
    for seed in (0, 5, 0):
        torch.manual_seed(seed)
        found.append(rows_of(ds.map(drawn).loader(8, workers, collate_fn=list)))
    assert found[0] == found[2]
    for name in ("python", "numpy", "torch"):
        assert not {row[name] for row in found[0]} & {row[name] for row in found[1]}
        assert len({row[name] for row in found[0]}) == ROWS


def test_epochs_and_functions_draw_other_numbers(ds: midepoch.Dataset) -> None:
    mapped = ds.map(drawn).map(lambda row: {"again": random.random()})
    first = by_id(mapped)
    assert all(row["python"] != row["again"] for row in first.values())
    mapped.set_epoch(1)
    second = by_id(mapped)
    assert not {row["python"] for row in first.values()} & {row["python"] for row in second.values()}
    mixed = by_id(midepoch.mix({"a": ds.take(20).map(drawn), "b": ds.skip(20)}, stop="all").map(drawn_again))
    assert all(row.get("python") != row["again"] for row in mixed.values())


def drawn_again(row: dict[str, Any]) -> dict[str, Any]:
    return {"python": row.get("python"), "numpy": None, "torch": None, "again": random.random()}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_groups_and_collation_draw_by_their_first_row(ds: midepoch.Dataset, workers: int) -> None:
    def collate(rows: list[dict[str, Any]]) -> Any:
        return [row["id"] for row in rows], torch.rand(2).tolist()

    torch.manual_seed(3)
    expected = [*ds.map(drawn_for_all, batched=True, batch_size=4).loader(8, collate_fn=list)]
    assert [*ds.map(drawn_for_all, batched=True, batch_size=4).loader(8, workers, collate_fn=list)] == expected
    batches = list(ds.loader(8, collate_fn=collate))
    loader = ds.loader(8, workers, collate_fn=collate)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == batches[:2]
    state = loader.state_dict()
    torch.manual_seed(4)
    resumed = ds.loader(8, workers, collate_fn=collate)
    resumed.load_state_dict(state)
    assert list(resumed) == batches[2:]
    stream = ds.filter(lambda row: True)
    torch.manual_seed(3)
    assert list(stream.loader(8, workers, collate_fn=collate)) == list(stream.loader(8, collate_fn=collate))


def test_the_callers_generators_are_left_alone(ds: midepoch.Dataset) -> None:
    def numbers() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]

    def expected() -> list[float]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        return [numbers() for _ in range(6)]

    def with_rows(rows: Any) -> list[list[float]]:
        found, iterator = [], iter(rows)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        for _ in range(6):
            next(iterator)
            found.append(numbers())
        return found

    for function in (drawn, drawn_late, lambda row: {"normal": np.random.randn() + random.gauss(0, 1)}):
        assert with_rows(ds.map(function)) == expected()
        assert with_rows(ds.map(function).loader(3)) == expected()
    assert with_rows(ds.loader(3, collate_fn=drawn)) == expected()
    assert torch.initial_seed() == 1


def test_a_generator_that_the_user_put_into_numpy_is_left_alone(ds: midepoch.Dataset) -> None:
    plain = by_id(ds.map(lambda row: {"numpy": np.random.rand()}))
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        mapped = ds.map(lambda row: {"numpy": np.random.rand()})
        assert by_id(mapped) == plain
        found = np.random.rand()
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        assert found == np.random.rand()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_stateful_dataloader_resumes_the_draws(ds: midepoch.Dataset) -> None:
    def loader() -> Any:
        return StatefulDataLoader(ds.map(drawn), batch_size=4, num_workers=2, collate_fn=list)

    torch.manual_seed(2)
    first = loader()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state, rest = first.state_dict(), list(iterator)
    later = list(first)
    torch.manual_seed(99)
    second = loader()
    second.load_state_dict(state)
    assert list(second) == rest
    assert list(second) == later, "the next epoch is of the same seed"


WITHOUT_TORCH = """
import random, sys
import numpy as np
import midepoch
ds = midepoch.from_files(sys.argv[1:]).select_columns("id")
for seed in (1, 2, 1):
    random.seed(seed), np.random.seed(seed)
    first = ds.map(lambda row: {"python": random.random(), "numpy": np.random.rand()})
    print(next(iter(first)))
assert "torch" not in sys.modules
"""


def test_without_torch_the_other_generators_are_followed(small_files: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *small_files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two, again = done.stdout.splitlines()
    assert one == again != two


def test_functions_of_parts_have_generators_of_their_own(ds: midepoch.Dataset) -> None:
    def noise(name: str) -> Callable[..., Any]:
        return lambda row, generator: {name: generator.random()}

    def part(name: str) -> Any:
        return ds.map(noise(name), with_generator=True).select_columns(name)

    a, b, c = (part(name) for name in "abc")
    both = midepoch.zip([midepoch.zip([a, b]).map(noise("ab"), with_generator=True), c])
    rows = list(both.map(noise("abc"), with_generator=True).map(noise("more"), with_generator=True))
    numbers = [value for row in rows for value in row.values()]
    assert len(rows) == ROWS
    assert len(set(numbers)) == 6 * ROWS
    x, y = ds.take(10).map(noise("x"), with_generator=True), ds.take(10).map(noise("x"), with_generator=True)
    for combined in (midepoch.mix([x, y]), midepoch.concat([x, y])):
        rows = list(combined.map(noise("after"), with_generator=True))
        assert len({row["x"] for row in rows} | {row["after"] for row in rows}) == 2 * len(rows) == 40


def test_generators_of_a_dataset_by_itself_are_pinned(ds: midepoch.Dataset) -> None:
    def noise(row: Any, generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": generator.integers(0, 1 << 32)}

    once = ds.shuffle(seed=3).map(noise, with_generator=True)
    assert [int(row["noise"]) for row in once][:3] == [978179047, 295177527, 1873006166]


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def test_generators_depend_on_seed_epoch_and_row_only(docs: midepoch.Dataset) -> None:
    def noisy(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": generator.random()}

    noise = {row["id"]: row["noise"] for row in docs.shuffle(seed=5).map(noisy, with_generator=True)}
    kept = docs.shuffle(seed=5).filter(odd).map(noisy, with_generator=True)
    plain = {
        row["id"]: row["noise"] for row in docs.shuffle(seed=5).filter(lambda r: True).map(noisy, with_generator=True)
    }
    for lanes, workers in ((1, 0), (3, 0), (2, 2)):
        found = [row for batch in kept.with_lanes(lanes).loader(8, workers, collate_fn=list) for row in batch]
        assert len(found) == 150
        assert all(row["noise"] == plain[row["id"]] for row in found)
    assert len(set(noise.values())) == 300
    twice = docs.flat_map(lambda row: [row, row]).map(noisy, with_generator=True)
    assert len({row["noise"] for row in twice}) == 600, "rows made of one row draw other numbers"


def test_generators_differ_between_passes_and_sources(numbers: Numbers) -> None:
    def noisy(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": generator.random()}

    forever = midepoch.mix([numbers(0, 5), numbers(100, 105)], seed=1, stop="never").map(noisy, with_generator=True)
    assert len({row["noise"] for row in islice(forever, 60)}) == 60
    both = midepoch.concat([numbers(0, 5), numbers(100, 105)]).map(noisy, with_generator=True)
    assert len({row["noise"] for row in both}) == 10
    twice: Any = numbers(0, 1)
    for _ in range(6):
        twice = twice.flat_map(lambda row: [row, row])
    assert len({row["noise"] for row in twice.map(noisy, with_generator=True)}) == 64


def test_generators_do_not_depend_on_the_order_of_the_sources(numbers: Numbers) -> None:
    def noisy(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": generator.random()}

    parts = {"a": numbers(0, 30), "b": numbers(1000, 1030)}
    one = midepoch.mix(parts, seed=1, stop="all").map(noisy, with_generator=True)
    other = midepoch.mix(dict(reversed(parts.items())), seed=1, stop="all").map(noisy, with_generator=True)
    first = {row["n"]: row["noise"] for row in reversed(list(one))}
    second = {row["n"]: row["noise"] for row in reversed(list(other))}
    assert first == second and len(first) == 60
