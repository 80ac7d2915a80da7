"""Calls that are wrong, as people write them: every message names the problem and the way out."""

from __future__ import annotations

import argparse
import copy
import gzip
import io
import operator
import pickle
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerFast

import midepoch
from data import dataset_of, write_arrow
from forks import Forks
from midepoch._internal import hints
from midepoch._internal.hints import NAMES, forget_warnings
from midepoch.audit import Ledger, read_run
from midepoch.dataset.habits import ATTRIBUTES
from midepoch.distributed.world import find_world
from midepoch.testing import assert_resumes_exactly

Call = Callable[[midepoch.Dataset], Any]
Wrong = list[tuple[Call, str]]
"""A call, and what its message must say: the problem, then the way out."""

HF: Wrong = [
    (lambda ds: ds.map(len, num_proc=4), "num_proc.*num_workers"),
    (lambda ds: ds.map(len, desc="x"), "desc.*omit it"),
    (lambda ds: ds.map(len, load_from_cache_file=False), "load_from_cache_file.*cache\\(\\)"),
    (lambda ds: ds.map(len, keep_in_memory=True), "keep_in_memory.*omit"),
    (lambda ds: ds.map(len, writer_batch_size=3), "writer_batch_size.*omit"),
    (lambda ds: ds.map(len, cache_file_name="x"), "cache_file_name.*cache\\(\\)"),
    (lambda ds: ds.map(len, features={}), "features.*cast"),
    (lambda ds: ds.map(len, with_rank=True), "with_rank.*with_indices"),
    (lambda ds: ds.map(fn=len), "'fn'.*first argument"),
    (lambda ds: ds.map(len, num_workers=2), "num_workers.*ds.loader"),
    (lambda ds: ds.map(len, kwargs={}), "kwargs.*fn_kwargs"),
    (lambda ds: ds.map(len, batch=True), "'batch'.*batched="),
    (lambda ds: ds.map(len, remove_column="id"), "remove_column.*remove_columns="),
    (lambda ds: ds.map(len, input_column="id"), "input_column.*input_columns="),
    (lambda ds: ds.map(), "map\\(\\) needs function"),
    (lambda ds: ds.map("text"), "takes a function.*'text'"),
    (lambda ds: ds.map(len, True, 10, True), "takes 3 arguments by position.*by name"),
    (lambda ds: ds.map(len, function=len), "'function' twice"),
    (lambda ds: ds.map(len, remove_columns=["nothing"]), "nothing.*id, text"),
    (lambda ds: ds.map(len, input_columns=["nothing"]), "nothing.*id, text"),
    (lambda ds: ds.map(len, batched=True, batch_size=0), "batch_size.*at least 1"),
    (lambda ds: ds.map(len, batched=True, batch_size=None), r"batch_size=None.*batch_size=len\(ds\)"),
    (lambda ds: ds.filter(len, batched=True, batch_size=-1), r"batch_size=-1.*batch_size=len\(ds\)"),
    (lambda ds: ds.with_format("pandas"), r"'pandas'.*with_format\('arrow'\).*batch.to_pandas\(\).*ds.to_pandas\(\)"),
    (lambda ds: ds["id"]["lang"], "int64, which has no fields.*'lang'"),
    (lambda ds: ds.map(len, one_to_one=False), "one_to_one=False requires batched=True.*flat_map"),
    (lambda ds: ds.map(len, drop_last_batch=True), "requires batched=True"),
    (lambda ds: ds.map(len, on_error="ignore"), "'raise' or 'skip'.*'ignore'"),
    (lambda ds: ds.map(len, with_generator="jax"), "True, False, 'numpy' or 'torch'"),
    (lambda ds: ds.filter(), "filter\\(\\) needs condition"),
    (lambda ds: ds.filter("id > 3"), "function or a pyarrow expression"),
    (lambda ds: ds.filter(len, num_proc=2), "num_proc.*num_workers"),
    (lambda ds: ds.filter(function=len), "'function'.*condition="),
    (lambda ds: ds.flat_map(len, batched=True), "'batched'.*It takes function"),
    (lambda ds: ds.shuffle(buffer_size=1000), "buffer_size.*omit it.*window="),
    (lambda ds: ds.shuffle(generator=torch.Generator()), "generator.*seed="),
    (lambda ds: ds.shuffle(seed="a"), "seed must be an integer"),
    (lambda ds: ds.shuffle(seed=-1), r"seed must be in \[0, 2\*\*64\)"),
    (lambda ds: ds.shuffle(True), "seed must be an integer"),
    (lambda ds: first(ds.decode("text", "image")), r"no file .*t 0\. .*root='FOLDER'"),
    (lambda ds: ds.shuffle(1, scope="row"), "scope must be one of.*'row'"),
    (lambda ds: ds.shuffle(1, scope="window", window=0), "window"),
    (lambda ds: ds.set_format("torch"), "set_format.*with_format"),
    (lambda ds: ds.set_transform(len), "set_transform.*with_transform"),
    (lambda ds: ds.reset_format(), "reset_format.*with_format\\(None\\)"),
    (lambda ds: ds.with_format("tensorflow"), "'python', 'numpy', 'torch', 'arrow', 'jax'.*'tensorflow'"),
    (lambda ds: ds.with_format("torch", output_all_columns=True), "output_all_columns.*columns="),
    (lambda ds: ds.with_format("torch", device="cuda"), "device.*loader"),
    (lambda ds: ds.with_format("torch", columns=["nothing"]), "nothing.*id, text"),
    (lambda ds: ds.with_transform(3), "takes a function, got 3"),
    (lambda ds: ds.to_iterable_dataset(), "iterable"),
    (lambda ds: ds.to_csv("x"), "to_csv.*cache\\(\\)"),
    (lambda ds: ds.to_parquet("x"), "to_parquet.*cache\\(\\)"),
    (lambda ds: ds.save_to_disk("x"), "save_to_disk.*cache\\(\\)"),
    (lambda ds: ds.push_to_hub("x"), "push_to_hub"),
    (lambda ds: ds.to_list(), "list\\(ds\\)"),
    (lambda ds: ds.to_dict(), r"ds\[:\]"),
    (lambda ds: ds.add_column("a", [1]), "add_column.*map"),
    (lambda ds: ds.sort(["a", "b"]), "sort by the last one first"),
    (lambda ds: ds.sort("id", null_placement="at_end"), "Null comes last"),
    (lambda ds: ds.loader(4, sampler=[1]), "WeightedRandomSampler"),
    (lambda ds: ds.weighted(weight=[1]), "Did you mean weights"),
    (lambda ds: ds.flatten_indices(), "flatten_indices.*omit"),
    (lambda ds: ds.repeat(3), "repeat.*epochs"),
    (lambda ds: ds.colum_names, "colum_names.*column_names"),
    (lambda ds: ds.num_row, "num_row.*num_rows"),
    (lambda ds: ds.info, "info.*features"),
    (lambda ds: ds.keys(), "keys.*one dataset.*split="),
    (lambda ds: ds.dataloader(3), "dataloader.*loader"),
    (lambda ds: ds + ds, "midepoch.concat"),
    (lambda ds: ds.train_test_split(test_size=1.5), "share above 0 and below 1.*1.5"),
    (lambda ds: ds.train_test_split(test_size="10%"), "share such as 0.1.*'10%'"),
    (lambda ds: ds.train_test_split(test_size=99), "20 rows cannot be split"),
    (lambda ds: ds.train_test_split(0.1, stratify="id"), "stratify.*stratify_by_column="),
    (lambda ds: ds.train_test_split(0.1, stratify_by_column="id"), "20 classes.*1 row.*fewer values"),
    (lambda ds: ds.train_test_split(0.1, stratify_by_column="label"), "'label'.*id, text"),
    (
        lambda ds: ds.train_test_split(0.1, shuffle=False, stratify_by_column="text"),
        "stratify_by_column.*shuffle=False",
    ),
    (lambda ds: ds.train_test_split(0.1, generator=1), "generator.*seed="),
    (lambda ds: ds.train_test_split(0.1, seed="x"), "seed must be an integer"),
    (lambda ds: ds.filter(len).train_test_split(0.1), "train_test_split.*before the steps"),
    (lambda ds: ds.rename_column("nothing", "a"), "nothing.*id, text"),
    (lambda ds: ds.rename_column("id", "text"), "text"),
    (lambda ds: ds.rename_columns(["a", "b"]), "{old: new}"),
    (lambda ds: ds.cast_column("id", "int33"), "int33.*'int32'"),
    (lambda ds: ds.cast_column("nothing", "int32"), "nothing.*id, text"),
    (lambda ds: ds.cast(["id"]), "cast.*'int32'"),
    (lambda ds: ds.class_encode_column("nothing"), "nothing.*id, text"),
    (lambda ds: ds.unique("nothing"), "nothing.*id, text"),
    (lambda ds: ds["nothing"], "nothing.*id, text"),
    (lambda ds: ds[99], "row 99 is out of range.*20 rows"),
    (lambda ds: ds["id"]["x"], "row numbers.*'x'"),
    (lambda ds: ds[1.5], "integer, a slice or a list"),
    (lambda ds: ds.filter(len)[0], "no positions.*Iterate it"),
    (lambda ds: len(ds.filter(len)), "estimated_len"),
    (lambda ds: ds.select([99]), "row 99 is out of range"),
    (lambda ds: ds.select([True, False]), "flatnonzero"),
    (lambda ds: ds.select("id"), "integers|row numbers"),
    (lambda ds: ds.select_columns(columns=["id"]), "columns.*column_names="),
    (lambda ds: ds.select_columns(["nothing"]), "nothing.*id, text"),
    (lambda ds: ds.remove_columns("nothing"), "nothing.*id, text"),
    (lambda ds: ds.slice("80"), "'80%'"),
    (lambda ds: ds.take(-1), "take.*-1"),
    (lambda ds: ds.take("10"), "take.*'10'"),
    (lambda ds: ds.shard(2, 2), r"\[0, 2\)|index"),
    (lambda ds: ds.shard(num_shards=2, index=0, contiguous=True), "contiguous.*mode="),
    (lambda ds: ds.shard(2, 0, mode="rows"), "'auto', 'file' or 'example'"),
    (lambda ds: ds.shard(2, 0).shard(2, 0), "already shard 0 of 2"),
    (lambda ds: ds.batch(batch_size=3), "batch_size.*size="),
    (lambda ds: ds.batch(0), "at least 1"),
    (lambda ds: ds.iter(batch_size=2, drop_last=True), "drop_last.*drop_last_batch="),
    (lambda ds: ds.iter(0), "at least 1"),
    (lambda ds: ds.unbatch(), "none of the columns id, text contains lists"),
    (lambda ds: ds.unbatch("nothing"), "nothing.*id, text"),
    (lambda ds: ds.tokenize(3), "tokenizer of transformers or tokenizers"),
    (lambda ds: ds.decode("nothing"), "nothing.*id, text"),
    (lambda ds: ds.decode("text", kind="picture"), "image.*audio.*video|'picture'"),
    (lambda ds: ds.train_test_split(0.8, 0.1, 0.1), "shuffle=….*0.1.*split twice"),
    (lambda ds: ds.filter(np.arange(20) > 3), r"got array.*flatnonzero"),
    (lambda ds: list(ds.filter(lambda row: {"keep": True})), "must return True or False.*dict"),
    (lambda ds: list(ds.map(lambda row: {"n": row["txt"]})), r"KeyError: 'txt'\. The row has: id, text\."),
    (lambda ds: "text" in ds, r"'text' in ds\.column_names"),
    (lambda ds: operator.setitem(ds, "n", [1]), r"in place.*ds = ds\.map\(lambda row: {'n'"),
    (lambda ds: operator.delitem(ds, "text"), r"in place.*remove_columns\('text'\)"),
    (lambda ds: ds["id"] > 3, r"compared.*ds\.filter\(pyarrow\.compute\.field\('id'\) > 3\)"),
    (lambda ds: ds[["id", "text"]], r"select_columns\(\[…\]\)"),
    (lambda ds: ds.select(3), r"got 3\. For one row, use ds\[3\]"),
    (lambda ds: ds.select_columns([0, 1]), "names of columns, got 0.*id, text"),
    (lambda _: midepoch.from_list([{"a": {"b": "x"}}]).select_columns("a.b"), r"'a\.b'.*row\['a'\]\['b'\]"),
    (
        lambda ds: ds.filter(pc.field("score") > 1).column_names,
        r"No match for FieldRef\.Name\(score\)\. .*id \(int64\)",
    ),
    (lambda ds: ds.sort("id", descending=True), "reverse=\\?"),
    (lambda ds: ds.iloc[3], r"Use ds\[3\]"),
    (lambda ds: ds.map_batches(len), "batched=True"),
    (lambda ds: ds.iter_torch_batches(), "ds.loader"),
    (lambda ds: ds.sharding_filter(), "omit it"),
    (lambda ds: ds.tokenize("gpt2"), r"AutoTokenizer\.from_pretrained\('gpt2'\)"),
    (lambda ds: ds.tokenize(Encoding()), "transformers or tokenizers.*use map"),
    (lambda ds: ds.tokenize(Encoding().encode), "transformers or tokenizers.*use map"),
    (lambda ds: ds.tokenize(words(), column=["text", "id"]), "name of one column.*with map"),
    (lambda ds: ds.tokenize(words(), columns="text"), "'columns'. Did you mean column="),
    (lambda ds: ds.tokenize(words(), truncation=True), r"truncation=….*enable_truncation"),
    (lambda ds: list(ds.tokenize(words(), column="id")), "takes text, but the column holds int"),
    (lambda ds: ds.shuffle(seed=1).cache(), "cache\\(\\) before shuffle"),
    (lambda ds: ds.shard(2, 0).cache(), "cache\\(\\) before shard"),
    (lambda ds: ds.cache(key=3), "key.*str, got 3"),
    (lambda ds: ds.cache(cache_dir="x"), "cache_dir.*directory"),
    (lambda ds: ds["id"] + 1, r"np\.asarray\(ds\['id'\]\)"),
    (lambda ds: ds["id"].mean(), r"'mean'.*np\.asarray\(column\)"),
    (lambda ds: ds.select(slice(3)), r"For a range, use ds\.slice"),
    (lambda ds: ds.select(lambda row: True), r"For a condition, use ds\.filter"),
    (lambda ds: ds.select_columns("id", "text"), "got 2. Pass several as a list"),
    (lambda ds: ds.take(5, 10), "got 2. It takes n"),
    (lambda ds: ds.where(1), "'where'. It has balanced, batch"),
    (lambda ds: ds.slice(0.9), "'80%'.*0.9"),
    (lambda ds: ds.slice(0, 9, 0), "step=….*not 0.*Omit it"),
    (lambda ds: ds.shard("2", 0), "num_shards.*integer, got '2'"),
    (lambda ds: ds.with_format(["id"]), r"'torch'.*\['id'\]"),
    (lambda ds: ds.unique(["id"]), r"name of one column, got \['id'\]"),
    (lambda ds: ds.cache(3), "name of a local folder, got 3"),
    (lambda ds: ds.map(len, fn_kwargs=[1]), r"fn_kwargs=….*dict.*\[1\]"),
    (lambda ds: ds.train_test_split(0.1).map(len), r"dict of splits.*parts\['train'\]"),
    (lambda ds: ds.train_test_split(0.1)["val"], "no split 'val'.*train, test"),
    (lambda ds: list(ds.filter(lambda row: np.array([True, False]))), "True or False, it returned ndarray"),
    (lambda ds: list(ds.map(lambda row: {"n": row.text})), r"A row is a dict: row\['text'\]"),
    (lambda ds: list(ds.unbatch("id")), "'id' does not contain lists. Name columns"),
    (lambda _: midepoch.from_list([{"a": {"b": 1}}]).sort("a"), r"no order.*lambda row: row\['a'\]\['b'\]"),
]

