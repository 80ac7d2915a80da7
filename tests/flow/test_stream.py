"""What streams yield, against plain Python that does the same; what they refuse; what they cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.errors import CheckpointMismatchError, ColumnError, MapError, StateError
from midepoch.testing import assert_resumes_exactly, same
from midepoch.tools.plan import plan_resume

ROWS = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows with an id, a text and tokens: some empty, some null, one very long."""
    rng = np.random.default_rng(3)
    lengths = [0 if i % 11 == 0 else 500 if i == 77 else int(rng.integers(1, 40)) for i in range(ROWS)]
    tokens = [None if i % 29 == 5 else [i * 1000 + k for k in range(length)] for i, length in enumerate(lengths)]
    table = pa.table(
        {
            "id": range(ROWS),
            "text": [f"row number {i} " * (i % 5) for i in range(ROWS)],
            "tokens": pa.array(tokens, pa.list_(pa.int64())),
        }
    )
    folder = tmp_path_factory.mktemp("stream")
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=17)
    return str(folder)


@pytest.fixture
def ds(path: str) -> midepoch.Dataset:
    return midepoch.from_files(path)


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


# What comes out


def test_filter(ds: midepoch.Dataset) -> None:
    shuffled = ds.shuffle(seed=4)
    expected = [i for i in ids(shuffled) if i % 3 == 0]
    mod = pc.subtract(pc.field("id"), pc.multiply(pc.divide(pc.field("id"), 3), 3))
    assert ids(shuffled.filter(lambda row: row["id"] % 3 == 0)) == expected
    assert ids(shuffled.filter(lambda n: n % 3 == 0, input_columns="id")) == expected
    assert ids(shuffled.filter(lambda batch: [n % 3 == 0 for n in batch["id"]], batched=True, batch_size=7)) == expected
    assert ids(shuffled.filter(mod == 0)) == expected
    assert ids(shuffled.map(lambda row: {"double": row["id"] * 2}).filter(pc.field("double") < 20)) == [
        i for i in ids(shuffled) if i < 10
    ]
    assert ids(ds.filter(pc.field("tokens").is_valid())) == [i for i in range(ROWS) if i % 29 != 5]


def test_flat_map_and_unbatch(ds: midepoch.Dataset) -> None:
    stream = ds.flat_map(lambda row: [{"id": row["id"], "k": k} for k in range(row["id"] % 4)])
    assert [(row["id"], row["k"]) for row in stream] == [(i, k) for i in range(ROWS) for k in range(i % 4)]
    rows = list(ds.select_columns(["id", "tokens"]).unbatch("tokens"))
    expected = [(row["id"], token) for row in ds for token in row["tokens"] or []]
    assert [(row["id"], row["tokens"]) for row in rows] == expected


def test_map_to_any_number_of_rows(ds: midepoch.Dataset) -> None:
    def pairs(batch: dict[str, Any]) -> dict[str, Any]:
        return {"pair": [batch["id"][i : i + 2] for i in range(0, len(batch["id"]), 2)]}

    assert [row["pair"] for row in ds.map(pairs, True, 5, one_to_one=False)][:4] == [[0, 1], [2, 3], [4], [5, 6]]
    with pytest.raises(MapError, match="one_to_one=False"):
        list(ds.map(pairs, True, 5))
    with pytest.raises(MapError, match="different lengths"):
        list(ds.map(lambda batch: {"a": [1], "b": [1, 2]}, True, 5, one_to_one=False))


def test_batch(ds: midepoch.Dataset) -> None:
    found = list(ds.filter(odd).batch(7).with_format("python"))
    assert [row["id"] for row in found[:2]] == [[1, 3, 5, 7, 9, 11, 13], [15, 17, 19, 21, 23, 25, 27]]
    assert len(found[-1]["id"]) == 150 % 7
    assert len(list(ds.filter(odd).batch(7, drop_last=True))) == 150 // 7
    assert ids(ds.filter(odd).batch(7).unbatch(["id", "text", "tokens"])) == ids(ds.filter(odd))


