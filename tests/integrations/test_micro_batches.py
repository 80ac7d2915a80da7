"""Micro-batches of a step: the same global batches on any number of ranks, and a position that moves with whole steps."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import midepoch
from data import Numbers
from forks import Forks
from midepoch.errors import CheckpointMismatchError, CheckpointNotFoundError
from midepoch.integrations.micro_batches import CollatedParts, MicroBatches, SavedAsText, cut, rank_rows
from midepoch.integrations.states import next_tokens

GLOBAL = 12


@pytest.fixture
def ds(numbers: Numbers) -> midepoch.Dataset:
    return numbers(0, 100).shuffle(seed=1).with_lanes(6)


def on_ranks(ds: midepoch.Dataset, ranks: int, micro: int, **options: Any) -> list[MicroBatches]:
    rows = rank_rows(GLOBAL, micro, ranks)
    loaders = [ds.loader(rows, rank=rank, world_size=ranks, last_batch="drop", **options) for rank in range(ranks)]
    return [MicroBatches(loader, micro) for loader in loaders]


def steps(ranks: list[MicroBatches], number: int, micro: int) -> list[list[int]]:
    """The rows of the next steps, over all ranks."""
    parts = GLOBAL // micro // len(ranks)
    taken = [list(islice(each.passes(), number * parts)) for each in ranks]
    assert all(len(part.batch["n"]) == micro and part.total == parts for one in taken for part in one)
    assert [part.number for part in taken[0]] == list(range(parts)) * number
    return [
        sorted(row for one in taken for part in one[at * parts : (at + 1) * parts] for row in part.batch["n"].tolist())
        for at in range(number)
    ]


def test_global_batches_on_other_ranks_and_micro_batches(ds: midepoch.Dataset) -> None:
    """Over the ends of epochs, which are not a multiple of the rows of a step: 100 rows are 8 steps and 4 rows."""
    whole = steps(on_ranks(ds, 1, 12), 20, 12)
    assert len(set(sum(whole[:8], []))) == 96
    at, state, seen = 0, None, []
    for ranks, micro, number, workers in ((4, 1, 5, 0), (2, 3, 3, 0), (6, 2, 4, 0), (3, 4, 8, 1)):
        batches = on_ranks(ds, ranks, micro, num_workers=workers)
        if state is not None:
            for each in batches:
                each.load(state)
        seen += steps(batches, number, micro)
        state, *others = [each.state() for each in batches]
        assert all(other == state for other in others)  # the same on all ranks
        at += number
    assert seen == whole


def test_state_in_mid_step_is_that_before_it(ds: midepoch.Dataset) -> None:
    (batches,) = on_ranks(ds, 1, 3)
    parts = batches.passes()
    first = [next(parts) for _ in range(4)]
    complete = batches.state()
    following = [next(parts) for _ in range(3)]
    assert batches.state() == complete
    resumed = on_ranks(ds, 1, 3)[0]
    resumed.load(complete)
    again = list(islice(resumed.passes(), 4))
    assert [part.batch["n"].tolist() for part in again[:3]] == [part.batch["n"].tolist() for part in following]
    assert not {row for part in first for row in part.batch["n"].tolist()} & set(again[0].batch["n"].tolist())
    # The same without a load: a pass that was left in mid-step begins the step again.
    assert next(batches.one_pass()).batch["n"].tolist() == following[0].batch["n"].tolist()


class Saved(SavedAsText):
    """A dataloader as that of a framework."""

    _to_begin = "Begin again."

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches


def test_state_of_a_dataloader(ds: midepoch.Dataset) -> None:
    first, second = (Saved(batches) for batches in on_ranks(ds, 2, 3))
    assert len(list(islice(first._batches.passes(), 2))) == 2
    second.load_state_dict(first.state_dict())
    assert second.loader.position == GLOBAL
    with pytest.raises(CheckpointNotFoundError, match=r"only \['dp_rank_0'\]: .*another dataloader. Begin again"):
        second.load_state_dict({"dp_rank_0": b""})


def test_epochs_end(ds: midepoch.Dataset) -> None:
    (batches,) = on_ranks(ds, 1, 6)
    assert sum(1 for _ in batches.passes(2)) == 2 * 16
    assert sum(1 for _ in batches.passes(3)) == 16
    assert list(batches.passes(3)) == []


def test_batch_sizes_by_step(ds: midepoch.Dataset) -> None:
    loader = ds.loader({0: 4, 3: 8}, last_batch="drop")
    batches = MicroBatches(loader, 4)
    parts = list(islice(batches.passes(), 7))
    assert [(part.number, part.total) for part in parts] == [(0, 1)] * 3 + [(0, 2), (1, 2)] * 2


def test_rows_are_collated_by_micro_batch(ds: midepoch.Dataset) -> None:
    """Padding is to the longest of a micro-batch, not of a step. In workers, too."""
    for workers in (0, 1):
        (batches,) = on_ranks(ds, 1, 4, collate_fn=CollatedParts(_as_list, 4), num_workers=workers)
        parts = [part.batch for part in islice(batches.passes(), 3)]
        assert [len(part) for part in parts] == [4, 4, 4]
        expected = next(on_ranks(ds, 1, 12)[0].passes()).batch["n"].tolist()
        assert sum(parts, []) == expected


def _as_list(rows: list[Any]) -> list[int]:
    return [int(row["n"]) for row in rows]


def test_misuse(ds: midepoch.Dataset, numbers: Numbers) -> None:
    with pytest.raises(ValueError, match="multiple of micro-batch × data-parallel ranks = 4 × 2, got 12"):
        rank_rows(12, 4, 2)
    with pytest.raises(ValueError, match="Omit max_tokens"):
        MicroBatches(ds.map(lambda row: {"t": [1]}).loader(max_tokens=4, length="t"), 1)
    with pytest.raises(ValueError, match="all columns of a batch must have a value for each of its 4 rows"):
        cut({"a": torch.zeros(4, 2), "b": torch.zeros(3)}, 2)
    with pytest.raises(TypeError, match="must be dicts of columns"):
        cut([1, 2], 1)
    with pytest.raises(ValueError, match="cannot be cut into micro-batches of 3"):
        cut({"a": [1, 2, 3, 4]}, 3)
    (batches,) = on_ranks(ds, 1, 4)
    with pytest.raises(CheckpointMismatchError):
        batches.load(numbers(0, 50).loader(4).state_dict())


def test_next_tokens() -> None:
    tokens = torch.arange(10).reshape(2, 5)
    split = next_tokens({"input_ids": tokens, "id": torch.zeros(2)}, 4)
    assert split.tokens.tolist() == tokens[:, :-1].tolist() and split.labels.tolist() == tokens[:, 1:].tolist()
    assert split.positions.tolist() == [[0, 1, 2, 3]] * 2
    given = next_tokens({"tokens": tokens, "labels": tokens + 1, "position_ids": tokens}, 5)
    assert given.labels.tolist() == (tokens + 1).tolist() and given.positions.tolist() == tokens.tolist()
    with pytest.raises(ValueError, match="labels are equal to the tokens"):
        next_tokens({"tokens": tokens, "labels": tokens})
    with pytest.raises(ValueError, match="expected sequences of 5 tokens, got 4"):
        next_tokens({"tokens": tokens}, 5)
    with pytest.raises(ValueError, match=r"must be \[rows, length\]"):
        next_tokens({"tokens": torch.arange(3)})
    with pytest.raises(ValueError, match="must have a column input, input_ids or tokens, got"):
        next_tokens({"text": ["a"]})
    constant = torch.ones(1, 4, dtype=torch.int64)
    assert next_tokens({"tokens": constant, "labels": constant}).labels.tolist() == constant.tolist()


def test_processes_that_share_a_data_rank(tmp_path: Path, torch_forks: Forks) -> None:
    """With lanes of their own, data ranks agree on the last step, and the state is that of both."""
    documents = [[number] * (1 + number % 7) for number in range(100)]
    pq.write_table(pa.table({"input_ids": documents}), tmp_path / "data.parquet", row_group_size=10)
    torch_forks.ranks(4, str(Path(__file__).with_name("data_ranks_job.py")), str(tmp_path))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [rank for rank, *_ in seen] == [0, 0, 1, 1]
    assert len({json.dumps(state) for _, state, *_ in seen}) == 1
    assert seen[0] == seen[1] and seen[2] == seen[3] and len(seen[0][3]) == len(seen[2][3]) > 10
    sequences = [tuple(row) for _, _, first, rest in seen[::2] for part in first + rest for row in part]
    whole = [tuple(row) for row in ds_rows(tmp_path)]
    assert len(sequences) == len(set(sequences)) > len(whole) - 16 and set(sequences) <= set(whole)


def ds_rows(folder: Path) -> list[list[int]]:
    packed = midepoch.from_files(folder / "data.parquet").with_lanes(2).pack(4)
    return [row.tolist() for batch in packed.loader(1) for row in batch["input_ids"]]
