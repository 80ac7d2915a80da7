from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from midepoch.sources.http_client import HttpClient, _tls, origin_of

Answerer = Callable[[BaseHTTPRequestHandler], None]


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


def port_of(handler: BaseHTTPRequestHandler) -> bytes:
    return str(handler.client_address[1]).encode()


def test_connections_are_reused_and_shared_by_threads() -> None:
    with closing(HttpClient()) as client, server(lambda handler: send(handler, port_of(handler))) as url:
        assert len({client.get(url, {}).body for _ in range(5)}) == 1
        with ThreadPoolExecutor(4) as pool:
            ports = set(pool.map(lambda _: client.get(f"{url}/a?b=c", {}).body, range(40)))
        assert 1 <= len(ports) <= 4


def test_a_connection_that_the_server_has_closed_is_opened_again() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, port_of(handler))
        handler.close_connection = True  # without telling

    with closing(HttpClient()) as client, server(answer) as url:
        assert len({client.get(url, {}).body for _ in range(3)}) == 3


def test_a_truncated_answer_is_a_failure_of_the_connection() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"abc", length=10)
        handler.close_connection = True

    with server(answer) as url, pytest.raises(ConnectionError, match=r"127.0.0.1 failed \(IncompleteRead"):
        HttpClient().get(f"{url}/?X-Amz-Signature=SECRET", {})


@pytest.mark.parametrize("url", ["ftp://host/a", "http:///a"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConnectionError, match="an http or https address was expected"):
        HttpClient().get(url, {})


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("/a b?sig=A B", "/a%20b?sig=A%20B"),
        ("/%C3%BC%20\u00c3\u00bc?a=%2F+;=,&b[]=~|", "/%C3%BC%20%C3%BC?a=%2F+;=,&b[]=~|"),
        ("/\u65e5#part", "/%E6%97%A5"),
    ],
)
def test_addresses_that_are_not_quoted_are_quoted_and_never_shown(given: str, sent: str) -> None:
    with closing(HttpClient()) as client, server(lambda handler: send(handler, handler.path.encode())) as url:
        assert client.get(url + given, {}).body.decode() == sent


def test_a_forked_process_has_its_own_connections() -> None:
    from midepoch.sources.http_client import client

    with server(lambda handler: send(handler, port_of(handler))) as url:
        own = client.get(url, {}).body
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writer, client.get(url, {}).body)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reader, 10) != own
        assert client.get(url, {}).body == own
        os.close(reader)
        os.close(writer)


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append((handler.path, handler.headers.get("Proxy-Authorization")))
        send(handler, b"by the proxy")

    with server(answer) as url:
        monkeypatch.setenv("http_proxy", url.replace("://", "://me:word@"))
        monkeypatch.setenv("no_proxy", "localhost")
        with closing(HttpClient()) as client:
            assert client.get("http://hub.example/a?b=c", {}).body == b"by the proxy"
    assert asked == [("http://hub.example/a?b=c", "Basic bWU6d29yZA==")]
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="the connection to localhost failed"):
            HttpClient().get(f"http://localhost:{nobody.getsockname()[1]}/", {})


def test_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    about = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2", "-nodes"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *about, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with server(lambda handler: send(handler, port_of(handler)), context) as url:
        _tls.cache_clear()
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            HttpClient().get(url, {})
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        _tls.cache_clear()
        with closing(HttpClient()) as client:
            assert len({client.get(url, {}).body for _ in range(3)}) == 1
            with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                client.get(url.replace("localhost", "127.0.0.1"), {})
    _tls.cache_clear()


def test_origins() -> None:
    assert origin_of("https://Hub.example/a?b") == origin_of("https://hub.example:443") == "https://hub.example:443"
    assert origin_of("http://hub.example") != origin_of("https://hub.example")