def test_shuffle_of_outputs(ds: midepoch.Dataset) -> None:
    stream = ds.filter(odd).shuffle(seed=1, window=20)
    first = ids(stream)
    expected = ids(ds.filter(odd))
    for at in range(0, 150, 20):
        assert sorted(first[at : at + 20]) == expected[at : at + 20], "within windows"
    assert first != expected
    stream.set_epoch(1)
    assert ids(stream) != first
    assert first[:8] == [5, 11, 31, 33, 13, 35, 19, 21], "pinned: an order is for ever"


def naive_packs(documents: list[list[int]], length: int, eos: int | None) -> list[dict[str, list[int]]]:
    """Concat packing, token by token."""
    flat = [
        (token, number, k)
        for number, document in enumerate(documents)
        for k, token in enumerate([*document, *([eos] if eos is not None and document else [])])
    ]
    packs = []
    for at in range(0, len(flat), length):
        part = flat[at : at + length]
        pack: dict[str, list[int]] = {"tokens": [], "position_ids": [], "segment_ids": [], "cu_seqlens": [0]}
        last, position, segment = None, 0, 0
        for token, number, _ in part:
            if number != last:
                if last is not None:
                    pack["cu_seqlens"].append(len(pack["tokens"]))
                last, position, segment = number, 0, segment + 1
            pack["tokens"].append(token)
            pack["position_ids"].append(position)
            pack["segment_ids"].append(segment)
            position += 1
        pack["cu_seqlens"].append(len(part))
        for name in ("tokens", "position_ids", "segment_ids"):
            pack[name] += [0] * (length - len(part))
        packs.append(pack)
    return packs


@pytest.mark.parametrize("eos", [None, 5])
@pytest.mark.parametrize("length", [1, 7, 64, 1000, 100_000])
def test_pack_concat(length: int, eos: int | None, ds: midepoch.Dataset) -> None:
    if length == 1 and eos is not None:
        pytest.skip("the same again")
    shuffled = ds.shuffle(seed=2)
    found = list(shuffled.pack(length, "tokens", eos=eos, cu_seqlens=True))
    expected = naive_packs([row["tokens"] or [] for row in shuffled], length, eos)
    assert [{name: np.asarray(value).tolist() for name, value in row.items()} for row in found] == expected


def test_pack_best_fit(ds: midepoch.Dataset) -> None:
    found = list(ds.pack(64, "tokens", "best_fit", cu_seqlens=True, window=50).with_format("numpy"))
    pieces = []
    for row in found:
        segments = row["segment_ids"]
        full = int((segments > 0).sum())
        changes = (np.flatnonzero(np.diff(segments[:full])) + 1).tolist()
        assert row["cu_seqlens"].tolist() == [0, *changes, full]
        for a, b in pairwise(row["cu_seqlens"].tolist()):
            pieces.append(row["tokens"][a:b].tolist())
            assert len(set(segments[a:b].tolist())) == 1
            assert row["position_ids"][a:b].tolist() == list(range(b - a))
        assert not segments[row["cu_seqlens"][-1] :].any()
    expected = [
        document[at : at + 64] for row in ds for document in [row["tokens"] or []] for at in range(0, len(document), 64)
    ]
    assert sorted(pieces) == sorted(expected), "every piece once, none cut but those that do not fit"
    tokens = sum(map(len, expected))
    loader = ds.pack(64, "tokens", "best_fit", window=50).loader(4)
    list(loader)
    assert loader.packing_efficiency == tokens / (len(found) * 64) > 0.9
    assert ds.filter(odd).loader(4).packing_efficiency is None


