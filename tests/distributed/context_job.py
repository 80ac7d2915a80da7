"""Attention over context-parallel ranks: run by test_context_parallel.py under torchrun.

context_job.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from midepoch.errors import WorldError
from midepoch.transforms.batch import Batch
from midepoch.transforms.context import CP_LAYOUTS, ContextSlice, whole
from midepoch.transforms.formats import finish, present
from midepoch.transforms.layout import Layout
from midepoch.transforms.packing import Documents, PackSpec, best_fit

VOCABULARY, WIDTH, LONGEST, PAD = 50, 8, 64, 1


class Model:
    """Embeddings of tokens and positions, one layer of causal attention within documents, and logits."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.tokens, self.positions = drawn(VOCABULARY, WIDTH), drawn(LONGEST, WIDTH)
        self.query, self.key, self.value = (drawn(WIDTH, WIDTH) for _ in range(3))
        self.head = drawn(WIDTH, VOCABULARY)

    def projected(self, batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        embedded = self.tokens[batch["input_ids"].long()] + self.positions[batch["position_ids"].long()]
        return embedded @ self.query, embedded @ self.key, embedded @ self.value


def documents_in(batch: dict[str, Any]) -> torch.Tensor:
    """The document of each token, 0 for padding."""
    found: torch.Tensor = batch["segment_ids"] if "segment_ids" in batch else batch["attention_mask"]
    return found


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asking: torch.Tensor, given: torch.Tensor, places: Any
) -> torch.Tensor:
    """Of queries in documents ``asking`` over keys in documents ``given``, not after the query; places of both."""
    own, others = places
    seen = (asking.unsqueeze(-1) == given.unsqueeze(-2)) & (others.unsqueeze(-2) <= own.unsqueeze(-1))
    scores = (query @ key.transpose(-1, -2) / WIDTH**0.5).masked_fill(~seen, -1e30)
    return torch.softmax(scores, dim=-1) @ value


def gathered(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def batch_of(sizes: list[int]) -> Batch:
    random = np.random.default_rng(3)
    rows = [random.integers(2, VOCABULARY, size) for size in sizes]
    tokens = pa.array([row.tolist() for row in rows], pa.list_(pa.int32()))
    return Batch({"input_ids": tokens, "labels": tokens}, np.arange(len(sizes)), np.arange(len(sizes)), owned=True)


def cut(kind: str, context: ContextSlice | None) -> dict[str, Any]:
    batch = batch_of([17, 1, 30, 0, 8, 24, 5])
    if kind != "packed":
        columns = Layout(kind, "input_ids", pads=(("input_ids", PAD),), context=context).arrange(batch)
    else:
        spec = PackSpec(32, pad=PAD, extra={"labels": -100}, strategy="best_fit", cu_seqlens=True)
        sequences = best_fit(Documents.of(batch.columns, spec, batch.rows), spec)[0]
        count = len(sequences["input_ids"])
        shown: Any = present(Batch(sequences, np.arange(count), np.arange(count), owned=True), "torch")
        columns = shown if context is None else context.cut(shown, pads={"input_ids": PAD})
    found: dict[str, Any] = finish(columns, "torch")
    return found


def alone(model: Model, kind: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The outputs of one process without context parallelism, the documents of all tokens, and the loss."""
    batch = cut(kind, None)
    shape = batch["input_ids"].shape
    batch.setdefault("position_ids", torch.arange(shape[-1]).expand(shape))
    documents, places = documents_in(batch), torch.arange(shape[-1]).expand(shape)
    query, key, value = model.projected(batch)
    out = attention(query, key, value, documents, documents, (places, places))
    follows = (documents[..., 1:] == documents[..., :-1]) & (documents[..., 1:] > 0)
    labels = torch.where(follows, batch["labels"][..., 1:].long(), -100)
    logits = (out @ model.head)[..., :-1, :]
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100, reduction="sum")
    return out, documents, loss.item()


def check(model: Model, kind: str, layout: str, given: Any, group: Any) -> None:
    """Every rank has queries of its part only. All of them together give what one process alone gives."""
    batch = cut(kind, ContextSlice.of(given, layout))
    query, *local = model.projected(batch)
    documents = documents_in(batch)
    length = None if kind == "padded" else alone(model, kind)[1].shape[-1]

    def joined(part: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = whole(gathered(part, group), batch, layout, length=length)
        return found

    key, value = map(joined, local)
    given_documents = joined(documents)
    positions = joined(batch["position_ids"])
    # Causal order within a document is that of the positions, which all ranks have in common.
    out = attention(query, key, value, documents, given_documents, (batch["position_ids"], positions))

    expected, segments, loss = alone(model, kind)
    restored = joined(out)[..., : segments.shape[-1], :]
    real = segments > 0
    assert torch.equal(joined(documents)[..., : segments.shape[-1]], segments)
    error = (restored - expected)[real].abs().max().item()
    assert error < 1e-6, f"{kind} {layout}: {error}"

    logits, labels = out @ model.head, batch["shift_labels"].long()
    own = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100, reduction="sum")
    dist.all_reduce(own, group=group)
    assert abs(own.item() - loss) < 1e-6 * abs(loss), f"{kind} {layout}: loss {own.item()} instead of {loss}"


def refused(given: Any) -> str:
    try:
        ContextSlice.of(given)
    except (ValueError, WorldError) as problem:
        return str(problem)
    return ""


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, mesh = Model(), init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    done = 0
    for layout in CP_LAYOUTS:
        for kind in ("padded", "varlen", "packed"):
            for given in (mesh["cp"], dist.group.WORLD, (rank, size)):
                check(model, kind, layout, given, dist.group.WORLD)
                done += 1
    grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    for layout in CP_LAYOUTS:
        check(model, "varlen", layout, grid["cp"], grid["cp"].get_group())
        done += 1
    first = dist.new_group([0])
    said = {
        "checks": done,
        "slice": [ContextSlice.of(grid["cp"]).rank, ContextSlice.of(grid["cp"]).size],
        "grid": refused(grid),
        "outside": refused(init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))) if rank else "",
        "group": refused(first) if rank else "",
    }
    Path(folder, f"context-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
