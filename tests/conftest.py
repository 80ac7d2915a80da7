"""Shared fixtures: small Arrow files made for each test session, and caches that are nobody's but the tests'."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, settings

import launch
import midepoch
import ports
from clock import Clock
from data import Numbers, documents, numbered, write_arrow
from forks import MIDEPOCH, Forks
from launch import Launch, Program, torchrun
from midepoch.audit import Ledger
from midepoch.checkpoint import PipelineCheckpoint
from proxy import Proxy
from s3 import Server

# Timing never decides a test; and where a red run costs somebody a day, the examples are the same every time.
settings.register_profile(
    "midepoch",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("midepoch")

# The tests are about processes and bytes, many at a time: on the CPU, also where there is a GPU. tests/gpu asks for it.
if not os.environ.get("MIDEPOCH_TEST_GPU"):
    os.environ.update(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background: the programs of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


LONGEST = (
    *("test_ray.py", "test_chaos.py", "test_frameworks.py", "test_seed_004.py", "test_rollouts.py", "test_torchrun.py"),
    *(
        "test_last_checkpoint.py",
        "test_feed.py",
        "test_pages.py",
        "test_ranks.py",
        "test_crash.py",
        "test_restoring.py",
    ),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A million objects of modules and tests stay: a collection that visits them takes 0.4 s, and 0.6 s in a fork,
    which copies their pages. Of those that tests make, most are young: collecting them less often saves a tenth."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 10, 5)  # files of cycles are closed, too
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """Examples are in docstrings of src/. Looking for them in all files of tests, too, takes a tenth of the collection."""
    found = yield
    return [each for each in found if not isinstance(each, pytest.Module) or type(each) is pytest.Module]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """One of two workers collects from the end. In a new checkout, where assertions are compiled in 14 s, each compiles
    a half of the files, and loads what the other has compiled."""
    report = yield
    if isinstance(collector, pytest.Directory) and os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
        report.result.reverse()
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: one that comes last leaves the other worker with nothing to do. Then by their files."""
    items.sort(
        key=lambda item: (LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST), item.path)
    )


@pytest.fixture(autouse=True)
def _own_caches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches for each file of tests: what is kept within a limit is counted when a source is opened."""
    folder = tmp_path_factory.getbasetemp() / "caches" / request.path.stem
    monkeypatch.setenv("MIDEPOCH_CACHE", str(folder / "midepoch"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))


@pytest.fixture(autouse=True)
def _no_jax(request: pytest.FixtureRequest) -> Iterator[None]:
    """With JAX in a process, midepoch starts workers in another way: all tests that follow would take ten times as long."""
    before = "jax" in sys.modules
    yield
    if "checkpoint" not in request.path.parts:
        assert before or "jax" not in sys.modules, "JAX is imported in a process of its own, or in tests/checkpoint"


@pytest.fixture(scope="session")
def make_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Files of the given numbers of rows, numbered through; blocks of ``block`` rows."""

    def make(sizes: Sequence[int], block: int = 4, **options: Any) -> list[str]:
        folder, first, paths = tmp_path_factory.mktemp("data"), 0, []
        for number, size in enumerate(sizes):
            table = numbered(first, first + size)
            paths.append(str(write_arrow(folder / f"part-{number:03}.arrow", table, block, **options)))
            first += size
        return paths

    return make


@pytest.fixture(scope="session")
def small_files(make_files: Callable[..., list[str]]) -> list[str]:
    """37 rows in 5 files of uneven size, in blocks of 4."""
    return make_files([9, 1, 12, 8, 7])


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """A dataset with the numbers from ``first`` up to ``stop`` in column n."""
    folder = tmp_path_factory.mktemp("numbers")

    def make(first: int, stop: int) -> midepoch.Dataset:
        path = folder / f"{first}-{stop}.arrow"
        if not path.exists():
            write_arrow(path, pa.table({"n": pa.array(range(first, stop), pa.int64())}), 50)
        return midepoch.from_files(path)

    return make


