"""A web server on loopback for tests, whose files are handed to those who know a password or have a signature."""

from __future__ import annotations

import base64
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, urlsplit


class WebServer:
    """Serves ``files`` by their names. Names in ``broken`` are answered with 500."""

    def __init__(self, files: dict[str, bytes], user: str, password: str, signature: str) -> None:
        self.files, self.broken = files, set[str]()
        basic = base64.b64encode(f"{user}:{password}".encode()).decode()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                name, query = url.path.strip("/"), parse_qs(url.query)
                signed = signature in (*query.get("X-Amz-Signature", ()), *query.get("sig", ()))
                if self.headers.get("Authorization") != f"Basic {basic}" and not signed:
                    self._answer(401, b"")
                elif name in broken:
                    self._answer(500, b"")
                elif name not in files:
                    self._answer(404, b"")
                else:
                    self._send(files[name])

            def _send(self, data: bytes) -> None:
                first, last = 0, len(data) - 1
                if wanted := self.headers.get("Range"):
                    begin, _, end = wanted.removeprefix("bytes=").partition("-")
                    first, last = int(begin), min(int(end or last), last)
                self._answer(206 if wanted else 200, data[first : last + 1], f"bytes {first}-{last}/{len(data)}")

            def _answer(self, status: int, body: bytes, part: str = "") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Accept-Ranges", "bytes")
                if part:
                    self.send_header("Content-Range", part)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing is logged."""

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """A client that goes away is none of the server's business."""

        broken = self.broken
        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.host = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> WebServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
