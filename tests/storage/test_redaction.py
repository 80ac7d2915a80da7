from __future__ import annotations

import pickle
from base64 import b64encode
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from characters import ENCODABLE
from midepoch.storage.address import Address, Secrets, is_secret, redacted
from midepoch.storage.addresses import s3_options


@given(st.sampled_from(["s3", "https", "ftp", "gs"]), st.text(ENCODABLE, min_size=1), st.text(ENCODABLE))
def test_an_address_reads_the_same_whatever_its_credentials_are(scheme: str, user: str, password: str) -> None:
    userinfo = f"{quote(user, safe='')}:{quote(password, safe='')}"
    signature = f"X-Amz-Signature={quote(password, safe='')}&X-Amz-Credential={quote(user, safe='')}&Expires=60"
    plain = f"{scheme}://host/folder/a@b.parquet"
    for address in (
        plain.replace("://", f"://{userinfo}@"),
        f"{plain}?{signature}",
        f"{plain}?sv=1&sig={quote(user)}0",
    ):
        assert str(Address(address)) == redacted(plain) == plain
        assert repr(Address(f"zip://x::{address}")) == repr(f"zip://x::{plain}")
        assert redacted(f"GET '{address}', failed") == f"GET '{plain}', failed"


@given(st.text(ENCODABLE, min_size=4).filter(lambda value: value.strip("* ")), st.text(ENCODABLE))
def test_a_secret_is_removed_in_every_form(secret: str, around: str) -> None:
    for secrets in (
        Secrets.of({"client_kwargs": {"headers": [secret]}}),
        Secrets.of(Address(f"s3://{quote(secret, safe='')}:{quote(secret, safe='')}@bucket")),
        Secrets.of(Address(f"https://host/a?token={quote(secret, safe='')}")),
    ):
        for form in (secret, quote(secret), quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]):
            assert form not in secrets.clean(f"{around} {form}").replace("***", "\0")


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/key=3/token=4/part-?.parquet",
        "s3://bucket/mail@host/a.parquet",
        "http://127.0.0.1:8080/a@b?id=3",
        "http://localhost:8080/a@b",
        "http://[::1]:80/a",
        "github://org:repo@main/a.csv",
        "abfs://container@account.dfs.core.windows.net/a",
        "hf://datasets/user/data@main/a.parquet",
        "file:///home/me@work/a?sig=3",
        "/home/me@work/a.parquet",
        "C:/data/a@b",
        "memory://a@b/x",
        "user:/mail@x",
        "dbfs:/mnt/me@corp.com/x",
        "s3://bucket/x;key=5/p.parquet",
        "s3://arn:aws:s3:us-west-2:123:accesspoint/n/a@b",
        "http://host/a;v=1.parquet",
    ],
)
def test_names_that_are_no_credentials_stay(address: str) -> None:
    assert str(Address(address)) == redacted(address) == address


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://KEY:SEC/RET@bucket/run", "s3://bucket/run"),
        ("s3:/KEY:SECRET@bucket/run", "s3:/bucket/run"),
        ("https://TOKEN@host/a?id=3&access_token=SECRET#b", "https://host/a?id=3#b"),
        ("https://host/a?id=3&SIG=SECRET&n=4", "https://host/a?id=3&n=4"),
        ("s3://bucket?endpoint_override=http://me:SECRET@host:9000", "s3://bucket?endpoint_override=http://host:9000"),
        ("s3://bucket/wh?t?secret_key=SECRET", "s3://bucket/wh?t"),
        ("s3://KEY:SEC'RET@bucket/run", "s3://bucket/run"),
        ("https://user:12345/SECRET@host/run", "https://***@host/run"),
        ("ftp://user:12345/SECRET@host/run", "ftp://***@host/run"),
        ("https://host/a?id=1&SECRET", "https://host/a?id=1"),
        ("https://host/a#b&access_token=SECRET", "https://host/a#b"),
        ("//me:SECRET@host/a", "//host/a"),
        ("https:me:SECRET@host/a", "https:host/a"),
        ("s3://bucket/a?b=1&secret_key=SEC?RET", "s3://bucket/a?b=1"),
        ("simplecache::zip://a::http://me:SECRET@host/b.zip", "simplecache::zip://a::http://host/b.zip"),
    ],
)
def test_only_the_credentials_of_an_address_are_left_out(address: str, shown: str) -> None:
    assert str(Address(address)) == shown
    assert Address(address).raw == pickle.loads(pickle.dumps(Address(address))).raw == address


def test_credentials_are_known_by_their_shape_and_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "given/in+the@environment")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    text = f"hf_{'a1' * 17} AKIA{'A1' * 8} Bearer abc.def.ghi given%2Fin%2Bthe%40environment eu-central-1"
    assert Secrets().clean(text) == "*** *** Bearer *** *** eu-central-1"


def test_the_values_of_public_options_stay() -> None:
    secrets = Secrets.of({"region": "eu-central-1", "endpoint_override": "http://me:SECRET@host", "key": "SECRET2"})
    assert secrets.clean("eu-central-1 SECRET2 at http://host as SECRET") == "eu-central-1 *** at http://host as ***"


def test_options_under_names_of_other_libraries_are_those_of_pyarrow() -> None:
    """Those that are no credentials stay in messages."""
    given = {"aws_endpoint_url": "http://host:90", "aws_default_region": "eu-central-1", "aws_skip_signature": "true"}
    found = s3_options({**given, "access_key_id": "KEYNAME", "secret_access_key": "SECRET"})
    assert (found["endpoint_override"], found["scheme"], found["region"]) == ("host:90", "http", "eu-central-1")
    assert (found["access_key"], found["secret_key"], found["anonymous"]) == ("KEYNAME", "SECRET", True)
    assert s3_options({"anonymous": "false"})["anonymous"] is False
    text = "http://host:90 in eu-central-1: true"
    assert Secrets.of({**given, "secret_access_key": "SECRET"}).clean(f"{text} SECRET") == f"{text} ***"


def test_an_argument_is_secret_by_its_name() -> None:
    assert all(
        map(is_secret, ("api_key", "HF-TOKEN".replace("TOKEN", "AUTH-TOKEN"), "db_password", "aws_secret_access_key"))
    )
    assert not any(map(is_secret, ("pad_token", "token", "key", "columns", "max_tokens")))


def test_only_a_user_and_a_password_follow_basic() -> None:
    for text in ("Basic Authentication failed", "Basic training of models"):
        assert redacted(text) == text
    for user in ("user:pw", "a:b", "me:SECRET123"):
        assert (
            redacted(f"Authorization: Basic {b64encode(user.encode()).decode()}, sent")
            == "Authorization: Basic ***, sent"
        )
