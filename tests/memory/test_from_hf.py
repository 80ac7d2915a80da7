"""from_hf: an open datasets.Dataset, mapped in place, with everything that was done to it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import (
    Array2D,
    ClassLabel,
    DatasetDict,
    Features,
    Image,
    List,
    Value,
    concatenate_datasets,
)
from PIL import Image as Pillow

import midepoch
from midepoch.testing import assert_resumes_exactly

ROWS = 60
FEATURES = Features(
    {
        "id": Value("int64"),
        "label": ClassLabel(names=["cat", "dog"]),
        "text": Value("string"),
        "matrix": Array2D((2, 2), "float32"),
        "tokens": List(Value("int32")),
        "fixed": List(Value("float32"), length=2),
        "nested": {"a": Value("int8"), "b": List({"c": Value("string")})},
        "image": Image(),
        "when": Value("timestamp[us]"),
    }
)


def columns(rows: int) -> dict[str, Any]:
    return {
        "id": list(range(rows)),
        "label": [i % 2 for i in range(rows)],
        "text": [None if i == 3 else f"row {i}" for i in range(rows)],
        "matrix": [[[i, 1], [2, 3]] for i in range(rows)],
        "tokens": [[i] * (i % 3) for i in range(rows)],
        "fixed": [[i, i + 1] for i in range(rows)],
        "nested": [{"a": i, "b": [{"c": str(i)}]} for i in range(rows)],
        "image": [Pillow.new("RGB", (2, 3), (i, 0, 0)) for i in range(rows)],
        "when": [np.datetime64("2020-01-01", "us") + i for i in range(rows)],
    }


@pytest.fixture(scope="module")
def memory() -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns(ROWS), features=FEATURES)


@pytest.fixture(scope="module")
def saved(memory: datasets.Dataset, tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    folder = tmp_path_factory.mktemp("saved")
    memory.save_to_disk(folder, num_shards=3)
    return datasets.load_from_disk(folder)


def in_place(ds: midepoch.Dataset, given: datasets.Dataset) -> bool:
    return {file.path for file in ds.pipeline.base.source.files} <= {each["filename"] for each in given.cache_files}


def plain(row: Any) -> Any:
    """A row that can be compared."""
    image = row.get("image")
    return {**row, "image": image.tobytes()} if isinstance(image, Pillow.Image) else row


Change = Callable[[datasets.Dataset], datasets.Dataset]
MAPPED: dict[str, Change] = {
    "as it is": lambda ds: ds,
    "selected": lambda ds: ds.select([5, 3, 59, 3]),
    "a range": lambda ds: ds.select(range(7, 33)),
    "a range of a range": lambda ds: ds.select(range(7, 50)).select(range(20, 30)).select(range(2, 4)),
    "shuffled": lambda ds: ds.shuffle(seed=1),
    "shuffled and cut": lambda ds: ds.select(range(5, 55)).shuffle(seed=1).select(range(3, 20)),
    "sharded": lambda ds: ds.shard(4, 1),
    "every fourth": lambda ds: ds.shard(4, 1, contiguous=False),
    "renamed": lambda ds: ds.rename_column("id", "n").rename_column("text", "id").rename_column("n", "text"),
    "removed": lambda ds: ds.remove_columns(["text", "image"]),
    "columns": lambda ds: ds.select_columns(["text", "id"]),
    "concatenated": lambda ds: concatenate_datasets(
        [ds.select(range(40, 45)), ds.shuffle(seed=2).select(range(3)), ds]
    ),
    "concatenated and cut": lambda ds: concatenate_datasets([ds, ds]).skip(50),
    "split": lambda ds: ds.train_test_split(0.3, seed=1)["test"],
    "other classes": lambda ds: ds.cast_column("label", ClassLabel(names=["a", "b"])),
    "not decoded": lambda ds: ds.cast_column("image", Image(decode=False)).remove_columns("id"),
    "mapped": lambda ds: ds.map(lambda row: {"twice": row["id"] * 2}).remove_columns("text"),
    "filtered": lambda ds: ds.filter(lambda i: i % 3 == 0, input_columns="id"),
    "flattened": lambda ds: ds.shuffle(seed=1).flatten_indices(),
}
COPIED: dict[str, Change] = {
    "a new column": lambda ds: ds.add_column("new", list(range(ROWS))).shuffle(seed=1),
    "two files side by side": lambda ds: concatenate_datasets(
        [ds.select_columns(["id"]), ds.select_columns(["text"]).rename_column("text", "t")], axis=1
    ),
    "different renames": lambda ds: concatenate_datasets(
        [
            ds.select_columns(["text"]).select(range(5)),
            ds.rename_column("text", "old").map(lambda row: {"text": row["old"]}).select_columns(["text"]),
        ]
    ),
}


@pytest.mark.parametrize("name", [*MAPPED, *COPIED])
def test_rows_columns_and_features_are_those_of_datasets(name: str, saved: datasets.Dataset) -> None:
    given = (MAPPED.get(name) or COPIED[name])(saved)
    ds = midepoch.from_hf(given)
    assert ds.column_names == given.column_names and ds.features == given.features
    assert list(map(plain, ds)) == list(map(plain, given))
    assert len(ds) == len(given) and in_place(ds, given) == (name in MAPPED)
    again = pickle.loads(pickle.dumps(ds))
    assert again.features == given.features and plain(again[1]) == plain(given[1])


def test_rows_in_memory_are_written_once(memory: datasets.Dataset, saved: datasets.Dataset, tmp_path: Path) -> None:
    ds = midepoch.from_hf(memory, cache_dir=tmp_path)
    assert [plain(row) for row in ds] == [plain(row) for row in memory] and ds.features == FEATURES
    again = datasets.Dataset.from_dict(columns(ROWS), features=FEATURES)
    assert (
        midepoch.from_hf(again, cache_dir=tmp_path).pipeline.base.source.fingerprint
        == ds.pipeline.base.source.fingerprint
    )
    assert len(list(tmp_path.rglob("part-*"))) == 1
    picked = midepoch.from_hf(memory.shuffle(seed=3), cache_dir=tmp_path)
    assert [row["id"] for row in picked] == memory.shuffle(seed=3)["id"][:]
    assert len(list(tmp_path.rglob("part-*"))) == 1  # the same rows in another order
    (batch,) = ds.select_columns(["matrix", "label"]).take(4).loader(4)
    assert batch["matrix"].shape == (4, 2, 2) and batch["label"].tolist() == [0, 1, 0, 1]
    plain_batch = saved.select_columns(["tokens", "id"])
    loader = midepoch.from_hf(plain_batch.shuffle(seed=1)).shuffle(seed=5).loader(7)
    assert sorted(int(i) for batch in loader for i in batch["id"]) == list(range(ROWS))
    assert_resumes_exactly(lambda: midepoch.from_hf(plain_batch.shuffle(seed=1)).shuffle(seed=5).loader(7), tail=3)


def test_files_that_are_gone_are_written_again(memory: datasets.Dataset, tmp_path: Path) -> None:
    memory.select_columns(["id"]).save_to_disk(tmp_path / "saved")
    opened = datasets.load_from_disk(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    assert [row["id"] for row in midepoch.from_hf(opened)] == list(range(ROWS))


def test_formats_are_kept_or_refused(saved: datasets.Dataset) -> None:
    small = saved.select_columns(["id", "text", "tokens"])
    for kind in ("numpy", "torch"):
        given = small.with_format(kind, columns=["tokens", "id"])
        row = midepoch.from_hf(given)[5]
        assert list(row) == ["tokens", "id"] and type(row["tokens"]) is type(given[5]["tokens"])
    everything = midepoch.from_hf(small.with_format("torch", columns=["id"], output_all_columns=True))
    assert set(everything[0]) == {"id", "text", "tokens"} and isinstance(everything[0]["id"], torch.Tensor)
    doubled = small.with_transform(lambda batch: {"double": [2 * i for i in batch["id"]]})
    assert [midepoch.from_hf(doubled)[i] for i in (0, 7)] == [doubled[i] for i in (0, 7)]
    limited = small.with_transform(lambda batch: {"n": [len(batch)] * len(batch["id"])}, columns=["id"])
    assert midepoch.from_hf(limited)[0] == limited[0]
    for given in (small.with_format("pandas"), small.with_format("torch", dtype=torch.float32)):
        with pytest.raises(midepoch.MidepochError, match=r"cannot be kept.*with_format\(None\)"):
            midepoch.from_hf(given)


def test_splits(saved: datasets.Dataset) -> None:
    both = DatasetDict({"train": saved, "test": saved.select(range(10))})
    found = midepoch.from_hf(both, split="train[:90%]+test[5:]")
    assert [row["id"] for row in found] == [*range(54), *range(5, 10)]
    assert len(midepoch.from_hf(both, "test")) == 10 and len(midepoch.from_hf(saved, "train[10:15]")) == 5
    with pytest.raises(ValueError, match=r"splits train, test. Choose one with split="):
        midepoch.from_hf(both)
    with pytest.raises(midepoch.DataNotFoundError, match="no split 'validation'"):
        midepoch.from_hf(both, "validation")
    with pytest.raises(midepoch.DataNotFoundError, match="several splits"):
        midepoch.from_hf(saved, "a+b")
    for empty in ("test[5:5]", "test[99:]"):
        with pytest.raises(midepoch.DataNotFoundError, match=r"split='test\[.*has no rows"):
            midepoch.from_hf(both, empty)
    assert len(midepoch.from_hf(both, "test+train[9999:]")) == 10
    with pytest.raises(midepoch.DataNotFoundError, match="no rows"):
        midepoch.from_hf(saved.select([]))


def test_other_objects_are_refused(saved: datasets.Dataset) -> None:
    cases: list[tuple[Callable[[Any], Any], Any, str]] = [
        (midepoch.from_hf, saved.to_iterable_dataset(), r"without streaming=True.*from_files"),
        (midepoch.from_hf, [{"id": 1}], r"from_list\(rows\)"),
        (midepoch.from_hf, "name", r"load_dataset"),
        (midepoch.from_hf, torch.utils.data.TensorDataset(torch.ones(1)), r"from_map_style\(ds\)"),
        (midepoch.from_hf, midepoch.from_hf(saved), "a dataset already"),
        (midepoch.from_files, saved, r"from_hf\(ds\)"),
        (midepoch.from_files, DatasetDict({"train": saved}), r"from_hf\(ds, split='train'\)"),
        (midepoch.from_map_style, saved, r"from_hf\(ds\)"),
        (midepoch.from_arrow, saved, r"from_hf\(ds\)"),
    ]
    for function, given, text in cases:
        with pytest.raises(TypeError, match=text):
            function(given)
