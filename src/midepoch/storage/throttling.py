"""Waits that a server asks for: ``Retry-After`` in seconds or as a date, and the ``RateLimit`` header of the Hub."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

_LIMIT = re.compile(r"\br\s*=\s*0\s*(?:;.*?)?;\s*t\s*=\s*(\d+)")
"""``"api";r=0;t=55``: no requests are left, and the window ends in 55 seconds."""


class ThrottledError(ConnectionError):
    """A server refused a request for now. ``retry_after``: the seconds it asked to wait, if it did."""

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


def requested_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the headers of an answer ask to wait, or None."""
    named = {str(name).lower(): str(value).strip() for name, value in headers.items()}
    if (seconds := _seconds(named.get("retry-after", ""))) is not None:
        return seconds
    limit = _LIMIT.search(named.get("ratelimit", ""))
    return float(limit[1]) if limit is not None else None


def _seconds(value: str) -> float | None:
    if not value:
        return None
    from email.utils import parsedate_to_datetime  # takes 5 ms, which opening local files does not need

    try:
        seconds = float(value) if value[0].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def retry_after(problem: BaseException) -> float | None:
    """Return the seconds that a server asked to wait, for an error of this or of another package, or None."""
    if isinstance(problem, ThrottledError):
        return problem.retry_after
    headers = getattr(problem, "headers", None) or getattr(getattr(problem, "response", None), "headers", None)
    return requested_wait(headers) if isinstance(headers, Mapping) else None
