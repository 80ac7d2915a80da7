"""Batches by tokens and of changing sizes: what a loader counts, and what it says about wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import midepoch
from data import write_arrow
from midepoch.order.budget import Budget, in_words

ROWS = 90


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    lengths = np.random.default_rng(2).integers(1, 30, ROWS).tolist()
    tokens = pa.array([list(range(length)) for length in lengths], pa.list_(pa.int32()))
    columns = {"id": np.arange(ROWS), "input_ids": tokens, "text": ["x" * length for length in lengths]}
    write_arrow(tmp_path / "a.arrow", pa.table(columns), 20)
    return midepoch.from_files(str(tmp_path / "a.arrow"))


def tokenized(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [ord(each) for each in row["text"]]}


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_of_batches_that_are_formed_at_run_time_are_counted_once(ds: midepoch.Dataset, world: int) -> None:
    mapped, rows = ds.map(tokenized), 0
    for rank in range(world):
        loader = mapped.loader(max_tokens=100, bucket_window=30, rank=rank, world_size=world, last_batch="uneven")
        delivered = sum(len(batch["id"]) for batch in loader)
        assert loader.stats().rows == delivered
        rows += delivered
    assert rows == ROWS


SIZES = {0: 2, 5: 3, 12: 7}


def test_the_order_of_batches_does_not_depend_on_where_a_resume_began_to_read() -> None:
    """Rows of two kinds, Arrow arrays and lists of a function, are joined late: their parts have rows of others."""

    def rows(first: int, stop: int) -> midepoch.Dataset:
        ids = range(first, stop)
        return midepoch.from_dict({"id": ids, "input_ids": [[0] * (1 + i % 6) for i in ids]})

    def make() -> midepoch.Loader:
        arrays = rows(0, 20).map(lambda row: {"more": row["id"]}).select_columns(["id", "input_ids"])
        lists = rows(20, 40).map(lambda columns: {"input_ids": columns["input_ids"]}, batched=True, batch_size=4)
        return midepoch.mix([arrays, lists.shuffle(seed=2)], seed=3).loader(max_tokens=14, bucket_window=7)

    complete = [batch["id"].tolist() for batch in make()]
    for step in range(1, len(complete)):
        saved, resumed = make(), make()
        for _ in zip(range(step), saved, strict=False):
            pass
        resumed.load_state_dict(saved.state_dict())
        assert [batch["id"].tolist() for batch in resumed] == complete[step:]


@pytest.mark.parametrize("last_batch", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_length_of_lanes_follows_the_sizes(ds: midepoch.Dataset, last_batch: str, world: int) -> None:
    rows = ds.select_columns("id").shuffle(seed=1)
    both = midepoch.concat([rows.slice(0, 37), rows.slice(37)]).with_lanes(1)
    for rank in range(world):
        loader = both.loader(SIZES, last_batch=last_batch, rank=rank, world_size=world)
        for _ in range(3):
            length = len(loader)
            assert [len(loader) for _ in loader][:-1] == [length] * (length - 1)


@pytest.mark.parametrize("last_batch", ["uneven", "drop", "pad"])
def test_an_estimated_length_follows_the_sizes(ds: midepoch.Dataset, last_batch: str) -> None:
    loader = ds.select_columns("id").filter(odd).loader(SIZES, last_batch=last_batch)
    estimates = [loader.estimated_len or 0 for _ in loader]
    assert max(abs(estimate - len(estimates)) for estimate in estimates[3:-1]) <= 2
    for _ in range(2):  # the rows have been counted
        assert loader.estimated_len == len(list(loader))


def test_the_estimated_length_of_passes_of_steps(ds: midepoch.Dataset) -> None:
    loader = ds.select_columns("id").filter(odd).loader(4, steps_per_epoch=5)
    assert loader.estimated_len == len(loader) == len(list(loader)) == 5


def test_next_continues_after_other_passes_of_steps(ds: midepoch.Dataset) -> None:
    loader = ds.loader(1, steps_per_epoch=3)
    next(loader)
    list(loader)
    for _ in loader:
        break
    next(loader)
    assert loader.steps == 5
    list(loader)
    assert loader.steps == 6


def test_passes_of_steps_begin_again_after_an_error(ds: midepoch.Dataset) -> None:
    failing = [True]

    def function(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 7 and failing:
            raise KeyError("transient")
        return row

    loader = ds.select_columns("id").map(function).loader(2, steps_per_epoch=6)
    with pytest.raises(midepoch.MapError):
        list(loader)
    failing.clear()
    first = loader.steps
    assert [batch["id"].tolist() for batch in loader] == [[2 * step, 2 * step + 1] for step in range(first, 6)]


@pytest.mark.parametrize("sizes", [{0: 2, 5: 100}, {0: 2, 5: 100, 9: 4}, {0: 100, 5: 2}], ids=str)
def test_a_size_that_no_epoch_can_fill_is_an_error(ds: midepoch.Dataset, sizes: dict[int, int]) -> None:
    """At its step, every epoch would be empty, so that no step follows."""
    with pytest.raises(ValueError, match="fewer than a global batch of 100"):
        ds.loader(sizes, last_batch="drop")


def length_of_text(row: dict[str, Any]) -> int:
    return len(row["text"]) if row["id"] != 8 else -1


def test_the_function_of_lengths_is_named_in_its_errors(ds: midepoch.Dataset) -> None:
    with pytest.raises(midepoch.MapError, match=r"^loader\(length=length_of_text\) failed on row 8 .*returned -1"):
        list(ds.loader(max_tokens=100, length=length_of_text))


class Doubled:
    """A function that names the columns that it makes."""

    outputs = ("twice",)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * row["id"]}


KEPT: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "cast of another": lambda ds: ds.cast({"id": "int32"}),
    "function of another": lambda ds: ds.map(Doubled()),
    "selected": lambda ds: ds.map(Doubled()).select_columns(["id", "input_ids"]),
    "renamed": lambda ds: ds.rename_columns({"input_ids": "ids"}).map(Doubled()).rename_columns({"ids": "input_ids"}),
}
CHANGED: dict[str, Callable[[midepoch.Dataset], midepoch.Dataset]] = {
    "cast": lambda ds: ds.cast({"input_ids": pa.list_(pa.int64())}),
    "function": lambda ds: ds.map(tokenized),
    "swapped": lambda ds: (
        ds.map(tokenized).rename_columns({"input_ids": "ids"}).map(Doubled()).rename_columns({"ids": "input_ids"})
    ),
}


@pytest.mark.parametrize("name", [*KEPT, *CHANGED])
def test_lengths_in_the_files_are_used_if_no_step_changes_the_column(ds: midepoch.Dataset, name: str) -> None:
    """Then batches are planned: their number is known. Otherwise they are formed after the steps have run."""
    changed = {**KEPT, **CHANGED}[name](ds)
    loader = changed.loader(max_tokens=100)
    if name in KEPT:
        assert len(loader) == len(ds.loader(max_tokens=100)) == len(list(loader))
        assert changed.lengths("input_ids").tolist() == ds.lengths("input_ids").tolist()
        return
    with pytest.raises(TypeError, match="not known before"):
        len(loader)
    with pytest.raises(midepoch.ColumnError, match="may change column 'input_ids'"):
        changed.lengths("input_ids")


def test_a_column_that_a_later_step_removes_has_no_lengths(ds: midepoch.Dataset) -> None:
    for removed in (
        ds.map(Doubled()).remove_columns("input_ids"),
        ds.map(Doubled()).select_columns("id"),
        ds.map(Doubled(), remove_columns=["input_ids"]),
        ds.map(Doubled()).rename_columns({"input_ids": "tokens"}),
    ):
        with pytest.raises(midepoch.ColumnError, match="there is no such column|need the column of tokens"):
            removed.loader(max_tokens=100)
        with pytest.raises(midepoch.ColumnError, match="no column 'input_ids'"):
            removed.lengths("input_ids")


def test_only_columns_of_lists_are_proposed_as_tokens(ds: midepoch.Dataset) -> None:
    with pytest.raises(midepoch.ColumnError, match=r"with a column of lists \('tokens'\), or pass a collate_fn"):
        ds.rename_columns({"input_ids": "tokens"}).loader(max_tokens=100)
    for length, says in ((None, "there are 'id', 'text'"), ("text", "'text' is a column of string, without lists")):
        with pytest.raises(midepoch.ColumnError, match=rf"{says}\. None has lists: tokenize\(\) first"):
            ds.remove_columns("input_ids").loader(max_tokens=100, length=length)


def test_wrong_lengths_and_pads_say_what_is_possible(ds: midepoch.Dataset) -> None:
    floats = ds.cast({"id": "float32"})
    with pytest.raises(midepoch.ColumnError, match="no lengths. Pass length="):
        next(floats.loader(max_tokens=100, length="id"))
    for length in (5, [1.0] * ROWS, {"id": 3}):
        with pytest.raises(ValueError, match="may also be the name of a column, or a function"):
            ds.loader(max_tokens=100, length=length)  # type: ignore[arg-type]
    with pytest.raises(midepoch.ColumnError, match="pad_values=….: no column 'labels'. There are: id, input_ids, text"):
        ds.loader(max_tokens=100, pad_values={"labels": -100})


def test_a_column_of_the_files_without_lengths_is_an_error(tmp_path: Path) -> None:
    columns = {"input_ids": pa.array([[1], [2, 3]]), "score": [0.5, 0.25]}
    write_arrow(tmp_path / "scores.arrow", pa.table(columns), 2)
    scores = midepoch.from_files(str(tmp_path / "scores.arrow"))
    with pytest.raises(midepoch.ColumnError, match=r"loader\(length='score'\).*double.*integers that count them"):
        scores.loader(max_tokens=100, length="score")


def test_other_budgets_are_told_as_arguments(ds: midepoch.Dataset) -> None:
    before = ds.map(tokenized).loader(max_tokens=100, bucket_window=30)
    next(before)
    after = ds.map(tokenized).loader(5, max_tokens=200, bucket_window=30, pad_to_multiple_of=8, balance="tokens")
    with pytest.raises(midepoch.CheckpointMismatchError) as caught:
        after.load_state_dict(before.state_dict())
    assert "max_tokens=100, bucket_window=30, length='input_ids'" in str(caught.value)
    assert "max_tokens=200, batch_size=5, pad_to_multiple_of=8, bucket_window=30, balance='tokens'" in str(caught.value)
    assert in_words("[1, 2]") == "[1, 2]" and in_words("no JSON") == "no JSON"
    assert in_words(Budget(64, padded=False, length="n").text).startswith("max_tokens=64, layout='varlen', bucket_w")


def test_a_removed_file_says_what_to_do(ds: midepoch.Dataset, tmp_path: Path) -> None:
    (tmp_path / "a.arrow").unlink()
    with pytest.raises(midepoch.DataNotFoundError, match=r"a\.arrow was removed .* Restore it, or open the dataset"):
        ds.loader(max_tokens=100)
