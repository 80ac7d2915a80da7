"""Ways in which a loader waited for ever, or went on with somebody else's batches: none of them does.

What may hang runs in a fork or a process of its own, which is ended.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midepoch
from data import write_parquet
from forks import forked
from midepoch._internal import processes
from midepoch.distributed import keyvalue
from midepoch.errors import MidepochError, WorkerError
from midepoch.loader import passes as loader_module
from midepoch.loader.lanes import EqualSteps
from midepoch.loader.processes import ProcessCrew
from midepoch.loader.transport import Receiver
from midepoch.order import Shard
from midepoch.tools.report.watch import Watch

ROWS = 20_000


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_parquet(tmp_path / "a.parquet", np.arange(ROWS), 50)
    return str(tmp_path / "a.parquet")


def kinds(path: str, kind: str) -> Any:
    ds = midepoch.from_files(path).with_format("python")
    return ds.map(dict) if kind == "rows" else ds.filter(lambda row: True)


def ids(batches: Any, most: int = 50) -> list[int]:
    return [row for batch in islice(batches, most) for row in batch["id"]]


def test_workers_that_nobody_listens_to(path: str) -> None:
    """One batch a pass: the second worker's are never asked for, and it cannot send any more while it is told to."""
    ds = midepoch.from_files(path).with_format("python").map(lambda row: {"id": row["id"], "text": "x" * 50_000})
    loader = ds.loader(8, num_workers=2, persistent_workers=True)

    def passes() -> bool:
        next(iter(loader))
        for mine in loader._feeds._pool.crew._mine:
            with socket.socket(fileno=os.dup(mine.fileno())) as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # it would take hundreds of passes
        found = [next(iter(loader))["id"] for _ in range(40)]
        loader.close()
        return all(batch == list(range(8)) for batch in found)

    assert forked(passes) == 0


def test_more_asked_ahead_than_a_pipe_holds(path: str) -> None:
    ds = midepoch.from_files(path).with_format("python").flat_map(lambda row: [{"id": row["id"], "text": "x" * 2_000}])
    assert forked(lambda: ids(ds.loader(100, num_workers=1, prefetch=1000)) == list(range(5_000))) == 0


