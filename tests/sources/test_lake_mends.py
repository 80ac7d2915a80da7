"""What a review of structured reading found, so that it stays mended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import midepoch
from forks import forked
from midepoch.errors import CheckpointMismatchError, FormatError
from midepoch.sources import lake as lake_module
from midepoch.sources.addresses import resolve
from midepoch.sources.files import find_files
from midepoch.sources.filters import parse_filter
from midepoch.sources.formats import lines


def test_a_rewritten_file_is_not_served_from_the_cache(tmp_path: Path) -> None:
    """Same footer, same size, other values."""
    path, values = tmp_path / "a.parquet", list(range(100))

    def write() -> midepoch.Dataset:
        pq.write_table(pa.table({"x": values}), path, compression="none", use_dictionary=False, row_group_size=50)
        return midepoch.from_files(path, cache_dir=tmp_path / "c")

    ds = write()
    assert [row["x"] for row in ds] == values
    state = ds.state_dict()
    values[10:40] = values[10:40][::-1]
    ds = write()
    assert [row["x"] for row in ds] == values
    with pytest.raises(CheckpointMismatchError):
        ds.load_state_dict(state)


def test_filters_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10_000)}), tmp_path / "a.parquet", row_group_size=500)
    some = np.arange(2000)
    other = some.copy()
    other[1000] = 9999
    for make in (lambda values: [("x", "in", values)], lambda values: pc.field("x").isin(values.tolist())):
        for values in (some, other):
            ds = midepoch.from_files(tmp_path, filters=make(values), cache_dir=tmp_path / "c")
            assert sorted(row["x"] for row in ds) == sorted(values.tolist())
    texts = {parse_filter([("s", "in", {"s1", "s2", "s3"})]).text, parse_filter([["s", "in", ["s1", "s2", "s3"]]]).text}  # type: ignore[union-attr]
    assert len(texts) == 1


def test_nan_is_not_pruned_away(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, float("nan"), 1.0]})
    pq.write_table(table, tmp_path / "a.parquet")
    for expression in (pc.is_nan(pc.field("x")), pc.field("x") != 1.0, ~(pc.field("x") <= 1.0)):
        assert len(midepoch.from_files(tmp_path, filters=expression)) == table.filter(expression).num_rows == 1


CSV = {
    "stray quote": 'id,name,text\n0,5" pipe,plain\n'
    + "".join(f'{i},n,"one of {i}\ntwo, of {i}"\n' for i in range(1, 60)),
    "escaped": "id,name,text\n" + "".join(f'{i},"a ""quoted""\n\n"",b",x\n' for i in range(60)),
    "blank first": "\n\nid,name,text\n" + "".join(f"{i},a,b\n" for i in range(60)),
    "windows": "id,name,text\r\n" + "".join(f'{i},a,"b\r\nc"\r\n' for i in range(60)),
    "no last newline": "\ufeffid,name,text\n" + "\n".join(f"{i},a,b" for i in range(60)),
}


@pytest.mark.parametrize("kind", list(CSV))
def test_csv_rows_are_those_of_pyarrow(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.csv as csv

    monkeypatch.setattr(lines, "BLOCK_BYTES", 100)
    monkeypatch.setattr(lines, "_READ", 37)
    path = tmp_path / "a.csv"
    path.write_bytes(CSV[kind].encode())
    expected = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True)).to_pylist()
    ds = midepoch.from_files(path)
    assert list(ds) == expected
    assert len(expected) == 60
    assert len(ds.pipeline.source.layout.block_starts) > 3


def test_csv_names_and_delimiters(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    with pytest.raises(FormatError, match="several columns are named 'a'"):
        midepoch.from_files(tmp_path / "twice.csv")
    folder = tmp_path / "my.tsv.backup"
    folder.mkdir()
    (folder / "x.csv").write_text("a,b\n1,2\n")
    (folder / "y.tsv").write_text("a\tb\n1\t2\n")
    for name in ("x.csv", "y.tsv"):
        assert list(midepoch.from_files(folder / name)) == [{"a": 1, "b": 2}]
    (tmp_path / "mac.csv").write_bytes(b"a,b\r1,2\r3,4\r")
    with pytest.raises(FormatError, match="carriage return"):
        midepoch.from_files(tmp_path / "mac.csv")


def test_types_that_differ_late_or_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_listing_does_not_depend_on_the_order_of_a_folder(tmp_path: Path) -> None:
    found = []
    for order in (("m", "b", "a"), ("a", "b", "m")):
        root = tmp_path / "".join(order)
        root.mkdir()
        for name in order:
            if name == "a":
                (root / "a").symlink_to(root / "m", target_is_directory=True)
            else:
                (root / name).mkdir()
        for name in ("m", "b"):
            pq.write_table(pa.table({"x": [1]}), root / name / "x.parquet")
        found.append([entry.path.removeprefix(str(root)) for entry in find_files(root).entries])
    assert found[0] == found[1] == ["/b/x.parquet", "/m/x.parquet"]


@pytest.mark.parametrize(
    ("url", "inner"),
    [
        ("s3://b/data#v2.parquet", "b/data#v2.parquet"),
        ("s3://b/run#1/", "b/run#1"),
        ("s3://b/a?b=c.parquet", "b/a?b=c.parquet"),
        ("s3://b/me@home/x.parquet", "b/me@home/x.parquet"),
        ("s3://key:secret@b/x?endpoint_override=h:1&scheme=http", "b/x"),
    ],
)
def test_keys_may_hold_anything(url: str, inner: str) -> None:
    assert resolve(url)[1] == inner


def test_secrets_in_addresses(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    for paths in (
        [tmp_path / "a.parquet", "s3://AKIA1234:TOPSECRET77@b/x.parquet"],
        "s3://AKIA1234:TOP/SECRET77@b/x.parquet",
    ):
        with pytest.raises(ValueError) as raised:
            midepoch.from_files(paths)  # type: ignore[arg-type]
        assert "SECRET77" not in str(raised.value)


def test_a_query_that_is_no_signature_is_refused_and_not_shown() -> None:
    for url in ("https://h/x.parquet?id=TOPSECRET77", "zip://a::https://me:TOPSECRET77@h/x.zip?key=TOPSECRET77"):
        with pytest.raises(midepoch.MidepochError, match="has a query that is not a signature.*storage_options") as e:
            midepoch.from_files(url)
        assert "TOPSECRET77" not in str(e.value)


def test_lanes_that_were_given_stay_when_sharded(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(60)}), tmp_path / "a.parquet", row_group_size=10)
    ds = midepoch.from_files(tmp_path).shuffle(seed=1, window=2).with_lanes(6)
    whole = [row["x"] for row in ds]
    shards = [[row["x"] for row in ds.shard(3, index)] for index in range(3)]
    assert [shards[i % 3][i // 3] for i in range(60)] == whole


def test_one_huge_row_group_is_sought_by_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(100_000)}), tmp_path / "a.parquet", row_group_size=1 << 20)
    ds = midepoch.from_files(tmp_path, cache_bytes=1)
    assert ds[77_777]["x"] == 77_777
    loader = ds.loader(1000)
    batches = iter(loader)
    for _ in range(60):
        next(batches)
    again = ds.loader(1000)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again))["x"].tolist() == list(range(60_000, 61_000))


def test_errors_name_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "there.parquet").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("hello")
    for path, text in (
        ("gone.parquet", "does not exist.* The folder .* exists and contains notes.txt, there.parquet"),
        ("deep/er/gone.parquet", "The folder .* exists and contains"),
        ("*.orc", "no file matches.* contains notes.txt"),
    ):
        with pytest.raises(midepoch.DataNotFoundError, match=text):
            midepoch.from_files(tmp_path / path)
    with pytest.raises(FormatError, match="neither its name nor its first bytes.*format=…: 'arrow', 'parquet'"):
        midepoch.from_files(tmp_path / "notes.txt")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "there.parquet")
    with pytest.raises(midepoch.StateError, match="Pass the dict that state_dict"):
        midepoch.from_files(tmp_path / "there.parquet").loader(1).load_state_dict({"model": 1, "data": {}})
    with pytest.raises(midepoch.MidepochError, match="s3://, gs:// and az:// are read natively"):
        midepoch.from_files("blah://x/y")


def test_hive_values_and_roots(tmp_path: Path) -> None:
    root = tmp_path / "exp=7" / "lake"
    for value in ("²", "--1", "5"):
        (root / f"k={value}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [1]}), root / f"k={value}" / "a.parquet")
    ds = midepoch.from_files(root, partitioning="hive")
    assert ds.schema.names == ["x", "k"]
    assert sorted(row["k"] for row in ds) == ["--1", "5", "²"]


def test_two_that_index_again_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), path)
    first = midepoch.from_files(path, force_reindex=True)
    second = midepoch.from_files(path, force_reindex=True)
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "b.parquet")
    midepoch.from_files(tmp_path)
    assert list(second) == list(first) == [{"x": 1}, {"x": 2}]


KILLED = """
import os, signal, sys
import midepoch
from midepoch.sources import lake
lake.atomic_write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
midepoch.from_files(sys.argv[1], index_dir=sys.argv[2], force_reindex=True)
"""


def test_killed_while_indexing_again(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.parquet", tmp_path / "ix"
    pq.write_table(pa.table({"x": [1, 2]}), path)
    midepoch.from_files(path, index_dir=folder)
    pq.write_table(pa.table({"x": [5, 6, 7]}), path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(folder)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert [row["x"] for row in midepoch.from_files(path, index_dir=folder)] == [5, 6, 7]
    assert hasattr(lake_module, "atomic_write")


def test_a_fork_reads_on_its_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10_000)}), tmp_path / "a.parquet", row_group_size=100)
    ds = midepoch.from_files(tmp_path)
    assert ds[0]["x"] == 0
    rows = iter(ds)
    next(rows)
    for _ in range(3):
        read = lambda: ds[9_999]["x"] == 9_999 and [row["x"] for row in ds.take(500)] == list(range(500))  # noqa: E731
        assert forked(read) == 0
    assert next(rows)["x"] == 1


def test_skipping_with_a_filter(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"x": range(5000)}), path, row_group_size=500, write_page_checksum=True, use_dictionary=False
    )
    about = pq.read_metadata(path).row_group(3).column(0)
    data = bytearray(path.read_bytes())
    data[about.data_page_offset + about.total_compressed_size // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(midepoch.CorruptBlockError):
        midepoch.from_files(path, filters=[("x", ">", 5)])
    ds = midepoch.from_files(path, filters=[("x", ">", 5)], on_error="skip")
    assert [row["x"] for row in ds] == [i for i in range(6, 5000) if not 1500 <= i < 2000]
