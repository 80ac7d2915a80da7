"""Every example of the three texts that describe ``fast_hf_loader_simple``, unchanged but for data set, model and paths.

Each script checks itself: the rows of the interrupted and the resumed part together are those of one epoch, in order.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy import MODEL

from forks import PYTHON, Forks
from launch import Launch

SETUP = (
    MODEL
    + """
from pathlib import Path


def tokenize(example):
    return {"length": len(example["text"])}

tokenize_function = tokenize
PATH, DATA = "parquet", dict(data_files=DATA_FILES, cache_dir=CACHE)
"""
)

BASIC_USAGE = """
from fast_hf_loader_simple import fast_load_iterable_dataset

ids = fast_load_iterable_dataset(PATH, split="train", **DATA)
seen = []
for step, example in enumerate(ids):
    seen.append(example["number"])
    if step % 100 == 0:
        checkpoint = {
            'model': model.state_dict(),
            'optimizer': optimizer.state_dict(),
            'dataset': ids.state_dict(),
            'step': step
        }
        torch.save(checkpoint, f'checkpoint_{step}.pt')
whole = seen

checkpoint = torch.load('checkpoint_300.pt')
model.load_state_dict(checkpoint['model'])
optimizer.load_state_dict(checkpoint['optimizer'])
ids = fast_load_iterable_dataset(PATH, split="train", **DATA)
ids.load_state_dict(checkpoint['dataset'])

rest = []
for step, example in enumerate(ids, start=checkpoint['step'] + 1):
    rest.append((step, example["number"]))
assert rest == list(enumerate(whole))[301:]
assert len(whole) == len(ids) == 480
"""

STATEFUL = """
from fast_hf_loader_simple import fast_load_iterable_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

ids = fast_load_iterable_dataset(PATH, split="train", **DATA)
ids = ids.shuffle(seed=42)

dataloader = StatefulDataLoader(
    ids,
    batch_size=32,
    num_workers=NUM_WORKERS
)

num_epochs = 2
for epoch in range(num_epochs):
    for batch_idx, batch in enumerate(dataloader):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        if batch_idx % 5 == 0:
            checkpoint = {
                'model': model.state_dict(),
                'optimizer': optimizer.state_dict(),
                'dataloader': dataloader.state_dict(),
                'epoch': epoch,
                'batch_idx': batch_idx
            }
            torch.save(checkpoint, f'checkpoint_e{epoch}_b{batch_idx}.pt')

whole, per_epoch = list(SEEN), len(SEEN) // 2
checkpoint = torch.load('checkpoint_e1_b5.pt')
model.load_state_dict(checkpoint['model'])
optimizer.load_state_dict(checkpoint['optimizer'])

dataloader = StatefulDataLoader(ids, batch_size=32, num_workers=NUM_WORKERS)
dataloader.load_state_dict(checkpoint['dataloader'])

SEEN.clear()
for batch in dataloader:
    model(batch)
assert SEEN == whole[per_epoch + 6:], (len(SEEN), per_epoch)
assert sorted(sum(whole[:per_epoch], [])) == list(range(480))
"""

COMPLETE = """
from fast_hf_loader_simple import fast_load_iterable_dataset
from torchdata.stateful_dataloader import StatefulDataLoader

def train(resume_from=None):
    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters())

    ids = fast_load_iterable_dataset(PATH, split="train", **DATA)
    ids = ids.shuffle(seed=42)
    ids = ids.map(tokenize)

    dataloader = StatefulDataLoader(
        ids,
        batch_size=32,
        num_workers=NUM_WORKERS
    )

    start_step = 0
    if resume_from:
        checkpoint = torch.load(resume_from)
        model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        dataloader.load_state_dict(checkpoint['dataloader'])
        start_step = checkpoint['step'] + 1
        print(f"Resumed from step {start_step}")

    for step, batch in enumerate(dataloader, start=start_step):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        if step % 5 == 0:
            checkpoint_path = f'checkpoints/checkpoint_step_{step}.pt'
            Path(checkpoint_path).parent.mkdir(exist_ok=True)

            checkpoint = {
                'model': model.state_dict(),
                'optimizer': optimizer.state_dict(),
                'dataloader': dataloader.state_dict(),
                'step': step
            }
            torch.save(checkpoint, checkpoint_path)
            print(f"Saved checkpoint at step {step}")

        if step % 100 == 0:
            print(f"Step {step}, Loss: {loss.item():.4f}")

train()
whole = list(SEEN)
SEEN.clear()
train(resume_from='checkpoints/checkpoint_step_5.pt')
assert SEEN == whole[6:]
"""

BASIC_LOADING = """
from fast_hf_loader_simple import fast_load_iterable_dataset

