"""Histories whose proof was wrong once: the log of what was delivered says what it should be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import midepoch
from midepoch.audit import Ledger, read_run


def numbers(first: int, rows: int) -> midepoch.Dataset:
    return midepoch.from_dict({"id": list(range(first, first + rows))})


def shuffled(rows: int) -> midepoch.Dataset:
    return numbers(0, rows).shuffle(seed=1)


def not_3(rows: int, lanes: int = 1) -> midepoch.Dataset:
    return shuffled(rows).filter(lambda row: row["id"] != 3).with_lanes(lanes)


def ids(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch["id"]]


CONCAT: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "window": lambda ds: ds.shuffle(seed=5, window=8),
    "groups": lambda ds: ds.map(lambda rows: {"id": rows["id"]}, batched=True, batch_size=8),
}


@pytest.mark.parametrize("kind", CONCAT)
@pytest.mark.parametrize("taken", [9, 13, 14])
def test_rows_are_excluded_in_a_group_over_two_parts(kind: str, taken: int, tmp_path: Path) -> None:
    """A group that was drawn from two parts of a concat is made again of the same rows."""
    loader = CONCAT[kind](midepoch.concat([numbers(0, 10), numbers(100, 10)])).with_lanes(1).loader(1, audit=tmp_path)
    batches = iter(loader)
    seen = ids(next(batches) for _ in range(taken))
    loader.exclude(rows={0: [9]})
    seen += ids(batches)
    everything = {*range(10), *range(100, 110)}
    assert sorted(seen) == sorted(everything if 9 in seen else everything - {9})
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].complete


def test_rows_are_excluded_before_leases_of_two_parts() -> None:
    ds = midepoch.concat([numbers(0, 6), numbers(100, 6)]).with_lanes(1)
    loader, seen = ds.loader(2), []
    with loader.lease() as items:
        for number, lease in enumerate(items):
            if number in (1, 2, 4):
                lease.ack()
                seen += lease.batch["id"].tolist()
    resumed = ds.loader(2)
    resumed.load_state_dict(loader.state_dict())
    resumed.exclude(rows={0: [4]})  # acknowledged already
    assert (seen, ids(resumed)) == ([2, 3, 4, 5, 102, 103], [0, 1, 100, 101, 104, 105])


@pytest.mark.parametrize("stop", ["all", "never"])
@pytest.mark.parametrize("taken", range(6, 16, 3))
def test_rows_are_excluded_in_a_window_with_the_end_of_a_source(stop: str, taken: int) -> None:
    """A window may have rows of two passes over a source: what it has delivered stays as it was."""

    def loader() -> midepoch.Loader:
        mix = midepoch.mix([numbers(100, 40), numbers(0, 6)], [1, 1], seed=1, stop=stop)
        return mix.shuffle(seed=5, window=8).with_lanes(1).loader(1)

    whole = [ids([batch])[0] for _, batch in zip(range(16), loader(), strict=False)]
    edited = loader()
    batches = iter(edited)
    seen = ids(next(batches) for _ in range(taken))
    edited.exclude(rows={1: [4]})
    seen += ids(next(batches) for _ in range(8))
    end = -(-taken // 8) * 8
    assert seen[:taken] == whole[:taken]
    rest = [one for one in whole[taken:end] if one != 4]
    assert seen[taken : taken + len(rest)] == rest
    assert 4 not in seen[taken:]


def test_batches_by_tokens_of_a_window_with_the_end_of_a_source() -> None:
    ds = midepoch.mix([numbers(100, 40), numbers(0, 6)], [1, 1], seed=1, stop="all").with_lanes(1)
    loader = ds.loader(
        max_tokens=4,
        length=lambda row: 1 + row["id"] % 2,
        bucket_window=8,
        collate_fn=lambda rows: [row["id"] for row in rows],
    )
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    loader.exclude(rows={1: [4]})
    assert not any(4 in next(batches) for _ in range(6))


@pytest.mark.parametrize("lanes", [1, 4])
def test_outputs_that_are_dropped_at_the_end_are_not_lost(lanes: int, tmp_path: Path) -> None:
    state, epochs = None, 0
    for attempt in "123":
        loader = not_3(20, lanes).loader(4, last_batch="drop", audit=Ledger(tmp_path, attempt=attempt))
        if state is not None:
            loader.load_state_dict(state)
        list(loader)
        state, epochs = loader.state_dict(), epochs + 1
        loader.close()
        run = read_run(tmp_path)
        assert run.exact and len(run.epochs) == epochs
        assert all((one.never, one.complete) == (0, True) for one in run.epochs), run.epochs


def test_ranks_with_different_numbers_of_passes_in_one_start(tmp_path: Path) -> None:
    def ranks(attempt: str) -> list[midepoch.Loader]:
        ledgers = [Ledger(tmp_path, attempt=attempt) for _ in range(2)]
        return [
            not_3(40, 2).loader(4, rank=rank, world_size=2, last_batch="uneven", audit=ledgers[rank])
            for rank in range(2)
        ]

    loaders = ranks("1")
    for _ in range(2):
        for loader in loaders:
            next(loader)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.exclude(rows=[3])
    next(loaders[0])  # rank 1 is slower, and the run is killed
    next(loaders[0])
    for loader in loaders:
        loader.close()
    last = not_3(40, 2).loader(4, audit=Ledger(tmp_path, attempt="2"))
    last.load_state_dict(states)
    list(last)
    last.close()
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].complete, run.problems


@pytest.mark.parametrize("kind", ["rows", "filter"])
def test_leases_that_are_out_at_the_end_are_to_come(kind: str, tmp_path: Path) -> None:
    def loader(attempt: str) -> midepoch.Loader:
        ds = shuffled(20) if kind == "rows" else not_3(20)
        return ds.loader(4, audit=Ledger(tmp_path, attempt=attempt))

    first = loader("1")
    with first.lease() as items:
        leases = list(items)
        for lease in leases[:-1]:
            lease.ack()
    proof = read_run(tmp_path).epochs[0]
    assert proof.exact and not proof.complete and proof.pending and proof.leases is not None
    state = first.state_dict()
    first.close()
    second = loader("2")
    second.load_state_dict(state)
    with second.lease() as items:
        for lease in items:
            lease.ack()
    second.state_dict()
    proof = read_run(tmp_path).epochs[0]
    assert proof.complete, proof


@pytest.mark.parametrize("sizes", [(4, 3, 5), (4, 4, 4), (3, 5, 8)])
def test_leases_and_outputs_that_are_dropped(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    def loader(attempt: int) -> midepoch.Loader:
        return not_3(20).loader(sizes[attempt], last_batch="drop", audit=Ledger(tmp_path, attempt=str(attempt)))

    first = loader(0)
    seen = ids([next(first), next(first)])
    second = loader(1)
    second.load_state_dict(first.state_dict())
    first.close()
    with second.lease() as items:
        lease = next(items)
        seen += lease.batch["id"].tolist()
        lease.ack()
    third = loader(2)
    third.load_state_dict(second.state_dict())
    second.close()
    seen += ids(third)
    third.close()
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert run.exact and proof.complete and proof.never == 0, proof
    assert proof.dropped == 19 - len(seen)


def test_leases_and_a_batch_that_is_larger_than_the_rest(tmp_path: Path) -> None:
    first = shuffled(48).loader(13, last_batch="drop", audit=Ledger(tmp_path, attempt="1"))
    with first.lease() as items:
        for _ in range(2):
            next(items).ack()
    second = shuffled(48).loader(24, last_batch="drop", audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(first.state_dict())
    first.close()
    next(second)
    next(second)
    second.close()
    run = read_run(tmp_path)
    assert run.exact and (run.epochs[0].never, run.epochs[0].dropped) == (0, 22)


def test_the_rest_of_a_document_is_to_come(tmp_path: Path) -> None:
    documents = midepoch.from_dict({"input_ids": [list(range(10 * i, 10 * i + 10)) for i in range(5)]})
    loader = documents.pack(8, pad=-1).with_lanes(1).loader(1, audit=tmp_path)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    loader.state_dict()
    assert not read_run(tmp_path).epochs[0].complete
    assert len(list(batches)) == 1
    assert read_run(tmp_path).epochs[0].complete


def test_rows_that_a_loaded_state_skips_are_found_at_once(tmp_path: Path) -> None:
    first = shuffled(20).loader(4, audit=Ledger(tmp_path, attempt="1"))
    list(first)
    first.close()
    other = shuffled(20).loader(4)
    list(other)
    ahead = iter(other)
    next(ahead)
    next(ahead)
    second = shuffled(20).loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(other.state_dict())
    run = read_run(tmp_path)
    assert not run.exact and len(run.epochs) == 2 and run.epochs[1].never == 8


def test_an_epoch_that_is_wholly_excluded_is_no_second_loader(tmp_path: Path) -> None:
    plan = shuffled(12).loader(4)
    plan.exclude(steps=[1, 2, 3])
    first = shuffled(12).loader(4, audit=Ledger(tmp_path, attempt="1"))
    first.load_state_dict(plan.state_dict())
    first.exclude(rows=[3])
    state = first.state_dict()
    first.close()
    second = shuffled(12).loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    list(second)
    next(second)
    next(second)
    run = read_run(tmp_path)
    assert run.exact, run.problems


@pytest.mark.parametrize("taken", [2, 4])
def test_a_state_at_the_end_of_an_epoch_whose_rest_was_excluded(taken: int, tmp_path: Path) -> None:
    documents = midepoch.from_dict({"input_ids": [[i] * (1 + i % 5) for i in range(48)]})
    mixed = midepoch.mix([documents.slice(0, 30).shuffle(seed=3), documents.slice(30, 48)], [2, 1], seed=1, stop="all")
    ds = mixed.pack(8, pad=-1).with_lanes(2)

    def ranks(attempt: str) -> list[midepoch.Loader]:
        options: dict[str, Any] = {"world_size": 2, "last_batch": "uneven"}
        return [ds.loader(2, rank=rank, audit=Ledger(tmp_path, attempt=attempt), **options) for rank in range(2)]

    loaders = ranks("1")
    passes = [iter(loader) for loader in loaders]
    for _ in range(taken):
        for one in passes:
            next(one)
    assert all(loader.exclude(steps=range(taken + 1, taken + 10)) for loader in loaders)
    assert not any(list(one) for one in passes)
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    for loader in ranks("2"):
        loader.load_state_dict(states)
        next(loader)
        next(loader)
        loader.close()
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].complete and run.epochs[0].excluded_outputs, run.epochs


def test_a_rank_with_nothing_left_waits_for_the_others() -> None:
    """A state has the lanes of all ranks. After an edit, a rank knows only its own."""
    ds = not_3(20, 4)
    first = ds.loader(3, last_batch="uneven")
    for _ in range(6):
        next(first)
    state = first.state_dict()
    ranks = [ds.loader(1, rank=rank, world_size=4, last_batch="uneven") for rank in range(4)]
    for loader in ranks:
        loader.load_state_dict(state)
        loader.exclude(steps=[7])
    assert [list(loader) for loader in ranks] == [[]] * 4
    assert sorted(ids(batch for loader in ranks for batch in loader)) == sorted(set(range(20)) - {3})


def test_a_state_with_nothing_left_for_a_batch_is_recorded(tmp_path: Path) -> None:
    """The pass that finds this has no batch, and no record of its own."""

    def loaders(attempt: str, world: int, size: int) -> list[midepoch.Loader]:
        options: dict[str, Any] = {"last_batch": "drop", "world_size": world}
        ledgers = [Ledger(tmp_path, attempt=attempt) for _ in range(world)]
        return [shuffled(23).loader(size, rank=rank, audit=ledgers[rank], **options) for rank in range(world)]

    first = loaders("1", 2, 3)
    for _ in range(3):
        for loader in first:
            next(loader)
    state = first[0].state_dict()
    (second,) = loaders("2", 1, 2)
    second.load_state_dict(state)
    assert len(ids(second)) == 4  # and it is killed before it saves
    second.close()
    third = loaders("3", 2, 4)
    for loader in third:
        loader.load_state_dict(state)
        next(loader)
        next(loader)
    run = read_run(tmp_path)
    assert run.exact and (run.epochs[0].once, run.epochs[0].dropped) == (18, 5), run.epochs[0]


def test_a_rank_that_has_taken_no_lease_has_some_to_come(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path, attempt="1") for _ in range(2)]
    ranks = [
        shuffled(7).loader(2, rank=rank, world_size=2, last_batch="uneven", audit=ledgers[rank]) for rank in range(2)
    ]
    with ranks[1].lease() as items:
        for lease in items:
            lease.ack()
    proof = read_run(tmp_path).epochs[0]
    assert proof.exact and not proof.complete and proof.pending, proof


def test_ranks_with_more_steps_in_turn(tmp_path: Path) -> None:
    """Rank 0 has fewer steps than rank 1 in one epoch, and more in the next. A state after both takes nothing back."""

    def ranks(attempt: str, world: int) -> list[midepoch.Loader]:
        ds = midepoch.from_dict({"input_ids": [[n] * (1 + n % 7) for n in range(24)]}).shuffle(seed=1)
        ds = ds.filter(lambda row: row["input_ids"][0] % 11 != 5).with_lanes(2).with_format("numpy")
        options: dict[str, Any] = {"max_tokens": 8, "bucket_window": 10, "last_batch": "uneven", "world_size": world}
        options["length"] = lambda row: len(row["input_ids"])
        return [ds.loader(rank=rank, audit=Ledger(tmp_path, attempt=attempt), **options) for rank in range(world)]

    loaders = ranks("1", 2)
    assert [[len(list(loader)) for loader in loaders] for _ in range(2)] == [[5, 10], [9, 6]]
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    (last,) = ranks("2", 1)
    last.load_state_dict(states)
    run = read_run(tmp_path)
    assert run.exact and all(proof.once == 24 for proof in run.epochs), run.epochs


def test_ranks_that_share_a_lane_have_different_cursors_of_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many groups are made at once depends on the time that they take, and with it where a cursor begins."""
    many: Any = {"batched": True, "batch_size": 7, "one_to_one": False}
    ds = shuffled(140).map(lambda rows: {"id": list(rows["id"]) + list(rows["id"])[:3]}, **many).with_lanes(1)
    ranks = []
    for rank, first in enumerate((7, 112)):
        monkeypatch.setattr("midepoch.pipeline.rows._FIRST", first)
        loader = ds.loader(5, rank=rank, world_size=2, last_batch="uneven", audit=Ledger(tmp_path, attempt="1"))
        batches = iter(loader)
        for _ in range(7 + rank):  # one more than the other, which saves
            next(batches)
        loader.state_dict()  # writes its cursors
        ranks.append(loader)
    resumed = ds.loader(5, audit=Ledger(tmp_path, attempt="2"))
    resumed.load_state_dict(ranks[0].state_dict())
    list(resumed)
    run = read_run(tmp_path)
    places = [track.at(0, 7) for track in run.every[0].tracks.values()]
    assert places[0] != places[1] and run.exact, (places, run.epochs)


