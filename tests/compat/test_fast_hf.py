from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import midepoch
from fast_hf_loader_simple import CheckpointMismatchError, SimpleArrowIterableDataset
from midepoch.checkpoint import saving
from midepoch.errors import StateError

KEYS = ["current_file_index", "current_example_index", "shuffle_seed", "shard_config", "arrow_files", "shuffled_files"]


def make(files: list[str], **options: Any) -> SimpleArrowIterableDataset:
    return SimpleArrowIterableDataset(files).shuffle(seed=42, **options)


def numbers(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def test_documented_keys(small_files: list[str]) -> None:
    ids = make(small_files).shard(2, 1)
    iterator = iter(ids)
    for _ in range(5):
        last = next(iterator)
    state = ids.state_dict()
    assert list(state)[:6] == KEYS
    assert state["shuffle_seed"] == 42
    assert state["shard_config"] == (2, 1)
    order = ids.shuffled_files

    rows = list(midepoch.from_files(order[state["current_file_index"]]))
    assert rows[state["current_example_index"]] == last


def test_files_are_the_unit_of_shuffling(small_files: list[str]) -> None:
    sizes, found = [9, 1, 12, 8, 7], numbers(make(small_files))
    files = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(5)]
    runs = sorted(files, key=lambda rows: found.index(rows[0]))
    assert found == [row for rows in runs for row in rows]


def test_state_is_small_for_any_number_of_files(make_files: Callable[..., list[str]]) -> None:
    ids = make(make_files([2] * 300))
    next(iter(ids))
    text = json.dumps(ids.state_dict())
    assert len(text) < 1000
    again = make(list(ids.arrow_files))
    again.load_state_dict(json.loads(text))
    assert again.state_dict()["position"] == 1


def documented(ids: SimpleArrowIterableDataset) -> dict[str, Any]:
    """The form of the texts: six keys, full lists."""
    state = {key: value for key, value in ids.state_dict().items() if key in KEYS}
    state["arrow_files"] = ids.arrow_files
    state["shuffled_files"] = ids.shuffled_files if state["shuffle_seed"] is not None else None
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("mode", ["file", "example"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_documented_form_is_accepted(small_files: list[str], shards: int, mode: str, shuffled: bool) -> None:
    for taken in (0, 1, 5, 11):
        for shard in range(shards):
            source = make(small_files) if shuffled else SimpleArrowIterableDataset(small_files)
            ids = source.shard(shards, shard, mode=mode)
            iterator = iter(ids)
            for _ in range(taken):
                next(iterator)
            state = documented(ids)
            rest = numbers(iterator)
            other = (make(small_files) if shuffled else SimpleArrowIterableDataset(small_files)).shard(
                shards, shard, mode=mode
            )
            other.load_state_dict(state, example_index="last")
            assert numbers(other) == rest


def test_next_is_the_example_after_the_saved_one(small_files: list[str]) -> None:
    ids = SimpleArrowIterableDataset(small_files)
    state = {**documented(ids), "current_file_index": 2, "current_example_index": 5}
    ids.load_state_dict(state, example_index="last")
    assert next(iter(ids))["id"] == 10 + 6


def test_drawn_seed_is_taken_over(small_files: list[str]) -> None:
    ids = make(small_files, scope="rows")
    iterator = iter(ids)
    for _ in range(8):
        next(iterator)
    other = SimpleArrowIterableDataset(small_files).shuffle(scope="rows")
    other.load_state_dict(documented(ids), example_index="last")
    assert numbers(other) == numbers(iterator)


def test_moved_files_are_the_same_files(small_files: list[str], tmp_path: Path) -> None:
    moved = [shutil.copy(path, tmp_path) for path in small_files]
    ids, other = make(small_files), make(moved)
    iterator = iter(ids)
    next(iterator)
    other.load_state_dict(documented(ids), example_index="last")
    assert numbers(other) == numbers(iterator)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"shuffle_seed": 7}, CheckpointMismatchError, "shuffle_seed"),
        ({"shuffle_seed": None}, CheckpointMismatchError, "shuffle_seed"),
        ({"shard_config": [2, 0]}, CheckpointMismatchError, "shard_config"),
        ({"arrow_files": ["a.arrow"]}, CheckpointMismatchError, "arrow_files"),
        ({"arrow_files": None}, CheckpointMismatchError, "arrow_files"),
        ({"arrow_files": 3}, CheckpointMismatchError, "arrow_files"),
        ({"shuffled_files": None}, CheckpointMismatchError, "shuffled_files"),
        ({"dataset_fingerprint": "abc", "num_files": 9}, CheckpointMismatchError, "dataset_fingerprint"),
        ({"split_start_idx": None}, CheckpointMismatchError, "split_start_idx"),
        ({"shuffled_files": []}, CheckpointMismatchError, "shuffled_files"),
        ({"current_file_index": 99}, StateError, "file number 99"),
        ({"current_example_index": 99}, StateError, "example 99"),
        ({"current_example_index": "3"}, StateError, "expected an integer"),
        ({"shard_config": 3}, StateError, "not a state"),
    ],
)
def test_what_does_not_belong_is_refused(
    small_files: list[str], change: dict[str, Any], error: type[Exception], text: str
) -> None:
    ids = make(small_files)
    before = ids.state_dict()
    with pytest.raises(error, match=text):
        ids.load_state_dict({**documented(ids), **change})
    assert ids.state_dict() == before


