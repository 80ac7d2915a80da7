"""What is opened is what the address says, byte for byte, but for its credentials."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import midepoch
from midepoch import PipelineCheckpoint
from midepoch.sources.addresses import resolve
from s3 import Server, storage_options

SIGNS = st.text("ab1=&;#@:%+?*., é/", min_size=1, max_size=12)
WORDS = st.sampled_from(["key=1", "token", "&b=1", ";key=5", "#token=4", "?x=1", "&key=", ";v=2", "sig", "?key=3", "@"])
KEYS = st.lists(st.one_of(SIGNS, WORDS), min_size=1, max_size=5).map("".join)
OPTIONS = {"access_key": "KEY", "secret_key": "SECRET", "region": "us-east-1"}


@settings(max_examples=200, deadline=None)
@given(KEYS)
def test_a_key_without_credentials_is_opened_byte_for_byte(key: str) -> None:
    _, path = resolve(f"s3://bucket/{key}", OPTIONS)
    assert path == f"bucket/{key}".rstrip("/")
    _, path = resolve(f"s3://KEY:SECRET@bucket/{key}?region=us-east-1")
    assert path == f"bucket/{key}".rstrip("/")
    pytest.importorskip("fsspec")
    _, path = resolve(f"memory://bucket/{key}")
    assert path == f"/bucket/{key}".rstrip("/")


@pytest.mark.parametrize("query", ["secret_key=SECRET&foo=1", "b=1&secret_key=SECRET", "secret_key=SEC?RET"])
def test_a_credential_that_would_stay_in_the_path_is_refused(query: str) -> None:
    with pytest.raises(ValueError, match="use storage_options") as raised:
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
            saved = PipelineCheckpoint(f"s3://runs/{name}", storage_options=options)
            assert saved.latest_step() is None
            saved.save(extra={"a": number}, step=1)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(NAMES)
