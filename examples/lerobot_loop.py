"""Behaviour cloning on a LeRobot dataset in place: frames, videos and chunks of actions, with an exact resume.

python examples/lerobot_loop.py ROBOT run --die-at 5                        # ROBOT: the folder of a dataset
torchrun --nproc-per-node 2 examples/lerobot_loop.py ROBOT run              # resumes, with the same frames
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from midepoch import PipelineCheckpoint
from midepoch.integrations.lerobot import from_lerobot

GLOBAL_BATCH, EPOCHS, EVERY, CAMERA = 4, 2, 2, "observation.images.top"


class Policy(torch.nn.Module):  # type: ignore[misc]
    """Three actions from the robot's state and one small image."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(2 + 3 * 8 * 8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3 * 2)
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        image = torch.nn.functional.adaptive_avg_pool2d(batch[CAMERA], 8).flatten(1)
        actions: torch.Tensor = self.layers(torch.cat([batch["observation.state"], image], dim=1))
        return actions.view(-1, 3, 2)


def train(robot: Path, folder: Path, die_at: int | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ds = from_lerobot(robot, delta_timestamps={"action": [0.0, 0.1, 0.2]}).shuffle(seed=42)
    loader = ds.loader(GLOBAL_BATCH // size, last_batch="drop")
    checkpoint = PipelineCheckpoint(folder / "checkpoints", keep=3)
    step = checkpoint.restore_latest(loader, model, optimizer) or 0
    with open(folder / f"rows-{rank}.txt", "a", buffering=1) as seen:
        while loader.epoch < EPOCHS:
            for batch in loader:
                error = (model(batch) - batch["action"]) ** 2
                loss = (error * ~batch["action_is_pad"][:, :, None]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                print(step, *batch["index"].tolist(), file=seen)
                if step % EVERY == 0:
                    checkpoint.save(loader, model, optimizer, step=step)
                if step == die_at:
                    signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("robot", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-at", type=int, help="be killed after this step")
    args = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    train(args.robot, args.folder, args.die_at)
    dist.destroy_process_group()
