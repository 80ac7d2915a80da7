"""Datasets of the Hub, read in place from a server that speaks its protocol, in real processes, with real faults."""

from __future__ import annotations

import io
import json
import logging
import pickle
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import midepoch
from forks import Forks
from hub import Files, HubServer, _CdnHandler, use_settings
from midepoch.errors import CheckpointMismatchError, DataChangedError, DataNotFoundError, FetchError, FormatError
from midepoch.sources.listing import nearest
from midepoch.storage.addresses import resolve
from midepoch.storage.hub_paths import parse_hub_path
from midepoch.storage.stores import Retry
from midepoch.testing import assert_resumes_exactly
from tar_files import samples, write_tar
from token_files import write_megatron

SHARDS, ROWS = 4, 30
TOKEN = "hf_" + "PLANTED" * 6
QUICK = Retry(attempts=4, first_pause=0.01, longest_pause=0.05, budget=30)
GLOB = "hf://datasets/org/name/data/train-*.parquet"


def parquet(first: int, rows: int = ROWS, step: int = 1) -> bytes:
    file = io.BytesIO()
    ids = range(first, first + rows * step, step)
    table = pa.table({"id": ids, "text": [f"row {i} " * 20 for i in ids]})
    pq.write_table(table, file, row_group_size=10, compression="none")
    return file.getvalue()


