"""Real worker processes, killed for real."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.errors import MapError, MidepochError, WorkerError


@pytest.fixture
def ds(small_files: list[str]) -> midepoch.Dataset:
    return midepoch.from_files(small_files)


def children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.name.startswith("midepoch-worker")}


def gone(pid: int, seconds: float = 60) -> bool:
    """Whether a process ends within a time that is far longer than it should need."""
    for _ in range(int(seconds * 50)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def double(row: dict[str, Any]) -> dict[str, Any]:
    return {"double": row["id"] * 2}


def big(batch: dict[str, Any]) -> dict[str, Any]:
    """Batches of growing size, so that shared memory has to grow too."""
    return {"big": [np.full(1000 * (i + 1), i) for i in batch["id"]]}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_start_methods(ds: midepoch.Dataset, method: str) -> None:
    mapped = ds.shuffle(seed=1).map(double)
    expected = [batch["double"].tolist() for batch in mapped.loader(5)]
    with mapped.loader(5, num_workers=2, multiprocessing_context=method) as loader:
        assert [batch["double"].tolist() for batch in loader] == expected


def environment(row: dict[str, Any]) -> dict[str, Any]:
    names = "MIDEPOCH_TEST_KEY", "TOKENIZERS_PARALLELISM"
    return {"environment": "/".join(os.environ.get(name, "unset") for name in names)}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_have_the_environment_of_their_start(
    ds: midepoch.Dataset, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)

    def seen() -> str:
        with ds.map(environment).loader(5, num_workers=1, multiprocessing_context=method) as loader:
            return str(next(iter(loader))["environment"][0])

    assert seen() == "unset/false"  # and the server of forks, if any, has started
    for value in ("token", "other"):
        monkeypatch.setenv("MIDEPOCH_TEST_KEY", value)
        assert seen() == f"{value}/false"
    monkeypatch.delenv("MIDEPOCH_TEST_KEY")
    assert seen() == "unset/false"


def test_spawn_takes_any_function_that_can_be_pickled(ds: midepoch.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = ds.map(lambda row: {"twice": 2 * row["id"]})
    with mapped.loader(5, num_workers=1, multiprocessing_context="spawn") as loader:
        assert next(iter(loader))["twice"].tolist() == [0, 2, 4, 6, 8]
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MidepochError, match="top level of a module.*cloudpickle"):
        list(mapped.loader(5, num_workers=1, multiprocessing_context="spawn"))


def test_batches_of_any_size(ds: midepoch.Dataset) -> None:
    loader = ds.map(big, batched=True).loader(3, num_workers=2)
    for batch in loader:
        for i, values in zip(batch["id"].tolist(), batch["big"], strict=True):
            assert len(values) == 1000 * (i + 1)
            assert (values == i).all()


def test_workers_end_with_the_epoch_unless_persistent(ds: midepoch.Dataset) -> None:
    loader = ds.loader(5, num_workers=2)
    list(loader)
    assert not children()
    keeping = ds.loader(5, num_workers=2, persistent_workers=True)
    list(keeping)
    first = children()
    list(keeping)
    assert len(first) == 2
    assert children() == first
    for _ in keeping:
        break
    assert [len(batch["id"]) for batch in keeping] == [5] * 7 + [2]
    keeping.close()
    assert not children()


def settled(path: Path) -> None:
    """Wait until nothing is appended to a file: the workers have made all that they may make ahead."""
    size = -1
    while size != (size := path.stat().st_size):
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["edit", "break"])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_workers_whose_slots_are_all_full_of_another_plan_make_the_next_one(
    ds: midepoch.Dataset, tmp_path: Path, kind: str, how: str
) -> None:
    made, taken = tmp_path / "made", 3

    def note(row: dict[str, Any]) -> dict[str, Any]:
        with made.open("ab") as file:
            file.write(b".")
        return row

    plain, loaders = [batch["id"].tolist() for batch in ds.shuffle(seed=1).loader(2)], ds.shuffle(seed=1).map(note)
    with loaders.loader(2, 2, worker_type=kind, prefetch=2, persistent_workers=True, timeout=60) as loader:
        batches = iter(loader)
        for _ in range(taken):
            next(batches)
        settled(made)
        if how == "edit":
            loader.exclude(steps=[taken + 1])
        else:
            batches = iter(loader)
        assert [batch["id"].tolist() for batch in batches] == plain[taken + (how == "edit") :]


def long_texts(rows: list[dict[str, Any]]) -> list[str]:
    return ["x" * 100_000 + str(row["id"]) for row in rows]


def test_a_large_plan_reaches_a_worker_that_is_blocked_in_sending() -> None:
    """16 bytes for each of 20,000 excluded rows, and batches of 800 kB: neither fits into a pipe."""
    ds = midepoch.from_dict({"id": list(range(40_000))})
    with ds.loader(8, 1, collate_fn=long_texts, worker_type="process", prefetch=2) as loader:
        found: list[str] = []

        def edited() -> None:
            batches = iter(loader)
            next(batches)
            assert batches.feed._source.is_ready(60)  # type: ignore[attr-defined]  # the next one fills the pipe
            loader.exclude(rows=range(1, 40_000, 2))
            found.extend(text.lstrip("x") for text in next(batches))

        thread = threading.Thread(target=edited, daemon=True)
        thread.start()
        thread.join(60)
        assert found == [str(number) for number in range(8, 24, 2)]


def test_dropped_loader_leaves_no_process(ds: midepoch.Dataset) -> None:
    iterator = iter(ds.loader(2, num_workers=2))
    next(iterator)
    assert len(children()) == 2
    del iterator
    assert not children()


def test_killed_worker_is_named(ds: midepoch.Dataset) -> None:
    loader = ds.loader(2, num_workers=2)
    iterator = iter(loader)
    got = [next(iterator)["id"].tolist()]
    victim = min(children())
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"worker \d of 2 \(pid {victim}\) was killed by SIGKILL"):
        for batch in iterator:
            got.append(batch["id"].tolist())
    assert not children()
    resumed = ds.loader(2, num_workers=1)
    resumed.load_state_dict(loader.state_dict())  # what was handed out is still known, and nothing else
    got += [batch["id"].tolist() for batch in resumed]
    assert sum(got, []) == list(range(37))


def leave(row: dict[str, Any]) -> dict[str, Any]:
    os._exit(3)


class Odd(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("odd")


def raise_odd(row: dict[str, Any]) -> dict[str, Any]:
    raise Odd(1, 2)


def test_worker_that_exits_and_errors_that_do_not_pickle(ds: midepoch.Dataset) -> None:
    with pytest.raises(WorkerError, match="exited with status 3"):
        list(ds.map(leave).loader(5, num_workers=2))
    with pytest.raises(MapError, match="row 0 .*odd"):
        list(ds.map(raise_odd).loader(5, num_workers=2))
    assert not children()


MAIN = """
import sys, time, multiprocessing, midepoch
ds = midepoch.from_files(sys.argv[1]).shuffle(seed=1).with_format("numpy")
loader = ds.loader(2, num_workers=3, prefetch=4)
iterator = iter(loader)
for _ in range(3):  # one of each worker, which then has come so far that Ctrl-C is not for it
    next(iterator)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
