"""A reverse proxy on loopback that counts what an object store is asked for, and answers badly when told to.

Requests pass unchanged, the ``Host`` too: a signature made for the proxy's address is checked against that header.
Answers pass unchanged but for one thing: a part of an object is 206 here, as S3 has it, where rclone says 200.
"""

from __future__ import annotations

import ctypes
import http.client
import io
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any

Match = Callable[[str, str], bool]

ERRORS = {
    "403": "AccessDenied",
    "404": "NoSuchKey",
    "429": "TooManyRequests",
    "500": "InternalError",
    "503": "SlowDown",
}
# Of the size of real ones, about 250 bytes: pyarrow takes an error for another when it was asked for fewer.
ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>As the proxy was told.</Message>'
    "<RequestId>4442587FB7D0A2F9</RequestId><HostId>" + "host" * 19 + "</HostId></Error>"
)
KINDS = {"delay", "hang", "reset", "reset_mid", "cut", "short", "garbage", *ERRORS}
PIECE = 1 << 16
FLIP = bytes(255 - i for i in range(256))
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


def anything(method: str, path: str) -> bool:
    return True


def reads(method: str, path: str) -> bool:
    """Objects being read; not lists, which are GETs of a bucket."""
    return method == "GET" and "/" in path.partition("?")[0].strip("/")


@dataclass(frozen=True, eq=False)
class Fault:
    """What befalls ``times`` requests (None: all) for which ``match(method, path)`` holds, after ``after`` of them.

    ===========================  ==========================================================================
    delay                        a right answer, later (``seconds``; a delay before any other kind, too)
    hang                         no answer until the proxy stops
    reset, reset_mid             a TCP reset: before the answer; after half of the body
    cut                          the connection is closed after half of the body
    short                        half of the body, with a Content-Length that fits it
    garbage                      a body of the right length, every bit of it flipped
    403, 404, 429, 500, 503      an S3 error, which the server never hears of
    ===========================  ==========================================================================
    """

    kind: str
    times: int | None = 1
    match: Match = anything
    after: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(sorted(KINDS))}, got {self.kind!r}")


@dataclass
class Request:
    """One request and its answer: ``status`` 0 as long as there is none, ``sent`` bytes of body, the fault's kind."""

    method: str
    path: str
    range: str | None
    status: int = 0
    sent: int = 0
    fault: str | None = None


