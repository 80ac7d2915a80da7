"""Credentials are shown and written nowhere, whatever way they are given and whatever goes wrong.

Every test plants secrets that can be recognised, lets everything run that makes output, and searches all of it: what is
logged (at DEBUG, by all libraries), printed, raised, represented, and the names and bytes of all files.
"""

from __future__ import annotations

import base64
import gc
import io
import json
import logging
import multiprocessing
import pickle
import re
import sys
import tempfile
import threading
import traceback
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest

import midepoch
from midepoch import PipelineCheckpoint
from midepoch.errors import CheckpointMismatchError, MidepochError
from midepoch.sources.splits import HubRequest
from midepoch.storage.stores import Retry
from midepoch.tools.describe import describe
from midepoch.tools.plan import plan_resume
from midepoch.tools.report import collect
from midepoch.tools.report.page import render
from midepoch.tools.report.watch import Watch
from s3 import Server
from web import WebServer

CORE = "PLANTED"
"""Is in every secret, and stays as it is when one is percent-encoded or decoded."""
KEY, SECRET = f"AK{CORE}0", f"{CORE}1/+@%41&="
USER, PASSWORD = f"me{CORE}2", f"{CORE}3/+@%41&="
SIGNATURE, TOKEN = f"{CORE}4/+=", f"hf_{CORE}5"
QUICK = Retry(attempts=2, first_pause=0.0)
ROWS = 100


def _in_base64(shift: int) -> str:
    """The characters that stand for all of CORE, where it begins ``shift`` bytes after a multiple of three."""
    encoded = base64.b64encode(b"-" * shift + CORE.encode()).decode().rstrip("=")
    return encoded[(8 * shift + 5) // 6 : (8 * (shift + len(CORE))) // 6]


NEEDLES = re.compile(rf"(?i:{CORE}|{CORE.encode().hex()})|" + "|".join(map(re.escape, map(_in_base64, range(3)))))


class Search:
    """All output of a test, and which of it holds a secret."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._leaks, self.searched = folder, list[str](), 0

    def text(self, where: str, text: str | bytes) -> None:
        text = text.decode("latin-1") if isinstance(text, bytes) else text
        self.searched += 1
        if (found := NEEDLES.search(text)) is not None:
            self._leaks.append(f"{where}: …{text[max(0, found.start() - 80) : found.end() + 20]}…")

    def value(self, where: str, value: Any) -> None:
        self.text(f"repr of {where}", repr(value))
        self.text(f"str of {where}", str(value))

    def error(self, where: str, error: BaseException) -> None:
        """An error, and all that it is chained to, also where a traceback would not show it."""
        self.text(f"traceback of {where}", "".join(traceback.format_exception(error)))
        seen: set[int] = set()
        todo: list[BaseException | None] = [error]
        while todo:
            one = todo.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            self.value(where, one)
            self.text(f"arguments of {where}", repr([one.args, vars(one), getattr(one, "__notes__", [])]))
            todo += [one.__cause__, one.__context__]

    def fails(self, where: str, action: Callable[[], Any], kind: type[Exception] = Exception) -> Exception:
        with pytest.raises(kind) as raised:
            action()
        self.error(where, raised.value)
        return raised.value

    def files(self) -> None:
        for path in self.folder.rglob("*"):
            self.text("name of a file", str(path.relative_to(self.folder)))
            if path.is_file():
                self.text(str(path.relative_to(self.folder)), path.read_bytes())

    def leaks(self) -> list[str]:
        self.files()
        return self._leaks


class Lines(logging.Handler):
    """All that is logged, as it would be shown, and what it was made of."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{self.format(record)} {record.msg!r} {record.args!r}")