def test_pack_extra_columns(ds: midepoch.Dataset) -> None:
    both = ds.map(lambda row: {"labels": [-1 - t for t in row["tokens"] or []]}).map(
        lambda row: {"tokens": row["tokens"] or []}
    )
    for row in both.pack(50, "tokens", eos=3, extra={"labels": -100}).with_format("numpy"):
        real = (row["segment_ids"] > 0) & (row["tokens"] != 3)
        assert (row["labels"][real] == -1 - row["tokens"][real]).all()
        assert (row["labels"][~real] == -100).all()
    with pytest.raises(MapError, match="not equally long"):
        list(ds.map(lambda row: {"labels": [1]}).pack(8, "tokens", extra={"labels": 0}))
    with pytest.raises(ColumnError, match="no column 'nothing'"):
        ds.pack(8, "nothing")
    with pytest.raises(ColumnError, match="not lists of numbers"):
        list(ds.pack(8, "text"))


def test_mix_has_exact_counts(ds: midepoch.Dataset) -> None:
    parts = [ds.slice(0, 100).shuffle(seed=1), ds.slice(100, 200).shuffle(seed=2), ds.slice(200, 300).shuffle(seed=3)]
    mixed = midepoch.mix(parts, weights=[0.5, 0.3, 0.2], seed=7)
    found = [row["id"] // 100 for row in mixed]
    for at in range(0, len(found) // 10 * 10, 10):
        assert Counter(found[at : at + 10]) == {0: 5, 1: 3, 2: 2}
    assert 200 <= len(found) < 210, "until the first has nothing left"
    assert found[:12] == [0, 0, 1, 1, 2, 1, 2, 0, 0, 0, 0, 1], "pinned: an order is for ever"
    for number, part in enumerate(parts):
        mine = [row["id"] for row in mixed if row["id"] // 100 == number]
        assert mine == ids(part)[: len(mine)], "each source in its own order"


def test_maps_behind_a_mix_are_run_by_its_sources(ds: midepoch.Dataset) -> None:
    mixed = midepoch.mix([ds.take(50), ds.skip(250).filter(odd)], seed=1)
    mapped = mixed.map(lambda row: {"double": row["id"] * 2}).select_columns(["id", "double"])
    assert not mapped.pipeline.node.stages
    assert [(row["id"], row["double"]) for row in mapped] == [(i, 2 * i) for i in ids(mixed)]
    assert mixed.filter(odd).pipeline.node.stages, "what drops rows would change the proportions"
    assert ids(mixed.filter(odd)) == [i for i in ids(mixed) if i % 2]
    assert mixed.select_columns("id").rename_columns({"id": "n"}).column_names == ["n"]


@pytest.mark.parametrize("stop", ["all", "never"])
def test_mix_goes_through_sources_again(stop: str, ds: midepoch.Dataset) -> None:
    small, large = ds.slice(0, 10).shuffle(seed=1), ds.slice(100, 200).shuffle(seed=2)
    mixed = midepoch.mix([small, large], weights=[1, 1], seed=7, stop=stop)
    found = ids(islice(mixed, 260))
    if stop == "all":
        assert 199 <= len(found) <= 202
        assert sorted(i for i in found if i >= 100) == list(range(100, 200))
    else:
        assert len(found) == 260
    again = [i for i in found if i < 10]
    for at in range(0, len(again) // 10 * 10, 10):
        assert sorted(again[at : at + 10]) == list(range(10)), "every pass has every row"
    assert again[:10] != again[10:20], "shuffled anew"
    assert again[:10] == ids(small)


def test_concat_and_zip(ds: midepoch.Dataset) -> None:
    parts = [ds.slice(0, 5), ds.slice(100, 105).filter(odd), ds.slice(7, 9)]
    assert ids(midepoch.concat(parts)) == [0, 1, 2, 3, 4, 101, 103, 7, 8]
    assert len(midepoch.concat([ds.take(5), ds.take(7)])) == 12
    other = ds.select_columns("id").rename_columns({"id": "other"}).skip(200)
    both = midepoch.zip([ds.filter(odd).select_columns("id"), other])
    assert [(row["id"], row["other"]) for row in both] == [(2 * i + 1, 200 + i) for i in range(100)]
    with pytest.raises(ColumnError, match="'id'"):
        midepoch.zip([ds, ds])


def test_generators_depend_on_seed_epoch_and_row_only(ds: midepoch.Dataset) -> None:
    def noisy(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
        return {"noise": generator.random()}

    noise = {row["id"]: row["noise"] for row in ds.shuffle(seed=5).map(noisy, with_generator=True)}
    kept = ds.shuffle(seed=5).filter(odd).map(noisy, with_generator=True)
    plain = {
        row["id"]: row["noise"] for row in ds.shuffle(seed=5).filter(lambda r: True).map(noisy, with_generator=True)
    }
    for lanes, workers in ((1, 0), (3, 0), (2, 2)):
        found = [row for batch in kept.with_lanes(lanes).loader(8, workers, collate_fn=list) for row in batch]
        assert len(found) == 150
        assert all(row["noise"] == plain[row["id"]] for row in found)
    assert len(set(noise.values())) == ROWS
    twice = ds.flat_map(lambda row: [row, row]).map(noisy, with_generator=True)
    assert len({row["noise"] for row in twice}) == 2 * ROWS, "rows made of one row draw other numbers"


def test_order_does_not_depend_on_workers(ds: midepoch.Dataset) -> None:
    stream = (
        ds.shuffle(seed=1)
        .filter(odd)
        .map(lambda b: {"s": [sum(b["id"])] * len(b["id"])}, True, 6)
        .shuffle(seed=1, window=9)
    )
    expected = list(stream.loader(8))
    for workers in (1, 3):
        with stream.loader(8, workers, persistent_workers=True) as loader:
            assert same(list(loader), expected)
    for size in (1, 5, 100):
        assert [int(i) for batch in stream.loader(size) for i in batch["id"]] == [
            int(i) for batch in expected for i in batch["id"]
        ]


# Resuming


def test_parquet(tmp_path: Path) -> None:
    """Blocks that have to be decoded: fetched ahead, by workers that are started anew."""
    for number in range(3):
        tokens = pa.array([list(range(i % 7)) for i in range(100)], pa.list_(pa.int32()))
        pq.write_table(
            pa.table({"id": range(number * 100, number * 100 + 100), "tokens": tokens}),
            tmp_path / f"{number}.parquet",
            row_group_size=30,
        )

    def make(workers: int = 0) -> Any:
        ds = midepoch.from_files(str(tmp_path)).shuffle(seed=1)
        mixed = midepoch.mix([ds.filter(odd), ds.shuffle(seed=2)], [0.5, 0.5], stop="all")
        return mixed.pack(16, "tokens").with_lanes(2).loader(4, workers)

    assert_resumes_exactly(make, resume_with=[lambda: make(2)], steps=[0, 1, 12, 25], tail=4)


class Counting:
    """Counts the rows that it is asked about."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, row: dict[str, Any]) -> bool:
        self.rows += 1
        return bool(row["id"] % 2)


def test_a_resume_runs_one_bounded_group_again(ds: midepoch.Dataset) -> None:
    counting = Counting()
    make = lambda: ds.shuffle(seed=1).filter(counting).pack(16, "tokens").loader(2)  # noqa: E731
    loader = make()
    total = len(list(loader))
    loader = make()
    passing = iter(loader)
    for _ in range(total * 9 // 10):
        next(passing)
    state = loader.state_dict()
    counting.rows = 0
    resumed = make()
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert counting.rows <= 64, "not the rows before"


def test_state_is_small(ds: midepoch.Dataset) -> None:
    wide = ds.shuffle(seed=1).filter(odd).pack(8, "tokens").shuffle(seed=2, window=3).with_lanes(64).loader(16)
    passing = iter(wide)
    for _ in range(5):
        next(passing)
        assert len(json.dumps(wide.state_dict())) < 4096
    parts = [ds.slice(i * 30, i * 30 + 30).shuffle(seed=i).filter(odd) for i in range(8)]
    nested = midepoch.mix([midepoch.mix(parts[:4]), midepoch.mix(parts[4:], stop="all")], [0.9, 0.1], stop="all")
    loader = nested.pack(16, "tokens").with_lanes(4).loader(4)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 8192


def test_mix_may_be_changed_on_resume(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    parts = {i: ds.slice(i * 60, i * 60 + 60).shuffle(seed=i).filter(lambda row: row["id"] % 5 > 0) for i in range(4)}

    def loader(chosen: list[int], weights: list[float]) -> Any:
        return midepoch.mix([parts[i] for i in chosen], weights=weights, stop="never").loader(6, collate_fn=ids)

    before = loader([0, 1, 2], [0.5, 0.3, 0.2])
    seen = [i for batch in islice(before, 7) for i in batch]
    assert before.changes == ()
    after = loader([3, 2, 0], [0.2, 0.6, 0.2])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert "weights [0.5, 0.3, 0.2] became [0.2, 0.6, 0.2]" in after.changes[0]
    assert "sources [1] left" in after.changes[0] and "sources [0] joined" in after.changes[0]
    assert "another mix" in caplog.text
    passing = iter(after)
    seen += [i for batch in islice(passing, 9) for i in batch]
    for number in (0, 2, 3):
        mine = [i for i in seen if i // 60 == number]
        whole = ids(parts[number])
        assert mine[: len(whole)] == whole[: len(mine)], f"source {number} goes on where it was"
    # The change is part of the state, and going on from there is exact.
    again = loader([3, 2, 0], [0.2, 0.6, 0.2])
    again.load_state_dict(json.loads(json.dumps(after.state_dict())))
    assert again.changes == after.changes
    assert list(islice(again, 5)) == list(islice(passing, 5))
    same_mix = loader([0, 1, 2], [0.5, 0.3, 0.2])
    same_mix.load_state_dict(before.state_dict())
    assert same_mix.changes == ()


def test_what_does_not_belong_is_refused(ds: midepoch.Dataset) -> None:
    shuffled = ds.shuffle(seed=1)
    stream = shuffled.filter(odd).pack(16, "tokens")
    loader = stream.loader(3)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    others: dict[str, Any] = {
        "pipeline": shuffled.pack(16, "tokens"),
        "seed": ds.shuffle(seed=2).filter(odd).pack(16, "tokens"),
        "rows": ds.take(100).shuffle(seed=1).filter(odd).pack(16, "tokens"),
        "scope": ds.filter(odd).pack(16, "tokens"),
    }
    for field, other in others.items():
        with pytest.raises(CheckpointMismatchError) as raised:
            other.loader(3).load_state_dict(state)
        assert raised.value.field == field
    for other in (
        shuffled.filter(odd).pack(17, "tokens"),
        shuffled.filter(odd).pack(16, "tokens", eos=1),
        shuffled.filter(odd).pack(16, "tokens", "best_fit"),
        shuffled.filter(odd).shuffle(seed=1),
        shuffled.filter(odd).filter(odd).pack(16, "tokens"),
        midepoch.mix([shuffled.filter(odd), ds]).pack(16, "tokens"),
    ):
        with pytest.raises(CheckpointMismatchError, match="pipeline"):
            other.load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="pipeline"):
        ds.shuffle(seed=1).load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="pipeline"):
        stream.load_state_dict(ds.shuffle(seed=1).state_dict())
    shuffled.filter(lambda row: row["id"] % 2 == 1).pack(16, "tokens").load_state_dict(state)  # other code, same kind


def test_allow(ds: midepoch.Dataset) -> None:
    loader = ds.shuffle(seed=1).filter(odd).pack(16, "tokens").loader(3)
    next(iter(loader))
    state = loader.state_dict()
    longer = ds.shuffle(seed=1).filter(odd).pack(20, "tokens").loader(3)
    longer.load_state_dict(state, allow=["pipeline"])
    assert longer.changes == ("pipeline: 'filter,pack[16 concat tokens]' became 'filter,pack[20 concat tokens]'",)
    assert json.loads(longer.state_dict()["changes"]) == list(longer.changes)
    next(iter(longer))
    with pytest.raises(ValueError, match="allow takes a list"):
        longer.load_state_dict(state, allow="pipeline")
    for other in (ds.shuffle(seed=1).filter(odd), ds.shuffle(seed=1).filter(odd).batch(3)):
        with pytest.raises(CheckpointMismatchError, match="the stages have changed"):
            other.loader(3).load_state_dict(state, allow=["pipeline"])
    plain = ds.shuffle(seed=1).loader(3)
    next(iter(plain))
    mapped = ds.shuffle(seed=1).map(lambda row: {"x": 1}).loader(3)
    mapped.load_state_dict(plain.state_dict(), allow=["pipeline"])
    assert mapped.position == 3 and mapped.changes == ("pipeline: 'none' became 'map'",)
    again = ds.shuffle(seed=1).map(lambda row: {"x": 1}).loader(3)
    again.load_state_dict(mapped.state_dict())
    assert again.changes == mapped.changes


@pytest.mark.parametrize(
    "damage",
    [
        {"flow": "["},
        {"flow": "[1]"},
        {"flow": "[[0, 1, 0, [1]]]"},
        {"flow": "[[0, 1, 0, [[5, 0], -1]]]"},
        {"flow": "[[0, 1, 0, [[99999, 0], 0]]]"},
        {"flow": "[[9, 1, 0, [[5, 0], 0]]]"},
        {"known": "x"},
        {"known": "1/2"},
        {"changes": "{"},
        {"flow": 3},
    ],
)
def test_damaged_states_are_refused(damage: dict[str, Any], ds: midepoch.Dataset) -> None:
    stream = ds.filter(odd).pack(16, "tokens")
    next(iter(stream))
    state = {**stream.state_dict(), **damage}
    fresh = ds.filter(odd).pack(16, "tokens")
    with pytest.raises(StateError, match="damaged"):
        fresh.load_state_dict(state)
    assert fresh.position == 0


def test_state_of_one_of_several_ranks(ds: midepoch.Dataset) -> None:
    loaders = [ds.filter(odd).loader(4, rank=rank, world_size=2) for rank in range(2)]
    for loader in loaders:
        next(iter(loader))
    states = [loader.state_dict() for loader in loaders]
    assert not loaders[0].state_is_global
    with pytest.raises(CheckpointMismatchError, match="the list of the states of all ranks"):
        ds.filter(odd).loader(4).load_state_dict(states[0])
    with pytest.raises(CheckpointMismatchError, match="the list of the states of all ranks"):
        ds.filter(odd).loader(4, rank=1, world_size=2).load_state_dict(states[0])
    with pytest.raises(CheckpointMismatchError, match="the states of all ranks"):
        ds.filter(odd).loader(4).load_state_dict([states[0], states[0]])
    next(iter(loaders[0]))
    passing = iter(loaders[0])
    next(passing), next(passing)
    with pytest.raises(CheckpointMismatchError, match="not at the same step"):
        ds.filter(odd).loader(4).load_state_dict([loaders[0].state_dict(), states[1]])


def test_plan_says_which_lanes_a_rank_runs_and_what_is_left(ds: midepoch.Dataset) -> None:
    kept = ds.shuffle(seed=1).filter(odd).with_lanes(4)
    loader = kept.loader(5)
    for _ in islice(loader, 6):
        pass
    plan = plan_resume(loader.state_dict(), kept, world_size=2, batch_size=4, machines=2)
    assert plan.accepted and plan.checked == "dataset" and (plan.epoch, plan.position) == (0, 30)
    assert plan.lanes == ((0, 2), (1, 3)) and plan.global_batch == 8
    rows = [entry[3][0] for entry in json.loads(loader.state_dict()["flow"])]
    assert [machine.rows for machine in plan.machines] == [150 - rows[0] - rows[2], 150 - rows[1] - rows[3]]
    assert all(machine.blocks and machine.bytes for machine in plan.machines)
    assert 10 <= plan.steps_left <= 20, "an estimate of (150 - 30) / 8"
    uneven = plan_resume(loader.state_dict(), kept, world_size=3, batch_size=4)
    assert uneven.accepted and any("do not divide" in note for note in uneven.notes)
    refused = plan_resume(loader.state_dict(), ds.shuffle(seed=1), world_size=2, batch_size=4)
    assert not refused.accepted and "pipeline differs" in str(refused.problem)
    alone = plan_resume(loader.state_dict(), world_size=2, batch_size=4)
    assert not alone.accepted and "Pass it" in str(alone.problem)


# Lengths, shapes, errors


def test_lengths(ds: midepoch.Dataset) -> None:
    stream = ds.shuffle(seed=1).filter(odd)
    with pytest.raises(TypeError, match="estimated_len"):
        len(stream)
    assert stream.estimated_len is None
    loader = stream.loader(10)
    for number, _ in enumerate(loader):
        assert loader.estimated_len is not None
        if number > 3:
            assert abs(loader.estimated_len - 15) <= 4
    fresh = stream.loader(10)
    fresh.load_state_dict(loader.state_dict())
    assert fresh.estimated_len == loader.estimated_len == 15, "of the epoch that was gone through"
    mixed = midepoch.mix([ds.filter(odd), ds.filter(odd)], [0.75, 0.25])
    for _ in islice(mixed, 60):
        assert mixed.estimated_len is None or mixed.estimated_len > 0
    assert abs(len(list(midepoch.mix([ds.filter(odd), ds.filter(odd)], [0.75, 0.25]))) - 200) < 8
    assert len(midepoch.zip([ds, ds.rename_columns({"id": "a", "text": "b", "tokens": "c"}).take(9)])) == 9


def test_nothing_is_left(ds: midepoch.Dataset) -> None:
    nothing = ds.filter(lambda row: False)
    assert list(nothing) == [] and nothing.column_names == ["id", "text", "tokens"]
    loader = nothing.loader(4)
    assert list(loader) == [] and list(loader) == []
    assert loader.state_dict()["epoch"] == 2
    assert list(nothing.pack(8, "tokens").batch(2).shuffle(seed=1).loader(2, num_workers=1)) == []


def test_user_errors(ds: midepoch.Dataset) -> None:
    with pytest.raises(TypeError, match="filter takes a function or a pyarrow expression"):
        ds.filter("id > 3")
    with pytest.raises(ColumnError, match="no column 'nothing'"):
        ds.filter(lambda n: n, input_columns="nothing")
    with pytest.raises(ColumnError, match="nothing"):
        ds.filter(pc.field("nothing") > 3)
    with pytest.raises(MapError, match=r"filter\(<lambda>\) failed on row 0 of the dataset"):
        list(ds.filter(lambda row: row["missing"]))
    with pytest.raises(MapError, match="must return rows"):
        list(ds.flat_map(lambda row: {"id": 1}))
    with pytest.raises(ValueError, match="Use flat_map for a function of one row"):
        ds.map(lambda row: {}, one_to_one=False)
    with pytest.raises(TypeError, match="no positions to index"):
        ds.filter(odd)[3]
    with pytest.raises(ValueError, match="2 weights for 3 sources"):
        midepoch.mix([ds, ds, ds], weights=[1, 2])
    with pytest.raises(ValueError, match="weights must be 0 or more"):
        midepoch.mix([ds, ds], weights=[1, -1])
    with pytest.raises(ColumnError, match="source 1 has id"):
        midepoch.mix([ds, ds.select_columns("id")])
    with pytest.raises(TypeError, match="expected a Dataset to combine"):
        midepoch.mix([ds, [1, 2]])
    with pytest.raises(ValueError, match="stop must be one of"):
        midepoch.mix([ds, ds], stop="later")
    with pytest.raises(ValueError, match="strategy must be"):
        ds.pack(8, "tokens", "worst")
    skipping = ds.filter(lambda row: 1 / (row["id"] % 10) > 0, on_error="skip")
    assert len(list(skipping)) == 270


def test_break_iterate_again_and_set_epoch(ds: midepoch.Dataset) -> None:
    stream = ds.shuffle(seed=1).filter(odd)
    loader = stream.loader(10, collate_fn=ids)
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


def test_resumes_at_every_step(ds: midepoch.Dataset) -> None:
    small = ds.take(80)
    make = lambda: (  # noqa: E731
        midepoch.mix([small.shuffle(seed=1).filter(odd), ds.slice(100, 160).shuffle(seed=2)], [0.6, 0.4], stop="all")
        .pack(32, "tokens")
        .shuffle(seed=4, window=6)
        .with_lanes(2)
    )
    assert_resumes_exactly(lambda: make().loader(5), epochs=2, tail=4)
    others = [lambda: make().loader(5, num_workers=2)]
    assert_resumes_exactly(lambda: make().loader(5), resume_with=others, steps=[0, 3, 5, 9], epochs=1, tail=3)


JAX = """
import json, sys
import jax
import midepoch
from midepoch.testing import assert_resumes_exactly

def odd(row):
    return row["id"] % 2

def make(workers=0):
    ds = midepoch.from_files(sys.argv[1]).select_columns(["id"]).take(40)
    return ds.filter(odd).with_format("jax").loader(4, num_workers=workers)

if __name__ == "__main__":
    batch = next(iter(make()))
    assert isinstance(batch["id"], jax.Array) and batch["id"].tolist() == [1, 3, 5, 7]
    assert_resumes_exactly(make)
    assert [b["id"].tolist() for b in make(1)] == [b["id"].tolist() for b in make()]
    print("done")
"""


def test_jax_iteration(path: str, tmp_path: Path) -> None:
    """In a process of its own: where JAX runs, workers are started anew instead of forked."""
    script = tmp_path / "script.py"
    script.write_text(JAX)
    done = subprocess.run([sys.executable, str(script), path], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr


TOKENIZING = """
import sys, warnings
warnings.simplefilter("error")
import midepoch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
texts = [row["text"] for row in midepoch.from_files(sys.argv[1])]
tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=200, show_progress=False))
tokenizer.encode_batch(texts)  # with threads, before workers are forked
ds = midepoch.from_files(sys.argv[1]).select_columns("text")
expected = [one.ids for one in tokenizer.encode_batch(texts)]
for workers in (0, 2):
    rows = [row for batch in ds.filter(len, input_columns="text").tokenize(tokenizer).loader(16, workers, collate_fn=list) for row in batch]
    assert [row["input_ids"] for row in rows] == [ids for ids in expected if ids], workers
assert [row["input_ids"] for row in ds.tokenize(tokenizer)] == expected
from transformers import PreTrainedTokenizerFast
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
assert [row["input_ids"] for row in ds.tokenize(fast)] == expected
assert [len(row["input_ids"]) for row in ds.tokenize(fast, truncation=True, max_length=3)] == [min(3, len(ids)) for ids in expected]
packed = list(ds.tokenize(tokenizer).pack(32, eos=0).loader(4, 2))
assert sum(int((batch["segment_ids"] > 0).sum()) for batch in packed) == sum(len(ids) + 1 for ids in expected if ids)
print("done")
"""


def test_tokenize_without_fork_warnings(path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOKENIZING, path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "done\n", done.stderr
    assert "fork" not in done.stderr and "TOKENIZERS_PARALLELISM" not in done.stderr


def test_checkpoint_of_ranks(ds: midepoch.Dataset, tmp_path: Path) -> None:
    """A stream in PipelineCheckpoint: one process, exactly."""
    make: Callable[[], Any] = lambda: ds.shuffle(seed=1).filter(odd).pack(16, "tokens").loader(3)  # noqa: E731
    loader = make()
    passing = iter(loader)
    next(passing), next(passing)
    midepoch.PipelineCheckpoint(tmp_path).save(loader, step=2)
    rest = list(passing)
    other = make()
    assert midepoch.PipelineCheckpoint(tmp_path).restore_latest(other) == 2
    assert same(list(other), rest)
