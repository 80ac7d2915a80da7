"""from_map_style: the batches of torch's DataLoader, with order, workers, ranks and exact resume of midepoch."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset

import midepoch
from launch import end, launch
from midepoch.testing import assert_resumes_exactly

HERE = Path(__file__).parent
ROWS = 23


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


ITEMS: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "text": lambda i: f"item {i}",
    "bytes": lambda i: bytes([i]),
    "tensor": lambda i: torch.full((2, 3), i, dtype=torch.bfloat16),
    "scalar tensor": lambda i: torch.tensor(i),
    "array": lambda i: np.full((4,), i, np.float32),
    "numpy scalar": lambda i: np.float32(i),
    "tuple": lambda i: (torch.full((2,), i), i, f"t{i}"),
    "named tuple": lambda i: Pair(torch.ones(3) * i, i),
    "list": lambda i: [i, [i, float(i)]],
    "dict": lambda i: {"id": i, "nested": {"a": torch.ones(1) * i, "b": (i, "x")}, "s": str(i)},
    "draws": lambda i: (i, random.random(), np.random.rand(2), torch.rand(2)),
}


class Made(torch.utils.data.Dataset[Any]):
    """Items made by a function."""

    def __init__(self, make: Callable[[int], Any], rows: int = ROWS) -> None:
        self.make, self.rows = make, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.rows:
            raise IndexError(i)
        return self.make(i)


class Many(Made):
    """A dataset that also returns several items in one call, and counts them."""

    calls = 0
    fails = False

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        Many.calls += 1
        if self.fails:
            raise ValueError("some of them")
        return [self.make(i) for i in numbers]


def flat(value: Any) -> Any:
    """A batch as something that can be compared, with types."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return "dict", {name: flat(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [flat(inner) for inner in value]
    return type(value).__name__, value


@pytest.mark.parametrize("name", [name for name in ITEMS if name != "draws"])
def test_batches_are_those_of_the_dataloader(name: str) -> None:
    rows = Made(ITEMS[name])
    ds = midepoch.from_map_style(rows)
    expected = [flat(batch) for batch in DataLoader(rows, batch_size=5)]
    for workers in (0, 2) if name in ("tuple", "dict", "tensor") else (0,):
        assert [flat(batch) for batch in ds.loader(5, num_workers=workers)] == expected
    assert [flat(item) for item in ds] == [flat(rows[i]) for i in range(ROWS)]
    assert [flat(item) for item in ds.loader(5, collate_fn=list)][1][1][0] == flat(rows[5])
    assert flat(ds[3]) == flat(rows[3])
    assert flat(ds[:5]) == expected[0]


def test_datasets_of_torch_and_plain_sequences() -> None:
    tensors = TensorDataset(torch.arange(ROWS), torch.arange(2 * ROWS).reshape(ROWS, 2))
    parts: list[Any] = [
        tensors,
        Subset(tensors, [5, 2, 2, 9]),
        ConcatDataset([tensors, Subset(tensors, range(3))]),
        StackDataset(tensors, tensors),
        [(i, str(i)) for i in range(7)],
        range(7),
        np.arange(14).reshape(7, 2),
        torch.arange(9),
        ["no", "Dataset,", "but", "it", "has", "both", "methods"],
    ]
    for rows in parts:
        expected = [flat(batch) for batch in DataLoader(rows, batch_size=3)]
        assert [flat(batch) for batch in midepoch.from_map_style(rows).loader(3)] == expected


@pytest.mark.parametrize("name", ["draws", "tuple"])
def test_items_resume_exactly_with_other_workers(name: str) -> None:
    def make(workers: int) -> Callable[[], midepoch.Loader]:
        ds = midepoch.from_map_style(Many(ITEMS[name])).shuffle(seed=1)
        return lambda: ds.loader(4, num_workers=workers)

    assert_resumes_exactly(make(0), epochs=2, tail=4)
    assert_resumes_exactly(make(2), epochs=1, resume_with=[make(0)], steps=[0, 3, 7], tail=4)
    rows = midepoch.from_map_style(Made(ITEMS[name])).shuffle(seed=1)
    assert_resumes_exactly(lambda: rows.take(ROWS), tail=3, steps=[0, 1, 11, ROWS, ROWS + 1])