@pytest.mark.parametrize("filtered", [False, True])
def test_leases_that_came_back_are_delivered_by_a_pass_without_leases(filtered: bool, tmp_path: Path) -> None:
    loader = (not_3(60) if filtered else shuffled(60)).loader(2, audit=tmp_path)
    with loader.lease() as items:
        out = [next(items) for _ in range(4)]
        for item in out[:2]:
            item.ack()
    seen = ids(item.batch for item in out[:2]) + ids(loader)
    assert sorted(seen) == [number for number in range(60) if number != 3 or not filtered]
    epoch = read_run(tmp_path).epochs[0]
    assert epoch.exact and epoch.complete, epoch


def test_the_rows_of_groups_in_progress_are_named_for_each_step(tmp_path: Path) -> None:
    def twice(rows: dict[str, Any]) -> dict[str, Any]:
        return {"id": [number for number in rows["id"] for _ in range(2)]}

    loader = shuffled(40).map(twice, batched=True, batch_size=10, one_to_one=False).loader(6, audit=tmp_path)
    batches = [set(ids([batch])) for batch in loader]
    run = read_run(tmp_path)
    for step, batch in enumerate(batches, 1):
        named = {one.row for one in run.rows_of_step(step)}
        assert batch <= named
        assert all(step in {one.step for one in run.steps_of_row(row)} for row in batch)


