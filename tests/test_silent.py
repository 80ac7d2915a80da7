"""Mistakes that nobody would notice: each is refused, or announced once in a warning, or simply works."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import midepoch
from data import write_arrow
from midepoch._internal.hints import forget_warnings
from midepoch.loader.direct import MadeAhead
from midepoch.testing import assert_resumes_exactly
from test_misuse import words

Call = Callable[[midepoch.Dataset], Any]
ROWS = 40


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> midepoch.Dataset:
    table = pa.table(
        {
            "id": range(ROWS),
            "text": [f"text {i}" for i in range(ROWS)],
            "meta": [{"lang": "en"}] * ROWS,
            "file": [{"bytes": b"", "path": "a"}] * ROWS,
            "ids": [[i] * (1 + i % 3) for i in range(ROWS)],
            "mask": [[1] * (1 + i % 3) for i in range(ROWS)],
        }
    )
    return midepoch.from_files(write_arrow(tmp_path_factory.mktemp("silent") / "a.arrow", table, 10))


def transformed() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="[PAD]")


def _of_one_loader(loader: midepoch.Loader) -> None:
    assert_resumes_exactly(lambda: loader)


def _states(ds: midepoch.Dataset, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, ds.loader(4).state_dict())


_OWN = np.random.default_rng(0)
REFUSED: list[tuple[Call, str]] = [
    (lambda ds: list(ds.filter(lambda row: (c for c in row["text"]))), r"returned a generator. Use any\(\)"),
    (lambda ds: list(ds.filter(lambda row: row["text"].isalpha)), "builtin_function_or_method. Call it"),
    (lambda ds: list(ds.filter(lambda text: text.isalpha, input_columns="text")), "Call it"),
    (lambda ds: list(ds.map(lambda row: {"n": map(len, row["text"])}).loader(4)), r"returned a map as .*'n'.*list\("),
    (lambda ds: list(ds.map(lambda row: {"n": row["meta"].lang})), r"'meta' is a dict of 'lang': row\['meta'\]"),
    (lambda ds: list(ds.map(lambda row: {"n": row["file"].size})), r"'file' holds the bytes.*decode\('file'\)"),
    (lambda ds: list(ds.map(lambda row: {"n": row.text})), r"A row is a dict: row\['text'\]"),
    (lambda ds: list(ds.batch(4).map(lambda row: {"n": row["text"].upper()})), r"'id' is a list here"),
    (lambda ds: list(ds.with_transform(lambda row: {"n": row["text"].upper()})), "list of each column: use map"),
    (lambda ds: list(ds.map(lambda row: [row, row])), "Return one dict, or use flat_map"),
    (lambda ds: list(ds.map(lambda row: {"n": {}[row["id"]]})), r"key of another dict, use \.get"),
    (lambda ds: ds.map(type("M", (), {"map": lambda self, row: row})()), r"Pass its method: map\(M\(\)\.map\)"),
    (
        lambda ds: list(ds.map(lambda row: {"t": [row["text"]] * 3}).tokenize(words(), "t")),
        r"lists of texts.*unbatch\(",
    ),
    (lambda ds: ds.tokenize(transformed(), return_tensors="pt"), "Omit return_tensors"),
    (lambda ds: midepoch.mix({"a": ds.tokenize(words()), "b": ds}).pack(8), "Tokenize 'b' before the mix"),
    (lambda ds: list(ds.map(lambda row: {"m": [1]}).pack(8, "ids", extra={"m": 0})), "'ids' has 2 values in row 1"),
    (lambda ds: ds.decode("file", "audio", sampling_rate=16), "in Hz, as in 16_000"),
    (lambda ds: ds.decode("pil"), r"first argument is a column: decode\('image'\)"),
    (lambda ds: ds.rename_column("n", "id"), r"old name comes first: rename_column\('id', 'n'\)"),
    (lambda ds: ds.sort(np.arange(ROWS)), r"ds\.select\(np\.argsort\(values\)\)"),
    (lambda ds: ds[0, "text"], r"ds\[0\]\['text'\]"),
    (lambda ds: ds[:"10%"], r"ds\.slice\(None, '10%'\)"),
    (lambda ds: ds[:3][0], r"ds\[:3\] is a dict of columns.*list\(ds\.take\(3\)\)\[0\]"),
    (lambda ds: ds[:3]["txt"], "has no 'txt'. Did you mean 'text'"),
    (lambda ds: ds.shard(1, 4), r"from 0 to 0 for num_shards=1, got 4.*index="),
    (lambda ds: ds.select(5, 10), r"ds\.slice\(5, 10\)"),
    (lambda ds: ds.select("id", "text"), r"ds\.select_columns\(\['id', 'text'\]\)"),
    (lambda ds: ds.rename_columns("text", "t"), r"ds\.rename_column\('old', 'new'\)"),
    (lambda ds: ds["train"], r"without splits: omit it"),
    (lambda ds: ds.pack("ids", 8), r"length comes first: pack\(128, column="),
    (lambda ds: ds.loader(4, local_rank=0), "Omit it: the rank is detected"),
    (lambda ds: midepoch.from_tokens(np.arange(64), 8), r"Pass its file, from_tokens\(.*dtype='int64'.*numpy\.save"),  # type: ignore[arg-type]
    (lambda ds: midepoch.PipelineCheckpoint("ck").save(1, 2, 3, 4, step=1), r"extra=\{'scheduler': scheduler\}"),  # type: ignore[arg-type]
    (lambda ds: ds.set_weights({"a": 1}), r"method of the loader: .*loader\.set_weights"),
    (lambda ds: midepoch.from_dict({"w": {"a", "b"}, "n": [1, 2]}), r"no order: pass sorted"),
    (lambda ds: midepoch.from_dict({"train": [{"x": 1}], "test": [{"x": 2}]}), r"splits.*from_list\(data\['train'\]\)"),
    (lambda ds: midepoch.mix({"a": ds}, [midepoch.Phase("p", {"a": 1.0}, rows=4)]), r"mix\(sources, Schedule\(\["),
    (lambda ds: ds.loader(4, context_parallel=(2, 0)), r"rank from 0 to size - 1, got \(2, 0\)"),
    (lambda ds: ds.loader(4)[0], r"next\(loader\) for a batch, loader\.dataset\[0\]"),
    (lambda ds: list(torch.utils.data.DataLoader(ds.loader(4), batch_size=None)), "in place of a DataLoader"),  # type: ignore[arg-type]
    (lambda ds: iter(ds.loader(4)).next(), r"Use next\(batches\)"),
    (lambda ds: midepoch.mix({"a": ds}, [1]).loader(4).weights.update(a=2) or 1 / 0, "division"),
    (lambda ds: midepoch.mix({"a": ds}, [1]).loader(4).weights.__setitem__("a", 2), r"Use loader\.set_weights"),
    (lambda ds: next(ds.loader(4, collate_fn=torch.stack)), r"row is a dict: row\['text'\]"),
    (lambda ds: ds.loader(4).exclude(rows=np.ones(ROWS, bool)), r"np\.flatnonzero\(mask\)"),
    (lambda ds: ds.loader(4).load_state_dict({"midepoch": np.int64(1)}), "int64, not an int: the state was converted"),
    (lambda ds: ds.loader(4).load_state_dict({"r": ds.loader(4).state_dict()}), r"pass state\['r'\]"),
    (lambda ds: ds.loader(4).load_state_dict(_states(ds, "train", "valid")), r"'train', 'valid'.*state\['train'\]"),
    (lambda ds: ds.loader(4).load_state_dict(_states(ds, "rank_0", "rank_1")), r"several ranks.*list\(states\.values"),
    (
        lambda ds: list(ds.map(lambda row: {"labels": row["ids"]}).pack(8, "ids", labels=True)),
        r"'labels' of their own.*extra=\{'labels': -100\}",
    ),
    (lambda ds: midepoch.mix(ds, ds, weights=[1, 1]), r"passed as a list: mix\(\[a, b\]"),  # type: ignore[misc]
    (
        lambda ds: list(ds.pack(8, "ids", extra={"id": -100})),
        r"'id' is int64.*extra=… takes columns with a value for each",
    ),
    (
        lambda ds: list(ds.map(lambda row: {"b": b"x"}).map(lambda row: {"c": row["b"].split(" ")})),
        r"row\['b'\]\.decode",
    ),
    (
        lambda ds: midepoch.mix({"a": ds}, midepoch.Schedule([midepoch.Phase(name, {"a": 1.0}) for name in "pq"])),
        r"'p' has no end: pass steps=",
    ),
    (lambda ds: list(ds.decode("text", size=8)), "no file .*text 0. .*is this the column of the files"),
    (lambda ds: assert_resumes_exactly(lambda: ds.loader(8), steps=[900]), "numbered from 0 to"),
    (lambda ds: assert_resumes_exactly(lambda: ds.loader(8), steps=5), r"such as range\(5\), got 5"),  # type: ignore[arg-type]
    (lambda ds: assert_resumes_exactly(lambda: ds.loader(8), tail=0), "tail"),
    (lambda ds: _of_one_loader(ds.loader(8)), "create a new loader or dataset at every call"),
    (
        lambda ds: assert_resumes_exactly(lambda: ds.shuffle(seed=random.randrange(10**9)).loader(8)),
        "not about resuming: is there a seed",
    ),
    (lambda ds: midepoch.PipelineCheckpoint("$SCRATCH/ck"), r"os\.path\.expandvars"),
    (lambda ds: midepoch.PipelineCheckpoint("gs//bucket/run"), "write gs://"),
    (lambda ds: midepoch.PipelineCheckpoint("runs/{name}"), "or f'"),
    (lambda ds: ds.loader(4, audit="$SCRATCH/run"), r"os\.path\.expandvars"),
    (lambda ds: ds.cache("s3:bucket/cache"), "write s3://"),
    (lambda ds: midepoch.PipelineCheckpoint("s3:bucket/run"), "write s3://"),
    (lambda ds: midepoch.PipelineCheckpoint("ck", keep=0), "To keep all steps, omit keep"),
    (lambda ds: ds.loader(midepoch.Schedule([midepoch.Phase("p", {"a": 1.0}, rows=4)])), r"second argument of mix\(\)"),
    (lambda ds: ds.pack(8, "ids", pad=None), "tokenizer.eos_token_id, or omit it"),
    (
        lambda ds: ds.rename_column("ids", "input_ids").loader(4, layout="padded", pad_values={"input_ids": None}),
        "always padded.*eos_token_id",
    ),
    (
        lambda ds: list(
            midepoch.from_map_style(torch.utils.data.TensorDataset(torch.arange(4))).map(lambda row: {"y": row["x"]})
        ),
        r"an item here.*columns=\['x', 'y'\]",
    ),
    (lambda ds: midepoch.from_tokens("a.bin", 4, "uint16"), "dtype='uint16'"),
    (
        lambda ds: midepoch.PipelineCheckpoint(tempfile.mkdtemp()).save(ds, torch.nn.Linear(2, 2).parameters(), step=1),
        "an iterator. Pass model itself",
    ),
    (lambda ds: midepoch.from_files("none", filters=[("lang", "in", "de")]), r"'in' takes a list of values, \['de'\]"),
]


def test_it_is_refused(ds: midepoch.Dataset) -> None:
    wrong = []
    for number, (call, says) in enumerate(REFUSED):
        try:
            call(ds)
        except Exception as problem:
            if not re.search(says, str(problem), re.DOTALL):
                wrong.append(f"{number}: {says}: {type(problem).__name__}: {problem}")
        else:
            wrong.append(f"{number}: {says}: no error")
    assert not wrong, "\n".join(wrong)


def _unacknowledged(ds: midepoch.Dataset) -> None:
    with ds.loader(10).lease() as items:
        assert len(list(items)) == 4


def _two_iterators(ds: midepoch.Dataset) -> None:
    batches = ds.iter(8)
    for _ in range(3):
        next(batches)
    sample = iter(ds)
    next(sample)
    ds.state_dict()


def _epochs(ds: midepoch.Dataset, *, chosen: bool = False) -> None:
    ds = ds.shuffle(seed=1)
    for epoch in range(2):
        if chosen:
            ds.set_epoch(epoch)
        list(ds)


def _another_model(ds: midepoch.Dataset, *, same: bool = False) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder:
        midepoch.PipelineCheckpoint(folder).save(
            ds.loader(4), model if same else copy.deepcopy(model), optimizer, step=1
        )


def _mixed(ds: midepoch.Dataset, stop: str) -> midepoch.Loader:
    parts = {"web": ds.filter(lambda row: False), "code": ds.shuffle(seed=1)}
    return midepoch.mix(parts, {"web": 0.5, "code": 0.5}, seed=1, stop=stop).loader(4)


def _first(loader: midepoch.Loader) -> None:
    next(loader, None)


def _saved_in(folder: str, ds: midepoch.Dataset, *steps: int) -> midepoch.PipelineCheckpoint:
    saver = midepoch.PipelineCheckpoint(folder)
    for step in steps:
        saver.save(ds.loader(4), step=step)
    return saver


def _misspelt_folder(ds: midepoch.Dataset, *, name: str = "cheks", beside: str = "checks") -> None:
    with tempfile.TemporaryDirectory() as parent:
        _saved_in(f"{parent}/{beside}", ds, 1)
        assert midepoch.PipelineCheckpoint(f"{parent}/{name}").restore_latest(ds.loader(4)) is None


def _left_part(ds: midepoch.Dataset, *, restored: int = 4) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _saved_in(folder, ds, 2, 4)
        saver = midepoch.PipelineCheckpoint(folder)
        saver.restore(loader := ds.loader(4), step=2)
        saver.save(loader, step=2)
        saver.restore(ds.loader(4), step=restored)


ANNOUNCED: list[tuple[Call, str]] = [
    (lambda ds: ds.map(lambda row: row, batch_size=32), "batch_size=32.*no effect.*batched=True"),
    (lambda ds: ds.tokenize(words()).loader(4), "layout='padded' or max_tokens"),
    (
        lambda ds: midepoch.zip([ds.select_columns("id").filter(lambda row: True), ds.select_columns("text")]),
        "filter the result",
    ),
    (
        lambda ds: midepoch.zip([ds.select_columns("id").shuffle(seed=1), ds.select_columns("text")]),
        "Shuffle and filter the result",
    ),
    (lambda ds: midepoch.zip([ds.select_columns("id"), ds.select_columns("text").take(9)]), "they have 9 and 40 rows"),
    (lambda ds: midepoch.concat([ds.select_columns("id"), ds.select_columns("text")]), "no column is in all parts"),
    (
        lambda ds: midepoch.concat([midepoch.from_dict({"x": range(6000)})] * 2).shuffle(seed=1),
        r"windows of 10,000.*mix\(",
    ),
    (lambda ds: ds.train_test_split(0.9, 0.1), "The first argument is test_size"),
    (lambda ds: ds.map(lambda row: {"n": _OWN.random()}), "generator '_OWN'.*with_generator=True"),
    (lambda ds: ds.with_format("arrow").map(lambda row: {"n": len(row["text"])}), "gets a table of one row"),
    (lambda ds: ds.map(lambda row, rng: {"n": 1}, with_generator=True).cache(), "stored once.*after cache"),
    (lambda ds: ds.pack(8, "ids", strategy="best_fit", drop_remainder=True), "drops every sequence that is not.*full"),
    (lambda ds: ds.select_columns(["ids", "mask"]).pack(8, "ids"), r"'mask' is left out.*extra=\{'mask': 0\}"),
    (lambda ds: ds.pack(8, "ids", extra={"mask": 0}).loader(2, layout="padded"), "Omit layout"),
    (lambda ds: list(ds.pack(4000, "ids", extra={"mask": 0}).loader(2, last_batch="drop")), "epoch 0 has no batch"),
    (lambda ds: list(ds.loader(16, last_batch="pad", collate_fn=lambda rows: {"id": 1})), "leaves out 'is_padding'"),
    (lambda ds: ds.select_columns("text").tokenize(transformed()).pack(8), "tokenizer pads with 2: pass pad="),
    (lambda ds: _first(_mixed(ds, "all")), "source 'web' yields no row, so the others are drawn"),
    (lambda ds: _first(_mixed(ds, "first")), "source 'web' yields no row.*the mix ends there"),
    (_misspelt_folder, "There are steps in .*/checks: if that is meant"),
    (_left_part, r"step 4 of .* before the run went back, and step 2 after"),
    (_unacknowledged, r"4 leases are out.*none was acknowledged.*lease\.ack\(\)"),
    (_two_iterators, "several iterations.*rows.state_dict"),
    (_another_model, "trains none of the model's parameters"),
    (lambda ds: midepoch.Keep(best=1, metric="accuracy"), "smallest value.*mode='max'"),
    (lambda ds: ds.take(9).class_encode_column("text"), "classes are those of the 9 rows.*before train_test_split"),
    (_epochs, r"iterated twice, in the same order.*set_epoch"),
]


QUIET: list[Call] = [
    lambda ds: _another_model(ds, same=True),
    lambda ds: midepoch.Keep(best=1, metric="loss"),
    lambda ds: ds.class_encode_column("text"),
    lambda ds: midepoch.zip([ds.select_columns("id"), ds.select_columns("text")]).shuffle(seed=1),
    lambda ds: midepoch.concat([ds, ds.select_columns("id")]).shuffle(seed=1),
    lambda ds: ds.train_test_split(0.1, 0.9),
    lambda ds: list(ds.map(lambda row, rng: {"n": rng.random()}, with_generator=True)),
    lambda ds: list(ds.loader(16, last_batch="pad", collate_fn=lambda rows: {"is_padding": 1})),
    lambda ds: _epochs(ds, chosen=True),
    lambda ds: _misspelt_folder(ds, name="run-12", beside="run-1"),
    lambda ds: _left_part(ds, restored=2),
    lambda ds: ds.select_columns("text").tokenize(transformed()).pack(8, pad=2),
    lambda ds: ds.select_columns("text").tokenize(words()).pack(8),
    lambda ds: list(ds.shuffle(seed=1)),
]


def test_it_is_announced(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    for number, (call, says) in enumerate(ANNOUNCED):
        forget_warnings()
        caplog.clear()
        call(ds)
        assert re.search(says, caplog.text, re.DOTALL), f"{number}: {says}: {caplog.text}"
    for number, call in enumerate(QUIET):
        forget_warnings()
        caplog.clear()
        call(ds)
        assert caplog.text == "", number


@pytest.mark.parametrize("size", [3, 4096])
def test_a_function_may_fill_the_same_array_again(ds: midepoch.Dataset, size: int) -> None:
    buffer, kept, numbers = np.zeros(size), torch.zeros(size), [0] * size

    def fill(row: dict[str, Any]) -> dict[str, Any]:
        buffer[:] = kept[:] = row["id"]
        numbers[:] = [row["id"]] * size
        return {"array": buffer, "tensor": kept, "list": numbers}

    again: dict[str, Any] = {}

    def fill_row(row: dict[str, Any]) -> dict[str, Any]:
        again["n"] = row["id"]
        return again

    for batch in ds.map(fill).map(fill_row).loader(8):
        expected = batch["id"].tolist()
        assert all(batch[name][:, 0].tolist() == expected for name in ("array", "tensor", "list"))
        assert batch["n"].tolist() == expected

    mask, column = [False] * 5, np.zeros(5, np.int64)

    def odd(rows: dict[str, Any]) -> list[bool]:
        mask[:] = [n % 2 == 1 for n in rows["id"]]
        return mask

    def doubled(rows: dict[str, Any]) -> dict[str, Any]:
        column[:] = 2 * np.array(rows["id"])
        return {"n": column}

    groups = ds.select_columns("id")
    assert [row["id"] for row in groups.filter(odd, batched=True, batch_size=5)] == list(range(1, ROWS, 2))
    assert [row["n"] for row in groups.map(doubled, batched=True, batch_size=5)] == list(range(0, 2 * ROWS, 2))

    def several(row: dict[str, Any]) -> Any:
        for n in range(2):
            again["n"] = 2 * row["id"] + n
            yield again

    assert [row["n"] for row in ds.flat_map(several)] == list(range(2 * ROWS))


@pytest.mark.parametrize("workers", [0, 1])
def test_next_continues_after_close(ds: midepoch.Dataset, workers: int) -> None:
    for dataset in (ds, ds.shuffle(seed=1), ds.filter(lambda row: row["id"] % 5 > 0)):
        expected = [batch["id"].tolist() for batch in dataset.loader(4)]
        for before in (1, 2, len(expected)):
            loader = dataset.loader(4, num_workers=workers)
            found = [next(loader)["id"].tolist() for _ in range(before)]
            loader.close()
            state = loader.state_dict()
            with loader:
                found += [next(loader)["id"].tolist() for _ in range(len(expected) - before)]
            assert found == expected, before
            resumed = dataset.loader(4)
            resumed.load_state_dict(state)
            if before < len(expected):
                assert next(resumed)["id"].tolist() == expected[before]


def test_a_thread_that_waits_for_a_batch_is_released_by_close() -> None:
    waiting = threading.Event()

    def is_ready() -> bool:
        waiting.set()
        time.sleep(0.001)
        return False

    ahead = MadeAhead(lambda: 1, 2, is_ready)
    assert ahead.next() == 1
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ahead.next()))
    thread.start()
    assert waiting.wait(60)
    ahead.close()
    thread.join(60)
    assert found == [None]


def test_a_pass_that_another_thread_closes_says_so(ds: midepoch.Dataset) -> None:
    closing: list[Callable[[], None]] = []

    def use(rows: list[Any]) -> int:
        if closing:
            thread = threading.Thread(target=closing.pop())
            thread.start()
            thread.join()
        return len(rows)

    loader = ds.loader(4, collate_fn=use)
    batches = iter(loader)
    assert next(batches) == 4
    closing.append(loader.close)
    with pytest.raises(midepoch.MidepochError, match="stopped by another iter"):
        next(batches)
    assert loader.steps == 1


def test_padded_tokens_have_a_mask(ds: midepoch.Dataset) -> None:
    padded = ds.select_columns("text").tokenize(transformed(), padding="max_length", max_length=6, truncation=True)
    assert {"input_ids", "attention_mask"} == set(next(padded.loader(4)))
    assert {"input_ids"} == set(next(ds.select_columns("text").tokenize(transformed()).loader(4)))


def test_a_batch_that_a_worker_cannot_send(ds: midepoch.Dataset) -> None:
    loader = ds.loader(4, num_workers=1, collate_fn=lambda rows: (row["id"] for row in rows))
    with pytest.raises(midepoch.MapError, match=r"cannot be sent by a worker.*lists, arrays or tensors"):
        next(loader)


def test_tokens_in_rows_and_in_archives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.save(tmp_path / "rows.npy", np.arange(20 * 64, dtype="uint16").reshape(20, 64))
    forget_warnings()
    assert len(midepoch.from_tokens(tmp_path / "rows.npy", 50)) == 25
    assert "sequences of 50 tokens cross the ends of its rows. To keep the rows, pass 64." in caplog.text
    assert len(midepoch.from_tokens(tmp_path / "rows.npy", 32)) == 40
    np.savez(tmp_path / "z.npz", tokens=np.arange(64, dtype="uint16"))
    with pytest.raises(midepoch.FormatError, match=r"archive \(\.npz or \.pt\), not tokens"):
        midepoch.from_tokens(tmp_path / "z.npz", 8, dtype="uint16")


def test_load_dataset_with_another_format(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,a\n")
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    for name, kind, right in (("a.csv", "json", "csv"), ("a.parquet", "csv", "parquet")):
        with pytest.raises(midepoch.DataError, match=rf"load_dataset\('{right}', …\), or midepoch\.from_files"):
            midepoch.load_dataset(kind, data_files=str(tmp_path / name), split="train", cache_dir=str(tmp_path / "c"))


def test_a_file_that_changed_under_a_generator(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import os

    file = tmp_path / "a.txt"

    def rows(path: str) -> Any:
        with open(path) as lines:
            yield from ({"t": line.strip()} for line in lines)

    def made() -> list[str]:
        forget_warnings()
        ds = midepoch.from_generator(rows, gen_kwargs={"path": str(file)}, cache_dir=tmp_path / "cache")
        return [row["t"] for row in ds]

    file.write_text("a\nb\n")
    os.utime(file, (1, 1))
    assert made() == made() == ["a", "b"]
    assert caplog.text == ""
    file.write_text("c\n")
    os.utime(file, (4e9, 4e9))
    assert made() == ["a", "b"]
    assert "a.txt has changed since its rows were stored" in caplog.text and "another key=" in caplog.text


def test_checkpoints_of_an_earlier_start_are_not_replaced(
    ds: midepoch.Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = midepoch.PipelineCheckpoint(tmp_path, keep=3)
    for step in (5, 10):
        first.save(model={"n": step}, step=step)
    forgetful = midepoch.PipelineCheckpoint(tmp_path, keep=1)
    for step in (5, 10):
        with pytest.raises(midepoch.CheckpointSaveError, match=rf"step {step} is not replaced.*restore_latest\(\)"):
            forgetful.save(model={"n": 0}, step=step)
    forgetful.save(model={"n": 0}, step=7)
    assert "The earlier steps are kept" in caplog.text
    assert forgetful.steps() == [5, 7, 10] and forgetful.read(5, "model") == {"n": 5}
    forgetful.delete(5)
    forgetful.save(model={"n": 1}, step=5)
    restored = midepoch.PipelineCheckpoint(tmp_path, keep=3)
    restored.restore_latest(model={"n": 0})
    restored.save(model={"n": 2}, step=10)
    assert restored.read(10, "model") == {"n": 2}


def test_what_a_restore_leaves_out(ds: midepoch.Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader, model = ds.loader(4), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = midepoch.PipelineCheckpoint(tmp_path / "ck")
    saved.save(loader, model, optimizer, step=1, extra={"scheduler": {"n": 1}})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": model, "optimizer": optimizer}, "also has the data and extra={'scheduler': …}"),
        ({"pipeline": loader, "model": model}, "also has extra={'scheduler': …} and the optimizer"),
        ({"pipeline": loader, "model": model, "optimizer": optimizer}, "also has extra={'scheduler': …}"),
        ({"model": model}, ""),
    ]
    for parts, says in cases:
        caplog.clear()
        assert midepoch.PipelineCheckpoint(tmp_path / "ck").restore_latest(**parts) == 1
        assert says in caplog.text if says else caplog.text == ""
    caplog.clear()
    assert midepoch.PipelineCheckpoint(tmp_path).restore_latest(loader) is None
    assert "There are steps in" in caplog.text and str(tmp_path / "ck") in caplog.text
    torch.save({}, tmp_path / "ck" / "latest.pt")
    (tmp_path / "other").mkdir()
    buffer = io.BytesIO(json.dumps({}).encode())
    (tmp_path / "other" / "latest.pt").write_bytes(buffer.getvalue())
    caplog.clear()
    assert midepoch.PipelineCheckpoint(tmp_path / "other").restore_latest(loader) is None
    assert "latest.pt, which another library wrote" in caplog.text


def test_a_dataloader_of_several_ranks_is_told_that_each_gets_all_rows(
    ds: midepoch.Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setattr("midepoch.iteration.state.process_group", lambda: group)
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    for shard, says in ((ds, True), (ds.shard(2, 0), False)):
        forget_warnings()
        caplog.clear()
        list(torch.utils.data.DataLoader(shard.select_columns("id"), batch_size=8))  # type: ignore[arg-type]
        assert ("all rows of this dataset on each of 2 ranks" in caplog.text) is says


def test_a_dict_of_splits_is_no_training_data() -> None:
    from midepoch.integrations.transformers import refuse_loader

    with pytest.raises(TypeError, match=r"a dict of 'train', 'test'. Pass one of them"):
        refuse_loader({"train": 1, "test": 2})