@pytest.fixture
def search(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> Iterator[Search]:
    """Searches all that a test writes, logs and prints, in folders of its own."""
    for name, folder in {"HOME": "home", "MIDEPOCH_CACHE": "cache", "XDG_CACHE_HOME": "xdg", "TMPDIR": "tmp"}.items():
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    lines = Lines()
    logging.getLogger().addHandler(lines)
    found = Search(tmp_path)
    yield found
    gc.collect()  # what is said by those that go
    logging.getLogger().removeHandler(lines)
    for line in lines.found:
        found.text("log", line)
    printed = capfd.readouterr()
    found.text("stdout", printed.out)
    found.text("stderr", printed.err)
    found.text("warnings", repr([str(one.message) for one in recwarn]))
    assert found.leaks() == []
    assert found.searched > 10


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose working key is planted, with some data."""
    folder = tmp_path_factory.mktemp("planted")
    for bucket in ("lake", "cli", "runs"):  # before the server lists them, which it keeps
        (folder / bucket).mkdir()
    for number in range(2):
        table = pa.table({"id": range(number * ROWS, number * ROWS + ROWS)})
        pq.write_table(table, folder / "lake" / f"{number}.parquet", row_group_size=25)
    (folder / "damaged").mkdir()
    whole = (folder / "lake" / "0.parquet").read_bytes()
    (folder / "damaged" / "a.parquet").write_bytes(whole[:40] + b"\xff" * 60 + whole[100:])
    (folder / "damaged" / "b.parquet").write_bytes(b"PAR1 no footer")
    with Server(folder, f"--auth-key={KEY},{SECRET}", "--dir-cache-time=1s") as server:
        yield server


@pytest.fixture
def web() -> Iterator[WebServer]:
    pytest.importorskip("aiohttp")
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": range(ROWS)}), sink, row_group_size=25)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.parquet", sink.getvalue())
    lines = b"".join(b'{"id": %d}\n' % i for i in range(ROWS))
    files = {"a.parquet": sink.getvalue(), "b.zip": archive.getvalue(), "c.jsonl": lines, "bad.parquet": b"PAR1 bad"}
    with WebServer({**files, "bad.zip": b"no archive"}, USER, PASSWORD, SIGNATURE) as server:
        yield server


def addresses(server: Server, bucket: str) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Every way to give the keys of an object store: an address and options."""
    where = f"endpoint_override={quote(server.endpoint, safe='')}&scheme=http&region=us-east-1"
    key, secret = quote(KEY, safe=""), quote(SECRET, safe="")
    plain = {"endpoint_override": f"http://{server.endpoint}", "region": "us-east-1"}
    return {
        "user": (f"s3://{key}:{secret}@{bucket}?{where}", None),
        "query": (f"s3://{bucket}?access_key={key}&secret_key={secret}&{where}", None),
        "options": (f"s3://{bucket}", {**plain, "access_key": KEY, "secret_key": SECRET}),
    }


def use(search: Search, ds: midepoch.Dataset, folder: Path) -> dict[str, Any]:
    """Everything that shows a dataset and its loader. Returns a state."""
    loader = ds.with_format("numpy").shuffle(seed=1).loader(10, audit=folder)
    batches = iter(loader)
    next(batches)
    state: dict[str, Any] = loader.state_dict()
    search.text("state", json.dumps(state))
    for name, value in {
        "dataset": ds, "loader": loader, "pipeline": ds.pipeline, "source": ds.pipeline.source, "iterator": batches,
        "store": ds.pipeline.source.access, "stats": loader.stats, "description": describe(state),
        "plan": plan_resume(state, ds.shuffle(seed=1), world_size=2, batch_size=5), "place": ds.pipeline.source.place(3),
    }.items():  # fmt: skip
        search.value(name, value)
    list(batches)
    search.text("page", render(collect(folder, ds)))
    other = midepoch.from_files(write_other(folder)).with_format("numpy").shuffle(seed=1).loader(10)
    search.fails("a state of other data", lambda: other.load_state_dict(state), CheckpointMismatchError)
    return state


def write_other(folder: Path) -> Path:
    path = folder.with_name("other.parquet")
    pq.write_table(pa.table({"id": range(7)}), path)
    return path


@pytest.mark.parametrize("way", ["user", "query", "options"])
def test_keys_of_an_object_store(way: str, search: Search, s3: Server, tmp_path: Path) -> None:
    address, options = addresses(s3, "lake")[way]
    read = partial(midepoch.from_files, storage_options=options, retry=QUICK)
    ds = read(address)
    assert len(ds) == 2 * ROWS
    use(search, ds, tmp_path / "run")
    assert CORE.encode() in pickle.dumps(ds)  # workers need the keys
    for bucket in ("nowhere", "lake/nothing", "lake/no.parquet", "damaged"):
        text = address.replace("lake", bucket, 1)
        search.fails(f"{bucket} by {way}", lambda text=text: read(text), MidepochError)
    skipping = read(address.replace("lake", "damaged/a.parquet", 1), on_error="skip")
    list(skipping.with_format("numpy").loader(10))
    other = {**(options or {}), "secret_key": f"x{SECRET}"}
    search.fails("another secret", lambda: read(address, storage_options=other), MidepochError)
    away = {**(options or {}), "endpoint_override": "http://127.0.0.1:1"}
    search.fails("a refused connection", lambda: read(address, storage_options=away), MidepochError)
    away = {**(options or {}), "endpoint_override": f"http://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:1"}
    search.fails("an endpoint with a password", lambda: read(address, storage_options=away), ValueError)
    search.fails("unknown options", lambda: read(address, storage_options={"nonsense": SECRET}))
    search.fails("a list", lambda: read([address, "s3://lake/0.parquet", f"s3://{USER}:{SECRET}@other/x.parquet"]))


def test_keys_in_a_file_system_and_in_the_environment(
    search: Search, s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"access_key": KEY, "secret_key": SECRET, "endpoint_override": s3.endpoint, "scheme": "http"}
    filesystem = fs.S3FileSystem(**options, region="us-east-1")
    read = partial(midepoch.from_files, filesystem=filesystem, retry=QUICK)
    assert len(read("lake")) == len(read(f"s3://{KEY}:{quote(SECRET, safe='')}@lake")) == 2 * ROWS
    search.fails("a missing file", lambda: read("lake/no.parquet"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{s3.endpoint}")
    use(search, midepoch.from_files("s3://lake"), tmp_path / "run")
    search.fails("a missing bucket", lambda: midepoch.from_files("s3://nowhere", retry=QUICK))
    saved = PipelineCheckpoint("s3://lake-runs")
    search.value("checkpoint", saved)
    search.fails("a missing bucket", lambda: saved.save(extra={"a": 1}))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:1")
    search.fails("an endpoint with a password", lambda: midepoch.from_files("s3://lake", retry=QUICK), ValueError)


def test_passwords_and_signatures_of_a_web_server(search: Search, web: WebServer, tmp_path: Path) -> None:
    user = f"{USER}:{quote(PASSWORD, safe='')}@"
    amazon = f"X-Amz-Credential={KEY}%2F20261116%2Fs3&X-Amz-Security-Token={TOKEN}&X-Amz-Expires=60&X-Amz-Signature="
    read = partial(midepoch.from_files, retry=QUICK)
    signed = {"amazon": amazon + quote(SIGNATURE, safe=""), "azure": f"sv=1&se=2026&sig={quote(SIGNATURE, safe='')}"}
    ways = [
        lambda name: f"http://{user}{web.host}/{name}",
        *(lambda name, query=query: f"http://{web.host}/{name}?{query}" for query in signed.values()),
        lambda name: f"simplecache::http://{user}{web.host}/{name}",
    ]
    states = []
    for number, way in enumerate(ways):
        ds = read(way("a.parquet"))
        states.append(use(search, ds, tmp_path / f"run{number}"))
        for name in ("no.parquet", "bad.parquet"):
            search.fails(name, lambda way=way, name=name: read(way(name)), MidepochError)
        web.broken.add("a.parquet")
        search.fails("an error of the server", lambda way=way: read(way("a.parquet"), force_reindex=True))
        web.broken.clear()
    for state in states:
        assert {**state, "more": []} == {**states[0], "more": []}  # but for the branch, as each loader has its own
    for name, file in {"b": "b.zip", "no": "no.zip", "bad": "bad.zip"}.items():
        chain = f"zip://a.parquet::http://{user}{web.host}/{file}"
        if name == "b":
            use(search, read(chain), tmp_path / "zip")
            search.fails("a missing member", lambda chain=chain: read(chain.replace("a.parquet", "z.parquet")))
        else:
            search.fails(name, lambda chain=chain: read(chain), MidepochError)
    for address in (
        f"http://{USER}:wrong{CORE}@{web.host}/a.parquet",
        f"http://{web.host}/a.parquet?access_token={TOKEN}&GoogleAccessId={KEY}&Signature={SIGNATURE}",
        f"http://{web.host}/a.parquet?id={TOKEN}",
        f"http://{user}127.0.0.1:1/a.parquet",
        f"zip://a::http://{user}127.0.0.1:1/b.zip",
        f"ftp://{user}127.0.0.1:1/a.parquet",
        f"sftp://{user}127.0.0.1:1/a.parquet",
        f"nonsense://{user}host/a.parquet?token={TOKEN}",
        f"gs://{user}bucket/a.parquet",
        f"az://{user}bucket/a.parquet?sig={SIGNATURE}",
        Path(f"s3://{KEY}:{CORE}@bucket/a.parquet"),
        f"//me:{CORE}@host/x.parquet",
        f"https:me:{CORE}@host/x.parquet",
        f"http://user:1/{CORE}@host/x.parquet",
        f"http://{web.host}/a.parquet?id=1&{CORE}",
    ):
        options = {"anonymous": False, "access_token": TOKEN} if str(address).startswith("gs") else None
        search.fails(str(address)[:5], lambda a=address, o=options: read(a, storage_options=o), Exception)
    for name in ("index_dir", "cache_dir"):
        search.fails(name, lambda name=name: read(write_other(tmp_path / "x"), **{name: f"s3://{KEY}:'{CORE}@b/x"}))
    search.fails("load_from_disk", lambda: midepoch.load_from_disk(f"s3://{KEY}:'{CORE}@b/x"))
    search.fails("audit", lambda: ds.loader(1, audit=f"s3://{KEY}:{CORE}@b/x"))


def test_other_credentials_open_the_same_index(search: Search, web: WebServer, tmp_path: Path) -> None:
    """And leave a state as it is: they say who reads, not what."""
    signed = f"http://{web.host}/a.parquet?X-Amz-Expires=1&sig={quote(SIGNATURE, safe='')}"
    first = midepoch.from_files(signed).with_format("numpy")
    loader = first.shuffle(seed=1).loader(10)
    next(iter(loader))
    indexes = sorted(path.name for path in (tmp_path / "cache").glob("*.midepoch-index"))
    again = midepoch.from_files(f"http://{USER}:{quote(PASSWORD, safe='')}@{web.host}/a.parquet").with_format("numpy")
    other = again.shuffle(seed=1).loader(10)
    other.load_state_dict(loader.state_dict())
    assert sum(len(batch["id"]) for batch in other) == ROWS - 10
    assert indexes == sorted(path.name for path in (tmp_path / "cache").glob("*.midepoch-index"))
    keys = {
        HubRequest("json", data_files=[f"https://{user}host/a.jsonl?{query}"], kwargs={"api_key": user}).key
        for user, query in (("", ""), (f"{USER}:{PASSWORD}@", f"sig={SIGNATURE}"), (f"a:{TOKEN}@", f"token={TOKEN}"))
    }
    assert len(keys) == 2  # an empty query is another address
    digests = set()
    for user, signature in ((f"{USER}:{PASSWORD}@", SIGNATURE), (f"a:{TOKEN}@", TOKEN)):
        given = {"url": f"https://{user}host/a?sig={quote(signature, safe='')}", "api_key": signature}
        digests.add(first.map(dict, fn_kwargs=given).loader(1).state_dict()["arguments"])
    assert len(digests) == 1
    search.value("a pipeline", first.map(dict, fn_kwargs={"api_key": TOKEN}).pipeline)


def test_workers(search: Search, web: WebServer) -> None:
    ds = midepoch.from_files(f"http://{USER}:{quote(PASSWORD, safe='')}@{web.host}/a.parquet", retry=QUICK)
    batches = iter(ds.with_format("numpy").loader(5, num_workers=1, prefetch=1))
    next(batches)
    for process in multiprocessing.active_children():
        search.text("command line of a worker", Path(f"/proc/{process.pid}/cmdline").read_bytes())
    web.broken.add("a.parquet")
    search.fails("an error in a worker", lambda: list(batches), MidepochError)


def test_checkpoints(search: Search, s3: Server, tmp_path: Path) -> None:
    for number, (address, options) in enumerate(addresses(s3, "runs/RUN").values()):
        (s3.folder / "runs").mkdir(exist_ok=True)
        address = address.replace("RUN", str(number))
        saved = PipelineCheckpoint(address, keep=1, storage_options=options, async_save=bool(number))
        for step in (1, 2):
            saved.save(extra={"a": {"values": np.arange(10)}}, step=step)
        saved.wait()
        search.value("checkpoint", saved)
        assert saved.steps() == [2]
        search.value("manifest", saved.manifest(2))
        restored = saved.restore_latest(extra={"a": {"values": np.zeros(10, int)}})
        search.value("restored", restored)
        search.fails("a missing step", lambda saved=saved: saved.read(7, "extra.a"))
        damaged = next((s3.folder / "runs" / str(number) / "step_2").rglob("*.json"))
        damaged.write_bytes(b"x" * damaged.stat().st_size)
        search.fails("a damaged step", lambda saved=saved: saved.verify(2))
        nowhere = address.replace("runs/", "nowhere/")
        search.fails(
            "a missing bucket",
            lambda nowhere=nowhere, options=options: PipelineCheckpoint(nowhere, storage_options=options).save(
                extra={"a": 1}
            ),
        )
    once = {"retry_config": {"max_retries": 0}, "client_options": {"allow_http": True, "timeout": "5s"}}
    user = f"{USER}:{quote(PASSWORD, safe='')}@"
    for address, options in (
        (f"http://{user}127.0.0.1:1/run?sig={SIGNATURE}", once),
        ("s3://b/run", {**once, "access_key": KEY, "secret_key": SECRET, "endpoint": f"http://{user}127.0.0.1:1"}),
        (f"s3://{KEY}:{CORE}/1@b/run", None),
        (f"s3://{KEY}:{CORE}@b/run", {"nonsense": SECRET}),
        (f"gs://{user}b/run", {"service_account_key": SECRET}),
        (f"az://{user}b/run?sig={SIGNATURE}", {"account_name": "a", "account_key": SECRET}),
        (f"nonsense://{user}b/run", None),
        (Path(f"s3://{KEY}:{CORE}@b/run"), None),
    ):
        search.fails(
            str(address)[:5],
            lambda a=address, o=options: PipelineCheckpoint(a, storage_options=o).save(extra={"a": 1}),
        )


def command(*arguments: str) -> int:
    """Run the command line in this process; what it prints is captured with all the rest."""
    from midepoch.cli import main

    before, sys.argv = sys.argv, ["midepoch", *arguments]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def test_the_command_line_and_pages(search: Search, s3: Server, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    data, _ = addresses(s3, "lake")["user"]
    runs, _ = addresses(s3, "cli/run")["query"]
    _, options = addresses(s3, "lake")["options"]
    assert options is not None
    storage = [f"--storage={name}={value}" for name, value in options.items()]
    ds = midepoch.from_files(data)
    loader = ds.with_format("numpy").shuffle(seed=1).loader(10, audit=tmp_path / "run")
    next(batches := iter(loader))
    state = tmp_path / "state.json"
    state.write_text(json.dumps(loader.state_dict()))
    PipelineCheckpoint(runs).save(loader, step=1)
    list(batches)
    good = [
        ("info", data), ("info", data, "--json"), ("info", "s3://lake", *storage), ("peek", data), ("index", data),
        ("inspect", runs), ("verify", runs), ("verify", runs, "--json"), ("inspect", str(state)), ("doctor",),
        ("diff", str(state), runs), ("audit", str(tmp_path / "run")), ("report", data, "-o", str(tmp_path / "a.html")),
        ("report", str(tmp_path / "run"), "--data", data, "--checkpoints", runs, "-o", str(tmp_path / "b.html")),
        ("plan", "--checkpoint", runs, "--world-size", "2", "--batch-size", "4", "--json"),
        ("plan", "--checkpoint", runs, "--world-size", "2", "--batch-size", "4"),
    ]  # fmt: skip
    for arguments in good:
        assert command(*arguments) == 0, arguments
    bad = [
        ("info", data.replace("lake", "nowhere", 1)), ("verify", runs.replace("/run", "/none")), (data,),
        ("verify", runs, data), ("info", "--storage", f"secret_key={SECRET}"), (f"--storage=secret_key={SECRET}",),
        ("info", "s3://lake", "--storage", SECRET), ("info", "x", f"--nonsense={SECRET}"), ("audit", data),
        ("inspect", runs.replace("/run", "/none")), ("report", data.replace("lake", "nowhere", 1)), ("watch", data),
        ("info", f"https://{USER}:{CORE}@127.0.0.1/x?id=1"), ("diff", str(state), data), ("info", f"s3:/{KEY}:{CORE}@b"),
        ("audit", f"s3://{KEY}:'{CORE}@b/x"), ("watch", f"s3://{KEY}:'{CORE}@b/x"), ("report", f"s3://{KEY}:'{CORE}@b/x"),
    ]  # fmt: skip
    for arguments in bad:
        assert command(*arguments) != 0, arguments
    for checkpoints in (runs, runs.replace("cli/", "nowhere/"), f"s3://{KEY}:{CORE}/1@cli"):
        look = partial(collect, tmp_path / "run", checkpoints=checkpoints, read_checkpoints=False)
        watch = Watch(look, "127.0.0.1", 0, TOKEN)
        serving = threading.Thread(target=watch.serve)
        serving.start()
        for name in ("", "data.json", "nothing"):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{watch.port}/{name}?token={TOKEN}") as answer:
                    search.text("answer", answer.read() + str(answer.headers).encode())
            except urllib.error.HTTPError as problem:
                search.text("answer", problem.read())
        watch.close()
        serving.join()


def test_datasets_of_a_hub(search: Search, web: WebServer) -> None:
    pytest.importorskip("datasets")
    address = f"http://{USER}:{quote(PASSWORD, safe='')}@{web.host}/no.jsonl"
    load = partial(midepoch.load_dataset, split="train", token=TOKEN)
    failure = search.fails("data_files", lambda: load("json", data_files=address), MidepochError)
    assert f"http://{web.host}/no.jsonl" in str(failure)
    signed = f"{address}?sig={quote(SIGNATURE, safe='')}"
    search.fails("signed data_files", lambda: load("json", data_files={"train": [signed]}), MidepochError)
    search.fails("a name", lambda: load(f"https://{USER}:{CORE}@127.0.0.1:1/x?token={TOKEN}"))
    search.value("a request", HubRequest(signed, data_files=[signed], kwargs={"token": TOKEN}))


@pytest.mark.parametrize(
    "leak",
    [SECRET, quote(SECRET, safe=""), SECRET.lower(), repr(SECRET), base64.b64encode(f"a:{SECRET}".encode()).decode(),
     base64.b64encode(SECRET.encode()).decode(), base64.b64encode(f"ab{SECRET}".encode()).decode(), SECRET.encode().hex()],
)  # fmt: skip
def test_the_search_finds_what_is_left_in(leak: str, tmp_path: Path) -> None:
    def found(plant: Callable[[Search], Any]) -> bool:
        search = Search(tmp_path)
        plant(search)
        return bool(search.leaks())

    def chained(search: Search) -> None:
        try:
            try:
                raise OSError(5, "no", leak)
            except OSError:
                raise ValueError("harmless") from None
        except ValueError as problem:
            search.error("an error", problem)

    assert found(lambda search: search.text("a text", f"before {leak} after"))
    assert found(lambda search: search.value("a value", {"a": [leak]}))
    assert found(chained)
    assert not found(lambda search: search.text("a text", "harmless"))
    path = tmp_path / "file"
    path.write_bytes(b"\x00\xff" + leak.encode() + b"\x00")
    assert found(lambda search: None)
    path.rename(tmp_path / quote(leak, safe=""))
    (tmp_path / quote(leak, safe="")).write_bytes(b"")
    assert found(lambda search: None)
