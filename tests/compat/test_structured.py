"""``StructuredDataset``: the documented interface, and what is better than documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from midepoch import CheckpointMismatchError, StateError, StructuredDataset
from pairs import alternating, covering

ROWS = 600


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    folder = tmp_path / "lake"
    folder.mkdir()
    for i in range(4):
        ids = range(150 * i, 150 * i + 150)
        table = pa.table({"id": list(ids), "text": [f"row {j}" for j in ids], "half": [j / 2 for j in ids]})
        pq.write_table(table, folder / f"part-{i:04}.parquet", row_group_size=30)
    return folder


def make(lake: Path, **arguments: Any) -> tuple[Any, StructuredDataset]:
    given = {"batch_size": 32, "shuffle": True, "num_workers": 0, "split_rows": 60, **arguments}
    return StructuredDataset.create_dataloader(path=str(lake), format="parquet", **given)


def ids(batches: Any) -> list[int]:
    return sum((batch["id"].tolist() for batch in batches), [])


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_once(lake: Path, workers: int) -> None:
    loader, dataset = make(lake, num_workers=workers)
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        epochs.append(ids(loader))
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert epochs[0] != epochs[1]
    assert len(loader) == len(dataset) == 19


@pytest.mark.parametrize(("steps", "workers", "resumed_workers"), covering([0, 1, 7, 18, 19], [0, 2], [0, 2]))
def test_state_follows_what_the_loop_has_received(lake: Path, steps: int, workers: int, resumed_workers: int) -> None:
    whole = ids(make(lake)[0])
    loader, dataset = make(lake, num_workers=workers)
    batches = iter(loader)
    before = ids(next(batches) for _ in range(steps))
    state = json.loads(json.dumps(dataset.state_dict()))
    assert before == whole[: 32 * steps]
    assert state["epoch"] == 0
    assert state["_num_workers"] == workers
    assert state["_shuffle_seed"] == 42
    again, resumed = make(lake, num_workers=resumed_workers)
    resumed.load_state_dict(state)
    if resumed_workers:
        resumed.set_epoch(0)  # harmless
    assert before + ids(again) == whole
    resumed.set_epoch(1)
    assert sorted(ids(again)) == list(range(ROWS))


def test_completed_shards_are_those_whose_rows_all_came(lake: Path) -> None:
    loader, dataset = make(lake, shuffle=False)
    assert dataset.state_dict()["completed_shards"] == []
    for step, _ in enumerate(loader, 1):
        done = dataset.state_dict()["completed_shards"]
        ends = [split["row_offset"] + split["row_length"] for shard in done for split in shard["splits"]]
        expected = [i for i in range(12) if (i // 3) * 150 + [60, 120, 150][i % 3] <= step * 32]
        assert ends == [[60, 120, 150][i % 3] for i in expected]
        assert dataset.state_dict()["completed_shards_total"] == len(done)
    assert len(done) == 12
    assert done[0]["splits"][0] == {"path": str(lake / "part-0000.parquet"), "row_offset": 0, "row_length": 60}


def test_whole_files_have_no_range(lake: Path) -> None:
    loader, dataset = make(lake, shuffle=False, split_rows=None)
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    (shard,) = dataset.state_dict()["completed_shards"]
    assert shard == {"splits": [{"path": str(lake / "part-0000.parquet"), "row_offset": None, "row_length": None}]}


def test_break_and_come_back(lake: Path) -> None:
    loader, dataset = make(lake)
    whole = ids(make(lake)[0])
    for step, _ in enumerate(loader):
        if step == 3:
            break
    state = dataset.state_dict()
    again, resumed = make(lake)
    resumed.load_state_dict(state)
    assert ids(again) == whole[4 * 32 :]
    assert ids(loader) == whole[4 * 32 :]  # the same loader continues, too: the data is shuffled


def test_ranks_may_change_and_one_state_is_enough(lake: Path) -> None:
    pairs = [make(lake, num_ranks=2, rank=rank, batch_size=16) for rank in range(2)]
    iterators = [iter(loader) for loader, _ in pairs]
    before = ids(next(iterator) for _ in range(5) for iterator in iterators)
    states = [dataset.state_dict() for _, dataset in pairs]
    assert states[0] == states[1]
    after = []
    for rank in range(3):
        loader, dataset = make(lake, num_ranks=3, rank=rank, num_workers=rank)
        dataset.load_state_dict(states[0])
        after += ids(loader)
    assert sorted(before + after) == list(range(ROWS))


def test_outputs(lake: Path) -> None:
    batch = next(iter(make(lake)[0]))
    assert isinstance(batch["id"], torch.Tensor)
    assert next(iter(make(lake, output_format="numpy")[0]))["half"].dtype == "float64"
    assert next(iter(make(lake, output_format="arrow")[0])).num_rows == 32
    assert isinstance(next(iter(make(lake, output_format="dict")[0]))["text"][0], str)
    collated = next(iter(make(lake, collate_fn=lambda batch: batch["id"].sum(), columns=["id"])[0]))
    assert isinstance(collated, torch.Tensor)
    some = make(lake, filters=pc.field("id") < 100, columns=["id"])[0]
    assert sorted(ids(some)) == list(range(100))
    with pytest.raises(ValueError, match="output_format"):
        make(lake, output_format="pandas")


def test_mismatches_are_explained(lake: Path) -> None:
    loader, dataset = make(lake, shuffle_buffer_size=60)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    state = dataset.state_dict()
    shown = r"Checkpoint shard does not match any current split.\s+Checkpoint shard:\s+part-000\d.parquet  rows \[\d+, \d+\)"
    for arguments, cause in (
        ({"shuffle_seed": 7}, "shuffle_seed changed: checkpoint=42, current=7"),
        ({"split_rows": 90}, r"split_bytes, split_rows changed: checkpoint=\[134217728, 60\]"),
        ({"shuffle": False}, "shuffle changed"),
        ({"shuffle_buffer_size": 300}, "shuffle_buffer_size .* changed"),
        ({"filters": pc.field("id") > 5}, "filters changed: checkpoint=None"),
    ):
        _, other = make(lake, **{"shuffle_buffer_size": None if "shuffle" in arguments else 60, **arguments})
        before = other.state_dict()
        with pytest.raises(
            CheckpointMismatchError, match=f"(?s){shown}.*Likely cause: .*{cause}.*discard this checkpoint"
        ):
            other.load_state_dict(state)
        assert other.state_dict() == before
    pq.write_table(pa.table({"id": [1], "text": ["x"], "half": [0.5]}), lake / "part-0009.parquet")
    (lake / "part-0001.parquet").unlink()
    pq.write_table(pq.read_table(lake / "part-0002.parquet").slice(1), lake / "part-0002.parquet")
    with pytest.raises(
        CheckpointMismatchError,
        match="added: part-0009.parquet; removed: part-0001.parquet; changed: part-0002.parquet",
    ):
        make(lake)[1].load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="does not contain the row"):
        make(lake)[1].load_state_dict({"epoch": 0, "completed_shards": []})
    for damage in (
        {"completed_shards": "abc"},
        {"completed_shards": [{"path": "x"}]},
        {"midepoch": 99},
        {"epoch": None},
    ):
        with pytest.raises(StateError, match="damaged|Upgrade"):
            make(lake)[1].load_state_dict({**state, **damage})


def test_renamed_files_and_other_spellings_of_a_filter_resume(lake: Path) -> None:
    loader, dataset = make(lake, filters=[("id", ">=", 35)], shuffle=False)
    batches = iter(loader)
    before = ids(next(batches) for _ in range(10))
    state = dataset.state_dict()
    assert all(split["filtered"] for shard in state["completed_shards"] for split in shard["splits"])
    (lake / "part-0000.parquet").rename(lake / "aaa.parquet")
    for filters in ([["id", ">=", 35]], [[("id", ">=", 35)]], pc.field("id") >= 35):
        again, resumed = make(lake, filters=filters, shuffle=False)
        resumed.load_state_dict(state)
        assert before + ids(again) == list(range(35, ROWS))


def test_resume_of_a_resume_in_the_documented_loop(lake: Path) -> None:
    """Saved behind the last batch of an epoch, and then again: every epoch once, under its own number."""
    for first_stop in (0, 5, 18):
        for second_stop in (0, 3, 18):
            seen: list[tuple[int, int]] = []
            state, start = None, 0
            for stop in (first_stop, second_stop, None):
                loader, dataset = make(lake)
                if state is not None:
                    dataset.load_state_dict(state)
                stopped = False
                for epoch in range(start, 3):
                    if epoch != start:
                        dataset.set_epoch(epoch)
                    for step, batch in enumerate(loader):
                        seen += [(epoch, i) for i in batch["id"].tolist()]
                        if step == stop:
                            state, start, stopped = dataset.state_dict(), epoch, True
                            break
                    if stopped:
                        break
            assert sorted(seen) == [(epoch, i) for epoch in range(3) for i in range(ROWS)]


SAVE_POINTS = [
    "before the first batch",
    "mid",
    "last batch",
    "last batch, iterator deleted",
    "end",
    "end, iterator alive",
]


def run_to(point: str, epoch: int, lake: Path, workers: int, **arguments: Any) -> tuple[dict[str, Any], int]:
    """Run the saving loop up to a point of an epoch: the state there, and the rows of that epoch delivered so far."""
    loader, dataset = make(lake, num_workers=workers, batch_size=120, **arguments)
    for before in range(epoch):
        dataset.set_epoch(before)
        ids(loader)
    dataset.set_epoch(epoch)
    if point == "before the first batch":
        return dataset.state_dict(), 0
    batches = iter(loader)
    taken = 2 if point == "mid" else len(loader)
    delivered = len(ids(next(batches) for _ in range(taken)))
    if point.startswith("end"):
        assert next(batches, None) is None
    if point in ("last batch, iterator deleted", "end"):
        del batches
    return json.loads(json.dumps(dataset.state_dict())), delivered


@pytest.mark.parametrize(("workers", "named"), alternating([0, 2], [False, True]))
def test_every_save_point_resumes_with_the_rows_left_of_each_epoch(lake: Path, workers: int, named: bool) -> None:
    """By the documented loop; the state does not depend on whether the iterator is alive or was asked for its end."""
    loader, dataset = make(lake, num_workers=0, batch_size=120)
    whole = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        whole.append(ids(loader))
    for start in (1,) if workers else (0, 1):
        states = {}
        # With workers, half of the points for each way to name epochs: a pool of workers takes 0.2 s.
        points = ["last batch", *SAVE_POINTS[named::2]] if workers else SAVE_POINTS
        for point in points:
            states[point], delivered = run_to(point, start, lake, workers)
            again, resumed = make(lake, num_workers=workers, batch_size=120)
            resumed.load_state_dict(states[point])
            passes = []
            for epoch in range(start, 3):
                if named or epoch != start:
                    resumed.set_epoch(epoch)
                passes.append(ids(again))
            assert passes == [whole[start][delivered:], *whole[start + 1 :]], point
        assert all(states[point] == states["last batch"] for point in states if point in SAVE_POINTS[2:])


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_every_save_point_resumes_twice_in_a_row(lake: Path, point: str) -> None:
    state, delivered = run_to(point, 0, lake, 0)
    again, resumed = make(lake, batch_size=120)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert len(ids(again)) == ROWS - delivered
    last, final = make(lake, batch_size=120)
    final.load_state_dict(resumed.state_dict())
    assert ids(last) == []
    final.set_epoch(1)
    assert len(ids(last)) == ROWS


def test_every_save_point_resumes_on_other_ranks(lake: Path) -> None:
    for point in SAVE_POINTS:
        (state, mine), (other, theirs) = (run_to(point, 0, lake, 0, num_ranks=2, rank=rank) for rank in range(2))
        assert state == other
        rest = []
        for rank in range(3):
            loader, dataset = make(lake, num_ranks=3, rank=rank)
            dataset.load_state_dict([state, other])
            rest += ids(loader)
            dataset.set_epoch(1)
            assert len(ids(loader)) == ROWS // 3
        assert len(set(rest)) == len(rest) == ROWS - mine - theirs


def test_arguments_are_checked_at_once(lake: Path) -> None:
    for arguments in (
        {"split_rows": "10"},
        {"split_rows": 0},
        {"split_bytes": "0"},
        {"columns": []},
        {"columns": "id"},
        {"shuffle_seed": None},
        {"rank": "0", "num_ranks": 2},
        {"rank": 2, "num_ranks": 2},
    ):
        with pytest.raises((ValueError, TypeError)):
            make(lake, **arguments)

    json.dumps(make(lake, shuffle_seed=np.int64(5))[1].state_dict())


def test_progress_is_shown_on_a_terminal_only(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(ids(make(lake, show_progress=True)[0])) == ROWS
    assert capsys.readouterr().err == ""


def test_split_bytes_may_be_a_text(lake: Path) -> None:
    for text in ("128 MiB", "1KiB", 1024):
        make(lake, split_rows=None, split_bytes=text)
    with pytest.raises(ValueError, match="split_bytes"):
        make(lake, split_bytes="much")


def test_a_dataloader_around_it_says_what_to_do(lake: Path) -> None:
    _, dataset = make(lake)
    with pytest.raises(TypeError, match="Iterate it, and pass num_workers and collate_fn"):
        next(iter(torch.utils.data.DataLoader(dataset)))


def test_num_ranks_alone_is_not_rank_0(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="num_ranks=4 needs rank=…, too: 1 ranks were found here"):
        make(lake, num_ranks=4)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert make(lake, num_ranks=4)[1]._loader.shard.index == 2
    assert make(lake, num_ranks=2, rank=1)[1]._loader.shard.index == 1
    assert make(lake, num_ranks=1)[1]._loader.shard.count == 1
