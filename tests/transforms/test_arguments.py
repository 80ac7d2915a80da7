"""A state knows what its steps were given: another expression or other arguments are a mismatch."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import midepoch
from characters import ENCODABLE
from midepoch.errors import CheckpointMismatchError
from midepoch.sources.splits import HubRequest
from midepoch.transforms.arguments import arguments_of
from midepoch.transforms.map import Map


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def plus(row: dict[str, Any], by: Any = 1, **_: Any) -> dict[str, Any]:
    return {"more": row["id"]}


def above(row: dict[str, Any], by: int) -> bool:
    return bool(row["id"] > by)


ID = pc.field("id")
CHANGED: dict[str, tuple[Callable[[midepoch.Dataset], Any], Callable[[midepoch.Dataset], Any]]] = {
    "expression": (lambda ds: ds.filter(ID > 3), lambda ds: ds.filter(ID > 4)),
    "map": (lambda ds: ds.map(plus, fn_kwargs={"by": 1}), lambda ds: ds.map(plus, fn_kwargs={"by": 2})),
    "added": (lambda ds: ds.map(plus), lambda ds: ds.map(plus, fn_kwargs={"by": 2})),
    "filter": (lambda ds: ds.filter(above, fn_kwargs={"by": 1}), lambda ds: ds.filter(above, fn_kwargs={"by": 2})),
    "partial": (lambda ds: ds.map(functools.partial(plus, by=1)), lambda ds: ds.map(functools.partial(plus, by=2))),
    "behind a stage": (lambda ds: ds.batch(2).filter(ID > 3), lambda ds: ds.batch(2).filter(ID > 4)),
    "of a part": (
        lambda ds: midepoch.mix([ds.filter(ID > 3), ds.take(5)]),
        lambda ds: midepoch.mix([ds.filter(ID > 4), ds.take(5)]),
    ),
    "behind a mix": (
        lambda ds: midepoch.mix([ds, ds.take(5)]).filter(above, fn_kwargs={"by": 1}),
        lambda ds: midepoch.mix([ds, ds.take(5)]).filter(above, fn_kwargs={"by": 2}),
    ),
    "of a zip": (
        lambda ds: midepoch.zip([ds.filter(ID > 3)]),
        lambda ds: midepoch.zip([ds.filter(ID > 4)]),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_arguments_are_a_mismatch(ds: midepoch.Dataset, name: str) -> None:
    before, after = CHANGED[name]
    state = json.loads(json.dumps(before(ds).state_dict()))
    before(ds).load_state_dict(state)
    changed = after(ds)
    with pytest.raises(CheckpointMismatchError) as raised:
        changed.load_state_dict(state)
    assert raised.value.field == "arguments"
    changed.load_state_dict(state, allow=["arguments"])
    assert any("arguments: " in change for change in changed.changes)
    after(ds).load_state_dict(state, allow=["pipeline"])


@pytest.mark.parametrize("name", CHANGED)
def test_states_that_tell_of_no_arguments_are_accepted(ds: midepoch.Dataset, name: str) -> None:
    before, after = CHANGED[name]
    state = _without_arguments(before(ds).state_dict())
    after(ds).load_state_dict(state)


def _without_arguments(state: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in state.items() if key != "arguments"}
    if found.get("parts"):
        parts = [pair for pair in found["parts"] if pair[0] != "arguments"]
        found["parts"] = [
            [name, [[pair for pair in part if pair[0] != "arguments"] for part in value] if name == "parts" else value]
            for name, value in parts
        ]
    return found


VALUES: list[Any] = [
    None, True, 1, 1.0, "1", b"1", [1], [1, [2]], [[1], 2], {"a": 1}, {"a": 2}, {1, 2}, {1, 3}, np.arange(3), np.arange(4),
    np.arange(3, dtype=np.int32), np.float32(1), torch.arange(3), torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16),
    datetime.date(2020, 1, 1), re.compile("a"), re.compile("a", re.IGNORECASE), torch.float16,
]  # fmt: skip


def digest(**given: Any) -> str:
    return arguments_of(Map(plus, fn_kwargs=given))


def test_digests_tell_values_apart() -> None:
    found = [digest(by=value) for value in VALUES]
    assert len(set(found)) == len(VALUES)
    assert digest(a=1, b=2) == digest(b=2, a=1) != digest(a=2, b=1)
    assert digest(by=object()) == digest(by=object()) != digest(other=object())
    assert digest(by=[1, object()]) == digest(by=[1, Path("/x")]) != digest(by=[2, object()])


OTHER_PROCESS = """
import numpy as np
from midepoch.transforms.arguments import arguments_of
from midepoch.transforms.map import Map
print(arguments_of(Map(print, fn_kwargs={"set": {"x", "y", "z"}, "array": np.arange(3), "text": "a", "object": object()})))
"""


def test_digests_are_the_same_in_every_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", OTHER_PROCESS], capture_output=True, text=True, env=environment)
    given = {"set": {"z", "y", "x"}, "array": np.arange(3), "text": "a", "object": object()}
    assert done.stdout.strip() == digest(**given), done.stderr


def _plain_digest(text: str) -> str:
    """The digest of ``{"by": text}`` as it was before addresses had anything left out."""

    def packed(kind: str, data: bytes) -> bytes:
        return f"{kind} {len(data)} ".encode() + data

    both = packed("str", repr("by").encode()) + packed("str", repr(text).encode())
    return hashlib.blake2b(packed("dict", both), digest_size=6).hexdigest()


PLAIN_TEXTS = st.one_of(
    st.text(ENCODABLE, max_size=20),
    st.builds(
        "{}{}{}".format,
        st.sampled_from(
            ["http://h/", "https://h:80/", "s3://b/", "memory://", "gs://b/", "user:/", "a::b:/", "Basic "]
        ),
        st.lists(st.sampled_from(["a", "&b=1", "?b=1", ";key=2", "?key=en", "#x", "@c", "token", "/", " "])).map(
            "".join
        ),
        st.sampled_from(["", "p.parquet", "?region=x", "&", "?"]),
    ),
)


@settings(max_examples=200, deadline=None)
@given(PLAIN_TEXTS)
@example("A0://@")
def test_digests_of_texts_without_credentials_are_those_of_the_texts(text: str) -> None:
    assert digest(by=text) == _plain_digest(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://h/x?key=en", "https://h/x?key=de"),
        ("s3://b/day;key=1/p", "s3://b/day;key=2/p"),
        ("http://h/a&b=1", "http://h/a?b=1"),
        ("http://minio:9000/a/x@1.zip", "http://minio:9000/b/x@1.zip"),
        ("https://me@h/a", "https://you@h/a"),
    ],
)
def test_addresses_of_other_data_have_other_digests(one: str, other: str) -> None:
    assert digest(by=one) != digest(by=other)
    assert HubRequest("json", data_files=one).key != HubRequest("json", data_files=other).key


@pytest.mark.parametrize(
    "address",
    ["https://me:{}@h/a?b=1", "https://h/a?b=1&X-Amz-Signature={}", "s3://K:{}@b/a", "s3://b/a?secret_key={}&region=x"],
)
def test_other_credentials_leave_a_digest_as_it_is(address: str) -> None:
    assert digest(by=address.format("one")) == digest(by=address.format("other"))
    assert digest(by={"api_key": "one"}) == digest(by={"api_key": "other"})
