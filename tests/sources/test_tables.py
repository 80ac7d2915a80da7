"""Delta, Iceberg and Lance tables: one snapshot, without its deleted rows, resumed exactly."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import midepoch
from launch import Launch
from midepoch.errors import CheckpointMismatchError, DataError, DataNotFoundError, FormatError, MidepochError
from midepoch.sources.tables import delta, iceberg
from midepoch.testing import assert_resumes_exactly
from table_files import TABLES, Table, rows


@pytest.fixture(scope="session", params=list(TABLES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """A table that no test changes."""
    package, write = TABLES[request.param]
    pytest.importorskip(package)
    return write(tmp_path_factory.mktemp("tables") / request.param)


@pytest.fixture(params=list(TABLES))
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    package, write = TABLES[request.param]
    pytest.importorskip(package)
    return write(tmp_path / request.param)


def ids(ds: midepoch.Dataset) -> list[int]:
    return [row["id"] for row in ds]


def test_rows_are_those_of_the_snapshot_in_an_order_that_does_not_depend_on_the_machine(written: Table) -> None:
    ds = written.open()
    assert len(ds) == 27
    assert sorted(ids(ds)) == written.ids
    kept = rows(0, 30).filter(pc.field("id").isin(written.ids))
    assert sorted(ds, key=lambda row: row["id"]) == kept.to_pylist()
    assert ids(written.open(force_reindex=True)) == ids(ds)
    assert ds.schema.names == kept.schema.names
    numpy = ds.with_format("numpy")[:27]
    assert [numpy[name].dtype for name in ("id", "maybe")] == [np.dtype("int64"), np.dtype("float64")]
    assert numpy["vector"].shape == (27, 2)


@pytest.mark.parametrize("open_table", [midepoch.from_delta, midepoch.from_lance])
@pytest.mark.parametrize("given", [None, ["a", "b"]])
def test_one_table_is_opened_at_a_time(open_table: Callable[..., midepoch.Dataset], given: object) -> None:
    with pytest.raises(TypeError, match=r"of one table, got .* combine them with midepoch\.concat"):
        open_table(given)


def test_states_are_small_and_resume_exactly_with_workers(written: Table) -> None:
    def make(workers: int = 0) -> midepoch.Loader:
        return written.open().shuffle(seed=3, window=2).loader(4, num_workers=workers)

    assert_resumes_exactly(make, steps=[0, 4, 7, 12])
    assert_resumes_exactly(make, steps=[3], epochs=1, resume_with=[lambda: make(2)])
    assert len(json.dumps(make().state_dict())) < 1024


def test_ranks_partition_the_rows(written: Table) -> None:
    parts = [ids(written.open().shuffle(seed=1).shard(3, rank)) for rank in range(3)]
    assert sorted(sum(parts, [])) == written.ids


def test_a_newer_snapshot_is_not_seen_and_a_state_of_another_one_is_refused(table: Table) -> None:
    old, version = table.open().shuffle(seed=2), table.version()
    loader = old.loader(4, num_workers=2)
    first = next(iter(loader))["id"].tolist()
    state = loader.state_dict()
    table.append()
    assert sorted(ids(pickle.loads(pickle.dumps(old)))) == table.ids
    rest = [batch["id"].tolist() for batch in old.loader(4, num_workers=2)]
    assert rest[0] == first and sorted(sum(rest, [])) == table.ids
    new = table.open().shuffle(seed=2)
    assert len(new) == 37 and table.version() != version
    with pytest.raises(CheckpointMismatchError) as problem:
        new.loader(4).load_state_dict(state)
    assert f"from_{table.kind}(…, {table.argument}={version})" in str(problem.value)
    assert f"{table.version()} is open" in str(problem.value)
    resumed = table.open(**{table.argument: version}).shuffle(seed=2).loader(4)
    resumed.load_state_dict(state)
    assert sum([batch["id"].tolist() for batch in resumed], first) == sum(rest, [])


def test_an_index_is_reused_without_reading_the_log(written: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(written.open())
    monkeypatch.setattr(delta, "_open", None)
    monkeypatch.setattr(iceberg, "_read_manifest", None)
    monkeypatch.setattr("midepoch.sources.tables.lance.LanceTableAt.scan", None)
    assert ids(written.open()) == expected


def test_columns_and_filters(written: Table) -> None:
    ds = written.open(columns=["text"], filters=[("id", ">=", 25)])
    assert len(ds) == 5 and sorted(row["text"] or "" for row in ds) == ["", "row 26", "row 27", "row 28", "row 29"]
    assert ds.schema.names == ["text"]
    nothing = written.open(filters=pc.field("maybe") > 1000)
    assert len(nothing) == 0


def test_files_of_a_table_are_not_read_as_plain_files(written: Table) -> None:
    inner = next(Path(written.path).rglob("*.parquet"), Path(written.path) / "data" / "x.lance").parent
    given = [written.path, os.path.dirname(written.path), f"{written.path}/**/*.parquet"]
    given += [str(inner), f"{inner}/*.parquet"] if written.kind == "iceberg" else []
    for path in given:
        with pytest.raises(FormatError, match=rf"midepoch\.from_{written.kind}\('.*{written.kind}"):
            midepoch.from_files(path)
    files = sorted(inner.glob("*.parquet"))
    if files and written.kind == "delta":  # a list is what the user wants
        assert len(midepoch.from_files(files)) > 30


def test_an_unknown_version_is_refused_with_those_that_exist(written: Table) -> None:
    with pytest.raises(DataNotFoundError, match="has no (version|snapshot) 999: it"):
        written.open(**{written.argument: 999})
    with pytest.raises(ValueError, match=f"{written.argument} must be a number"):
        written.open(**{written.argument: True})
    with pytest.raises(ValueError, match="cache_bytes must be"):
        written.open(cache_bytes=0)


def test_files_that_a_cleanup_removed_are_reported(table: Table) -> None:
    ds = table.open()
    data = [path for path in Path(table.path).rglob("*") if path.suffix in (".parquet", ".lance") and path.is_file()]
    for path in data:
        path.unlink()
    with pytest.raises(DataNotFoundError, match=r"does not exist\. A snapshot of a table needs it"):
        list(ds)
    with pytest.raises(DataNotFoundError, match="a cleanup of the table"):
        table.open(force_reindex=True)


def test_damage_is_reported_with_the_file(table: Table) -> None:
    data = [path for path in Path(table.path).rglob("*") if path.suffix in (".parquet", ".lance") and path.is_file()]
    for path in data:
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"(parquet|lance)"):
        table.open()


@pytest.mark.parametrize("kind", ["delta", "lance"])
def test_a_moved_table_resumes(kind: str, tmp_path: Path) -> None:
    package, write = TABLES[kind]
    pytest.importorskip(package)
    table = write(tmp_path / "here")
    before = table.open().shuffle(seed=5)
    passed = iter(before)
    head = [next(passed)["id"] for _ in range(10)]
    shutil.move(table.path, tmp_path / "there")
    after = getattr(midepoch, f"from_{kind}")(tmp_path / "there").shuffle(seed=5)
    after.load_state_dict(before.state_dict())
    assert sorted(head + ids(after)) == table.ids


def test_a_mix_of_snapshots_names_the_source_that_differs(table: Table) -> None:
    version = table.version()
    state = midepoch.mix({"a": table.open(), "b": table.open()}).loader(4).state_dict()
    table.append()
    old = table.open(**{table.argument: version})
    with pytest.raises(
        CheckpointMismatchError, match=rf"source 'b': data differs.*\n.*\n.*\n.*{table.argument}={version}"
    ):
        midepoch.mix({"a": old, "b": table.open()}).loader(4).load_state_dict(state)


def test_a_folder_that_is_no_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(rows(0, 1), tmp_path / "a.parquet")
    (tmp_path / "p=1").mkdir()
    (tmp_path / "p=1" / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    (tmp_path / "_delta_log").mkdir()  # of a write that failed
    for folder in (tmp_path, tmp_path / "p=1"):
        assert len(midepoch.from_files(folder / "a.parquet")) == len(midepoch.from_files(f"{folder}/*.parquet")) == 1
    assert len(midepoch.from_files(tmp_path / "p=1")) == 1
    with pytest.raises(DataNotFoundError, match="is not a Delta table: there is no _delta_log"):
        midepoch.from_delta(tmp_path)
    with pytest.raises(DataNotFoundError, match="is not a Lance table"):
        midepoch.from_lance(tmp_path)
    with pytest.raises(TypeError, match="'table_uri'. Did you mean uri="):
        midepoch.from_delta(table_uri="x")  # type: ignore[call-arg]


TESTS = {"PYTHONPATH": os.pathsep.join(sys.path)}
RANKS = """
import os, sys
import torch.distributed as dist
import midepoch
from table_files import rows
from deltalake import write_deltalake

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
if rank == 0:
    ds = midepoch.from_delta(folder)
    write_deltalake(folder, rows(30, 40), mode="append")
