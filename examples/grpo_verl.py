"""Prompts for verl: a dataloader for its trainers that loses no prompt between generation and update.

The trainers of verl take batches from ``train_dataloader``, generate ahead of the update, and save the state of the
dataloader in ``data.pt``. With a StatefulDataLoader that state is ahead of the model: prompts that were taken and not
trained on are lost at a resume. ``Prompts`` has the same interface, and a state that holds what was acknowledged.

The generation of verl needs vLLM, SGLang or TensorRT-LLM, and so a GPU. Here a tiny policy takes its place, on the CPU.
Batches, advantages, losses and the layout of checkpoints are those of verl (0.9).

python examples/grpo_verl.py run --die-at 7        # killed in the step after that, with three batches on their way
python examples/grpo_verl.py run                   # resumes from step 6: each prompt is trained on once, or rejected
"""

import argparse
import os
import signal
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.utils.dataset.rl_dataset import collate_fn
from verl.workers.config import ActorConfig

import midepoch

PROMPTS, BATCH, GENERATIONS, AHEAD, EVERY, DIGITS = 120, 8, 6, 3, 3, 10


class Prompts:
    """Dataloader for verl, over leases: ``uid`` of each prompt is the number of its lease."""

    def __init__(self, data: midepoch.Dataset, batch_size: int, **options: Any) -> None:
        self.loader = data.loader(1, collate_fn=_only_row, rank=0, world_size=1, **options)
        self._size = batch_size

    def __len__(self) -> int:
        return -(-len(self.loader) // self._size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.loader.lease() as leases:
            while prompts := list(islice(leases, self._size)):
                uids = np.array([str(lease.id) for lease in prompts], dtype=object)
                yield collate_fn([lease.batch for lease in prompts]) | {"uid": uids}

    def ack(self, uids: Iterable[str], *, rejected: bool = False) -> None:
        """Acknowledge prompts: after the update with their responses, or as rejected."""
        for uid in sorted(set(uids)):
            self.loader.ack(int(uid), rejected=rejected)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class Policy(torch.nn.Module):  # type: ignore[misc]
    """A model with one token of prompt and one of response."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Embedding(DIGITS, DIGITS)

    def log_probs(self, batch: DataProto) -> Any:
        chances = torch.log_softmax(self.logits(batch.batch["input_ids"][:, 0]), dim=-1)
        return chances.gather(1, batch.batch["responses"])

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def generate(self, batch: DataProto) -> DataProto:
        chances = torch.softmax(self.logits(batch.batch["input_ids"][:, 0]), dim=-1)
        batch.batch["responses"] = torch.multinomial(chances, 1)
        batch.batch["old_log_probs"] = self.log_probs(batch)
        batch.batch["rewards"] = (batch.batch["responses"] == batch.batch["answer"][:, None]).float()
        return batch


def train(folder: Path, die_at: int | None) -> None:
    make_data(folder / "prompts.parquet")
    ds = midepoch.from_files(folder / "prompts.parquet").with_format("torch").shuffle(seed=42)
    prompts = Prompts(ds, BATCH, audit=folder / "ledger")
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    step = restore(folder, prompts, policy, optimizer)
    log = open(folder / "prompts.txt", "a", buffering=1)  # noqa: SIM115
    print("from", step, file=log)
    for batch in generated(prompts, policy):
        rewards = batch.batch["rewards"].view(-1, GENERATIONS)
        equal = (rewards == rewards[:, :1]).all(dim=1).repeat_interleave(GENERATIONS).numpy()
        print("rejected", *sorted(set(batch.non_tensor_batch["number"][equal])), file=log)
        prompts.ack(batch.non_tensor_batch["uid"][equal], rejected=True)
        kept = batch[~equal]
        if not len(kept):
            continue
        update(policy, optimizer, kept, die=step == die_at)
        step += 1
        print("step", step, *sorted(set(kept.non_tensor_batch["number"])), file=log)
        prompts.ack(kept.non_tensor_batch["uid"])
        if step % EVERY == 0:
            save(folder, step, prompts, policy, optimizer)
    save(folder, step, prompts, policy, optimizer)


def generated(prompts: Prompts, policy: Policy) -> Iterator[DataProto]:
    """Yield batches with responses, generated some batches ahead of the update, as the asynchronous trainers do."""
    ahead: list[DataProto] = []
    for prompt in prompts:
        batch = DataProto.from_single_dict(prompt).repeat(GENERATIONS, interleave=True)
        ahead.append(policy.generate(batch))
        if len(ahead) > AHEAD:
            yield ahead.pop(0)
    yield from ahead


def update(policy: Policy, optimizer: Any, batch: DataProto, *, die: bool) -> None:
    mask = torch.ones_like(batch.batch["rewards"])
    advantages, _ = compute_grpo_outcome_advantage(batch.batch["rewards"], mask, batch.non_tensor_batch["uid"])
    now, before = policy.log_probs(batch), batch.batch["old_log_probs"]
    actor = ActorConfig(strategy="fsdp", rollout_n=GENERATIONS, ppo_micro_batch_size_per_gpu=BATCH)
    loss, _ = compute_policy_loss_vanilla(before, now, advantages, mask, config=actor)
    optimizer.zero_grad()
    loss.backward()
    if die:
        signal.raise_signal(signal.SIGKILL)
    optimizer.step()


def save(folder: Path, step: int, prompts: Prompts, policy: Policy, optimizer: Any) -> None:
    """Save a checkpoint as verl does: its parts, and then the name of the latest."""
    latest = folder / f"global_step_{step}"
    latest.mkdir(exist_ok=True)
    torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, latest / "actor.pt")
    torch.save(prompts.state_dict(), latest / "data.pt")
    (folder / "new.txt").write_text(str(step))
    os.replace(folder / "new.txt", folder / "latest_checkpointed_iteration.txt")


def restore(folder: Path, prompts: Prompts, policy: Policy, optimizer: Any) -> int:
    """Restore the latest checkpoint, and return its step. 0 if there is none."""
    name = folder / "latest_checkpointed_iteration.txt"
    if not name.exists():
        return 0
    latest = folder / f"global_step_{name.read_text()}"
    actor = torch.load(latest / "actor.pt")
    policy.load_state_dict(actor["policy"])
    optimizer.load_state_dict(actor["optimizer"])
    prompts.load_state_dict(torch.load(latest / "data.pt"))
    return int(name.read_text())


def make_data(path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = np.random.default_rng(0).integers(DIGITS, size=PROMPTS)
        numbers = [str(number) for number in range(PROMPTS)]
        pq.write_table(pa.table({"number": numbers, "input_ids": list(tokens[:, None]), "answer": 9 - tokens}), path)


def _only_row(rows: list[Any]) -> Any:
    return rows[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed in the step after this one")
    options = parser.parse_args()
    train(options.folder, options.die_at)