@pytest.mark.parametrize("size", [8, 10])
def test_a_step_without_a_record_is_lost_unless_it_is_one_of_a_branch(size: int, tmp_path: Path) -> None:
    def start(name: str, size: int, state: Any = None, *, recorded: bool = True) -> midepoch.Loader:
        loader = shuffled(48).loader(size, **({"audit": Ledger(tmp_path, attempt=name)} if recorded else {}))
        if state is not None:
            loader.load_state_dict(state)
        return loader

    first = start("first", 10)
    next(first)
    state = first.state_dict()
    next(first)  # a branch that is given up
    unrecorded = start("unrecorded", size, state, recorded=False)
    next(unrecorded)
    list(start("last", 6, unrecorded.state_dict()))
    proof = read_run(tmp_path).epochs[0]
    # With the size of the branch, the state is one that the branch had there: the record is that of a run without loss.
    assert (proof.exact, proof.never) == ((True, 0) if size == 10 else (False, 8))


def tokens(rows: int, seed: int) -> midepoch.Dataset:
    draw = random.Random(seed)
    return midepoch.from_list([{"input_ids": [seed] * draw.randint(5, 60)} for _ in range(rows)]).shuffle(seed=seed)


PACKED: dict[str, Callable[[], midepoch.Dataset]] = {
    "one": lambda: tokens(60, 1).pack(32),
    "concat": lambda: midepoch.concat([tokens(60, 1), tokens(25, 2)]).pack(32),
    "mix": lambda: midepoch.mix([tokens(60, 1), tokens(25, 2)], [0.7, 0.3], seed=3).pack(32),
    "mix of all": lambda: midepoch.mix([tokens(60, 1), tokens(25, 2)], seed=3, stop="all").pack(32),
    "mix of mixes": lambda: midepoch.mix([midepoch.mix([tokens(30, 3), tokens(30, 4)]), tokens(25, 2)]).pack(32),
    "filters": lambda: midepoch.mix([tokens(60, 1).filter(lambda row: len(row["input_ids"]) > 9), tokens(25, 2)]).pack(
        32
    ),
}


