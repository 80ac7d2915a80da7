"""Stages that work on outputs: batches, windows, and what a resume costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import midepoch
from midepoch.testing import assert_resumes_exactly


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_batches_of_outputs_are_full_but_the_last(docs: midepoch.Dataset) -> None:
    found = list(docs.filter(odd).batch(7).with_format("python"))
    assert [row["id"] for row in found[:2]] == [[1, 3, 5, 7, 9, 11, 13], [15, 17, 19, 21, 23, 25, 27]]
    assert len(found[-1]["id"]) == 150 % 7
    assert len(list(docs.filter(odd).batch(7, drop_last=True))) == 150 // 7
    assert ids(docs.filter(odd).batch(7).unbatch(["id", "text", "tokens"])) == ids(docs.filter(odd))


def test_outputs_are_shuffled_within_windows(docs: midepoch.Dataset) -> None:
    stream = docs.filter(odd).shuffle(seed=1, window=20)
    first = ids(stream)
    expected = ids(docs.filter(odd))
    for at in range(0, 150, 20):
        assert sorted(first[at : at + 20]) == expected[at : at + 20], "within windows"
    assert first != expected
    stream.set_epoch(1)
    assert ids(stream) != first
    assert first[:8] == [5, 11, 31, 33, 13, 35, 19, 21], "pinned: an order is for ever"


def test_order_does_not_depend_on_the_batch_size(docs: midepoch.Dataset) -> None:
    stream = (
        docs.shuffle(seed=1)
        .filter(odd)
        .map(lambda b: {"s": [sum(b["id"])] * len(b["id"])}, True, 6)
        .shuffle(seed=1, window=9)
    )
    expected = list(stream.loader(8))
    for size in (1, 5, 100):
        assert [int(i) for batch in stream.loader(size) for i in batch["id"]] == [
            int(i) for batch in expected for i in batch["id"]
        ]


def test_lanes_over_decoded_blocks_resume_exactly(tmp_path: Path) -> None:
    """They are fetched ahead, by workers that are started again."""
    for number in range(3):
        tokens = pa.array([list(range(i % 7)) for i in range(100)], pa.list_(pa.int32()))
        pq.write_table(
            pa.table({"id": range(number * 100, number * 100 + 100), "tokens": tokens}),
            tmp_path / f"{number}.parquet",
            row_group_size=30,
        )

    def make(workers: int = 0) -> Any:
        docs = midepoch.from_files(str(tmp_path)).shuffle(seed=1)
        mixed = midepoch.mix([docs.filter(odd), docs.shuffle(seed=2)], [0.5, 0.5], stop="all")
        return mixed.pack(16, "tokens").with_lanes(2).loader(4, workers)

    assert_resumes_exactly(make, resume_with=[lambda: make(2)], steps=[1, 12, 25], tail=4)


class Counting:
    """Counts the rows that it is asked about."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, row: dict[str, Any]) -> bool:
        self.rows += 1
        return bool(row["id"] % 2)


def test_a_resume_runs_one_bounded_group_again(docs: midepoch.Dataset) -> None:
    counting = Counting()
    make = lambda: docs.shuffle(seed=1).filter(counting).pack(16, "tokens").loader(2)  # noqa: E731
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


def test_a_pipeline_without_outputs_has_empty_epochs(docs: midepoch.Dataset) -> None:
    nothing = docs.filter(lambda row: False)
    assert list(nothing) == [] and nothing.column_names == ["id", "text", "tokens"]
    loader = nothing.loader(4)
    assert list(loader) == [] and list(loader) == []
    assert loader.state_dict()["epoch"] == 2
    assert list(nothing.pack(8, "tokens").batch(2).shuffle(seed=1).loader(2, num_workers=1)) == []


def test_lanes_of_a_shuffled_packed_mix_resume_exactly(docs: midepoch.Dataset) -> None:
    small = docs.take(80)
    make = lambda: (  # noqa: E731
        midepoch.mix([small.shuffle(seed=1).filter(odd), docs.slice(100, 160).shuffle(seed=2)], [0.6, 0.4], stop="all")
        .pack(32, "tokens")
        .shuffle(seed=4, window=6)
        .with_lanes(2)
    )
    assert_resumes_exactly(lambda: make().loader(5), epochs=2, steps=range(0, 24, 3), tail=4)
    others = [lambda: make().loader(5, num_workers=2)]
    assert_resumes_exactly(lambda: make().loader(5), resume_with=others, steps=[3, 9], epochs=1, tail=3)
