"""Files of dataset repositories of the Hugging Face Hub, read in place by ranges of bytes.

A revision becomes a commit when the files are listed. From then on, everything is read at that commit, also by worker
processes: a push to the repository never mixes two versions.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from midepoch._internal.address import Address
from midepoch.errors import DataChangedError
from midepoch.sources.http_client import Answer, is_web_address
from midepoch.sources.hub_address import HubPath, parse_hub_path
from midepoch.sources.hub_api import DEFAULT_ENDPOINT, Hub
from midepoch.sources.hub_listings import FRESH_SECONDS, Persist, commit_of, files_below, saved_commit
from midepoch.sources.open_files import Entry, RangeFile

_log = logging.getLogger("midepoch")
_OPTIONS = ("token", "endpoint")
_REDIRECTS_KEPT = 4096
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class HubFiles:
    """File system of the dataset repositories at one endpoint. Pickles include its token, if one was given."""

    type_name = "hub"

    def __init__(self, hub: Hub, commits: Mapping[tuple[str, str], str] | None = None) -> None:
        self._hub, self._commits = hub, dict(commits or {})
        self._listings: dict[tuple[str, bool], list[Entry]] = {}
        self._redirects: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        self._named: tuple[list[Entry], dict[str, Entry]] | None = None
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
        if not is_web_address(endpoint) or "@" in endpoint:
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
        return self._listed(parse_hub_path(folder), persist, recursive=True)

    def stat(self, path: str, persist: Persist[Any]) -> Entry | None:
        """Return a file, or None. Its folder is listed: thousands of files in a list of paths cost one listing."""
        at = parse_hub_path(path)
        if not at.path:
            return None
        folder = at._replace(path=at.path.rpartition("/")[0])
        listed = self._listed(folder, persist, recursive=False)
        named = self._named
        if named is None or named[0] is not listed:
            self._named = named = listed, {file.path: file for file in listed}
        return named[1].get(path)

    def _listed(self, at: HubPath, persist: Persist[Any], *, recursive: bool) -> list[Entry]:
        key = at.given, recursive
        listed = self._listings.get(key)  # another thread may clear them
        if listed is None:
            revision = at.repo, at.revision
            if revision not in self._commits:
                found = commit_of(self._hub, at, persist, fresh_seconds=self._fresh_seconds)
                self._commits[revision] = found.commit
                if found.before:
                    self._before.append(f"hf://datasets/{at.repo}@{found.before}")
                _log.info("hf://%s is read at commit %s", at.root, found.commit)
            commit = self._commits[revision]
            listed = self._listings[key] = files_below(self._hub, at, commit, persist, recursive=recursive)
        return listed

    def open(self, file: Entry) -> RangeFile:
        """Return a file that is read by ranges. This costs no request, unless the commit is not known."""
        at = parse_hub_path(file.path)
        revision = at.repo, at.revision
        self._listings.clear()  # once files are read, they only take memory
        self._named = None
        if revision not in self._commits:  # of an index that is trusted without a listing
            self._commits[revision] = saved_commit(self._hub, at) or self._hub.commit(at)
        commit = self._commits[revision]
        return RangeFile(file.size, lambda start, stop: self._read(file, at, commit, start, stop))

    def _read(self, file: Entry, at: HubPath, commit: str, start: int, stop: int) -> bytes:
        part, key = f"bytes={start}-{stop - 1}", (at.repo, commit, at.path)
        url = self._redirects.get(key)
        if url is not None:
            answer = self._hub.read_elsewhere(url, part)
            if answer.status in (200, 206):
                return _contents(answer, file, start, stop)
        with _resolving[hash(key) % len(_resolving)]:  # threads that read one file ask for its address once
            other = self._redirects.get(key)
            if other is None or other == url:  # there is none, or it was refused: signed addresses expire
                found = self._hub.read(at, commit, part)
                if isinstance(found, Answer):
                    _check_etag(file, found.headers.get("etag", "").removeprefix("W/").strip('"'))
                    return _contents(found, file, start, stop)
                _check_etag(file, found.etag)
                self._redirects[key] = other = found.url
                while len(self._redirects) > _REDIRECTS_KEPT:
                    self._redirects.popitem(last=False)
        return _contents(self._hub.read_elsewhere(other, part), file, start, stop)


_resolving: list[threading.Lock] = []


def _make_locks() -> None:
    """Create the locks, and again in a forked process, which has no copy of the threads that hold them."""
    _resolving[:] = [threading.Lock() for _ in range(64)]


_make_locks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_locks)


def _check_etag(file: Entry, etag: str) -> None:
    comparable = len(etag) == len(file.etag)  # servers may name the hash of a pointer instead of that of the contents
    if comparable and _HASH.fullmatch(etag) and etag != file.etag:
        raise DataChangedError(
            f"hf://{file.path} has changed since it was indexed (its ETag differs). Open the dataset again with "
            "force_reindex=True to use the new contents, or name the commit of the old ones: hf://datasets/ORG/NAME"
            "@COMMIT. A state saved before belongs to the old contents."
        )


def _contents(answer: Answer, file: Entry, start: int, stop: int) -> bytes:
    """Return the requested bytes of an answer. Raise ConnectionError if the server sent others."""
    if answer.status == 200:  # a server that ignores ranges
        whole, body = len(answer.body), answer.body[start:stop]
        if whole != file.size and "text/html" in answer.headers.get("content-type", "").lower():
            raise ConnectionError("a web page was received in place of the file, as from the login page of a network")
        if whole < file.size and "content-length" not in answer.headers:  # possibly truncated
            raise ConnectionError(f"{whole} of {file.size} bytes were received, without a Content-Length")
    elif answer.status == 206 and (part := _RANGE.fullmatch(answer.headers.get("content-range", ""))):
        whole, body = file.size if part[3] == "*" else int(part[3]), answer.body if int(part[1]) == start else b""
    else:
        raise ConnectionError(f"the server of the files answered HTTP status {answer.status}")
    if whole != file.size:
        raise DataChangedError(
            f"hf://{file.path} has {whole} bytes and had {file.size} when it was indexed. Open the dataset again with "
            "force_reindex=True."
        )
    if len(body) != stop - start:
        raise ConnectionError(f"fewer than the {stop - start} bytes requested from byte {start} on were received")
    return body
