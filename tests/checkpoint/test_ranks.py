"""Checkpoints of several ranks: real processes, real deaths, torchrun, JAX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counting import Numbers

import ports
from forks import Forks
from midepoch.checkpoint import CheckpointMismatchError, CheckpointSaveError, PipelineCheckpoint
from midepoch.checkpoint.local import LocalStore
from midepoch.checkpoint.rendezvous import Leader, Members, Notes
from midepoch.distributed.world import World

JOB = Path(__file__).with_name("rank_job.py")
ROWS = 48
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def data(make_files: Any) -> str:
    return str(Path(make_files([20, 28])[0]).parent)


@pytest.fixture
def run(plain_forks: Forks) -> Run:
    """Runs ranks, each a process of its own; what each said."""

    def said(folder: Path, data: str, size: int, how: str, step: int = 0, when: str = "") -> list[str]:
        commands = [[str(JOB), str(folder), data, str(rank), str(size), how, str(step), when] for rank in range(size)]
        ended = plain_forks.run(*commands)
        return [done.stdout.strip() or f"rc {done.returncode}: {done.stderr[-2000:]}" for done in ended]

    return said


@pytest.mark.parametrize("how", ["save", "async"])
def test_saved_on_three_restored_on_any_number(how: str, data: str, tmp_path: Path, run: Run) -> None:
    assert run(tmp_path, data, 3, how, 10) == ["saved [10]"] * 3
    assert sorted(os.listdir(tmp_path)) in (["step_10"], [".ranks", "step_10"])
    files = sorted(os.listdir(tmp_path / "step_10"))
    assert files == sorted(
        ["data.json", "model.json", "model.safetensors", "manifest.json", *(f"rng-{r:05d}.json" for r in range(3))]
    )
    for size in (1, 2, 4) if how == "save" else (3,):
        said = run(tmp_path, data, size, "restore")
        rows: list[int] = []
        draws = set()
        for text in said:
            match = re.fullmatch(r"restored 10 10 10.0 (\[.*\]) (\S+)", text)
            assert match, text
            rows += [row for batch in eval(match[1]) for row in batch]
            draws.add(match[2])
        assert len(rows) == len(set(rows)) == ROWS - 12, "3 ranks have had 2 batches of 2 rows"
        assert len(draws) == size, "every rank has a generator of its own"


DEATHS = ["1:join", "1:done", "1:outcome", "2:sink", "0:admit", "0:gather", "0:commit", "0:close"]


@pytest.mark.parametrize("when", DEATHS)
def test_a_rank_that_dies_leaves_no_commit_and_nobody_waits(when: str, data: str, tmp_path: Path, run: Run) -> None:
    PipelineCheckpoint(tmp_path).save(step=1)
    said = run(tmp_path, data, 3, "save", 2, when=when)
    dead = int(when[0])
    assert said[dead].startswith("rc -9")
    checkpoint = PipelineCheckpoint(tmp_path)
    committed = when in ("0:close", "1:outcome")
    assert checkpoint.steps() == ([1, 2] if committed else [1])
    for rank, text in enumerate(said):
        if rank != dead and when != "1:outcome":
            assert text.startswith("refused CheckpointSaveError"), said
    for step in checkpoint.steps():
        checkpoint.verify(step)
    assert run(tmp_path, data, 2, "again", 2) == [f"saved {[1, 2]}"] * 2, "the next run, of another size, saves"
    left = [name for name in os.listdir(tmp_path) if name != ".ranks"]
    assert sorted(left) == ["step_1", "step_2"]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_between_two_saves_is_not_waited_for(dead: int, data: str, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, data, 2, "save", 2, when=f"then {dead}")
    assert said[dead].startswith("rc -9")
    assert f"rank {dead}" in said[1 - dead] and "has died before it c" in said[1 - dead], said
    assert PipelineCheckpoint(tmp_path).steps() == [1]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_before_the_first_save_is_not_waited_for(
    dead: int, data: str, tmp_path: Path, run: Run
) -> None:
    said = run(tmp_path, data, 2, "save", 1, when=f"first {dead}")
    assert said[dead].startswith("rc -9")
    assert f"rank {dead}" in said[1 - dead] and "has died before it c" in said[1 - dead], said
    assert run(tmp_path, data, 2, "save", 1) == [f"saved {[1]}"] * 2, "the notes of the dead disturb nobody"
    assert not list(tmp_path.glob(".ranks/present*"))


def test_a_rank_that_stays_away(data: str, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, data, 2, "save", 1, when="alone")
    assert (
        "did not come to save-1-1 within 2 s" in said[0]
        and "rank=0, world_size=1" in said[0]
        and said[1].startswith("rc -9")
    )
    assert PipelineCheckpoint(tmp_path).steps() == []


def test_ranks_at_different_places_are_told(data: str, tmp_path: Path, run: Run) -> None:
    said = run(tmp_path, data, 3, "save", 1, when="ahead")
    assert all(
        "the pipelines of the ranks differ: position is 12 on rank 0 and 18 on rank 2." in text for text in said
    ), said
    assert PipelineCheckpoint(tmp_path).steps() == []


def threads(size: int, action: Any) -> list[Any]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(action, rank) for rank in range(size)]]


def test_pipelines_of_users_keep_a_state_for_each_rank(tmp_path: Path) -> None:
    threads(
        3,
        lambda rank: PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=20).save(Numbers(10 + rank), step=1),
    )

    def restore(rank: int, size: int) -> int:
        pipeline = Numbers()
        PipelineCheckpoint(tmp_path, rank=rank, world_size=size, timeout=20).restore_latest(pipeline)
        return pipeline.at

    assert threads(3, lambda rank: restore(rank, 3)) == [10, 11, 12]
    with pytest.raises(CheckpointMismatchError, match="world_size"):
        threads(2, lambda rank: restore(rank, 2))
    with pytest.raises(CheckpointMismatchError, match="world_size"):
        restore(0, 1)


def test_many_saves_in_a_row_leave_nothing_behind(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        checkpoint = PipelineCheckpoint(tmp_path, rank=rank, world_size=3, timeout=20, keep=2)
        for step in range(1, 9):
            checkpoint.save(Numbers(step), step=step)

    threads(3, run)
    assert PipelineCheckpoint(tmp_path).steps() == [7, 8]
    assert len(list((tmp_path / ".ranks").rglob("*"))) <= 4 if (tmp_path / ".ranks").exists() else True


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    class Refuses(Numbers):
        def get_state(self) -> Any:
            return {"at": np_zeros()}

    def np_zeros() -> Any:
        import numpy as np

        return np.zeros(1 << 20)

    def save(rank: int) -> str:
        checkpoint = PipelineCheckpoint(tmp_path, rank=rank, world_size=2, timeout=20)
        if rank == 1:
            checkpoint._steps.sink = None  # type: ignore[method-assign, assignment]
        try:
            checkpoint.save(Refuses(), step=1)
        except CheckpointSaveError as problem:
            return str(problem)
        return "saved"

    said = threads(2, save)
    assert "rank 1: TypeError" in said[0] and "not callable" in said[1]
    assert PipelineCheckpoint(tmp_path).steps() == []


TORCH = """
import json, sys, torch, torch.distributed as dist, midepoch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from midepoch.checkpoint import CheckpointMismatchError, PipelineCheckpoint