TORCH: Wrong = [
    (lambda ds: ds.loader(), "needs batch_size.*ds.loader\\(batch_size=32\\)"),
    (lambda ds: ds.loader(4, shuffle=True), r"shuffle.*ds.shuffle\(seed=…\)"),
    (lambda ds: ds.loader(4, sampler=[1]), "sampler.*ds.select"),
    (lambda ds: ds.loader(4, batch_sampler=[1]), "batch_sampler.*ds.pack"),
    (lambda ds: ds.loader(4, generator=torch.Generator()), "generator.*ds.shuffle"),
    (lambda ds: ds.loader(4, seed=3), "seed.*ds.shuffle"),
    (lambda ds: ds.loader(4, num_replicas=2), "num_replicas.*world_size"),
    (lambda ds: ds.loader(4, pin_memory_device="cuda"), "pin_memory_device.*device="),
    (lambda ds: ds.loader(4, in_order=False), "in_order.*exact"),
    (lambda ds: ds.loader(4, snapshot_every_n_steps=3), "snapshot_every_n_steps.*omit"),
    (lambda ds: ds.loader(4, num_worker=3), "num_worker.*num_workers="),
    (lambda ds: ds.loader(4, workers=3), "workers.*num_workers="),
    (lambda ds: ds.loader(0), "batch_size.*at least 1"),
    (lambda ds: ds.loader("4"), "batch_size.*'4'"),
    (lambda ds: ds.loader(4, num_workers=-1), "num_workers.*-1"),
    (lambda ds: ds.loader(4, prefetch=0), "prefetch.*at least 1"),
    (lambda ds: ds.loader(4, prefetch=2, prefetch_factor=2), "two names of one setting"),
    (lambda ds: ds.loader(4, timeout=-1), "timeout.*-1"),
    (lambda ds: ds.loader(4, timeout=float("inf")), "timeout.*inf"),
    (lambda ds: ds.loader(4, worker_init_fn=3), "worker_init_fn must be a function"),
    (lambda ds: ds.loader(4, collate_fn=3), "collate_fn must be a function"),
    (lambda ds: ds.loader(None, collate_columns=True), "collate_columns.*batch_size"),
    (lambda ds: ds.loader(4, persistent_workers=True), "num_workers of at least 1"),
    (lambda ds: ds.loader(4, last_batch="keep"), "'drop', 'pad', 'uneven'"),
    (lambda ds: ds.loader(4, drop_last=True, last_batch="pad"), "contradict"),
    (lambda ds: ds.loader(4, worker_type="fork"), "'auto', 'process', 'thread'"),
    (lambda ds: ds.loader(4, rank=3, world_size=2), "rank"),
    (lambda ds: ds.loader(4, device="gpu"), "device"),
    (lambda ds: ds.shard(2, 0).loader(4, rank=0, world_size=2), "already shard.*Omit"),
    (lambda ds: ds.loader(4, drop_last="yes"), "drop_last=….*True or False.*'yes'"),
    (lambda ds: ds.loader(4, rank="0", world_size=2), "rank: expected an integer, got '0'"),
    (lambda ds: ds.loader(4, rank=0, world_size=0), "world_size: expected at least 1"),
    (lambda ds: ds.loader(4, audit=True), "folder of a run, as in audit='runs/7', got True"),
    (lambda ds: ds.loader(4, 1, multiprocessing_context="forks"), "multiprocessing_context.*'spawn'.*'forks'"),
    (lambda ds: ds.loader(4).map(len), r"ds\.map\(function\)\.loader"),
    (lambda ds: ds.loader(4).skip(3), "load_state_dict"),
    (lambda ds: ds.loader(4).global_step, r"loader\.steps"),
    (lambda ds: ds.loader(4).exclude(documents=[("a", "17")]), r"\[\('web', 17\)\], got"),
    (lambda ds: ds.loader(4).load_state_dict('{"midepoch": 1}'), "got '{.*json.loads"),
    (lambda ds: ds.loader(4).load_state_dict(Path("x.json")), "x.json.*PipelineCheckpoint"),
    (lambda ds: ds.loader(4).load_state_dict(ds.loader(4).state_dict), "what state_dict\\(\\) returned"),
    (lambda ds: assert_resumes_exactly(ds.loader(4)), "takes a function, as in lambda"),  # type: ignore[arg-type]
    (lambda ds: ds.loader(4).sampler, "sampler.*loader.dataset"),
    (lambda ds: midepoch.from_map_style(ds.loader(4)), r"It is a loader.*loader\.dataset"),
    (lambda ds: loads_inside(ds.loader(4)), "load_state_dict.*Begin a new loop"),
    (lambda ds: ds.loader(global_batch_size=64), "global_batch_size.*each rank.*find_world"),
    (lambda ds: ds.loader(4, audit=__file__), "ledger cannot be kept.*Pass a folder, as in 'runs/7'"),
    (lambda _: find_world().world_size, "'world_size'. Did you mean size"),
    (lambda ds: saved(ds.loader(4)).restore_latest(torch.nn.Linear(2, 2)), "a Linear has no state.*model="),
    (lambda ds: ds.loader(4).batch_sampler, "batch_sampler.*loader.dataset"),
    (lambda ds: ds.loader(4).state_dct(), "state_dct.*state_dict"),
    (lambda ds: ds.loader(4).save("x"), "save.*state_dict"),
    (lambda ds: ds.loader(4).reset(), "reset.*set_epoch"),
    (lambda ds: ds.loader(4).rank, "rank.*shard.index"),
    (lambda ds: ds.loader(4).set_epoch(), "needs epoch"),
    (lambda ds: ds.loader(4).set_epoch(-1), "set_epoch.*-1"),
    (lambda ds: ds.loader(4).set_epoch("1"), "set_epoch.*'1'"),
    (lambda ds: ds.loader(4).load_state_dict({}, strict=False), "strict.*allow="),
    (lambda ds: ds.loader(4).load_state_dict({}), "state"),
    (lambda ds: ds.loader(4).load_state_dict(None), "state"),
    (lambda ds: ds.loader(4).load_state_dict({"model": 1}), "state"),
    (lambda ds: ds.loader(4).on_stats(3), "hook"),
    (lambda ds: ds.loader(4).on_stats(lambda stats: None), r"calls hook\(stats, batches\), but .* takes other"),
    (lambda ds: len(ds.filter(len).loader(4)), "estimated_len"),
    (lambda ds: setattr(ds.loader(4), "batch_size", 8), r"batch_size = ….*ds\.loader"),
    (lambda ds: ds.loader(4).reset_state(), "reset_state.*set_epoch"),
    (lambda ds: ds.loader(4).num_batches, "num_batches.*It has ack, batch_size"),
    (lambda ds: ds.loader(4).on_stats(print, every="10"), "every=….*a number, got '10'"),
    (lambda ds: ds.loader(4).load_state_dict({}, allow=True), "list of names from.*True"),
    (lambda ds: next(ds.loader(4).lease().__enter__())["id"], r"not its batch.*lease\.batch\['id'\]"),
    (lambda ds: ds.loader(4).lease().ack(), "'ack'.*iterates leases"),
    (lambda ds: next(ds.loader(4, collate_fn=lambda rows: rows["id"])), "It gets a list of rows"),
    (lambda _: assert_resumes_exactly(lambda: None), "must return a loader or dataset.*None"),
    (lambda ds: ds.loader(4, collate_fn=Collator), r"the class Collator.*Create it first: Collator\(…\)"),
    (lambda ds: next(iter(torch.utils.data.DataLoader(ds.loader(4)))), "makes batches itself.*in place of"),
    (lambda ds: torch.utils.data.random_split(ds, [0.5, 0.5])[0].__getitems__([1]), "random_split.*train_test_split"),
]

