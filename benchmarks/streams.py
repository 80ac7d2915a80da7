"""Pipelines that change the number of rows: filter, mix, pack, tokenize, and resuming them.

`python -m benchmarks.streams`. Each bar is a ratio, measured in turn in one run, best of several. Of each peer the
fastest way that was found to do the same is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import midepoch
from benchmarks import data, machine
from benchmarks.ranks import Measured

ROOT = Path(__file__).resolve().parent.parent
LENGTH = 2048
DOCUMENTS = 60_000
TEXTS = 24_000


def best(repeats: int, **contenders: Callable[[], int]) -> dict[str, float]:
    """The most rows a second of each, which run in turn."""
    found = dict.fromkeys(contenders, 0.0)
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            rows = run()
            found[name] = max(found[name], rows / (time.perf_counter() - start))
    for name, rate in found.items():
        print(f"  {name:48} {rate:14,.0f} /s")
    return found


def count(rows: Iterable[Any]) -> int:
    return sum(1 for _ in rows)


def hub(files: data.Files | list[str], rows: int | None = None) -> Any:
    import datasets

    paths = files.arrow if isinstance(files, data.Files) else files
    whole = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in paths])
    return whole if rows is None else whole.select(range(rows))


def one_in_hundred(row: dict[str, Any]) -> bool:
    return row["id"] % 100 == 0


def filters(files: data.Files, repeats: int) -> list[Measured]:
    ours, few = midepoch.from_files(files.arrow), files.rows // 10
    theirs = hub(files, few).to_iterable_dataset()
    expression = pc.equal(pc.subtract(pc.field("id"), pc.multiply(pc.divide(pc.field("id"), 100), 100)), 0)

    def by_arrow(table: pa.Table) -> pa.Array:
        return pc.equal(pc.subtract(table["id"], pc.multiply(pc.divide(table["id"], 100), 100)), 0)

    def all_of(stream: Any, rows: int) -> int:
        found = count(stream)
        assert found == rows // 100, found
        return rows

    print("filter keeping 1 in 100 (rows read)")
    rates = best(
        repeats,
        ours_function=lambda: all_of(ours.filter(one_in_hundred), files.rows),
        ours_function_of_a_column=lambda: all_of(
            ours.filter(lambda number: number % 100 == 0, input_columns="id"), files.rows
        ),
        ours_expression=lambda: all_of(ours.filter(expression), files.rows),
        datasets_function=lambda: all_of(theirs.filter(one_in_hundred), few),
        datasets_function_of_a_column=lambda: all_of(
            theirs.filter(lambda number: number % 100 == 0, input_columns="id"), few
        ),
        datasets_arrow_batches=lambda: all_of(
            theirs.with_format("arrow").filter(by_arrow, batched=True, batch_size=1000), few
        ),
    )
    rows = max(rates["datasets_function"], rates["datasets_function_of_a_column"])
    return [
        Measured("filter, a function", rates["ours_function"] / rates["datasets_function"], 10, "x", least=True),
        Measured("filter, a function of a column", rates["ours_function_of_a_column"] / rows, 10, "x", least=True),
        Measured("filter, an expression beside functions", rates["ours_expression"] / rows, 100, "x", least=True),
        Measured(
            "filter, an expression beside batches in Arrow",
            rates["ours_expression"] / rates["datasets_arrow_batches"],
            1,
            "x",
            least=True,
        ),
    ]


def mixes(files: data.Files, repeats: int) -> list[Measured]:
    import datasets

    third, weights = files.rows // 3, [0.5, 0.3, 0.2]
    ds = midepoch.from_files(files.arrow)
    parts = [ds.slice(i * third, (i + 1) * third).shuffle(seed=i + 1).with_format("numpy") for i in range(3)]
    mixed = midepoch.mix(parts, weights=weights, seed=1)
    single = ds.shuffle(seed=1).with_format("numpy")
    batches = third // 64
    theirs = hub(files)
    streams = [theirs.select(range(i * third, (i + 1) * third)).to_iterable_dataset() for i in range(3)]

    def interleaved(kind: str) -> Any:
        return datasets.interleave_datasets(streams, probabilities=weights, seed=1).with_format(kind)

    print("mix of three, 64 rows of tokens a batch (rows)")
    rates = best(
        repeats,
        single=lambda: count(islice(single.loader(64), batches)) * 64,
        mixed=lambda: count(islice(mixed.loader(64), batches)) * 64,
        mixed_two_workers=lambda: count(islice(mixed.loader(64, num_workers=2), batches)) * 64,
        datasets_numpy=lambda: count(islice(interleaved("numpy").iter(64), 40)) * 64,
        datasets_arrow=lambda: count(islice(interleaved("arrow").iter(64), 40)) * 64,
    )
    peer = max(rates["datasets_numpy"], rates["datasets_arrow"])
    return [
        Measured("mix of 3 beside one source", rates["mixed"] / rates["single"], 0.8, "x", least=True),
        Measured("mix of 3 beside interleave_datasets", rates["mixed"] / peer, 20, "x", least=True),
    ]


def documents(folder: Path) -> str:
    """Tokens of mean length 600, as one Arrow file."""
    path = folder / "documents.arrow"
    rng = np.random.default_rng(1)
    lengths = rng.gamma(2.0, 300.0, DOCUMENTS).astype(np.int64) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = rng.integers(1, 50_000, int(offsets[-1])).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    table = pa.table({"input_ids": column})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return str(path)


def packs(path: str, repeats: int) -> list[Measured]:
    import grain

    ds, theirs = midepoch.from_files(path).with_format("numpy"), hub([path])
    tokens = int(sum(len(row) for row in theirs.with_format("arrow")["input_ids"].to_pylist()))
    few = theirs.select(range(DOCUMENTS // 4)).with_format("numpy")
    fewer = DOCUMENTS // 4 / DOCUMENTS

    def grouped(batch: dict[str, Any]) -> dict[str, Any]:
        flat = np.concatenate(batch["input_ids"])
        return {"input_ids": flat[: len(flat) // LENGTH * LENGTH].reshape(-1, LENGTH)}

    def by_grain() -> int:
        source = grain.MapDataset.source(_Rows(few)).to_iter_dataset()
        packed = grain.experimental.ConcatThenSplitIterDataset(source, length_struct={"input_ids": LENGTH})
        return count(packed.batch(8)) * 8

    def by_map() -> int:
        stream = few.to_iterable_dataset().map(grouped, batched=True, batch_size=1000)
        return count(stream.iter(8)) * 8

    print("pack to 2,048 from a mean of 600, 8 a batch (sequences)")
    rates = best(
        repeats,
        ours=lambda: count(ds.pack(LENGTH).loader(8)) * 8,
        ours_best_fit=lambda: count(ds.pack(LENGTH, strategy="best_fit").loader(8)) * 8,
        grain=by_grain,
        datasets_map=by_map,
    )
    loader = ds.pack(LENGTH, strategy="best_fit").loader(8)
    list(loader)
    whole = ds.pack(LENGTH).loader(8)
    list(whole)
    print(f"  {tokens / DOCUMENTS:.0f} tokens a document; the peers pack {fewer:.0%} of them")
    print(f"  efficiency: concat {whole.packing_efficiency:.4f}, best fit {loader.packing_efficiency:.4f}")
    return [
        Measured(
            "pack beside the faster peer",
            rates["ours"] / max(rates["grain"], rates["datasets_map"]),
            5,
            "x",
            least=True,
        )
    ]


class _Rows:
    """A random access source for Grain: rows as numpy, which are made before the clock runs."""

    def __init__(self, rows: Any) -> None:
        table = rows.with_format("arrow")[:]
        self._rows = [{"input_ids": np.asarray(value.values)} for value in table["input_ids"].combine_chunks()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self._rows[number]


BARE = """
import sys, time
import pyarrow as pa
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
rows, part, parts = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
with pa.memory_map(sys.argv[2]) as source:
    texts = pa.ipc.open_stream(source).read_all().slice(0, rows)["text"].to_pylist()[part::parts]