def ddp(folder, data, until, mode):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    ds = midepoch.from_files(data).shuffle(seed=1).select_columns("tokens")
    loader = ds.loader(batch_size=12 // dist.get_world_size())
    checkpoint = PipelineCheckpoint(folder, keep=2, async_save=mode == "async", timeout=60)
    step = checkpoint.restore_latest(loader, model, optimizer) or 0
    while step < until:
        for batch in loader:
            loss = model(batch["tokens"].float() / 50).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            step += 1
            if step % 2 == 0:
                checkpoint.save(loader, model, optimizer, step=step)
            if step == until:
                break
    checkpoint.wait()
    return [round(x, 5) for x in model.module.weight.detach().flatten().tolist()], step

def fsdp(folder, how, mode):
    def make(width=24):
        torch.manual_seed(dist.get_rank() if how == "restore" else 0)
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 4))
        for layer in model: fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = make()
    checkpoint = PipelineCheckpoint(folder, backend="dcp", async_save=mode == "async", timeout=60)
    def train():
        model(torch.ones(4, 8)).square().sum().backward(); optimizer.step(); optimizer.zero_grad()
    if how == "save":
        train()
        checkpoint.save(None, model, optimizer, step=3)
        checkpoint.wait()
    else:
        assert checkpoint.restore_latest(None, model, optimizer) == 3
        wrong, _ = make(25)
        try:
            checkpoint.restore_latest(None, wrong)
            raise SystemExit("a model of another size was restored")
        except CheckpointMismatchError as e:
            pass
    train()
    return [round(p.full_tensor().sum().item(), 4) for p in model.parameters()]

dist.init_process_group("gloo")
for name, *arguments in json.loads(sys.argv[1]):
    said = {"ddp": ddp, "fsdp": fsdp}[name](*arguments)
    dist.barrier()
    if dist.get_rank() == 0:
        print("said", json.dumps(said), flush=True)
