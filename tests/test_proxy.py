"""The object store of the tests and the proxy in front of it: what they promise to the tests that use them."""

from __future__ import annotations

import functools
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from proxy import ERRORS, FLIP, Fault, Proxy, reads
from s3 import Server, storage_options

DATA = os.urandom(300_000)


@pytest.fixture(scope="module")
def bucket(s3_server: Server) -> Path:
    folder = s3_server.folder / "proxied"
    (folder / "sub").mkdir(parents=True)
    (folder / "data.bin").write_bytes(DATA)
    (folder / "sub" / "other.bin").write_bytes(b"other")
    return folder


@pytest.fixture
def open_proxy(tmp_path: Path) -> Iterator[Proxy]:
    """A proxy before a server that asks for no signature, for clients that show what is on the wire."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "data.bin").write_bytes(DATA)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        with Proxy(f"127.0.0.1:{server.server_address[1]}") as front:
            yield front
        server.shutdown()
        thread.join()


def connect(endpoint: str) -> pafs.S3FileSystem:
    return pafs.S3FileSystem(**storage_options(endpoint))


def ask(proxy: Proxy, method: str = "GET", timeout: float = 30.0) -> tuple[int, bytes]:
    """Status and body of one answer."""
    connection = http.client.HTTPConnection(proxy.endpoint, timeout=timeout)
    try:
        connection.request(method, "/data.bin")
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    finally:
        connection.close()


def kinds(proxy: Proxy) -> list[tuple[int, int, str | None]]:
    return [(request.status, request.sent, request.fault) for request in proxy.requests]


@pytest.mark.parametrize("through", ["server", "proxy"])
def test_lists_reads_and_writes(
    bucket: Path, s3_server: Server, proxy: Proxy, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rclone refuses the checksums that newer AWS SDKs send behind the body.
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    store = connect({"server": s3_server.endpoint, "proxy": proxy.endpoint}[through])
    found = store.get_file_info(pafs.FileSelector("proxied", recursive=True))
    assert {info.path: info.size for info in found if info.is_file} == {
        "proxied/data.bin": len(DATA),
        "proxied/sub/other.bin": 5,
    }
    with store.open_input_file("proxied/data.bin") as file:
        assert file.size() == len(DATA)
        assert file.read_at(1000, 123_456) == DATA[123_456:124_456]
        assert file.read() == DATA
    made = bucket / "made +é.bin"
    with store.open_output_stream("proxied/made +é.bin") as sink:
        sink.write(DATA)
    assert made.read_bytes() == DATA
    made.unlink()


def test_a_wrong_key_is_refused_through_the_proxy(bucket: Path, proxy: Proxy) -> None:
    store = pafs.S3FileSystem(**{**storage_options(proxy.endpoint), "secret_key": "wrong"})
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        store.open_input_file("proxied/data.bin")


def test_what_is_written_into_the_folder_is_seen_at_once(bucket: Path, proxy: Proxy) -> None:
    store = connect(proxy.endpoint)
    tags = set()
    for text in [b"one", b"two", b"three"]:
        (bucket / "new.bin").write_bytes(text)
        with store.open_input_file("proxied/new.bin") as file:
            assert file.read() == text
            tags.add(file.metadata()["ETag"])
    assert len(tags) == 3
    (bucket / "new.bin").unlink()
    assert store.get_file_info("proxied/new.bin").type == pafs.FileType.NotFound
    (bucket.parent / "proxied-later").mkdir()
    (bucket.parent / "proxied-later" / "x.bin").write_bytes(b"x")
    assert store.get_file_info("proxied-later/x.bin").size == 1


def test_requests_and_bytes_are_counted(bucket: Path, proxy: Proxy) -> None:
    with connect(proxy.endpoint).open_input_file("proxied/data.bin") as file:
        assert [(each.method, each.path) for each in proxy.requests] == [("HEAD", "/proxied/data.bin")]
        proxy.reset()
        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda i: file.read_at(1000 + i, 2000 * i), range(50)))
    assert parts == [DATA[2000 * i : 2000 * i + 1000 + i] for i in range(50)]
    assert {each.range for each in proxy.requests} == {f"bytes={2000 * i}-{2000 * i + 999 + i}" for i in range(50)}
    assert proxy.bytes_sent() == sum(1000 + i for i in range(50))
    assert proxy.bytes_sent("HEAD") == 0
    assert {each.status for each in proxy.requests} == {206}


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_errors(open_proxy: Proxy, kind: str) -> None:
    open_proxy.add(Fault(kind, times=2))
    status, body = ask(open_proxy)
    assert status == int(kind)
    assert f"<Code>{ERRORS[kind]}</Code>".encode() in body
    assert ask(open_proxy, "HEAD") == (int(kind), b"")
    assert ask(open_proxy) == (200, DATA)
    assert kinds(open_proxy) == [(int(kind), len(body), kind), (int(kind), 0, kind), (200, len(DATA), None)]


def test_garbage_has_the_right_length(open_proxy: Proxy) -> None:
    open_proxy.add(Fault("garbage"))
    assert ask(open_proxy) == (200, DATA.translate(FLIP))
    assert ask(open_proxy) == (200, DATA)


def test_short_is_a_whole_answer(open_proxy: Proxy) -> None:
    open_proxy.add(Fault("short"))
    assert ask(open_proxy) == (200, DATA[:150_000])
    assert open_proxy.bytes_sent() == 150_000


def test_cut_ends_in_mid_body(open_proxy: Proxy) -> None:
    open_proxy.add(Fault("cut"))
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(open_proxy)
    assert caught.value.partial == DATA[:150_000]
    assert kinds(open_proxy) == [(200, 150_000, "cut")]


def test_resets(open_proxy: Proxy) -> None:
    open_proxy.add(Fault("reset"))
    open_proxy.add(Fault("reset_mid", after=1))
    with pytest.raises(ConnectionResetError) as caught:
        ask(open_proxy)
    assert not isinstance(caught.value, http.client.RemoteDisconnected)  # which is a mere end
    with pytest.raises(ConnectionResetError):
        ask(open_proxy)
    assert kinds(open_proxy) == [(0, 0, "reset"), (200, 150_000, "reset_mid")]
    assert ask(open_proxy) == (200, DATA)


def test_a_reset_reaches_the_client_though_a_forked_child_holds_the_socket(open_proxy: Proxy) -> None:
    open_proxy.add(Fault("reset", seconds=0.3))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, open_proxy)
        while not open_proxy.requests:
            time.sleep(0.01)
        if (child := os.fork()) == 0:
            time.sleep(30)
            os._exit(0)
        try:
            with pytest.raises(ConnectionResetError):
                asked.result()
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_delay_and_hang(open_proxy: Proxy) -> None:
    open_proxy.add(Fault("delay", seconds=0.3))
    open_proxy.add(Fault("hang", after=1))
    began = time.monotonic()
    assert ask(open_proxy) == (200, DATA)
    assert time.monotonic() - began >= 0.3
    hanging = http.client.HTTPConnection(open_proxy.endpoint, timeout=30)
    hanging.request("GET", "/data.bin")
    while len(open_proxy.requests) < 2:  # or the next one might come first
        time.sleep(0.01)
    assert hanging.sock is not None
    hanging.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        hanging.getresponse()
    hanging.close()
    assert ask(open_proxy) == (200, DATA)
    assert kinds(open_proxy) == [(200, len(DATA), "delay"), (0, 0, "hang"), (200, len(DATA), None)]


def test_a_fault_befalls_what_matches_after_so_many(open_proxy: Proxy) -> None:
    open_proxy.add(Fault("503", match=lambda method, path: method == "HEAD", after=1, times=2))
    asked = [ask(open_proxy, method)[0] for method in ["HEAD", "GET", "HEAD", "GET", "HEAD", "HEAD"]]
    assert asked == [200, 200, 503, 200, 503, 200]
    open_proxy.add(Fault("404", times=None))
    assert [ask(open_proxy)[0] for _ in range(5)] == [404] * 5
    open_proxy.clear()
    assert ask(open_proxy)[0] == 200
    with pytest.raises(ValueError, match="kind must be one of"):
        Fault("earthquake")


@pytest.mark.parametrize("kind", ["500", "503", "reset", "cut", "reset_mid"])
def test_pyarrow_reads_through_passing_faults(bucket: Path, proxy: Proxy, kind: str) -> None:
    proxy.add(Fault(kind, match=reads))
    with connect(proxy.endpoint).open_input_file("proxied/data.bin") as file:
        assert file.read_at(200_000, 50_000) == DATA[50_000:250_000]
    assert [each.fault for each in proxy.requests] == [None, kind, None]


def test_nothing_is_left_after_stop(bucket: Path, s3_server: Server, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    server = Server(tmp_path)
    proxy = Proxy(server.endpoint)
    proxy.add(Fault("hang"))
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(ask, proxy)
        idle = socket.create_connection(("127.0.0.1", int(proxy.endpoint.split(":")[1])))
        while not proxy.requests:
            time.sleep(0.01)
        proxy.stop()
        with pytest.raises(ConnectionError):
            hanging.result()
        with suppress(ConnectionResetError):  # ended either way
            assert idle.recv(1) == b""
        idle.close()
    assert set(threading.enumerate()) <= before
    server.stop()
    server.stop()
    for endpoint in [proxy.endpoint, server.endpoint]:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(endpoint.split(":")[1])))
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
