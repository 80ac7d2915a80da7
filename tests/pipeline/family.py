"""Random pipelines that change the number of rows, over random data, and everything that must hold for each of them.

python -m pytest tests/pipeline/test_family.py            a bounded number of them
PIPELINES=2000 python -m pytest -m slow tests/pipeline/test_family.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import midepoch
from data import write_arrow
from midepoch.testing import same

Make = Callable[[], Any]


# Functions of rows. All leave a column "id" (a number or a list of them) and "tokens", or say that they do not.


def keep_third(row: dict[str, Any]) -> bool:
    return hash_of(row) % 3 == 0


def keep_most(row: dict[str, Any]) -> bool:
    return hash_of(row) % 8 != 0


def keep_runs(row: dict[str, Any]) -> bool:
    """Whole stretches of nothing."""
    return (row["n"] // 9) % 3 != 1


def keep_batch(batch: dict[str, Any]) -> list[bool]:
    return [n % 2 == 0 for n in batch["n"]]


def keep_at_random(row: dict[str, Any], generator: np.random.Generator) -> bool:
    return bool(generator.random() < 0.6)


def add(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": row["n"] + 1}


def noise(row: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    return {"noise": float(generator.random())}


def group_sum(batch: dict[str, Any]) -> dict[str, Any]:
    return {"sum": [sum(batch["n"])] * len(batch["n"])}


def several(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**row, "n": row["n"] * 10 + i} for i in range(hash_of(row) % 4)]


def any_number(batch: dict[str, Any]) -> dict[str, Any]:
    """More, fewer or none: every second one twice, the first one not at all."""
    chosen = [i for i in range(1, len(batch["n"])) for _ in range(1 + i % 2)]
    return {name: [column[i] for i in chosen] for name, column in batch.items()}


def hash_of(row: dict[str, Any]) -> int:
    return int(row["n"]) * 2654435761 % 1000003


FUNCTIONS = ("keep_third", "keep_most", "keep_runs")


@dataclass(frozen=True)
class Case:
    """A generated pipeline: how to make it, and what is known about it."""

    text: str
    make: Make
    files: tuple[str, ...]


def write(folder: Path, rng: np.random.Generator, rows: int, nulls: bool, *, any_type: bool = False) -> str:
    """A folder with a few files: ids, and tokens that are empty, short, long or null. ``any_type``: and of any types."""
    lengths = np.where(rng.random(rows) < 0.1, rng.integers(30, 60, rows), rng.integers(0, 9, rows))
    first = int(rng.integers(0, 100_000))
    tokens = [
        None if nulls and rng.random() < 0.1 else rng.integers(1, 1000, int(length)).tolist() for length in lengths
    ]
    wide = rng.random(4) < (0.3 if any_type else 0.0)
    lists, items = (pa.list_, pa.large_list)[int(wide[0])], (pa.int32(), pa.int64())[int(wide[1])]
    numbers, parquet = (pa.int64(), pa.int32())[int(wide[2])], bool(wide[3])
    table = pa.table({"n": pa.array(np.arange(first, first + rows), numbers), "tokens": pa.array(tokens, lists(items))})
    folder.mkdir(parents=True)
    cuts = sorted({0, rows, *rng.integers(0, rows + 1, int(rng.integers(0, 3))).tolist()})
    for number, (start, stop) in enumerate(pairwise(cuts)):
        part = table.slice(start, stop - start)
        if parquet:
            pq.write_table(part, folder / f"{number}.parquet", row_group_size=int(rng.integers(3, 20)))
            continue
        write_arrow(folder / f"{number}.arrow", part, int(rng.integers(3, 20)), file_format=True)
    return str(folder)


def generated(seed: int, folder: Path) -> Case:
    """The pipeline of a seed."""
    rng = np.random.default_rng(seed)
    paths: list[str] = []

    def source(depth: int) -> tuple[str, Callable[[], Any], bool]:
        """(text, maker, whether rows still have the column tokens) of a dataset or, further in, of several."""
        kind = rng.choice(["one", "one", "mix", "concat", "zip"]) if depth < 2 else "one"
        if kind != "one":
            parts = [chain(depth + 1, int(rng.integers(0, 3)), plain=True) for _ in range(int(rng.integers(2, 4)))]
            texts = ", ".join(text for text, _, _ in parts)
            if kind == "mix":
                weights = rng.choice([1, 2, 3, 0.5], len(parts)).tolist()
                stop, own = str(rng.choice(["first", "all"])), int(rng.integers(0, 9))
                return (
                    f"mix([{texts}], {weights}, seed={own}, stop={stop!r})",
                    lambda: midepoch.mix([make() for _, make, _ in parts], weights=weights, seed=own, stop=stop),
                    True,
                )
            if kind == "concat":
                return f"concat([{texts}])", lambda: midepoch.concat([make() for _, make, _ in parts]), True
            numbered = list(enumerate(parts))
            return (
                f"zip([{texts}])",
                lambda: midepoch.zip(
                    [
                        make() if i == 0 else make().rename_columns({"n": f"n{i}", "tokens": f"tokens{i}"})
                        for i, (_, make, _) in numbered
                    ]
                ).select_columns(["n", "tokens"]),
                True,
            )
        rows = int(rng.integers(1, 70))
        path = write(folder / str(len(paths)), rng, rows, bool(rng.random() < 0.3), any_type=True)
        paths.append(path)
        how = str(rng.choice(["", "rows", "window", "files", "slice"]))
        own = int(rng.integers(0, 9))
        if how == "slice" and rows > 3:
            return f"data[3:].shuffle({own})", lambda: midepoch.from_files(path).slice(3).shuffle(seed=own), True
        if how and how != "slice":
            return (
                f"data.shuffle({own}, {how})",
                lambda: midepoch.from_files(path).shuffle(seed=own, scope=how, window=2),
                True,
            )
        return "data", lambda: midepoch.from_files(path), True

    def chain(depth: int, length: int, plain: bool = False) -> tuple[str, Callable[[], Any], bool]:
        text, make, tokens = source(depth)
        extra = False  # noise or sum columns: parts of a mix must have the same columns
        for _ in range(length):
            text, make, tokens, extra = step(text, make, tokens, extra, plain)
        return text, make, tokens

    def step(text: str, make: Callable[[], Any], tokens: bool, extra: bool, plain: bool) -> Any:
        kinds = ["third", "most", "runs", "expression", "batched filter", "random filter", "add", "several", "any"]
        kinds += [] if plain else ["noise", "sum", "shuffle", "shuffle", "batch", "unbatch", "pack", "best fit"]
        kind = str(rng.choice(kinds))
        size, own = int(rng.integers(1, 12)), int(rng.integers(0, 9))
        if kind in ("third", "most", "runs"):
            keep = {"third": keep_third, "most": keep_most, "runs": keep_runs}[kind]
            return f"{text}.filter({kind})", lambda: make().filter(keep), tokens, extra
        if kind == "expression":
            return f"{text}.filter(n > …)", lambda: make().filter(pc.bit_wise_and(pc.field("n"), 4) == 0), tokens, extra
        if kind == "batched filter":
            return f"{text}.filter(batched {size})", lambda: make().filter(keep_batch, True, size), tokens, extra
        if kind == "random filter":
            return (
                f"{text}.filter(random)",
                lambda: make().filter(keep_at_random, with_generator=True),
                tokens,
                extra,
            )
        if kind == "add":
            return f"{text}.map(add)", lambda: make().map(add), tokens, extra
        if kind == "noise":
            return f"{text}.map(noise)", lambda: make().map(noise, with_generator=True), tokens, True
        if kind == "sum":
            return f"{text}.map(sum {size})", lambda: make().map(group_sum, True, size), tokens, True
        if kind == "several":
            return f"{text}.flat_map(several)", lambda: make().flat_map(several), tokens, extra
        if kind == "any":
            return (
                f"{text}.map(any {size})",
                lambda: make().map(any_number, True, size, one_to_one=False),
                tokens,
                extra,
            )
        if kind == "shuffle":
            if make().pipeline.numbered is not None:
                return f"{text}.shuffle({own})", lambda: make().shuffle(seed=own), tokens, extra
            return f"{text}.shuffle({own}, {size})", lambda: make().shuffle(seed=own, window=size), tokens, extra
        if kind in ("batch", "unbatch"):
            drop = bool(rng.random() < 0.3)
            return (
                f"{text}.batch({size}, {drop}).unbatch(n)",
                lambda: make().batch(size, drop).unbatch("n").remove_columns("tokens").map(with_tokens),
                tokens,
                extra,
            )
        length, eos = int(rng.integers(2, 30)), int(rng.choice([0, 7777]))
        strategy = "concat" if kind == "pack" else "best_fit"
        drop = bool(rng.random() < 0.2)
        return (
            f"{text}.pack({length}, {strategy}, eos={eos or None}, drop={drop})",
            lambda: (
                make()
                .pack(length, "tokens", strategy, eos or None, window=size, drop_remainder=drop, dtype="int64")
                .map(numbered_pack)
            ),
            tokens,
            extra,
        )

    text, make, _ = chain(0, int(rng.integers(1, 6)))
    lanes = int(rng.choice([1, 1, 2, 3, 4, 6]))
    if not as_stream(make()).pipeline.node.cuts_alike:
        lanes = 1
    return Case(f"{text}.with_lanes({lanes})", lambda: as_stream(make()).with_lanes(lanes), tuple(paths))


def with_tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [int(row["n"]) % 1000] * (int(row["n"]) % 5)}


def numbered_pack(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(np.asarray(row["tokens"]).sum())}


def as_stream(made: Any) -> Any:
    return made if made.pipeline.numbered is None else made.filter(always)


def always(row: dict[str, Any]) -> bool:
    return True


# What must hold


def check(case: Case, seed: int, workers: bool, tail: int | None = None) -> int:
    """Every claim about one pipeline; how many resumes were made. Raises AssertionError.

    ``tail``: batches that are compared after each resume, all of two epochs if it is None.
    """
    rng = np.random.default_rng([seed, 1])
    size = int(rng.integers(1, 9))
    drop = bool(rng.random() < 0.3)
    rows = list(case.make())
    expected, states = uninterrupted(lambda: case.make().loader(size, collate_fn=list, drop_last=drop), 2)
    flat = [row for batch in expected[0] for row in batch]
    cut = len(rows) // size * size if drop else len(rows)
    assert same(flat, rows[:cut]), "the loader hands out other rows than iteration does"
    found = 0
    chosen = range(len(states)) if len(states) <= 16 else sorted(rng.choice(len(states), 16, replace=False).tolist())
    everything = [batch for epoch in expected for batch in epoch]
    for number in chosen:
        done, state = states[number]
        other = int(rng.choice([0, 0, 0, 2])) if workers else 0
        again = resumed(case, size, drop, state, other, everything[done:][:tail])
        found += 1
        if again is not None:  # twice in a row: the state behind the first batch after the resume
            resumed(case, size, drop, again, 0, everything[done + 1 :][:tail])
            found += 1
    if rows:
        found += elastic(case, rng, rows)
        found += rows_resume(case, rng, rows)
    return found


def uninterrupted(make: Make, epochs: int) -> tuple[list[list[Any]], list[tuple[int, Any]]]:
    """Batches of each epoch; and (batches before it, state) of every moment."""
    loader = make()
    states = [(0, through_json(loader.state_dict()))]
    found: list[list[Any]] = []
    done = 0
    for _ in range(epochs):
        found.append([])
        for batch in loader:
            found[-1].append(batch)
            done += 1
            states.append((done, through_json(loader.state_dict())))
        states.append((done, through_json(loader.state_dict())))
    loader.close()
    return found, states


def resumed(case: Case, size: int, drop: bool, state: Any, workers: int, expected: list[Any]) -> Any:
    """Go on from a state and compare; the state behind the first batch."""
    loader = case.make().loader(size, workers, collate_fn=list, drop_last=drop)
    loader.load_state_dict(state)
    assert through_json(loader.state_dict()) == state, "a state that was loaded is not what is saved"
    at, behind, empty = 0, None, 0
    while at < len(expected):
        before = at
        for batch in loader:
            if at >= len(expected):
                break
            assert same(batch, expected[at]), (
                f"batch {at} after the resume differs: {batch!r:.150} and {expected[at]!r:.150}"
            )
            at += 1
            behind = behind or through_json(loader.state_dict())
        empty += at == before  # a random filter may leave nothing of an epoch
        assert empty < 3, f"{len(expected) - at} batches are missing"
    loader.close()
    return behind


def elastic(case: Case, rng: np.random.Generator, rows: list[Any]) -> int:
    """Over changing worlds and batch sizes every output comes once."""
    state: Any = None
    seen: list[Any] = []
    turns = int(rng.integers(1, 4))
    for turn in range(turns + 1):
        world, size = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        steps = None if turn == turns else int(rng.integers(0, 4))
        loaders = [case.make().loader(size, collate_fn=list, rank=rank, world_size=world) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        passes = [iter(loader) for loader in loaders]
        taken, live = 0, list(passes)
        while live and (steps is None or taken < steps):
            for one in list(live):
                batch = next(one, None)
                if (
                    batch is None or loaders[passes.index(one)].state_dict()["epoch"]
                ):  # nothing was left: this is the next epoch
                    live.remove(one)
                else:
                    seen += batch
            taken += 1
        state = through_json([loader.state_dict() for loader in loaders])
        if not live:
            break  # over before its time
    assert sorted(map(text_of, seen)) == sorted(map(text_of, rows)), "outputs were lost or repeated by changing worlds"
    return turns


def rows_resume(case: Case, rng: np.random.Generator, rows: list[Any]) -> int:
    """Plain iteration goes on in the middle, too."""
    cuts = sorted({0, len(rows), *rng.integers(0, len(rows) + 1, 4).tolist()})
    for cut in cuts:
        stream = case.make()
        iterator = iter(stream)
        for _ in range(cut):
            next(iterator)
        other = case.make()
        other.load_state_dict(through_json(stream.state_dict()))
        found = list(other)
        # Behind the last row of an epoch that nobody named, iteration begins again, or finds the end.
        assert same(found, rows[cut:]) or (cut == len(rows) and same(found, rows)), f"resumed at row {cut}: differs"
    return len(cuts)


def text_of(row: Any) -> str:
    return json.dumps(row, sort_keys=True, default=lambda value: np.asarray(value).tolist())


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))
