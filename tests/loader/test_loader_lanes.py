"""The loader of a pipeline in lanes: its length, its epochs, and rows that cannot be made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from data import Numbers
from midepoch.errors import MapError


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    lanes=st.integers(1, 4),
    world=st.integers(1, 4),
    batch=st.integers(1, 3),
    ends=st.sampled_from(["drop", "pad", "uneven"]),
    windowed=st.booleans(),
)
@settings(max_examples=30)
def test_the_length_is_the_number_of_batches_of_each_rank(
    make_files: Callable[..., list[str]],
    sizes: list[int],
    lanes: int,
    world: int,
    batch: int,
    ends: str,
    windowed: bool,
) -> None:
    """Also of a rank without a row in the last step."""
    files = make_files([9, 9, 9])
    parts = [midepoch.from_files(path).take(size) for path, size in zip(files, sizes, strict=False)]
    stream: Any = midepoch.concat(parts).with_lanes(lanes)
    if windowed:
        stream = stream.shuffle(seed=1, window=4)
    for rank in range(world):
        try:
            loader = stream.loader(batch, rank=rank, world_size=world, last_batch=ends)
            length = len(loader)
        except (midepoch.WorldError, TypeError):
            continue  # ranks with lanes of their own, which are not connected here or whose outputs are not counted
        assert length == len(list(loader))
        assert loader.estimated_len == length


def broken_at(*bad: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] in bad:
            raise ValueError(f"row {row['id']} is broken")
        return {"id": row["id"]}

    return check


def ids(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch["id"]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [0, 1, 37, 96, 199])
def test_the_good_rows_before_one_that_fails_are_delivered(
    make_files: Callable[..., list[str]], workers: int, bad: int
) -> None:
    """All but those of the batch that it would be in; what is delivered and the state do not depend on bundles."""
    source = midepoch.from_files(make_files([200])).select_columns("id")
    stream = source.map(broken_at(bad)).filter(lambda row: True)
    loader = stream.loader(5, num_workers=workers)
    seen = []
    with pytest.raises(MapError, match=f"row {bad} is broken"):
        for batch in loader:
            seen += ids([batch])
    assert seen == list(range(bad - bad % 5))
    assert loader.state_dict()["position"] == len(seen)


@pytest.mark.parametrize("kind", ["rows", "batches"])
def test_row_iteration_delivers_the_good_rows_and_raises_again(make_files: Callable[..., list[str]], kind: str) -> None:
    source = midepoch.from_files(make_files([200])).select_columns("id")
    stream = source.map(broken_at(150)).filter(lambda row: True)
    seen: list[int] = []
    iterator: Any = iter(stream) if kind == "rows" else stream.iter(1)
    for _ in range(2):
        with pytest.raises(MapError, match="row 150 is broken"):
            for row in iterator:
                seen += [row["id"]] if kind == "rows" else row["id"]
        assert seen == list(range(150))
        assert stream.state_dict()["position"] == 150


def test_an_error_that_passes_loses_no_row_of_an_iteration(make_files: Callable[..., list[str]]) -> None:
    calls = []

    def once(row: dict[str, Any]) -> bool:
        calls.append(row["id"])
        if row["id"] == 70 and calls.count(70) < 9:
            raise ValueError("not yet")
        return True

    stream = midepoch.from_files(make_files([200])).filter(once)
    seen: list[int] = []
    iterator = iter(stream)
    while len(seen) < 200:
        try:
            seen.append(next(iterator)["id"])
        except MapError:
            continue
    assert seen == list(range(200))
    assert next(iterator, None) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_are_skipped_are_counted(make_files: Callable[..., list[str]], workers: int) -> None:
    source = midepoch.from_files(make_files([200])).select_columns("id")
    bad = (3, 50, 51, 199)
    loader = source.map(broken_at(*bad), on_error="skip").filter(lambda row: row["id"] % 2 == 0).loader(8, workers)
    assert loader.skipped == 0
    assert ids(loader) == [i for i in range(0, 200, 2) if i not in bad]
    assert loader.skipped == 4
    list(loader)
    assert loader.skipped == 8, "over all epochs"
    behind = midepoch.mix([source, source], seed=1).flat_map(lambda row: [broken_at(7)(row)], on_error="skip")
    counted = behind.loader(8, workers)
    list(counted)
    assert counted.skipped == 2


def test_skipped_groups_are_counted_row_by_row(make_files: Callable[..., list[str]]) -> None:
    source = midepoch.from_files(make_files([200])).select_columns("id")

    def whole(columns: dict[str, list[int]]) -> dict[str, list[int]]:
        if 20 in columns["id"]:
            raise ValueError("20")
        return columns

    loader = source.map(whole, batched=True, batch_size=16, on_error="skip").filter(lambda row: True).loader(8)
    assert len(ids(loader)) == 199
    assert loader.skipped == 1


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def test_epochs_follow_each_other_or_are_named(docs: midepoch.Dataset) -> None:
    stream = docs.shuffle(seed=1).filter(odd)
    loader = stream.loader(10, collate_fn=lambda rows: [row["id"] for row in rows])
    first = list(islice(loader, 3))
    whole = first + list(loader)
    second = list(loader)
    assert second != whole and loader.epoch == 2
    loader.set_epoch(0)
    assert list(loader) == whole and loader.epoch == 1
    loader.set_epoch(1)
    assert list(loader) == second
    passing = iter(loader)
    next(passing)
    state = loader.state_dict()
    rest = list(passing)
    passing.load_state_dict(state)
    assert list(passing) == rest
    assert next(loader) != rest[0]


def always(row: dict[str, Any]) -> bool:
    return True


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("ends", ["pad", "uneven"])
def test_ranks_that_share_lanes_stay_in_one_epoch(ends: str, numbers: Numbers) -> None:
    def make(rank: int) -> Any:
        stream = numbers(0, 5).filter(always).with_lanes(1)
        return stream.loader(1, rank=rank, world_size=2, last_batch=ends, collate_fn=list)

    loaders = [make(0), make(1)]
    passes = [iter(loader) for loader in loaders]
    for _ in range(2):
        for one in passes:
            next(one)
    state = copied(loaders[0].state_dict())
    rest = [[[row["n"] for row in batch] for batch in one] for one in passes]
    resumed = [make(0), make(1)]
    for loader in resumed:
        loader.load_state_dict(state)
    found = [[[row["n"] for row in batch] for batch in loader] for loader in resumed]
    assert (
        [len(batches) for batches in found]
        == [len(batches) for batches in rest]
        == ([1, 1] if ends == "pad" else [1, 0])
    )
    assert found[0] == [[4]] == rest[0]
    single = [
        numbers(7, 8).filter(always).with_lanes(1).loader(1, rank=r, world_size=2, last_batch="pad") for r in range(2)
    ]
    batches = [list(loader) for loader in single]
    assert [batch["is_padding"].tolist() for one in batches for batch in one] == [[False], [True]]


def test_a_loader_without_rows_is_logged(numbers: Numbers, caplog: pytest.LogCaptureFixture) -> None:
    assert list(numbers(0, 9).take(0).filter(always).loader(4)) == []
    assert "no rows to load" in caplog.text
    with pytest.raises(midepoch.DataNotFoundError, match="source 1 has no rows"):
        midepoch.mix([numbers(0, 9), numbers(0, 9).take(0)])
    assert list(numbers(0, 9).filter(lambda row: False).loader(4)) == []
    assert "is empty. Check that its filters" in caplog.text


def test_ranks_continue_after_leases_at_different_paces(make_files: Callable[..., list[str]]) -> None:
    files = make_files([150, 90])

    def loaders(size: int) -> list[midepoch.Loader]:
        ds = midepoch.from_files(files).shuffle(seed=1).filter(lambda row: row["id"] % 3 > 0).with_lanes(6)
        return [ds.loader(2, rank=rank, world_size=size, last_batch="uneven") for rank in range(size)]

    expected = sorted(int(number) for batch in loaders(1)[0] for number in batch["id"])
    found: list[int] = []
    first = loaders(2)
    for loader, count in zip(first, (14, 5), strict=True):
        with loader.lease() as items:
            for number, lease in enumerate(next(items) for _ in range(count)):
                if number % 4:
                    found += map(int, lease.batch["id"])
                    lease.ack()
    states = [loader.state_dict() for loader in first]
    for size in (3, 2):  # the steps of all ranks are the same, although they drop different numbers of outputs
        ranks = loaders(size)
        for loader in ranks:
            loader.load_state_dict(states)
            found += (int(number) for _ in range(3) for number in next(loader)["id"])
        states = [loader.state_dict() for loader in ranks]
    last = loaders(1)[0]
    last.load_state_dict(states)
    assert sorted(found + [int(number) for batch in last for number in batch["id"]]) == expected


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_lane_that_has_ended_stays_at_its_end_in_every_state(ahead: int, steps: int) -> None:
    """Ranks of uneven lanes leave such a state: one has ended without an output of this epoch. It began again.

    ``ahead``: leases that are out when the state is saved, after some batches that were acknowledged.
    """
    ds = midepoch.from_dict({"id": range(40)}).shuffle(seed=1).filter(lambda row: row["id"] % 2 == 0).with_lanes(2)

    def loaded() -> midepoch.Loader:
        loader = ds.loader(2)
        fresh = loader.state_dict()
        loader.load_state_dict({**fresh, "cursor": [[0, 0, [0, 0], "", "", 1], [1, 0, [0, 0]]]})
        return loader

    def ids(batches: Iterable[Any]) -> list[int]:
        return [int(i) for batch in batches for i in batch["id"]]

    whole, loader, rest = ids(loaded()), loaded(), ds.loader(2)
    with loader.lease() as leases:
        out = list(islice(leases, steps + ahead))
        for lease in out[:steps]:
            lease.ack()
        rest.load_state_dict(loader.state_dict())
    assert 0 < len(whole) < 20
    assert ids(lease.batch for lease in out[:steps]) + ids(rest) == whole
