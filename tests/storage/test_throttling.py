from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime, formatdate

import pytest

from midepoch.errors import FetchError
from midepoch.storage.damage import ThrottledError, requested_wait, retry_after
from midepoch.storage.stores import Retry, Store


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "1e999"}, None),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"Retry-After": "Wed, 99 Oct 2015"}, None),
        ({"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}, 55.0),
        ({"RateLimit": '"api";r=10;t=55'}, None),
        ({"RateLimit": '"api"; r = 0 ; t = 5', "Retry-After": "9"}, 9.0),
    ],
)
def test_seconds_that_a_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert requested_wait(headers) == seconds


def test_a_date_is_seconds_from_now() -> None:
    later = datetime.now(timezone.utc) + timedelta(seconds=100)
    for date in (format_datetime(later, usegmt=True), formatdate(time.time() + 100, usegmt=True)):
        seconds = requested_wait({"Retry-After": date})
        assert seconds is not None and 90 < seconds <= 100


def test_errors_of_other_packages_have_headers_too() -> None:
    """As aiohttp's errors (``headers``) and those of requests and httpx (``response.headers``)."""
    of_aiohttp, of_httpx = OSError("429"), OSError("429")
    of_aiohttp.headers = {"Retry-After": "3"}  # type: ignore[attr-defined]
    of_httpx.response = type("Response", (), {"headers": {"Retry-After": "4"}})()  # type: ignore[attr-defined]
    assert (retry_after(of_aiohttp), retry_after(of_httpx), retry_after(OSError("x"))) == (3.0, 4.0, None)


def test_a_wait_is_never_shorter_than_asked_and_spread() -> None:
    retry = Retry(budget=120)
    waits = [retry.pause_asked(50, 0) for _ in range(200)]
    assert all(wait is not None and 50 <= wait <= 55 for wait in waits)
    assert len(set(waits)) > 100
    assert retry.pause_asked(119.9, 0) == pytest.approx(119.95, abs=0.051)
    assert retry.pause_asked(50, 71) is None


def test_a_wait_longer_than_the_budget_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.fs as fs

    store = Store(fs.SubTreeFileSystem("/", fs.LocalFileSystem()), retry=Retry(budget=60))
    waits: list[float] = []
    monkeypatch.setattr("midepoch.storage.stores.time.sleep", waits.append)
    problems = iter([ThrottledError("HTTP status 503", 2.0), ThrottledError("HTTP status 429", 300.0)])

    def ask() -> None:
        raise next(problems)

    with pytest.raises(FetchError, match=r"asks to wait 300 s, but retries may take 60 s.*Retry\(budget="):
        store.persist("bucket/a", "read", ask)
    assert len(waits) == 1 and 2.0 <= waits[0] <= 3.0