dist.destroy_process_group()
"""


def ranks_of_torch(size: int, tmp_path: Path, forks: Forks | None, *jobs: list[Any]) -> list[Any]:
    """Several jobs in one launch (forked, or by torchrun), one after the other; what rank 0 said at the end of each."""
    path = tmp_path / "job.py"
    path.write_text(TORCH)
    if forks is not None:
        done, *others = forks.world(size, str(path), json.dumps(jobs))
        assert not any(one.returncode for one in (done, *others)), [one.stderr[-4000:] for one in (done, *others)]
        return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("said ")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = subprocess.run(
        [*command, json.dumps(jobs)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("said ")]


@pytest.mark.parametrize("by", ["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_ddp_and_fsdp2_at_other_sizes(how: str, by: str, data: str, tmp_path: Path, torch_forks: Forks) -> None:
    forks = torch_forks if by == "forked" else None
    run, sharded = str(tmp_path / "run"), str(tmp_path / "sharded")
    whole, half, saved = ranks_of_torch(
        2,
        tmp_path,
        forks,
        ["ddp", str(tmp_path / "whole"), data, 8, how],
        ["ddp", run, data, 4, how],
        ["fsdp", sharded, "save", how],
    )
    assert half[1] == 4 and PipelineCheckpoint(run).steps() == [2, 4]
    assert {"arrays/__0_0.distcp", "arrays/__1_0.distcp"} <= set(PipelineCheckpoint(sharded).manifest(3).files)
    again = (["ddp", run, data, 8, how], ["fsdp", sharded, "restore", how])
    resumed, restored = ranks_of_torch(3, tmp_path, forks, *again)
    assert resumed == whole, "the global batch is the same, so the weights are"
    assert PipelineCheckpoint(run).steps() == [6, 8]
    assert restored == saved


JAX = """
import sys
import jax, jax.numpy as jnp, numpy as np
rank, size, port, root, how, data = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import midepoch
from midepoch.checkpoint import CheckpointSaveError, PipelineCheckpoint

mesh = Mesh(np.array(jax.devices()), ("d",))
spread, copied = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
def tree(value, sharding):
    full = np.arange(12 * 1000, dtype=np.float32).reshape(12, 1000) * value
    return {"w": jax.make_array_from_callback(full.shape, sharding, lambda i: full[i]), "key": jax.random.key(value)}
try:
    PipelineCheckpoint(f"{root}/refused", allow_pickle=True, timeout=60).save(None, {"w": [tree(3, spread)]}, step=1)
    raise SystemExit("a part was saved as the whole")
except (TypeError, CheckpointSaveError) as problem:
    assert "several processes" in str(problem) and 'backend="orbax"' in str(problem), problem
for backend, sharding in (("files", copied), ("orbax", spread)):
    checkpoint = PipelineCheckpoint(f"{root}/{backend}", backend=backend, timeout=60)
    assert checkpoint._world == (rank, size), checkpoint._world
    loader = midepoch.from_files(data).loader(batch_size=2)
    if how == "save":
        next(iter(loader))
        checkpoint.save(loader, tree(3, sharding), step=7)
    else:
        model = tree(0, sharding)
        assert checkpoint.restore_latest(loader, model) == 7
        assert loader.position == 4, loader.position
        expected = np.arange(12000, dtype=np.float32).reshape(12, 1000) * 3
        for shard in model["w"].addressable_shards:
            assert (np.asarray(shard.data) == expected[shard.index]).all()
        assert model["key"] == jax.random.key(3)
    print("done", backend, flush=True)
"""


def test_under_jax_with_several_processes(data: str, tmp_path: Path, jax_forks: Forks) -> None:
    path = tmp_path / "job.py"
    path.write_text(JAX)
    for how, size in (("save", 2), ("restore", 3)):
        port = str(ports.free())
        ranks = [[str(path), str(rank), str(size), port, str(tmp_path), how, data] for rank in range(size)]
        for done in jax_forks.run(*ranks, together=True):
            assert "done files\n" in done.stdout and "done orbax\n" in done.stdout, done.stderr[-3000:]


def test_a_rank_that_has_said_that_it_is_done_may_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it says so and dies in the very moment in which rank 0 looks."""
    store = LocalStore(tmp_path)
    notes = Notes(store, "save-1")
    leader = Leader(notes, World(0, 2), timeout=60, members=Members(store, World(0, 2)), token="t")
    leader._present = {1: ("n", {})}

    def dies(*_: Any) -> bool:
        notes.put("done-1-n", payload="all written")
        return True

    monkeypatch.setattr(Members, "has_died", dies)
    assert leader.gather() == {1: "all written"}