def test_draws_depend_on_the_row_alone_and_leave_the_generators_as_they_were() -> None:
    """A dataset with __getitems__ is called for many items only if that draws nothing."""
    one, many = Made(ITEMS["draws"]), Many(ITEMS["draws"])
    expected = [flat(item) for item in midepoch.from_map_style(one)]
    for rows in (one, many, Subset(one, range(ROWS)), Subset(many, range(ROWS))):
        state = random.getstate()
        ds = midepoch.from_map_style(rows)
        assert next(flat(item) for item in ds.loader(ROWS, collate_fn=list))[1] == expected
        assert [flat(ds[i]) for i in (22, 0, 7)] == [expected[i] for i in (22, 0, 7)]
        assert random.getstate() == state
    assert len({str(item) for item in expected}) == ROWS
    again = midepoch.from_map_style(one)
    again.set_epoch(1)
    assert [flat(item) for item in again] != expected
    Many.calls = 0
    list(midepoch.from_map_style(Many(ITEMS["tuple"], 64)).loader(16))
    assert Many.calls == 3  # after the first 16 items, which have drawn nothing


def test_errors_name_the_item() -> None:
    def fails(i: int) -> int:
        if i == 17:
            raise KeyError("missing.jpg")
        return i

    for rows in (Made(fails), Many(fails), Subset(Made(fails), range(ROWS))):
        for workers in (0, 2):
            with pytest.raises(
                midepoch.MapError, match=rf"{type(rows).__name__}\[17\] failed: KeyError: 'missing.jpg'"
            ):
                list(midepoch.from_map_style(rows).shuffle(seed=2).loader(4, num_workers=workers))
    skipping = midepoch.from_map_style(Many(fails), on_error="skip")
    assert list(skipping) == [i for i in range(ROWS) if i != 17]
    assert sum(len(batch) for batch in skipping.loader(4)) == ROWS - 1
    with pytest.raises(midepoch.MapError, match=r"map\(odd\) failed on row 3 of the dataset \(Made\[3\]\): ValueError"):
        list(midepoch.from_map_style(Made(ITEMS["int"])).map(odd))
    several = Many(ITEMS["int"])
    several.fails = True  # in one call for many only
    assert list(midepoch.from_map_style(several)) == list(range(ROWS))


def odd(item: int) -> int:
    if item == 3:
        raise ValueError("odd")
    return item


def test_what_default_collate_refuses_names_the_remedy() -> None:
    images = midepoch.from_map_style(Made(lambda i: (Image.new("L", (2, 2), i), i)))
    assert images[3][0].getpixel((0, 0)) == 3
    with pytest.raises(midepoch.MapError, match="default_collate cannot make a batch of 4 items.*collate_fn"):
        next(iter(images.loader(4)))
    (batch,) = images.take(2).loader(2, num_workers=1, collate_fn=lambda items: [image.size for image, _ in items])
    assert batch == [(2, 2), (2, 2)]
    ragged = midepoch.from_map_style(Made(lambda i: torch.ones(i)))
    with pytest.raises(midepoch.MapError, match="one shape"):
        next(iter(ragged.loader(4)))
    with pytest.raises(midepoch.MapError, match=r"[^.]\. Return tensors"):  # the text of torch may end without a period
        next(iter(midepoch.from_map_style([0, None]).loader(2)))


def test_functions_get_items_and_columns_give_rows() -> None:
    rows = Made(ITEMS["dict"])
    ds = midepoch.from_map_style(rows)
    assert [item["y"] for item in ds.map(lambda item: {"y": item["id"] * 2})] == [2 * i for i in range(ROWS)]
    numbers = ds.map(lambda item: item["id"]).filter(lambda i: i % 2 == 0).flat_map(lambda i: [i, -i])
    assert list(numbers.take(4)) == [0, 0, 2, -2]
    assert next(iter(numbers.loader(4))).tolist() == [0, 0, 2, -2]
    indexed = ds.select([4, 2]).map(lambda item, number: (item["id"], number), with_indices=True)
    assert list(indexed) == [(4, 0), (2, 1)]
    for call in (
        lambda: ds.map(len, batched=True),
        lambda: ds.filter(len, input_columns="id"),
        lambda: ds.with_transform(dict),
        lambda: ds.cache(),
    ):
        with pytest.raises((ValueError, midepoch.ColumnError), match=r"columns=|item"):
            call()
    assert [item["id"] for item in ds.sort(lambda item: -item["id"]).take(2)] == [22, 21]
    named = midepoch.from_map_style(rows, columns=["s", "id"])
    assert named.cache()[7] == {"s": "7", "id": 7}
    assert named.column_names == ["s", "id"] and named[3] == {"s": "3", "id": 3}
    assert named.map(lambda group: {"n": [len(s) for s in group["s"]]}, batched=True)[12]["n"] == 2
    assert named.with_format("numpy").loader(3).__iter__().__next__()["id"].dtype == np.int64
    pairs = midepoch.from_map_style(Made(ITEMS["tuple"]), columns=["x", "y", "z"]).shuffle(seed=1)
    assert next(iter(pairs.loader(3)))["x"].shape == (3, 2)
    with pytest.raises(midepoch.MapError, match=r"Made\[0\] failed.*no 'none', only 'id', 'nested', 's'"):
        midepoch.from_map_style(rows, columns=["id", "none"])[0]
    with pytest.raises(midepoch.MapError, match=r"Made\[0\] failed.*3 parts, columns= names 2"):
        midepoch.from_map_style(Made(ITEMS["tuple"]), columns=["a", "b"])[0]