PACK: Wrong = [
    (lambda ds: ds.pack(), "needs length.*eos=.*pad="),
    (lambda ds: ds.pack(0), "length.*at least 1"),
    (lambda ds: ds.pack(words(), 8), r"pack\(length=…\): expected an integer, got Tok"),
    (lambda ds: ds.pack(8), "input_ids.*id, text"),
    (lambda ds: ds.pack(8, "text", max_length=3), "max_length.*length="),
    (lambda ds: ds.pack(8, "text", pad_token_id=3), "pad_token_id.*pad="),
    (lambda ds: ds.pack(8, "text", eos_token_id=3), "eos_token_id.*eos="),
    (lambda ds: ds.pack(8, "text", extra=["labels"]), r"extra=\{'labels': -100\}"),
    (lambda ds: ds.pack(8, "text", extra="mask"), r"extra=\{'mask': 0\}"),
    (lambda ds: ds.pack(8, "text", extra={"labels": None}), "labels.*integer"),
    (lambda ds: ds.pack(8, "text", extra={"text": 0}), "'text' is the packed column"),
    (lambda ds: ds.pack(8, "text", extra={"labels": 0}), "labels.*id, text"),
    (lambda ds: ds.pack(8, "text", mask_first=True), "labels=True"),
    (lambda ds: ds.pack(8, "text", labels=True, extra={"labels": -100}), "labels.*Omit one"),
    (lambda ds: ds.rename_column("id", "labels").pack(8, "text", labels=True), "extra={'labels': -100}"),
    (lambda ds: ds.pack(8, "text", strategy="greedy"), "'concat' or 'best_fit', got 'greedy'"),
    (lambda ds: ds.pack(8, "text", pad=None), "pad.*integer"),
    (lambda ds: ds.pack(8, "text", labels="lm"), "labels.*True or False"),
    (lambda ds: ds.pack(8, "text", eos=-1), "eos.*-1"),
    (lambda ds: ds.pack(8, ["text"]), r"name of one column, got \['text'\].*extra="),
    (lambda ds: ds.pack(8, "text", dtype="int33"), "type of integers.*'int33'"),
    (lambda ds: next(iter(ds.pack(8, "text"))), "'text'.*lists of numbers. Tokenize first"),
    (lambda ds: ds.filter(len).shuffle(), "requires a seed.*shuffle\\(seed=0, window=10_000\\)"),
]

