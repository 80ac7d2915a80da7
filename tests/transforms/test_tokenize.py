"""Tokenizing: the ids of the tokenizer, whatever its settings are, and in worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import midepoch
from data import dataset_of
from forks import Forks

TOKENIZING = """
import sys, warnings
warnings.simplefilter("error")
import midepoch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
texts = [row["text"] for row in midepoch.from_files(sys.argv[1])]
tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=200, show_progress=False))
tokenizer.encode_batch(texts)  # with threads, before workers are forked
docs = midepoch.from_files(sys.argv[1]).select_columns("text")
expected = [one.ids for one in tokenizer.encode_batch(texts)]
for workers in (0, 2):
    rows = [row for batch in docs.filter(len, input_columns="text").tokenize(tokenizer).loader(16, workers, collate_fn=list) for row in batch]
    assert [row["input_ids"] for row in rows] == [ids for ids in expected if ids], workers
assert [row["input_ids"] for row in docs.tokenize(tokenizer)] == expected
from transformers import PreTrainedTokenizerFast
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
assert [row["input_ids"] for row in docs.tokenize(fast)] == expected
assert [len(row["input_ids"]) for row in docs.tokenize(fast, truncation=True, max_length=3)] == [min(3, len(ids)) for ids in expected]
packed = list(docs.tokenize(tokenizer).pack(32, eos=0).loader(4, 2))
assert sum(int((batch["segment_ids"] > 0).sum()) for batch in packed) == sum(len(ids) + 1 for ids in expected if ids)
print("done")
"""


def test_ids_are_those_of_the_tokenizer_in_workers_without_warnings(
    documents_folder: str, framework_forks: Forks
) -> None:
    [done] = framework_forks.run(["-c", TOKENIZING, documents_folder])
    assert done.stdout == "done\n", done.stderr
    assert "fork" not in done.stderr and "TOKENIZERS_PARALLELISM" not in done.stderr


def always(row: dict[str, Any]) -> bool:
    return True


def test_the_padding_of_a_tokenizer_is_not_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_id=2)
    ds = dataset_of(tmp_path / "text", pa.table({"text": ["a b " * (i % 9) for i in range(3000)]}))
    stream = ds.tokenize(tokenizer, batch_size=50).filter(always)
    plain = [row["input_ids"] for batch in stream.loader(16, collate_fn=list) for row in batch]
    busy = [row["input_ids"] for batch in stream.loader(16, 2, collate_fn=list) for row in batch]
    assert plain == busy


def test_ids_do_not_depend_on_other_uses_of_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    PreTrainedTokenizerFast = pytest.importorskip("transformers").PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    ds = dataset_of(tmp_path / "text", pa.table({"text": ["a b " * (i % 4) for i in range(60)]}))
    make = lambda: midepoch.mix([ds.take(30), ds.skip(30)], seed=1).tokenize(fast)  # noqa: E731
    stream = make()
    passing = iter(stream)
    next(passing)
    state = stream.state_dict()
    rest = [row["input_ids"] for row in passing]
    fast(["a b", "a"], padding=True)
    again = make()
    again.load_state_dict(state)
    assert [row["input_ids"] for row in again] == rest
    with pytest.raises(TypeError, match="enable_truncation"):
        ds.tokenize(tokenizer, truncation=True)
