"""Files that fsspec opens: in archives, in memory, in caches."""

from __future__ import annotations

import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import midepoch


@pytest.mark.parametrize("workers", [0, 2])
def test_files_of_an_archive_are_read_side_by_side(workers: int, tmp_path: Path) -> None:
    """They are parts of one file, with one position for all who read at the same time, in forks as well."""
    fsspec = pytest.importorskip("fsspec")
    rows, names = 20_000, [f"{number}.parquet" for number in range(3)]
    for number, name in enumerate(names):
        first = np.arange(number * rows, (number + 1) * rows)
        table = pa.table({"id": first, "seven": 7 * first})
        pq.write_table(table, tmp_path / name, row_group_size=1000, compression="none", use_dictionary=False)
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for name in names:
            archive.add(tmp_path / name, f"d/{name}")
    with pytest.raises(midepoch.DataNotFoundError, match="gone.tar.*does not exist"):
        midepoch.from_files(f"tar://d::{tmp_path / 'gone.tar'}")
    filesystem = fsspec.filesystem("tar", fo=str(tmp_path / "all.tar"))
    ds = midepoch.from_files("d", filesystem=filesystem, index_dir=tmp_path / "ix").with_format("numpy")
    seen: list[int] = []
    for batch in ds.shuffle(seed=1, window=3).map(dict, batched=True).loader(500, num_workers=workers):
        assert (batch["seven"] == 7 * batch["id"]).all()
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(3 * rows))


@pytest.mark.parametrize("chain", ["zip", "simplecache", "handler"])
def test_chains_of_file_systems(chain: str, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    rows, memory, name = 20_000, fsspec.filesystem("memory"), f"silent{os.getpid()}"
    table = pa.table({"id": np.arange(rows), "seven": 7 * np.arange(rows)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=500, compression="none", use_dictionary=False)
    memory.pipe(f"/{name}/a.parquet", sink.getvalue().to_pybytes())
    with memory.open(f"/{name}/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.parquet", sink.getvalue().to_pybytes())
    options: dict[str, Any] = {"index_dir": tmp_path / "ix"}
    where = f"/{name}/a.parquet"
    if chain == "handler":
        options["filesystem"] = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(memory))
    else:
        where = (
            f"zip://a.parquet::memory://{name}/all.zip" if chain == "zip" else f"simplecache::memory://{name}/a.parquet"
        )
    ds = midepoch.from_files(where, **options).with_format("numpy").shuffle(seed=1, window=3)
    for workers in (0, 0, 2) if chain == "zip" else (0, 0):
        seen: list[int] = []
        for batch in ds.map(dict, batched=True).loader(500, num_workers=workers):
            assert (batch["seven"] == 7 * batch["id"]).all()
            seen += batch["id"].tolist()
        assert sorted(seen) == list(range(rows))


def test_an_address_of_the_hub_without_datasets_is_explained() -> None:
    """``hf://org/name`` is a model. A file system in memory is in place of its files: there are none."""
    fsspec = pytest.importorskip("fsspec")
    for path in ("org/name", "org/name/data/*.parquet"):
        with pytest.raises(midepoch.DataNotFoundError, match="For a dataset, write hf://datasets/ORG/NAME/PATH"):
            midepoch.from_files(f"hf://{path}", filesystem=fsspec.filesystem("memory"))
    with pytest.raises(midepoch.DataNotFoundError, match="Buckets are read by huggingface_hub. Update that package"):
        midepoch.from_files("hf://buckets/org/name/*.parquet", filesystem=fsspec.filesystem("memory"))