@pytest.mark.parametrize("where", ["received", "told"])
@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_an_interrupt_between_a_message_and_its_book_keeping(
    kind: str, where: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = kinds(path, kind).loader(100, num_workers=1, persistent_workers=True)
    expected = ids(loader)
    owner: Any = Receiver if where == "received" else ProcessCrew
    name = "receive" if where == "received" else "tell"
    calls, call = iter(range(100_000)), getattr(owner, name)

    def interrupted(*arguments: Any) -> Any:
        found = call(*arguments)
        if next(calls) == (2 if where == "told" else 5):  # a quick worker is told of few batches
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(owner, name, interrupted)
    loader.set_epoch(0)
    with pytest.raises(KeyboardInterrupt):
        ids(loader, 1000)
    loader.set_epoch(0)
    assert ids(loader) == expected
    loader.close()


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_fork_has_workers_of_its_own(kind: str, path: str) -> None:
    loader = kinds(path, kind).loader(100, num_workers=2, persistent_workers=True)
    running = iter(loader)
    first = next(running)["id"]
    with_old = lambda: next(running)  # noqa: E731

    def both() -> bool:
        with pytest.raises(MidepochError, match="from which this one was forked"):
            for _ in range(10_000):
                with_old()
        found = ids(loader, 3) == list(range(300))
        loader.close()
        return found

    assert forked(both) == 0
    assert first + ids(running, 1000) == list(range(ROWS))
    loader.close()


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_killed_worker_whose_pipe_somebody_else_holds(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, held = multiprocessing.context.BaseContext.Pipe, []

    def kept(self: Any, duplex: bool = True) -> Any:
        mine, theirs = pipe(self, duplex)
        held.append(os.dup(theirs.fileno()))  # as a fork in this very moment does
        return mine, theirs

    monkeypatch.setattr(multiprocessing.context.BaseContext, "Pipe", kept)
    running = iter(kinds(path, kind).loader(100, num_workers=1))
    next(running)
    for child in multiprocessing.active_children():
        if child.name.startswith("midepoch-worker"):
            child.kill()
    try:
        with pytest.raises(WorkerError, match="SIGKILL"):
            ids(running, 1000)
    finally:
        for end in held:
            os.close(end)


DEAF = """
import gc, multiprocessing, signal, sys, time, midepoch
is_second = lambda: multiprocessing.current_process().name == "midepoch-worker-1"
gc.freeze = lambda: time.sleep(30) if is_second() else None  # it has only begun to start when the script ends
if sys.argv[2] == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
loader = midepoch.from_files(sys.argv[1]).with_format("python").map(dict).loader(10, num_workers=2, persistent_workers=True)
running = iter(loader)
next(running)
if sys.argv[3:]:
    raise ValueError("the training has failed")
"""


@pytest.mark.parametrize("how", [["ignored"], ["blocked"], ["ignored", "raise"]])
def test_a_script_that_does_not_listen_to_sigterm_ends(how: list[str], path: str) -> None:
    done = subprocess.run([sys.executable, "-c", DEAF, path, *how], timeout=100, check=False, capture_output=True)
    assert done.returncode == len(how) - 1, done.stderr


STUCK = """
import sys, time, midepoch
from midepoch._internal import processes
from midepoch.read import fetched
processes._PATIENCE = 0.2
make = fetched.FetchedBlocks._make
fetched.FetchedBlocks._make = lambda self, block: make(self, block) if block < 4 else time.sleep(10**6)  # a dead mount
for number, batch in enumerate(midepoch.from_files(sys.argv[1]).with_format("numpy").map(dict).loader(10)):
    if number == 4:
        time.sleep(0.2)
        raise ValueError("the loss is nan")
"""


def test_an_error_is_seen_though_reading_hangs(path: str) -> None:
    command = [sys.executable, "-c", STUCK, path]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: the loss is nan" in done.stderr and "it is left behind" in done.stderr


def test_threads_of_ours_are_not_waited_for_by_each_other(caplog: pytest.LogCaptureFixture) -> None:
    """The garbage collector may end a dropped loader in one of its threads, which the others wait for."""
    go = threading.Event()
    other = threading.Thread(target=go.wait, daemon=True)
    other.start()
    fetching = threading.Thread(target=processes.join, args=([other],), name="midepoch-fetch-7")
    fetching.start()
    fetching.join(60)
    assert not fetching.is_alive() and "left behind" not in caplog.text
    go.set()
    processes.join([other])
    assert not other.is_alive()


def test_what_was_left_behind_is_not_used_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes back would put its block where the next pass looks for another one."""
    loader = kinds(path, "rows").loader(100)
    ids(loader, 2)
    maker = loader._feeds._maker
    assert loader._feeds._maker is maker is not None
    monkeypatch.setattr("midepoch.loader.direct.join", lambda threads: False)
    ids(loader, 2)
    assert loader._feeds._maker is None
    monkeypatch.undo()
    loader.set_epoch(0)
    assert ids(loader, 2) == list(range(200))


KILLED = """
import os, sys
from multiprocessing import util
import numpy as np
import midepoch

start = util.spawnv_passfds

def killed(path, arguments, fds):
    pid = start(path, arguments, fds)
    if "--multiprocessing-fork" in map(os.fsdecode, arguments):  # not the process that looks after resources
        os.kill(pid, 9)
    return pid

util.spawnv_passfds = killed
ds = midepoch.from_files(sys.argv[1]).select(np.random.default_rng(1).permutation(20_000)).with_format("python").map(dict)
try:
    list(ds.loader(64, num_workers=1, multiprocessing_context="spawn"))
except midepoch.WorkerError as problem:
    print(problem)
"""


def test_a_worker_that_dies_while_it_is_born(path: str) -> None:
    """And is to be told more than a pipe holds."""
    command = [sys.executable, "-c", KILLED, path]
    done = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)
    assert "was killed by SIGKILL" in done.stdout, done.stderr


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_cannot_be_handed_over_is_not_passed_over(
    workers: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = kinds(path, "rows").loader(100, num_workers=workers)
    running = iter(loader)
    assert ids(running, 2) == list(range(200))
    finish = loader_module.finish

    def fails(value: Any, kind: str) -> Any:
        raise MemoryError

    monkeypatch.setattr(loader_module, "finish", fails)
    with pytest.raises(MemoryError):
        next(running)
    monkeypatch.setattr(loader_module, "finish", finish)
    with pytest.raises(MidepochError):
        next(running)
    state = loader.state_dict()
    other = kinds(path, "rows").loader(100)
    other.load_state_dict(state)
    assert next(iter(other))["id"][0] == 200


def test_what_ranks_have_said_does_not_fill_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    monkeypatch.setattr(keyvalue, "_store", lambda: store)
    steps = EqualSteps(Shard(0, 1), {"data": "data"}, "", lambda: None)
    for _ in range(3):
        steps.begin()
        for _ in range(20):
            assert steps.agree(7) == [7]
    assert store.num_keys() < 5


def test_a_watch_that_never_served_is_closed() -> None:
    watch = Watch(dict, "127.0.0.1", 0)
    closing = threading.Thread(target=watch.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    watch.serve()  # closed: at once over
