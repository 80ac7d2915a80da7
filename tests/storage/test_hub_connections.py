"""The connections to the Hub: those of huggingface_hub, with its settings, in threads and in forked processes."""

from __future__ import annotations

import pickle
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import midepoch
from forks import forked
from hub import use_settings
from midepoch.errors import MidepochError
from midepoch.storage.hub import Hub, origin_of

Answerer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def _own_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections that are made with the settings of the test."""
    hub = pytest.importorskip("huggingface_hub")
    use_settings(monkeypatch, tmp_path)
    hub.close_session()
    yield
    hub.close_session()


@contextmanager
def server(answer: Answerer, context: ssl.SSLContext | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.daemon_threads = True
    if context is not None:
        served.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that do not trust it
        served.socket = context.wrap_socket(served.socket, server_side=True)
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"{'http://127.0.0.1' if context is None else 'https://localhost'}:{served.server_port}"
    finally:
        served.shutdown()
        thread.join()
        served.server_close()


def send(handler: BaseHTTPRequestHandler, body: bytes, length: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def send_port(handler: BaseHTTPRequestHandler) -> None:
    send(handler, str(handler.client_address[1]).encode())


def got(url: str) -> bytes:
    return bytes(Hub(url, False)._send(url, {}, follow=False).content)


def test_connections_are_reused_and_shared_by_threads() -> None:
    with server(send_port) as url:
        assert len({got(url) for _ in range(5)}) == 1
        with ThreadPoolExecutor(4) as pool:
            ports = set(pool.map(lambda _: got(f"{url}/a?b=c"), range(40)))
        assert 1 <= len(ports) <= 4


def test_a_connection_that_the_server_has_closed_is_opened_again() -> None:
    closed = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        send_port(handler)
        handler.close_connection = True  # without telling

    with server(answer) as url:
        ports = set()
        for _ in range(3):
            ports.add(got(url))
            closed.wait(0.2)
        assert len(ports) == 3


def test_a_truncated_answer_is_a_failure_of_the_connection() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"abc", length=10)
        handler.close_connection = True

    with server(answer) as url, pytest.raises(ConnectionError, match=r"127.0.0.1 failed \(RemoteProtocol") as failed:
        got(f"{url}/?X-Amz-Signature=SECRET")
    assert "SECRET" not in str(failed.value)


def test_a_forked_process_has_its_own_connections() -> None:
    with server(send_port) as url:
        own = got(url)
        assert forked(lambda: got(url) != own) == 0
        assert got(url) == own


def test_a_fork_waits_for_the_answers_of_other_threads() -> None:
    """huggingface_hub closes its connections in the fork, which would wait for a lock that such a thread holds."""
    asked, released = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        released.wait(20)
        send_port(handler)

    with server(answer) as url, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(got, url)
        asked.wait(20)
        threading.Timer(0.2, released.set).start()
        assert forked(lambda: released.is_set() and got(url) != b"") == 0
        assert waiting.result() == got(url)


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append((handler.path, handler.headers.get("Proxy-Authorization")))
        send(handler, b"by the proxy")

    with server(answer) as url:
        monkeypatch.setenv("http_proxy", url.replace("://", "://me:word@"))
        monkeypatch.setenv("no_proxy", "localhost")
        assert got("http://hub.example/a?b=c") == b"by the proxy"
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            with pytest.raises(ConnectionError, match="the connection to localhost failed"):
                got(f"http://localhost:{nobody.getsockname()[1]}/")
    assert asked == [("http://hub.example/a?b=c", "Basic bWU6d29yZA==")]


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    import huggingface_hub

    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    about = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2", "-nodes"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *about, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with server(send_port, context) as url:
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            got(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        huggingface_hub.close_session()
        assert len({got(url) for _ in range(3)}) == 1
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            got(url.replace("localhost", "127.0.0.1"))


def test_a_client_of_the_user_is_used() -> None:
    """``huggingface_hub.set_client_factory`` is for certificates and proxies that the environment does not name."""
    import huggingface_hub
    from huggingface_hub.utils._http import default_client_factory

    made = []

    def factory() -> object:
        made.append(default_client_factory())
        return made[-1]

    with server(send_port) as url:
        huggingface_hub.set_client_factory(factory)
        try:
            assert got(url)
        finally:
            huggingface_hub.set_client_factory(default_client_factory)
    assert len(made) == 1


def test_origins() -> None:
    assert origin_of("https://Hub.example/a?b") == origin_of("https://hub.example:443") == ("https", "hub.example", 443)
    assert origin_of("http://hub.example") != origin_of("https://hub.example")
    for invalid in ("ftp://host/a", "http:///a", "host/a", "http://a:b/"):
        with pytest.raises(ConnectionError, match="without a valid host or port"):
            origin_of(invalid)


@pytest.mark.parametrize("missing", ["huggingface_hub", "huggingface_hub.errors"])
def test_without_the_package_the_error_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing != "huggingface_hub":  # an older version: the attribute is looked up in the package
        monkeypatch.delattr("huggingface_hub.errors", raising=False)
    with pytest.raises(
        MidepochError, match=r'needs huggingface_hub, version 1.3 or newer: `pip install "midepoch\[hf\]"'
    ):
        midepoch.from_files("hf://datasets/org/name")


def test_a_pickle_keeps_the_settings() -> None:
    hub = pickle.loads(pickle.dumps(Hub("https://hub.example/", " hf_x ", True)))
    assert (hub.place, hub._token, hub.offline) == ("https://hub.example", "hf_x", True)
