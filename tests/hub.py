"""A server on loopback that speaks the protocol of the Hugging Face Hub, for tests.

It serves dataset repositories with commits: revisions, listings in pages, and files. Large files are redirected to a
second server with signed addresses, as to the Hub's content delivery network. Faults can be injected. Its faithfulness
is tested with the Hub's own client (``tests/storage/test_hub_server.py``).
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

Files = dict[str, bytes]


@dataclass
class Repo:
    """A dataset repository. ``token``: required to see it. ``gated``: seen, but not read without the token."""

    token: str = ""
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def push(self, files: Files, ref: str = "main") -> str:
        """Add a commit with exactly these files, and return its name."""
        text = repr((len(self.commits), ref, sorted((path, _git_hash(data)) for path, data in files.items())))
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit


@dataclass
class Fault:
    """Answer given instead of the right one to the next requests of a kind."""

    kind: str
    status: int
    headers: dict[str, str]
    times: int
    after: int = 0


class HubServer:
    """The Hub with its repositories. ``requests`` counts them by kind: revision, tree, paths-info, resolve, cdn.

    ``public_name``: the endpoint that pages name as their next one, as behind a mirror.
    """

    def __init__(self, *, page: int = 1000, lfs_from: int = 1024) -> None:
        self.repos: dict[str, Repo] = {}
        self.buckets: dict[str, Files] = {}
        self.moved: dict[str, str] = {}
        self.page, self.lfs_from = page, lfs_from
        self.public_name = ""
        self.requests, self.unknown = Counter[str](), list[str]()
        self.seen_by_cdn = list[str]()
        self.faults: list[Fault] = []
        self._limits: dict[str, tuple[int, float, float, int]] = {}
        self.lock = threading.Lock()
        self.signature, self.signed = 0, dict[str, bytes]()
        self._hub, self._cdn = _started(self, _HubHandler), _started(self, _CdnHandler)
        self.endpoint = f"http://127.0.0.1:{self._hub.server_port}"
        self.cdn = f"http://localhost:{self._cdn.server_port}"

    def add(self, repo: str, files: Files, **about: Any) -> Repo:
        self.repos[repo] = Repo(**about)
        self.repos[repo].push(files)
        return self.repos[repo]

    def fail(
        self, kind: str, status: int, *, times: int = 1, after: int = 0, retry_after: str = "", **headers: str
    ) -> None:
        """Answer the next requests of a kind with a status, after some right answers."""
        more = {"Retry-After": retry_after} if retry_after else {}
        self.faults.append(Fault(kind, status, {**more, **headers}, times, after))

    def limit(self, kind: str, requests: int, seconds: float) -> None:
        """Refuse requests of a kind beyond a number in each window of time, as the Hub does."""
        self._limits[kind] = (requests, seconds, time.monotonic(), 0)

    def _exceeded(self, kind: str) -> Fault | None:
        if kind not in self._limits:
            return None
        most, seconds, begin, count = self._limits[kind]
        now = time.monotonic()
        if now - begin >= seconds:
            begin, count = now, 0
        self._limits[kind] = (most, seconds, begin, count + 1)
        left = math.ceil(begin + seconds - now)
        return Fault(kind, 429, {"RateLimit": f'"{kind}";r=0;t={left}'}, 1) if count >= most else None

    def expire(self) -> None:
        """Make all signed addresses invalid."""
        with self.lock:
            self.signature += 1

    def fault(self, kind: str) -> Fault | None:
        with self.lock:
            self.requests[kind] += 1
            for fault in self.faults:
                if fault.kind == kind and fault.times:
                    if fault.after:
                        fault.after -= 1
                        return None
                    fault.times -= 1
                    return fault
            return self._exceeded(kind)

    def sign(self, data: bytes) -> str:
        """Return an address of the contents on the second server."""
        digest = hashlib.sha256(data).hexdigest()
        with self.lock:
            self.signed[digest] = data
            return f"{self.cdn}/files/{digest}?X-Amz-Expires=3600&X-Amz-Signature=SIGNED{self.signature}"

    def __enter__(self) -> HubServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    owner: HubServer

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is none of the server's business."""


