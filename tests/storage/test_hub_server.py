"""The server of ``tests/hub.py`` speaks the protocol of the Hub: the Hub's own clients read from it."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hub import HubServer

pytest.importorskip("huggingface_hub")

CLIENTS = """
import io, sys
import pyarrow.parquet as pq
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

api, commit = HfApi(), sys.argv[1]
about = api.dataset_info("org/name", revision="main")
assert about.sha == commit and len(about.siblings) == 5, about
assert api.dataset_info("org/name", expand=["sha"]).sha == commit
tree = list(api.list_repo_tree("org/name", repo_type="dataset", recursive=True))
assert sorted(each.path for each in tree) == ["README.md", "data", *(f"data/train-{i}.parquet" for i in range(4))]
file, folder = api.get_paths_info("org/name", ["data/train-1.parquet", "data"], repo_type="dataset")
assert file.lfs.size == file.size and not hasattr(folder, "size"), (file, folder)
saved = hf_hub_download("org/name", "data/train-1.parquet", repo_type="dataset")
assert pq.read_table(saved)["id"].to_pylist() == list(range(10, 20))
with HfFileSystem().open("datasets/org/name@main/data/train-2.parquet") as opened:
    assert pq.read_table(opened)["id"].to_pylist() == list(range(20, 30))
for name, revision, kind in [("org/none", None, RepositoryNotFoundError), ("org/name", "x", RevisionNotFoundError)]:
    try:
        api.list_repo_files(name, repo_type="dataset", revision=revision)
    except kind:
        continue
    raise AssertionError(kind)
try:
    HfFileSystem().open("datasets/org/gated/a.parquet").read(1)
except Exception as problem:
    assert "gated" in str(problem).lower() or isinstance(problem, (FileNotFoundError, GatedRepoError)), problem
assert list(api.list_repo_tree("old/name", repo_type="dataset")), "moved"
"""

STREAM = """
import datasets
rows = datasets.load_dataset("org/name", split="train", streaming=True)
assert [row["id"] for row in rows] == list(range(40))
"""


def parquet(first: int, rows: int = 10) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(first, first + rows)}), file, row_group_size=5)
    return file.getvalue()


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer(page=3, lfs_from=200) as hub:
        files = {f"data/train-{i}.parquet": parquet(10 * i) for i in range(4)}
        hub.add("org/name", {**files, "README.md": b"---\nlicense: mit\n---\n"})
        hub.add("org/gated", {"a.parquet": parquet(0)}, token="hf_" + "x" * 34, gated=True)
        hub.moved["old/name"] = "org/name"
        yield hub


def run(hub: HubServer, program: str, folder: Path) -> None:
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder), "PATH": "/usr/bin", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", program, hub.repos["org/name"].refs["main"]]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_client_of_the_hub_reads_from_the_server(server: HubServer, tmp_path: Path) -> None:
    run(server, CLIENTS, tmp_path)
    assert server.requests.keys() == {"revision", "tree", "paths-info", "resolve", "cdn"}


@pytest.mark.slow  # it asks other servers for a while; docs/data.md does the same
def test_datasets_streams_from_the_server(server: HubServer, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    run(server, STREAM, tmp_path)