@pytest.mark.parametrize("kind", PACKED)
def test_documents_of_packed_sources_are_counted_once(kind: str, tmp_path: Path) -> None:
    """The document in progress is of one of the sources, and not of each."""
    for lanes, steps in ((1, 1), (2, 5), (4, 9), (2, None)):
        folder = tmp_path / f"{lanes}-{steps}"
        loader = PACKED[kind]().with_lanes(lanes).loader(2, last_batch="drop", provenance=True, audit=folder)
        documents = set()
        for batch in itertools.islice(loader, steps):
            found = batch["doc_ids"]
            documents |= set(zip(found["source"].tolist(), found["row"].tolist(), strict=True))
        loader.close()
        epoch = read_run(folder).epochs[0]
        assert epoch.once - epoch.filtered == len(documents) and epoch.dropped >= 0, (lanes, steps, epoch)
        assert epoch.rows == epoch.once + epoch.dropped + epoch.pending


@pytest.mark.parametrize("one_process", [False, True])
@pytest.mark.parametrize("kind", ["rows", "filter"])
def test_a_state_of_a_rank_that_was_ahead_is_lost_also_beside_a_branch_that_has_its_steps(
    kind: str, one_process: bool, tmp_path: Path
) -> None:
    """A state names its branch: an equal one was saved in another branch, in which all ranks had delivered it."""

    def ranks(start: str, state: Any = None) -> list[midepoch.Loader]:
        start = "1" if one_process else start
        ds = shuffled(24) if kind == "rows" else not_3(25, lanes=1)
        loaders = [
            ds.loader(2, rank=rank, world_size=2, last_batch="uneven", audit=Ledger(tmp_path, attempt=start))
            for rank in range(2)
        ]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(state)
        return loaders

    def take(loaders: list[midepoch.Loader], *steps: int) -> None:
        for loader, count in zip(loaders, steps, strict=True):
            for _ in range(count):
                next(loader)

    first = ranks("1")
    take(first, 2, 2)
    early = first[0].state_dict()
    whole = ranks("2", early)
    take(whole, 3, 3)
    late = whole[0].state_dict()  # all ranks have delivered these five steps
    back = ranks("3", early)
    take(back, 3, 1)
    ahead = back[0].state_dict()  # of which rank 1 has delivered three
    assert {**ahead, "more": []} == {**late, "more": []}
    for number, (state, exact) in enumerate(((late, True), (ahead, False)), start=4):
        list(ranks(str(number), state)[0])
        run = read_run(tmp_path)
        assert run.exact == exact, (state, run.epochs)


