"""Every example of the text on structured files, unchanged but for imports, paths and the model, on a real S3 server.

Each script checks itself: the rows before and after the interruption together are those of one epoch, in order.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy import MODEL

from forks import Forks
from launch import Launch
from s3 import KEY, SECRET, Server

ROWS = 2400

SETUP = (
    MODEL
    + """
import os, sys, logging
from midepoch import StructuredDataset, CheckpointMismatchError

flat = lambda lists: [i for one in lists for i in one]
num_epochs = 2
WORKERS = int(os.environ.get("WORKERS", "8"))
"""
)

SAVING = """
loader, dataset = StructuredDataset.create_dataloader(
    path=PATH,
    format="parquet",
    shuffle=True,
    shuffle_seed=42,
    num_workers=WORKERS,
    batch_size=20,
)

for epoch in range(num_epochs):
    dataset.set_epoch(epoch)
    for step, batch in enumerate(loader):
        loss = model(batch)
        loss.backward()
        optimizer.step()

        if step % 25 == 0:
            torch.save({
                "model":   model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "dataset": dataset.state_dict(),
                "epoch":   epoch,
                "step":    step,
                "seen":    SEEN,
            }, f"ckpt_{epoch}_{step}.pt")
        if os.environ.get("DIE") == f"{epoch}_{step}":
            os.kill(os.getpid(), 9)
torch.save(SEEN, "whole.pt")
"""

RESUMING = """
os.replace(os.environ["CHECKPOINT"], "checkpoint.pt")
loader, dataset = StructuredDataset.create_dataloader(
    path=PATH,
    format="parquet",
    shuffle=True,
    shuffle_seed=42,    # must match the original run
    num_workers=WORKERS,
    batch_size=20,
)

start_epoch = 0
if os.path.exists("checkpoint.pt"):
    ckpt = torch.load("checkpoint.pt")
    model.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    dataset.load_state_dict(ckpt["dataset"])  # restores epoch + skips completed shards
    start_epoch = ckpt["epoch"]

for epoch in range(start_epoch, num_epochs):
    if epoch != start_epoch or os.environ.get("NAME_IT"):
        dataset.set_epoch(epoch)
    for batch in loader:
        model(batch)

assert ckpt["dataset"]["_num_workers"] == 2 and ckpt["dataset"]["_shuffle_seed"] == 42
assert ckpt["seen"] + SEEN == torch.load("whole.pt"), "not the batches of an uninterrupted run"
assert sorted(flat(ckpt["seen"] + SEEN)[-2400:]) == list(range(2400))
"""

MISMATCH = """
loader, dataset = StructuredDataset.create_dataloader(path=PATH, format="parquet", shuffle=True, shuffle_seed=7)
start_epoch = 1
ckpt = torch.load("ckpt_1_100.pt")
try:
    dataset.load_state_dict(ckpt["dataset"])
except CheckpointMismatchError as e:
    logging.warning("Checkpoint incompatible, starting epoch from scratch: %s", e)
    start_epoch = 0
    assert "Checkpoint shard does not match any current split." in str(e)
    assert "shuffle_seed changed: checkpoint=42, current=7" in str(e)
assert start_epoch == 0
assert sorted(i for batch in loader for i in batch["number"].tolist()) == list(range(2400))
"""

RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")

def make():
    return StructuredDataset.create_dataloader(
        path=PATH, format="parquet", shuffle=True, num_workers=2, batch_size=20,
        num_ranks=dist.get_world_size(), rank=dist.get_rank(),
    )

loader, dataset = make()
epoch, step = 0, 0
batches = iter(loader)
for step in range(30):
    model(next(batches))
before = list(SEEN)

# Save — gather on rank 0, save once
dataset_state = dataset.state_dict()
all_dataset_states = [None] * dist.get_world_size()
dist.all_gather_object(all_dataset_states, dataset_state)

if dist.get_rank() == 0:
    torch.save({
        "model":          model.state_dict(),
        "optimizer":      optimizer.state_dict(),
        "dataset_states": all_dataset_states,   # list indexed by rank
        "epoch":          epoch,
        "step":           step,
    }, "checkpoint.pt")

# Save — every rank writes its own file
torch.save(
    {"model": model.state_dict(), "dataset": dataset.state_dict()},
    f"ckpt_rank{dist.get_rank()}_{step}.pt",
)
dist.barrier()

# Resume — load on rank 0, broadcast, each rank takes its slice
if dist.get_rank() == 0:
    ckpt = torch.load("checkpoint.pt", weights_only=False)
else:
    ckpt = None
ckpt_list = [ckpt]
dist.broadcast_object_list(ckpt_list, src=0)
ckpt = ckpt_list[0]

def rest(state):
    SEEN.clear()
    loader, dataset = make()
    dataset.load_state_dict(state)
    for batch in loader:
        model(batch)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, flat(before) + flat(SEEN))
    assert sorted(flat(everyone)) == list(range(2400))

model.load_state_dict(ckpt["model"])
optimizer.load_state_dict(ckpt["optimizer"])
rest(ckpt["dataset_states"][dist.get_rank()])

# Resume — every rank reads its own file
ckpt = torch.load(f"ckpt_rank{dist.get_rank()}_{step}.pt", weights_only=False)
model.load_state_dict(ckpt["model"])
rest(ckpt["dataset"])

# Better than documented: rank 0's state is enough
rest(all_dataset_states[0])
"""


@pytest.fixture
def url(s3_server: Server, tmp_path: Path) -> str:
    bucket = s3_server.folder / f"seed-{tmp_path.name[-20:].strip('_').replace('_', '-').lower()}"
    (bucket / "data").mkdir(parents=True)
    for i in range(4):
        numbers = range(i * 600, (i + 1) * 600)
        table = pa.table({"number": list(numbers), "text": [f"row {n}" for n in numbers]})
        pq.write_table(table, bucket / "data" / f"part-{i:04}.parquet", row_group_size=100)
    return f"s3://{bucket.name}/data/"


@pytest.fixture
def environment(s3_server: Server) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://{s3_server.endpoint}",
        "OMP_NUM_THREADS": "1",
    }


def write(tmp_path: Path, url: str, text: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(f"PATH = {url!r}\n{SETUP}{text}")
    return str(script)


def test_saving_resuming_and_refusing(
    tmp_path: Path, url: str, environment: dict[str, str], torch_forks: Forks
) -> None:
    """Killed in mid-epoch; resumed with another number of workers; the resumed epoch named or not."""

    def run(text: str, **more: str) -> int:
        (done,) = torch_forks.run([write(tmp_path, url, text)], cwd=tmp_path, env={**environment, **more})
        assert done.returncode in (0, -9), done.stderr[-3000:]
        return done.returncode

    assert run(SAVING, WORKERS="1") == 0
    assert run(SAVING, DIE="1_60", WORKERS="2") == -9
    assert run(MISMATCH) == 0
    for checkpoint, workers, name_it in (("ckpt_0_25.pt", "0", ""), ("ckpt_1_50.pt", "1", "yes")):
        assert run(RESUMING, CHECKPOINT=checkpoint, WORKERS=workers, NAME_IT=name_it) == 0


def test_ranks(tmp_path: Path, url: str, environment: dict[str, str], launched: Launch) -> None:
    launched(2, write(tmp_path, url, RANKS), cwd=tmp_path, env=environment)