def _started(owner: HubServer, handler: type[BaseHTTPRequestHandler]) -> _Server:
    server = _Server(("127.0.0.1", 0), handler)
    server.owner = owner
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    @property
    def owner(self) -> HubServer:
        assert isinstance(self.server, _Server)
        return self.server.owner

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def send_file(self, data: bytes, **headers: str) -> None:
        wanted = self.headers.get("Range")
        if wanted is None:
            return self.send(200, data, Accept_Ranges="bytes", **headers)
        begin, _, end = wanted.removeprefix("bytes=").partition("-")
        first, last = int(begin), min(int(end or len(data)), len(data) - 1)
        if first >= len(data):
            return self.send(416, Content_Range=f"bytes */{len(data)}")
        part = f"bytes {first}-{last}/{len(data)}"
        return self.send(206, data[first : last + 1], Accept_Ranges="bytes", Content_Range=part, **headers)

    def failed(self, kind: str) -> bool:
        fault = self.owner.fault(kind)
        if fault is not None:
            self.send(fault.status, b"", **fault.headers)
        return fault is not None

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


class _CdnHandler(_Handler):
    def do_GET(self) -> None:
        owner = self.owner
        owner.seen_by_cdn.append(self.headers.get("Authorization", ""))
        if self.failed("cdn"):
            return None
        url = urlsplit(self.path)
        signature = parse_qs(url.query).get("X-Amz-Signature", [""])[0]
        digest = url.path.rpartition("/")[2]
        if signature != f"SIGNED{owner.signature}":
            return self.send(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        return self.send_file(owner.signed[digest], ETag=f'"{digest}"')


class _HubHandler(_Handler):
    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket = next((name for name in self.owner.buckets if f"/buckets/{name}" in url.path), None)
        if bucket is not None:
            return self.of_bucket(bucket, unquote(url.path.partition(f"/buckets/{bucket}")[2].strip("/")))
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        api = url.path.startswith("/api/datasets/")
        inner = url.path.removeprefix("/api").removeprefix("/datasets/")
        known = [*self.owner.repos, *self.owner.moved]
        name = next((repo for repo in known if inner == repo or inner.startswith(f"{repo}/")), None)
        action, _, rest = inner[len(name or "") :].strip("/").partition("/")
        kind = action or "revision"
        if not url.path.startswith(("/api/datasets/", "/datasets/")) or kind not in (
            ("revision", "tree", "paths-info") if api else ("resolve",)
        ):
            self.owner.unknown.append(f"{self.command} {self.path}")
            return self.send(401 if name is None else 404, X_Error_Code="RepoNotFound" if name is None else "Unknown")
        if self.failed(kind):
            return None
        if name is None:
            return self.refused(401)
        if name in self.owner.moved:
            there = self.path.replace(name, self.owner.moved[name], 1)
            return self.send(307, Location=there)
        return self.of_repo(name, kind, rest, query)

    def of_bucket(self, name: str, rest: str) -> None:
        """Answer a request for a bucket, whose files have no commits."""
        files, (action, _, path) = self.owner.buckets[name], rest.partition("/")
        about = {file: {"xetHash": hashlib.sha256(data).hexdigest(), "size": len(data)} for file, data in files.items()}
        entries = [{"type": "file", "path": file, **each} for file, each in about.items()]
        if action == "tree":
            return self.send_json([each for each in entries if each["path"].startswith(path)])
        if action == "paths-info":
            return self.send_json([each for each in entries if each["path"] in json.loads(self.body)["paths"]])
        if action == "resolve":
            return self.send(302, Location=self.owner.sign(files[path]))
        times = {"createdAt": "2026-01-01T00:00:00.000Z"}
        return self.send_json({"id": name, "private": False, "size": 0, "totalFiles": len(files), **times})

    def of_repo(self, name: str, kind: str, rest: str, query: dict[str, str]) -> None:
        repo = self.owner.repos[name]
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and repo.token and given != repo.token:
            return self.send(401, X_Error_Message="Invalid credentials in Authorization header")
        if repo.token and given != repo.token and not repo.gated:
            return self.refused(401)
        revision, _, path = rest.partition("/")
        commit = repo.refs.get(unquote(revision) or "main", unquote(revision))
        if commit not in repo.commits:
            return self.send(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
        if repo.gated and given != repo.token and kind != "revision":
            return self.send(
                401 if not given else 403, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted"
            )
        files = repo.commits[commit]
        if kind == "revision":
            return self.send_json(self.about(name, repo, commit, query))
        if kind == "tree":
            return self.tree(files, unquote(path), query)
        if kind == "paths-info":
            return self.paths_info(files)
        return self.resolve(files, unquote(path), commit)

    def refused(self, status: int) -> None:
        self.send(status, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    def about(self, name: str, repo: Repo, commit: str, query: dict[str, str]) -> dict[str, Any]:
        base = {"_id": "0" * 24, "id": name, "sha": commit}
        if "expand" in query or "expand[]" in query:
            return base
        siblings = [{"rfilename": path} for path in sorted(repo.commits[commit])]
        more = {"author": name.partition("/")[0], "private": bool(repo.token), "gated": repo.gated, "disabled": False}
        times = dict.fromkeys(("lastModified", "createdAt"), "2026-01-01T00:00:00.000Z")
        return {**base, **more, **times, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings}

    def tree(self, files: Files, folder: str, query: dict[str, str]) -> None:
        prefix = f"{folder}/" if folder else ""
        below = {path: data for path, data in files.items() if path.startswith(prefix)}
        if not below and folder:
            return self.send(404, X_Error_Code="EntryNotFound", X_Error_Message=f"{folder} does not exist")
        recursive = query.get("recursive", "").lower() == "true"
        depth = None if recursive else prefix.count("/")
        folders = {path.rsplit("/", n)[0] for path in below for n in range(1, path.count("/") - prefix.count("/") + 1)}
        entries = [self.file(path, data) for path, data in below.items()]
        entries += [{"type": "directory", "oid": _git_hash(each.encode()), "size": 0, "path": each} for each in folders]
        entries = sorted((e for e in entries if depth in (None, e["path"].count("/"))), key=lambda each: each["path"])
        first = int(query.get("cursor", "0"))
        last = first + int(query.get("limit", self.owner.page))
        link = {}
        if last < len(entries):
            there = f"{self.owner.public_name or self.owner.endpoint}{urlsplit(self.path).path}?recursive={recursive}&expand=False&cursor={last}"
            link = {"Link": f'<{there}>; rel="next"'}
        return self.send_json(entries[first:last], **link)

    def paths_info(self, files: Files) -> None:
        sent = self.body.decode()
        form = json.loads(sent) if sent.startswith("{") else parse_qs(sent)
        found: list[dict[str, Any]] = []
        for path in [form["paths"]] if isinstance(form["paths"], str) else form["paths"]:
            if path in files:
                found.append(self.file(path, files[path]))
            elif any(each.startswith(f"{path}/") for each in files):
                found.append({"type": "directory", "oid": _git_hash(path.encode()), "size": 0, "path": path})
        self.send_json(found)

    def file(self, path: str, data: bytes) -> dict[str, Any]:
        entry = {"type": "file", "oid": _git_hash(data), "size": len(data), "path": path}
        if len(data) >= self.owner.lfs_from:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 133}
        return entry

    def resolve(self, files: Files, path: str, commit: str) -> None:
        if path not in files:
            return self.send(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        data = files[path]
        if len(data) < self.owner.lfs_from:
            return self.send_file(data, ETag=f'"{_git_hash(data)}"', X_Repo_Commit=commit)
        about = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        return self.send(302, Location=self.owner.sign(data), X_Repo_Commit=commit, **about)

    def send_json(self, contents: Any, **headers: str) -> None:
        self.send(200, json.dumps(contents).encode(), Content_Type="application/json; charset=utf-8", **headers)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def address(repo: str, path: str = "", revision: str = "") -> str:
    """Return the address of a path in a repository."""
    at = f"@{quote(revision, safe='')}" if revision else ""
    return f"hf://datasets/{repo}{at}/{path}".rstrip("/")


def use_settings(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Set what huggingface_hub reads from the environment when it is imported: online, with the tokens of a folder."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
