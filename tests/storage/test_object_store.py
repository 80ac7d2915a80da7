"""An object store, for real: rclone's S3 server, a proxy in front of it that counts and breaks, and real workers."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch.errors import DataChangedError, DataNotFoundError, FetchError, MidepochError
from midepoch.storage.stores import Retry
from proxy import Fault, Proxy, reads
from s3 import KEY, SECRET, Server, rclone, storage_options

FILES, ROWS, GROUP = 4, 500, 50
QUICK = Retry(attempts=5, first_pause=0.01, longest_pause=0.05, budget=30)


@pytest.fixture
def bucket(s3_server: Server) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bucket-", dir=s3_server.folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def lake(bucket: Path) -> str:
    for i in range(FILES):
        ids = np.arange(i * ROWS, (i + 1) * ROWS)
        noise = np.random.default_rng(i).integers(0, 1 << 60, (2, ROWS))
        table = pa.table({"id": ids, "noise": noise[0], "unread": noise[1]})
        pq.write_table(table, bucket / f"part-{i}.parquet", row_group_size=GROUP)
    (bucket / "_SUCCESS").write_text("")
    return f"s3://{bucket.name}/"


@pytest.fixture
def make(lake: str, proxy: Proxy, tmp_path: Path) -> Callable[..., midepoch.Dataset]:
    def made(**arguments: Any) -> midepoch.Dataset:
        given = {
            "storage_options": storage_options(proxy.endpoint),
            "cache_dir": tmp_path / "cache",
            "retry": QUICK,
            **arguments,
        }
        return midepoch.from_files(lake, **given)

    return made


def ids(batches: Any) -> list[int]:
    return sum((batch["id"].tolist() for batch in batches), [])


def column_bytes(bucket: Path, *names: str) -> int:
    total = 0
    for path in bucket.glob("*.parquet"):
        metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            about = metadata.row_group(group)
            columns = (about.column(i) for i in range(about.num_columns))
            total += sum(c.total_compressed_size for c in columns if c.path_in_schema in names)
    return total


def test_reads_what_is_there(make: Callable[..., midepoch.Dataset]) -> None:
    assert [row["id"] for row in make(columns=["id"])] == list(range(FILES * ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_columns_wanted_are_fetched_once(
    make: Callable[..., midepoch.Dataset], bucket: Path, proxy: Proxy, workers: int
) -> None:
    loader = make(columns=["id", "noise"]).shuffle(seed=1, window=4).loader(64, num_workers=workers)
    proxy.reset()
    assert sorted(ids(loader)) == list(range(FILES * ROWS))
    requests = Counter((each.path, each.range, each.status) for each in proxy.requests if each.method == "GET")
    twice = [request for request, count in requests.items() if count > 1]
    assert proxy.bytes_sent("GET") <= 1.05 * column_bytes(bucket, "id", "noise"), twice


RANK = """
import json, sys
import midepoch
arguments = json.loads(sys.argv[1])
rank, world, workers = map(int, sys.argv[2:5])
ds = midepoch.from_files(**arguments).shuffle(seed=1, window=2).with_format("numpy")  # torch is imported in 3 s
if sys.argv[5] != "0":
    ds = ds.with_lanes(int(sys.argv[5]))