OPEN: Wrong = [
    (lambda _: midepoch.load_dataset("parquet"), "needs split.*split='train'"),
    (lambda _: midepoch.load_dataset("parquet", split="train[:"), "split"),
    (lambda _: midepoch.load_dataset(3, split="train"), "path"),
    (lambda _: midepoch.load_dataset("parquet", split="train", num_workers=3), "num_workers.*num_proc="),
    (lambda _: midepoch.load_dataset("parquet", split="train", shuffle=True), "shuffle.*shuffle\\(seed="),
    (lambda _: midepoch.load_dataset("csv", data_files=__file__, split="train", seperator=";"), "'seperator'.*correct"),
    (lambda _: midepoch.from_files(), "needs paths"),
    (lambda _: midepoch.from_files("nowhere/*.parquet"), "nowhere"),
    (lambda _: midepoch.from_files([]), "path"),
    (lambda _: midepoch.from_files(3), "path.*3"),
    (lambda _: midepoch.from_files("x", split="train"), "split.*slice"),
    (lambda _: midepoch.from_files("x", data_files="y"), "data_files.*paths="),
    (lambda _: midepoch.from_files("x", column=["y"]), "column.*columns="),
    (lambda _: midepoch.from_files("x", streaming=True), "streaming.*omit"),
    (lambda _: midepoch.from_files("x", token="hf_x"), "token.*storage_options"),
    (lambda _: midepoch.from_files("x", revision="v1"), "revision.*hf://datasets/ORG/NAME@REVISION"),
    (lambda _: midepoch.from_files("x", batch_size=3), "batch_size.*loader"),
    (lambda _: midepoch.from_files("x", sep=";"), "sep.*tsv"),
    (lambda _: midepoch.from_files("x", on_error="warn"), "'raise' or 'skip'"),
    (lambda _: midepoch.from_files("x", partitioning="dir"), "None or 'hive'"),
    (lambda _: midepoch.from_files("x", cache_bytes="1GB"), "cache_bytes.*'1GB'"),
    (lambda _: midepoch.from_files("x", format="zip"), "format.*'zip'"),
    (lambda _: midepoch.from_files({"train": "a.parquet"}), "a dict of train.*each of them by itself"),
    (lambda _: midepoch.from_files(io.BytesIO(b"x")), "open file.*Pass its name"),
    (lambda _: midepoch.load_dataset(__file__, split="train"), r"the file .*from_files"),
    (lambda _: midepoch.load_dataset("csv", split="train"), "needs data_files"),
    (lambda _: midepoch.from_list(["a", "b"]), r"list of str\. .*from_list\(\[\{'text'"),
    (lambda _: midepoch.StreamingDataset, "from_files"),
    (lambda _: midepoch.from_mds, "from_files.*MDS"),
    (lambda _: midepoch.pack, r"ds\.tokenize\(tokenizer\)\.pack"),
    (lambda _: midepoch.load_from_disk("nowhere"), "nowhere"),
    (lambda _: midepoch.load_from_disk("x", keep_in_memory=True), "keep_in_memory.*omit"),
    (lambda ds: midepoch.mix([ds, ds], probabilities=[1, 2]), "probabilities.*weights="),
    (lambda ds: midepoch.mix([ds, ds], [1]), "1 weights for 2 sources"),
    (lambda ds: midepoch.mix([ds, ds], [0, 0]), "at least one above 0"),
    (lambda ds: midepoch.mix([ds, ds], stop="last"), "stop.*'first'"),
    (lambda ds: midepoch.mix(ds, ds), r"takes a list of datasets, mix\(\[a, b\]\)"),
    (lambda ds: midepoch.mix([]), "takes a list of datasets"),
    (lambda ds: midepoch.mix([ds, ds], seed=None), r"seed must be an integer, got None$"),
    (lambda ds: midepoch.mix([ds, ds], ["70%", "30%"]), "weights are numbers.*'70%'"),
    (lambda ds: midepoch.mix({"a": "data/a.parquet"}), r"got str\. Call midepoch\.from_files"),
    (lambda ds: midepoch.mix([ds, ds.loader(4)]), r"Loader\. It is a loader.*loader\.dataset"),
    (lambda ds: midepoch.mix([(0.7, ds), (0.3, ds)]), "got tuple.*weights in a second list"),
    (lambda ds: midepoch.mix([ds, [1, 2]]), "expected a Dataset.*list"),
    (lambda ds: midepoch.mix({"a": ds}, {"b": 1}), "weights for b, but the sources are a"),
    (
        lambda ds: midepoch.mix([ds.select_columns("id"), ds.select_columns("text")]).tokenize(len),
        "source 0 of the mix: no column 'text'.*rename_column",
    ),
    (lambda ds: midepoch.concat(ds, ds), r"concat\(\[a, b\]\), got several arguments"),
    (lambda ds: midepoch.zip(ds, ds), r"zip\(\[a, b\]\), got several arguments"),
    (lambda _: midepoch.Loader(size=3), "'size'"),
    (lambda _: midepoch.Dataset("x"), r"got str\. Call midepoch\.from_files\(path\)"),  # type: ignore[arg-type]
    (lambda _: midepoch.Dataset(), r"needs spec\. Open data with midepoch\.from_files"),  # type: ignore[call-arg]
    (lambda ds: ds.text, r"'text'\. It is a column: use ds\['text'\]\.$"),
    (lambda ds: ds.head(), r"Use ds\[:5\]"),
    (lambda ds: ds.columns, r"Use ds\.column_names"),
    (lambda ds: ds.from_files("x"), r"Use midepoch\.from_files\(…\)"),
    (lambda _: midepoch.load("x"), r"Use midepoch\.from_files\(paths\), or midepoch\.load_dataset"),
    (lambda _: midepoch.from_map_style(Items), r"got the class Items\. Create it first: Items\(…\)"),
    (lambda ds: ds["txt"], r"ds\['txt'\]: no column 'txt'\. Did you mean 'text'\? There are: id, text\."),
    (
        lambda ds: list(ds.map(lambda rows: {"n": len(rows["id"])}, batched=True)),
        r"one value for each row, got the int 20\.",
    ),
    (lambda ds: midepoch.concat([ds, ds], axis=1), "axis.*midepoch.zip"),
    (lambda ds: midepoch.mix([ds, ds.rename_column("id", "n")]).loader(2), "columns id, text.*rename_columns"),
    (lambda ds: midepoch.zip([ds, ds]), "'id'.*rename_columns"),
    (lambda ds: midepoch.interleave_datasets([ds], weights=[1]), "weights.*probabilities="),
    (lambda ds: midepoch.interleave_datasets([ds], stopping_strategy="oversample"), "'first_exhausted'.*concat"),
    (lambda ds: midepoch.concatenate_datasets([ds], axis=2), "0 for rows or 1 for columns"),
    (lambda ds: midepoch.concat([ds.shard(2, 0), ds]), "shards cannot be combined.*then shard"),
    (lambda _: midepoch.DataLoader, "DataLoader.*ds.loader"),
    (lambda _: midepoch.IterableDataset, "IterableDataset.*midepoch.Dataset"),
    (lambda _: midepoch.random_split, "random_split.*train_test_split"),
    (lambda _: midepoch.load_datset, "load_datset.*load_dataset"),
    (lambda _: midepoch.from_polars, "from_pandas.*polars"),
    (lambda _: midepoch.Dataset.from_generator, "midepoch.from_generator"),
    (lambda _: midepoch.from_generator(row for row in [{"a": 1}]), "Pass the function itself"),
    (lambda _: midepoch.from_dict([{"a": 1}]), "from_list"),
    (lambda _: midepoch.from_map_style({"a": [1]}), "from_dict"),
    (lambda _: midepoch.from_hf("name"), "load_dataset"),
    (lambda _: midepoch.StructuredDataset.create_dataloader("x", workers=3), "workers.*num_workers="),
    (lambda _: midepoch.StructuredDataset.create_dataloader("x", output_format="tf"), "'torch', 'numpy'.*'tf'"),
    (lambda _: midepoch.PipelineCheckpoint("x", keep_last=3), "keep_last.*keep"),
    (lambda _: midepoch.PipelineCheckpoint("x", max_to_keep=3), "max_to_keep.*keep=3"),
    (lambda _: midepoch.PipelineCheckpoint(3), "takes a folder.*got 3"),  # type: ignore[arg-type]
    (lambda _: midepoch.PipelineCheckpoint("x").load(), "restore_latest"),
    (lambda _: midepoch.PipelineCheckpoint("x").save(scheduler=1), "scheduler.*extra="),
    (lambda _: midepoch.PipelineCheckpoint("x").metadata(), r"needs step.*latest_step\(\)"),
    (lambda _: midepoch.from_files(f"{__file__}x"), f"Did you mean '{Path(__file__).name}'"),
    (lambda _: midepoch.PipelineCheckpoint("x").restore(), "needs step.*restore_latest"),
    (lambda _: midepoch.Keep(latest=3), "latest"),
    (lambda _: midepoch.from_files("s3:/bucket/x"), "write s3://"),
    (lambda _: midepoch.from_files("org/name"), "Hub.*load_dataset"),
    (lambda _: midepoch.from_list([{"a": 1}, 2]), "list of dict and int.*one type"),
    (lambda ds: midepoch.mix([ds.train_test_split(0.1)]), r"one of its datasets: \['train'\]"),
    (lambda ds: midepoch.mix([ds, ds], 0.5), "numbers in a list or dict.*got 0.5"),
    (lambda _: midepoch.Schedule.load(3), "a file that ends with .*got 3"),  # type: ignore[arg-type]
    (lambda _: read_run(3), "folder of a run, such as 'runs/7', got 3"),  # type: ignore[arg-type]
    (lambda _: midepoch.Keep(hours="6"), "number above 0, got '6'"),  # type: ignore[arg-type]
    (lambda _: midepoch.PipelineCheckpoint("x").load_checkpoint(), "restore_latest"),
    (lambda _: exec("from midepoch import StreamingDataset"), "StreamingDataset.*from_files"),
    (lambda _: midepoch.from_files("s3://b/a", storage_options="key=a"), "storage_options takes a dict.*got a str"),  # type: ignore[arg-type]
    (
        lambda _: midepoch.PipelineCheckpoint("s3://b", storage_options="key=a"),  # type: ignore[arg-type]
        "storage_options takes a dict.*got a str",
    ),
    (
        lambda _: midepoch.from_dict({"a": torch.ones(2, dtype=torch.bfloat16)}),
        "'a' cannot become.*to one type of Arrow, such as float32",
    ),
    (lambda _: midepoch.from_dict({"a": torch.ones(2, device="meta")}), "'a' cannot become.*meta tensor"),
    (lambda _: midepoch.from_pandas(pd.DataFrame({"a": [1, "x"]})), r"from_pandas: \w.*column a.*astype"),
]

INTERNAL = re.compile(
    r"\b(Steps|Rows|Reading|Resumable)\.|unexpected keyword|NoneType|"
    r"object is not|positional argument|keyword-only"
)


