"""A small GPT and ResNet-50, in bf16, and a training step for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.feeding.work import Scale

Batch = Mapping[str, Any]


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    """The loss of the next token of ``input_ids``."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.tokens = nn.Embedding(scale.vocabulary, scale.width)
        self.positions = nn.Embedding(scale.length, scale.width)
        self.blocks = nn.Sequential(*(Block(scale.width, max(1, scale.width // 64)) for _ in range(scale.layers)))
        self.norm, self.head = nn.LayerNorm(scale.width), nn.Linear(scale.width, scale.vocabulary, bias=False)

    def forward(self, batch: Batch) -> Any:
        ids = batch["input_ids"].long()
        x = self.tokens(ids[:, :-1]) + self.positions.weight[: ids.shape[1] - 1]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _network(scale: Scale) -> Any:
    """ResNet-50, or a few layers for a smoke run."""
    if scale.image_batch < 64:
        layers = [nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, scale.classes)]
        return nn.Sequential(*layers)
    from torchvision import models

    return models.resnet50(num_classes=scale.classes)


class Classifier(nn.Module):
    """The loss of a network for uint8 images, which are normalized on the device."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.model = _network(scale).to(memory_format=torch.channels_last)

    def forward(self, batch: Batch) -> Any:
        kind = torch.bfloat16 if torch.is_autocast_enabled("cuda") else torch.float32
        images = batch["image"].to(kind, memory_format=torch.channels_last).sub(118).div(58)
        return F.cross_entropy(self.model(images), batch["label"])


class Training:
    """A model on a device; ``step`` trains on one batch and does not wait for the device."""

    def __init__(self, loop: str, scale: Scale, device: str) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True  # shapes are always the same
        self.device = device
        self._model = (Classifier if loop == "images" else GPT)(scale).to(device)
        cuda = self._cuda = device.startswith("cuda")
        if loop == "images":
            self._optimizer: Any = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9, fused=cuda)
        else:
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=cuda)
        self.synthetic = _synthetic(loop, scale, device)

    def step(self, batch: Batch) -> None:
        # Not on a CPU: without instructions for bf16 a step of the smallest GPT takes 12 s.
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._cuda):
            loss = self._model(batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def moved(self, batch: Batch) -> Batch:
        """The batch on the device: a copy in the background if it is pinned."""
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _synthetic(loop: str, scale: Scale, device: str) -> dict[str, Any]:
    """One batch on the device, of the shapes and types that the loaders deliver."""
    if loop == "images":
        shape = (scale.image_batch, 3, scale.crop, scale.crop)
        return {
            "image": torch.randint(0, 256, shape, dtype=torch.uint8, device=device),
            "label": torch.randint(0, scale.classes, (scale.image_batch,), device=device),
        }
    ids = torch.randint(0, scale.vocabulary, (scale.sequences, scale.length), dtype=torch.int32, device=device)
    return {"input_ids": ids}