def test_padding_provenance_mixing_and_selections() -> None:
    ds = midepoch.from_map_style(Made(ITEMS["tuple"]))
    *_, last = ds.loader(5, last_batch="pad")
    assert last["is_padding"].tolist() == [False] * 3 + [True] * 2 and last["item"][1].tolist()[:3] == [20, 21, 22]
    (batch,) = ds.select([7, 3]).loader(2, provenance=True)
    assert batch["doc_ids"]["row"].tolist() == [0, 1] and batch["item"][1].tolist() == [7, 3]
    other = midepoch.from_map_style(Made(lambda i: (torch.zeros(2), -i, "")))
    mixed = midepoch.mix([ds.shuffle(seed=1), other], [1, 1], seed=3)
    assert {item[1] > 0 for item in mixed} == {True, False}
    assert_resumes_exactly(lambda: mixed.loader(4), tail=3)
    halves = ds.train_test_split(0.3, seed=1)
    assert sorted(item[1] for part in halves.values() for item in part) == list(range(ROWS))
    drawn = ds.weighted(np.arange(ROWS), seed=1)
    assert_resumes_exactly(lambda: drawn.loader(4), tail=2)


def test_a_state_of_other_contents_is_refused() -> None:
    rows = TensorDataset(torch.arange(ROWS))
    first, second = torch.utils.data.random_split(rows, [13, 10], torch.Generator().manual_seed(1))
    other, _ = torch.utils.data.random_split(rows, [13, 10], torch.Generator().manual_seed(2))
    stacked = [midepoch.from_map_style(StackDataset(x=part)) for part in (first, other)]
    assert len({ds.pipeline.base.source.fingerprint for ds in stacked}) == 2
    state = midepoch.from_map_style(first, fingerprint="v1").shuffle(seed=1).loader(2).state_dict()
    again, _ = torch.utils.data.random_split(rows, [13, 10], torch.Generator().manual_seed(1))
    midepoch.from_map_style(again, fingerprint="v1").shuffle(seed=1).loader(2).load_state_dict(state)
    for changed, name in ((first, "v2"), (first, None), (other, "v1"), (second, "v1"), (list(range(13)), "v1")):
        loader = midepoch.from_map_style(changed, fingerprint=name).shuffle(seed=1).loader(2)
        with pytest.raises(midepoch.CheckpointMismatchError, match=r"data differs[\s\S]*from_map_style: the length"):
            loader.load_state_dict(state)


def test_many_items_take_no_room(tmp_path: Path) -> None:
    ds = midepoch.from_map_style(range(1 << 26), cache_dir=tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("part-*")) < 1 << 20
    loader = ds.shuffle(seed=1).loader(4)
    loader.load_state_dict({**loader.state_dict(), "position": 60_000_000, "cursor": [[0, 60_000_000]]})
    assert len(next(iter(loader))) == 4 and ds[1 << 25] == 1 << 25


class Locked(list[int]):
    """A dataset that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(range(4))
        self.lock = threading.Lock()


def test_a_dataset_that_cannot_be_pickled_works_with_fork_and_names_the_remedy_with_spawn() -> None:
    ds = midepoch.from_map_style(Locked())
    (batch,) = ds.loader(4, num_workers=1, multiprocessing_context="fork")
    assert batch.tolist() == [0, 1, 2, 3]
    with pytest.raises(midepoch.MidepochError, match=r"lock.*__getstate__"):
        next(iter(ds.loader(4, num_workers=1, multiprocessing_context="spawn")))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_get_the_dataset_once(method: str, tmp_path: Path) -> None:
    rows = Heavy(tmp_path)
    loader = midepoch.from_map_style(rows).loader(4, num_workers=1, multiprocessing_context=method)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(ROWS))
    assert len(list(tmp_path.iterdir())) == (0 if method == "fork" else 1)
    unpicklable = Made(lambda i: i)
    unpicklable.lock = subprocess.Popen([sys.executable, "-c", ""])  # type: ignore[attr-defined]
    unpicklable.lock.wait()  # type: ignore[attr-defined]
    if method == "spawn":
        with pytest.raises(midepoch.MidepochError, match=r"pickle"):
            list(midepoch.from_map_style(unpicklable).loader(4, num_workers=1, multiprocessing_context=method))


class Heavy:
    """A dataset that leaves a file whenever it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> int:
        return i

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        import secrets

        (self.folder / secrets.token_hex(8)).touch()


