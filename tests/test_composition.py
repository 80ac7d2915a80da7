"""Any two features of a loader: 105 pairs, each resumed at every step, on other worlds and with other workers.

What is delivered is compared with an uninterrupted run, the rows of all ranks with those of the epoch, and the ledger
with the log. A pair that means nothing is refused with the sentence of the table (``midepoch.loader.options``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import midepoch
from midepoch.audit import Ledger, read_run
from midepoch.integrations.micro_batches import cut
from midepoch.loader.options import FEATURES, MEANINGLESS, table

PAIRS = [pair for pair in combinations(FEATURES, 2) if frozenset(pair) not in MEANINGLESS]
ROWS = 24


def rows_from(first: int, count: int) -> midepoch.Dataset:
    numbers = range(first, first + count)
    columns = {
        "id": [[n] * 8 for n in numbers],
        "input_ids": [[n] * 8 for n in numbers],
        "length": [1 + n % 7 for n in numbers],
    }
    return midepoch.from_dict(columns).shuffle(seed=1)


def of_length(row: dict[str, Any]) -> int:
    return int(row["length"])


def keeps(row: dict[str, Any]) -> bool:
    return bool(row["id"][0] % 11 != 5)


def by_rows(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in ("id", "input_ids")}


PIPELINES: dict[str, Callable[[], midepoch.Dataset]] = {
    "rows": lambda: rows_from(0, ROWS),
    "filter": lambda: rows_from(0, ROWS).filter(keeps).with_lanes(2),
    "window": lambda: rows_from(0, ROWS).filter(keeps).shuffle(seed=3, window=5).with_lanes(1),
    "mix": lambda: midepoch.mix(
        {"a": rows_from(0, 14), "b": rows_from(100, 10)}, [1, 1], seed=2, stop="all"
    ).with_lanes(2),
}
SCHEDULE = midepoch.Schedule(
    [
        midepoch.Phase("one", {"a": 1.0}, steps=2, global_batch_size=2),
        midepoch.Phase("two", {"a": 0.5, "b": 0.5}, steps=4, global_batch_size=4),
    ]
)


@dataclass
class Case:
    """A loader with some features."""

    features: tuple[str, ...]
    pipeline: str = "rows"
    edits: list[Callable[[midepoch.Loader], Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if "set_weights" in self.features:
            self.pipeline = "mix"
            self.edits.append(lambda loader: loader.set_weights([3, 1]))
        if "exclude steps" in self.features:
            self.edits.append(lambda loader: loader.exclude(steps=[loader.steps + 2]))
        if "exclude rows" in self.features:
            several = self.pipeline == "mix" or "schedule" in self.features
            self.edits.append(lambda loader: loader.exclude(rows={"a": [3, 9], "b": [2]} if several else [3, 9, 17]))

    def dataset(self) -> midepoch.Dataset:
        if "schedule" in self.features:
            sources = {"a": rows_from(0, 14), "b": rows_from(100, 10)}
            if "tokens at run time" in self.features:
                phases = [
                    midepoch.Phase("one", {"a": 1.0}, rows=8),
                    midepoch.Phase("two", {"a": 0.5, "b": 0.5}, rows=12),
                ]
                return midepoch.mix(sources, midepoch.Schedule(phases), seed=2)
            return midepoch.mix(sources, SCHEDULE, seed=2)
        if "tokens at run time" in self.features and self.pipeline == "rows":
            return rows_from(0, ROWS).filter(keeps).with_lanes(2)
        return PIPELINES[self.pipeline]()

    def make(self, *, rank: int = 0, world: int = 1, workers: int = 0, audit: Any = None) -> midepoch.Loader:
        options: dict[str, Any] = {"rank": rank, "world_size": world, "num_workers": workers, "audit": audit}
        options["worker_type"] = "thread" if workers else "auto"
        size: Any = 2
        if "sizes by step" in self.features:
            size = {0: 1, 3: 2, 5: 3}
        if "tokens, planned" in self.features or "tokens at run time" in self.features:
            size, options["max_tokens"], options["bucket_window"] = None, 8, 10
            options["length"] = of_length if "tokens at run time" in self.features else "length"
            options["layout"] = None
        if "steps_per_epoch" in self.features:
            options["steps_per_epoch"] = 4
        if "context_parallel" in self.features:
            options["context_parallel"] = (0 if "lease" in self.features else 1, 2)
        if "provenance" in self.features:
            options["provenance"] = True
        if "collate_fn" in self.features:
            options["collate_fn"] = by_rows
        if "device" in self.features:
            options["device"] = "cpu"
        options["last_batch"] = "drop" if "last_batch" in self.features and world == 1 else "uneven"
        if "steps_per_epoch" in self.features and world > 1:
            options["last_batch"] = "drop"
        if "schedule" in self.features and "tokens at run time" not in self.features:
            return self.dataset().loader(**options)
        return self.dataset().loader(size, **options)

    def batches(self, loader: midepoch.Loader, most: int) -> Iterator[list[int]]:
        """Yield the rows of the next batches, over the ends of passes, up to the end of the first epoch."""
        count = 0
        if "lease" in self.features:
            while count < most:
                with loader.lease() as items:
                    for lease in items:
                        lease.ack()
                        yield self.rows(lease.batch)
                        count += 1
                        if count == most:
                            return
                if "steps_per_epoch" not in self.features:
                    return
        passes = 2 if "steps_per_epoch" in self.features else 1
        for _ in range(passes):
            for batch in loader:
                yield self.rows(batch)
                count += 1
                if count == most:
                    return

    def rows(self, batch: Any) -> list[int]:
        if "micro-batches" in self.features and len(batch["id"]) % 2 == 0:
            batch = {name: torch.cat([part[name] for part in cut(batch, 2)]) for name in batch}
        found = batch["id"]
        if isinstance(found, list):
            found = torch.tensor([each.tolist() if hasattr(each, "tolist") else each for each in found])
        if "provenance" in self.features and "collate_fn" not in self.features:
            expected = [100 * int(s) + int(r) for s, r in zip(batch["source"], batch["row"], strict=True)]
            assert expected == found.reshape(len(expected), -1)[:, 0].tolist()
        return [int(row[0]) for row in found.reshape(len(found), -1)]


def cases() -> Iterator[Any]:
    for pair in PAIRS:
        fixed = {"set_weights", "schedule", "tokens, planned"} & set(pair)
        for name in ("rows",) if fixed else ("rows", "filter", "window", "mix"):
            if "tokens at run time" in pair and name == "rows":
                continue
            # The default suite has each pair over one class of pipelines that changes rows, and over positions.
            number = PAIRS.index(pair) % 3
            chosen = fixed or name == "rows" or name == ("filter", "window", "mix")[number]
            marks = [] if chosen else [pytest.mark.slow]
            yield pytest.param(pair, name, marks=marks, id=f"{pair[0]} × {pair[1]} over {name}")


@pytest.mark.parametrize(("pair", "pipeline"), list(cases()))
def test_two_features(pair: tuple[str, str], pipeline: str, tmp_path: Path) -> None:
    case = Case(pair, pipeline)
    ledger = Ledger(tmp_path / "whole", attempt="1")
    loader = case.make(audit=ledger)
    log, states = [], [loader.state_dict()]
    first = 1 if case.edits else 0
    for batch in case.batches(loader, first) if first else ():
        log.append(batch)
    for edit in case.edits:
        edit(loader)
    edited = loader.state_dict()
    states = [edited]
    for batch in case.batches(loader, 8):
        log.append(batch)
        states.append(loader.state_dict())
    steps = len(log)
    assert loader.steps == steps and steps > first + 1

    # Resumed at every step, with other workers.
    for number, state in enumerate(states[:-1]):
        resumed = case.make(workers=number % 3)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.steps == first + number
        assert list(case.batches(resumed, steps - first - number)) == log[first + number :], f"after step {number}"
        resumed.close()

    # The ledger says what was delivered.
    run = read_run(tmp_path / "whole")
    assert run.exact, (run.problems, run.epochs)
    assert run.steps == steps
    if not run.every[0].in_lanes:
        for number, rows in enumerate(log, 1):
            assert sorted(one.row for one in run.rows_of_step(number)) == sorted(rows)

    # On other worlds: every row of the epoch once, over the union of all ranks.
    if "schedule" in pair or ("steps_per_epoch" in pair and "lease" in pair):
        return
    whole = Counter(row for batch in _to_the_end(case, [edited], 1) for row in batch)
    middle = states[len(states) // 2]
    for world in (2, 3):
        seen = Counter(row for batch in log[first : first + len(states) // 2] for row in batch)
        seen += Counter(row for batch in _to_the_end(case, [middle], world) for row in batch)
        if "last_batch" not in pair and "steps_per_epoch" not in pair and "set_weights" not in pair:
            assert seen == whole, world


def _to_the_end(case: Case, states: list[Any], world: int) -> list[list[int]]:
    """Return the rest of the epoch of the data, of all ranks."""
    plain = Case(tuple(name for name in case.features if name not in ("lease", "steps_per_epoch")), case.pipeline)
    found = []
    for rank in range(world):
        loader = plain.make(rank=rank, world=world)
        loader.load_state_dict(json.loads(json.dumps(states)))
        found += [plain.rows(batch) for batch in loader]
    return found


@pytest.mark.parametrize("pair", [tuple(sorted(pair)) for pair in MEANINGLESS], ids=" × ".join)
def test_what_means_nothing_is_said(pair: tuple[str, str]) -> None:
    tokens = {"tokens, planned", "tokens at run time"} & set(pair)
    reason = MEANINGLESS[frozenset(pair)]
    if "sizes by step" in pair and tokens:
        with pytest.raises(ValueError, match="max_tokens gives the size of a batch") as refused:
            rows_from(0, 8).loader({0: 2, 3: 4}, max_tokens=8, length="length")
        assert reason in str(refused.value)
    elif "micro-batches" in pair:
        from midepoch.integrations.micro_batches import MicroBatches

        with pytest.raises(ValueError, match="each is a micro-batch already"):
            MicroBatches(rows_from(0, 8).loader(max_tokens=8, length="length"), 2)
    elif "sizes by step" in pair:
        with pytest.raises(ValueError, match="Omit batch_size"):
            midepoch.mix({"a": rows_from(0, 14), "b": rows_from(100, 10)}, SCHEDULE, seed=2).loader({0: 2, 3: 4})
    else:  # a mix has no positions: its batches by tokens are formed at run time
        mix = midepoch.mix({"a": rows_from(0, 14), "b": rows_from(100, 10)}, [1, 1], seed=2)
        assert mix.loader(max_tokens=40, length="length").options.planning is None


def test_the_page_shows_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "combining.md").read_text()
    assert table() in page
