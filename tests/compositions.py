"""Loaders with any features of the composition table: one generator for the tests of pairs and for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

import midepoch
from midepoch.integrations.micro_batches import cut

ROWS = 24
Output = Any
"""Identity of an output of a pipeline: the number of its row, or its tokens."""


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
    names = [name for name in ("id", "input_ids", "is_padding") if name in rows[0]]
    return {name: torch.tensor(np.array([row[name] for row in rows])) for name in names}


SOURCES = {"a": (0, 14), "b": (100, 10)}


def mixed(*names: str) -> midepoch.Dataset:
    """Return a mix of sources in some order."""
    parts = {name: rows_from(*SOURCES[name]) for name in names}
    return midepoch.mix(parts, [1, 1], seed=2, stop="all").with_lanes(2)


PIPELINES: dict[str, Callable[[], midepoch.Dataset]] = {
    "rows": lambda: rows_from(0, ROWS),
    "filter": lambda: rows_from(0, ROWS).filter(keeps).with_lanes(2),
    "window": lambda: rows_from(0, ROWS).filter(keeps).shuffle(seed=3, window=5).with_lanes(1),
    "mix": lambda: mixed("a", "b"),
    "pack": lambda: rows_from(0, ROWS).pack(12, column="input_ids", pad=-1).with_lanes(2),
}
REORDERED = "mix in another order"
"""A pipeline of the simulator, too: the mix with its sources in another order, with which a run may continue."""
DRAWN = {
    "drawn": lambda: rows_from(0, ROWS).weighted([1 + n % 5 for n in range(ROWS)], replacement=False, seed=4),
    "fixed": lambda: midepoch.from_dict(
        {name: np.repeat(np.arange(ROWS)[:, None], 8, axis=1) for name in ("id", "input_ids")}
    ).shuffle(seed=1),
}
"""Pipelines of the simulator alone: rows in the order of a draw by weight, another in every epoch; and rows of numbers,
which are copied without Arrow.
"""


def in_phases() -> midepoch.Dataset:
    """Return packed sequences of a schedule by tokens. A small source is used up, in the second phase for good."""
    phases = [
        midepoch.Phase("one", {"a": 0.6, "b": 0.4}, tokens=96, sequence_length=12),
        midepoch.Phase("two", {"a": 0.3, "b": 0.7}, tokens=96),
    ]
    schedule = midepoch.Schedule(phases, max_passes={"b": 3})
    return midepoch.mix({"a": rows_from(0, 14), "b": rows_from(100, 3)}, schedule, seed=2).pack(
        column="input_ids", pad=-1
    )


SCHEDULE = midepoch.Schedule(
    [
        midepoch.Phase("one", {"a": 1.0}, steps=2, global_batch_size=2),
        midepoch.Phase("two", {"a": 0.7, "b": 0.3}, steps=4, global_batch_size=4),
    ]
)


@cache
def formatted(kind: str, pipeline: str, mixed_by: str, filtered: bool) -> midepoch.Dataset:
    """Return a dataset with a format, made once."""
    return dataset_of(pipeline, mixed_by, filtered).with_format(kind)


@cache
def dataset_of(pipeline: str, mixed_by: str, filtered: bool) -> midepoch.Dataset:
    """Return a dataset, made once. ``mixed_by``: a schedule by "steps" or "rows", or nothing."""
    if mixed_by and pipeline == "window":
        return dataset_of("mix", mixed_by, filtered=False).shuffle(seed=3, window=5)
    if mixed_by:
        sources = {name: rows_from(*rows) for name, rows in SOURCES.items()}
        phases = [midepoch.Phase("one", {"a": 1.0}, rows=8), midepoch.Phase("two", {"a": 0.5, "b": 0.5}, rows=12)]
        return midepoch.mix(sources, midepoch.Schedule(phases) if mixed_by == "rows" else SCHEDULE, seed=2)
    if filtered:
        return rows_from(0, ROWS).filter(keeps).with_lanes(2)
    made = {**PIPELINES, **DRAWN, "phases": in_phases, REORDERED: lambda: mixed("b", "a")}
    return made[pipeline]()


@dataclass
class Case:
    """A loader with some features. ``format``: of its batches, as of ``Dataset.with_format``."""

    features: tuple[str, ...]
    pipeline: str = "rows"
    format: str | None = None
    edits: list[Callable[[midepoch.Loader], Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if "set_weights" in self.features:
            self.pipeline = "window" if "schedule" in self.features and self.pipeline == "window" else "mix"
            self.edits.append(lambda loader: loader.set_weights([3, 1]))
        if "exclude steps" in self.features:
            self.edits.append(lambda loader: loader.exclude(steps=[loader.steps + 2]))
        if "exclude rows" in self.features:
            several = self.pipeline == "mix" or "schedule" in self.features
            self.edits.append(lambda loader: loader.exclude(rows={"a": [3, 9], "b": [2]} if several else [3, 9, 17]))

    def dataset(self, pipeline: str = "") -> midepoch.Dataset:
        """Return the dataset. ``pipeline``: another than that of the case."""
        at_run_time = "tokens at run time" in self.features
        mixed_by = ("rows" if at_run_time else "steps") if "schedule" in self.features else ""
        named = (pipeline or self.pipeline, mixed_by, at_run_time and self.pipeline == "rows")
        return dataset_of(*named) if self.format is None else formatted(self.format, *named)

    def make(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        audit: Any = None,
        size: Any = 2,
        last: str = "",
        window: int = 10,
        pipeline: str = "",
    ) -> midepoch.Loader:
        """Return the loader of a rank.

        ``last``: the treatment of the last batch, if not that of the features. ``window``: of batches by tokens.
        ``pipeline``: another than that of the case.
        """
        options: dict[str, Any] = {"rank": rank, "world_size": world, "num_workers": workers, "audit": audit}
        options |= {"worker_type": "thread", "timeout": 20} if workers else {}
        if "sizes by step" in self.features:
            size = {0: 1, 3: 2, 5: 3}
        if "tokens, planned" in self.features or "tokens at run time" in self.features:
            size, options["max_tokens"], options["bucket_window"] = None, 8, window
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
        if last:
            options["last_batch"] = last
        if "schedule" in self.features and "tokens at run time" not in self.features:
            return self.dataset(pipeline).loader(**options)
        return self.dataset(pipeline).loader(size, **options)

    def batches(self, loader: midepoch.Loader, most: int) -> Iterator[list[Output]]:
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

    def rows(self, batch: Any) -> list[Output]:
        """Return the outputs of a batch, without padding."""
        if "micro-batches" in self.features and len(batch["id"]) % 2 == 0:
            parts = cut(batch, 2)
            names = [part.pop("doc_ids", {}) for part in parts]
            batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            batch["doc_ids"] = {name: torch.cat([part[name] for part in names]) for name in names[0]}
        packed = self.pipeline in ("pack", "phases")
        column = "input_ids" if packed else "id"
        found = [np.asarray(each).reshape(-1).tolist() for each in batch[column]]
        real = _real(batch, len(found))
        if packed:
            return [
                tuple(token for token in tokens if token >= 0) for tokens, keep in zip(found, real, strict=True) if keep
            ]
        if "provenance" in self.features and "collate_fn" not in self.features:
            names = batch["doc_ids"]
            expected = [100 * int(s) + int(r) for s, r in zip(names["source"], names["row"], strict=True)]
            assert expected == [tokens[0] for tokens in found]
        return [int(tokens[0]) for tokens, keep in zip(found, real, strict=True) if keep]


def _real(batch: Mapping[str, Any], count: int) -> list[bool]:
    """Return which rows of a batch are no padding."""
    if "is_padding" not in batch:
        return [True] * count
    return [not padding for padding in np.asarray(batch["is_padding"]).tolist()]