dist.barrier()
if rank == 1:
    ds = midepoch.from_delta(folder)  # the table has changed since the first rank opened it
    assert len(midepoch.from_delta(folder)) == 37  # the second open is a new agreement
else:
    assert len(midepoch.from_delta(folder)) == 37
assert len(ds) == 27, len(ds)
found = [batch["id"].tolist() for batch in ds.shuffle(seed=1).loader(4, num_workers=0)]
gathered = [None, None]
dist.all_gather_object(gathered, sum(found, []))
assert sorted(sum(gathered, [])) == [i for i in range(30) if i not in (3, 10, 17)], gathered
dist.destroy_process_group()
"""


ICEBERG_RANKS = """
import sys
import torch.distributed as dist
import midepoch
from pyiceberg.catalog import load_catalog
from table_files import rows

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
catalog = load_catalog("tests", type="sql", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
table = catalog.load_table("space.table0")
dist.barrier()
if rank == 0:
    catalog.load_table("space.table0").append(rows(30, 40))  # since the second rank loaded the table
    ds = midepoch.from_iceberg(table.refresh())
dist.barrier()
ds = midepoch.from_iceberg(table) if rank == 1 else ds
assert len(ds) == 37, len(ds)
dist.destroy_process_group()
"""


def test_ranks_open_a_snapshot_that_is_newer_than_what_they_loaded(tmp_path: Path, launched: Launch) -> None:
    pytest.importorskip("pyiceberg")
    TABLES["iceberg"][1](tmp_path / "iceberg")
    (tmp_path / "ranks.py").write_text(ICEBERG_RANKS)
    launched(2, str(tmp_path / "ranks.py"), str(tmp_path / "iceberg"), env=TESTS)


def test_ranks_open_the_version_of_the_first(tmp_path: Path, launched: Launch) -> None:
    pytest.importorskip("deltalake")
    table = TABLES["delta"][1](tmp_path / "delta")
    (tmp_path / "ranks.py").write_text(RANKS)
    launched(2, str(tmp_path / "ranks.py"), table.path, env=TESTS)


def test_random_damage_is_an_error_or_changes_values(table: Table) -> None:
    """Damage of data files, without a crash. Without checksums, a changed value cannot be told from a written one."""
    found = sorted(path for path in Path(table.path).rglob("*") if path.suffix in (".parquet", ".lance", ".arrow"))
    files = [path for path in found if path.is_file() and not path.name.startswith("deletes")]
    draw, refused = np.random.default_rng(1), 0
    for _ in range(25):
        path = files[int(draw.integers(len(files)))]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        if draw.random() < 0.3:
            damaged = damaged[: int(draw.integers(len(whole)))]
        else:
            damaged[int(draw.integers(len(whole)))] ^= 1 << int(draw.integers(8))
        path.write_bytes(damaged)
        try:
            assert len(ids(table.open(force_reindex=True))) == 27 or table.kind == "lance"
        except MidepochError:
            refused += 1
        path.write_bytes(whole)
    assert refused
