"""``StructuredDataset``: batches from structured files, with the documented interface and state, resumed exactly.

The state also reports the shards that are complete, in the documented form. A resume only compares them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import length_hint
from typing import Any

import numpy as np

from midepoch._internal.hints import hinted_methods
from midepoch._internal.progress import shown
from midepoch._internal.resumable import Resumable
from midepoch._internal.values import integer
from midepoch.dataset import Dataset
from midepoch.distributed.world import find_world
from midepoch.errors import CheckpointMismatchError, StateError
from midepoch.loader import Loader
from midepoch.open import DEFAULT_CACHE_BYTES, from_files
from midepoch.order.bijection import check_seed
from midepoch.pipeline.leaf import Leaf
from midepoch.sources.files import PathLike
from midepoch.state.format import KEY, check
from midepoch.state.saved import one_of

_log = logging.getLogger("midepoch")
OUTPUTS = {"torch": "torch", "numpy": "numpy", "arrow": "arrow", "dict": "python"}
_SPLIT_BYTES = 128 << 20
_LISTED_SHARDS, _LISTED_FILES = 256, 64
_ARGUMENTS = {"window": "shuffle_buffer_size (in row groups)", "scope": "shuffle", "aligned": "shuffle"}


@hinted_methods({})
class StructuredDataset(Resumable):
    """The loader and the dataset that ``create_dataloader`` returns, which are one object.

    Each ``iter()`` has the batches of one epoch, and a ``break`` loses nothing. ``state_dict()`` describes the batches
    that the training loop has received, wherever it is called. Its documented keys are for people. A resume uses the
    exact position, so that nothing is read or delivered twice, with any number of workers and ranks, from the state of
    any one rank.
    """

    def __init__(self, dataset: Dataset, loader: Loader, splits: Splits, num_workers: int, progress: bool) -> None:
        self._dataset, self._loader, self._splits = dataset, loader, splits
        self._num_workers, self._progress = num_workers, progress

    @classmethod
    def create_dataloader(
        cls,
        path: PathLike | Sequence[PathLike],
        format: str | None = None,
        batch_size: int = 1024,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        shuffle: bool = False,
        shuffle_seed: int = 42,
        split_bytes: int | str | None = None,
        split_rows: int | None = None,
        num_workers: int | None = None,
        output_format: str = "torch",
        storage_options: Mapping[str, Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        partitioning: str | None = None,
        num_ranks: int | None = None,
        rank: int | None = None,
        show_progress: bool = False,
        shuffle_buffer_size: int | None = None,
        *,
        drop_last: bool = False,
        last_batch: str | None = None,
        audit: Any = None,
        filesystem: Any = None,
        cache_dir: PathLike | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        index_dir: PathLike | None = None,
    ) -> tuple[StructuredDataset, StructuredDataset]:
        """Return a loader of batches and its dataset, which has the state and ``set_epoch``.

        - ``collate_fn`` gets a complete batch in the output format, in the worker.
        - ``shuffle`` shuffles row groups, then rows in windows of row groups. ``shuffle_buffer_size`` is the number of
          rows of a window.
        - ``split_bytes`` and ``split_rows`` are the sizes of the shards in which the state reports progress. The unit
          of reading is a row group in any case.
        - Without ``num_ranks`` and ``rank``, those of an initialised ``torch.distributed`` are used.
        - ``last_batch`` and ``audit`` are those of ``Dataset.loader``.
        """
        if output_format not in OUTPUTS:
            raise ValueError(f"output_format must be one of {', '.join(map(repr, OUTPUTS))}, got {output_format!r}")
        if isinstance(columns, str) or (columns is not None and not columns):
            raise ValueError(f"columns must be a list of at least one name, or None for all, got {columns!r}")
        shuffle_seed = check_seed(shuffle_seed)
        target_bytes = _bytes(split_bytes)
        target_rows = None if split_rows is None else integer(split_rows, "create_dataloader(split_rows=…)", 1)
        if num_workers is None:
            num_workers = max(1, min(4, (os.cpu_count() or 1) - 1))
        dataset = from_files(
            path,
            format=format,
            columns=columns,
            filters=filters,
            partitioning=partitioning,
            storage_options=storage_options,
            filesystem=filesystem,
            cache_dir=cache_dir,
            cache_bytes=cache_bytes,
            index_dir=index_dir,
        ).with_format(OUTPUTS[output_format])
        if shuffle or shuffle_buffer_size is not None:
            dataset = dataset.shuffle(shuffle_seed, "window", _window(dataset.pipeline.base, shuffle_buffer_size))
        own_rank, world_size = _ranks(num_ranks, rank)
        loader = dataset.loader(
            batch_size,
            num_workers,
            collate_fn=collate_fn,
            collate_columns=True,
            drop_last=drop_last,
            last_batch=last_batch,
            audit=audit,
            rank=own_rank,
            world_size=world_size,
        )
        splits = Splits(dataset.pipeline.base, target_bytes, target_rows, shuffle_seed, partitioning)
        made = cls(dataset, loader, splits, num_workers, show_progress)
        return made, made

    def __getitem__(self, key: Any) -> Any:
        """Raise TypeError: torch reads rows of map-style datasets in this way, and this is not one."""
        raise TypeError(
            "a StructuredDataset cannot be indexed and needs no DataLoader. Iterate it, and pass num_workers and "
            "collate_fn to create_dataloader."
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._shown() if self._progress else iter(self._loader)

    def _shown(self) -> Iterator[Any]:
        with shown(f"epoch {self.epoch}", "batches") as report:
            batches = iter(self._loader)
            done = len(self) - length_hint(batches)
            for batch in batches:
                yield batch
                done += 1
                report(done, max(done, len(self)))

    def current_pass(self) -> Iterator[Any]:
        """Return the current pass of ``next()``. Begin one if there is none."""
        return self._loader.current_pass()

    def end_pass(self) -> None:
        """Make the next ``next()`` begin another pass."""
        self._loader.end_pass()

    def close(self) -> None:
        """Stop threads and workers now. They also stop by themselves."""
        self._loader.close()

    @property
    def schema(self) -> Any:
        return self._dataset.schema

    @property
    def column_names(self) -> list[str]:
        return self._dataset.column_names

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._loader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. The epoch of a loaded state resumes at its position: naming it changes nothing."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that the training loop has received. It is equal on every rank."""
        exact = self._loader.state_dict()
        done = self._splits.completed(exact["epoch"], exact["position"], exact["lanes"])
        return {
            "_num_workers": self._num_workers,
            "_shuffle_seed": self._splits.seed,
            "completed_shards": [self._splits.shard(i) for i in done[-_LISTED_SHARDS:]],
            "completed_shards_total": len(done),
            "_split": self._splits.sizes,
            "_files": self._splits.files,
            "_filters": self._splits.filter,
            "_partitioning": self._splits.partitioning,
            **exact,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, saved on any rank with any number of workers and ranks.

        Raise CheckpointMismatchError, and change nothing, if the data, the seed or the splits differ.
        """
        self.check_state(state)
        state = one_of(state, self._loader.shard)
        self._loader.load_state_dict(state)
        # As documented, loading a state selects its epoch: if that is over, the next pass is empty.
        epoch = state["epoch"]
        self._loader.set_epoch(epoch)
        if self._loader.epoch > epoch:
            _log.warning(
                "this state was saved after the last batch of epoch %d, so its first pass is empty. "
                "Call set_epoch(%d) to start the next epoch.",
                epoch,
                epoch + 1,
            )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise the error that ``load_state_dict`` would raise for a state that does not match. Change nothing."""
        state = one_of(state, self._loader.shard)
        if isinstance(state, Mapping) and KEY not in state and "completed_shards" in state:
            cause = "it was saved by another library and does not contain the row to resume from"
            raise self._splits.mismatch(state, "state", None, None, cause)
        check(state)
        self._splits.check(state)
        try:
            self._loader.check_state(state)
        except CheckpointMismatchError as problem:
            name = _ARGUMENTS.get(problem.field, problem.field)
            raise self._splits.mismatch(state, name, problem.saved, problem.current) from None


def _window(leaf: Leaf, buffer: int | None) -> int | None:
    """Return the number of blocks with as many rows as a shuffle buffer."""
    if buffer is None:
        return None
    rows = leaf.rows / max(1, len(leaf.source.layout.block_starts) - 1)
    return max(1, -(-integer(buffer, "create_dataloader(shuffle_buffer_size=…)", 1) // max(1, int(rows))))


def _ranks(count: int | None, rank: int | None) -> tuple[int | None, int | None]:
    """Return rank and world size. A missing rank is detected; it may be left out for a world size of 1."""
    if count is None:
        return rank, None if rank is None else 1
    if rank is not None or count == 1:
        return rank or 0, count
    world = find_world()
    if world.size != count:
        raise ValueError(f"num_ranks={count} needs rank=…, too: {world.size} ranks were found here, not {count}")
    return world.rank, count


def _bytes(given: int | str | None) -> int:
    """Return the bytes for a number, or for a text like "128 MiB"."""
    if given is None:
        return _SPLIT_BYTES
    if isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", given.lower())
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")) if match else 0
        if size < 1:
            raise ValueError(f"split_bytes must be a number of bytes, or a text like '128 MiB', got {given!r}")
        return size
    return integer(given, "create_dataloader(split_bytes=…)", 1)


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

    def shard(self, number: int) -> dict[str, Any]:
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
        if state.get("data") != data:
            for name, now in (("filters", self.filter), ("partitioning", self.partitioning)):
                if (saved := state.get(f"_{name}", now)) != now:
                    raise self.mismatch(state, name, saved, now)
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
