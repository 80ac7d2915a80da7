"""``StructuredDataset``: batches from structured files, with the documented interface and state, resumed exactly."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

from midepoch._internal.hints import hinted_methods
from midepoch._internal.progress import shown
from midepoch._internal.resumable import Resumable
from midepoch._internal.values import integer
from midepoch.compat.splits import Splits
from midepoch.dataset import Dataset
from midepoch.distributed.world import find_world
from midepoch.errors import CheckpointMismatchError
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
_LISTED_SHARDS = 256
_ARGUMENTS = {"window": "shuffle_buffer_size (in row groups)", "scope": "shuffle", "aligned": "shuffle"}


@hinted_methods({})
class StructuredDataset(Resumable):
    """Dataset that ``create_dataloader`` returns with the loader: epoch, state and schema.

    ``state_dict()`` describes the batches that the training loop has received, wherever it is called. Its documented
    keys are for people. A resume uses the exact position, so that nothing is read or delivered twice, with any number
    of workers and ranks, from the state of any one rank.
    """

    def __init__(self, dataset: Dataset, loader: Loader, splits: Splits, num_workers: int) -> None:
        self._dataset, self._loader, self._splits, self._num_workers = dataset, loader, splits, num_workers

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
    ) -> tuple[StructuredLoader, StructuredDataset]:
        """Return a loader of batches and its dataset. Keep the dataset: it has the state and ``set_epoch``.

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
        made = cls(dataset, loader, splits, num_workers)
        return StructuredLoader(loader, made, show_progress), made

    def __getitem__(self, key: Any) -> Any:
        """Raise TypeError: torch reads rows of map-style datasets in this way, and this is not one."""
        raise TypeError(
            "a StructuredDataset cannot be indexed and needs no DataLoader. Iterate it, or the loader that "
            "create_dataloader returned with it, and pass num_workers and collate_fn to create_dataloader."
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def current_pass(self) -> Iterator[Any]:
        """Return the current pass of ``next()``, shared with the loader that was created with this dataset."""
        return self._loader.current_pass()

    def end_pass(self) -> None:
        """Make the next ``next()`` begin another pass."""
        self._loader.end_pass()

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


class StructuredLoader(Resumable):
    """Loader with the batches of one epoch for each ``iter()``. A ``break`` loses nothing."""

    def __init__(self, loader: Loader, dataset: StructuredDataset, progress: bool) -> None:
        self._loader, self._dataset, self._progress = loader, dataset, progress

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._shown() if self._progress else iter(self._loader)

    def current_pass(self) -> Iterator[Any]:
        """Return the current pass of ``next()``, shared with the dataset."""
        return self._loader.current_pass()

    def end_pass(self) -> None:
        """Make the next ``next()`` begin another pass."""
        self._loader.end_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the dataset."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of the dataset."""
        self._dataset.load_state_dict(state)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check a state of the dataset."""
        self._dataset.check_state(state)

    def _shown(self) -> Iterator[Any]:
        with shown(f"epoch {self._loader.epoch}", "batches") as report:
            batches = iter(self._loader)
            done = len(self) - length_hint(batches)
            for batch in batches:
                yield batch
                done += 1
                report(done, max(done, len(self)))

    def close(self) -> None:
        """Stop threads and workers now. They also stop by themselves."""
        self._loader.close()


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