@pytest.mark.parametrize("key", KEYS[1:])
def test_a_state_without_one_of_the_documented_keys_is_refused(small_files: list[str], key: str) -> None:
    ids = SimpleArrowIterableDataset(small_files)
    before = ids.state_dict()
    state = documented(ids)
    del state[key]
    with pytest.raises(CheckpointMismatchError, match=f"{key} differs") as caught:
        ids.load_state_dict(state)
    assert (caught.value.field, caught.value.saved) == (key, None)
    with pytest.raises(CheckpointMismatchError):
        ids.load_state_dict({"current_file_index": 1, "current_example_index": 3})
    assert ids.state_dict() == before


SIZES = [9, 1, 12, 8, 7]  # rows of small_files


def of_forgather(files: list[str], taken: int) -> dict[str, Any]:
    """The state that forgather has when its generator is stopped after the yield of row number ``taken``."""
    file, example = 0, 0
    for _ in range(taken):
        if example == SIZES[file]:
            file, example = file + 1, 0
        example += 1
    return {
        "current_file_index": file,
        "current_example_index": example,
        "shuffle_seed": None,
        "shard_config": None,
        "arrow_files": files,
        "file_lengths": SIZES,
        "shuffled_files": None,
        "shuffled_lengths": None,
        "split_start_idx": None,
        "split_end_idx": None,
        "shard_start_idx": None,
        "shard_end_idx": None,
    }


def test_states_of_forgather_resume_at_the_row_after_the_last_one(small_files: list[str]) -> None:
    """It counts the next example, where the documented state has the last one."""
    for taken in (0, 1, 8, 9, 10, 11, 21, 22, 36, 37):
        ids = SimpleArrowIterableDataset(small_files)
        ids.load_state_dict(of_forgather(small_files, taken))
        ids.set_epoch(0)  # of an epoch that is over nothing is left
        assert numbers(ids) == list(range(taken, 37))
    after = {**of_forgather(small_files, 37), "current_file_index": 5, "current_example_index": 0}
    ids = SimpleArrowIterableDataset(small_files)
    ids.load_state_dict(after)  # after its StopIteration
    ids.set_epoch(0)
    assert numbers(ids) == []


