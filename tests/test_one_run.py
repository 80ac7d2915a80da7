"""One run: combinations of features that were wrong once. Each is compared with a log of what was delivered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import midepoch
from midepoch.audit import Ledger, read_run
from midepoch.errors import CheckpointMismatchError
from pairs import alternating
from states import lanes_of


def data(first: int, rows: int) -> midepoch.Dataset:
    numbers = range(first, first + rows)
    columns = {"id": list(numbers), "input_ids": [[n] * (1 + n % 7) for n in numbers]}
    return midepoch.from_dict(columns).shuffle(seed=1)


def ids(batch: Any) -> list[int]:
    return [int(each) for each in batch["id"]]


def rest_of(loader: midepoch.Loader) -> list[int]:
    return [row for batch in loader for row in ids(batch)]


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": row["input_ids"] * 2}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_leases_of_several_ranks_with_excluded_rows(world: int) -> None:
    """Turns of ranks are those of the rows that are left."""

    def make(rank: int, ranks: int) -> midepoch.Loader:
        return data(0, 100).loader(2, rank=rank, world_size=ranks, last_batch="uneven")

    seen: list[int] = []
    states = []
    for rank, acked in enumerate((6, 2)):
        loader = make(rank, 2)
        loader.exclude(rows=range(0, 100, 5))
        with loader.lease() as items:
            for _, lease in zip(range(acked), items, strict=False):
                seen += ids(lease.batch)
                lease.ack()
        states.append(loader.state_dict())
    resumed = [make(rank, world) for rank in range(world)]
    for loader in resumed:
        loader.load_state_dict(json.loads(json.dumps(states)))
        seen += rest_of(loader)
    assert sorted(seen) == [row for row in range(100) if row % 5]


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("edited", ["before", "after"])
def test_ranks_that_leave_a_pass_before_its_last_step_continue_with_the_same_rows(edited: str, leased: bool) -> None:
    """A rank with nothing left is in the next epoch. What is left is dealt to the others as before, after excluded rows, too."""
    for excluded, begun, world in ((1, 0, 4), (2, 3, 4), (3, 5, 3), (5, 1, 2)):
        first = data(0, 40).loader(1, last_batch="uneven")
        seen = [row for batch in islice(first, begun) for row in ids(batch)]
        gone = [row for row in range(40) if row not in seen][::7][:excluded]
        loaders = [data(0, 40).loader(1, rank=rank, world_size=world, last_batch="uneven") for rank in range(world)]
        steps = (40 - len(seen) - (excluded if edited == "before" else 0)) // world
        for loader in loaders:
            loader.load_state_dict(first.state_dict())
            if edited == "before":
                loader.exclude(rows=gone)
        for batches in map(iter, loaders):
            seen += [row for batch in islice(batches, steps) for row in ids(batch)]
            batches.close()
        for loader in loaders:
            if edited == "after":
                loader.exclude(rows=gone)
            if loader.epoch:
                continue
            if leased:
                with loader.lease() as items:
                    for lease in items:
                        seen += ids(lease.batch)
                        lease.ack()
            else:
                seen += rest_of(loader)
        left_out = {row for row in gone if row not in seen}
        assert sorted([*seen, *left_out]) == list(range(40)), (excluded, begun, world)


@pytest.mark.parametrize("excluded", [True, False], ids=["excluded", "acknowledged"])
def test_units_ahead_and_other_batches_whose_lengths_are_known_at_run_time(excluded: bool) -> None:
    """They are numbers of outputs. Where those mean others, the state is refused before anything changes."""
    makers = {
        "rows": lambda: data(0, 60).map(doubled).filter(bool).loader(4),
        "tokens": lambda: data(0, 60).map(doubled).filter(bool).loader(max_tokens=40, bucket_window=20),
        "other tokens": lambda: data(0, 60).map(doubled).filter(bool).loader(max_tokens=60, bucket_window=20),
    }
    for before, make in makers.items():
        loader = make()
        if excluded:
            loader.exclude(steps=[2, 4])
        else:
            with loader.lease() as items:
                leases = [lease for _, lease in zip(range(4), items, strict=False)]
                leases[2].ack()
        state = loader.state_dict()
        for after, other in makers.items():
            resumed = other()
            if after == before:
                resumed.load_state_dict(state)
                assert len(rest_of(resumed)) < 60
                continue
            with pytest.raises(CheckpointMismatchError, match="excluded or acknowledged"):
                resumed.load_state_dict(state)
            assert resumed.state_dict() == other().state_dict()


@pytest.mark.parametrize(
    ("change", "stage"),
    alternating(
        [([1, 1], [1, 0]), ([1, 0], [1, 1]), ([1, 1], [0, 1]), ([0, 1], [2, 1])], ["shuffle", "tokens", "best fit"]
    ),
)
def test_weights_to_and_from_0_in_a_window_with_the_end_of_the_mix(
    change: tuple[list[float], list[float]], stage: str, tmp_path: Path
) -> None:
    before, after = change

    def make(attempt: str = "1", folder: Path | None = None) -> midepoch.Loader:
        ds = midepoch.mix({"a": data(0, 36), "b": data(1000, 18)}, before, seed=1, stop="all")
        options: dict[str, Any] = {"audit": Ledger(folder, attempt=attempt)} if folder is not None else {}
        if stage == "shuffle":
            return ds.shuffle(seed=3, window=16).loader(4, **options)
        if stage == "tokens":
            return ds.map(doubled).loader(max_tokens=40, bucket_window=16, **options)
        ds = ds.pack(24, strategy="best_fit", window=16, pad=-1)
        return ds.loader(2, provenance=True, **options)

    def rows(batch: Any) -> list[int]:
        if stage == "best fit":
            return [
                1000 * int(s) + int(r)
                for s, r in zip(*(batch["doc_ids"][k].tolist() for k in ("source", "row")), strict=True)
            ]
        return ids(batch)

    steps = sum(1 for _ in make())
    wanted = {"a": range(36), "b": range(1000, 1018)}
    for at in range(1 + int(sum(after)) % 2, steps, 2):
        folder = tmp_path / f"{at}"
        loader = make(folder=folder)
        batches = iter(loader)
        delivered = [rows(next(batches)) for _ in range(at)]
        loader.set_weights(after)
        state = loader.state_dict()
        rest = [rows(batch) for _, batch in zip(range(500), batches, strict=False)]
        seen = Counter(row for batch in delivered + rest for row in batch)
        over = all(lane.get("ended") for lane in lanes_of(state).values())
        for name, weight in zip("ab", after, strict=True):
            missing = [row for row in wanted[name] if not seen[row]]
            assert not (weight and missing) or over, (at, name, missing)
        assert max(seen.values()) <= 4, at
        if rest:
            resumed = make("2", folder)
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert [rows(batch) for batch in resumed] == rest, at
        run = read_run(folder)
        assert run.exact and not run.epochs[0].pending, (at, run.problems, run.epochs[0])


@pytest.mark.parametrize("kind", ["rows", "lanes", "planned", "run time"])
def test_one_number_for_a_step(kind: str, tmp_path: Path) -> None:
    """The loop's, ``loader.steps``, the state's and the ledger's, over other batches and worlds."""

    def make(size: int, rank: int, world: int, attempt: str) -> midepoch.Loader:
        ds = data(0, 200)
        options: dict[str, Any] = {"rank": rank, "world_size": world, "last_batch": "uneven"}
        options["audit"] = Ledger(tmp_path, attempt=attempt)
        if kind in ("planned", "run time"):
            ds = ds if kind == "planned" else ds.map(doubled).with_lanes(2)
            return ds.loader(max_tokens=40 if kind == "run time" else 8 * size, bucket_window=50, **options)
        return (ds if kind == "rows" else ds.filter(bool).with_lanes(2)).loader(size, **options)

    step, state, log = 0, None, dict[int, list[int]]()
    for number, (size, world, steps) in enumerate([(4, 1, 5), (8, 2, 4), (3, 1, 6)]):
        loaders = [make(size, rank, world, str(number)) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(steps):
            step += 1
            log[step] = []
            for loader in loaders:
                log[step] += ids(next(loader))
                assert loader.steps == step and loader.state_dict()["steps"] == step
        state = [loader.state_dict() for loader in loaders]
    run = read_run(tmp_path)
    assert run.steps == step and run.exact
    for number, rows in log.items() if kind in ("rows", "planned") else ():
        assert sorted(one.row for one in run.rows_of_step(number)) == sorted(rows)
    with pytest.raises(
        ValueError, match=r"step 3 was delivered already: the run is at step 15\. Go back to a checkpoint"
    ):
        loaders[0].exclude(steps=[3, 17])


@pytest.mark.parametrize("kind", ["lanes", "positions"])
def test_excluded_steps_that_were_passed_before_a_crash(kind: str, tmp_path: Path) -> None:
    def make(attempt: str, rank: int = 0, world: int = 1) -> midepoch.Loader:
        ds = data(0, 80)
        ds = ds.filter(bool).with_lanes(3) if kind == "lanes" else ds
        ledger = Ledger(tmp_path, attempt=attempt)
        return ds.loader(4, rank=rank, world_size=world, last_batch="uneven", audit=ledger)

    seen: list[int] = []
    first = make("1")
    seen += ids(next(first))
    first.exclude(steps=[2, 3])
    seen += ids(next(first)) + ids(next(first))
    state = [first.state_dict()]
    ids(next(first))  # lost in a crash
    loaders = [make("2", rank, 3) for rank in range(3)]
    for loader in loaders:
        loader.load_state_dict(state)
        seen += ids(next(loader))
    state = [loader.state_dict() for loader in loaders]
    last = make("3")
    last.load_state_dict(state)
    seen += rest_of(last)
    assert len(seen) == len(set(seen)) == 80 - 8
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert run.exact and proof.complete and proof.excluded + proof.excluded_outputs == 8, proof


def test_steps_that_are_excluded_before_a_restart_with_leases(tmp_path: Path) -> None:
    first = data(0, 40).loader(4, audit=Ledger(tmp_path, attempt="1"))
    next(first)
    first.exclude(steps=[3, 5])
    state = first.state_dict()  # and the process dies before its next batch
    second = data(0, 40).loader(4, audit=Ledger(tmp_path, attempt="2"))
    second.load_state_dict(state)
    with second.lease() as items:
        for lease in items:
            lease.ack()
    second.state_dict()
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].complete and run.epochs[0].excluded == 8 and run.epochs[0].never == 0