SILENT: Wrong = [
    (lambda ds: setattr(ds, "seed", 3), r"seed = ….*ds = ds.shuffle\(seed=…\)"),
    (lambda ds: setattr(ds, "num_rows", 3), "num_rows = ….*ds = ds"),
    (lambda ds: setattr(ds, "colum_names", 3), "colum_names = ….*ds = ds"),
    (lambda ds: ds.loader(4, length="id"), "length.*add max_tokens or layout"),
    (lambda ds: next(iter(ds.train_test_split(0.1))).loader(4), r"'train'.*name of a split.*\['train'\]"),
    (lambda ds: list(ds.train_test_split(0.5))[1].map(len), r"'test'.*name of a split"),
    (lambda ds: midepoch.mix({"a": 1, "b": 2}, {"a": ds, "b": ds}), r"before the sources.*mix\(sources, weights\)"),
    (lambda ds: midepoch.mix([0.5, 0.5], [ds, ds]), r"before the sources.*mix\(sources, weights\)"),
    (
        lambda ds: midepoch.mix(midepoch.Schedule([midepoch.Phase("a", {"a": 1}, rows=3)]), {"a": ds}),
        "before the sources",
    ),
    (lambda ds: list(ds.map(lambda one: {"n": one["text"].upper()}, batched=True)), "'list'.*omit batched=True"),
    (lambda ds: list(ds.filter(lambda one: one["id"] > 3, batched=True)), "'list'.*omit batched=True"),
    (lambda ds: list(ds.map(lambda one: {"n": len(one["id"])})), r"no len\(\).*pass batched=True"),
    (lambda ds: ds.loader(4, pin_memory="yes"), "pin_memory=….*True or False.*'yes'"),
    (lambda ds: ds.loader(4, collate_columns="no"), "collate_columns=….*True or False"),
    (lambda ds: ds.batch(4, drop_last=3), "drop_last=….*True or False, got 3"),
    (lambda ds: ds.sort("id", reverse="no"), "reverse=….*True or False"),
    (lambda ds: ds.weighted("id", replacement="no"), "replacement=….*True or False"),
    (lambda ds: ds.pack(8, "text", drop_remainder="no"), "drop_remainder=….*True or False"),
    (lambda ds: ds.filter(len, "id"), "batched=….*True or False, got 'id'"),
    (lambda _: midepoch.from_files("x", validate="no"), "validate=….*True or False"),
    (lambda _: midepoch.from_files("x", retry=3), r"retry=midepoch\.Retry\(attempts=10\), got 3"),
    (lambda _: midepoch.from_files(""), "path is empty.*current folder"),
    (lambda _: midepoch.from_files("x", cache_dir=""), "cache_dir takes.*''.*Omit it"),
    (lambda _: midepoch.Retry(attempts=0), "attempts.*at least 1"),
    (lambda _: midepoch.PipelineCheckpoint(""), "folder, such as 'checkpoints', got ''"),
    (lambda _: midepoch.PipelineCheckpoint("x", timeout="60"), "timeout=….*a number, got '60'"),
    (lambda ds: ds.loader(4, audit=""), "audit='runs/7', got ''"),
    (lambda ds: ds.cast_column("id", None), "'id' needs a type, got None.*'int32'"),
    (lambda ds: ds.rename_column("id", ""), "text that is not empty, got ''"),
    (lambda ds: ds.select_columns({"id": "n"}), "names of columns.*rename_columns"),
    (lambda ds: list(ds.map(lambda row: {1: row["id"]})), "names of columns are texts.*returned 1. Return {'name'"),
    (lambda ds: list(ds.map(lambda rows: {1: rows["id"]}, batched=True)), "names of columns are texts"),
    (lambda ds: list(ds.flat_map(lambda row: [{1: row["id"]}])), "names of columns are texts"),
    (lambda ds: midepoch.mix({1: ds, 2: ds}), "names of sources are texts, got 1. Write '1'"),
    (lambda ds: ds.sort(lambda row: row["id"] or "none"), "sort: the function must return values of one type"),
    (lambda ds: ds["id"] == 3, r"compared.*ds\.filter\(pyarrow\.compute\.field\('id'\) == 3\)"),
]
"""Mistakes that could be accepted without a word, or fail far from their cause."""

FIRST_WEEK: Wrong = [
    (lambda ds: ds.sample(100), r"train_test_split\(test_size=100, seed=0\)"),
    (lambda ds: ds.drop(columns=["text"]), "remove_columns"),
    (lambda ds: ds.sort_values("id"), r"ds\.sort\(column\)"),
    (lambda ds: ds.rename({"id": "n"}), "rename_columns"),
    (lambda ds: ds.groupby("id"), "never grouped"),
    (lambda ds: ds.to_torch(), r"ds\.loader\(batch_size\)"),
    (lambda ds: ds.reset_index(), "omit it"),
    (lambda ds: ds.steps_per_epoch, r"loader\(batch_size, steps_per_epoch=…\)"),
    (lambda ds: ds.column_values, "column_names"),
    (lambda ds: ds.loader(4, shuffle=False), "Omit it: rows come in the dataset's order"),
    (lambda ds: ds.loader(4, sampler=None), "Omit it if it is None"),
    (lambda ds: ds.shuffle(10_000, seed=42), r"'seed' twice.*first argument is the seed.*ds\.shuffle\(seed=42\)"),
    (lambda ds: ds.rename_column({"id": "n"}), "use rename_columns"),
    (lambda ds: ds.take(0.1), r"expected an integer, got 0\.1.*ds\.slice\(None, '10%'\)"),
    (lambda ds: ds.skip("10%"), r"expected an integer, got '10%'.*ds\.slice\('10%'\)"),
    (lambda ds: ds.weighted([0.5, 0.5], seed=1), r"20 weights.*got 2.*each class.*balanced"),
    (lambda ds: ds.repeat(3), "for epoch in range"),
    (lambda ds: ds.pack(8, "id", eos="</s>"), r"got '</s>'.*tokenizer\.eos_token_id"),
    (lambda ds: ds.pack(8, "id", pad="<pad>"), r"got '<pad>'.*tokenizer\.pad_token_id"),
    (lambda ds: ds.pack(8, pad=-100), r"-100 is for labels.*tokenizer\.pad_token_id"),
    (lambda ds: len(midepoch.mix([ds, ds], stop="never").loader(4)), "never ends.*steps_per_epoch="),
    (lambda ds: list(ds.map(lambda row: (yield))), "it returned generator. Return one dict, or use flat_map"),
    (
        lambda ds: list(ds.map(lambda row: {"ids": [[1, 2]]}).pack(4, "ids")),
        "not lists of numbers.*omit return_tensors",
    ),
    (lambda ds: midepoch.mix({"a": ds, "b": ds}).loader(4).set_weights(a=1, b=1), r"Pass a dict, set_weights\(\{"),
    (lambda _: midepoch.from_files("a.parquet", "b.parquet"), r"Pass several files as a list: from_files\(\["),
    (lambda _: midepoch.from_pandas(1, 2), r"concat\(\[from_pandas\(a\), from_pandas\(b\)\]\)"),
    (lambda _: midepoch.from_generator(iter, 3), "gen_kwargs="),
    (lambda ds: ds.select_columns("id,text"), r"Pass several as a list: \['id', 'text'\]"),
    (lambda ds: ds.map(len, remove_columns="id text"), r"Pass several as a list: \['id', 'text'\]"),
    (lambda ds: ds.with_columns(n=1), r"Use ds\.map\("),
    (lambda ds: ds.with_indices(), "with_indices=True"),
    (lambda ds: ds.explode("id"), "unbatch"),
    (lambda ds: ds.nothing_like_it, "It has balanced, batch, .*select, select_columns, .*shuffle"),
    (lambda ds: midepoch.mix([ds, ds], [1, 1], "all"), r"mix\(sources, stop='all'\)"),
    (lambda ds: midepoch.mix([ds, ds], "never"), r"mix\(sources, stop='never'\)"),
    (lambda ds: midepoch.interleave_datasets([ds, ds], [1, 1], "all_exhausted"), "Name stopping_strategy="),
    (lambda ds: ds.shuffle(42, 1000), "There is no buffer size.*window="),
    (lambda ds: saved(ds.loader(4)).save(ds.loader(4), 5), "passed by name: step=5"),
    (lambda ds: ds.pack(8).tokenize(FAST), r"no column 'input_ids'.*ds\.tokenize\(tokenizer\)\.pack"),
    (lambda ds: next(ds.filter(bool).loader(max_tokens=64)), "length=… names the column of tokens|length="),
    (lambda ds: list(ds.map(FAST, batched=True)), r"ds\.tokenize\(tokenizer\), or input_columns='text'"),
    (lambda ds: ds.sort("-id"), r"descending order: ds\.sort\('id', reverse=True\)"),
    (lambda ds: ds.train_test_split(20, 42), "seed is passed by name: seed=42"),
    (lambda ds: ds.weighted("text", seed=1), r"expected numbers.*ds\.balanced\('text'\)"),
    (lambda ds: ds.loader(4, True), r"got True\. The second argument is num_workers.*ds\.shuffle\(seed=…\)"),
    (lambda ds: list(ds.map(lambda rng, row: {"n": rng.random()}, with_generator=True)), "row is the first argument"),
    (lambda ds: next(ds.loader(4, collate_fn=lambda rows: [x for x, y, z in rows])), r"a row is a dict: row\['text'\]"),
    (lambda ds: next(ds.loader(4, collate_fn=lambda rows: [r[0] for r in rows])), r"a row is a dict: row\['text'\]"),
    (lambda ds: next(ragged(ds).loader(4, collate_fn=default_collate)), "layout='padded'"),
    (lambda ds: next(ds.loader(4, collate_fn=FAST)), r"ds\.tokenize\(tokenizer\)"),
    (lambda ds: saved(ds.loader(4)).restore(ds.loader(4), step=-1), "at least 0, got -1. For the newest"),
    (lambda _: midepoch.from_files("folder\\a.parquet"), "Folders are separated by /: 'folder/a.parquet'"),
    (
        lambda ds: assert_resumes_exactly(lambda: midepoch.mix([ds], stop="never").loader(4)),
        "never ends.*steps_per_epoch",
    ),
    (lambda ds: ds.tokenize(FAST, max_lenght=2), "no argument 'max_lenght'. Did you mean max_length="),
    (lambda ds: ds.tokenize(FAST, remove_columns=["id"]), r"ds\.remove_columns"),
    (lambda _: midepoch.from_files("a.csv", header=None), "'header'.*from_pandas"),
    (lambda _: midepoch.from_files("a.csv", encoding="cp1252"), "UTF-8.*from_pandas"),
    (lambda _: midepoch.from_files("a.csv", dtype=str), "'dtype'.*cast"),
    (lambda _: midepoch.from_files("a.csv", nrows=10), "take"),
    (lambda _: midepoch.from_files("a.jsonl", lines=True), "recognized: omit it"),
    (lambda _: midepoch.from_files("$DATA/a.parquet"), "expandvars"),
    (lambda _: midepoch.from_files("{folder}/a.parquet"), "not filled in.*f'"),
    (lambda _: written("a.csv", "1,word 1,1\n2,word 2,3\n"), "add a header if that row is one of data"),
    (lambda _: written("a.jsonl", '{"id": 1},\n{"id": 2},\n'), "ends with a comma, and JSON lines have none"),
    (lambda _: written("a.jsonl", "{'id': 1}\n"), "single quotes.*json.dumps"),
    (lambda ds: saved(ds.loader(4)).restore(ds.loader(4), step="latest"), "got 'latest'.*restore_latest"),
    (
        lambda ds: saved(ds.loader(4)).restore(ds.loader(4), optimizer=OPTIMIZER.state_dict(), step=1),
        "optimizer is what state_dict\\(\\) returned, a copy. Pass the object itself",
    ),
    (
        lambda ds: saved(ds.loader(4)).restore(ds.loader(4), extra={"s": SCHEDULER.state_dict()}, step=1),
        "s is what state_dict\\(\\) returned, a copy",
    ),
    (lambda ds: ds.loader(4).load_state_dict(ds.take(9).loader(4).state_dict()), "take, skip"),
    (
        lambda ds: next(ds.map(lambda row: {"x": object()}).with_format("arrow").loader(4)),
        "cannot become an Arrow column.*numpy.asarray",
    ),
    (
        lambda ds: next(ds.map(lambda row: {"input_ids": torch.ones(1, 3)}).loader(4, layout="padded")),
        "does not contain lists of numbers. .*omit return_tensors",
    ),
    (
        lambda ds: next(
            ds.map(lambda row: {"x": [1.0]}).loader(4, collate_fn=lambda rows: torch.stack([row["x"] for row in rows]))
        ),
        r"with_format\('torch'\)",
    ),
    (
        lambda ds: ds.loader(4).load_state_dict({"_snapshot": {}, "_steps_since_snapshot": 3}),
        "state of torchdata's StatefulDataLoader",
    ),
    (lambda ds: saved(ds.loader(4)).save(ds.loader(4), async_save=True), r"argument of PipelineCheckpoint\('checkpo"),
    (lambda ds: ds._distributed, "split_dataset_by_node is for other datasets.*omit it"),
    (lambda ds: next(ds.map(lambda row: "text").loader(4)), r"not \{'name': value\}"),
]
"""Mistakes of people in their first week, of whom none had seen the lists above."""


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> midepoch.Dataset:
    table = pa.table({"id": range(20), "text": [f"t {i}" for i in range(20)]})
    return dataset_of(tmp_path_factory.mktemp("misuse"), table, 7)