loader = ds.loader(16, num_workers=workers, rank=rank, world_size=world)
print(json.dumps(sum((batch["id"].tolist() for batch in loader), [])))
"""


def run_ranks(python: str, arguments: list[dict[str, Any]], workers: int, lanes: int) -> list[list[int]]:
    """Ranks as processes of their own, all at once."""
    commands = [
        [python, "-c", RANK, json.dumps(each), str(rank), str(len(arguments)), str(workers), str(lanes)]
        for rank, each in enumerate(arguments)
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        return [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    finally:
        for process in processes:
            with process:
                process.kill()


def test_ranks_and_workers_of_a_machine_share_what_was_fetched(
    make: Callable[..., midepoch.Dataset], lake: str, bucket: Path, proxy: Proxy, tmp_path: Path, python: str
) -> None:
    make(columns=["id", "noise"])  # the index
    proxy.reset()
    arguments = {
        "paths": lake,
        "columns": ["id", "noise"],
        "storage_options": storage_options(proxy.endpoint),
        "cache_dir": str(tmp_path / "cache"),
    }
    found = run_ranks(python, [arguments] * 2, workers=2, lanes=0)
    assert sorted(sum(found, [])) == list(range(FILES * ROWS))
    assert proxy.bytes_sent("GET") <= 1.05 * column_bytes(bucket, "id", "noise") + 8192  # and one listing for each rank


def test_machines_fetch_only_their_lanes(
    make: Callable[..., midepoch.Dataset], lake: str, bucket: Path, proxy: Proxy, tmp_path: Path, python: str
) -> None:
    make(columns=["id", "noise"])
    proxy.reset()
    arguments = [
        {
            "paths": lake,
            "columns": ["id", "noise"],
            "storage_options": storage_options(proxy.endpoint),
            "cache_dir": str(tmp_path / f"machine-{rank}"),
            "validate": False,
        }
        for rank in range(4)
    ]
    found = run_ranks(python, arguments, workers=0, lanes=4)
    assert sorted(sum(found, [])) == list(range(FILES * ROWS))
    assert proxy.bytes_sent("GET") <= 1.1 * column_bytes(bucket, "id", "noise")


def test_a_second_open_makes_one_listing_or_nothing(make: Callable[..., midepoch.Dataset], proxy: Proxy) -> None:
    make()
    proxy.reset()
    make()
    assert [request.method for request in proxy.requests] == ["GET"]
    assert "list-type" in proxy.requests[0].path
    proxy.reset()
    assert len(make(validate=False)) == FILES * ROWS
    assert not proxy.requests


def test_resume_fetches_one_row_group(
    bucket: Path, make: Callable[..., midepoch.Dataset], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is read ahead is not counted; nor may a fetch of the first loader's end while the second one's are counted.
    monkeypatch.setattr("midepoch.read.fetched._LEAST_AHEAD", 0)
    monkeypatch.setattr("midepoch.read.fetched._AHEAD_BYTES", 0)
    loader = make(columns=["id"]).loader(20)
    batches = iter(loader)
    for _ in range(90):
        next(batches)
    state = loader.state_dict()
    del batches
    loader.close()
    resumed = make(columns=["id"], cache_dir=None, validate=False).loader(20)
    resumed.load_state_dict(state)
    group = column_bytes(bucket, "id") / (FILES * ROWS / GROUP)
    proxy.reset()
    assert next(iter(resumed))["id"].tolist() == list(range(1800, 1820))
    assert proxy.bytes_sent("GET") <= 1.2 * group, proxy.requests


SURVIVED = ["delay", "reset", "reset_mid", "500", "503", "429", "cut", "short", "hang"]


@pytest.mark.parametrize("kind", SURVIVED)
def test_faults_that_pass_are_survived(make: Callable[..., midepoch.Dataset], proxy: Proxy, kind: str) -> None:
    expected = list(range(FILES * ROWS))
    # Only what hangs is given up after 2 s: anything else may take its time, and is not to be asked for twice.
    impatient = {"request_timeout": 2} if kind == "hang" else {}
    ds = make(columns=["id"], storage_options={**storage_options(proxy.endpoint), **impatient})
    proxy.add(Fault(kind, times=2, match=reads, after=3, seconds=0.2 if kind == "delay" else 0))
    assert ids(ds.loader(100)) == expected
    assert any(request.fault for request in proxy.requests)


@pytest.mark.parametrize("kind", ["reset", "500", "503", "cut"])
def test_faults_while_indexing_are_survived(make: Callable[..., midepoch.Dataset], proxy: Proxy, kind: str) -> None:
    proxy.add(Fault(kind, times=2, match=lambda method, path: True))
    assert len(make()) == FILES * ROWS


@pytest.mark.parametrize("kind", ["500", "503", "reset", "cut", "short"])
def test_faults_that_stay_are_reported(make: Callable[..., midepoch.Dataset], proxy: Proxy, kind: str) -> None:
    ds = make(columns=["id"])
    proxy.add(Fault(kind, times=None, match=lambda method, path: method == "GET" and "part-2" in path))
    delivered: list[int] = []
    loader = ds.loader(50)
    with pytest.raises(FetchError, match=r"part-2.parquet could not be read \(5 attempts in [0-9.]+ s\)"):
        for batch in loader:
            delivered += batch["id"].tolist()
    assert delivered == list(range(len(delivered)))
    assert len(delivered) <= 2 * ROWS
    proxy.clear()
    state = loader.state_dict()
    again = make(columns=["id"]).loader(50)
    again.load_state_dict(state)
    assert delivered + ids(again) == list(range(FILES * ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_garbage_is_never_a_row(
    make: Callable[..., midepoch.Dataset], bucket: Path, proxy: Proxy, workers: int
) -> None:
    """Bytes that come wrong from the wire, in a file with checksums: the fault passes, or is reported."""
    for path in bucket.glob("*.parquet"):
        pq.write_table(pq.read_table(path), path, row_group_size=GROUP, write_page_checksum=True)
    ds = make(columns=["id"])
    proxy.add(Fault("garbage", times=4, match=reads))
    assert ids(ds.loader(50, num_workers=workers)) == list(range(FILES * ROWS))


def test_denied_access_is_not_tried_again(
    make: Callable[..., midepoch.Dataset], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many blocks are asked for ahead before the reader has heard of the first is a matter of time: none here.
    monkeypatch.setattr("midepoch.read.fetched._LEAST_AHEAD", 0)
    monkeypatch.setattr("midepoch.read.fetched._AHEAD_BYTES", 0)
    monkeypatch.setattr("midepoch.read.fetched._THREADS_REMOTE", 1)
    ds = make(columns=["id"])
    proxy.add(Fault("403", times=None, match=lambda method, path: "part-0" in path))
    proxy.reset()
    with pytest.raises(FetchError, match="access is denied.*credentials"):
        ids(ds.loader(10))
    assert sum(bool(request.fault) for request in proxy.requests) <= 2  # by the reader, and by who reads ahead


def test_a_wrong_secret_is_not_tried_again(lake: str, proxy: Proxy, tmp_path: Path) -> None:
    options = {**storage_options(proxy.endpoint), "secret_key": "another secret"}
    proxy.reset()
    with pytest.raises(FetchError, match="access is denied.*credentials"):
        midepoch.from_files(lake, storage_options=options, retry=QUICK, index_dir=tmp_path / "ix")
    assert len(proxy.requests) == 1


def test_an_object_that_is_gone_or_changed_is_refused(
    make: Callable[..., midepoch.Dataset], bucket: Path, tmp_path: Path
) -> None:
    loader = make(columns=["id"], cache_bytes=1).loader(50)
    batches = iter(loader)
    next(batches)
    (bucket / "part-3.parquet").unlink()
    with pytest.raises(DataNotFoundError, match="part-3.parquet"):
        for _ in batches:
            pass
    table = pq.read_table(bucket / "part-2.parquet")
    noise = table.column("id").to_numpy()[::-1].copy()
    pq.write_table(table.set_column(0, "id", pa.array(noise)), bucket / "part-2.parquet", row_group_size=GROUP)
    again = make(columns=["id"], validate=False, cache_dir=tmp_path / "other").loader(50)
    with pytest.raises(DataChangedError, match="part-2.parquet has changed since it was indexed"):
        ids(again)


def test_secrets_are_written_nowhere(
    make: Callable[..., midepoch.Dataset],
    lake: str,
    proxy: Proxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    folder = tmp_path / "ix"
    ds = make(index_dir=folder)
    loader = ds.shuffle(seed=1).loader(50)
    next(iter(loader))
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    shown = [json.dumps(loader.state_dict()), repr(ds), repr(loader), repr(ds.pipeline), caplog.text]
    proxy.add(Fault("500", times=None))
    errors = []
    url = lake.replace("s3://", f"s3://{KEY}:{SECRET}@") + f"?endpoint_override={proxy.endpoint}&scheme=http"
    for attempt in (lambda: list(make(validate=False, cache_dir=tmp_path / "c2", index_dir=folder)),
                    lambda: midepoch.from_files(url, retry=QUICK, index_dir=tmp_path / "ix2")):  # fmt: skip
        with pytest.raises(MidepochError) as raised:
            attempt()
        errors.append(str(raised.value) + repr(raised.value.__cause__))
    for text in (*shown, *errors, *(data.decode("latin-1") for data in written)):
        assert SECRET not in text
        assert KEY not in text
    assert SECRET.encode() in pickle.dumps(ds)  # but workers need it


def test_options_of_other_libraries_are_understood(
    lake: str, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://{s3_server.endpoint}"
    for options in (
        {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": url}},
        {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "endpoint_url": url},
    ):
        assert len(midepoch.from_files(lake, storage_options=options)) == FILES * ROWS
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    assert len(midepoch.from_files(lake)) == FILES * ROWS
    import pyarrow.fs as fs

    filesystem = fs.S3FileSystem(**storage_options(s3_server.endpoint))
    assert len(midepoch.from_files(lake, filesystem=filesystem)) == FILES * ROWS
    with pytest.raises(ValueError, match="storage_options for s3:// cannot be used"):
        midepoch.from_files(lake, storage_options={"nonsense": "very secret"})


def test_globs_lists_and_missing(lake: str, make: Callable[..., midepoch.Dataset], proxy: Proxy) -> None:
    options = storage_options(proxy.endpoint)
    assert len(midepoch.from_files(lake + "part-[01].parquet", storage_options=options)) == 2 * ROWS
    two = [lake + "part-3.parquet", lake + "part-0.parquet"]
    assert midepoch.from_files(two, storage_options=options)[0]["id"] == 3 * ROWS
    for path, text in (
        (lake + "nope/", "does not exist"),
        (lake + "*.csv", "no file matches"),
        (lake + "x.parquet", "not exist"),
    ):
        with pytest.raises(DataNotFoundError, match=text):
            midepoch.from_files(path, storage_options=options, retry=QUICK)


def test_fsspec(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    name = f"lake{time.time_ns()}"
    for i in range(2):
        with memory.open(f"/{name}/{i}.parquet", "wb") as file:
            pq.write_table(pa.table({"id": range(10 * i, 10 * i + 10)}), file)
    ds = midepoch.from_files(f"memory://{name}")
    assert [row["id"] for row in ds] == list(range(20))
    assert sorted(ids(ds.shuffle(seed=1).loader(6))) == list(range(20))
    assert len(midepoch.from_files(f"/{name}", filesystem=memory)) == 20


@pytest.mark.parametrize("through", ["memory", "a folder of it"])
def test_memory_gives_everybody_their_own_bytes(through: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """fsspec's has one position in a file for all who read it, and here several threads do."""
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem

    memory, name, rows = fsspec.filesystem("memory"), f"lake{time.time_ns()}", 20_000
    table = pa.table({"id": range(rows), "same": range(rows), "wide": np.random.default_rng(0).random(rows)})
    with memory.open(
        f"/{name}/a.parquet", "wb"
    ) as file:  # no sums and no compression: nothing but the values would tell
        pq.write_table(table, file, row_group_size=250, compression="none", use_dictionary=False)
    filesystem = memory if through == "memory" else DirFileSystem(f"/{name}", memory)
    where = f"/{name}" if through == "memory" else "a.parquet"
    for seed in range(3):
        ds = midepoch.from_files(where, filesystem=filesystem, index_dir=tmp_path).shuffle(seed=seed, window=3)
        seen: list[int] = []
        for batch in ds.with_format("numpy").loader(100):
            assert (batch["id"] == batch["same"]).all()
            seen += batch["id"].tolist()
        assert sorted(seen) == list(range(rows))
    assert "trying again" not in caplog.text


