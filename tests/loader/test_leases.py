"""Leases: what an acknowledgement returns, what a state holds, and which errors there are."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import midepoch
from data import write_arrow
from forks import Forks
from midepoch._internal.hints import forget_warnings
from midepoch.audit import Ledger, read_run
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.cli.app import app
from midepoch.errors import CheckpointMismatchError, CheckpointSaveError, LeaseError, MidepochError
from midepoch.loader import leases as lease_module
from midepoch.loader.leases import Channel, Tracker, acknowledge
from states import at_row

ROWS = 4096


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leases")
    return str(write_arrow(folder / "data.arrow", pa.table({"id": range(ROWS)}), 256))


def make(data: str, batch: int = 8, **options: Any) -> midepoch.Loader:
    return midepoch.from_files(data).shuffle(seed=1).with_format("numpy").loader(batch, **options)


def third(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 3)


def rows_of(batches: Any) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"]]


def take(items: Any, count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


def test_an_acknowledgement_counts_once(data: str) -> None:
    loader = make(data)
    with loader.lease() as items:
        first, second, third = take(items, 3)
        assert second.ack() is True
        assert second.ack() is False
        assert loader.ack(third, rejected=True) is True
        assert loader.ack(third.id) is False
        assert loader.ack(first.id) is True
        assert items.out == 0


def test_a_resume_delivers_exactly_what_was_out_then_continues(data: str) -> None:
    reference = rows_of(make(data))
    loader = make(data)
    with loader.lease() as items:
        leases = take(items, 10)
        for number in (0, 1, 3, 4, 8):
            leases[number].ack()
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["position"] == 16
    resumed = make(data)
    resumed.load_state_dict(state)
    with resumed.lease() as items:
        again = [rows_of([lease.batch]) for lease in take(items, 6)]
    out = [2, 5, 6, 7, 9, 10]
    assert again == [reference[8 * number : 8 * number + 8] for number in out]


def test_the_batches_that_are_left_can_be_iterated_without_leases(data: str) -> None:
    loader = make(data)
    with loader.lease() as items:
        leases = take(items, 5)
        acked = rows_of(lease.batch for lease in leases[2:4] if lease.ack())
    rest = rows_of(loader)
    assert len(rest) == ROWS - len(acked)
    assert sorted(rest + acked) == list(range(ROWS))
    assert loader.epoch == 1


def test_leases_that_are_out_are_returned_to_the_next_block(data: str) -> None:
    loader = make(data)
    with loader.lease() as items:
        leases = take(items, 4)
        leases[1].ack()
    assert leases[2].ack() is True  # late, but its batch was not delivered again yet
    with loader.lease() as items:
        again = take(items, 3)
    assert [one.id for one in again[:2]] == [leases[0].id, leases[3].id]
    assert rows_of([again[0].batch]) == rows_of([leases[0].batch])
    assert again[2].id == leases[3].id + 1


@pytest.mark.parametrize("tokens", [False, True])
def test_workers_make_what_is_left_when_a_block_was_left(tokens: bool) -> None:
    """The rest of a plan is sent to processes."""
    options: dict[str, Any] = {"num_workers": 2, "prefetch": 2}
    options |= {"max_tokens": 64, "layout": None} if tokens else {"batch_size": 8}
    columns = {"id": list(range(1, 129)), "input_ids": [[i] * (1 + i % 7) for i in range(1, 129)]}
    loader = midepoch.from_dict(columns).shuffle(seed=1).with_format("numpy").loader(**options)
    with loader.lease() as items:
        leases = take(items, 6)
        rows = rows_of([lease.batch for lease in (leases[1], leases[4])])
        leases[1].ack(), leases[4].ack()
    with loader.lease() as items:
        for lease in items:
            rows += rows_of([lease.batch])
            lease.ack()
    assert sorted(rows) == list(range(1, 129))


def test_an_epoch_is_over_when_all_of_it_is_acknowledged(data: str) -> None:
    loader = make(data, 1024)
    with loader.lease() as items:
        leases = list(items)
        for lease in leases[1:]:
            lease.ack()
        assert (loader.epoch, loader.position) == (0, 0)
    with loader.lease() as items:
        (last,) = items
        assert last.id == leases[0].id
        last.ack()
    assert (loader.epoch, loader.position) == (1, 0)
    assert leases[0].ack() is False  # of the epoch before
    with loader.lease() as items:
        assert next(items).id == leases[-1].id + 1
        assert loader.epoch == 1


@pytest.mark.parametrize("lanes", [False, True], ids=["positions", "lanes"])
def test_a_state_with_1000_scattered_leases_out_is_small(data: str, lanes: bool) -> None:
    ds = midepoch.from_files(data).shuffle(seed=1).with_format("numpy")
    loader = (ds.filter(third) if lanes else ds).loader(1)
    draw = random.Random(3)
    with loader.lease() as items:
        held: list[Any] = []
        for lease in items:
            held.append(lease)
            if len(held) > 1000:
                held.pop(draw.randrange(len(held))).ack()
        assert items.out == 1000
        assert len(json.dumps(loader.state_dict())) <= 4096


def test_unknown_leases_are_refused(data: str) -> None:
    loader, other = make(data), make(data)
    with loader.lease() as items, other.lease() as others:
        lease, foreign = next(items), next(others)
        for unknown in (lease.id + 1, foreign.id, -1):
            with pytest.raises(ValueError, match=f"lease {unknown} is unknown"):
                loader.ack(unknown)
        state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="before a state was loaded"):
        lease.ack()


def test_finished_leases_release_their_memory(data: str) -> None:
    loader = midepoch.from_files(data).filter(third).with_format("numpy").loader(4)
    with loader.lease() as items:
        oldest = next(items)
        deals = []
        for lease in items:
            deals.append(weakref.ref(loader._run.at))  # type: ignore[arg-type]
            lease.ack()
        loader.state_dict()
        assert len(deals) > 600
        assert sum(deal() is not None for deal in deals) <= 1
        assert oldest.ack()


def test_max_out_waits_for_an_acknowledgement(data: str) -> None:
    loader = make(data)
    with loader.lease(max_out=3) as items:
        leases = take(items, 3)
        timer = threading.Thread(target=lambda: (items_waits(loader), leases[1].ack()))
        timer.start()
        fourth = next(items)
        timer.join()
        assert fourth.id == leases[2].id + 1
        assert items.out == 3


def items_waits(loader: midepoch.Loader) -> None:
    while loader._leases.wake is None:
        time.sleep(0.001)


def test_misuse_is_named(data: str) -> None:
    loader = make(data)
    items = loader.lease()
    for use in (items.join, lambda: items.out, lambda: next(items)):
        with pytest.raises(RuntimeError, match="leases are taken in a with block"):
            use()
    with items:
        for wrong in ("7", None, True, 1.0):
            with pytest.raises(TypeError, match=r"ack\(\) takes a lease or its id"):
                loader.ack(wrong)  # type: ignore[arg-type]
        assert loader.ack(np.int64(next(items).id))
    with pytest.raises(RuntimeError, match="this with block has ended"):
        next(items)


def test_waiting_ends_with_an_error_if_nobody_acknowledges(
    data: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, torch_forks: Forks
) -> None:
    monkeypatch.setattr("midepoch.loader.leases._QUIET", 0.0)  # 30 s
    forget_warnings()
    loader = make(data)
    with loader.lease(max_out=1, timeout=0.05) as items:
        next(items)
        stop = threading.Event()
        other = threading.Thread(target=stop.wait)
        other.start()
        with pytest.raises(TimeoutError, match="1 lease is out"):
            next(items)
        stop.set()
        other.join()
    assert "1 lease is out (max_out=1): waiting until one is acknowledged by lease.ack()" in caplog.text
    code = (
        f"import midepoch\nloader = midepoch.from_files({data!r}).with_format('numpy').loader(8)\n"
        "with loader.lease(max_out=2) as items:\n    next(items), next(items)\n"
        "    try: next(items)\n    except RuntimeError as problem: print(problem)\n"
    )
    [done] = torch_forks.run(["-c", code])
    assert "this is the only thread" in done.stdout


def test_threads_that_read_cannot_acknowledge(tmp_path: Path, torch_forks: Forks) -> None:
    path = str(tmp_path / "data.parquet")
    pq.write_table(pa.table({"id": range(400)}), path, row_group_size=50)
    code = (
        f"import threading, midepoch\nloader = midepoch.from_files({path!r}).shuffle(seed=1).loader(8)\n"
        "with loader.lease(max_out=2) as items:\n    next(items), next(items)\n"
        "    print(threading.active_count() > 1)\n"
        "    try: next(items)\n    except RuntimeError as problem: print(problem)\n"
    )
    [done] = torch_forks.run(["-c", code])
    assert done.stdout.startswith("True\n") and "this is the only thread" in done.stdout


def test_join_waits_until_nothing_is_out(data: str) -> None:
    loader = make(data, 2048)
    with loader.lease() as items:
        leases = list(items)
        thread = threading.Thread(target=lambda: (items_waits(loader), [lease.ack() for lease in leases]))
        thread.start()
        items.join()
        thread.join()
    assert loader.epoch == 1


def test_blocks_are_used_as_blocks(data: str) -> None:
    loader = make(data)
    with pytest.raises(RuntimeError, match="with loader.lease"):
        next(loader.lease())
    with loader.lease() as items:
        next(items)
        for call in (loader.lease().__enter__, lambda: iter(loader), lambda: loader.set_epoch(3)):
            with pytest.raises(RuntimeError, match="is open for this loader"):
                call()
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(MidepochError, match="load_state_dict"):
            next(items)
    with pytest.raises(ValueError, match="max_out"):
        loader.lease(max_out=0)


def test_one_of_several_ranks_is_not_enough(data: str) -> None:
    ranks = [make(data, rank=rank, world_size=2, last_batch="uneven") for rank in range(2)]
    for count, loader in zip((5, 2), ranks, strict=True):
        with loader.lease() as items:
            for lease in take(items, count)[1:]:
                lease.ack()
        assert not loader.state_is_global
        assert loader.takes_states_of_all_ranks
        with pytest.raises(RuntimeError, match=r"Take the rest with lease\(\)"):
            iter(loader)
    states = [loader.state_dict() for loader in ranks]
    alone = make(data)
    for wrong in (states[0], states[:1], states[::-1]):
        with pytest.raises(CheckpointMismatchError, match="Load the list of the states of all ranks"):
            alone.load_state_dict(wrong)
    alone.load_state_dict(states)
    assert len(rows_of(alone)) == ROWS - 8 * (4 + 1)


def test_ranks_an_epoch_apart_are_refused(data: str) -> None:
    ranks = [make(data, 1024, rank=rank, world_size=2, last_batch="uneven") for rank in range(2)]
    with ranks[0].lease() as items:
        for lease in items:
            lease.ack()
    with ranks[1].lease() as items:
        next(items).ack()
    make(data).load_state_dict([loader.state_dict() for loader in ranks])  # all of epoch 0 is acknowledged by rank 0
    with ranks[0].lease() as items:
        next(items)
        make(data).load_state_dict([loader.state_dict() for loader in ranks])  # nothing of epoch 1 is
        next(items).ack()
        states = [loader.state_dict() for loader in ranks]
    with pytest.raises(CheckpointMismatchError, match="rank 0 had acknowledged leases of epoch 1 while rank 1"):
        make(data).load_state_dict(states)


def acknowledge_all(source: Any, results: Any) -> None:
    for lease in iter(source.get, None):
        results.put((lease.batch is None, lease.ack(), lease.ack()))


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_other_processes_acknowledge(data: str, start: str) -> None:
    context: Any = multiprocessing.get_context(start)
    loader, source, results = make(data), context.SimpleQueue(), context.Queue()
    with loader.lease() as items:
        leases = take(items, 6)
        worker = context.Process(target=acknowledge_all, args=(source, results), daemon=True)
        worker.start()
        for lease in leases[:5]:
            source.put(lease)
            assert results.get(timeout=60) == (True, True, False)
        assert loader.state_dict()["position"] == 40
        source.put(None)
        worker.join()
        assert leases[5].ack()


def test_a_forked_process_acknowledges_the_leases_that_it_inherits(data: str) -> None:
    loader = make(data)
    with loader.lease() as items:
        leases = take(items, 3)
        child = os.fork()
        if not child:
            os._exit(0 if leases[0].ack() and loader.ack(leases[2].id) and not leases[2].ack() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert items.out == 1
        assert loader.state_dict()["position"] == 8


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary folder whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_lease_outlives_its_process_with_an_error(
    data: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = short_path
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "import os, pickle, signal, sys, midepoch\n"
        f"loader = midepoch.from_files({data!r}).with_format('numpy').loader(8)\n"
        "with loader.lease() as items:\n"
        "    sys.stdout.buffer.write(pickle.dumps(next(items))); sys.stdout.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(LeaseError, match="the process of its loader has exited"):
        pickle.loads(done.stdout).ack()
    (stale,) = tmp_path.iterdir()
    os.utime(stale, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    channel = Channel(lambda _number, _rejected: True)
    assert [folder.name for folder in tmp_path.iterdir()] == [Path(channel.address).parent.name]
    assert acknowledge(channel.address, 1, False) is True
    channel.close()
    assert not list(tmp_path.iterdir())


def busy_socket(folder: Path) -> socket.socket:
    """A socket that accepts nobody, with a full backlog: a blocking ``connect`` waits indefinitely."""
    folder.mkdir(mode=0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(0)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(folder / "socket"))
    weakref.finalize(listener, waiting.close)
    os.utime(folder, (0, 0))
    return listener


def test_a_socket_of_another_user_does_not_stop_a_lease_from_being_sent(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    folder = short_path / f"midepoch-leases-{os.getuid()}-0"
    with busy_socket(folder):
        channels: list[Channel] = []
        thread = threading.Thread(target=lambda: channels.append(Channel(lambda *_: True)), daemon=True)
        thread.start()
        thread.join(60)
        assert channels, "connecting to the socket blocked"
        channels[0].close()
    assert folder.exists()
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # nobody listens there now, but it is another user's
    Channel(lambda *_: True).close()
    assert folder.exists()


def test_a_loader_that_does_not_answer_is_an_error_after_a_while(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    monkeypatch.setattr(lease_module, "DEADLINE", 0.25)
    folder = short_path / "folder"
    problems: list[BaseException] = []

    def attempt() -> None:
        try:
            acknowledge(str(folder / "socket"), 7, False)
        except LeaseError as problem:
            problems.append(problem)

    for backlog in (0, 8):  # it does not accept; it accepts and does not answer
        with busy_socket(folder) as listener:
            listener.listen(backlog)
            thread = threading.Thread(target=attempt, daemon=True)
            thread.start()
            thread.join(60)
            assert "lease 7 was not acknowledged" in str(problems.pop())
        shutil.rmtree(folder)


def test_a_process_that_reads_no_answers_does_not_stop_the_others(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    channel = Channel(lambda *_: True)
    with socket.socket(socket.AF_UNIX) as flood:
        flood.connect(channel.address)
        with pytest.raises((BrokenPipeError, ConnectionResetError, TimeoutError)):
            flood.settimeout(30)
            while True:
                flood.sendall(bytes(9 * 4096))
        assert acknowledge(channel.address, 1, False) is True
    channel.close()


def test_a_socket_of_another_user_gets_no_acknowledgement(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    channel = Channel(lambda *_: True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 54321)
        with pytest.raises(LeaseError, match="belongs to another user"):
            acknowledge(channel.address, 1, False)
    assert acknowledge(channel.address, 1, False) is True
    channel.close()


def test_a_thread_that_ends_closes_its_connection(data: str) -> None:
    loader, results = make(data), []
    with loader.lease() as items, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        remote = pickle.loads(pickle.dumps(next(items)))
        thread = threading.Thread(target=lambda: results.append(remote.ack()))
        thread.start()
        thread.join()
        gc.collect()
    assert results == [True]
    assert not [str(one.message) for one in warned if issubclass(one.category, ResourceWarning)]


def test_a_signal_handler_saves_what_was_acknowledged(data: str) -> None:
    """States are saved by a handler at random moments, also amid ack() and state_dict() of the same thread.

    The handler starts the timer again when it has saved: on a slow machine handlers would else interrupt each other
    without end.
    """
    loader, noted, problems, saves = make(data, 1), [0], [], [0]

    def save(_number: int, _frame: Any) -> None:
        acked = noted[0]
        state = loader.state_dict()
        if state["position"] < acked:
            problems.append((state["position"], acked))
        saves[0] += 1
        signal.setitimer(signal.ITIMER_REAL, 0.0005)

    before = signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    try:
        with loader.lease() as items:
            for lease in items:
                lease.ack()
                noted[0] += 1  # all of them in order
                if noted[0] == 1500:
                    break
                if noted[0] % 10 == 0:
                    loader.state_dict()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert saves[0] and not problems
    assert loader.position == 1500


def test_many_threads_acknowledge_each_lease_once(data: str) -> None:
    loader, counts = make(data, 1), np.zeros(8, int)
    with loader.lease() as items:
        leases = list(items)

        def work(thread: int) -> None:
            mine = leases[:]
            random.Random(thread).shuffle(mine)
            counts[thread] = sum(lease.ack() for lease in mine)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            loader.state_dict()
    assert counts.sum() == ROWS
    assert loader.epoch == 1


@pytest.mark.parametrize("verdicts", [(False, True), (True, False)], ids=["ack first", "reject first"])
def test_the_ledger_has_the_verdict_of_the_call_that_was_first(
    data: str, verdicts: tuple[bool, bool], tmp_path: Path
) -> None:
    """At every line of one call another one comes between, with the other verdict, and the block is left."""
    first, second = verdicts
    code, lines = Tracker.ack.__code__, {line for _, _, line in Tracker.ack.__code__.co_lines() if line}
    returned: dict[int, list[bool]] = {}

    def between(line: int) -> Any:
        def trace(frame: Any, event: str, _argument: Any) -> Any:
            if frame.f_code is code and event == "line" and frame.f_lineno == line:
                sys.settrace(None)
                returned[line].append(loader.ack(lease, rejected=second))
                block.close()
                next(block.enter_context(loader.lease()))
            return trace

        return trace

    loader = make(data, 16, audit=str(tmp_path))
    rejected = 0
    with ExitStack() as block:
        next(block.enter_context(loader.lease()))  # stays out, so that the next block continues this one
        for line in sorted(lines):
            block.close()
            items = block.enter_context(loader.lease())
            _, lease = take(items, 2)
            returned[line] = []
            before = sys.gettrace()
            sys.settrace(between(line))
            own = loader.ack(lease, rejected=first)
            sys.settrace(before)
            loader.state_dict()
            rejected += first if own else second
            assert sum([own, *returned[line]]) == 1, (line - code.co_firstlineno, own, returned[line])
        assert any(returned.values())
    run = read_run(tmp_path)
    counts = run.epochs[0].leases
    assert run.exact and counts is not None
    assert (counts.acknowledged, counts.rejected) == (16 * len(lines), 16 * rejected)


def test_checkpoints_hold_the_leases_of_all_ranks(data: str, tmp_path: Path) -> None:
    ranks = [make(data, rank=rank, world_size=2, last_batch="uneven") for rank in range(2)]
    acked: list[int] = []
    for count, loader in zip((9, 4), ranks, strict=True):
        with loader.lease() as items:
            acked += rows_of(lease.batch for lease in take(items, count)[::2] if lease.ack())
    assert saved_together(tmp_path, ranks, 1) == []
    resumed = make(data, 5)
    assert PipelineCheckpoint(tmp_path, rank=0, world_size=1).restore_latest(resumed, rng=False) == 1
    assert sorted(rows_of(resumed) + acked) == list(range(ROWS))


def saved_together(folder: Path, ranks: list[midepoch.Loader], step: int) -> list[str]:
    """Save the states of all ranks, and return their errors."""
    problems: list[str] = []

    def save(rank: int) -> None:
        try:
            PipelineCheckpoint(folder, rank=rank, world_size=len(ranks)).save(ranks[rank], step=step, rng=False)
        except CheckpointSaveError as problem:
            problems.append(str(problem))

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return problems


def test_no_checkpoint_is_saved_that_could_not_be_loaded(data: str, tmp_path: Path) -> None:
    """Ranks that are an epoch apart: an older step would be pruned for it."""
    ranks = [make(data, 1024, rank=rank, world_size=2, last_batch="uneven") for rank in range(2)]
    for first in (0, 1):
        with ranks[1 - first].lease() as items:
            next(items).ack()
        if not first:  # rank 0 has not begun to lease
            problems = saved_together(tmp_path, ranks, 1)
            assert len(problems) == 2 and all("rank 0 has not begun to lease" in each for each in problems), problems
    with ranks[0].lease() as items:
        for lease in items:
            lease.ack()
    assert saved_together(tmp_path, ranks, 1) == []
    with ranks[0].lease() as items:
        next(items).ack()
        problems = saved_together(tmp_path, ranks, 2)
    assert len(problems) == 2 and all("rank 0 had acknowledged leases of epoch 1" in each for each in problems), (
        problems
    )
    assert PipelineCheckpoint(tmp_path, rank=0, world_size=1).restore_latest(make(data, 5), rng=False) == 1


@pytest.mark.parametrize("lanes", [False, True], ids=["positions", "lanes"])
def test_the_ledger_proves_what_was_acknowledged(data: str, lanes: bool, tmp_path: Path) -> None:
    def start(attempt: int, world: int, state: Any) -> list[midepoch.Loader]:
        ds = midepoch.from_files(data).shuffle(seed=1).with_format("numpy")
        ds = ds.filter(third).with_lanes(2) if lanes else ds
        ledger = Ledger(tmp_path, attempt=str(attempt))
        loaders = [ds.loader(16, rank=r, world_size=world, last_batch="uneven", audit=ledger) for r in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        return loaders

    total = sum(map(bool, (i % 3 for i in range(ROWS)))) if lanes else ROWS
    first = start(1, 2, None)
    for loader in first:
        with loader.lease() as items:
            held = take(items, 12)
            for lease in held[4:8]:
                lease.ack()
            held[9].reject()
    state = [loader.state_dict() for loader in first]
    with first[0].lease() as items:  # acknowledged after the state, so they are delivered again
        for lease in take(items, 3):
            lease.ack()
        first[0].state_dict()
    second = start(2, 1, state)
    with second[0].lease() as items:
        for lease in take(items, 4):
            lease.ack()
        next(items)
        second[0].state_dict()
        proof = read_run(tmp_path).epochs[0]
        assert proof.exact and not proof.complete
        assert proof.leases is not None
        assert (proof.leases.acknowledged, proof.leases.rejected) == (2 * 5 * 16 + 4 * 16, 2 * 16)
        assert (proof.again, proof.leases.out) == (3 * 16, 16)
        for lease in items:
            lease.ack()
    with second[0].lease() as items:
        next(items).ack()
    run = read_run(tmp_path)
    proof = run.epochs[0]
    assert run.exact and proof.complete, (run.problems, proof)
    assert proof.leases is not None
    assert (proof.once, proof.leases.acknowledged, proof.repeated, proof.never) == (total, total, 0, 0)


def test_a_rank_without_a_row_in_the_last_step_has_no_lease_out() -> None:
    """Also if it is asked for a lease again, as a loop does in which other ranks have some left."""
    loader = midepoch.from_dict({"id": list(range(8))}).loader(1, rank=2, world_size=3, last_batch="uneven")
    with loader.lease() as items:
        for lease in items:
            lease.ack()
        assert next(items, None) is None and items.out == 0
        assert (loader.epoch, loader.position, loader.steps) == (1, 0, 3)


def test_acknowledgements_before_the_next_epoch_in_a_block_are_in_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, attempt="1")
    ds = midepoch.from_dict({"id": list(range(8))}).shuffle(seed=1)
    options: dict[str, Any] = {"steps_per_epoch": 5, "last_batch": "drop", "world_size": 2}
    loaders = [ds.loader(1, rank=rank, audit=ledger, **options) for rank in range(2)]
    for loader in loaders:  # 4 steps of one epoch of the data, and one of the next
        with loader.lease() as items:
            for lease in items:
                lease.ack()
        loader.state_dict()
    run = read_run(tmp_path)
    assert run.exact and run.epochs[0].complete, run.epochs


def test_the_ledger_shows_what_was_skipped_or_acknowledged_twice(data: str, tmp_path: Path) -> None:
    first = make(data, 16, audit=Ledger(tmp_path / "a", attempt="1"))
    with first.lease() as items:
        for lease in take(items, 4):
            lease.ack()
        state = first.state_dict()
    later = make(data, 16, audit=Ledger(tmp_path / "a", attempt="2"))
    later.load_state_dict(at_row(state, 96))  # 32 rows were never delivered
    with later.lease() as items:
        next(items).ack()
        later.state_dict()
    run = read_run(tmp_path / "a")
    assert not run.exact
    assert (run.epochs[0].never, run.epochs[0].examples[:2]) == (32, (64, 65))


def test_audit_shows_the_counts_of_leases(data: str, tmp_path: Path) -> None:
    loader = make(data, 16, audit=str(tmp_path))
    with loader.lease() as items:
        leases = take(items, 6)
        leases[0].ack()
        leases[4].reject()
        loader.state_dict()
        runner = CliRunner(env={"COLUMNS": "200"})
        shown, found = (runner.invoke(app, ["audit", str(tmp_path), *options]) for options in ([], ["--json"]))
    assert shown.exit_code == 0 and "still out" in shown.stdout
    assert "of these" in shown.stdout  # rejected ones are among those acknowledged
    counts = json.loads(found.stdout)["loaders"][0]["epochs"][0]["leases"]
    assert counts == {"leased": 96, "acknowledged": 32, "rejected": 16, "out": 64, "returned": 0}


def test_a_forked_process_takes_leases_of_its_own(data: str) -> None:
    loader = make(data)
    with loader.lease() as items:
        lease = next(items)
    child = os.fork()
    if not child:
        loader.load_state_dict(loader.state_dict())
        with loader.lease() as items:
            own = next(items)
            good = own.ack() and not own.ack() and loader.position == 8
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert loader.position == 0
    assert lease.ack()


def test_a_loader_that_is_gone_leaves_no_thread_and_no_folder(data: str) -> None:
    before = set(threading.enumerate())
    loader = make(data)
    with loader.lease() as items:
        remote = pickle.loads(pickle.dumps(next(items)))
    folder = Path(loader._leases.address()).parent
    (thread,) = set(threading.enumerate()) - before
    assert remote.ack()
    del loader, items
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert not folder.exists()
    with pytest.raises(LeaseError, match="cannot be acknowledged"):
        remote.ack()


@pytest.mark.parametrize("lanes", [False, True])
def test_states_of_all_ranks_with_leases_are_described(data: str, lanes: bool, tmp_path: Path) -> None:
    states = []
    for rank in range(2):
        ds = midepoch.from_files(data).shuffle(seed=1)
        loader = (ds.filter(third) if lanes else ds).loader(8, rank=rank, world_size=2, last_batch="uneven")
        with loader.lease() as items:
            take(items, 3)[1].ack()
        states.append(loader.state_dict())
    path = tmp_path / "states.json"
    path.write_text(json.dumps(states))
    for arguments in (["inspect", str(path)], ["diff", str(path), str(path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