@pytest.mark.parametrize("kind", ["filter", "mix", "tokens", "pack"])
def test_rows_that_are_excluded_before_steps_that_are(kind: str, tmp_path: Path) -> None:
    """Outputs up to the last one that is done keep their numbers, so those of excluded rows are left out one by one."""

    def make() -> midepoch.Dataset:
        odd = data(0, 60).filter(lambda row: row["id"] % 7 != 5)
        return {
            "filter": lambda: odd,
            "mix": lambda: midepoch.mix([odd, data(60, 30)], [2, 1], seed=1, stop="all"),
            "tokens": lambda: odd,
            "pack": lambda: odd.pack(7, strategy="best_fit", window=5),
        }[kind]().with_lanes(1)

    def loader(attempt: str, **options: Any) -> midepoch.Loader:
        sizes = {"max_tokens": 24} if kind == "tokens" else {"batch_size": 4}
        ledger = Ledger(tmp_path, attempt=attempt)
        return make().loader(**sizes, last_batch="uneven", provenance=True, audit=ledger, **options)

    def rows_in(batch: Any) -> list[tuple[int, int]]:
        return list(zip(*(batch["doc_ids"][name].tolist() for name in ("source", "row")), strict=True))

    whole = [rows_in(batch) for batch in loader("0")]
    last = loader("1")
    last.exclude(steps=[3])
    gone = {whole[0][1], whole[1][0], whole[4][0]}  # before and after the step
    by_source: dict[int, list[int]] = {}
    for source, row in gone:
        by_source.setdefault(source, []).append(row)
    last.exclude(rows=by_source)
    state = json.loads(json.dumps(last.state_dict()))
    resumed = loader("2")
    resumed.load_state_dict(state)
    seen = {one for batch in resumed for one in rows_in(batch)}
    resumed.state_dict()
    wanted = {one for number, batch in enumerate(whole) if number != 2 for one in batch}
    if kind == "pack":  # a sequence before the step that has other rows, too, stays as it is
        assert seen >= wanted - gone and whole[4][0] not in seen
    else:
        assert seen == wanted - gone
    assert read_run(tmp_path).exact


