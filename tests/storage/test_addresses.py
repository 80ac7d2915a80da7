"""What is opened is what the address says, byte for byte, but for its credentials."""

from __future__ import annotations

import io
import socket
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import midepoch
from midepoch.checkpoint.remote import Objects
from midepoch.errors import DataNotFoundError, FetchError
from midepoch.storage import addresses
from midepoch.storage.addresses import resolve
from midepoch.storage.stores import Retry
from s3 import Server, storage_options
from web import WebServer

SIGNS = st.text("ab1=&;#@:%+?*., é/", min_size=1, max_size=12)
WORDS = st.sampled_from(["key=1", "token", "&b=1", ";key=5", "#token=4", "?x=1", "&key=", ";v=2", "sig", "?key=3", "@"])
KEYS = st.lists(st.one_of(SIGNS, WORDS), min_size=1, max_size=5).map("".join)
OPTIONS = {"access_key": "KEY", "secret_key": "SECRET", "region": "us-east-1"}


@settings(max_examples=100, deadline=None)
@given(KEYS)
def test_a_key_is_opened_byte_for_byte(key: str) -> None:
    """Or refused, where it is like a query with a credential in it."""
    try:
        _, path = resolve(f"s3://bucket/{key}", OPTIONS)
    except ValueError as problem:
        assume("Use storage_options" not in str(problem) or "?" not in key or "token" not in key)
        raise
    assert path == f"bucket/{key}".rstrip("/")
    _, path = resolve(f"s3://KEY:SECRET@bucket/{key}?region=us-east-1")
    assert path == f"bucket/{key}".rstrip("/")
    if "::" not in key and "://" not in key:  # which make a chain, or another address
        _, path = resolve(f"memory://bucket/{key}")
        assert path == f"/bucket/{key}".rstrip("/")


@pytest.mark.parametrize("query", ["secret_key=SECRET&foo=1", "b=1&secret_key=SECRET", "secret_key=SEC?RET"])
def test_a_credential_that_would_stay_in_the_path_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match="Use storage_options") as raised:
        resolve(f"s3://bucket/a.parquet?{query}")
    assert "SEC" not in str(raised.value)


NAMES = ["a&b=1", "x;key=5", "day#token=4", "q&key=7", "run;v=2"]


def test_keys_with_signs_of_queries_name_data_and_checkpoints_of_their_own(tmp_path: Path) -> None:
    for folder in ("lake/x", "lake/axb=1", "lake/day", "lake/q", "lake/run"):
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(pa.table({"id": [99]}), tmp_path / folder / "p.parquet")
    for number, name in enumerate(NAMES):
        (tmp_path / "lake" / name).mkdir()
        pq.write_table(pa.table({"id": [number]}), tmp_path / "lake" / name / "p.parquet")
    (tmp_path / "runs").mkdir()
    with Server(tmp_path) as server:
        options = storage_options(server.endpoint)
        for number, name in enumerate(NAMES):
            for address in (f"s3://lake/{name}", f"s3://lake/{name}/p.parquet"):
                assert [row["id"] for row in midepoch.from_files(address, storage_options=options)] == [number]
            checkpoints = Objects(f"s3://runs/{name}", options)
            assert checkpoints.list() == {}
            checkpoints.put("a", b"1")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(NAMES)


@pytest.fixture
def web() -> Iterator[WebServer]:
    pytest.importorskip("aiohttp")
    table, archive = io.BytesIO(), io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2, 3]}), table)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.parquet", table.getvalue())
    files = {"a.parquet": table.getvalue(), "a;v=1.parquet": table.getvalue(), "b.zip": archive.getvalue()}
    with WebServer(files, "me", "password", "signature") as server:
        yield server


def test_credentials_of_a_web_address_are_used_beside_given_options(web: WebServer) -> None:
    user, given = f"http://me:password@{web.host}", {"client_kwargs": {"trust_env": False, "headers": {"x": "1"}}}
    read = partial(midepoch.from_files, force_reindex=True, retry=Retry(attempts=1))
    for address, options in (
        (f"{user}/a.parquet", given),
        (f"{user}/a.parquet", {"http": given}),
        (f"zip://a.parquet::{user}/b.zip", {"http": given}),
        (f"http://{web.host}/a.parquet?sig=signature", {"params": {"x": "1"}}),
        (f"{user}/a;v=1.parquet", None),
    ):
        assert len(read(address, storage_options=options)) == 3


def test_a_web_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_REQUEST", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/a.parquet"
        with pytest.raises(FetchError, match=r"1 attempt in .*[Tt]imeout.*Check the address and the network"):
            midepoch.from_files(address, retry=Retry(attempts=1))


def test_missing_files_of_a_web_server_are_named_as_such(web: WebServer) -> None:
    user, read = f"http://me:password@{web.host}", partial(midepoch.from_files, retry=Retry(attempts=1))
    for address in (f"{user}/no.parquet", f"zip://no.parquet::{user}/b.zip"):
        with pytest.raises(DataNotFoundError, match="does not exist.*Check the address"):
            read(address)
    with pytest.raises(DataNotFoundError, match=r"/no\.zip does not exist"):
        read(f"zip://a.parquet::{user}/no.zip")


@pytest.mark.parametrize(
    ("url", "inner"),
    [
        ("s3://b/data#v2.parquet", "b/data#v2.parquet"),
        ("s3://b/run#1/", "b/run#1"),
        ("s3://b/a?b=c.parquet", "b/a?b=c.parquet"),
        ("s3://b/me@home/x.parquet", "b/me@home/x.parquet"),
        ("s3://key:secret@b/x?endpoint_override=h:1&scheme=http", "b/x"),
    ],
)
def test_keys_may_hold_anything(url: str, inner: str) -> None:
    assert resolve(url)[1] == inner


def test_secrets_of_a_refused_address_are_not_shown(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    for paths in (
        [tmp_path / "a.parquet", "s3://AKIA1234:TOPSECRET77@b/x.parquet"],
        "s3://AKIA1234:TOP/SECRET77@b/x.parquet",
    ):
        with pytest.raises(ValueError) as raised:
            midepoch.from_files(paths)  # type: ignore[arg-type]
        assert "SECRET77" not in str(raised.value)


def test_a_query_that_is_no_signature_is_refused_and_not_shown() -> None:
    for url in ("https://h/x.parquet?id=TOPSECRET77", "zip://a::https://me:TOPSECRET77@h/x.zip?key=TOPSECRET77"):
        with pytest.raises(midepoch.MidepochError, match="has a query that is not a signature.*storage_options") as e:
            midepoch.from_files(url)
        assert "TOPSECRET77" not in str(e.value)
