"""The settings of a loader, by the names that torch's DataLoader has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from midepoch._internal.hints import no_attribute
from midepoch.loader.measured import Measured
from midepoch.loader.options import Options, SingleRow
from midepoch.loader.provenance import source_names
from midepoch.order import Shard
from midepoch.pipeline.spec import PipelineSpec

if TYPE_CHECKING:
    from midepoch.dataset import Dataset

_ORDER = "The order belongs to the dataset: loader.dataset, and loader.shard for the part of this rank."

ATTRIBUTES = {
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "generator": _ORDER,
    "shuffle": "Shuffle the dataset before: ds.shuffle(seed=…).loader(…).",
    "seed": "Use loader.pipeline, or ds.shuffle(seed=…).loader(…).",
    "step": "Use loader.position, in rows of all ranks, and loader.epoch.",
    "save": "Use loader.state_dict(), which is JSON-able, or midepoch.PipelineCheckpoint.",
    "load": "Use loader.load_state_dict(state), or midepoch.PipelineCheckpoint.",
    "reset": "Use loader.set_epoch(epoch), which begins that epoch.",
    "next": "Use next(loader), or iterate it.",
    "to": "Use ds.loader(batch_size, device=…).",
    "column_names": "Use loader.dataset.column_names.",
    "schema": "Use loader.dataset.schema.",
    "world_size": "Use loader.shard.count.",
    "rank": "Use loader.shard.index.",
    "multiprocessing_context": "Use loader.options.multiprocessing_context.",
}
HINTED = (
    *("__init__", "set_epoch", "state_dict", "load_state_dict", "check_state", "stats", "on_stats", "progress"),
    *("exclude", "lease", "get_state", "set_state", "current_pass", "end_pass", "close"),
)
HINTS = {"load_state_dict": {"strict": "Use allow=[…] to name what may differ."}}


class LoaderSettings(Measured):
    """The settings of a loader."""

    _spec: PipelineSpec
    _options: Options
    _dataset: Any

    if not TYPE_CHECKING:  # a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError: raise it again
                return object.__getattribute__(self, name)
            raise no_attribute("a Loader", name, dir(type(self)), ATTRIBUTES)

    @property
    def pipeline(self) -> PipelineSpec:
        """The frozen definition of the data it loads."""
        return self._spec

    @property
    def options(self) -> Options:
        """The settings of its batches."""
        return self._options

    @property
    def dataset(self) -> Dataset:
        """The dataset that it was created from. Its own cursor does not move."""
        return self._dataset  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> int | None:
        """The number of rows of a batch on this rank, or None if single rows are delivered, or batches by tokens."""
        if self._options.budget is not None:
            return self._options.budget.rows or None
        return None if isinstance(self._options.collate_fn, SingleRow) else self._options.batch_size

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._options.num_workers

    @property
    def collate_fn(self) -> Callable[[Any], Any] | None:
        """The function that makes a batch of rows, or None for columns as tensors."""
        function = self._options.collate_fn
        return function.function if isinstance(function, SingleRow) else function

    @property
    def drop_last(self) -> bool:
        """True if the last global batch is omitted unless it is full."""
        return self._options.last_batch == "drop"

    @property
    def last_batch(self) -> str | None:
        """The treatment of the last global batch if it is not full."""
        return self._options.last_batch

    @property
    def pin_memory(self) -> bool:
        """True if batches are in page-locked memory."""
        return self._options.pin_memory

    @property
    def prefetch_factor(self) -> int:
        """The number of batches that each worker makes ahead."""
        return self._options.prefetch

    @property
    def persistent_workers(self) -> bool:
        """True if workers stay between epochs."""
        return self._options.persistent_workers

    @property
    def worker_init_fn(self) -> Callable[[int], Any] | None:
        """The function that each worker calls when it starts."""
        return self._options.worker_init_fn

    @property
    def timeout(self) -> float:
        """The seconds to wait for a worker, or 0 for any time."""
        return self._options.timeout

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, by the numbers in ``source`` of batches with provenance.

        They are those of the mix, or else the paths of the data.
        """
        return source_names(self._spec)

    @property
    def shard(self) -> Shard:
        """The shard of every global batch that this rank gets: ``index`` of ``count``."""
        return self._spec.shard

    @property
    def changes(self) -> tuple[str, ...]:
        """Changes at resumes since the run began: fields that were allowed to differ, and weights of mixes."""
        return self._spec.changes
