"""Uses of the public interface, with the types that a type checker must find. Read by mypy, never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import pyarrow as pa
import pyarrow.compute as pc

import midepoch
from midepoch.stats import Stats


class Own(midepoch.Dataset):
    """A class of the user."""


def even(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


def datasets(ds: midepoch.Dataset, own: Own) -> None:
    assert_type(ds.map(dict), midepoch.Dataset)
    assert_type(ds.filter(even), midepoch.Dataset)
    assert_type(ds.filter(pc.field("id") > 3), midepoch.Dataset)
    assert_type(ds.flat_map(lambda row: [row, row]), midepoch.Dataset)
    assert_type(ds.shuffle(seed=1).filter(even).pack(16, pad=0, labels=True).with_format("torch"), midepoch.Dataset)
    assert_type(ds.train_test_split(0.1), dict[str, midepoch.Dataset])
    assert_type(ds.train_test_split(test_size=100)["train"].slice(None, "80%"), midepoch.Dataset)
    assert_type(
        ds.with_transform(lambda batch: batch).class_encode_column("a").cast_column("a", "int8"), midepoch.Dataset
    )
    assert_type(ds.cache(num_workers=2), midepoch.Dataset)
    assert_type(ds.take(3).skip(1).select([1]).shard(2, 0).with_lanes(4), midepoch.Dataset)
    assert_type(ds.rename_column("a", "b").remove_columns("b").select_columns(["c"]), midepoch.Dataset)
    assert_type(ds.schema, pa.Schema)
    assert_type(ds.shape, tuple[int, int])
    assert_type(ds.column_names, list[str])
    assert_type(ds.unique("a"), list[Any])
    assert_type(ds.state_dict(), dict[str, Any])
    assert_type(own.shuffle(seed=1).filter(even).flat_map(lambda row: [row]).map(dict), Own)
    assert_type(own.cache(), Own)
    assert_type(own.train_test_split()["test"], Own)


def combined(ds: midepoch.Dataset) -> None:
    assert_type(midepoch.mix([ds, ds], weights=[1, 2]), midepoch.Dataset)
    assert_type(midepoch.interleave_datasets([ds, ds], probabilities=[0.5, 0.5]), midepoch.Dataset)
    assert_type(midepoch.concatenate_datasets([ds, ds]), midepoch.Dataset)
    assert_type(midepoch.concat([ds, ds]), midepoch.Dataset)
    assert_type(midepoch.zip([ds, ds]), midepoch.Dataset)
    assert_type(midepoch.from_files("*.parquet", columns=["a"]), midepoch.Dataset)
    assert_type(midepoch.load_dataset("parquet", data_files="x", split="train"), midepoch.Dataset)
    assert_type(midepoch.load_from_disk("folder"), midepoch.Dataset)


def loaders(ds: midepoch.Dataset) -> None:
    loader = ds.loader(32, num_workers=4, prefetch_factor=2, timeout=30, device="cuda")
    assert_type(loader, midepoch.Loader)
    assert_type(iter(loader), Iterator[Any])
    assert_type(len(loader), int)
    assert_type(loader.batch_size, int | None)
    assert_type(loader.dataset, midepoch.Dataset)
    assert_type(loader.stats(), Stats)
    assert_type(ds.loader(None).estimated_len, int | None)
    loader.load_state_dict(loader.state_dict(), allow=["pipeline"])
    with loader as opened:
        assert_type(opened, midepoch.Loader)


def wrong(ds: midepoch.Dataset) -> None:
    """Every line is an error to a type checker: an ignore that is not needed is one, too."""
    ds.map(dict, num_proc=4)  # type: ignore[call-arg]
    ds.map()  # type: ignore[call-arg]
    ds.loader(4, shuffle=True)  # type: ignore[call-arg]
    ds.loader("4")  # type: ignore[arg-type]
    ds.set_format("torch")  # type: ignore[attr-defined]
    ds.colum_names  # type: ignore[attr-defined]  # noqa: B018
    ds.shuffle(buffer_size=3)  # type: ignore[call-arg]
    ds.pack(16, extra=["labels"])  # type: ignore[arg-type]
    ds.loader(4).sampler  # type: ignore[attr-defined]  # noqa: B018
    midepoch.load_dataset("parquet")  # type: ignore[call-arg]
    midepoch.mix([ds], probabilities=[1.0])  # type: ignore[call-arg]
    midepoch.Keep(latest=3)  # type: ignore[call-arg]
    midepoch.PipelineCheckpoint("x", keep_last=3)  # type: ignore[call-arg]