def test_states_with_six_keys_have_two_readings(small_files: list[str]) -> None:
    """The first version of forgather wrote the documented keys, and counted the next example."""
    for taken in (1, 8, 10, 11, 22, 36):
        state = {key: of_forgather(small_files, taken)[key] for key in KEYS}
        ids = SimpleArrowIterableDataset(small_files)
        if state["current_example_index"] < SIZES[state["current_file_index"]]:
            for call in (ids.load_state_dict, ids.check_state):
                with pytest.raises(StateError, match="the last example .* or the next one, .*example_index=") as caught:
                    call(state)
            assert f"current_example_index={state['current_example_index']}" in str(caught.value)
            assert ids.state_dict()["position"] == 0
            ids.load_state_dict(state, example_index="last")
            ids.set_epoch(0)  # of an epoch that is over nothing is left
            assert numbers(ids) == list(range(taken + 1, 37))
        ids = SimpleArrowIterableDataset(small_files)
        ids.load_state_dict(state, example_index="next")
        assert numbers(ids) == list(range(taken, 37))
    fresh = {**state, "current_file_index": 0, "current_example_index": -1}
    ids.load_state_dict(fresh)  # forgather never counts -1
    assert numbers(ids) == list(range(37))
    with pytest.raises(CheckpointMismatchError, match="forgather divides shards"):
        ids.shard(2, 0).load_state_dict({**state, "shard_config": [2, 0]}, example_index="next")
    with pytest.raises(ValueError, match='must be "last" or "next", got \'first\''):
        ids.load_state_dict(state, example_index="first")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"file_lengths": [9, 1, 12, 8, 8]}, "file_lengths"),
        ({"shard_config": [1, 0, "file"]}, "shard_config"),
        ({"split_end_idx": 30}, "split_end_idx"),
        ({"shard_start_idx": 0, "shard_end_idx": 12}, "shard_start_idx"),
        ({"epoch": 1}, "epoch"),
    ],
)
def test_states_of_forgather_that_mean_other_rows_are_refused(
    small_files: list[str], change: dict[str, Any], field: str
) -> None:
    ids = SimpleArrowIterableDataset(small_files)
    with pytest.raises(CheckpointMismatchError) as caught:
        ids.load_state_dict({**of_forgather(small_files, 5), **change})
    assert caught.value.field == field


def test_plain_state_then_workers(small_files: list[str]) -> None:
    """A state of plain iteration, loaded into a dataset that a DataLoader with workers then goes on with."""
    import torch
    from torch.utils.data import DataLoader

    ids = make(small_files)
    iterator = iter(ids)
    seen = [next(iterator)["id"] for _ in range(12)]
    other = make(small_files)
    other.load_state_dict(ids.state_dict())
    rest = list(
        DataLoader(other.select_columns("id"), batch_size=None, num_workers=2, collate_fn=lambda row: row["id"])
    )
    assert sorted(seen + [int(i) for i in torch.tensor(rest)]) == list(range(37))


def test_workers_get_files_of_their_own(make_files: Callable[..., list[str]]) -> None:
    from torch.utils.data import DataLoader, get_worker_info

    ids = SimpleArrowIterableDataset(make_files([6] * 8)).map(lambda row: {"worker": get_worker_info().id})
    rows = list(DataLoader(ids, batch_size=None, num_workers=2))
    owners: dict[int, set[int]] = {}
    for row in rows:
        owners.setdefault(int(row["id"]) // 6, set()).add(int(row["worker"]))
    assert len(rows) == 48
    assert all(len(workers) == 1 for workers in owners.values())


def test_states_of_shards_differ_in_their_own_files_only(small_files: list[str]) -> None:
    """Their states tell of each shard's own file: that is no difference in where the run stands."""
    states = []
    for shard in range(2):
        ds = SimpleArrowIterableDataset(small_files).shuffle(seed=1).shard(2, shard)
        rows = iter(ds)
        for _ in range(6):
            next(rows)
        states.append(ds.state_dict())
    assert states[0] != states[1]
    assert saving.common_state(states[0], True) == saving.common_state(states[1], True)
    fresh = SimpleArrowIterableDataset(small_files).shuffle(seed=1).shard(2, 1)
    fresh.load_state_dict(states)


def test_a_list_of_documented_states_at_the_end_of_an_epoch(small_files: list[str]) -> None:
    documented = []
    names = (
        "current_file_index",
        "current_example_index",
        "shuffle_seed",
        "shard_config",
        "arrow_files",
        "shuffled_files",
    )
    for shard in range(2):
        ds = SimpleArrowIterableDataset(small_files).shard(2, shard)
        list(ds)
        state = ds.state_dict()
        documented.append({key: state[key] for key in names})
    SimpleArrowIterableDataset(small_files).shard(2, 0).load_state_dict(documented, example_index="last")