def test_a_file_of_the_same_size_that_fsspec_says_is_newer_is_indexed_again(tmp_path: Path) -> None:
    import fsspec

    memory, path = fsspec.filesystem("memory"), f"/lake{time.time_ns()}/a.parquet"
    for first in (0, 100):
        with memory.open(path, "wb") as file:
            pq.write_table(pa.table({"id": pa.array(range(first, first + 10), pa.int64())}), file, compression="none")
        assert midepoch.from_files(path, filesystem=memory, index_dir=tmp_path)[3]["id"] == first + 3


@pytest.mark.parametrize("kind", ["arrow", "csv", "jsonl", "orc"])
def test_other_formats_in_a_store(bucket: Path, proxy: Proxy, kind: str) -> None:
    from data import write_arrow

    table = pa.table({"id": range(200), "text": [f"row {i}" for i in range(200)]})
    path = bucket / f"a.{kind}"
    if kind == "arrow":
        write_arrow(path, table, 30)
    elif kind == "csv":
        path.write_text("id,text\n" + "".join(f"{i},row {i}\n" for i in range(200)))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        import pyarrow.orc as po

        po.write_table(table, path)
    ds = midepoch.from_files(f"s3://{bucket.name}", storage_options=storage_options(proxy.endpoint), retry=QUICK)
    proxy.add(Fault("cut", times=1, match=reads))
    assert list(ds) == table.to_pylist()


def test_a_web_server_is_read_by_listing_too(tmp_path: Path) -> None:
    """Its listings tell no sizes: they are asked for one by one, not taken for 0."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "served"
    folder.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"id": range(number * 100, number * 100 + 100)}), folder / f"{number}.parquet")
    server = subprocess.Popen(
        [rclone(), "serve", "http", "--config=", "--addr=127.0.0.1:0", str(folder)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        address = next(found.group(0) for line in server.stderr if (found := re.search(r"http://127[^\s\]\"]+", line)))
        for what in (
            address,
            f"{address.rstrip('/')}/*.parquet",
            [f"{address.rstrip('/')}/{n}.parquet" for n in (0, 1)],
        ):
            assert [row["id"] for row in midepoch.from_files(what)] == list(range(200))
    finally:
        with server:
            server.kill()
