"""Tokens of batches: counted where columns have the usual names, with and without padding."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest

import midepoch
from midepoch.loader.meter import Meter, token_counts

IDS = np.ones((4, 10), np.int64)
MASK = np.arange(10)[None, :] < np.array([10, 5, 5, 0])[:, None]


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        ({"input_ids": IDS}, (40, None)),
        ({"input_ids": IDS, "attention_mask": MASK}, (40, 20)),
        ({"tokens": IDS, "attention_mask": MASK.astype(np.int64)}, (40, 20)),
        (UserDict({"input_ids": IDS, "attention_mask": MASK}), (40, 20)),
        ({"input_ids": IDS, "attention_mask": MASK[:, :3]}, (40, None)),
        ({"token_ids": [[1, 2], [3], np.arange(5)]}, (8, 8)),
        ({"input_ids": [1, 2, 3]}, None),
        ({"tokens": ["a", "b"]}, None),
        ({"tokens": []}, None),
        ({"input_ids": IDS[0]}, None),
        ({"image": IDS}, None),
        ([1, 2], None),
        (None, None),
    ],
)
def test_counts(batch: Any, counts: Any) -> None:
    assert token_counts(batch) == counts


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    batch = {"input_ids": torch.ones(4, 10), "attention_mask": torch.from_numpy(MASK)}
    assert token_counts(batch) == (40, 20)
    elsewhere = {name: value.to("meta") for name, value in batch.items()}  # not to be read: that would wait
    assert token_counts(elsewhere) == (40, None)


def test_a_meter_adds_up_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midepoch.loader.meter._LOOK_SECONDS", 0.0)
    meter = Meter(0)
    for _ in range(5):
        meter.delivered(0.0, 4, {"input_ids": IDS, "attention_mask": MASK})
    assert meter.stats(reset=True).tokens == 100 and meter.stats().tokens in (0, None)
    meter.delivered(0.0, 4, {"input_ids": IDS, "attention_mask": MASK})
    stats = meter.stats()
    assert (stats.tokens, stats.token_slots, stats.padding_share) == (20, 40, 0.5)
    assert (meter.figures().tokens, meter.figures().slots, meter.figures().rows) == (120, 240, 24)


def test_packed_sequences(docs: midepoch.Dataset) -> None:
    ds = docs.select_columns(["tokens"]).filter(lambda row: row["tokens"] is not None and len(row["tokens"]) > 0)
    loader = ds.with_format("numpy").pack(64, "tokens", strategy="best_fit").loader(2)
    batches = sum(1 for _ in loader)
    stats, figures = loader.stats(), loader._meter.figures()
    assert figures.packed is not None and figures.places is not None and stats.tokens is not None
    assert loader.packing_efficiency == figures.packed / figures.places
    assert stats.token_slots == stats.rows * 64 and batches == stats.batches
    assert stats.tokens / stats.token_slots == pytest.approx(loader.packing_efficiency, rel=1e-3)
    assert stats.tokens_per_second is not None and "data/tokens_per_second" in stats.scalars()


def test_no_tokens(docs: midepoch.Dataset) -> None:
    loader = docs.select_columns(["id"]).with_format("numpy").loader(10)
    next(loader)
    stats = loader.stats()
    assert stats.tokens is stats.token_slots is stats.tokens_per_second is stats.padding_share is None
    assert "data/tokens_per_second" not in stats.scalars()
