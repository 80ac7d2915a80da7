"""Addresses of dataset repositories of the Hugging Face Hub."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from midepoch.errors import DataNotFoundError
from midepoch.storage.address import Address

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
    return re.match(r"(?i:hf)://datasets(?:/|$)", address) is not None


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
