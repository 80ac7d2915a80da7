"""Tokens per second of planned batches beside plain batches and torch's DataLoader, and the share of planning.

All of them deliver [rows, longest] int32 tokens with an attention mask, except varlen. The DataLoaders get the batches
that midepoch planned, as a list, so that they do the same work and plan nothing. Their rows are slices of mapped Arrow
memory (the fastest way found) or rows of `datasets`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import midepoch
from benchmarks.planned import data
from benchmarks.planned.contenders import SEED
from benchmarks.planned.figures import Rows
from benchmarks.planned.plans import open_tokens
from midepoch.pipeline.plans import Plan, TokenPlan


class Mapped:
    """Rows of an Arrow file, as slices of mapped memory."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            blocks = list(reader)
        self._rows = blocks[0].num_rows
        self._parts = [(each.column(1).values.to_numpy(), each.column(1).offsets.to_numpy()) for each in blocks]

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        values, ends = self._parts[row // self._rows]
        place = row % self._rows
        return row, torch.from_numpy(values[ends[place] : ends[place + 1]])


def collate(rows: list[tuple[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the batch that midepoch makes."""
    lengths = torch.tensor([len(tokens) for _, tokens in rows])
    tokens = pad_sequence([tokens for _, tokens in rows], batch_first=True)
    mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).to(torch.int64)
    return {"id": torch.tensor([row for row, _ in rows]), "input_ids": tokens, "attention_mask": mask}


def collate_dicts(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the same, from rows of `datasets`."""
    return collate([(int(row["id"]), row["input_ids"].to(torch.int32)) for row in rows])


Route = Callable[[], Iterator[Any]]


def routes(path: Path, lengths: Rows, workers: int) -> dict[str, Route]:
    """Return the contenders. Each makes a new loader, whose epochs follow each other."""
    batches = [batch["id"].tolist() for batch in open_tokens(path)]
    size = max(1, len(lengths) // len(batches))
    ds = midepoch.from_files(str(path), index_dir=path.parent / "index").shuffle(seed=SEED)

    def ours(**options: Any) -> Route:
        return lambda: _repeated(ds.loader(num_workers=workers, **options))

    def theirs(rows: Any, collate_fn: Any) -> Route:
        return lambda: _repeated(
            DataLoader(
                rows, batch_sampler=batches, collate_fn=collate_fn, num_workers=workers, persistent_workers=workers > 0
            )
        )

    found = {
        "midepoch, padded": ours(max_tokens=data.BUDGET),
        "midepoch, varlen": ours(max_tokens=data.BUDGET, layout="varlen"),
        f"midepoch, {size} rows, padded": ours(batch_size=size, layout="padded"),
        "DataLoader, mapped": theirs(Mapped(path), collate),
    }
    try:
        from datasets import Dataset
    except ImportError:
        return found
    return {**found, "DataLoader, datasets": theirs(Dataset.from_file(str(path)).with_format("torch"), collate_dicts)}


def _repeated(loader: Any) -> Iterator[Any]:
    return chain.from_iterable(repeat(loader))


def rate(route: Route, lengths: Rows, seconds: float) -> tuple[float, float]:
    """Return tokens (without padding) per second, and microseconds per batch, after the first batches."""
    batches, tokens, count = route(), 0, 0
    for _ in range(8):
        next(batches)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        tokens += int(lengths[next(batches)["id"].numpy()].sum())
        count += 1
    passed = time.perf_counter() - start
    return tokens / passed, passed / count * 1e6


def measure_rates(path: Path, lengths: Rows, workers: int, rounds: int, seconds: float) -> None:
    """Print the best rate of each route, in turn, and the ratio to the first."""
    contenders = routes(path, lengths, workers)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, route in contenders.items():
            found[name].append(rate(route, lengths, seconds))
    first = max(next(iter(found.values())))[0]
    print(f"{workers} workers, {rounds} rounds of {seconds:g} s: best (worst) M tokens/s, µs per batch at best")
    for name, each in found.items():
        most, micros = max(each)
        print(f"    {name:<28} {most / 1e6:>6.1f} ({min(each)[0] / 1e6:.1f}) {micros:>7.0f} µs {most / first:>5.2f} ×")


class Cost(NamedTuple):
    """Microseconds of CPU time for each batch. ``planning``: of the calls of the plan. ``batch``: of all threads."""

    planning: float
    batch: float


def planning(make: Callable[[], midepoch.Loader], kind: type, batches: int) -> Cost:
    """Iterate a loader with a clock around each call of its plan."""
    spent, names = 0, ("has", "ask", "cursor", "first_position")
    methods = {name: getattr(kind, name) for name in names}

    def clocked(method: Any) -> Any:
        def called(*words: Any) -> Any:
            nonlocal spent
            start = time.thread_time_ns()
            result = method(*words)
            spent += time.thread_time_ns() - start
            return result

        return called

    for name, method in methods.items():
        setattr(kind, name, clocked(method))
    try:
        start, count = time.process_time(), 0
        for _ in make():
            count += 1
            if count == batches:
                break
        passed = time.process_time() - start
    finally:
        for name, method in methods.items():
            setattr(kind, name, method)
    return Cost(spent / count / 1e3, passed / count * 1e6)


def windows_alone(path: Path, **options: Any) -> float:
    """Return microseconds of CPU time for each batch of planning all windows of an epoch, and nothing else."""
    loader = open_tokens(path, **options)
    start = time.process_time()
    count = len(loader)
    return (time.process_time() - start) / count * 1e6


def measure_planning(path: Path, lengths: Rows, rounds: int) -> None:
    """Print what planning costs, beside plain batches, and its share. The least of rounds in turn."""
    settings: dict[str, dict[str, Any]] = {
        "padded": {},
        "padded, tokens": {"balance": "tokens"},
        "varlen": {"layout": "varlen"},
        "varlen, tokens": {"layout": "varlen", "balance": "tokens"},
    }
    size = max(1, int(data.BUDGET / lengths.mean()))
    plain = midepoch.from_files(str(path), index_dir=path.parent / "index").shuffle(seed=SEED)
    batches = len(lengths) // size * 9 // 10
    alone: dict[str, list[float]] = {name: [] for name in settings}
    costs: dict[str, list[Cost]] = {name: [] for name in ("plain", *settings)}
    for _ in range(rounds):
        costs["plain"].append(planning(lambda: plain.loader(size, layout="padded"), Plan, batches))
        for name, options in settings.items():
            alone[name].append(windows_alone(path, **options))
            costs[name].append(planning(partial(open_tokens, path, **options), TokenPlan, batches))
    base = min(each.planning for each in costs["plain"])
    print(f"planning, µs of CPU per batch, least of {rounds} rounds; plain batches of {size} rows: {base:.1f}")
    for name in settings:
        windows, calls = min(alone[name]), min(each.planning for each in costs[name])
        whole = min(each.batch for each in costs[name])
        print(
            f"    {name:<14} windows {windows:.1f} ({windows / whole:.1%}), calls {calls:.1f} ({calls / whole:.1%}), "
            f"beyond plain {calls - base:.1f} ({(calls - base) / whole:.1%}) of {whole:,.0f}"
        )
