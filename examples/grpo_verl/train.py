"""GRPO with the parts of verl: every prompt is trained on once, or rejected once, over kills.

Batches are generated ahead of the update, as the asynchronous trainers of verl do. Prompts whose rewards are all equal
are rejected. When it is killed, up to four batches are on their way: a resume delivers their prompts again.

python examples/grpo_verl/train.py run        # kill it at any time (kill -9)
python examples/grpo_verl/train.py run        # resumes
midepoch audit run/ledger                     # each prompt was acknowledged once
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from actor import BATCH, DIGITS, GENERATIONS, Policy, restore, save, update
from prompts import Prompts
from verl import DataProto

import midepoch

PROMPTS, AHEAD, EVERY = 120, 3, 3


def generated(prompts: Prompts, policy: Policy) -> Iterator[DataProto]:
    """Yield batches with responses, generated some batches ahead of the update."""
    ahead: list[DataProto] = []
    for prompt in prompts:
        batch = DataProto.from_single_dict(prompt).repeat(GENERATIONS, interleave=True)
        ahead.append(policy.generate(batch))
        if len(ahead) > AHEAD:
            yield ahead.pop(0)
    yield from ahead


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = np.random.default_rng(0).integers(DIGITS, size=PROMPTS)
        numbers = [str(number) for number in range(PROMPTS)]
        pq.write_table(pa.table({"number": numbers, "input_ids": list(tokens[:, None]), "answer": 9 - tokens}), path)


def train(folder: Path) -> None:
    make_data(folder / "prompts.parquet")
    ds = midepoch.from_files(folder / "prompts.parquet").with_format("torch").shuffle(seed=42)
    prompts = Prompts(ds, BATCH, audit=folder / "ledger")
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    step = restore(folder, prompts, policy, optimizer)
    print(f"Resumed from step {step}" if step else "Started", flush=True)
    for batch in generated(prompts, policy):
        rewards = batch.batch["rewards"].view(-1, GENERATIONS)
        equal = (rewards == rewards[:, :1]).all(dim=1).repeat_interleave(GENERATIONS).numpy()
        prompts.ack(batch.non_tensor_batch["uid"][equal], rejected=True)
        kept = batch[~equal]
        if not len(kept):
            continue
        update(policy, optimizer, kept)
        prompts.ack(kept.non_tensor_batch["uid"])
        step += 1
        if step % EVERY == 0:
            save(folder, step, prompts, policy, optimizer)
            print(f"Saved step {step}", flush=True)
    save(folder, step, prompts, policy, optimizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    train(parser.parse_args().folder)