GROUPED: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "window": lambda ds: ds.shuffle(seed=2, window=10),
    "groups": lambda ds: ds.map(lambda rows: {"id": rows["id"]}, batched=True, batch_size=10),
    "tokens": lambda ds: ds,
}


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("lanes", [1, 2])
def test_rows_that_are_excluded_in_a_group_in_progress(kind: str, lanes: int, tmp_path: Path) -> None:
    """Windows and groups are formed as before, since a part of them is delivered, and the rows are left out of them."""

    def loader(attempt: str) -> midepoch.Loader:
        ds = GROUPED[kind](data(0, 60).filter(lambda row: row["id"] % 7 != 5)).with_lanes(lanes)
        sizes = {"max_tokens": 24} if kind == "tokens" else {"batch_size": 4}
        return ds.loader(**sizes, last_batch="uneven", audit=Ledger(tmp_path / str(steps), attempt=attempt))

    for steps in range(6):
        first = loader("1")
        seen = [row for _ in range(steps) for row in ids(next(first))]
        left = [row for batch in GROUPED[kind](data(0, 60)).loader(4) for row in ids(batch) if row % 7 != 5]
        gone = [row for row in left if row not in seen][::5]
        first.exclude(rows=gone)
        seen += ids(next(first))
        last = loader("2")
        last.load_state_dict(json.loads(json.dumps(first.state_dict())))
        seen += rest_of(last)
        last.state_dict()
        assert sorted(seen) == sorted(set(left) - set(gone))
        assert read_run(tmp_path / str(steps)).exact


