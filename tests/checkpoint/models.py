"""A small model with everything that a checkpoint has to keep: weights, buffers, an optimizer, dropout."""

from __future__ import annotations

from typing import Any

import torch

import midepoch


def make_model(seed: int = 0, width: int = 16) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def dataset(small_files: Any) -> midepoch.Dataset:
    return midepoch.from_files(small_files)
