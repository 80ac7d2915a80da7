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
from midepoch.storage.address import Address
from midepoch.storage.cache_files import atomic_write, default_index_dir, locked
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

    def __init__(self, hub: Hub, commits: Mapping[tuple[str, str], str] | None = None) -> None:
        self._hub, self._commits = hub, dict(commits or {})
        self._listings: dict[tuple[str, bool], dict[str, Entry]] = {}
        self._redirects: OrderedDict[tuple[str, str, str], str] = OrderedDict()
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
        try:
            origin_of(endpoint)
            valid = "@" not in endpoint
        except ConnectionError:
            valid = False
        if not valid:
            shown = Address(endpoint if "://" in endpoint else f"https://{endpoint}")
            raise ValueError(f"the endpoint must be like {DEFAULT_ENDPOINT}, without a user, got {shown}")
        return cls(Hub(endpoint, token))

    def __reduce__(self) -> tuple[Any, ...]:
        return HubFiles, (self._hub, self._commits)

    @property
    def place(self) -> str:
        return self._hub.endpoint

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
        key, revision = (at.given, recursive), (at.repo, at.revision)
        listed = self._listings.get(key)  # another thread may clear them
        if listed is None:
            if revision not in self._commits:
                commit, before = commit_of(self._hub, at, persist, fresh_seconds=self._fresh_seconds)
                self._commits[revision] = commit
                if before:
                    self._before.append(f"hf://datasets/{at.repo}@{before}")
                _log.info("hf://%s is read at commit %s", at.root, commit)
            files = files_below(self._hub, at, self._commits[revision], persist, recursive=recursive)
            listed = self._listings[key] = {file.path: file for file in files}
        return listed

    def open(self, file: Entry) -> RangeFile:
        """Return a file that is read by ranges. This costs no request, unless the commit is not known."""
        at = parse_hub_path(file.path)
        revision = at.repo, at.revision
        self._listings.clear()  # once files are read, they only take memory
        if revision not in self._commits:  # of an index that is trusted without a listing
            saved = at.revision if at.is_pinned else _loaded(_lookup(self._hub, at)).get("commit")
            self._commits[revision] = saved or self._hub.commit(at)
        commit = self._commits[revision]
        return RangeFile(file.size, lambda start, stop: self._read(file, at, commit, start, stop))

    def _read(self, file: Entry, at: HubPath, commit: str, start: int, stop: int) -> bytes:
        part, key = f"bytes={start}-{stop - 1}", (at.repo, commit, at.path)
        url = self._redirects.get(key)
        if url is not None:
            answer = self._hub.read_elsewhere(url, part)
            if answer.status_code in (200, 206):
                return _contents(answer, file, start, stop)
        with _resolving[hash(key) % len(_resolving)]:  # threads that read one file ask for its address once
            other = self._redirects.get(key)
            if other is None or other == url:  # there is none, or it was refused: signed addresses expire
                found = self._hub.read(at, commit, part)
                elsewhere = found.next_request
                _check_etag(file, found.headers.get("etag" if elsewhere is None else "x-linked-etag", ""))
                if elsewhere is None:
                    return _contents(found, file, start, stop)
                self._redirects[key] = other = str(elsewhere.url)
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
if hasattr(os, "register_at_fork"):
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


def commit_of(hub: Hub, of: HubPath, persist: Persist[str], *, fresh_seconds: float) -> tuple[str, str]:
    """Return the commit of a revision, as looked up by this machine within the last seconds, and the commit that it saw
    before. Empty if there was none.
    """
    if of.is_pinned:
        return of.revision, ""
    started, seconds = time.time(), math.inf if hub.offline and fresh_seconds else fresh_seconds

    def is_fresh(saved: dict[str, Any]) -> bool:  # or looked up by another process, meanwhile
        return bool(min(started, time.time() - seconds) <= saved["checked"] <= time.time())

    def look_up(saved: dict[str, Any]) -> dict[str, Any]:
        commit = persist(partial(hub.commit, of))
        before = saved.get("before" if saved.get("commit") == commit else "commit", "")
        return {"commit": commit, "before": before, "checked": time.time()}

    found = _saved_or(_lookup(hub, of), f"the commit of hf://{of.root}", is_fresh, look_up)
    return found["commit"], found["before"]


def _lookup(hub: Hub, of: HubPath) -> Path:
    return _path("revision", hub.endpoint, of.repo, of.revision)


def files_below(hub: Hub, of: HubPath, commit: str, persist: Persist[Any], *, recursive: bool) -> list[Entry]:
    """Return the files below a folder at a commit: saved, or listed by one process of this machine."""

    def look_up(_: dict[str, Any]) -> dict[str, Any]:
        found: list[Entry] = []
        url, seen = hub.first_page(of, commit, recursive), set[str]()
        while url:
            if url in seen:
                raise FetchError(
                    f"{hub.endpoint} lists hf://{of.root} without end: a page names an earlier one. "
                    "Check for a proxy that drops or caches queries."
                )
            seen.add(url)
            files, url = persist(partial(hub.page, of._replace(revision=commit), url))  # a failure repeats one page
            found += files
        below = [file for file in found if not of.path or file.path.startswith(f"{of.path}/")]
        return {name: [getattr(file, name) for file in below] for name in _COLUMNS}

    path = _path("listing", hub.endpoint, of.repo, of.path, str(recursive), commit=commit)
    saved = _saved_or(path, f"the listing of hf://{of.root}", set(_COLUMNS).issubset, look_up)
    columns = zip(*(saved[name] for name in _COLUMNS), strict=True)
    return [Entry(f"{of.root}/{file}", size, 0, etag) for file, size, etag in columns]


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
    if (saved := _loaded(path)) and is_usable(saved):
        return saved
    with _listing_lock, locked(path, what) as slot:
        if (saved := _loaded(path)) and is_usable(saved):
            return saved
        found = look_up(saved)
        slot.keep(lambda: _save(path, found))
    return found


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
