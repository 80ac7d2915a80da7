"""Dataset repositories of the Hugging Face Hub: their files, read in place by ranges of bytes.

Connections, tokens and errors are those of huggingface_hub. Its loops over pages and retries are not used: they know no
budget of ``Retry``, and send the token to any server that a page names as its next one. Here it is sent to the endpoint
alone, never to the servers that this redirects to. Messages contain no address of those, because their queries are
signatures.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from midepoch.errors import DataNotFoundError, FetchError, MidepochError
from midepoch.storage.address import as_address
from midepoch.storage.cache_files import CacheSlot, atomic_write, default_index_dir, read_or_make
from midepoch.storage.damage import ThrottledError, changed, requested_wait
from midepoch.storage.hub_paths import HubPath, parse_hub_path
from midepoch.storage.open_files import Entry, RangeFile, redact_logs

Persist = Callable[[Callable[[], Any]], Any]
"""Function that runs an action, and retries it."""

_log = logging.getLogger("midepoch")
DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT = 30.0
"""Seconds without a byte after which a request fails."""
FRESH_SECONDS = 30.0
_LONGEST_CHAIN = 5
_INVALID = "the server names an address without a valid host or port"
_OPTIONS = ("token", "endpoint")
_REDIRECTS_KEPT = 4096
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_VERSION = 2
_LISTINGS_KEPT = 3
"""Listings of other commits of the same folder that are kept."""


class Hub:
    """File system of the dataset repositories at an endpoint. Each request is one attempt.

    ``token``: a token, None for the one of this machine, or False for none. ``offline``: True if no requests are sent;
    default: as the environment says. Pickles keep both, and the commits: a worker process may have an older
    environment, that of the server from which it was forked.
    """

    type_name = "hub"
    survives_fork = True

    def __init__(
        self,
        endpoint: str,
        token: str | bool | None,
        offline: bool | None = None,
        commits: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        try:  # all that is used: a fork while another thread imports it would wait for that import indefinitely
            from huggingface_hub import constants, errors, set_client_factory, utils  # noqa: F401  # as said above
        except ImportError:
            raise MidepochError(
                'hf:// needs huggingface_hub, version 1.3 or newer: `pip install "midepoch[hf]"`.'
            ) from None
        redact_logs()
        self.place, self._token = endpoint.rstrip("/"), token.strip() if isinstance(token, str) else token
        set_now = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
        self.offline = (set_now or constants.HF_HUB_OFFLINE) if offline is None else offline
        self._commits = dict(commits or {})
        self._listings: dict[tuple[str, bool], dict[str, Entry]] = {}
        self._redirects: OrderedDict[HubPath, str] = OrderedDict()
        self._before: list[str] = []
        self._fresh_seconds = FRESH_SECONDS

    @staticmethod
    def of_options(options: Mapping[str, Any]) -> Hub:
        """Return the file system for ``storage_options``."""
        if unknown := sorted(set(options) - set(_OPTIONS)):
            raise ValueError(f"the options of hf://datasets are {' and '.join(_OPTIONS)}, got {', '.join(unknown)}")
        token = options.get("token")
        if token is not None and not isinstance(token, (str, bool)):
            raise ValueError(f"the token must be a str, True, False or None, got a {type(token).__name__}")
        endpoint = str(options.get("endpoint") or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT)
        with suppress(ConnectionError):
            if "@" not in endpoint and origin_of(endpoint):
                return Hub(endpoint, token)
        shown = as_address("endpoint", endpoint)
        raise ValueError(f"the endpoint must be like {DEFAULT_ENDPOINT}, without a user, got {shown}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Hub, (self.place, self._token, self.offline, self._commits)

    def refresh(self) -> None:
        """Look up revisions again, even if another process did so a moment ago."""
        self._fresh_seconds = 0.0

    @property
    def earlier(self) -> str:
        """Versions that were opened before on this machine, as addresses."""
        return ", ".join(self._before)

    def below(self, folder: str, persist: Persist) -> list[Entry]:
        """Return all files below a folder, at any depth."""
        return list(self._listed(parse_hub_path(folder), persist, recursive=True).values())

    def stat(self, path: str, persist: Persist) -> Entry | None:
        """Return a file, or None. Its folder is listed: thousands of files in a list of paths cost one listing."""
        at = parse_hub_path(path)
        folder = at._replace(path=at.path.rpartition("/")[0])
        return self._listed(folder, persist, recursive=False).get(path) if at.path else None

    def _listed(self, at: HubPath, persist: Persist, *, recursive: bool) -> dict[str, Entry]:
        key = at.given, recursive
        listed = self._listings.get(key)  # another thread may clear them
        if listed is None:
            commit = self._commits.get(at[:2]) or self._commit_now(at, persist)
            files = self._files_at(at._replace(revision=commit), persist, recursive)
            listed = self._listings[key] = {file.path: file for file in files}
        return listed

    def _commit_now(self, of: HubPath, persist: Persist) -> str:
        """Return the commit of a revision, as looked up by this machine within the last seconds."""
        started, seconds = time.time(), self._fresh_seconds
        if self.offline and seconds:
            seconds = math.inf

        def is_fresh(saved: dict[str, Any]) -> bool:  # or looked up by another process, meanwhile
            return bool(min(started, time.time() - seconds) <= saved["checked"] <= time.time())

        def look_up(saved: dict[str, Any]) -> dict[str, Any]:
            commit = persist(partial(self._commit, of))
            before = saved.get("before" if saved.get("commit") == commit else "commit", "")
            return {"commit": commit, "before": before, "checked": time.time()}

        found = {"commit": of.revision, "before": ""}
        if not of.is_pinned:
            found = _saved_or(self._lookup(of), f"the commit of hf://{of.root}", is_fresh, look_up)
        if found["before"]:
            self._before.append(f"hf://datasets/{of.repo}@{found['before']}")
        commit: str = found["commit"]
        self._commits[of[:2]] = commit
        _log.info("hf://%s is read at commit %s", of.root, commit)
        return commit

    def _commit(self, of: HubPath) -> str:
        """Return the commit that a revision stands for."""
        answer = self._get(of, f"/api/datasets/{of.repo}/revision/{quote(of.revision, safe='')}?expand=sha")
        try:
            commit = str(answer.json()["sha"])
        except (ValueError, KeyError, TypeError):
            commit = ""
        if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise ConnectionError(f"the answer of {self.place} names no commit")
        return commit

    def _files_at(self, of: HubPath, persist: Persist, recursive: bool) -> list[Entry]:
        """Return the files below a folder at a commit: saved, or listed by one process of this machine."""

        def look_up(_: dict[str, Any]) -> dict[str, Any]:
            found: list[Entry] = []
            query, seen = f"recursive={str(recursive).lower()}&expand=false", set[str]()
            while query not in seen:
                seen.add(query)
                files, query = persist(partial(self._page, of, query))  # a failure repeats one page
                found += files
                if not query:
                    below = (file for file in found if not of.path or file.path.startswith(f"{of.path}/"))
                    return {"files": [(file.path, file.size, file.etag) for file in below]}
            raise FetchError(
                f"{self.place} lists hf://{of.root} without end: a page names an earlier one. "
                "Check for a proxy that drops or caches queries."
            )

        path = _path("listing", self.place, of.repo, of.path, str(recursive), commit=of.revision)
        saved = _saved_or(path, f"the listing of hf://{of.root}", lambda saved: "files" in saved, look_up)
        return [Entry(f"{of.root}/{file}", size, 0, etag) for file, size, etag in saved["files"]]

    def _page(self, of: HubPath, query: str) -> tuple[list[Entry], str]:
        """Return the files of one page of a listing, and the query of the next page. Empty for the last one."""
        folder = f"/{quote(of.path, safe='')}" if of.path else ""
        answer = self._get(of, f"/api/datasets/{of.repo}/tree/{of.revision}{folder}?{query}", missing_ok=True)
        if answer is None:
            return [], ""
        try:
            files = [_entry(each) for each in answer.json() if each["type"] == "file"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConnectionError(f"the listing of {self.place} cannot be parsed") from None
        # Only the query: a mirror may name the server of the Hub, which must not get the token.
        following = answer.links.get("next", {}).get("url", "")
        query = following.partition("?")[2]
        if following and not query:
            raise ConnectionError(f"the listing of {self.place} names a next page without a query")
        return files, query

    def _lookup(self, of: HubPath) -> Path:
        return _path("revision", self.place, of.repo, of.revision)

    def open(self, file: Entry) -> RangeFile:
        """Return a file that is read by ranges. This costs no request, unless the commit is not known."""
        at = parse_hub_path(file.path)
        self._listings.clear()  # once files are read, they only take memory
        commit = self._commits.get(at[:2])
        if commit is None:  # of an index that is trusted without a listing
            saved = at.revision if at.is_pinned else _loaded(self._lookup(at)).get("commit")
            commit = self._commits[at[:2]] = saved or self._commit(at)
        at = at._replace(revision=commit)
        return RangeFile(file.size, lambda start, stop: self._read(file, at, start, stop))

    def _read(self, file: Entry, at: HubPath, start: int, stop: int) -> bytes:
        part = f"bytes={start}-{stop - 1}"
        url = self._redirects.get(at)
        if url is not None:
            answer = self._read_elsewhere(url, part)
            if answer.status_code in (200, 206):
                return _contents(answer, file, start, stop)
        with _forks.resolving[hash(at) % len(_forks.resolving)]:  # threads that read one file ask for its address once
            other = self._redirects.get(at)
            if other is None or other == url:  # there is none, or it was refused: signed addresses expire
                found = self._get(at, f"/datasets/{at.repo}/resolve/{at.revision}/{quote(at.path)}", part)
                elsewhere = found.next_request
                _check_etag(file, found.headers.get("etag" if elsewhere is None else "x-linked-etag", ""))
                if elsewhere is None:
                    return _contents(found, file, start, stop)
                self._redirects[at] = other = str(elsewhere.url)
                while len(self._redirects) > _REDIRECTS_KEPT:
                    self._redirects.popitem(last=False)
        return _contents(self._read_elsewhere(other, part), file, start, stop)

    def _read_elsewhere(self, url: str, part: str) -> Any:
        """Return the answer with a part of a file from the server that the Hub redirected to, whatever its status."""
        answer = self._send(url, {"Range": part}, follow=True)
        _check_load("the server of the files", answer, None)
        return answer

    def _get(self, of: HubPath, path: str, part: str = "", *, missing_ok: bool = False) -> Any:
        """Return the answer of the Hub, after redirects to itself, as for a repository with a new name.

        ``part``: of a file, as ``bytes=0-9``. If it is on another server, the ``next_request`` of the answer has its
        address. ``missing_ok``: return None if there is no such folder.
        """
        url = f"{self.place}{path}"
        limited = (self.place, bool(part))  # the Hub counts requests for files separately
        wait = _busy.get(limited, 0.0) - time.monotonic()
        if wait > 0:  # another thread received this answer
            raise ThrottledError(f"{self.place} accepts no requests for now", wait)
        token, headers = self._token_now(), {"Range": part} if part else {}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        for _ in range(_LONGEST_CHAIN):
            answer = self._send(url, headers, follow=False)
            if answer.has_redirect_location:
                origin_of(answer.headers["location"], url)  # httpx guesses the host of an invalid one, or ignores it
            if answer.next_request is None:
                _check_load(self.place, answer, limited)
                return self._checked(of, answer, missing_ok)
            url = str(answer.next_request.url)
            if origin_of(url) != origin_of(self.place):
                if part:
                    return answer
                raise ConnectionError(f"{self.place} redirects a listing to another server, which is refused")
        raise ConnectionError(f"{self.place} redirects in a loop")

    def _checked(self, of: HubPath, answer: Any, missing_ok: bool) -> Any:
        """Return an answer with contents. Raise the error that the Hub means by any other."""
        from huggingface_hub import errors, hf_raise_for_status

        repo = f"the dataset {of.repo} of {self.place}"
        sent = "authorization" in answer.request.headers
        token = "The token in use may not read it." if sent else "No token was found."
        try:
            hf_raise_for_status(answer)
            return answer
        except errors.GatedRepoError:
            raise FetchError(
                f"{repo} is gated. {token} Accept its conditions at {self.place}/datasets/{of.repo}, and set "
                'HF_TOKEN or pass storage_options={"token": …}.'
            ) from None
        except errors.RevisionNotFoundError:
            raise DataNotFoundError(
                f"{repo} has no revision {of.revision!r}. Check the part after the @, and whether the history of the "
                "repository was rewritten."
            ) from None
        except errors.EntryNotFoundError:
            if missing_ok:
                return None
            raise DataNotFoundError(
                f"{repo} has no file {of.path!r} in revision {of.revision!r}. Check the path."
            ) from None
        except errors.HfHubHTTPError as problem:
            is_missing = isinstance(problem, errors.RepositoryNotFoundError)
            status, text = answer.status_code, problem.server_message or ""
        if status == 401 and "Invalid" in text:
            raise FetchError(f"{self.place} does not accept the token: {text}. Check HF_TOKEN or storage_options.")
        if is_missing or status in (401, 404):
            raise DataNotFoundError(
                f"{repo} does not exist, or it is private. {token} Check its name, and set HF_TOKEN or pass "
                'storage_options={"token": …} for a private one.'
            )
        if status == 403:
            text = text or "HTTP status 403"
            raise FetchError(f"{repo} cannot be read: access is denied ({text}). Check the token.")
        raise ConnectionError(f"{self.place} answered HTTP status {status} {text}".rstrip())

    def _send(self, url: str, headers: dict[str, str], *, follow: bool) -> Any:
        """Return the answer to a request. Raise ConnectionError or TimeoutError, without paths and queries."""
        from huggingface_hub import get_session
        from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

        host, sent = origin_of(url)[1], {"User-Agent": "midepoch", "Accept-Encoding": "identity", **headers}
        try:
            if self.offline:
                raise OfflineModeIsEnabled
            with _forks.wait():
                return get_session().get(url, headers=sent, timeout=TIMEOUT, follow_redirects=follow)
        except OfflineModeIsEnabled:
            failure: Exception = FetchError(
                f"no request is sent to {host}, because HF_HUB_OFFLINE is set. Unset it, and open the dataset again."
            )
        except HTTPError as problem:  # of httpx or httpx2, depending on the version
            kind = type(problem).__name__
            if type(problem.__context__).__name__ == "InvalidURL":  # it shows the address
                failure = ConnectionError(_INVALID)
            elif kind.endswith("Timeout"):
                failure = TimeoutError(f"{host} timed out after {TIMEOUT:.0f} s")
            else:
                failure = ConnectionError(f"the connection to {host} failed ({kind}: {problem})")
        raise failure

    def _token_now(self) -> str | None:
        """Return the token to send. It is looked up for every request, because tokens of a login are refreshed."""
        from huggingface_hub.errors import LocalTokenNotFoundError
        from huggingface_hub.utils import get_token_to_send

        try:
            with _forks.wait():
                token: str | None = get_token_to_send(self._token)
        except LocalTokenNotFoundError:
            raise FetchError(
                "the token True stands for the one of this machine, which has none. Set HF_TOKEN, or log in with "
                "`hf auth login`."
            ) from None
        if token is not None and re.fullmatch(r"[!-~]*", token) is None:  # the error of a request would show it
            raise FetchError(
                f"the token for {self.place} contains spaces, line breaks or other characters that no token has. "
                "Check HF_TOKEN or storage_options."
            )
        return token


class _Forks:
    """Forks wait until no request is under way, and requests until no fork is.

    huggingface_hub closes its connections in a forked process. That waits indefinitely if a thread of the parent was
    sending a request, because its lock is copied without it: with 8 busy threads, in a quarter of all forks.

    It also has the other locks that a forked process needs again: ``resolving``, for threads that read one file, and
    ``listing``.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all threads, as in a forked process, which has none of them."""
        self._changed, self._requests, self._forks = threading.Condition(), 0, 0
        self.resolving = [threading.Lock() for _ in range(64)]
        self.listing = threading.RLock()  # lock files do not exclude threads

    @contextmanager
    def wait(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    def begin(self) -> None:
        self._changed.acquire()
        self._forks += 1
        self._changed.wait_for(lambda: not self._requests, TIMEOUT)

    def end(self) -> None:
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()


_forks = _Forks()
os.register_at_fork(before=_forks.begin, after_in_parent=_forks.end, after_in_child=_forks.clear)
_busy: dict[tuple[str, bool], float] = {}
"""Time until which an endpoint accepts no requests of a kind. True: for files."""


def _check_load(server: str, answer: Any, limited: tuple[str, bool] | None) -> None:
    if answer.status_code not in (408, 429) and answer.status_code < 500:
        return
    seconds = requested_wait(answer.headers)
    if seconds and limited is not None:
        _busy[limited] = time.monotonic() + seconds
    raise ThrottledError(f"{server} answered HTTP status {answer.status_code}", seconds)


def origin_of(url: str, base: str = "") -> tuple[str, str, int]:
    """Return scheme, host and port of an address. Raise ConnectionError if it has no valid ones."""
    try:
        parts = urlsplit(urljoin(base, url))
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        port = 0
    if not port or not parts.hostname:
        raise ConnectionError(_INVALID)
    return parts.scheme, parts.hostname.lower(), port


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


def _entry(entry: Any) -> Entry:
    """Return a file of a listing. Its ETag is the hash of its contents."""
    stored = entry.get("lfs") or {}
    return Entry(entry["path"], int(stored.get("size", entry["size"])), 0, str(stored.get("oid") or entry["oid"]))


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

    with _forks.listing:
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
