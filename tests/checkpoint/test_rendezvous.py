"""The failure of a rank reaches the others at once: on a full disk, from a dead process, in a collective."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from counting import Numbers

from forks import Forks, forked
from midepoch.checkpoint import (
    CheckpointSaveError,
    PipelineCheckpoint,
    local,
)

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if another test has used it

LONG = 100.0
"""Seconds that a rank would wait for one it does not hear of."""

FULL = """
import os, sys, time
sys.path[:0] = [sys.argv[3]]
import numpy as np
from counting import Numbers
from pathlib import Path
from midepoch.checkpoint import *
from midepoch.checkpoint import arrays

folder, case = Path(sys.argv[1]), sys.argv[2]

class Large(Numbers):
    def get_state(self):
        return {"at": np.zeros(1 << 18)}

def save(rank):
    checkpoint = PipelineCheckpoint(folder, rank=rank, world_size=3, timeout=100)
    if case == "nothing can be written at all" and rank == 0:
        while len(list(folder.glob(".ranks/*/join-*"))) < 2:
            time.sleep(0.01)
        with open(folder / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(512)):
                    pass
            except OSError:
                pass
    if case == "model of rank 0" and rank == 0:
        write = arrays.write_arrays
        def later(*arguments):  # when the others have nothing more to write
            while len(list(folder.glob(".ranks/*/done-*"))) < 2:
                time.sleep(0.01)
            write(*arguments)
        arrays.write_arrays = later
    pipeline = Large() if case == "state of rank 2" and rank == 2 else Numbers()
    model = {"w": np.zeros(1 << 18)} if case == "model of rank 0" else None
    try:
        checkpoint.save(pipeline, model, step=1)
        said = "saved"
    except CheckpointSaveError as problem:
        said = f"refused {rank} {problem}"
    os.write(1, f"{said}\\n".encode())
    time.sleep(1000)  # a rank that has died would be noticed

children = []
reader, writer = os.pipe()
for rank in range(3):
    if not (child := os.fork()):
        os.dup2(writer, 1)
        save(rank)
    children.append(child)
os.close(writer)
lines = os.fdopen(reader)
print(*(lines.readline() for _ in children), sorted(os.listdir(folder)), sep="", flush=True)
for child in children:
    os.kill(child, 9)
"""


@pytest.mark.parametrize("case", ["model of rank 0", "state of rank 2", "nothing can be written at all"])
def test_a_full_disk_fails_all_ranks_at_once(case: str, tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    folder = tmp_path / "disk"
    folder.mkdir()
    command = f'mount -t tmpfs -o size=512k tmpfs {folder} && exec "$@"'
    started = time.monotonic()
    done = subprocess.run(
        [
            "unshare",
            "-mr",
            "sh",
            "-c",
            command,
            "sh",
            sys.executable,
            str(script),
            str(folder),
            case,
            os.path.dirname(__file__),
        ],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr[:100]}")
    assert time.monotonic() - started < LONG / 4, done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    assert len(said) == 3 and any("No space left on device" in line for line in said), done
    assert "step_1" not in done.stdout.splitlines()[-1], done.stdout


def refused(folder: Path, rank: int, timeout: float, pipeline: Any = None) -> str:
    checkpoint = PipelineCheckpoint(folder, rank=rank, world_size=2, timeout=timeout)
    with pytest.raises((CheckpointSaveError, TypeError)) as caught:
        checkpoint.save(pipeline or Numbers(), extra={"x": object()} if not rank else {}, step=1)
    return str(caught.value)


def test_a_failure_is_heard_from_a_process_that_is_dead_by_now(tmp_path: Path) -> None:
    assert forked(lambda: refused(tmp_path, 0, LONG)) == 0
    started = time.monotonic()
    assert "rank 0: TypeError: extra.x is a builtins.object" in refused(tmp_path, 1, LONG)
    assert time.monotonic() - started < LONG / 4


def test_a_failure_of_an_earlier_start_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    assert forked(lambda: refused(tmp_path, 0, LONG)) == 0
    assert forked(lambda: "rank 0 did not answer" in refused(tmp_path, 1, 0.3)) == 0


def test_a_failure_before_a_restore_is_told(tmp_path: Path) -> None:
    def rank_0() -> bool:
        checkpoint = PipelineCheckpoint(tmp_path, rank=0, world_size=2, timeout=LONG)
        checkpoint._background.start("an earlier save", lambda: (_ for _ in ()).throw(OSError("no disk")))
        with pytest.raises(OSError, match="no disk"):
            checkpoint.restore_latest(Numbers())
        return True

    assert forked(rank_0) == 0
    checkpoint = PipelineCheckpoint(tmp_path, rank=1, world_size=2, timeout=LONG)
    with pytest.raises(Exception, match="rank 0: OSError: no disk"):
        checkpoint.restore_latest(Numbers())


TOGETHER = """
import json, os, sys, time
sys.path[:0] = [sys.argv[2]]
import torch, torch.distributed as dist
from counting import Numbers
from midepoch.checkpoint import *
from midepoch.checkpoint.local import LocalStore