def test_objects_of_other_kinds_are_refused(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([])

    class NoLength:
        def __getitem__(self, i: int) -> int:
            return i

    cases: list[tuple[Any, str]] = [
        (Endless(), r"IterableDataset Endless.*from_generator"),
        (NoLength(), r"without len\(\)"),
        ({"a": [1]}, r"from_dict\(columns\)"),
        ("text", r"from_files"),
        (5, r"without ds\[i\]"),
        (midepoch.from_dict({"a": [1]}), "a dataset already"),
    ]
    for given, text in cases:
        with pytest.raises(TypeError, match=text):
            midepoch.from_map_style(given)
    with pytest.raises(midepoch.DataNotFoundError, match="list is empty"):
        midepoch.from_map_style([])
    with pytest.raises(TypeError, match="fingerprint"):
        midepoch.from_map_style([1], fingerprint=3)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(midepoch.MidepochError, match=r"cannot be written.*cache_dir"):
        midepoch.from_map_style([1], cache_dir=tmp_path / "file" / "folder")


def test_ranks_share_the_global_batches(tmp_path: Path) -> None:
    rows = midepoch.from_map_style(Made(ITEMS["draws"], 64)).shuffle(seed=1)
    expected = [flat(batch) for batch in rows.loader(8, collate_fn=list)]
    state, found = None, []
    for size, steps in ((4, 3), (2, 2), (8, 3)):
        loaders = [rows.loader(8 // size, rank=rank, world_size=size, collate_fn=list) for rank in range(size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        passes = [iter(loader) for loader in loaders]
        for _ in range(steps):
            parts = [next(one) for one in passes]
            found.append(flat([part[k] for k in range(8 // size) for part in parts]))
        state = loaders[-1].state_dict()
    assert found == expected


@pytest.mark.slow
def test_data_parallel_4_to_2_to_8_with_the_same_global_batches(tmp_path: Path) -> None:
    """torchrun ranks that are killed: the global batches are those of one process, none lost, none twice."""
    job = str(HERE / "map_style_job.py")
    for size, stop in ((4, 6), (2, 11), (8, 0)):
        process = launch(
            "--standalone", f"--nproc-per-node={size}", job, str(tmp_path), str(stop), error=subprocess.PIPE
        )
        try:
            _, said = process.communicate(timeout=300)
        finally:
            end(process)
        assert (process.returncode != 0) == bool(stop), said[-4000:]
        assert not stop or re.search(rf"(SIGKILL|{-signal.SIGKILL})", said), said[-4000:]
    sys.path.insert(0, str(HERE))
    from map_style_job import BATCH, ITEMS_OF_AN_EPOCH, dataset

    with torch.random.fork_rng():
        torch.manual_seed(7)  # as in the job
        order = [flat(item) for item in dataset()]
    steps: dict[int, list[list[Any]]] = {}
    for path in tmp_path.glob("log-*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], []).append([entry["size"], entry["rank"], entry["ids"], entry["noise"]])
    expected = [order[i : i + BATCH] for i in range(0, ITEMS_OF_AN_EPOCH, BATCH)]
    assert sorted(steps) == list(range(1, len(expected) + 1))
    sizes = []
    for step, found in sorted(steps.items()):
        by_size = {entry[0]: sorted(each for each in found if each[0] == entry[0]) for entry in found}
        for size, ranks in by_size.items():  # a step that was repeated after a kill has the same rows
            ids = [number for k in range(BATCH // size) for _, _, numbers, _ in ranks for number in numbers[k : k + 1]]
            noise = [value for k in range(BATCH // size) for *_, values in ranks for value in values[k : k + 1]]
            whole = expected[step - 1]
            assert sorted(ids) == sorted(item[1][0][1] for item in whole)
            assert sorted(noise) == sorted(item[1][1][3] for item in whole)
        sizes.append(max(by_size))
    assert sizes[0] == 4 and 2 in sizes and sizes[-1] == 8