def shards(step: int = 1) -> Files:
    files = {f"data/train-{i:05}-of-{SHARDS:05}.parquet": parquet(i * ROWS, step=step) for i in range(SHARDS)}
    return {**files, "README.md": b"# A dataset", ".gitattributes": b"*.parquet filter=lfs"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub, with one dataset of four shards, and a cache of its own."""
    pytest.importorskip("huggingface_hub")
    use_settings(monkeypatch, tmp_path / "hf")
    monkeypatch.setenv("MIDEPOCH_CACHE", str(tmp_path / "cache"))
    with HubServer(page=3) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        server.add("org/name", shards())
        yield server


@pytest.fixture
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.storage.stores.random.uniform", lambda low, high: low)


def ids(ds: midepoch.Dataset) -> list[int]:
    return [row["id"] for row in ds]


def as_table(ds: midepoch.Dataset) -> pa.Table:
    return pa.concat_tables(ds.with_format("arrow").loader(batch_size=5))


def reopened(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, address: str = GLOB, **arguments: Any
) -> midepoch.Dataset:
    """Open the dataset as a process does that starts later."""
    monkeypatch.setattr("midepoch.storage.hub.FRESH_SECONDS", 0.0)
    return midepoch.from_files(address, **arguments)


def test_rows_equal_the_files_and_requests_are_few(hub: HubServer) -> None:
    ds = midepoch.from_files(GLOB)
    assert ids(ds) == list(range(SHARDS * ROWS))
    assert ds[37]["text"] == "row 37 " * 20
    assert hub.requests["revision"] == 1
    assert hub.requests["tree"] == 2  # pages of 3
    assert hub.requests["resolve"] == SHARDS  # each file is resolved once, then read where it is
    before = hub.requests.copy()
    assert ids(midepoch.from_files(GLOB).select(range(1))) == [0]
    assert ids(midepoch.from_files(GLOB, validate=False)) == list(range(SHARDS * ROWS))
    assert hub.requests["revision"] + hub.requests["tree"] == before["revision"] + before["tree"]
    assert hub.unknown == []


@pytest.mark.parametrize(
    ("address", "rows"),
    [
        ("hf://datasets/org/name", 120),
        ("hf://datasets/org/name@main/data/", 120),
        ("hf://datasets/org/name@v1/data/*.parquet", 30),
        ("hf://datasets/org/name@refs/convert/parquet/default/train/0000.parquet", 30),
        ("hf://datasets/org/name@refs%2Fconvert%2Fparquet/**/*.parquet", 30),
        ("hf://datasets/org/name@~parquet", 30),
        (["hf://datasets/org/name/data/train-00003-of-00004.parquet", "hf://datasets/plain/*.parquet"], 60),
        ("hf://datasets/plain", 30),
        ("hf://datasets/squad", 60),
        (["hf://datasets/squad/b.parquet", "hf://datasets/squad/**/*.parquet"], 90),
        ("hf://datasets/plain@main", 30),
        ("hf://datasets/old/name/data/*1-of-*.parquet", 30),
    ],
)
def test_addresses(hub: HubServer, address: str | list[str], rows: int) -> None:
    repo = hub.repos["org/name"]
    repo.push({"data/a.parquet": parquet(0)}, "v1")
    repo.push({"default/train/0000.parquet": parquet(0)}, "refs/convert/parquet")
    hub.add("plain", {"a.parquet": parquet(0), "dataset_infos.json": b"{}"})
    hub.add("squad", {"plain_text/a.parquet": parquet(0), "b.parquet": parquet(0)})
    hub.moved["old/name"] = "org/name"
    assert len(midepoch.from_files(address)) == rows


def test_a_commit_needs_no_lookup(hub: HubServer) -> None:
    commit = hub.repos["org/name"].refs["main"]
    assert len(midepoch.from_files(f"hf://datasets/org/name@{commit}/data")) == SHARDS * ROWS
    assert hub.requests["revision"] == 0


@pytest.mark.parametrize("size", [10, 3000])  # served by the Hub, and by the other server
def test_text_formats(hub: HubServer, size: int) -> None:
    lines = b"".join(b'{"id": %d, "name": "n%d"}\n' % (i, i) for i in range(size))
    table = b"id,name\n" + b"".join(b"%d,n%d\n" % (i, i) for i in range(size))
    hub.add("org/text", {"a b/\xfc.jsonl": lines, "t.csv": table, "dataset_infos.json": b"{}"})
    assert ids(midepoch.from_files("hf://datasets/org/text/a b/*.jsonl")) == list(range(size))
    assert ids(midepoch.from_files("hf://datasets/org/text/t.csv")) == list(range(size))
    with pytest.raises(FormatError, match="different formats"):
        midepoch.from_files("hf://datasets/org/text")


def test_other_formats(hub: HubServer, tmp_path: Path) -> None:
    """Every format that reads ranges of bytes from a store reads them from the Hub."""
    fixtures = Path(__file__).parents[1] / "fixtures"
    (tmp_path / "tar").mkdir()
    for i in range(2):
        write_tar(tmp_path / "tar" / f"train-{i}.tar", samples(5, 5 * i))
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "a.png").write_bytes(b"PNG" * 500)
    np.save(tmp_path / "tokens.npy", np.arange(1000, dtype=np.uint16))
    folders = [tmp_path / "tar", tmp_path / "images", fixtures / "mds" / "zstd", fixtures / "litdata" / "rows"]
    for number, folder in enumerate(folders):
        local = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        data = {name: path.read_bytes() for name, path in local.items() if not name.startswith("expected")}
        hub.add(f"org/f{number}", {**data, "README.md": b"# A dataset"})
        shutil.copytree(folder, tmp_path / "copies" / str(number), ignore=shutil.ignore_patterns("expected*"))
        expected = midepoch.from_files(tmp_path / "copies" / str(number))
        found = midepoch.from_files(f"hf://datasets/org/f{number}")
        assert as_table(found).equals(as_table(expected)), folder
    hub.add("org/tokens", {"a.npy": (tmp_path / "tokens.npy").read_bytes()})
    rows = midepoch.from_tokens("hf://datasets/org/tokens/a.npy", 10)
    assert [row["input_ids"][0] for row in rows] == list(range(0, 1000, 10))


def test_splits_in_one_folder_are_pointed_out(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    hub.repos["org/name"].push({**shards(), "data/test-00000.parquet": parquet(0), "data/x.json": b"{}"})
    assert len(midepoch.from_files("hf://datasets/org/name")) == 150
    assert (
        "splits test, train" in caplog.text
        and "pass its files: hf://datasets/org/name/data/test*.parquet" in caplog.text
    )
    caplog.clear()
    midepoch.from_files(GLOB)
    assert not caplog.records


OPENER = """
import sys, time
import midepoch
print("ready", flush=True)
sys.stdin.readline()
print(len(midepoch.from_files(sys.argv[1])))
"""


def test_processes_of_a_machine_ask_once(hub: HubServer, torch_forks: Forks, tmp_path: Path) -> None:
    torch_forks.executable(tmp_path / "python")
    command = [str(tmp_path / "python"), "-c", OPENER, GLOB]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    assert [process.communicate("go\n", timeout=120)[0] for process in processes] == [f"{SHARDS * ROWS}\n"] * 4
    assert (hub.requests["revision"], hub.requests["tree"], hub.requests["resolve"]) == (1, 2, SHARDS)


def test_resume_is_exact_with_and_without_workers(hub: HubServer) -> None:
    def make(workers: int) -> Callable[[], Any]:
        return lambda: (
            midepoch.from_files(GLOB).with_format("numpy").shuffle(seed=3).loader(batch_size=16, num_workers=workers)
        )

    assert assert_resumes_exactly(make(0), epochs=1, steps=[3], resume_with=[make(2)])


TRAINER = """
import json, os, pathlib, signal, sys
import midepoch
if __name__ == "__main__":
    loader = midepoch.from_files(sys.argv[1]).with_format("numpy").shuffle(seed=1).loader(batch_size=8, num_workers=int(sys.argv[3]))
    saved = pathlib.Path(sys.argv[2])
    if saved.exists():
        loader.load_state_dict(json.loads(saved.read_text()))
    for step, batch in enumerate(loader):
        print(*batch["id"].tolist(), flush=True)
        saved.write_text(json.dumps(loader.state_dict()))
        if step == 4 and len(sys.argv) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_resume_after_a_kill_while_others_push(hub: HubServer, tmp_path: Path, torch_forks: Forks) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    commit = hub.repos["org/name"].refs["main"]
    address = f"hf://datasets/org/name@{commit}/data"

    def run(*arguments: str) -> list[int]:
        [done] = torch_forks.run([str(script), address, *arguments])
        assert done.returncode in (0, -9), done.stderr
        return [int(word) for word in done.stdout.split()]

    whole = run(str(tmp_path / "whole.json"), "0")
    first = run(str(tmp_path / "state.json"), "2", "kill")
    hub.repos["org/name"].push(shards(step=2))
    assert len(first) == 40
    assert first + run(str(tmp_path / "state.json"), "2") == whole


def test_a_push_never_mixes_versions(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    repo = hub.repos["org/name"]
    ds = midepoch.from_files(GLOB, cache_dir=tmp_path / "a")
    loader = ds.loader(batch_size=8, num_workers=2)
    batches = iter(loader)
    seen = next(batches)["id"].tolist()
    state, old = loader.state_dict(), repo.refs["main"]

    repo.push(shards(step=2))
    hub.expire()
    for batch in batches:
        seen += batch["id"].tolist()
    assert seen == list(range(SHARDS * ROWS))

    changed = reopened(hub, monkeypatch)
    assert ids(changed)[:3] == [0, 2, 4]
    assert "has changed since it was indexed. A state saved before will be refused" in caplog.text
    assert f"opened last is at hf://datasets/org/name@{old}" in caplog.text
    with pytest.raises(CheckpointMismatchError):
        changed.loader(batch_size=8).load_state_dict(state)
    pinned = midepoch.from_files(GLOB.replace("name/", f"name@{old}/")).loader(batch_size=8)
    pinned.load_state_dict(state)
    assert [i for batch in pinned for i in batch["id"].tolist()] == list(range(8, SHARDS * ROWS))


def test_a_push_of_other_files_keeps_the_index(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = midepoch.from_files(GLOB).loader(batch_size=8).state_dict()
    asked = hub.requests["resolve"]
    commit = hub.repos["org/name"].push({**shards(), "README.md": b"# Another text"})
    caplog.set_level(logging.INFO, "midepoch")
    loader = reopened(hub, monkeypatch).loader(batch_size=8)
    assert f"is read at commit {commit}" in caplog.text and "has changed" not in caplog.text
    assert hub.requests["revision"] == 2 and hub.requests["resolve"] == asked
    loader.load_state_dict(state)
    assert len(list(loader)) == 15


def test_offline_uses_what_was_read_before(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids(midepoch.from_files(GLOB, cache_dir=tmp_path / "blocks"))
    asked = hub.requests.total()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("midepoch.storage.hub.time.time", lambda: 1e10)
    assert ids(midepoch.from_files(GLOB, cache_dir=tmp_path / "blocks")) == list(range(SHARDS * ROWS))
    assert hub.requests.total() == asked
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        midepoch.from_files(GLOB, force_reindex=True)
    ds = pickle.dumps(midepoch.from_files(GLOB, cache_dir=tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # as in a worker of a server that was started before
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        ids(pickle.loads(ds))
    assert hub.requests.total() == asked


def test_force_reindex_looks_at_the_revision_again(hub: HubServer) -> None:
    midepoch.from_files(GLOB)
    hub.repos["org/name"].push(shards(step=2))
    assert ids(midepoch.from_files(GLOB))[:3] == [0, 1, 2]  # within the seconds in which processes share a lookup
    assert ids(midepoch.from_files(GLOB, force_reindex=True))[:3] == [0, 2, 4]


def test_force_reindex_looks_at_the_revision_of_tokens_again(hub: HubServer, tmp_path: Path) -> None:
    def tokens(first: int) -> Files:
        prefix = Path(write_megatron(tmp_path / "t", [[[first, first + 1]]]))
        file = io.BytesIO()
        np.save(file, np.array([first, first + 1], np.uint16))
        written = {f"m/t{suffix}": prefix.with_suffix(suffix).read_bytes() for suffix in (".idx", ".bin")}
        return {**written, "flat/t.npy": file.getvalue()}

    hub.add("org/tokens", tokens(0))
    root = "hf://datasets/org/tokens"
    for first in range(0, 8, 2):
        hub.repos["org/tokens"].push(tokens(first))
        if first % 4:
            ds = midepoch.from_tokens(f"{root}/flat", 2, force_reindex=True)
        else:
            ds = midepoch.from_megatron(["1", f"{root}/m/t"], force_reindex=True)
        assert next(iter(ds))["input_ids"] == [first, first + 1]


def test_a_trusted_index_of_changed_files_is_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    midepoch.from_files("hf://datasets/org/name/data")
    hub.repos["org/name"].push(shards(step=2))
    reopened(hub, monkeypatch)
    with pytest.raises(DataChangedError, match="has changed since it was indexed"):
        ids(midepoch.from_files("hf://datasets/org/name/data", validate=False))


@pytest.mark.usefixtures("no_jitter")
def test_waits_that_the_server_asks_for(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    hub.fail("revision", 429, retry_after="0.3")
    hub.fail("tree", 503, after=1, retry_after=formatdate(time.time() + 2, usegmt=True))
    hub.fail("resolve", 429, RateLimit='"resolvers";r=0;t=1', times=2)
    hub.fail("cdn", 503, times=2)
    started = time.monotonic()
    ds = midepoch.from_files(GLOB)
    assert time.monotonic() - started >= 0.3 + 1.0
    assert ids(ds) == list(range(SHARDS * ROWS))
    assert hub.requests["revision"] == 2
    assert hub.requests["tree"] == 3  # one page was asked for twice, not the listing
    assert SHARDS + 1 <= hub.requests["resolve"] <= SHARDS + 4  # the threads were told by one of them
    assert "trying again in 0.3 s" in caplog.text


@pytest.mark.usefixtures("no_jitter")
def test_waits_while_blocks_are_read(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    ds = midepoch.from_files(GLOB)
    hub.fail("cdn", 503, retry_after="0.4", after=2)
    hub.fail("cdn", 429, retry_after="0.3", after=3)
    assert ids(ds) == list(range(SHARDS * ROWS))
    assert "trying again in 0.4 s" in caplog.text and "trying again in 0.3 s" in caplog.text


def test_a_limit_that_counts_over_time_is_kept(hub: HubServer) -> None:
    """Far more files than a window allows: every thread waits for the end of the window, none gives up."""
    hub.add("org/many", {f"{i:02}.parquet": parquet(i) for i in range(40)})
    hub.limit("resolve", 15, seconds=0.4)
    assert len(midepoch.from_files("hf://datasets/org/many")) == 40 * ROWS
    assert hub.requests["resolve"] < 40 + 3 * 20


def test_a_wait_beyond_the_budget_is_an_error(hub: HubServer) -> None:
    hub.fail("tree", 429, retry_after="300")
    with pytest.raises(FetchError, match="asks to wait 300 s, but retries may take 30 s"):
        midepoch.from_files(GLOB, retry=QUICK)
    assert hub.requests["tree"] == 1


def test_a_server_that_stays_down_is_an_error(hub: HubServer) -> None:
    hub.fail("resolve", 503, times=100)
    with pytest.raises(FetchError, match=r"\(4 attempts in .*HTTP status 503"):
        midepoch.from_files("hf://datasets/org/name@main/data/train-00000-of-00004.parquet", retry=QUICK)


@pytest.mark.parametrize("location", ["http://cdn.invalid:PLANTED/a", "http://[PLANTED/a"])
def test_a_redirect_to_an_invalid_address_is_an_error(hub: HubServer, location: str) -> None:
    for kind in ("tree", "resolve"):
        hub.faults.clear()
        hub.fail(kind, 302, times=100, Location=location)
        with pytest.raises(FetchError, match="names an address without a valid host or port") as refused:
            midepoch.from_files(GLOB, retry=QUICK)
        assert "PLANTED" not in str(refused.value)


def test_a_web_page_in_place_of_a_file_is_a_failure_of_the_network(hub: HubServer) -> None:
    for kind in ("cdn", "resolve"):
        hub.fail(kind, 200, Content_Type="text/html; charset=utf-8")
    assert ids(midepoch.from_files(GLOB, retry=QUICK)) == list(range(SHARDS * ROWS))  # it was tried again
    hub.fail("cdn", 200, times=1000, Content_Type="text/html")
    with pytest.raises(FetchError, match="4 attempts .* a web page was received in place of the file"):
        midepoch.from_files(GLOB, retry=QUICK, force_reindex=True)


def test_signed_addresses_expire(hub: HubServer) -> None:
    ds = midepoch.from_files(GLOB, cache_bytes=1)
    resolved = hub.requests["resolve"]
    assert ds[0]["id"] == 0
    hub.expire()
    assert ids(ds) == list(range(SHARDS * ROWS))
    assert hub.requests["resolve"] == resolved + SHARDS


def test_a_token_is_sent_to_the_hub_alone_and_saved_nowhere(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.add("org/private", shards(), token=TOKEN)
    address = "hf://datasets/org/private/data/*.parquet"
    with pytest.raises(DataNotFoundError, match="does not exist, or it is private. No token was found"):
        midepoch.from_files(address)
    with pytest.raises(FetchError, match="does not accept the token") as wrong:
        midepoch.from_files(address, storage_options={"token": TOKEN + "x"})
    hub.fail("resolve", 503, times=1)
    ds = midepoch.from_files(address, storage_options={"token": TOKEN})
    loader = ds.loader(batch_size=8, num_workers=2)
    assert sum((batch["id"].tolist() for batch in loader), []) == list(range(SHARDS * ROWS))
    with pytest.raises(FetchError, match="contains spaces, line breaks") as broken:
        midepoch.from_files(address, storage_options={"token": TOKEN.replace("D", "D\n")}, force_reindex=True)
    assert broken.value.__context__ is None
    assert len(midepoch.from_files(address, storage_options={"token": f" {TOKEN}\n"}, force_reindex=True)) == len(ds)
    errors = [str(wrong.value), str(broken.value)]
    shown = [repr(ds), repr(loader), json.dumps(loader.state_dict()), caplog.text, *errors]
    saved = [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert saved and not any("PLANTED" in text or "SIGNED" in text for text in (*shown, *saved))
    assert set(hub.seen_by_cdn) == {""}

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert ids(midepoch.from_files(address))[0] == 0
    with pytest.raises(DataNotFoundError, match="No token"):
        midepoch.from_files("hf://datasets/org/private@main", storage_options={"token": False}, force_reindex=True)
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(f"{TOKEN}\n")
    assert ids(midepoch.from_files(address, force_reindex=True))[0] == 0


def test_a_mirror_gets_all_requests(hub: HubServer) -> None:
    hub.public_name = "http://hub.invalid"
    assert len(midepoch.from_files(GLOB)) == SHARDS * ROWS
    assert hub.requests["tree"] == 2


def test_a_listing_without_end_is_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_cursor(self: Any, files: Files, *_: Any) -> None:
        self.send_json([self.file(path, files[path]) for path in files], Link=f'<{self.path}>; rel="next"')

    monkeypatch.setattr("hub._HubHandler.tree", without_cursor)
    with pytest.raises(FetchError, match="lists hf://datasets/org/name without end"):
        midepoch.from_files(GLOB)
    assert hub.requests["tree"] == 1


def test_a_truncated_answer_without_its_length_is_requested_again(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True] * 2)
    complete = _CdnHandler.send_file

    def truncated(self: Any, data: bytes, **headers: str) -> None:
        if next(answers, False):
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data[:100])
        else:
            complete(self, data, **headers)

    monkeypatch.setattr(_CdnHandler, "send_file", truncated)
    assert ids(midepoch.from_files(GLOB, retry=QUICK)) == list(range(SHARDS * ROWS))
    assert next(answers, None) is None


def test_the_hash_of_a_pointer_is_not_that_of_the_contents(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def mirrored(self: Any, files: Files, path: str, commit: str) -> None:
        self.send_file(files[path], ETag=f'"{"a" * 40}"', X_Repo_Commit=commit)

    monkeypatch.setattr("hub._HubHandler.resolve", mirrored)
    assert ids(midepoch.from_files(GLOB)) == list(range(SHARDS * ROWS))


def test_a_dataset_can_be_sent_to_another_process(hub: HubServer) -> None:
    ds = midepoch.from_files(GLOB)
    hub.repos["org/name"].push(shards(step=2))
    assert ids(pickle.loads(pickle.dumps(ds))) == list(range(SHARDS * ROWS))


def test_problems_are_explained(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/gated", shards(), token=TOKEN, gated=True)
    cases = {
        "hf://datasets/org/none/*.parquet": (DataNotFoundError, "org/none of http.* does not exist, or it is private"),
        "hf://datasets/org/gated/*.parquet": (
            FetchError,
            "is gated. No token was found. Accept its conditions at http",
        ),
        "hf://datasets/org/name@v9/*.parquet": (DataNotFoundError, "has no revision 'v9'"),
        "hf://datasets/org/name/none/*.parquet": (DataNotFoundError, "no file matches 'hf://datasets/org/name/none"),
        "hf://datasets/org/name/none": (DataNotFoundError, "does not exist. Check the address"),
        "hf://datasets/org/name/data/none.parquet": (DataNotFoundError, "does not exist. Check the address"),
        "hf://datasets/": (DataNotFoundError, "names no dataset repository"),
        "hf://datasets": (DataNotFoundError, "names no dataset repository"),
        "hf://datasets/a b/c": (DataNotFoundError, "names no dataset repository"),
    }
    for address, (kind, text) in cases.items():
        with pytest.raises(kind, match=text):
            midepoch.from_files(address, retry=QUICK)
    with pytest.raises(ValueError, match="options of hf://datasets are token and endpoint, got block_size"):
        midepoch.from_files(GLOB, storage_options={"block_size": 1})
    for endpoint in ("hf-mirror.com", "https://", "https://hub:x", "https://[hub", "https://me:PLANTED@hub.example"):
        with pytest.raises(ValueError, match="the endpoint must be like https://huggingface.co") as refused:
            midepoch.from_files(GLOB, storage_options={"endpoint": endpoint})
        assert "PLANTED" not in str(refused.value)
    with pytest.raises(FetchError, match="could not be listed .*the connection to 127.0.0.1 failed"):
        midepoch.from_files(GLOB, storage_options={"endpoint": "http://127.0.0.1:9"}, retry=QUICK)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        midepoch.from_files("hf://datasets/org/name@other")


def test_a_bucket_is_read_and_a_change_of_it_is_refused(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(pytest.importorskip("huggingface_hub").HfApi, "get_bucket_paths_info"):
        pytest.skip("needs a version of huggingface_hub with buckets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # it asks for more
    address, options = "hf://buckets/org/data/*.parquet", {"endpoint": hub.endpoint}
    hub.buckets["org/data"] = {"a.parquet": parquet(0), "b.parquet": parquet(ROWS)}
    ds = midepoch.from_files(address, storage_options=options, retry=QUICK, cache_bytes=1)
    assert ids(ds) == list(range(2 * ROWS))
    hub.buckets["org/data"]["b.parquet"] = parquet(2 * ROWS)  # as long as before
    assert len(parquet(ROWS)) == len(parquet(2 * ROWS))
    with pytest.raises(DataChangedError, match="b.parquet has changed since it was indexed .its ETag differs"):
        ids(midepoch.from_files(address, storage_options=options, retry=QUICK))
    again = midepoch.from_files(address, storage_options=options, retry=QUICK, force_reindex=True)
    assert ids(again) == [*range(ROWS), *range(2 * ROWS, 3 * ROWS)]
    assert hub.unknown == []


def test_the_address_of_a_model_is_explained() -> None:
    pytest.importorskip("huggingface_hub")
    store, path = resolve("hf://org/name")
    assert "For a dataset, write hf://datasets/ORG/NAME" in nearest(store, path)
    assert "hf://datasets" not in nearest(*resolve("hf://datasets/org/name"))


@pytest.mark.parametrize(
    ("page", "address"),
    [
        ("https://huggingface.co/datasets/org/name", "hf://datasets/org/name to"),
        ("https://huggingface.co/datasets/squad/", "hf://datasets/squad to"),
        ("https://huggingface.co/datasets/org/name/tree/main/data", "hf://datasets/org/name@main/data to"),
        ("https://hf.co/datasets/org/name/blob/v1/a.parquet?x=1", "hf://datasets/org/name@v1/a.parquet to"),
        ("https://huggingface.co/datasets/org/name/viewer/default/train", "hf://datasets/org/name to"),
    ],
)
def test_a_web_page_is_not_data(page: str, address: str) -> None:
    with pytest.raises(ValueError, match=f"is a web page. Write {address}"):
        midepoch.from_files(page)


def test_other_web_servers_are_waited_for_too(
    hub: HubServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    hub.lfs_from = 1 << 30
    monkeypatch.setattr("midepoch.storage.stores.random.uniform", lambda low, high: low)
    hub.fail("resolve", 503, retry_after="0.4", after=4)
    name = "data/train-00001-of-00004.parquet"
    assert ids(midepoch.from_files(f"{hub.endpoint}/datasets/org/name/resolve/main/{name}")) == list(range(30, 60))
    assert "trying again in 0.4 s" in caplog.text


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("datasets/name", ("name", "main", "")),
        ("datasets/org/name", ("org/name", "main", "")),
        ("datasets/org/name/a/b.parquet", ("org/name", "main", "a/b.parquet")),
        ("datasets/org/name@v1.0/a@b/c", ("org/name", "v1.0", "a@b/c")),
        ("datasets/org/name/a@b/c", ("org/name", "main", "a@b/c")),
        ("datasets/org/name@refs/pr/12/a", ("org/name", "refs/pr/12", "a")),
        ("datasets/org/name@refs/prs/a", ("org/name", "refs", "prs/a")),
        ("datasets/name@x/a", ("name", "x", "a")),
        ("datasets/name/*.parquet", ("name", "main", "*.parquet")),
        ("datasets/name/train.csv", ("name", "main", "train.csv")),
    ],
)
def test_parts_of_an_address(address: str, parts: tuple[str, str, str]) -> None:
    at = parse_hub_path(address)
    assert (at.repo, at.revision, at.path) == parts
    assert at.given == (address if "@" in address or "/" in at.repo else address.replace("/name", "/name@main"))
    assert parse_hub_path(at.given) == at
    assert parse_hub_path(f"{at.root}/folder/file").repo == at.repo  # as files are listed