@pytest.mark.parametrize("lanes", [1, 2])
def test_weights_that_are_set_in_a_window_of_tokens(lanes: int, tmp_path: Path) -> None:
    def make(attempt: str) -> midepoch.Loader:
        mix = midepoch.mix({"a": data(0, 60), "b": data(1000, 60)}, [1, 1], seed=1, stop="first")
        ds = mix.map(doubled).with_lanes(lanes)
        return ds.loader(max_tokens=40, bucket_window=20, audit=Ledger(tmp_path, attempt=attempt))

    first = make("1")
    seen = sum((ids(next(first)) for _ in range(5)), [])
    first.set_weights([3, 1])
    seen += sum((ids(next(first)) for _ in range(3)), [])
    state = first.state_dict()
    next(first)
    second = make("2")
    second.load_state_dict(state)
    seen += rest_of(second)
    assert len(seen) == len(set(seen))
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert run.exact and proof.complete and proof.once >= len(seen), proof
    assert min(proof.once, proof.dropped, proof.pending, proof.filtered, proof.again) >= 0


def test_the_first_rank_of_a_sequence_keeps_the_book_of_leases() -> None:
    def make(rank: int, world: int, context: int) -> midepoch.Loader:
        ds = midepoch.from_dict({"id": list(range(48)), "input_ids": [[n] * 4 for n in range(48)]}).shuffle(seed=1)
        return ds.loader(2, rank=rank, world_size=world, last_batch="uneven", context_parallel=(context, 2))

    states, seen = [], list[int]()
    for rank in range(2):
        for context in range(2):
            loader = make(rank, 2, context)
            with loader.lease() as items:
                leases = [lease for _, lease in zip(range(6), items, strict=False)]
                for number in (0, 3) if context == 0 else (0, 1, 2, 5):  # they acknowledge differently
                    leases[number].ack()
                    seen += ids(leases[number].batch) if context == 0 else []
            states.append(loader.state_dict())
    parts = []
    for context in range(2):
        loader = make(0, 1, context)
        loader.load_state_dict(json.loads(json.dumps(states)))
        parts.append([ids(batch) for batch in loader])
    assert parts[0] == parts[1] and sorted(seen + sum(parts[0], [])) == list(range(48))
    with pytest.raises(CheckpointMismatchError, match="the first rank of a sequence"):
        make(0, 1, 1).load_state_dict(states[1])


def test_an_epoch_that_is_finished_is_over(tmp_path: Path) -> None:
    """After leases that were left at the last batch, and in lanes with nothing left to do."""
    loader = data(0, 24).loader(4, audit=tmp_path / "leases")
    with loader.lease() as items:
        for lease in [lease for _, lease in zip(range(6), items, strict=False)]:
            lease.ack()
    loader.state_dict()
    assert read_run(tmp_path / "leases").epochs[0].complete
    for lanes in (2, 3):
        folder = tmp_path / f"{lanes}"

        def make(attempt: str, lanes: int = lanes, folder: Path = folder) -> midepoch.Loader:
            return data(0, 30).filter(bool).with_lanes(lanes).loader(4, audit=Ledger(folder, attempt=attempt))

        first = make("1")
        for _ in first:
            pass
        state = first.state_dict()
        second = make("2")
        second.load_state_dict(state)
        assert read_run(folder).epochs[0].complete
        next(iter(second))
        run = read_run(folder)
        assert run.exact and run.epochs[0].complete


def test_weights_of_a_source_that_is_wholly_excluded_are_refused() -> None:
    loader = midepoch.mix({"a": data(0, 10), "b": data(100, 10)}, [1, 1], seed=1, stop="all").loader(2)
    assert loader.exclude(rows={0: [1], "a": [2]}) == 2
    loader.exclude(rows={"a": range(10)})
    with pytest.raises(ValueError, match="source a has no rows"):
        loader.set_weights({"a": 1.0})


