"""The model of the learner, and its update by GRPO: advantages within each group of completions, clipped ratios."""

import numpy as np
import torch
from torch.nn import ParameterDict as Model
from torch.optim import Optimizer
from worker import DIGITS, Group

from midepoch import Lease

WIDTH = 16


def make_model() -> tuple[Model, Optimizer]:
    torch.manual_seed(0)
    sizes = {"left": (DIGITS, WIDTH), "right": (DIGITS, WIDTH), "out": (WIDTH, DIGITS)}
    model = Model({name: torch.randn(size) / 4 for name, size in sizes.items()})
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def update(model: Model, optimizer: Optimizer, groups: list[tuple[Lease, Group]]) -> None:
    """Make one step with groups of different prompts."""
    left, right = (torch.tensor([lease.batch[name] for lease, _ in groups]) for name in ("left", "right"))
    parts = zip(*(group for _, group in groups), strict=True)
    completions, before, rewards = (torch.tensor(np.stack(part)) for part in parts)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    hidden = torch.tanh(model["left"][left] + model["right"][right])
    now = torch.softmax(hidden @ model["out"], dim=1).gather(1, completions)
    ratio = now / before
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