def test_a_state_that_is_saved_before_a_step_is_of_the_branch_that_it_continues(tmp_path: Path) -> None:
    first = shuffled(24).loader(2, audit=Ledger(tmp_path, attempt="1"))
    assert not dict(first.state_dict()["more"])
    for _ in range(3):
        next(first)
    state = first.state_dict()
    branch = dict(state["more"])["branches"]
    second = shuffled(24).loader(2, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    assert second.state_dict() == state
    next(second)
    assert dict(second.state_dict()["more"])["branches"] not in (branch, "")
    third = shuffled(24).loader(2)
    third.load_state_dict(second.state_dict())
    assert not dict(third.state_dict()["more"])  # without a ledger there are no branches


def test_a_run_with_ranks_at_different_steps_comes_back_to_a_branch(tmp_path: Path) -> None:
    """Rank 1 has a step more of the first epoch. Which state it was, the units of each rank tell."""

    def ranks(start: str, world: int) -> list[midepoch.Loader]:
        ds = not_3(23, lanes=2)
        return [
            ds.loader(2, rank=rank, world_size=world, last_batch="uneven", audit=Ledger(tmp_path, attempt=start))
            for rank in range(world)
        ]

    first = ranks("1", 2)
    assert len({len(list(loader)) for loader in first}) == 2
    for loader in first:
        next(loader)
    early = [loader.state_dict() for loader in first]
    for loader in first:
        next(loader)
        loader.state_dict()
    for start in ("2", "3"):
        (alone,) = ranks(start, 1)
        alone.load_state_dict(early)
        next(alone)
        if start == "3":
            list(alone)
    run = read_run(tmp_path)
    assert run.exact and [epoch.once for epoch in run.epochs] == [23, 23], run.epochs


def test_a_state_of_a_part_that_is_not_recorded(tmp_path: Path) -> None:
    """Its rows count as never delivered, and the audit says why."""
    first = shuffled(24).loader(2, audit=Ledger(tmp_path, attempt="1"))
    for _ in range(3):
        next(first)
    state = first.state_dict()
    first.close()
    for file in tmp_path.glob("*.ledger"):
        file.unlink()
    ds = shuffled(24)
    ds.load_state_dict(state)  # a loader of the dataset begins there, too
    list(ds.loader(2, audit=Ledger(tmp_path, attempt="2")))
    run = read_run(tmp_path)
    assert run.epochs[0].never == 6 and not run.exact
    (problem,) = run.problems
    assert "saved in a part of the run that is not recorded here" in problem