dist.init_process_group("gloo")
rank, said = dist.get_rank(), []
model = torch.nn.Linear(4, 4)

class Same(Numbers):
    state_is_global = True

def outcome(pipeline, step):
    started = time.monotonic()
    try:
        checkpoint.save(pipeline, model, step=step)
        text = "saved"
    except CheckpointSaveError as problem:
        text = str(problem)
    said.append([text, time.monotonic() - started])

checkpoint = PipelineCheckpoint(sys.argv[1], backend="dcp", timeout=100)
outcome(Same(rank), 1)
sink = LocalStore.sink
if rank == 0:
    LocalStore.sink = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
outcome(Same(1), 2)
LocalStore.sink = sink
outcome(Same(1), 3)
with open(f"{sys.argv[1]}.{rank}", "w") as file:
    json.dump(said, file)
"""


def test_ranks_that_write_together_do_not_wait_for_one_that_fails(torch_forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    torch_forks.ranks(2, str(script), str(tmp_path / "run"), os.path.dirname(__file__))
    for rank in range(2):
        places, small, saved = json.loads((tmp_path / f"run.{rank}").read_text())
        assert (
            "at is 0 on rank 0 and 1 on rank 1" in places[0]
            and "No space left on device" in small[0]
            and saved[0] == "saved"
        )
        assert max(seconds for _, seconds in (places, small, saved)) < LONG / 4


def ranks(size: int, action: Any) -> list[str]:
    def run(rank: int) -> str:
        try:
            return str(action(rank))
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("case", ["extra of rank 0", "state of rank 1", "begin of rank 0"])
def test_a_rank_that_fails_before_the_rendezvous_is_not_waited_for(case: str, tmp_path: Path) -> None:
    class Refuses(Numbers):
        def get_state(self) -> Any:
            raise RuntimeError("no state")

    def save(rank: int) -> Any:
        checkpoint = PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=300)
        if case == "begin of rank 0" and rank == 0:

            def begin(*_: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            checkpoint._steps.begin = begin  # type: ignore[method-assign]
        pipeline = Refuses() if case == "state of rank 1" and rank == 1 else Numbers()
        extra = {"x": object()} if case == "extra of rank 0" else {}
        return checkpoint.save(pipeline, step=1, extra=extra)

    started = time.monotonic()
    said = ranks(3, save)
    assert time.monotonic() - started < 200, said
    assert all("Error" in text for text in said), said
    assert PipelineCheckpoint(tmp_path).steps() == []
    assert (
        ranks(
            3, lambda rank: PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=300).save(Numbers(), step=1)
        )
        == ["1"] * 3
    )


def test_several_ranks_have_to_name_the_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several ranks"):
        PipelineCheckpoint(tmp_path, rank=0, world_size=2).save(Numbers())
    for backend in ("dcp", "orbax"):
        with pytest.raises(ValueError, match="initialised"):
            PipelineCheckpoint(tmp_path, backend=backend, rank=0, world_size=2)


def test_ranks_restore_from_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PipelineCheckpoint(tmp_path).save(step=3)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(local.LocalStore, "put", refuse)
    assert (
        ranks(3, lambda rank: PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=300).restore_latest())
        == ["3"] * 3
    )


def test_a_save_that_failed_on_one_rank_does_not_put_the_ranks_out_of_step(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        checkpoint = PipelineCheckpoint(tmp_path, async_save=True, rank=rank, world_size=2, timeout=300)
        prune, told = checkpoint._prune, []

        def fails_once(*arguments: Any) -> None:
            checkpoint._prune = prune  # type: ignore[method-assign]
            raise OSError(errno.ESTALE, "Stale file handle")

        for step in range(1, 6):
            if rank == 1 and step == 2:
                checkpoint.wait()  # for the step before
                checkpoint._prune = fails_once  # type: ignore[method-assign]
            try:
                checkpoint.save(Numbers(step), step=step)
            except OSError as problem:
                told.append((step, problem.errno))
        checkpoint.wait()
        return told

    said = ranks(2, run)
    assert said == ["[]", f"[(3, {errno.ESTALE})]"], "told by the call after it, which saves all the same"
    assert PipelineCheckpoint(tmp_path).steps() == [1, 2, 3, 4, 5]
