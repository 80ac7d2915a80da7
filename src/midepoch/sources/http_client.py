"""A small HTTP client with reused connections, for threads and forked processes. It follows no redirects.

The modules of the standard library that it needs are imported by the first request, because opening local files imports
this one.
"""

from __future__ import annotations

import atexit
import base64
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

if TYPE_CHECKING:
    import http.client
    import ssl

TIMEOUT = 30.0
"""Seconds without a byte after which a request fails."""
_AS_GIVEN = "%/:?=&+,;@!$'()*[]~|"
"""Special characters of an address that are sent as they are."""
_IDLE = 16
"""Connections that are kept open for each server."""


class Answer(NamedTuple):
    """Answer of a server, with its headers by lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Connections to servers, by address. Problems are a ConnectionError or TimeoutError, without paths and queries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """Return the answer of a server, whatever its status."""
        import http.client
        import ssl

        parts = _split(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConnectionError(f"an http or https address was expected, got one with the scheme {parts.scheme!r}")
        origin = origin_of(url)
        proxy = _proxy(parts.scheme, parts.hostname)
        through = proxy if parts.scheme == "http" else ""
        target = url.partition("#")[0] if through else (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        target = _quoted(target)
        own = {"User-Agent": "midepoch", "Accept-Encoding": "identity"}
        sent = {**own, **headers, **(_proxy_headers(proxy) if through else {})}
        try:
            if (connection := self._reused(origin)) is not None:
                with suppress(http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):  # closed since
                    return self._exchange(origin, connection, target, sent)
            return self._exchange(origin, _connection(url, proxy), target, sent)
        except TimeoutError:
            failure: OSError = TimeoutError(f"{parts.hostname} timed out after {TIMEOUT:.0f} s")
        except (OSError, http.client.HTTPException) as problem:
            kind = type(problem).__name__
            failure = ConnectionError(f"the connection to {parts.hostname} failed ({kind}: {problem})")
        raise failure

    def _exchange(
        self, origin: str, connection: http.client.HTTPConnection, target: str, headers: Mapping[str, str]
    ) -> Answer:
        try:
            connection.request("GET", target, headers=dict(headers))
            response = connection.getresponse()
            body = response.read()
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                idle = self._idle.setdefault(origin, [])
                if len(idle) < _IDLE:
                    idle.append(connection)
                else:
                    connection.close()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)

    def _reused(self, origin: str) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(origin)
            return idle.pop() if idle else None

    def close(self) -> None:
        """Close the connections that are not in use. In a forked process, this leaves those of its parent open."""
        self._lock, idle, self._idle = threading.Lock(), self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()


client = HttpClient()
atexit.register(client.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=client.close)


def _quoted(target: str) -> str:
    """Return the target of a request with spaces and Unicode quoted: http.client shows unquoted ones in errors.

    Headers of answers, with addresses of redirects, were decoded as Latin-1.
    """
    raw = target.encode("latin-1") if all(ord(each) < 256 for each in target) else target.encode()
    return quote(raw, safe=_AS_GIVEN)


def origin_of(url: str) -> str:
    """Return scheme, host and port of an address."""
    parts = _split(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def is_web_address(url: str) -> bool:
    """Return True for an address of http or https with a host."""
    try:
        parts = _split(url)
    except ConnectionError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def target_of(url: str, location: str) -> str:
    """Return the address that the answer to a request for ``url`` redirects to. It may be relative."""
    with _valid():
        return urljoin(url, location)


def _split(url: str) -> SplitResult:
    with _valid():
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is no port
        return parts


@contextmanager
def _valid() -> Iterator[None]:
    """Raise ConnectionError for an address that cannot be parsed, without the address."""
    try:
        yield
        return
    except ValueError:
        pass
    raise ConnectionError("the server, or the setting of a proxy, names an address without a valid host or port")


def _connection(url: str, proxy: str) -> http.client.HTTPConnection:
    import http.client

    parts = _split(url)
    host, port = parts.hostname or "", parts.port
    if not proxy:
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=_tls())
    middle = _split(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme == "http":
        return http.client.HTTPConnection(middle.hostname or "", middle.port or 80, timeout=TIMEOUT)
    tunnel = http.client.HTTPSConnection(middle.hostname or "", middle.port or 80, timeout=TIMEOUT, context=_tls())
    tunnel.set_tunnel(host, port or 443, headers=_proxy_headers(proxy))
    return tunnel


def _proxy(scheme: str, host: str) -> str:
    """Return the proxy that the environment or the system names for a host. Empty for none."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all") or ""
    return "" if not proxy or proxy_bypass(host) else proxy


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = _split(proxy if "://" in proxy else f"http://{proxy}")
    if not parts.username:
        return {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """Return the certificates of the system, those named for other HTTP clients, or those of certifi."""
    import ssl

    named = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if named and os.path.isfile(named):
        return ssl.create_default_context(cafile=named)
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and ssl.get_default_verify_paths().capath is None:
        with suppress(ImportError):
            context.load_verify_locations(import_module("certifi").where())
    return context
