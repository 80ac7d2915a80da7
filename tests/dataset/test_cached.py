"""cache(): rows are computed once, for everyone, whatever is killed; and never taken from another pipeline."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import midepoch
from data import dataset_of, numbered
from midepoch.dataset import parts
from midepoch.errors import ColumnError, DataNotFoundError, MidepochError

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROWS", 10)
    monkeypatch.setattr(parts, "PART_BYTES", 1)


@pytest.fixture
def ds(tmp_path: Path) -> midepoch.Dataset:
    return dataset_of(tmp_path / "data", numbered(0, 95), 20)


class Counted:
    """Counts its calls in a file, and fails at a row as long as a file exists."""

    def __init__(self, folder: Path, at: int = -1) -> None:
        self.folder, self.at = str(folder), at

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == self.at and os.path.exists(f"{self.folder}/fail"):
            raise ValueError("not this one")
        with open(f"{self.folder}/calls", "a") as file:
            file.write("x")
        return {"double": 2 * row["id"]}

    @property
    def calls(self) -> int:
        return os.path.getsize(f"{self.folder}/calls")


def test_rows_are_computed_once(ds: midepoch.Dataset, tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    expected = list(ds.map(counted))
    first = ds.map(counted).cache()
    assert counted.calls == 190 and list(first) == expected and len(first) == 95
    second = ds.map(counted).cache()
    assert counted.calls == 190 and list(second.shuffle(seed=1)) == list(first.shuffle(seed=1))
    assert len(first.pipeline.base.source.files) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_positions_of_what_had_none(docs: midepoch.Dataset, workers: int) -> None:
    packed = docs.filter(_even).pack(16, column="tokens", pad=-1, labels=True)
    stored = packed.cache(num_workers=workers)
    assert list(stored) == list(packed) and len(stored) == len(list(packed))
    assert stored[-1] == list(packed)[-1] and stored.schema == packed.schema


def _even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2 == 0)


def test_an_error_keeps_what_was_written(ds: midepoch.Dataset, tmp_path: Path) -> None:
    counted = Counted(tmp_path, at=57)
    (tmp_path / "fail").touch()
    with pytest.raises(MidepochError, match="not this one"):
        ds.map(counted).cache()
    (tmp_path / "fail").unlink()
    before = counted.calls
    assert [row["double"] for row in ds.map(counted).cache()] == [2 * i for i in range(95)]
    assert counted.calls - before <= 95 - 40


JOB = """
import json, os, sys, time
import midepoch
from midepoch.dataset import parts
parts.ROWS, parts.PART_BYTES = 10, 1
folder, slow = sys.argv[1], float(sys.argv[2])

def work(row):
    time.sleep(float(os.environ["SLOW"]))
    with open(os.environ["CALLS"], "a") as file:
        file.write("x")
    return {"double": 2 * row["id"]}

