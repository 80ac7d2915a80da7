"""What a batch comes out as depends on its rows alone: not on the chunk it was read in, a resume, or the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

import midepoch
from data import write_arrow
from midepoch.errors import CorruptBlockError
from midepoch.testing import assert_resumes_exactly, same


@pytest.fixture
def lists(tmp_path: Path) -> midepoch.Dataset:
    n = 60
    table = pa.table(
        {
            "ragged": pa.array([[i] * (3 if (i // 4) % 2 == 0 else 1 + i % 3) for i in range(n)]),
            "nested": pa.array([[] if i % 4 == 0 else [[i, i]] * 2 if i < 30 else [[i], [i, i]] for i in range(n)]),
            "holes": pa.array([[i, None] if i == 50 else [i, i] for i in range(n)]),
            "gone": pa.array([None if i == 50 else [i, i] for i in range(n)]),
            "struct": pa.array([None if i == 50 else {"a": i} for i in range(n)]),
            "mask": pa.array([[True, i % 2 == 0] for i in range(n)]),
        }
    )
    return midepoch.from_files(write_arrow(tmp_path / "a.arrow", table, 16))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_lists(lists: midepoch.Dataset, kind: str) -> None:
    ds = lists.with_format(kind)
    assert_resumes_exactly(lambda: ds.loader(4), epochs=1, tail=3)
    working = [lambda: ds.loader(4, num_workers=2)]
    assert_resumes_exactly(lambda: ds.loader(4), epochs=1, resume_with=working, steps=[2, 11], tail=3)
    # Rows around the ends of blocks, those that miss a value, and the end.
    rows = [0, 1, 15, 16, 17, 31, 32, 47, 48, 49, 50, 51, 59, 60]
    assert_resumes_exactly(lambda: ds, epochs=1, steps=rows, tail=2)
    assert same(list(ds.loader(4)), list(ds.iter(4)))
    assert same(list(ds.loader(4)), list(ds.map(lambda row: None).loader(4)))
    first = next(iter(ds.loader(4)))
    assert tuple(first["mask"].shape) == (4, 2)
    assert first["mask"].dtype in (np.bool_, torch.bool)
    assert tuple(first["holes"].shape) == (4, 2)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    pictures = [Image.new("RGB", (4 + 2 * ((i // 3) % 2), 4), (i, 0, 0)) for i in range(24)]
    data: dict[str, Any] = {"image": pictures, "id": list(range(24))}
    features = datasets.Features({"image": datasets.Image(), "id": datasets.Value("int64")})
    datasets.Dataset.from_dict(data, features=features).save_to_disk(str(tmp_path / "images"))
    return tmp_path / "images"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_images(images: Path, kind: str) -> None:
    ds = midepoch.load_from_disk(images).with_format(kind)
    assert_resumes_exactly(lambda: ds.loader(4), epochs=1, tail=2)
    assert same(list(ds.loader(4)), list(ds.loader(4, num_workers=2)))


def test_image_that_does_not_decode(tmp_path: Path) -> None:
    good = datasets.Image().encode_example(Image.new("RGB", (2, 2)))
    rows = [{"bytes": b"junk", "path": None} if i == 9 else good for i in range(20)]
    features = datasets.Features({"image": datasets.Image(), "id": datasets.Value("int64")})
    storage = {"image": pa.array(rows, features["image"].pa_type), "id": pa.array(range(20))}
    table = pa.table(storage).replace_schema_metadata(features.arrow_schema.metadata)
    path = write_arrow(tmp_path / "a.arrow", table, 5)
    with pytest.raises(CorruptBlockError, match="column 'image' of row 9"):
        list(midepoch.from_files(path).loader(4))
    for workers in (0, 2):
        loader = midepoch.from_files(path, on_error="skip").loader(4, num_workers=workers)
        assert [int(i) for batch in loader for i in batch["id"]] == [i for i in range(20) if i != 9]
        assert loader.skipped == 1


def test_dates_are_pythons_in_torch(tmp_path: Path) -> None:
    import datetime

    utc = datetime.timezone.utc
    table = pa.table(
        {
            "day": [datetime.date(2020, 1, 1)],
            "time": pa.array([datetime.datetime(2020, 1, 1, 5, tzinfo=utc)], pa.timestamp("us", "UTC")),
        }
    )
    batch = next(iter(midepoch.from_files(write_arrow(tmp_path / "a.arrow", table, 5)).loader(1)))
    assert batch["day"] == [datetime.date(2020, 1, 1)]
    assert batch["time"][0] == datetime.datetime(2020, 1, 1, 5, tzinfo=utc)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda i: "odd" if i % 2 else i, [0, "odd", 2, "odd"]),
        (lambda i: -1 if i % 2 else 2**63 + 1, [2**63 + 1, -1, 2**63 + 1, -1]),
        (lambda i: [1] if i % 2 else 3, [3, [1], 3, [1]]),
    ],
)
def test_values_of_a_map_are_never_rewritten(small_files: list[str], function: Any, expected: list[Any]) -> None:
    ds = midepoch.from_files(small_files).map(lambda row: {"v": function(row["id"])})
    assert next(iter(ds.loader(4)))["v"] == expected


def test_structs_through_a_batched_map(tmp_path: Path) -> None:
    table = pa.table({"s": pa.array([{"a": i, "b": str(i)} for i in range(9)])})
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", table, 4)).with_format("numpy")
    mapped = ds.map(lambda batch: batch, batched=True, batch_size=2)
    assert [int(i) for batch in mapped.loader(4) for i in batch["s"]["a"]] == list(range(9))
    assert list(mapped.with_format("python")) == table.to_pylist()
    assert mapped.with_format("arrow")[:].column("s").to_pylist() == table["s"].to_pylist()


def test_arrow_batches_travel_without_their_block(tmp_path: Path) -> None:
    import pickle

    table = pa.table({"x": ["a" * 1000] * 5000})
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", table, 5000)).with_format("arrow")
    batch = next(iter(ds.loader(4, num_workers=1)))
    assert len(pickle.dumps(batch)) < 20_000


def test_failure_is_not_the_end(small_files: list[str]) -> None:
    ds = midepoch.from_files(small_files).map(lambda row: {"x": 1 // (row["id"] - 3)})
    iterator = iter(ds)
    for _ in range(3):
        next(iterator)
    for _ in range(3):
        with pytest.raises(midepoch.MapError, match="row 3 "):
            next(iterator)
    batches = iter(ds.loader(2))
    next(batches)
    with pytest.raises(midepoch.MapError):
        next(batches)
    with pytest.raises(midepoch.MidepochError, match="has failed"):
        next(batches)


def test_an_epoch_named_during_another(small_files: list[str]) -> None:
    loader = midepoch.from_files(small_files).shuffle(seed=1).loader(5)
    for number, _ in enumerate(loader):
        if number == 0:
            loader.set_epoch(5)
    assert loader.epoch == 5
    assert loader.state_dict()["position"] == 0
