"""Requests to the Hugging Face Hub, or to a server that speaks its protocol. Each is one attempt.

The token is sent to the Hub alone, never to the servers that it redirects to. Messages contain no address of those,
because their queries are signatures.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from midepoch.errors import DataNotFoundError, FetchError
from midepoch.sources.http_client import Answer, client, origin_of, target_of
from midepoch.sources.hub_address import HubPath
from midepoch.sources.open_files import Entry
from midepoch.sources.throttling import ThrottledError, requested_wait

DEFAULT_ENDPOINT = "https://huggingface.co"
_REDIRECTS = (301, 302, 303, 307, 308)
_LONGEST_CHAIN = 5
_NEXT = re.compile(r'<([^>]+)>\s*;[^,]*rel="?next"?')
_TOKEN = re.compile(r"[!-~]*")
_YES = {"1", "on", "yes", "true"}


class Redirect(NamedTuple):
    """Address of the contents of a file on another server, and the hash of the contents, if it is known."""

    url: str
    etag: str


class Hub:
    """The Hub at an endpoint. ``token``: a token, None for the one of this machine, or False for none.

    ``offline``: True if no requests are sent; default: as the environment says. Pickles keep it, because a worker
    process may have an older environment: that of the server from which it was forked.
    """

    def __init__(self, endpoint: str, token: str | bool | None, offline: bool | None = None) -> None:
        self.endpoint, self._token = endpoint.rstrip("/"), token
        self.offline = _is_yes("HF_HUB_OFFLINE") if offline is None else offline

    def commit(self, of: HubPath) -> str:
        """Return the commit that a revision stands for."""
        url = f"{self._api(of)}/revision/{quote(of.revision, safe='')}?expand=sha"
        answer = self._checked(of, self._get(url))
        about = _parsed(answer)
        commit = about.get("sha") if isinstance(about, dict) else None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise ConnectionError(f"the answer of {self.endpoint} names no commit")
        return commit

    def first_page(self, of: HubPath, commit: str, recursive: bool) -> str:
        """Return the address of the first page of a listing."""
        folder = f"/{quote(of.path, safe='')}" if of.path else ""
        return f"{self._api(of)}/tree/{commit}{folder}?recursive={str(recursive).lower()}&expand=false"

    def page(self, of: HubPath, url: str) -> tuple[list[Entry], str]:
        """Return the files of one page of a listing, and the address of the next page. Empty for the last one."""
        answer = self._get(url)
        if answer.status == 404 and answer.headers.get("x-error-code") == "EntryNotFound":
            return [], ""
        entries = _parsed(self._checked(of, answer))
        following = _NEXT.search(answer.headers.get("link", ""))
        try:
            files = [_file(each) for each in entries if each["type"] == "file"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConnectionError(f"the listing of {self.endpoint} cannot be parsed") from None
        return files, self._own(target_of(url, following[1])) if following is not None else ""

    def read(self, of: HubPath, commit: str, part: str) -> Answer | Redirect:
        """Return a part of a file (``bytes=0-9``) at a commit, or where the Hub redirects to for it."""
        url = f"{self.endpoint}/datasets/{of.repo}/resolve/{commit}/{quote(of.path)}"
        answer = self._get(url, {"Range": part}, follow_etag=True)
        if answer.status in _REDIRECTS:
            return Redirect(answer.headers["location"], _plain(answer.headers.get("x-linked-etag", "")))
        return answer if answer.status == 416 else self._checked(of._replace(revision=commit), answer)

    def read_elsewhere(self, url: str, part: str) -> Answer:
        """Return a part of a file from the server that the Hub redirected to, whatever its status."""
        for _ in range(_LONGEST_CHAIN):
            answer = client.get(url, {"Range": part})
            if answer.status not in _REDIRECTS or "location" not in answer.headers:
                break
            url = target_of(url, answer.headers["location"])
        _check_load("the server of the files", answer, None)
        return answer

    def _get(self, url: str, headers: Mapping[str, str] | None = None, *, follow_etag: bool = False) -> Answer:
        """Return the answer of the Hub, after redirects to itself, as for a repository with a new name."""
        if self.offline:
            raise FetchError(
                f"no request is sent to {self.endpoint}, because HF_HUB_OFFLINE is set. Unset it, and open the dataset "
                "again."
            )
        limited = (self.endpoint, "/api/" in url)  # the Hub counts requests for files separately
        wait = _busy.get(limited, 0.0) - time.monotonic()
        if wait > 0:  # another thread received this answer
            raise ThrottledError(f"{self.endpoint} accepts no requests for now", wait)
        token = self._token_now()
        if token is not None and _TOKEN.fullmatch(token) is None:  # http.client would show it
            raise FetchError(
                f"the token for {self.endpoint} contains spaces, line breaks or other characters that no token has. "
                "Check HF_TOKEN or storage_options."
            )
        own = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        for _ in range(_LONGEST_CHAIN):
            answer = client.get(url, own)
            if answer.status not in _REDIRECTS:
                _check_load(self.endpoint, answer, limited)
                return answer
            target = target_of(url, answer.headers.get("location", ""))
            if origin_of(target) != origin_of(self.endpoint):
                if follow_etag:
                    return answer._replace(headers={**answer.headers, "location": target})
                raise ConnectionError(f"{self.endpoint} redirects a listing to another server, which is refused")
            url = target
        raise ConnectionError(f"{self.endpoint} redirects in a loop")

    def _checked(self, of: HubPath, answer: Answer) -> Answer:
        """Return an answer with contents. Raise the error that the Hub means by any other."""
        if answer.status in (200, 206):
            return answer
        code, text = answer.headers.get("x-error-code", ""), answer.headers.get("x-error-message", "")
        repo = f"the dataset {of.repo} of {self.endpoint}"
        token = "The token in use may not read it." if self._token_now() else "No token was found."
        if code == "GatedRepo":
            raise FetchError(
                f"{repo} is gated. {token} Accept its conditions at {self.endpoint}/datasets/{of.repo}, and set "
                'HF_TOKEN or pass storage_options={"token": …}.'
            )
        if code == "RevisionNotFound":
            raise DataNotFoundError(
                f"{repo} has no revision {of.revision!r}. Check the part after the @, and whether the history of the "
                "repository was rewritten."
            )
        if code == "EntryNotFound":
            raise DataNotFoundError(f"{repo} has no file {of.path!r} in revision {of.revision!r}. Check the path.")
        if answer.status == 401 and "Invalid" in text:
            raise FetchError(f"{self.endpoint} does not accept the token: {text}. Check HF_TOKEN or storage_options.")
        if code == "RepoNotFound" or answer.status in (401, 404):
            raise DataNotFoundError(
                f"{repo} does not exist, or it is private. {token} Check its name, and set HF_TOKEN or pass "
                'storage_options={"token": …} for a private one.'
            )
        if answer.status == 403:
            raise FetchError(f"{repo} cannot be read: access is denied ({text or 'HTTP status 403'}). Check the token.")
        raise ConnectionError(f"{self.endpoint} answered HTTP status {answer.status} {text}".rstrip())

    def _own(self, url: str) -> str:
        """Return an address of this endpoint. A mirror may name that of the Hub, which must not get the token."""
        if origin_of(url) == origin_of(self.endpoint):
            return url
        parts = urlsplit(url)
        return f"{self.endpoint}{parts.path}?{parts.query}"

    def _api(self, of: HubPath) -> str:
        return f"{self.endpoint}/api/datasets/{of.repo}"

    def _token_now(self) -> str | None:
        """Return the token to send. It is looked up for every request, because tokens of a login are refreshed."""
        if self._token is False:
            return None
        if isinstance(self._token, str):
            return self._token.strip()
        if self._token is None and _is_yes("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
            return None
        return machine_token()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hub, (self.endpoint, self._token, self.offline)


def _is_yes(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _YES


_busy: dict[tuple[str, bool], float] = {}
"""Time until which an endpoint accepts no requests of a kind."""


def _check_load(server: str, answer: Answer, limited: tuple[str, bool] | None) -> None:
    if answer.status not in (408, 429) and answer.status < 500:
        return
    seconds = requested_wait(answer.headers)
    if seconds and limited is not None:
        _busy[limited] = time.monotonic() + seconds
    raise ThrottledError(f"{server} answered HTTP status {answer.status}", seconds)


_token_lock = threading.Lock()


def _renew_lock() -> None:
    global _token_lock
    _token_lock = threading.Lock()  # a fork inherits it locked, by a thread that it does not have


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def machine_token() -> str | None:
    """Return the token of this machine: of the environment, or of ``hf auth login``."""
    given = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    renewed = os.environ.get("HF_OIDC_RESOURCE") or "google.colab" in sys.modules
    if given and not renewed:
        return given.strip() or None
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    file = Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"))).expanduser()
    try:
        saved = file.read_text().strip()
        stored = file.with_name("stored_tokens")
        renewed = renewed or (stored.is_file() and "refresh_token" in stored.read_text())
    except (OSError, UnicodeDecodeError):
        saved = ""
    if renewed:  # a token that expires: huggingface_hub knows how to renew it
        try:
            from huggingface_hub import get_token
        except ImportError:
            return given or saved or None
        with _token_lock:
            return get_token()
    return saved or None


def _file(entry: Mapping[str, Any]) -> Entry:
    """Return a file of a listing. Its ETag is the hash of its contents."""
    stored = entry.get("lfs") or {}
    return Entry(entry["path"], int(stored.get("size", entry["size"])), 0, str(stored.get("oid") or entry["oid"]))


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _parsed(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError:
        raise ConnectionError("the answer of the server is not JSON") from None
