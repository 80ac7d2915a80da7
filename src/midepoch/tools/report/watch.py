"""A page that is served live, on this machine's own address, or protected by a token.

It answers two addresses, / and /data.json, and reads only the run it was created for. Requests under a foreign host
name are refused, so that another page cannot read it through the user's browser (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from midepoch._internal.values import to_jsonable
from midepoch.errors import MidepochError
from midepoch.tools.report.page import render

_log = logging.getLogger("midepoch")
_FRESH = 1.0
"""Seconds for which collected numbers are reused for all requests."""


class Watch:
    """Serves the contents that ``look`` returns. ``token`` is drawn if the address is not this machine's own."""

    def __init__(self, look: Callable[[], dict[str, Any]], host: str, port: int, token: str | None = None) -> None:
        self._look, self._host = look, host
        self._lock, self._serving = threading.Lock(), threading.Lock()
        self._closed = False
        self._found: tuple[float, bytes] | None = None
        self.token = token or (None if is_own(host) else secrets.token_urlsafe(24))

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True
            timeout = 0.2

        self._server = Server((host, port), partial(_Handler, self))

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def serve(self) -> None:
        """Serve until interrupted or closed."""
        with self._serving, suppress(KeyboardInterrupt):
            while not self._closed:
                self._server.handle_request()  # for up to 0.2 s

    def close(self) -> None:
        self._closed = True
        with self._serving:
            self._server.server_close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admits(self, host: str | None, given: str) -> bool:
        """Return True if a request may be answered: by its token or, on this machine's own address, its host name."""
        if self.token is not None:
            return hmac.compare_digest(given.encode(), self.token.encode())
        try:
            return is_own(urlsplit(f"//{host or ''}").hostname or "")
        except ValueError:
            return False

    def numbers(self) -> bytes:
        """Return the contents as JSON. Requests within a second share one collection."""
        with self._lock:
            now = time.monotonic()
            if self._found is None or now - self._found[0] > _FRESH:
                numbers = json.dumps(to_jsonable(self._look()), separators=(",", ":"), allow_nan=False).encode()
                self._found = (time.monotonic(), numbers)
            return self._found[1]


class _Handler(BaseHTTPRequestHandler):
    timeout = 30
    server_version = "midepoch"
    sys_version = ""

    def __init__(self, watch: Watch, *request: Any) -> None:
        self._watch = watch
        super().__init__(*request)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        given = parse_qs(url.query).get("token", [""])[0]
        if not self._watch.admits(self.headers.get("Host"), given):
            problem = "the token is missing or wrong, or the address is not this machine's own\n"
            self._answer(403, "text/plain", problem.encode())
            return
        try:
            if url.path == "/":
                self._answer(200, "text/html", render(json.loads(self._watch.numbers()), live=True).encode())
            elif url.path == "/data.json":
                self._answer(200, "application/json", self._watch.numbers())
            else:
                self._answer(404, "text/plain", b"there is / and /data.json\n")
        except (MidepochError, OSError, ValueError) as problem:
            _log.debug("the run could not be read", exc_info=True)
            self._answer(503, "text/plain", f"{problem}\n".encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("watch: %s", re.sub(r"\?\S*", "", format % args))  # without the token


def is_own(host: str) -> bool:
    """Return True if a name or address is this machine's own."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
