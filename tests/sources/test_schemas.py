"""One type for all blocks and files of a column."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

import midepoch
from data import write_arrow
from midepoch.errors import FormatError
from midepoch.sources.formats import lines


def test_types_that_differ_late_or_deep_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 50)
    monkeypatch.setattr(lines, "_READ", 50)
    (tmp_path / "late.csv").write_text("x\n" + "".join(f"{i}\n" for i in range(100)) + "never\n")
    assert [row["x"] for row in midepoch.from_files(tmp_path / "late.csv")][-2:] == ["99", "never"]
    (tmp_path / "a.jsonl").write_text('{"s": {"t": "2020-01-01"}, "l": ["2020-01-01"]}\n')
    (tmp_path / "b.jsonl").write_text('{"s": {"t": "hello"}, "l": ["x"]}\n')
    found = list(midepoch.from_files(tmp_path, format="jsonl"))
    assert found[0] == {"s": {"t": "2020-01-01"}, "l": ["2020-01-01"]}
    inner = pa.field("element", pa.int64(), nullable=False)
    for name, kind in (("a", pa.list_(inner)), ("b", pa.list_(pa.int64()))):
        pq.write_table(pa.table({"x": pa.array([[1, 2]], kind)}), tmp_path / f"{name}.parquet")
    assert [row["x"] for row in midepoch.from_files(tmp_path, format="parquet")] == [[1, 2]] * 2


def test_a_field_that_a_block_lacks_is_null_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.sources.formats.lines.BLOCK_BYTES", 400)
    monkeypatch.setattr("midepoch.sources.formats.lines._READ", 100)
    rows = [{"id": i, **({"y": i, "s": {"a": i}} if i >= 60 else {})} for i in range(120)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ds = midepoch.from_files(tmp_path / "a.jsonl")
    batches = list(ds.with_format("numpy").loader(10))
    assert len({batch["y"].dtype for batch in batches}) == 1
    assert [row["s"] for row in ds][:60] == [None] * 60
    assert batches[0]["s"] is not None and np.isnan(batches[0]["y"]).all()


@pytest.mark.parametrize("suffix", [".parquet", ".orc", ".arrow"])
@pytest.mark.parametrize("inside", [False, True])
def test_two_columns_of_one_name_are_refused_in_any_file(tmp_path: Path, suffix: str, inside: bool) -> None:
    """One of them would be lost."""
    names = ["a", "a"]
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=names)
    tables = [pa.table({"x": [0]}), pa.table([struct], ["x"]) if inside else pa.table([[1], [2]], names)]
    for number, table in enumerate(tables):
        path = tmp_path / f"{number}{suffix}"
        if suffix == ".parquet":
            pq.write_table(table, path)
        elif suffix == ".orc":
            orc.write_table(table, path)
        else:
            write_arrow(path, table, 1)
    name = "x.a" if inside else "a"
    for paths in (tmp_path, tmp_path / f"1{suffix}"):
        with pytest.raises(FormatError, match=rf"1{suffix}: several columns are named '{name}'. Rename them"):
            midepoch.from_files(paths)