@pytest.mark.parametrize(
    "wrong", [HF, TORCH, PACK, OPEN, SILENT, FIRST_WEEK], ids=["hf", "torch", "pack", "open", "silent", "first week"]
)
def test_every_message_names_the_problem_and_the_way_out(wrong: Wrong, ds: midepoch.Dataset) -> None:
    unhelpful = []
    for number, (call, says) in enumerate(wrong):
        try:
            call(ds)
        except Exception as problem:
            text = str(problem)
            if not re.search(says, text, re.DOTALL) or INTERNAL.search(text) or not 15 < len(text) < 600:
                unhelpful.append(f"{number}: {says!r}: {type(problem).__name__}: {text}")
        else:
            unhelpful.append(f"{number}: {says!r}: no error")
    assert not unhelpful, "\n" + "\n".join(unhelpful)


@pytest.mark.parametrize(("name", "kind"), [("a.csv", "parquet"), ("a.jsonl", "parquet"), ("b.csv", "jsonl")])
def test_the_format_of_a_file_with_the_name_of_another(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "parquet":
        pq.write_table(pa.table({"id": [1]}), tmp_path / name)
    else:
        (tmp_path / name).write_text('{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n')
    with pytest.raises(midepoch.DataError, match=f"its format is {kind}. Pass format='{kind}'"):
        midepoch.from_files(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.txt"])
def test_a_compressed_file_whose_name_does_not_say_so(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b'{"id": 1}\n'))
    with pytest.raises(midepoch.DataError, match=r"it is compressed. Rename it so that its name ends with \.gz"):
        midepoch.from_files(tmp_path / name)


def test_a_filter_that_returns_none_says_so(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    hints.forget_warnings()
    assert list(ds.filter(lambda row: print(end=""))) == []
    assert "returned None, which leaves the row out. Return True or False." in caplog.text


def test_padding_that_is_packed_is_announced(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    padded = words()
    padded.enable_padding()
    for tokenizer, says in ((words(), ""), (padded, "packed as if it were text. Omit padding=")):
        midepoch.mix([ds.tokenize(tokenizer), ds.tokenize(words())]).pack(8)
        midepoch.mix([ds, ds]).tokenize(tokenizer).pack(8)
        assert says in caplog.text if says else caplog.text == ""
    caplog.clear()
    for padding, warns in (("do_not_pad", False), ("longest", True)):
        ds.tokenize(PreTrainedTokenizerFast(tokenizer_object=words()), padding=padding).pack(8)
        assert ("packed as if it were text" in caplog.text) == warns


def test_a_source_that_set_weights_does_not_name(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    loader = midepoch.mix({"a": ds, "b": ds.take(9)}, {"a": 1, "b": 1}).loader(4)
    for weights, says in (
        ({"a": 3, "b": 1}, ""),
        ({"a": 1}, "'b' is not named, so its weight is 0. Name all"),
        ({"a": 1, "b": 0}, ""),
    ):
        caplog.clear()
        loader.set_weights(weights)
        assert says in caplog.text if says else caplog.text == ""


def test_the_list_is_long_enough() -> None:
    assert sum(map(len, (HF, TORCH, PACK, OPEN))) >= 150


def test_names_of_others_can_be_set(ds: midepoch.Dataset) -> None:
    """Frameworks mark datasets and loaders, and tests replace methods."""
    loader = ds.loader(4)
    for one in (ds.take(3), loader):
        one.marked_by_a_framework = 3
        one._private, one.state_dict = 3, dict
        assert one.marked_by_a_framework == one._private == 3 and one.state_dict() == {}


@pytest.mark.parametrize(("batched", "kind"), [(False, "batch"), (True, "row")])
def test_a_function_whose_argument_has_the_name_of_another_one(
    batched: bool, kind: str, ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    """It often runs without an error: a string is a list of its characters."""
    functions: dict[str, Any] = {"batch": lambda batch: {"n": batch["text"]}, "row": lambda row: {"n": row["text"]}}
    ds.map(functions[kind], batched=batched)
    assert f"its argument {kind!r} gets" in caplog.text and "batched=True" in caplog.text
    caplog.clear()
    ds.map(functions[kind], batched=not batched)
    ds.batch(4).map(functions["batch"])  # its rows are batches
    ds.map(functions[kind], batched=batched, input_columns="text")
    assert caplog.text == ""
    with pytest.raises(midepoch.MapError, match="not iterable.*pass batched=True"):
        list(ds.filter(lambda one: [n > 3 for n in one["id"]]))


def test_paths_in_one_string_and_tables_in_an_archive(tmp_path: Path) -> None:
    for name in "ab":
        pq.write_table(pa.table({"id": [1, 2]}), tmp_path / f"{name}.parquet")
    with pytest.raises(midepoch.DataNotFoundError, match=r"does not exist.*Pass the 2 paths as a list: \['.*'\]"):
        midepoch.from_files(f"{tmp_path}/a.parquet, {tmp_path}/b.parquet")
    with pytest.raises(midepoch.DataNotFoundError, match="The folder .* exists"):
        midepoch.from_files(f"{tmp_path}/a.parquet,{tmp_path}/nothing.parquet")
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.parquet", "a.parquet")
    with pytest.raises(midepoch.FormatError, match=r"file of rows.*Unpack.*from_files\('FOLDER/\*.parquet'\)"):
        midepoch.from_files(tmp_path / "all.tar.gz")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_checkpoints_and_caches_inside_of_the_data_are_not_data(kind: str, tmp_path: Path) -> None:
    for name in "ab":
        if kind == "jsonl":
            (tmp_path / f"{name}.jsonl").write_text('{"id": 1}\n{"id": 2}\n')
        else:
            pq.write_table(pa.table({"id": [1, 2]}), tmp_path / f"{name}.parquet")
    ds = midepoch.from_files(tmp_path)
    loader = ds.loader(2, audit=tmp_path / "run")
    next(loader)
    midepoch.PipelineCheckpoint(tmp_path / "checkpoints").save(loader, step=7)
    shutil.copytree(tmp_path / "checkpoints/step_7", tmp_path / "of a store/step_7/0123456789abcdef")
    ds.map(lambda row: {"n": row["id"]}).cache(tmp_path)
    for again in (midepoch.from_files(tmp_path), midepoch.from_files(f"{tmp_path}/**/*{kind[:4]}*")):
        assert again.column_names == ["id"] and len(again) == 4
        resumed = again.loader(2)
        assert midepoch.PipelineCheckpoint(tmp_path / "checkpoints").restore_latest(resumed) == 7
    with pytest.raises(midepoch.DataNotFoundError, match="has only hidden files, checkpoints or caches"):
        midepoch.from_files(tmp_path / "checkpoints")
    with pytest.raises(midepoch.DataNotFoundError, match="is the ledger of a run, which `midepoch audit` reads"):
        midepoch.from_files(tmp_path / "run")
    (state,) = (tmp_path / "checkpoints").glob("step_7/data.json")
    assert len(midepoch.from_files(state)) == 1  # by its name


def test_errors_inside_of_functions_are_not_explained_away(tmp_path: Path) -> None:
    """Only a call that does not fit its signature gets a hint: a TypeError of a user's function stays as it is."""
    ds = midepoch.from_files(write_arrow(tmp_path / "a.arrow", pa.table({"id": range(3)}), 2))
    with pytest.raises(midepoch.MapError, match="unsupported operand"):
        list(ds.map(lambda row: {"n": row["id"] + "a"}))
    with pytest.raises(midepoch.MapError, match="missing 1 .*'i'.*with_indices=True adds"):
        list(ds.map(lambda row, i: {"n": i}))
    with pytest.raises(midepoch.MapError, match="values of id: omit input_columns"):
        list(ds.filter(lambda row: row["id"] > 3, input_columns="id"))
    with pytest.raises(TypeError, match="row numbers, got a mask"):
        ds.select([True])


def test_a_value_that_is_none_in_a_function(ds: midepoch.Dataset) -> None:
    nulls = ds.map(lambda row: {"text": None if row["id"] == 3 else row["text"]})
    says = "'text' is None in the row: test for it, or filter such rows out"
    for wrong in (nulls.map(lambda row: {"n": len(row["text"])}), nulls.filter(lambda row: row["text"] > "a")):
        with pytest.raises(midepoch.MapError, match=says):
            list(wrong)


def test_one_row_of_columns_and_a_file_given_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text, says in (
        (
            '{"id": {"0": 1, "1": 2}, "text": {"0": "a", "1": "b"}}',
            "values are columns.*read_json",
        ),  # of pandas' to_json
        ('{"id": [1, 2], "text": ["a", "b"]}', "values are columns.*read_json"),
        ('{"version": "1", "data": [{"id": 1}, {"id": 2}]}', "'data' is a list of objects.*field='data', split="),
        ('{"a1": {"text": "x"}, "a2": {"text": "y"}}', r"values are the rows: midepoch\.from_list"),
        ('{"id": 1, "ids": [1, 2]}', ""),
    ):
        (tmp_path / "a.json").write_text(text)
        forget_warnings()
        caplog.clear()
        assert len(midepoch.from_files(tmp_path / "a.json")) == 1
        assert re.search(says, caplog.text) if says else caplog.text == ""
    assert len(midepoch.from_files([tmp_path / "a.json", tmp_path / "a.json"])) == 2
    assert "a.json is given more than once" in caplog.text


def test_a_collate_function_that_returns_nothing(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def forgets(rows: list[Any]) -> None:
        rows.sort(key=len)

    assert list(ds.loader(10, collate_fn=forgets)) == [None, None]
    assert caplog.text.count("forgets returned None, so that is the batch. Return the batch.") == 1


def test_a_worker_that_asks_torch_where_it_is(ds: midepoch.Dataset) -> None:
    def init(_: int) -> None:
        torch.utils.data.get_worker_info().dataset  # type: ignore[union-attr]  # noqa: B018

    with pytest.raises(midepoch.MapError, match="worker_init_fn failed.*get_worker_info\\(\\) is None here"):
        list(ds.loader(4, num_workers=1, worker_init_fn=init))


def test_arguments_of_functions_the_other_way_around(ds: midepoch.Dataset) -> None:
    with pytest.raises(midepoch.MapError, match="not subscriptable. The row is the first argument; its number"):
        list(ds.map(lambda i, row: {"n": row["id"] + i}, with_indices=True))


def test_a_schedule_ends(ds: midepoch.Dataset) -> None:
    """It is a mix that never ends by itself."""
    phase = midepoch.Phase("main", {"a": 0.5, "b": 0.5}, rows=16)
    mixed = midepoch.mix({"a": ds.take(9), "b": ds.skip(9)}, midepoch.Schedule([phase]))
    assert len(mixed.loader(4)) == 4
    assert assert_resumes_exactly(lambda: mixed.loader(4), epochs=1) > 4


def test_what_is_easily_overlooked(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def says(text: str) -> None:
        assert text in caplog.text, caplog.text
        caplog.clear()

    loader = ds.loader(4)
    assert ds.state_dict() and not caplog.text
    next(loader)
    assert ds.state_dict()["position"] == 0
    says("its loader is at position 4. Save loader.state_dict()")
    assert {name: len(part) for name, part in ds.train_test_split(0.1, 7).items()} == {"train": 7, "test": 2}
    says("11 rows are in neither part, because train_size is 7. A seed is named: seed=7")
    many = midepoch.from_dict({"x": range(40), "y": [i % 3 for i in range(40)]})
    many.balanced("y", seed=1)
    assert not caplog.text
    many.balanced("x", seed=1)
    says("has 40 values in 40 rows")
    assert next(ds.loader(4, collate_fn=lambda rows: [x for x, y in rows])) == ["id"] * 4
    says("returned names of columns. A row is a dict")
    nulls = ds.map(lambda row: {"text": None if row["id"] == 3 else row["text"]})
    ds.sort(lambda row: None)
    says("sort: the function returned None for every row")
    assert list(nulls.tokenize(words()))[3]["input_ids"] == []
    says("some texts are null, and are tokenized as empty ones")


def test_loaders_that_do_not_know_of_each_other(
    ds: midepoch.Dataset, tmp_path: Path, caplog: Any, torch_forks: Forks
) -> None:
    shuffled = ds.shuffle(seed=1)
    saved, before = shuffled.loader(4), ds.shuffle(seed=1)
    loader = before.loader(4)
    next(saved)
    before.load_state_dict(saved.state_dict())
    assert "a loader that was made before begins at its own position" in caplog.text and loader.position == 0
    caplog.clear()
    next(ds.loader(4, audit=tmp_path))
    next(ds.loader(2, audit=tmp_path))
    next(ds.take(7).loader(4, audit=Ledger(tmp_path, name="valid")))
    assert "two loaders" not in caplog.text
    next(ds.take(9).loader(4, audit=tmp_path))
    assert "two loaders of different rows record in" in caplog.text
    caplog.clear()
    program = "import sys, midepoch; next(midepoch.from_dict({'n': range(8)}).loader(4, audit=sys.argv[1]))"
    [done] = torch_forks.run(["-c", program, str(tmp_path)])
    assert "For another run, pass another folder" in done.stderr  # that of another process


def test_the_answer_about_functions_of_workers_is_that_of_all_workers(ds: midepoch.Dataset) -> None:
    for made in (ds, ds.filter(lambda row: True)):
        with pytest.raises(
            midepoch.MapError, match="worker_init_fn failed.*It is called with the number of the worker"
        ):
            next(made.loader(4, num_workers=1, worker_init_fn=lambda: None))  # type: ignore[misc,arg-type]


def test_files_of_numbers_and_a_filter_by_several_values(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 4), np.float32))
    with pytest.raises(midepoch.FormatError, match=r"from_dict.*numpy\.load"):
        midepoch.from_files(tmp_path / "a.npy")
    pq.write_table(pa.table({"label": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(midepoch.ColumnError, match="For several values, use .*'in', "):
        midepoch.from_files(tmp_path / "a.parquet", filters=[("label", "==", ["a", "b"])])


def test_values_that_are_not_what_they_seem(ds: midepoch.Dataset, tmp_path: Path, caplog: Any) -> None:
    def says(text: str) -> None:
        assert text in caplog.text, caplog.text
        caplog.clear()

    with pytest.raises(midepoch.MapError, match=r"holds conversations. Use map\(.*apply_chat_template"):
        list(ds.map(lambda row: {"text": [{"role": "user", "content": "hi"}]}).tokenize(words()))
    with pytest.raises(midepoch.MapError, match="After with_format\\('arrow'\\) a function gets tables"):
        list(ds.with_format("arrow").map(lambda row: {"n": row["id"] + "a"}))
    next(ds.map(lambda row: {"mixed": row["id"] or "none"}).loader(4))
    says("column 'mixed' has values of different types (int, str)")
    (tmp_path / "hive" / "lang=de").mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "hive" / "lang=de" / "0.parquet")
    midepoch.from_files(tmp_path / "hive", partitioning="hive")
    midepoch.from_files(tmp_path / "hive" / "lang=de")
    assert caplog.text == ""
    midepoch.from_files(tmp_path / "hive")
    says("folders are named lang=…: partitioning='hive' makes it a column")
    for dtype, other in (("uint16", "uint32"), ("uint32", "uint16")):
        (np.arange(1000) % 500).astype(dtype).tofile(tmp_path / "a.bin")
        midepoch.from_tokens(tmp_path / "a.bin", 50, dtype=dtype)
        assert caplog.text == ""
        midepoch.from_tokens(tmp_path / "a.bin", 50, dtype=other)
        says(f"is their type dtype='{dtype}'?")


def test_answers_are_given_only_where_they_apply(
    ds: midepoch.Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these would be answered by the name of another mistake, or by an error of the answer itself."""
    assert list(ds.loader(10, collate_fn=lambda rows: ["id", [1]])) == [["id", [1]]] * 2
    assert next(ds.loader(10, collate_fn=lambda rows: [row["text"] for row in rows]))[0] == "t 0"
    with pytest.raises(midepoch.MapError, match="column holds ndarray"):
        list(ds.map(lambda row: {"text": np.zeros(3)}).tokenize(words()))
    for made in (
        ds.map(lambda row: {"n": row["id"]["x"]}),  # of its own, without an index
        ds.map(lambda row: {"n": pa.array([1]) + "a"}),  # of its own, without Arrow
        ds.map(lambda row: {"text": [1, 2]}).tokenize(words()),
    ):
        with pytest.raises(midepoch.MapError) as caught:
            list(made)
        assert not re.search("first argument|with_format|a row is a dict", str(caught.value)), caught.value
    for number in range(3):
        (tmp_path / f"{number}.json").write_text('{"messages": [{"role": "user"}, {"role": "assistant"}]}')
    (tmp_path / "lang=de").mkdir()
    shutil.copy(tmp_path / "0.json", tmp_path / "lang=de" / "0.json")
    caplog.clear()
    midepoch.from_files(tmp_path / "*.json")
    assert caplog.text.count("is one JSON object") == 1  # not of each
    monkeypatch.chdir(tmp_path / "lang=de")
    midepoch.from_files("0.json")
    assert "partitioning" not in caplog.text  # the folder around it is nobody's column


def test_rows_that_are_chosen_after_a_shuffle(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    forget_warnings()
    ds.take(3).shuffle(seed=1)
    ds.select([1, 2]).shuffle(seed=1)
    ds.shuffle(seed=1).filter(len).take(3)
    ds.shuffle(seed=1).train_test_split(0.1)
    assert caplog.text == ""
    assert len(ds.shuffle(seed=1).take(3)) == len(ds.shuffle(seed=1).slice(0, 3)) == 3
    ds.shuffle(seed=1).select(range(3))
    assert caplog.text.count("after shuffle() choose rows in the order of the data") == 1


def test_values_of_different_shapes_in_a_batch(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def made(name: str, *shape: int) -> midepoch.Dataset:
        return ds.map(lambda row: {name: torch.zeros(*shape, 4 + row["id"] % 2)}).select_columns(name)

    assert [type(batch["one"]) for batch in made("one", 3).loader(4)] == [list] * 5
    assert caplog.text.count("column 'one' has values of different shapes, such as [3, 4] and [3, 5]") == 1
    caplog.clear()
    list(made("tokens").loader(4))  # of one dimension, which everybody has
    assert caplog.text == ""


def test_a_run_that_begins_again_beside_its_ledger(python: str, tmp_path: Path) -> None:
    job = (
        "import midepoch, sys; loader = midepoch.from_dict({'x': range(20)}).shuffle(seed=1).loader(2, audit=sys.argv[1]);"
        "[next(loader) for _ in range(3)]"
    )
    said = [
        subprocess.run([python, "-c", job, tmp_path], capture_output=True, text=True, check=True).stderr
        for _ in range(2)
    ]
    assert "has 3 steps of an earlier start" not in said[0]
    assert "has 3 steps of an earlier start, and this one begins at step 0" in said[1]


def written(name: str, text: str) -> midepoch.Dataset:
    path = Path(tempfile.mkdtemp()) / name
    path.write_text(text)
    return midepoch.from_files(path)


def ragged(ds: midepoch.Dataset) -> midepoch.Dataset:
    return ds.map(lambda row: {"ids": [1] * (1 + row["id"] % 3)}).select_columns("ids")


OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 3)


def first(rows: Iterable[Any]) -> Any:
    return next(iter(rows))


def loads_inside(loader: midepoch.Loader) -> None:
    for _ in loader:
        loader.load_state_dict(loader.state_dict())


def saved(loader: midepoch.Loader) -> midepoch.PipelineCheckpoint:
    checkpoint = midepoch.PipelineCheckpoint(tempfile.mkdtemp())
    checkpoint.save(loader, step=1)
    return checkpoint


class Encoding:
    """A tokenizer as tiktoken has it."""

    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"t": 0, "?": 1}, unk_token="?"))


FAST = PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="?")


class Collator:
    """A collator as transformers has them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: list[Any]) -> list[Any]:
        return rows


class Items:
    """A dataset of torch."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> int:
        return number


def test_suggested_names_exist(ds: midepoch.Dataset) -> None:
    for owner in (ds, ds.loader(4), midepoch):
        exist = {name for name in dir(owner) if not name.startswith("_")}
        known = exist | ATTRIBUTES.keys() | NAMES.keys()
        wrong = (known | {name[:-1] for name in known} | {f"{name}s" for name in known}) - exist
        told = []
        for name in wrong:
            with pytest.raises(AttributeError) as raised:
                raise AttributeError(getattr(owner, name))  # a module of the package may have the name
            told.append(str(raised.value))
        suggested = {name for text in told for name in re.findall(r"Did you mean (\w+)\?", text)}
        assert suggested and suggested <= exist


def test_a_quoted_error_ends_in_one_dot() -> None:
    for kind in (midepoch.ColumnError, midepoch.MidepochError, midepoch.DataNotFoundError):
        assert str(kind("a: it failed.. Try again..")) == "a: it failed. Try again."
        assert str(kind("a... B, ../b/.. and c..d stay …")) == "a... B, ../b/.. and c..d stay …"


def test_a_state_that_is_loaded_and_left(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that begins at epoch 0 after a resume."""
    loader = ds.shuffle(seed=1).loader(8)
    for _ in loader:
        pass
    next(loader)
    state = loader.state_dict()
    for epoch, warns in ((1, False), (0, True)):
        again = ds.shuffle(seed=1).loader(8)
        again.load_state_dict(state)
        caplog.clear()
        again.set_epoch(epoch)
        assert ("set_epoch(0) leaves the state that was loaded, of epoch 1" in caplog.text) == warns, caplog.text
        assert bool(again.position) != warns


def test_a_start_that_forgets_to_restore(
    ds: midepoch.Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns, and the checkpoints of the earlier start stay."""
    loader = ds.loader(4)

    def start() -> midepoch.PipelineCheckpoint:
        return midepoch.PipelineCheckpoint(tmp_path, keep=2)

    first = start()
    for step in (20, 40, 60):
        first.save(loader, step=step)
    assert first.steps() == [40, 60] and not caplog.text
    forgetful = start()
    for step in (1, 2, 3, 4):
        forgetful.save(loader, step=step)
    assert "steps up to 60 of an earlier start" in caplog.text and "restore_latest()" in caplog.text
    assert forgetful.steps() == [3, 4, 40, 60]
    caplog.clear()
    careful = start()
    assert careful.restore_latest(loader) == 4
    careful.save(loader, step=3)  # goes on from an earlier step, as after restore(loader, step=2)
    assert careful.steps() == [3, 4] and not caplog.text


def test_a_generator_of_another_library(ds: midepoch.Dataset) -> None:
    drawn = ds.map(lambda row, rng: {"r": torch.rand(3, generator=rng)}, with_generator=True)
    with pytest.raises(midepoch.MapError, match=r'For a generator of torch, pass with_generator="torch"\.'):
        next(drawn.loader(4))


def test_a_loader_that_is_copied(ds: midepoch.Dataset) -> None:
    loader = ds.loader(4)
    assert len(list(pickle.loads(pickle.dumps(loader)))) == len(loader)
    next(loader)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"not copied or pickled\. Save loader\.state_dict\(\)"):
            copied(loader)


def test_the_first_batch_again_and_again(ds: midepoch.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    forget_warnings()
    loader = ds.shuffle(seed=1).loader(4)
    assert torch.equal(next(iter(loader))["id"], next(loader)["id"]) and not caplog.text
    loader = ds.shuffle(seed=1).loader(4)
    for _ in range(3):
        next(iter(loader))
    assert caplog.text.count("a pass of one batch is a look") == 1


def test_ranks_that_are_connected_after_the_loader(python: str, free_port: int) -> None:
    program = """
import torch.distributed as dist, midepoch
ds = midepoch.from_dict({"x": list(range(20))})
early, alone = ds.loader(4), ds.loader(4, rank=0, world_size=1)
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d", rank=%d, world_size=2)
assert len(list(alone)) == 5
try:
    next(early)
except midepoch.WorldError as problem:
    assert "before the 2 ranks were connected" in str(problem) and "after init_process_group" in str(problem)
    print("refused")
"""
    port = free_port
    started = [
        subprocess.Popen([python, "-c", program % (port, rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["refused\n"] * 2


def test_what_a_message_knows_of_the_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("some words\n" * 200)
    with pytest.raises(midepoch.FormatError, match=r"is text, not tokens\. Use from_files\(.*\)\.tokenize"):
        midepoch.from_tokens(str(text), 128)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(midepoch.FormatError, match=r"raw file of tokens.*dtype='uint16'"):
        midepoch.from_tokens(str(tmp_path / "empty.bin"), 128)
    with pytest.raises(midepoch.DataNotFoundError, match=r"is not a Delta table.*open its files with from_files"):
        midepoch.from_delta(str(tmp_path))
    with pytest.raises(TypeError, match=r"metadata\.args.*got a Namespace.*vars\(…\) for objects"):
        midepoch.PipelineCheckpoint(tmp_path).save(metadata={"args": argparse.Namespace(lr=1)}, extra={"a": 1})
    table = tmp_path / "iris.csv"
    table.write_text("5.1,-3.5,setosa\n4.9,3.0,setosa\n")
    assert len(midepoch.from_files(table)) == 1 and "add a header" in caplog.text
    bodies, texts = (midepoch.from_dict({name: ["a b"] * 4}) for name in ("body", "text"))
    with pytest.raises(midepoch.ColumnError, match=r"source 'articles' of the mix.*rename_column\('body', 'text'\)"):
        midepoch.mix({"web": texts, "articles": bodies}).tokenize(Tokenizer(models.BPE()))
    with pytest.raises(midepoch.ColumnError, match=r"no column 'text'.*tokenize\(tokenizer, 'its name'\)"):
        bodies.tokenize(Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="there is no row 9: source 'b' has 4 rows"):
        midepoch.mix({"a": texts, "b": texts}).loader(2).exclude(documents=[("b", 9)])


def test_accelerate_without_the_integration(framework_forks: Forks) -> None:
    program = """
import accelerate, logging, midepoch, sys
from midepoch._internal.hints import forget_warnings
from midepoch.loader.options import _SAVES
for name in _SAVES:
    sys.modules.pop(name, None)  # which the process that this is forked from has imported
said = []
logging.getLogger("midepoch").addHandler(type("Said", (logging.Handler,), {"emit": lambda self, one: said.append(one)})())
loader = accelerate.Accelerator(cpu=True).prepare(midepoch.from_dict({"x": list(range(20))}).loader(4))
assert len(list(loader)) == 5
assert len(said) == 1 and "accelerator.save_state does not save its position" in said[0].getMessage()
forget_warnings()
import midepoch.integrations.accelerate
assert len(list(loader)) == 5 and len(said) == 1
"""
    [done] = framework_forks.run(["-c", program])
    assert done.returncode == 0, done.stderr