def test_only_public_names_are_listed() -> None:
    loader = data(0, 10).loader(2)
    names = dir(loader)
    assert not [name for name in names if name.startswith("_")] and len(names) < 50
    for name in ("how", "left", "may_roll", "namings", "meter", "origin"):
        assert name not in names
    assert "from_csv" not in dir(loader.dataset)


def test_50_000_excluded_rows_do_not_slow_a_state_down() -> None:
    """They are encoded once."""
    loader = data(0, 120_000).select_columns("id").loader(64)
    loader.exclude(rows=range(0, 100_000, 2))
    [[_, first]], [[_, again]] = (dict(loader.state_dict()["more"])["excluded"] for _ in range(2))
    assert first is again and loader.pipeline.excluded_texts[0][1] is first


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"max_tokens": 30}], ids=["rows", "tokens"])
@pytest.mark.parametrize(
    ("what", "when"), [("steps", "pass"), ("rows", "pass"), ("steps", "load"), ("rows", "load"), ("steps", "epoch")]
)
def test_what_is_excluded_at_the_end_of_an_epoch_is_proved(
    options: dict[str, int], what: str, when: str, tmp_path: Path
) -> None:
    """No batch of the epoch follows. It was counted as never delivered."""

    def make(attempt: str) -> midepoch.Loader:
        return data(0, 9).loader(**options, audit=Ledger(tmp_path, attempt=attempt))  # type: ignore[arg-type]

    steps, loader, had = len(list(data(0, 9).loader(**options))), make("1"), []  # type: ignore[arg-type,var-annotated]
    for _ in range(0 if when == "epoch" else steps - 1):
        had += ids(next(loader))
    if when == "load":
        state, loader = loader.state_dict(), make("2")
        loader.load_state_dict(state)
    left = sorted(set(range(9)) - set(had))
    if what == "rows":
        loader.exclude(rows=left)
    else:
        loader.exclude(steps=range(loader.steps + 1, steps + 1))
    rest_of(loader), rest_of(loader)
    loader.close()
    run = read_run(tmp_path)
    assert run.exact and all(epoch.complete for epoch in run.epochs), (run.problems, run.epochs)
    assert (run.epochs[0].once, run.epochs[0].excluded) == (len(had), len(left))


def test_a_long_range_of_steps_is_an_error_at_once() -> None:
    """Its steps are not listed one by one."""
    with pytest.raises(ValueError, match="its last step is 5"):
        data(0, 10).loader(2).exclude(steps=range(1, 10**15))


@pytest.mark.parametrize("planned", [False, True])
def test_rows_that_are_excluded_after_a_resume_with_larger_batches_drop_nothing(planned: bool, tmp_path: Path) -> None:
    """What is too few for a batch is still there for a resume with smaller ones."""

    def ranks(attempt: str, world: int, size: int) -> list[midepoch.Loader]:
        batches: dict[str, Any] = {"max_tokens": 10 * size, "bucket_window": 12} if planned else {"batch_size": size}
        ledger = Ledger(tmp_path, attempt=attempt)
        more = {"last_batch": "drop", "world_size": world, "audit": ledger, **batches}
        return [data(0, 48).loader(rank=rank, **more) for rank in range(world)]

    (first,) = ranks("1", 1, 1)
    assert len(list(islice(first, 20 if planned else 34))) >= 20
    state = first.state_dict()
    for loader in ranks("2", 4, 4):
        loader.load_state_dict(state)
        loader.exclude(rows=[40])
        state = loader.state_dict()
    (last,) = ranks("3", 1, 1)
    last.load_state_dict(state)
    assert list(last)
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].never == 0, run.epochs
    assert run.epochs[0].once + run.epochs[0].excluded + run.epochs[0].dropped == 48
    assert len(run.epochs) == 1


def test_steps_that_are_excluded_after_a_resume_with_larger_batches_prove_what_was_dropped(tmp_path: Path) -> None:
    """They are steps of the next epoch, since what is left of this one is too few for a batch."""

    def start(attempt: str, size: int, state: Any = None) -> midepoch.Loader:
        loader = data(0, 48).loader(size, last_batch="drop", audit=Ledger(tmp_path, attempt=attempt))
        return loader if state is None else loader.load_state_dict(state) or loader

    first = start("1", 2)
    assert len(list(islice(first, 18))) == 18
    second = start("2", 16, first.state_dict())
    second.exclude(steps=[20])
    last = start("3", 4, second.state_dict())
    assert len(list(islice(last, 3))) == 3
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].dropped == 12 and not run.epochs[0].never, run.epochs
