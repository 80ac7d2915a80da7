"""Folders of images, text and arrays in an object store: the rows of the local folder, with few requests."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import midepoch
from media_files import raw, write
from midepoch.errors import DataChangedError, DataNotFoundError
from midepoch.sources.formats import media
from midepoch.storage.stores import Retry
from midepoch.testing import assert_resumes_exactly
from proxy import Fault, Proxy, reads
from s3 import Server, storage_options

NAMES = [f"{'ab'[i % 2]}/{i:02}.png" for i in range(14)]
Open = Callable[..., midepoch.Dataset]


@pytest.fixture
def bucket(s3_server: Server) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="media-", dir=s3_server.folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def opened(proxy: Proxy, bucket: Path) -> Open:
    def made(path: str = "", **arguments: Any) -> midepoch.Dataset:
        retry = Retry(attempts=4, first_pause=0.01, longest_pause=0.05, budget=30)
        options = storage_options(proxy.endpoint)
        return midepoch.from_files(f"s3://{bucket.name}/{path}", storage_options=options, retry=retry, **arguments)

    return made


def test_images_are_those_of_the_local_folder(
    bucket: Path, opened: Open, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "BLOCK_FILES", 5)
    write(bucket / "photos", NAMES)
    ds = opened("photos")
    assert raw(ds) == raw(midepoch.from_files(bucket / "photos"))
    assert ds.pipeline.source.fingerprint == midepoch.from_files(bucket / "photos").pipeline.source.fingerprint
    proxy.reset()
    labels = opened("photos/", columns=["label"])
    assert [row["label"] for row in labels] == [0] * 7 + [1] * 7
    assert sum(reads(request.method, request.path) for request in proxy.requests) == 0
    proxy.add(Fault("cut", times=2, match=reads))
    proxy.add(Fault("503", times=2, match=reads))
    assert raw(opened("photos")) == raw(ds)
    decoded = ds.decode("image", size=3).shuffle(seed=4, window=2)
    loaders = [lambda n=n: decoded.loader(4, num_workers=n, worker_type="thread") for n in (0, 2)]
    assert_resumes_exactly(loaders[0], resume_with=loaders[1:], epochs=1, steps=[1, 3], tail=2)
    (bucket / "photos/a/02.png").write_bytes(b"other")
    with pytest.raises(DataChangedError, match=r"s3://.*a/02\.png has changed since it was indexed"):
        raw(ds)
    (bucket / "photos/a/02.png").unlink()
    with pytest.raises(DataNotFoundError, match=r"s3://.*a/02\.png (was removed|does not exist)"):
        raw(ds)


def test_metadata_text_and_arrays(bucket: Path, opened: Open) -> None:
    write(bucket / "photos", NAMES)
    rows = [{"file_name": name, "text": f"about {name}"} for name in reversed(NAMES)]
    (bucket / "photos/metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = opened("photos")
    assert raw(described) == raw(midepoch.from_files(bucket / "photos"))
    assert [row["text"] for row in described.remove_columns("image")] == [row["text"] for row in rows]
    (bucket / "lines.txt.gz").write_bytes(gzip.compress(b"one\r\n\ntwo"))
    assert [row["text"] for row in opened("lines.txt.gz")] == ["one", "", "two"]
    (bucket / "array.json").write_text(json.dumps(rows, indent=1))
    assert list(opened("array.json")) == rows
