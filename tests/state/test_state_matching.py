"""Matching a saved state with a pipeline: what is compared, what may differ, and what is taken over."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from data import Numbers, dataset_of
from midepoch.errors import CheckpointMismatchError


def ns(rows: Any) -> list[int]:
    return [row["n"] for row in rows]


def copied(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_sources_that_look_the_same_need_names(numbers: Numbers) -> None:
    a = numbers(0, 100)
    even, odd = a.filter(lambda row: row["n"] % 2 == 0), a.filter(lambda row: row["n"] % 2 == 1)
    loader = midepoch.mix([even, odd], weights=[3, 1], seed=1, stop="all").loader(1, collate_fn=ns)
    list(islice(loader, 20))
    with pytest.raises(CheckpointMismatchError, match="give the sources names"):
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