print("ready", flush=True)
sys.stdin.readline()
for at in range(0, len(texts), 1000):
    tokenizer.encode_batch_fast(texts[at : at + 1000])
print("done", flush=True)
"""


def bare(tokenizer: str, path: str, parts: int, parallel: str) -> int:
    """Processes that only tokenize; started before the clock runs."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": parallel}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BARE, tokenizer, path, str(TEXTS), str(part), str(parts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for part in range(parts)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    start = time.perf_counter()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
    seconds = time.perf_counter() - start
    for process in running:
        process.communicate()
    return round(TEXTS / seconds)


def tokenizing(files: data.Files, folder: Path, repeats: int) -> list[Measured]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    table = hub([files.arrow[0]], TEXTS).with_format("arrow")[:]
    path = folder / "texts.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(table["text"].to_pylist()[:2000], trainers.BpeTrainer(vocab_size=8000))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))  # one that was just trained is slower
    ds = midepoch.from_files(str(path)).select_columns("text")
    rates = {
        "bare, a process for each core": 0.0,
        "bare, one process with threads": 0.0,
        "tokenize + pack + batch": 0.0,
    }
    for _ in range(repeats):
        found = [
            bare(str(folder / "tokenizer.json"), str(path), 2, "false"),
            bare(str(folder / "tokenizer.json"), str(path), 1, "true"),
        ]
        loader = (
            ds.tokenize(tokenizer)
            .pack(LENGTH, eos=0)
            .with_format("numpy")
            .loader(8, num_workers=2, persistent_workers=True)
        )
        passing = iter(loader)
        next(passing)  # workers are there
        list(passing)
        start = time.perf_counter()
        count(loader)
        found.append(round(TEXTS / (time.perf_counter() - start)))
        loader.close()
        rates = {name: max(rate, new) for (name, rate), new in zip(rates.items(), found, strict=True)}
    print("tokenize + pack + batch, 2 workers (texts)")
    for name, rate in rates.items():
        print(f"  {name:48} {rate:14,.0f} /s")
    *limits, ours = rates.values()
    return [Measured("tokenize + pack + batch beside the bare tokenizer", ours / max(limits), 0.85, "x", least=True)]


def resuming(text: data.Files, path: str, repeats: int) -> list[Measured]:
    """The first batch of filter + pack + mix: of a fresh start, and at nine tenths."""

    def make() -> Any:
        ds = midepoch.from_files(path)
        parts = [
            ds.slice(i * DOCUMENTS // 2, (i + 1) * DOCUMENTS // 2)
            .shuffle(seed=i)
            .filter(_long, input_columns="input_ids")
            for i in range(2)
        ]
        return midepoch.mix(parts, weights=[0.6, 0.4], seed=1, stop="all").pack(LENGTH).with_format("numpy").loader(8)

    loader = make()
    total = count(loader)
    loader = make()
    for _ in islice(loader, total * 9 // 10):
        state = loader.state_dict()
    seconds = {"fresh": 9.9, "resumed": 9.9}
    for _ in range(3 * repeats):
        for name in seconds:
            loader = make()
            start = time.perf_counter()
            if name == "resumed":
                loader.load_state_dict(json.loads(json.dumps(state)))
            next(iter(loader))
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    print(f"resume at 90 % of filter + pack + mix: {seconds}; state {len(json.dumps(state))} bytes")
    return [Measured("resume at 90 % beside a fresh start", seconds["resumed"] / seconds["fresh"], 2, "x")]


def _long(tokens: Any) -> bool:
    return len(tokens) > 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="filters,mixes,packs,tokenizing,resuming")
    options = parser.parse_args()
    files, repeats = data.load(scale=options.scale), options.repeats
    print(json.dumps(machine.describe()))
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = documents(folder)
        runs = {
            "filters": lambda: filters(files.text, repeats),
            "mixes": lambda: mixes(files.tokens, repeats),
            "packs": lambda: packs(path, repeats),
            "tokenizing": lambda: tokenizing(files.text, folder, repeats),
            "resuming": lambda: resuming(files.text, path, repeats),
        }
        for one in options.only.split(","):
            found += runs[one]()
    for each in found:
        relation = ">=" if each.least else "<="
        mark = "ok  " if each.passed else "LOST"
        print(f"{mark} {each.name:52} {each.measured:8.2f} {each.unit} (bar {relation} {each.bar:g})")


if __name__ == "__main__":
    main()