class Proxy:
    """A proxy in front of the server at ``upstream`` ("host:port"), on a free port until ``stop()``."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._seen: dict[Fault, int] = {}
        self.stopping = threading.Event()
        self._listener = _Listener(self)
        self.endpoint = f"127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def requests(self) -> list[Request]:
        """All requests since the beginning or the last ``reset()``, in the order of their arrival."""
        with self._lock:
            return list(self._requests)

    def bytes_sent(self, method: str = "GET") -> int:
        """Bytes of body that went to clients. Never behind what a client has read."""
        with self._lock:
            return sum(request.sent for request in self._requests if request.method == method)

    def reset(self) -> None:
        """Forgets the requests; faults stay."""
        with self._lock:
            self._requests.clear()

    def add(self, fault: Fault) -> None:
        """Of several faults that fit a request, the one added first befalls it."""
        with self._lock:
            self._seen[fault] = 0

    def clear(self) -> None:
        """Takes all faults back; requests that hang already go on hanging."""
        with self._lock:
            self._seen.clear()

    def stop(self) -> None:
        """Ends every connection and thread, hanging ones too."""
        self.stopping.set()
        self._listener.shutdown()
        self._thread.join()
        self._listener.end()

    def begin(self, request: Request) -> Fault | None:
        """Writes a request down, and says what shall befall it."""
        with self._lock:
            self._requests.append(request)
            hit = None
            for fault, seen in self._seen.items():
                if fault.match(request.method, request.path):
                    self._seen[fault] = seen + 1
                    due = seen >= fault.after and (fault.times is None or seen < fault.after + fault.times)
                    hit = fault if hit is None and due else hit
            request.fault = hit.kind if hit else None
            return hit

    def count(self, request: Request, size: int) -> None:
        with self._lock:
            request.sent += size

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Listener(HTTPServer):
    """One thread a connection; all of them are known, so that they can be ended."""

    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.lock = threading.Lock()
        self.sockets: set[socket.socket] = set()
        self.threads: set[threading.Thread] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def server_bind(self) -> None:
        socket.socket.bind(self.socket, ("127.0.0.1", 0))  # HTTPServer's own would look its name up
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self.serve, args=(request, client_address), daemon=True)
        with self.lock:
            self.sockets.add(request)
            self.threads.add(thread)
        thread.start()

    def serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # the client went away
        finally:
            with self.lock:
                self.sockets.discard(request)
                self.threads.discard(threading.current_thread())
            self.shutdown_request(request)

    def end(self) -> None:
        # A forked worker may hold a copy of any of these: shut down, not only closed.
        _shut(self.socket)
        self.server_close()
        with self.lock:
            sockets, threads = list(self.sockets), list(self.threads)
        for each in sockets:
            _shut(each)
        for thread in threads:
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other, over one connection to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self.proxy = self.server.proxy
        self.upstream = http.client.HTTPConnection(self.proxy.upstream, timeout=60)

    def finish(self) -> None:
        self.upstream.close()
        super().finish()

    def handle_any(self) -> None:
        path = self.requestline.split(" ")[1]  # self.path is tidied up, and would break the signature
        body = self.read_body()
        request = Request(self.command, path, self.headers.get("Range"))
        fault = self.proxy.begin(request)
        if fault:
            self.proxy.stopping.wait(fault.seconds if fault.kind != "hang" else None)
        if self.proxy.stopping.is_set():
            self.close_connection = True
        elif fault and fault.kind == "reset":
            self.reset()
        elif fault and fault.kind in ERRORS:
            self.answer_error(request, int(fault.kind))
        else:
            self.pass_on(request, fault.kind if fault else "", body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return b"".join(pieces)

    def pass_on(self, request: Request, kind: str, body: bytes) -> None:
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        try:
            self.upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                self.upstream.putheader(name, value)
            self.upstream.endheaders([body] if chunked and body else body or None, encode_chunked=chunked)
            answer = self.upstream.getresponse()
        except (OSError, http.client.HTTPException):
            self.upstream.close()
            self.answer_error(request, 502)
            return
        with answer:
            self.send_answer(request, kind, answer)

    def send_answer(self, request: Request, kind: str, answer: http.client.HTTPResponse) -> None:
        source: io.BufferedIOBase = answer
        length = answer.length
        if length is None:  # chunked: short lists and errors
            source = io.BytesIO(whole := answer.read())
            length = len(whole)
        limit = length // 2 if kind in ("short", "cut", "reset_mid") else length
        # Clients of Rust's object_store refuse a range that comes with 200.
        request.status = 206 if answer.status == 200 and answer.getheader("Content-Range") else answer.status
        self.send_response_only(request.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if request.method == "HEAD":
            self.send_header("Content-Length", answer.getheader("Content-Length", "0"))
        elif answer.status not in (204, 304):
            self.send_header("Content-Length", str(limit if kind == "short" else length))
        self.end_headers()
        while limit and (piece := source.read(min(PIECE, limit))):
            limit -= len(piece)
            self.send_piece(request, piece.translate(FLIP) if kind == "garbage" else piece)
        if kind in ("short", "cut", "reset_mid"):
            self.upstream.close()  # the rest of the body is still in it
        if kind == "cut":
            self.close_connection = True
        elif kind == "reset_mid":
            self.reset()

    def answer_error(self, request: Request, status: int) -> None:
        code = ERRORS.get(str(status), "BadGateway")
        body = ERROR.format(code=code)
        request.status = status
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if request.method != "HEAD":
            self.send_piece(request, body.encode())

    def send_piece(self, request: Request, piece: bytes) -> None:
        self.proxy.count(request, len(piece))  # before it goes: a client that has read it may look at once
        try:
            self.wfile.write(piece)
        except OSError:
            self.proxy.count(request, -len(piece))
            raise

    def reset(self) -> None:
        # SO_LINGER 0 resets only when the last copy of the socket is closed, and a worker forked meanwhile may hold
        # one. To connect to nowhere (AF_UNSPEC) resets at once.
        ctypes.CDLL(None).connect(self.connection.fileno(), bytes(16), 16)
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


def _shut(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
