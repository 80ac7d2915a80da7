"""Matching a saved state with a pipeline: what is compared, what may differ, and what is taken over."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import midepoch
from data import Numbers, dataset_of
from midepoch.errors import CheckpointMismatchError
from midepoch.order import Shard
from midepoch.pipeline.cursor import flow_cursor, listed
from midepoch.pipeline.node import Node, Rebatch, Slice, StageSpec, Window
from midepoch.pipeline.spec import DEFAULTS, describe
from midepoch.state.changing import Convert, LaneContext, needed
from midepoch.state.matching import CHECKED, Matched, taken_over
from midepoch.transforms.packing import PackSpec


def ns(rows: Any) -> list[int]:
    return [row["n"] for row in rows]


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


def always(row: dict[str, Any]) -> bool:
    return True


def as_document(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [row["n"]] * (1 + row["n"] % 5)}


def node(ds: midepoch.Dataset) -> Node:
    return ds.pipeline.node


def matched(
    saved: midepoch.Dataset | dict[str, Any], here: midepoch.Dataset, *allow: str
) -> tuple[Node, Convert, list[str]]:
    """The node that is resumed, how its cursors are converted, and what was recorded."""
    described = saved if isinstance(saved, dict) else copied(describe(node(saved)))
    changes: list[str] = []
    return *Matched(allow, changes).match(node(here), described, ""), changes


DIFFERENT = {
    "data": "0" * 24,
    "rows": 41,
    "selection": "1:41",
    "scope": "files",
    "weights": "40 weights 0123456789abcdef",
    "seed": 2,
    "window": 9,
    "pipeline": "map,map",
    "arguments": "limit=3,-",
}


def test_every_field_but_those_taken_over_is_compared() -> None:
    assert set(DIFFERENT) == {"data", *CHECKED} - {"aligned"}


@pytest.mark.parametrize("field", DIFFERENT)
def test_every_field_is_compared_and_may_be_allowed_to_differ(field: str, numbers: Numbers) -> None:
    ds = numbers(0, 40).shuffle(seed=1, scope="window", window=3)
    ds = ds.map(fn_kwargs_taken, fn_kwargs={"limit": 2}).filter(always)
    described = copied(describe(node(ds)))
    found, _, changes = matched(described, ds)
    assert describe(found) == described and changes == []
    saved = {**described, field: DIFFERENT[field]}
    with pytest.raises(CheckpointMismatchError) as raised:
        matched(saved, ds)
    here = described.get(field, DEFAULTS.get(field))
    assert (raised.value.field, raised.value.saved, raised.value.current) == (field, DIFFERENT[field], here)
    assert f"allow=['{field}']" in str(raised.value)
    assert matched(saved, ds, field)[2] == [f"{field}: {DIFFERENT[field]!r} became {here!r}"]


def fn_kwargs_taken(row: dict[str, Any], limit: int) -> dict[str, Any]:
    return {"limit": limit}


@pytest.mark.parametrize("kind", ["batch", "shuffle", "pack", "slice", "mix"])
def test_stages_that_have_cursors_of_their_own_cannot_be_allowed_to_differ(kind: str, numbers: Numbers) -> None:
    plain = numbers(0, 40).filter(always)
    other = {
        "batch": lambda: plain.batch(2),
        "shuffle": lambda: plain.shuffle(seed=1, window=4),
        "pack": lambda: plain.map(as_document).pack(7),
        "slice": lambda: plain.take(9),
        "mix": lambda: midepoch.mix([plain, plain]),
    }[kind]()
    with pytest.raises(CheckpointMismatchError, match="pipeline"):
        matched(plain, other, "pipeline", "arguments")


def test_arguments_are_compared_where_both_sides_have_them_and_the_steps_are_the_same(numbers: Numbers) -> None:
    ds = numbers(0, 40)
    three, four = (ds.filter(pc.field("n") > limit) for limit in (3, 4))
    with pytest.raises(CheckpointMismatchError, match="arguments differs"):
        matched(three, four)
    older = {name: value for name, value in describe(node(three)).items() if name != "arguments"}
    assert matched(older, four)[2] == []
    assert [change.partition(":")[0] for change in matched(three, four.filter(always), "pipeline")[2]] == ["pipeline"]


def test_a_drawn_seed_is_taken_over_and_a_given_one_compared(numbers: Numbers) -> None:
    ds = numbers(0, 40)
    saved = ds.shuffle(seed=7)
    assert matched(saved, ds.shuffle())[0].base.order.shuffle.seed == 7
    drawn = ds.shuffle()
    assert matched(saved, drawn, "seed")[0].base.order.shuffle.seed == drawn.pipeline.base.seed
    with pytest.raises(CheckpointMismatchError, match="seed differs"):
        matched(saved, ds.shuffle(seed=8))
    with pytest.raises(CheckpointMismatchError, match="scope differs"):
        matched(ds, ds.shuffle())


def test_settings_of_a_shuffle_that_were_not_given_are_taken_over(numbers: Numbers) -> None:
    ds = numbers(0, 40)
    saved = ds.shuffle(seed=7, scope="window", window=3)
    for here in (ds.shuffle(seed=7), ds.shuffle(seed=7, scope="window"), ds.shuffle(seed=7, window=3)):
        assert describe(matched(saved, here)[0]) == describe(node(saved))
        mapped_before = {**describe(node(saved)), "aligned": True}  # where the files were reached in another way
        assert describe(matched(mapped_before, here)[0]) == mapped_before
    for here, field in (
        (ds.shuffle(seed=7, scope="rows"), "scope"),
        (ds.shuffle(seed=7, scope="window", window=4), "window"),
    ):
        leaf = here.pipeline.base
        if field == "scope":
            assert taken_over(leaf, {**DEFAULTS, **describe(node(saved))}) is leaf
        with pytest.raises(CheckpointMismatchError, match=f"{field} differs"):
            matched(saved, here)


IN_LANE = LaneContext(0, Shard(0, 1))


def test_the_cursor_of_a_mix_that_is_the_same_stays(numbers: Numbers) -> None:
    mixed = midepoch.mix({"a": numbers(0, 40), "b": numbers(100, 140)}, [2, 1], seed=3)
    _, convert, changes = matched(mixed, mixed)
    cursor = flow_cursor([5, 2, [[0, 0, [3, 0]], [1, 1, [2, 0]]]])
    assert convert(cursor, 0, IN_LANE) == cursor and changes == []


def test_sources_of_a_changed_mix_keep_their_cursors_and_the_schedule_begins_again(numbers: Numbers) -> None:
    a, b, c = numbers(0, 40), numbers(100, 140), numbers(200, 240)
    saved = midepoch.mix({"a": a, "b": b}, [2, 1], seed=3)
    cursor = flow_cursor([5, 2, [[0, 0, [3, 0]], [1, 1, [2, 0]]]])
    _, convert, changes = matched(saved, midepoch.mix({"b": b, "c": c, "a": a}, [1, 1, 1], seed=3))
    assert listed(convert(cursor, 0, IN_LANE)) == [0, 3, [[1, 1, [2, 0]], [0, 0, [0, 0]], [0, 0, [3, 0]]]]
    assert changes == [
        "mix: weights [2.0, 1.0] became [1.0, 1.0, 1.0]; sources [1] joined; sources [1, 0] in this order"
    ]
    _, convert, changes = matched(saved, midepoch.mix({"b": b}, seed=3))
    assert listed(convert(cursor, 0, IN_LANE)) == [0, 3, [[1, 1, [2, 0]]]]
    assert changes == ["mix: weights [2.0, 1.0] became [1.0]; sources [0] left"]


def test_a_changed_mix_stays_as_it_was_for_outputs_that_are_still_needed(numbers: Numbers) -> None:
    a, b = numbers(0, 40), numbers(100, 140)
    saved = midepoch.mix({"a": a, "b": b}, [1, 1], seed=3)
    cursor = flow_cursor([4, 0, [[0, 0, [2, 0]], [0, 0, [2, 0]]]])
    _, convert, _ = matched(saved, midepoch.mix({"b": b, "a": a}, [9, 1], seed=3))
    parts = [[0, 0, [2, 0]], [0, 0, [2, 0]]]
    assert listed(convert(cursor, 3, IN_LANE)) == [4, 0, parts, [7, [1.0, 1.0], [1, 0], -1]]
    with pytest.raises(CheckpointMismatchError, match="weights"):
        convert(cursor, None, IN_LANE)  # how many are needed is not known


@pytest.mark.parametrize(
    ("stage", "skip", "need", "below"),
    [
        (Slice(3), 5, 2, 2),
        (Rebatch(4), 0, 0, 0),
        (Rebatch(4), 0, 1, 4),
        (Window(6, 1), 2, 0, 6),
        (Window(6, 1), 2, 1, 6),
        (Window(6, 1), 2, 2, None),
        (Window(6, 1), 0, None, None),
        (PackSpec(8, "tokens"), 3, 0, 1),
        (PackSpec(8, "tokens"), 3, 1, None),
        (PackSpec(8, "tokens", "best_fit", window=5), 1, 0, 5),
    ],
    ids=str,
)
def test_outputs_below_a_stage_that_must_stay_the_same(
    stage: StageSpec, skip: int, need: int | None, below: int | None
) -> None:
    assert needed(stage, skip, need) == below


def test_sources_that_look_the_same_need_names(numbers: Numbers) -> None:
    a = numbers(0, 100)
    even, odd = a.filter(lambda row: row["n"] % 2 == 0), a.filter(lambda row: row["n"] % 2 == 1)
    loader = midepoch.mix([even, odd], weights=[3, 1], seed=1, stop="all").loader(1, collate_fn=ns)
    list(islice(loader, 20))
    with pytest.raises(CheckpointMismatchError, match="name the sources"):
        midepoch.mix([odd], seed=1, stop="all").loader(1).load_state_dict(loader.state_dict())
    named = midepoch.mix({"even": even, "odd": odd}, {"odd": 1, "even": 3}, seed=1, stop="all").loader(1, collate_fn=ns)
    seen = [n for batch in islice(named, 20) for n in batch]
    after = midepoch.mix({"odd": odd, "even": even}, seed=1, stop="all").loader(1, collate_fn=ns)
    after.load_state_dict(copied(named.state_dict()))
    seen += [n for batch in islice(after, 30) for n in batch]
    for rest in (0, 1):
        mine = [n for n in seen if n % 2 == rest]
        assert mine == list(range(rest, 2 * len(mine), 2))
    seeds = [a.shuffle(seed=1), a.shuffle(seed=2)]
    loader = midepoch.mix(seeds, seed=1).loader(1, collate_fn=ns)
    list(islice(loader, 6))
    one = midepoch.mix(seeds[1:], seed=1).loader(1, collate_fn=ns)
    one.load_state_dict(loader.state_dict())
    assert next(iter(one)) == [ns(seeds[1])[3]], "known by its seed"


def test_a_mix_of_other_data_is_refused(numbers: Numbers) -> None:
    loader = midepoch.mix([numbers(0, 50), numbers(100, 150)], seed=1).loader(2)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(CheckpointMismatchError, match="data differs"):
        midepoch.mix([numbers(200, 250), numbers(300, 350)], seed=1).loader(2).load_state_dict(state)
    grown = midepoch.mix([numbers(0, 50), numbers(100, 151)], seed=1).loader(2)
    with pytest.raises(CheckpointMismatchError, match="data differs"):
        grown.load_state_dict(state)
    grown.load_state_dict(state, allow=["data"])
    assert "sources [1] joined" in grown.changes[0]


def test_steps_that_only_choose_columns_may_differ(tmp_path: Path) -> None:
    ds = dataset_of(tmp_path / "t", pa.table({"input_ids": [[i] * 3 for i in range(60)]}))
    loader = ds.pack(8).loader(2)
    list(islice(loader, 3))
    chosen = ds.pack(8).select_columns(["input_ids"]).rename_columns({"input_ids": "x"}).loader(2)
    chosen.load_state_dict(loader.state_dict())
    assert next(iter(chosen))["x"].tolist() == list(ds.pack(8).loader(2))[3]["input_ids"].tolist()


def test_parameters_that_move_rows_are_compared(tmp_path: Path, numbers: Numbers) -> None:
    state = numbers(0, 100).filter(lambda b: [True] * len(b["n"]), True, 10).state_dict()
    with pytest.raises(CheckpointMismatchError, match="batched 10"):
        numbers(0, 100).filter(lambda b: [True] * len(b["n"]), True, 5).load_state_dict(state)
    lists = dataset_of(tmp_path / "l", pa.table({"x": [[1, 2]], "y": [[1, 2]]}))
    with pytest.raises(CheckpointMismatchError, match="unbatch"):
        lists.unbatch("y").load_state_dict(lists.unbatch("x").state_dict())


def counted(rows: list[int]) -> set[int]:
    return set(Counter(rows).values())


def test_a_source_may_have_another_name(numbers: Numbers) -> None:
    a, b = numbers(0, 50), numbers(100, 150)
    loader = midepoch.mix({"a": a, "b": b}, seed=1).loader(1, collate_fn=ns)
    seen = [n for batch in islice(loader, 9) for n in batch]
    renamed = midepoch.mix({"web": a, "b": b}, seed=1).loader(1, collate_fn=ns)
    renamed.load_state_dict(copied(loader.state_dict()))
    seen += [n for batch in islice(renamed, 20) for n in batch]
    assert counted(seen) == {1}


@pytest.mark.parametrize("saved_filtered", [False, True])
def test_a_state_of_positions_and_one_of_lanes_are_never_exchanged(
    small_files: list[str], saved_filtered: bool
) -> None:
    plain = midepoch.from_files(small_files)
    filtered = plain.filter(lambda row: bool(row["id"] % 2))
    saved, other = (filtered, plain) if saved_filtered else (plain, filtered)
    for allow in ([], ["pipeline"]):
        with pytest.raises(CheckpointMismatchError, match="cannot be allowed") as refused:
            other.loader(4).load_state_dict(saved.loader(4).state_dict(), allow=allow)
        assert refused.value.field == "pipeline" and "loads it anyway" not in str(refused.value)
