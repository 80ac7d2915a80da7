"""Labels of packed sequences: no padding and no first token counts in the loss of a real model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import midepoch

LENGTH, EOS, PAD = 32, 1, 0


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> midepoch.Dataset:
    import pyarrow as pa

    from data import dataset_of

    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 60, int(rng.integers(1, 45))).tolist() for _ in range(120)]
    kept = [[token if k % 2 else -100 for k, token in enumerate(tokens)] for tokens in documents]
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32())), "own": kept})
    return dataset_of(tmp_path_factory.mktemp("labels"), table)


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def expected_loss(model: Any, rows: list[dict[str, Any]], *, first: bool) -> float:
    """The mean over tokens that a token of the sequence predicts: not padding and, unless ``first``, of one document."""
    tokens = torch.tensor([row["input_ids"] for row in rows])
    segments = torch.tensor([row["segment_ids"] for row in rows])
    positions = torch.tensor([row["position_ids"] for row in rows])
    counts = segments[:, 1:] > 0
    if not first:
        counts &= positions[:, 1:] > 0
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return float(losses[counts].mean())


def loss(model: Any, batch: Any) -> float:
    with torch.no_grad():
        return float(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
@pytest.mark.parametrize("first", [True, False])
def test_the_loss_is_that_of_the_documents(ds: midepoch.Dataset, model: Any, strategy: str, first: bool) -> None:
    packed = ds.pack(LENGTH, strategy=strategy, eos=EOS, pad=PAD, labels=True, mask_first=not first)
    rows = list(packed)
    padded = sum(row["segment_ids"].count(0) for row in rows)
    assert padded > 0
    (batch,) = packed.loader(len(rows))
    assert batch["labels"].dtype == torch.int64 and batch["input_ids"].dtype == torch.int32
    assert int((batch["labels"][batch["segment_ids"] == 0] == -100).sum()) == padded
    kept = (batch["segment_ids"] > 0) & ((batch["position_ids"] > 0) | first)
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept].long())
    assert (batch["labels"][~kept] == -100).all()
    assert loss(model, batch) == pytest.approx(expected_loss(model, rows, first=first), rel=1e-5)


@pytest.mark.parametrize("strategy", ["concat", "best_fit"])
def test_the_collator_of_hugging_face_counts_no_padding(ds: midepoch.Dataset, model: Any, strategy: str) -> None:
    """It makes labels itself, from the token that the tokenizer calls padding: pass that as ``pad``."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"[{i}]": i for i in range(64)}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[2]")),
        pad_token="[0]", eos_token="[1]",
    )  # fmt: skip
    collate = transformers.DataCollatorForLanguageModeling(fast, mlm=False)
    packed = ds.pack(LENGTH, strategy=strategy, eos=fast.eos_token_id, pad=fast.pad_token_id)
    rows = list(packed)
    batch = collate([{"input_ids": row["input_ids"]} for row in rows])
    padded = torch.tensor([row["segment_ids"] for row in rows]) == 0
    assert padded.any() and (batch["labels"][padded] == -100).all() and (batch["labels"][~padded] != -100).all()
    assert loss(model, batch) == pytest.approx(expected_loss(model, rows, first=True), rel=1e-5)
    (own,) = ds.pack(LENGTH, strategy=strategy, eos=EOS, pad=PAD, labels=True).loader(
        len(rows), collate_fn=transformers.default_data_collator
    )
    assert loss(model, own) == pytest.approx(loss(model, batch), rel=1e-6)


def test_labels_of_your_own(ds: midepoch.Dataset) -> None:
    mine = ds.rename_column("own", "labels").pack(LENGTH, eos=EOS, pad=PAD, extra={"labels": -100}, mask_first=True)
    for row in mine:
        for token, label, segment, position in zip(
            row["input_ids"], row["labels"], row["segment_ids"], row["position_ids"], strict=True
        ):
            assert label in (-100, token) and (label == -100 or (segment and position))
    assert any(label != -100 for row in mine for label in row["labels"])


def test_labels_of_small_tokens_are_wide_enough(ds: midepoch.Dataset) -> None:
    (row, *_) = ds.pack(LENGTH, dtype="uint16", pad=0, labels=True).with_format("numpy")
    assert row["input_ids"].dtype == np.uint16 and row["labels"].dtype == np.int64
