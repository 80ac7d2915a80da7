"""Commits and listings of repositories of the Hub, saved so that one process of a machine asks for them.

A revision is looked up again after 30 seconds: processes that open a dataset together ask once, and get the same
commit. The listing of a commit never changes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from midepoch.errors import FetchError
from midepoch.sources.hub_address import HubPath
from midepoch.sources.hub_api import Hub
from midepoch.sources.index import default_index_dir
from midepoch.sources.open_files import Entry
from midepoch.sources.storage import atomic_write, locked

T = TypeVar("T")
Persist = Callable[[Callable[[], T]], T]
"""Function that runs an action, and retries it."""

FRESH_SECONDS = 30.0
_VERSION = 1
_COLUMNS = ("path", "size", "etag")
_KEPT = 3
"""Listings of other commits of the same folder that are kept."""
_one_thread = threading.RLock()  # lock files do not exclude threads
if hasattr(os, "register_at_fork"):

    def _renewed() -> None:
        global _one_thread
        _one_thread = threading.RLock()

    os.register_at_fork(after_in_child=_renewed)


class Lookup(NamedTuple):
    """The commit of a revision, and the one that this machine saw before. Empty if there was none."""

    commit: str
    before: str = ""


def commit_of(hub: Hub, of: HubPath, persist: Persist[str], *, fresh_seconds: float = FRESH_SECONDS) -> Lookup:
    """Return the commit of a revision, as looked up by this machine within the last seconds."""
    if of.is_pinned:
        return Lookup(of.revision)
    path = _path("revision", hub.endpoint, of.repo, of.revision)
    if hub.offline and fresh_seconds:
        fresh_seconds = math.inf
    if (saved := _fresh_lookup(path, fresh_seconds)) is not None:
        return saved
    started = time.time()
    with _one_thread, locked(path, f"the commit of hf://{of.root}") as slot:
        if (saved := _fresh_lookup(path, fresh_seconds, since=started)) is not None:
            return saved
        commit, last = persist(partial(hub.commit, of)), _loaded(path)
        before = last.get("before", "") if last.get("commit") == commit else last.get("commit", "")
        contents = {"commit": commit, "before": before, "checked": time.time()}
        slot.keep(lambda: atomic_write(path, _dumped(contents)))
    return Lookup(commit, before)


def saved_commit(hub: Hub, of: HubPath) -> str | None:
    """Return the commit of a revision as looked up last, at any time. None if this machine has not done it."""
    return of.revision if of.is_pinned else _loaded(_path("revision", hub.endpoint, of.repo, of.revision)).get("commit")


def files_below(hub: Hub, of: HubPath, commit: str, persist: Persist[Any], *, recursive: bool) -> list[Entry]:
    """Return the files below a folder at a commit: saved, or listed by one process of this machine."""
    path = _path("listing", hub.endpoint, of.repo, of.path, str(recursive), commit=commit)
    if (saved := _listing(path, of)) is not None:
        return saved
    with _one_thread, locked(path, f"the listing of hf://{of.root}") as slot:
        if (saved := _listing(path, of)) is not None:
            return saved
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
        about = {"repo": of.repo, "folder": of.path, "commit": commit}
        columns = {name: [getattr(file, name) for file in below] for name in _COLUMNS}
        slot.keep(lambda: _save(path, {**about, **columns}))
    return [file._replace(path=f"{of.root}/{file.path}") for file in below]


def _path(kind: str, *parts: str, commit: str = "") -> Path:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    return default_index_dir() / "hub" / f"{digest}{commit and '-' + commit}.{kind}.json"


def _fresh_lookup(path: Path, seconds: float, since: float | None = None) -> Lookup | None:
    """Return a saved commit that was looked up within the last seconds, or since a time."""
    saved, now = _loaded(path), time.time()
    if not saved:
        return None
    checked = saved["checked"]
    recent = now - seconds < checked <= now or (since is not None and since <= checked <= now)
    return Lookup(saved["commit"], saved["before"]) if recent else None


def _listing(path: Path, of: HubPath) -> list[Entry] | None:
    saved, root = _loaded(path), of.root
    try:
        columns = zip(*(saved[name] for name in _COLUMNS), strict=True)
        return [Entry(f"{root}/{file}", size, 0, etag) for file, size, etag in columns]
    except (KeyError, TypeError, ValueError):
        return None


def _save(path: Path, columns: dict[str, Any]) -> None:
    atomic_write(path, _dumped(columns))
    with suppress(OSError):
        others = [each for each in path.parent.glob(f"{path.name.partition('-')[0]}-*") if each != path]
        for old in sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)[_KEPT:]:
            old.unlink(missing_ok=True)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) and saved.get("version") == _VERSION else {}


def _dumped(contents: dict[str, Any]) -> bytes:
    return json.dumps({"version": _VERSION, **contents}, separators=(",", ":")).encode()