for batch in iterator:
    while True:  # short: a signal that comes just before a sleep is handled after it
        time.sleep(0.05)
"""


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_the_main_process(small_files: list[str], how: signal.Signals) -> None:
    before = shared_memory()
    folder = str(Path(small_files[0]).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does on Ctrl-C
    else:
        process.send_signal(how)
    _, errors = process.communicate(timeout=120)
    assert all(gone(pid) for pid in pids)
    assert {name for name in shared_memory() - before if "midepoch" in name or name.startswith("psm_")} == set()
    if how == signal.SIGINT:
        assert errors.count("Traceback") == 1  # the main process's own, none of the workers'
        assert "KeyboardInterrupt" in errors


def test_no_descriptor_leaks(ds: midepoch.Dataset) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    list(ds.loader(5, num_workers=2))
    before = count()
    for _ in range(5):
        list(ds.map(big, batched=True).loader(5, num_workers=2))
        ds.shuffle(seed=1).map(double)
    assert count() <= before + 1


def exits(row: dict[str, Any]) -> dict[str, Any]:
    sys.exit(0)


def test_exit_in_a_worker_does_not_end_the_training(ds: midepoch.Dataset) -> None:
    with pytest.raises(WorkerError, match="stopped by SystemExit"):
        list(ds.map(exits).loader(5, num_workers=1))


def handler_in_place(row: dict[str, Any]) -> dict[str, Any]:
    return {"own": callable(signal.getsignal(signal.SIGTERM))}


def test_handlers_of_the_script_do_not_run_in_workers(ds: midepoch.Dataset) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        batches = list(ds.map(handler_in_place).loader(20, num_workers=1, multiprocessing_context="fork"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not any(bool(value) for batch in batches for value in batch["own"])


class Scratch:
    """A function with large arrays of its own, of odd sizes, into which it writes."""

    def __init__(self) -> None:
        self.odd = np.zeros(1_100_003, np.uint8)
        self.numbers = np.zeros(200_000)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self.numbers.flags.aligned
        self.odd[row["id"]] += 1
        self.numbers[row["id"]] = row["id"]
        return {"sum": self.numbers[row["id"]] + self.odd[row["id"]]}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_arrays_of_a_function_can_be_written(ds: midepoch.Dataset, method: str) -> None:
    with ds.map(Scratch()).loader(5, num_workers=2, multiprocessing_context=method) as loader:
        for batch in loader:
            assert batch["sum"].tolist() == [number + 1 for number in batch["id"].tolist()]