world_size = 3
everything = []
for rank in range(world_size):
    ids = fast_load_iterable_dataset(PATH, split="train", **DATA)
    ids = ids.shuffle(seed=42)
    ids = ids.shard(num_shards=world_size, index=rank)
    ids = ids.map(tokenize_function)
    for example in ids:
        assert example["length"] == len(example["text"])
        everything.append(example["number"])
assert sorted(everything) == list(range(480))
"""

DDP = """
import os
import torch.distributed as dist
from fast_hf_loader_simple import fast_load_iterable_dataset

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()

def make():
    ids = fast_load_iterable_dataset(PATH, split="train", **DATA)
    ids = ids.shuffle(seed=42)
    return ids.shard(num_shards=world_size, index=rank, mode='auto')

ids = make()
seen = []
for step, example in enumerate(ids):
    seen.append(example["number"])
    if rank == 0 and step % 50 == 0:
        checkpoint = {
            'model': model.state_dict(),
            'optimizer': optimizer.state_dict(),
            'dataset': ids.state_dict(),
            'step': step
        }
        torch.save(checkpoint, f'checkpoint_{step}.pt')

dist.barrier()
checkpoint_path = Path('checkpoint_100.pt')
if checkpoint_path.exists():
    checkpoint = torch.load(checkpoint_path, map_location='cpu')
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    ids = make()
    ids.load_state_dict(checkpoint['dataset'])
rest = [example["number"] for example in ids]
assert rest == seen[101:], rank
gathered = [None] * world_size
dist.all_gather_object(gathered, seen)
assert sorted(sum(gathered, [])) == list(range(480))

# shuffle() without a seed: the ranks agree on one
drawn = fast_load_iterable_dataset(PATH, split="train", **DATA).shuffle().shard(world_size, rank)
seeds = [None] * world_size
dist.all_gather_object(seeds, drawn.state_dict()["shuffle_seed"])
assert len(set(seeds)) == 1
loader = fast_load_iterable_dataset(PATH, split="train", **DATA).shuffle(seed=1).loader(10)
mine = [int(i) for batch in loader for i in batch["number"]]
dist.all_gather_object(gathered, mine)
assert sorted(sum(gathered, [])) == list(range(480))  # rank and world size were found by themselves
dist.destroy_process_group()
"""


@pytest.fixture
def prepared(tmp_path: Path) -> str:
    data = tmp_path / "data"
    data.mkdir()
    for file in range(6):
        numbers = range(file * 80, (file + 1) * 80)
        table = pa.table({"number": numbers, "text": [f"text {i}" * (i % 3) for i in numbers]})
        pq.write_table(table, data / f"{file}.parquet")
    return f"DATA_FILES, CACHE = {str(data) + '/*.parquet'!r}, {str(tmp_path / 'cache')!r}\n" + SETUP


def run(tmp_path: Path, text: str, forks: Forks) -> str:
    script = tmp_path / "script.py"
    script.write_text(text)
    (done,) = forks.run([str(script)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_basic_usage(tmp_path: Path, prepared: str, torch_forks: Forks) -> None:
    run(tmp_path, prepared + BASIC_USAGE, torch_forks)


def test_basic_loading(tmp_path: Path, prepared: str, torch_forks: Forks) -> None:
    run(tmp_path, prepared + BASIC_LOADING, torch_forks)


@pytest.mark.parametrize("workers", [0, 4])
def test_with_stateful_dataloader(tmp_path: Path, prepared: str, workers: int, torch_forks: Forks) -> None:
    run(tmp_path, f"NUM_WORKERS = {workers}\n" + prepared + STATEFUL, torch_forks)


@pytest.mark.parametrize("workers", [0, 2])
def test_complete_training_example(tmp_path: Path, prepared: str, workers: int, torch_forks: Forks) -> None:
    text = f"NUM_WORKERS = {workers}\n" + prepared + COMPLETE
    assert "Resumed from step 6" in run(tmp_path, text, torch_forks)


def test_ddp(tmp_path: Path, prepared: str, launched: Launch) -> None:
    """Three real ranks; rank 0's state restores all of them."""
    script = tmp_path / "script.py"
    script.write_text(prepared + DDP)
    launched(3, str(script), cwd=tmp_path)


def test_module_shows_instant_loading(tmp_path: Path, torch_forks: Forks) -> None:
    torch_forks.executable(tmp_path / "python")
    [done] = torch_forks.run(["-m", "fast_hf_loader_simple"], env={PYTHON: str(tmp_path / "python")})
    assert done.returncode == 0, done.stderr
    assert "datasets was imported" in done.stdout
    assert "datasets was not imported" in done.stdout
