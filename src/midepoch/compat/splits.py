"""Splits of a ``StructuredDataset``: the shards that its state reports, and their comparison with a state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.pipeline.leaf import Leaf

_LISTED_FILES = 64

Shard = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Splits:
    """Shards that the state reports: runs of blocks of one file, of at least ``target_bytes`` or ``target_rows``."""

    leaf: Leaf
    target_bytes: int
    target_rows: int | None
    seed: int
    partitioning: str | None = None
    _known: dict[tuple[int, int], np.ndarray[Any, np.dtype[np.int64]]] = field(default_factory=dict, repr=False)

    @property
    def sizes(self) -> list[int | None]:
        return [self.target_bytes, self.target_rows]

    @property
    def filter(self) -> str | None:
        access = self.leaf.source.access
        return access.filter.text if access is not None and access.filter is not None else None

    @cached_property
    def _bounds(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """First block of each shard, and the number of blocks."""
        source, found = self.leaf.source, [0]
        starts, row_bytes = source.layout.block_starts, source.bytes_per_row
        for first, stop in zip(source.file_blocks[:-1].tolist(), source.file_blocks[1:].tolist(), strict=True):
            for block in range(first + 1, stop + 1):
                rows = int(starts[block] - starts[found[-1]])
                large = rows >= self.target_rows if self.target_rows else rows * row_bytes >= self.target_bytes
                if block == stop or large:
                    found.append(block)
        return np.array(found)

    def shard(self, number: int) -> Shard:
        """Return a shard in the documented form."""
        source = self.leaf.source
        first, stop = self._bounds[number : number + 2].tolist()
        file = int(source.file_blocks.searchsorted(first, side="right")) - 1
        start, end = source.layout.block_starts[[first, stop]].tolist()
        begin = int(source.layout.file_starts[file])
        part = (start, end) != tuple(source.layout.file_starts[file : file + 2].tolist())
        split = {
            "path": source.name(source.files[file]),
            "row_offset": start - begin if part else None,
            "row_length": end - start if part else None,
        }
        if self.filter is not None and part:
            split["filtered"] = True  # only rows that pass are counted
        return {"splits": [split]}

    def completed(self, epoch: int, position: int, lanes: int) -> list[int]:
        """Return the shards of which every row has been delivered, in the order of completion."""
        ends = self._ends(epoch, lanes)
        order = np.argsort(ends, kind="stable")
        found: list[int] = order[: int(np.searchsorted(ends[order], position))].tolist()
        return found

    def _ends(self, epoch: int, lanes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the last position of any row of each shard."""
        if (epoch, lanes) not in self._known:
            order = replace(self.leaf.order, lanes=lanes)
            uses = order.at(epoch, self.leaf.source.layout).uses()
            last = np.zeros(int(self._bounds[-1]), dtype=np.int64)
            np.maximum.at(last, uses.blocks, uses.last)
            self._known.clear()  # one epoch at a time
            self._known[epoch, lanes] = np.maximum.reduceat(last, self._bounds[:-1])
        return self._known[epoch, lanes]

    @cached_property
    def files(self) -> list[str] | str:
        """Names and fingerprints of the files, to report later which have changed. A digest for very many files."""
        files = self.leaf.source.files
        if len(files) > _LISTED_FILES:
            text = "\n".join(f"{file.fingerprint}" for file in files)
            return f"{len(files)} files {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
        root = os.path.commonpath([os.path.dirname(file.path) for file in files])
        return [f"{os.path.relpath(file.path, root or '.')}:{file.fingerprint[:8]}" for file in files]

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless files, filters, seed and sizes of shards match the state."""
        shards = state.get("completed_shards", [])
        if not isinstance(shards, list) or not all(_is_shard(shard) for shard in shards):
            raise StateError("the state is damaged: 'completed_shards' is not a list of shards.")
        data = self.leaf.source.fingerprint
        for name, key, now in (
            ("filters", "_filters", self.filter),
            ("partitioning", "_partitioning", self.partitioning),
        ):
            if state.get("data") != data and key in state and state[key] != now:
                raise self.mismatch(state, name, state[key], now)
        if state.get("data") != data:
            raise self.mismatch(state, "files", None, None, "the files differ" + self._changed(state.get("_files")))
        if self.leaf.order.shuffle is not None and state.get("_shuffle_seed", self.seed) != self.seed:
            raise self.mismatch(state, "shuffle_seed", state["_shuffle_seed"], self.seed)
        if shards and state.get("_split", self.sizes) != self.sizes:
            raise self.mismatch(state, "split_bytes, split_rows", state["_split"], self.sizes)

    def _changed(self, saved: Any) -> str:
        listed = isinstance(saved, list) and all(isinstance(name, str) and ":" in name for name in saved)
        if not listed or not isinstance(self.files, list):
            return f": checkpoint={saved if isinstance(saved, str) else '?'}, current={self.files}"[:300]
        before, now = (dict(name.rsplit(":", 1) for name in names) for names in (saved, self.files))
        parts = {
            "added": sorted(now.keys() - before.keys()),
            "removed": sorted(before.keys() - now.keys()),
            "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        }
        texts = [f"{what}: {', '.join(names[:8])}" for what, names in parts.items() if names]
        return f" ({'; '.join(texts) or 'in another order'})"

    def mismatch(
        self, state: Mapping[str, Any], name: str, saved: Any, current: Any, cause: str | None = None
    ) -> CheckpointMismatchError:
        """Return the error with the documented message."""
        listed = state.get("completed_shards") or ()
        head = "Checkpoint shard does not match any current split.\n\n  Checkpoint shard:\n"
        if listed and _is_shard(listed[-1]):
            head += "\n".join(f"    {_described(split)}" for split in listed[-1]["splits"])
        else:
            head += "    (none was completed yet)"
        cause = cause or f"{name} changed: checkpoint={saved}, current={current}"
        problem = CheckpointMismatchError(
            f"{head}\n\n  Likely cause: {cause}\n\n"
            "  Reconstruct the dataset with matching parameters or discard this checkpoint. Nothing was changed."
        )
        problem.field, problem.saved, problem.current, problem.cause = name, saved, current, cause
        return problem


def _is_shard(shard: Any) -> bool:
    splits = shard.get("splits") if isinstance(shard, Mapping) else None
    return isinstance(splits, list) and all(
        isinstance(split, Mapping) and {"path", "row_offset", "row_length"} <= split.keys() for split in splits
    )


def _described(split: Mapping[str, Any]) -> str:
    name = os.path.basename(str(split["path"]))
    if split["row_offset"] is None:
        return f"{name}  full file"
    return f"{name}  rows [{split['row_offset']:,}, {split['row_offset'] + split['row_length']:,})"