ds = midepoch.from_files(folder).map(work).cache()
print(json.dumps([row["double"] for row in ds]))
"""


def start(python: str, folder: Path, slow: float, calls: Path) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(JOB)
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "SLOW": str(slow), "CALLS": str(calls)}
    command = [python, str(folder / "job.py"), str(folder / "data"), str(slow)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_kill_costs_one_part_and_processes_share_the_work(ds: midepoch.Dataset, tmp_path: Path, python: str) -> None:
    assert len(ds) == 95
    calls = tmp_path / "calls"
    killed = start(python, tmp_path, 0.02, calls)
    deadline = time.monotonic() + 300  # the first program waits for the imports of all of them
    while (not calls.exists() or calls.stat().st_size < 45) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    done = calls.stat().st_size
    assert 45 <= done < 95, "killed while it worked"
    together = [start(python, tmp_path, 0.001, calls) for _ in range(3)]
    for process in together:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out) == [2 * i for i in range(95)]
    assert calls.stat().st_size <= 95 + 20, "only the part that was not finished is computed again"


def test_a_state_of_cached_rows_resumes_where_they_were_cached_again(ds: midepoch.Dataset, tmp_path: Path) -> None:
    def make(folder: str, batch: int) -> midepoch.Loader:
        return ds.map(_noisy).cache(tmp_path / folder).shuffle(seed=3).loader(batch)

    loader = make("one", 7)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [value for batch in batches for value in batch["noise"].tolist()]
    other = make("two", 5)
    other.load_state_dict(state)
    assert [value for batch in other for value in batch["noise"].tolist()] == rest


def _noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {"noise": float(np.random.rand())}


def test_other_data_functions_and_values_are_other_caches(ds: midepoch.Dataset, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    for factor in (2, 3):
        found = ds.map(lambda row, factor=factor: {"n": row["id"] * factor}).cache(root)
        assert [row["n"] for row in found] == [factor * i for i in range(95)]
    assert len(list(ds.take(30).cache(root))) == 30
    assert len(list(root.iterdir())) == 3
    assert ds.take(30).cache(root)[3] == ds[3]
    assert len(list(root.iterdir())) == 3
    changed = dataset_of(tmp_path / "data", numbered(1, 96), 20)  # the same files, with other values
    os.utime(tmp_path / "data" / "a.arrow", ns=(1, 1))
    changed = midepoch.from_files(tmp_path / "data", force_reindex=True)
    assert changed.take(30).cache(root)[0]["id"] == 1


def test_types_become_wide_enough_for_all_rows(ds: midepoch.Dataset) -> None:
    found = ds.map(lambda row: {"n": None if row["id"] < 50 else "text", "x": [] if row["id"] < 30 else [1.5]}).cache()
    assert found.schema.field("n").type == pa.string() and found.schema.field("x").type == pa.list_(pa.float64())
    assert [row["n"] for row in found] == [None] * 50 + ["text"] * 45
    with pytest.raises(ColumnError, match=r"'n' is int64 in some rows and string in others.*cast"):
        ds.map(lambda row: {"n": 1 if row["id"] < 50 else "text"}).cache()


def test_features_are_kept(ds: midepoch.Dataset, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    stored = (
        ds.select_columns(["id"]).map(lambda row: {"kind": "ab"[row["id"] % 2]}).class_encode_column("kind").cache()
    )
    assert stored.features["kind"].names == ["a", "b"] and stored[1] == {"id": 1, "kind": 1}
    image = datasets.Dataset.from_dict(
        {"image": [np.full((4, 4, 3), i, np.uint8) for i in range(12)], "label": [0, 1] * 6},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}),
    )
    image.save_to_disk(tmp_path / "images")
    cat = midepoch.load_from_disk(tmp_path / "images").filter(lambda row: row["label"] == 0, input_columns=None).cache()
    assert len(cat) == 6 and cat.features["label"].names == ["cat", "dog"]
    assert [np.asarray(row["image"])[0, 0, 0] for row in cat] == [0, 2, 4, 6, 8, 10]


def test_arrays_keep_their_type_and_shape(ds: midepoch.Dataset) -> None:
    def arrays(row: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(row["id"])
        return {
            "image": rng.integers(0, 255, (3, 4, 5), dtype=np.uint8),
            "half": torch.from_numpy(rng.standard_normal((2, 3), dtype=np.float32)),
            "line": np.arange(4, dtype=np.int16),
            "flag": np.array([[True, False]]),
            "one": np.float32(row["id"]),
        }

    made = ds.select_columns("id").map(arrays)
    (expected,), (found,) = made.loader(95), made.cache().loader(95)
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in expected.items()
    }
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_full_disk_is_said(ds: midepoch.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(MidepochError, match=r"cannot be written.*No space.*make room"):
        patch.setattr(parts.pa.ipc, "new_file", full)
        ds.cache(tmp_path / "full")
    assert len(ds.cache(tmp_path / "full")) == 95
    (folder,) = (tmp_path / "full").iterdir()
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]
    (folder / "complete.json").write_text("{")
    with pytest.raises(MidepochError, match="Delete this folder"):
        ds.cache(tmp_path / "full")


def test_no_rows(ds: midepoch.Dataset) -> None:
    with pytest.raises(DataNotFoundError, match="no rows to cache"):
        ds.filter(lambda row: False).cache()


def _grouped(batch: dict[str, Any]) -> dict[str, Any]:
    return {"n": [len(batch["id"])] * len(batch["id"]), "words": [text.split() for text in batch["text"]]}


def _some(row: dict[str, Any]) -> dict[str, Any]:
    value = row["id"]
    return {"maybe": None if value % 3 else f"é{value}", "deep": {"a": [value] * (value % 4), "b": value % 2 == 0}}


PIPELINES = {
    "batched map": lambda ds: ds.map(_grouped, batched=True, batch_size=7),
    "filter": lambda ds: ds.filter(_even),
    "expression": lambda ds: ds.filter(pc.field("id") > 13).map(_some),
    "nested": lambda ds: ds.map(_some),
    "flat map": lambda ds: ds.flat_map(lambda row: [row] * (row["id"] % 3)),
    "pack": lambda ds: ds.pack(8, column="tokens", pad=-1, labels=True),
    "mix": lambda ds: midepoch.mix([ds.take(40), ds.skip(40)], [2, 1], seed=1, stop="all"),
    "exact parts": lambda ds: ds.take(90),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_files_depend_on_nothing_but_the_rows(ds: midepoch.Dataset, tmp_path: Path, name: str) -> None:
    """Neither on workers, nor on an interruption at any part: a state fits the cached rows of every machine."""
    made = PIPELINES[name](ds)
    whole = made.cache(tmp_path / "0")
    expected = whole.pipeline.base.source.fingerprint
    assert list(whole) == list(made)
    for workers in (1, 2):
        assert made.cache(tmp_path / str(workers), num_workers=workers).pipeline.base.source.fingerprint == expected
    (folder,) = (tmp_path / "0").iterdir()
    count = len(list(folder.glob("part-*.arrow")))
    for kept in {1, count // 2, count - 1, count}:
        cut = tmp_path / f"cut-{kept}" / folder.name
        cut.mkdir(parents=True)
        for number in range(kept):
            for end in ("arrow", "arrow.json"):
                shutil.copy(folder / f"part-{number:05}.{end}", cut)
        again = made.cache(cut.parent, num_workers=kept % 2)
        assert list(again) == list(whole) and again.pipeline.base.source.fingerprint == expected, kept


def test_a_name_stands_for_functions_and_for_nothing_else(ds: midepoch.Dataset, tmp_path: Path) -> None:
    root = tmp_path / "named"
    lock = threading.Lock()

    def locked(row: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"n": row["id"]}

    halves = ds.train_test_split(0.2, seed=1)
    found = {name: part.map(locked).cache(root, key="v1") for name, part in halves.items()}
    assert [len(found["train"]), len(found["test"])] == [76, 19]
    others = [
        ds.take(10).map(locked),
        ds.filter(pc.field("id") < 30).map(locked),
        ds.rename_column("text", "t").map(locked),
        ds.map(locked).with_format("arrow").map(lambda table: table),
        midepoch.mix([ds.take(20), ds.skip(20)], [1, 2]).map(locked),
        midepoch.mix([ds.take(20), ds.skip(20)], [2, 1]).map(locked),
        ds.map(locked).pack(8, column="tokens"),
        ds.map(locked).pack(9, column="tokens"),
    ]
    for other in others:
        assert list(other.cache(root, key="v1").with_format("python")) == list(other.with_format("python"))
    assert len(list(root.iterdir())) == 2 + len(others)
    assert len(ds.take(10).map(locked).cache(root, key="v1")) == 10 and len(list(root.iterdir())) == 2 + len(others)
    ds.take(10).map(locked).cache(root, key="v2")
    assert len(list(root.iterdir())) == 3 + len(others)


def test_lanes_are_part_of_the_order(ds: midepoch.Dataset, tmp_path: Path) -> None:
    for lanes in (1, 4):
        made = ds.with_lanes(lanes).filter(_even)
        assert list(made.cache(tmp_path / "lanes")) == list(made)


def test_columns_that_come_and_go_are_refused(ds: midepoch.Dataset, tmp_path: Path) -> None:
    for more, fewer in ((50, 200), (-1, 50)):
        function = lambda row, a=more, b=fewer: {"y": 1, **({"z": 2} if a <= row["id"] < b else {})}  # noqa: E731
        with pytest.raises(ColumnError, match="'z'.*Return the same for every row, None for a missing value"):
            ds.map(function, remove_columns=["tokens"]).cache(tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(MidepochError, match="cannot be written"):
        ds.cache(tmp_path / "file" / "folder")
    with pytest.raises(TypeError, match="got ''. Omit it for the default"):
        ds.cache("")


def test_parts_are_alike_whichever_process_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that become longer, and an interruption between them: the files are those of an uninterrupted run."""
    monkeypatch.setattr(parts, "PART_BYTES", 2000)
    ds = dataset_of(tmp_path / "data", numbered(0, 200), 20)

    def lengthen(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 100 and (tmp_path / "fail").exists():
            raise ValueError("not this one")
        return {"text": "x" * (1 if row["id"] < 60 else 100)}

    ds.map(lengthen).cache(tmp_path / "at once")
    (tmp_path / "fail").touch()
    with pytest.raises(midepoch.MapError, match="not this one"):
        ds.map(lengthen).cache(tmp_path / "in two")
    (tmp_path / "fail").unlink()
    ds.map(lengthen).cache(tmp_path / "in two")
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.arrow")} for name in ("at once", "in two")
    ]
    assert len(files[0]) > 2
    assert files[0] == files[1]
