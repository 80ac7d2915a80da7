"""Files of a listing."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One file of a listing. ``etag`` is empty if the store has none or does not list it."""

    path: str
    size: int
    mtime_ns: int
    etag: str = ""
