"""The actor: a policy with one token of prompt and one of response, its update, and its checkpoints as verl saves them.

The generation of verl needs vLLM, SGLang or TensorRT-LLM, and so a GPU. This policy takes its place, on the CPU.
Batches, advantages, losses and the layout of checkpoints are those of verl (0.9).
"""

import os
from pathlib import Path
from typing import Any

import torch
from prompts import Prompts
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.workers.config import ActorConfig

DIGITS, BATCH, GENERATIONS = 10, 8, 6


class Policy(torch.nn.Module):  # type: ignore[misc]
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


def update(policy: Policy, optimizer: Any, batch: DataProto) -> None:
    mask = torch.ones_like(batch.batch["rewards"])
    advantages, _ = compute_grpo_outcome_advantage(batch.batch["rewards"], mask, batch.non_tensor_batch["uid"])
    now, before = policy.log_probs(batch), batch.batch["old_log_probs"]
    config = ActorConfig(strategy="fsdp", rollout_n=GENERATIONS, ppo_micro_batch_size_per_gpu=BATCH)
    loss, _ = compute_policy_loss_vanilla(before, now, advantages, mask, config=config)
    optimizer.zero_grad()
    loss.backward()
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
