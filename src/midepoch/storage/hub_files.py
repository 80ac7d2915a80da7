"""Files of dataset repositories of the Hugging Face Hub, read in place by ranges of bytes.

A revision becomes a commit when the files are listed. From then on, everything is read at that commit, also by worker
processes: a push to the repository never mixes two versions.

Commits and listings are saved, so that one process of a machine asks for them. A revision is looked up again after 30
seconds: processes that open a dataset together ask once, and get the same commit. The listing of a commit never
changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from midepoch.errors import FetchError
from midepoch.storage.address import as_address
from midepoch.storage.cache_files import CacheSlot, atomic_write, default_index_dir, read_or_make
from midepoch.storage.damage import changed
from midepoch.storage.hub_api import DEFAULT_ENDPOINT, Hub, HubPath, origin_of, parse_hub_path
from midepoch.storage.open_files import Entry, RangeFile

T = TypeVar("T")
Persist = Callable[[Callable[[], T]], T]
"""Function that runs an action, and retries it."""

_log = logging.getLogger("midepoch")
FRESH_SECONDS = 30.0
_OPTIONS = ("token", "endpoint")
_REDIRECTS_KEPT = 4096
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_VERSION = 1
_COLUMNS = ("path", "size", "etag")
_LISTINGS_KEPT = 3
"""Listings of other commits of the same folder that are kept."""


class HubFiles:
    """File system of the dataset repositories at one endpoint. Pickles include its token, if one was given."""

    type_name = "hub"
    survives_fork = True

    def __init__(self, hub: Hub, commits: Mapping[tuple[str, str], str] | None = None) -> None:
        self._hub, self._commits, self.place = hub, dict(commits or {}), hub.endpoint
        self._listings: dict[tuple[str, bool], dict[str, Entry]] = {}
        self._redirects: OrderedDict[HubPath, str] = OrderedDict()
        self._before: list[str] = []
        self._fresh_seconds = FRESH_SECONDS

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> HubFiles:
        """Return the file system for ``storage_options``."""
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise ValueError(f"the options of hf://datasets are {' and '.join(_OPTIONS)}, got {', '.join(unknown)}")
        token = options.get("token")
        if token is not None and not isinstance(token, (str, bool)):
            raise ValueError(f"the token must be a str, True, False or None, got a {type(token).__name__}")
        endpoint = str(options.get("endpoint") or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT)
        with suppress(ConnectionError):
            if "@" not in endpoint and origin_of(endpoint):
                return cls(Hub(endpoint, token))
        shown = as_address("endpoint", endpoint)
        raise ValueError(f"the endpoint must be like {DEFAULT_ENDPOINT}, without a user, got {shown}")

    def __reduce__(self) -> tuple[Any, ...]:
        return HubFiles, (self._hub, self._commits)

    def refresh(self) -> None:
        """Look up revisions again, even if another process did so a moment ago."""
        self._fresh_seconds = 0.0

    @property
    def earlier(self) -> str:
        """Versions that were opened before on this machine, as addresses."""
        return ", ".join(self._before)

    def below(self, folder: str, persist: Persist[Any]) -> list[Entry]:
        """Return all files below a folder, at any depth."""
        return list(self._listed(parse_hub_path(folder), persist, recursive=True).values())

    def stat(self, path: str, persist: Persist[Any]) -> Entry | None:
        """Return a file, or None. Its folder is listed: thousands of files in a list of paths cost one listing."""
        at = parse_hub_path(path)
        folder = at._replace(path=at.path.rpartition("/")[0])
        return self._listed(folder, persist, recursive=False).get(path) if at.path else None

    def _listed(self, at: HubPath, persist: Persist[Any], *, recursive: bool) -> dict[str, Entry]:
        key = at.given, recursive
        listed = self._listings.get(key)  # another thread may clear them
        if listed is None:
            commit = self._commits.get(at[:2]) or self._commit_now(at, persist)
            files = self._files_at(at._replace(revision=commit), persist, recursive)
            listed = self._listings[key] = {file.path: file for file in files}
        return listed

    def _commit_now(self, of: HubPath, persist: Persist[str]) -> str:
        """Return the commit of a revision, as looked up by this machine within the last seconds."""
        started, seconds = time.time(), self._fresh_seconds
        if self._hub.offline and seconds:
            seconds = math.inf

        def is_fresh(saved: dict[str, Any]) -> bool:  # or looked up by another process, meanwhile
            return bool(min(started, time.time() - seconds) <= saved["checked"] <= time.time())

        def look_up(saved: dict[str, Any]) -> dict[str, Any]:
            commit = persist(partial(self._hub.commit, of))
            before = saved.get("before" if saved.get("commit") == commit else "commit", "")
            return {"commit": commit, "before": before, "checked": time.time()}

        if of.is_pinned:
            found = {"commit": of.revision, "before": ""}
        else:
            found = _saved_or(self._lookup(of), f"the commit of hf://{of.root}", is_fresh, look_up)
        if found["before"]:
            self._before.append(f"hf://datasets/{of.repo}@{found['before']}")
        commit: str = found["commit"]
        self._commits[of[:2]] = commit
        _log.info("hf://%s is read at commit %s", of.root, commit)
        return commit

    def _files_at(self, of: HubPath, persist: Persist[Any], recursive: bool) -> list[Entry]:
        """Return the files below a folder at a commit: saved, or listed by one process of this machine."""

        def look_up(_: dict[str, Any]) -> dict[str, Any]:
            found: list[Entry] = []
            query, seen = f"recursive={str(recursive).lower()}&expand=false", set[str]()
            while query not in seen:
                seen.add(query)
                files, query = persist(partial(self._hub.page, of, query))  # a failure repeats one page
                found += files
                if not query:
                    below = [file for file in found if not of.path or file.path.startswith(f"{of.path}/")]
                    return {name: [getattr(file, name) for file in below] for name in _COLUMNS}
            raise FetchError(
                f"{self.place} lists hf://{of.root} without end: a page names an earlier one. "
                "Check for a proxy that drops or caches queries."
            )

        path = _path("listing", self.place, of.repo, of.path, str(recursive), commit=of.revision)
        saved = _saved_or(path, f"the listing of hf://{of.root}", set(_COLUMNS).issubset, look_up)
        columns = zip(*(saved[name] for name in _COLUMNS), strict=True)
        return [Entry(f"{of.root}/{file}", size, 0, etag) for file, size, etag in columns]

    def _lookup(self, of: HubPath) -> Path:
        return _path("revision", self.place, of.repo, of.revision)

    def open(self, file: Entry) -> RangeFile:
        """Return a file that is read by ranges. This costs no request, unless the commit is not known."""
        at = parse_hub_path(file.path)
        self._listings.clear()  # once files are read, they only take memory
        commit = self._commits.get(at[:2])
        if commit is None:  # of an index that is trusted without a listing
            saved = at.revision if at.is_pinned else _loaded(self._lookup(at)).get("commit")
            commit = self._commits[at[:2]] = saved or self._hub.commit(at)
        at = at._replace(revision=commit)
        return RangeFile(file.size, lambda start, stop: self._read(file, at, start, stop))

    def _read(self, file: Entry, at: HubPath, start: int, stop: int) -> bytes:
        part = f"bytes={start}-{stop - 1}"
        url = self._redirects.get(at)
        if url is not None:
            answer = self._hub.read_elsewhere(url, part)
            if answer.status_code in (200, 206):
                return _contents(answer, file, start, stop)
        with _resolving[hash(at) % len(_resolving)]:  # threads that read one file ask for its address once
            other = self._redirects.get(at)
            if other is None or other == url:  # there is none, or it was refused: signed addresses expire
                found = self._hub.read(at, part)
                elsewhere = found.next_request
                _check_etag(file, found.headers.get("etag" if elsewhere is None else "x-linked-etag", ""))
                if elsewhere is None:
                    return _contents(found, file, start, stop)
                self._redirects[at] = other = str(elsewhere.url)
                while len(self._redirects) > _REDIRECTS_KEPT:
                    self._redirects.popitem(last=False)
        return _contents(self._hub.read_elsewhere(other, part), file, start, stop)


_resolving: list[threading.Lock] = []
_listing_lock = threading.RLock()  # lock files do not exclude threads


def _make_locks() -> None:
    """Create the locks, and again in a forked process, which has no copy of the threads that hold them."""
    global _listing_lock
    _resolving[:] = [threading.Lock() for _ in range(64)]
    _listing_lock = threading.RLock()


_make_locks()
os.register_at_fork(after_in_child=_make_locks)


def _check_etag(file: Entry, etag: str) -> None:
    etag = etag.removeprefix("W/").strip('"')
    comparable = len(etag) == len(file.etag)  # servers may name the hash of a pointer instead of that of the contents
    if comparable and _HASH.fullmatch(etag) and etag != file.etag:
        hint = "its ETag differs; the old contents are at hf://datasets/ORG/NAME@COMMIT"
        raise changed(f"hf://{file.path}", hint)


def _contents(answer: Any, file: Entry, start: int, stop: int) -> bytes:
    """Return the requested bytes of an answer. Raise ConnectionError if the server sent others."""
    if answer.status_code == 200:  # a server that ignores ranges
        whole, body = len(answer.content), answer.content[start:stop]
        if whole != file.size and "text/html" in answer.headers.get("content-type", "").lower():
            raise ConnectionError("a web page was received in place of the file, as from the login page of a network")
        if whole < file.size and "content-length" not in answer.headers:  # possibly truncated
            raise ConnectionError(f"{whole} of {file.size} bytes were received, without a Content-Length")
    elif answer.status_code == 206 and (part := _RANGE.fullmatch(answer.headers.get("content-range", ""))):
        whole, body = file.size if part[3] == "*" else int(part[3]), answer.content if int(part[1]) == start else b""
    else:
        raise ConnectionError(f"the server of the files answered HTTP status {answer.status_code}")
    if whole != file.size:
        raise changed(f"hf://{file.path}", f"it has {whole} bytes and had {file.size}")
    if len(body) != stop - start:
        raise ConnectionError(f"fewer than the {stop - start} bytes requested from byte {start} on were received")
    return bytes(body)


def _path(kind: str, *parts: str, commit: str = "") -> Path:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    return default_index_dir() / "hub" / f"{digest}{commit and '-' + commit}.{kind}.json"


def _saved_or(
    path: Path,
    what: str,
    is_usable: Callable[[dict[str, Any]], bool],
    look_up: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Return what is saved at a path if it is usable. Else one process of this machine looks it up and saves it."""

    def read() -> dict[str, Any] | None:
        saved = _loaded(path)
        return saved if saved and is_usable(saved) else None

    def make(slot: CacheSlot) -> dict[str, Any]:
        found = look_up(_loaded(path))
        slot.keep(lambda: _save(path, found))
        return found

    with _listing_lock:
        return read_or_make(path, what, read, make)


def _save(path: Path, contents: dict[str, Any]) -> None:
    atomic_write(path, json.dumps({"version": _VERSION, **contents}, separators=(",", ":")).encode())
    with suppress(OSError):
        others = [each for each in path.parent.glob(f"{path.name.partition('-')[0]}-*") if each != path]
        for old in sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)[_LISTINGS_KEPT:]:
            old.unlink(missing_ok=True)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) and saved.get("version") == _VERSION else {}
