"""Dataset repositories of the Hugging Face Hub: their addresses, and requests to it. Each request is one attempt.

Connections, tokens and errors are those of huggingface_hub. Its loops over pages and retries are not used: they know no
budget of ``Retry``, and send the token to any server that a page names as its next one. Here it is sent to the endpoint
alone, never to the servers that this redirects to. Messages contain no address of those, because their queries are
signatures.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from midepoch.errors import DataNotFoundError, FetchError, MidepochError
from midepoch.storage.address import Address
from midepoch.storage.damage import ThrottledError, requested_wait
from midepoch.storage.open_files import Entry, redact_logs

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT = 30.0
"""Seconds without a byte after which a request fails."""
_LONGEST_CHAIN = 5
_INVALID = "the server names an address without a valid host or port"
_PREFIX = "datasets/"
_SPECIAL = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)")
"""Revisions that contain slashes."""
_ALIASES = {"~parquet": "refs/convert/parquet", "~duckdb": "refs/convert/duckdb"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_NAME = re.compile(r"[*?\[]|\.(?:parquet|pq|parq|arrow|csv|tsv|jsonl?|ndjson|orc|gz|zst|tar)$", re.IGNORECASE)
_SEGMENT = re.compile(r"[\w.-]+")
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+(?:/[\w.-]+)?)"
    r"(?:/(?:tree|blob|viewer)(?:/([^/?#]+)(?:/([^?#]*))?)?)?/?(?:[?#].*)?"
)


class HubPath(NamedTuple):
    """A path in a repository. ``root`` is the part of the address before it, as given, or with ``@main``."""

    repo: str
    revision: str
    path: str
    root: str

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, so that its files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def given(self) -> str:
        """The address without its scheme. It has the same parts."""
        return f"{self.root}/{self.path}" if self.path else self.root


def refuse_web_page(address: str) -> None:
    """Raise ValueError for the address of a page of a dataset, as it is in a browser."""
    if (page := _PAGE.fullmatch(address)) is not None:
        at = f"@{page[2]}" if page[2] and "/viewer" not in address else ""
        path = f"/{page[3].rstrip('/')}" if page[3] and at else ""
        raise ValueError(
            f"{Address(address)} is a web page. Write hf://datasets/{page[1]}{at}{path} to read the files of this "
            "dataset."
        )


def is_hub_path(address: str) -> bool:
    """Return True for the address of a dataset repository."""
    scheme, mark, inner = address.partition("://")
    return mark != "" and scheme.lower() == "hf" and f"{inner}/".startswith(_PREFIX)


def parse_hub_path(address: str) -> HubPath:
    """Return the parts of an address without its scheme: ``datasets/ORG/NAME@REVISION/PATH``.

    Names without an organisation, like ``datasets/squad``, are accepted if no folder or revision follows, or if the
    next part is a glob or a file name.
    """
    inner = f"{address}/".removeprefix(_PREFIX).strip("/")
    before, at, after = inner.partition("@")
    if at and before.count("/") <= 1:
        special = _SPECIAL.match(after)
        given = special[0] if special is not None else after.partition("/")[0]
        repo, revision, path = before, unquote(given), after[len(given) :].strip("/")
        root = f"{_PREFIX}{repo}@{given}"
    else:
        parts = inner.split("/")
        size = 1 if len(parts) == 1 or _NO_NAME.search(parts[1]) else 2
        repo, revision, path = "/".join(parts[:size]), "main", "/".join(parts[size:])
        # Without an organisation, a folder in a listed path would be taken for the name.
        root = f"{_PREFIX}{repo}" if size == 2 else f"{_PREFIX}{repo}@main"
    if not all(map(_SEGMENT.fullmatch, repo.split("/"))) or not revision:
        raise DataNotFoundError(
            f"hf://{address} names no dataset repository. Write hf://datasets/ORG/NAME/PATH, or "
            "hf://datasets/ORG/NAME@REVISION/PATH."
        )
    return HubPath(repo, _ALIASES.get(revision, revision), path, root)


class Hub:
    """The Hub at an endpoint. ``token``: a token, None for the one of this machine, or False for none.

    ``offline``: True if no requests are sent; default: as the environment says. Pickles keep it, because a worker
    process may have an older environment: that of the server from which it was forked.
    """

    def __init__(self, endpoint: str, token: str | bool | None, offline: bool | None = None) -> None:
        try:  # all that is used: a fork while another thread imports it would wait for that import indefinitely
            from huggingface_hub import constants, errors, set_client_factory, utils  # noqa: F401  # as said above
        except ImportError:
            raise MidepochError(
                'hf:// needs huggingface_hub, version 1.3 or newer: `pip install "midepoch[hf]"`.'
            ) from None
        redact_logs()
        self.endpoint, self._token = endpoint.rstrip("/"), token.strip() if isinstance(token, str) else token
        set_now = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
        self.offline = (set_now or constants.HF_HUB_OFFLINE) if offline is None else offline

    def __reduce__(self) -> tuple[Any, ...]:
        return Hub, (self.endpoint, self._token, self.offline)

    def commit(self, of: HubPath) -> str:
        """Return the commit that a revision stands for."""
        answer = self._checked(of, self._get(f"{self._api(of)}/revision/{quote(of.revision, safe='')}?expand=sha"))
        try:
            commit = str(answer.json()["sha"])
        except (ValueError, KeyError, TypeError):
            commit = ""
        if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise ConnectionError(f"the answer of {self.endpoint} names no commit")
        return commit

    def page(self, of: HubPath, query: str) -> tuple[list[Entry], str]:
        """Return the files of one page of a listing, and the query of the next page. Empty for the last one."""
        folder = f"/{quote(of.path, safe='')}" if of.path else ""
        answer = self._checked(of, self._get(f"{self._api(of)}/tree/{of.revision}{folder}?{query}"), missing_ok=True)
        if answer is None:
            return [], ""
        try:
            files = [_file(each) for each in answer.json() if each["type"] == "file"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConnectionError(f"the listing of {self.endpoint} cannot be parsed") from None
        # Only the query: a mirror may name the server of the Hub, which must not get the token.
        return files, urlsplit(answer.links.get("next", {}).get("url", "")).query

    def read(self, of: HubPath, part: str) -> Any:
        """Return the answer with a part of a file (``bytes=0-9``).

        If the part is on another server, the ``next_request`` of the answer has its address.
        """
        url = f"{self.endpoint}/datasets/{of.repo}/resolve/{of.revision}/{quote(of.path)}"
        return self._checked(of, self._get(url, {"Range": part}, leave=True))

    def read_elsewhere(self, url: str, part: str) -> Any:
        """Return the answer with a part of a file from the server that the Hub redirected to, whatever its status."""
        answer = self._send(url, {"Range": part}, follow=True)
        _check_load("the server of the files", answer, None)
        return answer

    def _get(self, url: str, headers: dict[str, str] | None = None, *, leave: bool = False) -> Any:
        """Return the answer of the Hub, after redirects to itself, as for a repository with a new name.

        ``leave``: return a redirect to another server, instead of an error.
        """
        limited = (self.endpoint, "/api/" in url)  # the Hub counts requests for files separately
        wait = _busy.get(limited, 0.0) - time.monotonic()
        if wait > 0:  # another thread received this answer
            raise ThrottledError(f"{self.endpoint} accepts no requests for now", wait)
        token = self._token_now()
        sent = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        for _ in range(_LONGEST_CHAIN):
            answer = self._send(url, sent, follow=False)
            if answer.has_redirect_location:
                origin_of(answer.headers["location"], url)  # httpx guesses the host of an invalid one, or ignores it
            if answer.next_request is None:
                _check_load(self.endpoint, answer, limited)
                return answer
            url = str(answer.next_request.url)
            if origin_of(url) != origin_of(self.endpoint):
                if leave:
                    return answer
                raise ConnectionError(f"{self.endpoint} redirects a listing to another server, which is refused")
        raise ConnectionError(f"{self.endpoint} redirects in a loop")

    def _checked(self, of: HubPath, answer: Any, *, missing_ok: bool = False) -> Any:
        """Return an answer with contents, or a redirect. Raise the error that the Hub means by any other.

        ``missing_ok``: return None if there is no such folder.
        """
        from huggingface_hub import errors, hf_raise_for_status

        repo = f"the dataset {of.repo} of {self.endpoint}"
        sent = "authorization" in answer.request.headers
        token = "The token in use may not read it." if sent else "No token was found."
        try:
            hf_raise_for_status(answer)
            return answer
        except errors.GatedRepoError:
            raise FetchError(
                f"{repo} is gated. {token} Accept its conditions at {self.endpoint}/datasets/{of.repo}, and set "
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
            raise FetchError(f"{self.endpoint} does not accept the token: {text}. Check HF_TOKEN or storage_options.")
        if is_missing or status in (401, 404):
            raise DataNotFoundError(
                f"{repo} does not exist, or it is private. {token} Check its name, and set HF_TOKEN or pass "
                'storage_options={"token": …} for a private one.'
            )
        if status == 403:
            text = text or "HTTP status 403"
            raise FetchError(f"{repo} cannot be read: access is denied ({text}). Check the token.")
        raise ConnectionError(f"{self.endpoint} answered HTTP status {status} {text}".rstrip())

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

    def _api(self, of: HubPath) -> str:
        return f"{self.endpoint}/api/datasets/{of.repo}"

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
                f"the token for {self.endpoint} contains spaces, line breaks or other characters that no token has. "
                "Check HF_TOKEN or storage_options."
            )
        return token


class _Forks:
    """Forks wait until no request is under way, and requests until no fork is.

    huggingface_hub closes its connections in a forked process. That waits indefinitely if a thread of the parent was
    sending a request, because its lock is copied without it: with 8 busy threads, in a quarter of all forks.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all threads, as in a forked process, which has none of them."""
        self._changed, self._requests, self._forks = threading.Condition(), 0, 0

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
"""Time until which an endpoint accepts no requests of a kind."""


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


def _file(entry: Any) -> Entry:
    """Return a file of a listing. Its ETag is the hash of its contents."""
    stored = entry.get("lfs") or {}
    return Entry(entry["path"], int(stored.get("size", entry["size"])), 0, str(stored.get("oid") or entry["oid"]))