@pytest.fixture(scope="session")
def documents_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """300 rows of ``data.documents`` in blocks of 17."""
    folder = tmp_path_factory.mktemp("documents")
    write_arrow(folder / "a.arrow", documents(300), 17, file_format=True)
    return str(folder)


@pytest.fixture
def docs(documents_folder: str) -> midepoch.Dataset:
    """300 rows with an id, a text and tokens."""
    return midepoch.from_files(documents_folder)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real S3 server; make a bucket with a name of its own in ``s3_server.folder`` for each test."""
    with Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def proxy(s3_server: Server) -> Iterator[Proxy]:
    """A proxy in front of it, which counts requests and injects faults."""
    with Proxy(s3_server.endpoint) as front:
        yield front


@pytest.fixture(scope="session")
def torch_forks() -> Iterator[Forks]:
    """Runs scripts that train with torch."""
    with Forks("torch", "torch._dynamo", "pyarrow.parquet", *MIDEPOCH) as forks:  # which any optimizer of torch imports
        yield forks


@pytest.fixture(scope="session")
def framework_forks() -> Iterator[Forks]:
    """Runs scripts that train with a framework, which takes 5 s to import."""
    trainers = [f"trl.trainer.{name}_trainer" for name in ("grpo", "sft", "dpo") if importlib.util.find_spec("trl")]
    packages = ("torch._dynamo", "pyarrow.parquet", "pandas", "transformers.trainer", "transformers.models.llama")
    with Forks(*packages, "accelerate", "lightning.pytorch", "midepoch.cli.app", *MIDEPOCH, *trainers) as forks:
        yield forks


@pytest.fixture(scope="session")
def python(framework_forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that does what Python does with a script, -m or -c, in a fork: without imports, and without a teardown."""
    path = tmp_path_factory.mktemp("programs") / "python"
    framework_forks.executable(path)
    return str(path)


@pytest.fixture(params=["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def launched(request: pytest.FixtureRequest, torch_forks: Forks) -> Launch:
    """Runs a script as ranks, in the environment that torchrun makes, or by torchrun itself, which takes 3 s a rank."""
    return torchrun if request.param == "torchrun" else torch_forks.ranks


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def program(request: pytest.FixtureRequest, torch_forks: Forks) -> Program:
    """Runs a script alone or as ranks, and tells how it ended."""
    return launch.program if request.param == "started" else torch_forks.program


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the ledger."""
    found = Clock()
    monkeypatch.setattr("midepoch.audit.ledger.time", found)
    for module in ("passes", "meter"):
        monkeypatch.setattr(f"midepoch.loader.{module}.perf_counter", found.perf_counter)
    return found


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nobody listens on."""
    return ports.free()


@pytest.fixture
def labelled_files(tmp_path: Path) -> str:
    """1,000 rows in 4 files of 10 blocks; the label is constant in each file."""
    for i in range(4):
        table = pa.table({"id": np.arange(i * 250, (i + 1) * 250), "label": np.full(250, i)})
        pq.write_table(table, tmp_path / f"p{i}.parquet", row_group_size=25)
    return str(tmp_path / "*.parquet")


@pytest.fixture
def run_folder(labelled_files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """2 ranks, then 3 from behind step 20 of 30, to the end of the epoch and 4 steps into the next; one checkpoint."""
    monkeypatch.setattr("midepoch.audit.ledger._MARK_SECONDS", 0.0)
    folder, state = tmp_path / "run", None
    ds = midepoch.from_files(labelled_files).shuffle(seed=1)
    for world, steps in ((2, 30), (3, 24)):
        loaders = [
            ds.loader(10, rank=rank, world_size=world, audit=Ledger(folder, attempt=str(world)), last_batch="drop")
            for rank in range(world)
        ]
        for rank, loader in enumerate(loaders):
            if state is not None:
                loader.load_state_dict(state)
            for step in range(1, steps + 1):
                while next(loader, None) is None:
                    pass
                if world == 2 and rank == 0 and step == 20:
                    kept = loader.state_dict()
        state = kept
    PipelineCheckpoint(folder / "checkpoints").save(loaders[0], step=20)
    return folder
