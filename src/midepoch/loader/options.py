"""Settings of batches: the arguments of ``Dataset.loader`` as one frozen value, and which of them go together.

Names that users know from other loaders lead to these.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from midepoch._internal.hints import each_name, instead, warn_once
from midepoch._internal.values import loaded
from midepoch.distributed.keyvalue import connected
from midepoch.errors import MidepochError, WorldError
from midepoch.order.budget import BatchSizes, Budget
from midepoch.order.schedule import Schedule
from midepoch.pipeline.planned import Planning
from midepoch.transforms.context import ContextSlice
from midepoch.transforms.layout import Layout

FEATURES = {
    "sizes by step": "loader({0: 8, 1000: 16})",
    "tokens, planned": "loader(max_tokens=…), lengths known",
    "tokens at run time": "loader(max_tokens=…), after filter, mix …",
    "steps_per_epoch": "loader(…, steps_per_epoch=…)",
    "lease": "loader.lease()",
    "exclude steps": "loader.exclude(steps=…)",
    "exclude rows": "loader.exclude(rows=…), documents=, run=",
    "set_weights": "loader.set_weights(…)",
    "schedule": "mix(…, Schedule(…))",
    "context_parallel": "loader(…, context_parallel=…)",
    "provenance": "loader(…, provenance=True)",
    "collate_fn": "loader(…, collate_fn=…)",
    "micro-batches": "integrations with gradient accumulation",
    "last_batch": 'loader(…, last_batch="drop")',
    "device": "loader(…, device=…)",
}
"""The features, and how each is used."""

_SIZE_OF_TOKENS = (
    "max_tokens gives the size of a batch by its tokens, and sizes by step give it in rows. Pass the largest number of "
    "rows as batch_size, or omit max_tokens."
)

_NO_POSITIONS = (
    "batches are planned where every row of one source is one row of the dataset, and a mix has several sources. Its "
    "batches by tokens are formed at run time."
)

_SIZE_OF_MICRO = (
    "micro-batches cut a batch by its number of rows, and batches by tokens have different ones: each is a micro-batch "
    "already. Omit max_tokens, and pack sequences with Dataset.pack."
)

MEANINGLESS: dict[frozenset[str], str] = {
    frozenset({"sizes by step", "tokens, planned"}): _SIZE_OF_TOKENS,
    frozenset({"sizes by step", "tokens at run time"}): _SIZE_OF_TOKENS,
    frozenset({"tokens, planned", "tokens at run time"}): (
        "lengths are either known before rows are made, or not: a loader has one kind of batches by tokens."
    ),
    frozenset({"tokens, planned", "set_weights"}): _NO_POSITIONS,
    frozenset({"tokens, planned", "schedule"}): _NO_POSITIONS,
    frozenset({"sizes by step", "schedule"}): (
        "the phases of a schedule give the batch sizes (global_batch_size). Omit batch_size, or those of the phases."
    ),
    frozenset({"tokens, planned", "micro-batches"}): _SIZE_OF_MICRO,
    frozenset({"tokens at run time", "micro-batches"}): _SIZE_OF_MICRO,
}
"""Pairs that mean nothing, and the reason."""


def meaningless(one: str, other: str) -> ValueError:
    """Return the error for two features that mean nothing together."""
    return ValueError(f"{one} and {other}: {MEANINGLESS[frozenset({one, other})]}")


_AHEAD_BYTES = 16 << 20
LAST_BATCH = ("drop", "pad", "uneven")
WORKER_TYPES = ("auto", "process", "thread")

PADDING = "is_padding"
"""The column that marks padding rows, in every batch under ``last_batch="pad"``."""


def ahead_for(batch_bytes: float) -> int:
    """Return the number of batches of this size that a worker makes ahead: 8 small ones are 1.5 times faster than 2."""
    return int(max(2, min(8, _AHEAD_BYTES / max(1.0, batch_bytes))))


def last_batch_of(drop_last: bool, last_batch: str | None) -> str | None:
    """Return the treatment of the last global batch, by the two arguments for it."""
    if drop_last and last_batch not in (None, "drop"):
        raise ValueError(f"drop_last=True and last_batch={last_batch!r} contradict each other. Omit one of them.")
    return "drop" if drop_last else last_batch


def check_continues(failure: BaseException | None, closed: bool) -> None:
    """Raise MidepochError if an iteration has failed or was stopped."""
    if failure is not None:
        raise MidepochError("this iteration has failed. Load the last state, or iterate again.") from failure
    if closed:
        raise MidepochError(
            "this iteration was stopped by another iter(), load_state_dict() or close() of the same loader. Begin "
            "a new loop, or create a second loader to iterate the data twice at the same time."
        )


def check_drop(rows: int, options: Options, ranks: int) -> None:
    """Raise ValueError if an epoch would have no batch."""
    # Of sizes that change, batch_size is the largest: no epoch would have a batch at its step, so that no step follows.
    if options.budget is None and options.last_batch == "drop" and 0 < rows < options.batch_size * ranks:
        raise ValueError(
            f"no batch would be left: the {rows:,} rows are fewer than a global batch of {options.batch_size:,} for "
            f"each of {ranks} ranks, and the last global batch is dropped if it is not full. Use smaller batches, or "
            'last_batch="pad".'
        )


@dataclass(frozen=True)
class SingleRow:
    """The ``collate_fn`` of a loader without batches: the row itself, or the function of the user applied to it."""

    function: Callable[[Any], Any] | None = None

    def __call__(self, rows: list[Any]) -> Any:
        return rows[0] if self.function is None else self.function(rows[0])


@dataclass(frozen=True)
class Options:
    """Settings of batches. ``collate_columns``: ``collate_fn`` gets columns, not a list of rows.

    ``last_batch``: the treatment of the last global batch if it is not full:

    - "drop" omits it
    - "pad" fills it with marked rows
    - "uneven" delivers the rows that are left, possibly none to some ranks
    - None does the same, but refuses to leave a rank without a batch

    ``prefetch``: batches for each worker (or chunks for the reading thread). ``timeout``: seconds to wait for a worker,
    0 for any time. ``sizes``: batch sizes that change; ``batch_size`` is the largest then. ``schedule``: that whose
    phases give them, if any. ``planning``: batches by a budget of tokens. Then, and if ``bunches`` (such batches are
    made by a stage), ``batch_size`` is 1: a rank gets one of them in a step. ``steps_per_epoch``: steps of a pass, 0
    for all. ``layout``: how rows of different lengths become arrays. ``context``: the part of each sequence that this
    rank gets, padded with ``pads`` where necessary. ``provenance``: the kind of provenance in batches ("rows",
    "packed"), or "" for none.
    """

    batch_size: int
    num_workers: int = 0
    last_batch: str | None = "uneven"
    collate_fn: Callable[[Any], Any] | None = None
    collate_columns: bool = False
    prefetch: int = 2
    pin_memory: bool = False
    persistent_workers: bool = False
    multiprocessing_context: str | None = None
    worker_type: str = "auto"
    device: Any = None
    worker_init_fn: Callable[[int], Any] | None = None
    timeout: float = 0
    sizes: BatchSizes | None = None
    schedule: Schedule | None = None
    planning: Planning | None = None
    bunches: Budget | None = None
    steps_per_epoch: int = 0
    layout: Layout | None = None
    context: ContextSlice | None = None
    pads: Mapping[str, Any] | None = None
    provenance: str = ""
    found_alone: bool = False
    """True if no rank was given or found when the loader was made."""

    @property
    def context_rank(self) -> int:
        """The rank among those that get parts of the same sequences."""
        slices = (self.context, None if self.layout is None else self.layout.context)
        return next((one.rank for one in slices if one is not None), 0)

    @property
    def budget(self) -> Budget | None:
        """The budget of tokens of a batch."""
        return self.bunches if self.planning is None else self.planning.budget

    def __post_init__(self) -> None:
        if self.last_batch is not None and self.last_batch not in LAST_BATCH:
            raise ValueError(f"last_batch must be one of {', '.join(map(repr, LAST_BATCH))}, got {self.last_batch!r}")
        if self.worker_type not in WORKER_TYPES:
            names = ", ".join(map(repr, WORKER_TYPES))
            raise ValueError(f"worker_type must be one of {names}, got {self.worker_type!r}")
        if self.worker_type == "thread" and self.multiprocessing_context is not None:
            raise ValueError("multiprocessing_context is for worker processes: omit it, or worker_type='thread'.")
        if self.multiprocessing_context not in (None, *(methods := multiprocessing.get_all_start_methods())):
            raise ValueError(
                f"multiprocessing_context must be one of {', '.join(map(repr, methods))}, got "
                f"{self.multiprocessing_context!r}"
            )
        if self.persistent_workers and not self.num_workers:
            raise ValueError("persistent_workers=True requires num_workers of at least 1")
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TypeError(f"collate_fn must be a function, got {self.collate_fn!r}")
        if isinstance(self.collate_fn, type) and any("__call__" in vars(one) for one in self.collate_fn.__mro__):
            raise TypeError(instead("loader(collate_fn=…)", "a function", self.collate_fn))
        if self.worker_init_fn is not None and not callable(self.worker_init_fn):
            raise TypeError(f"worker_init_fn must be a function of a worker's number, got {self.worker_init_fn!r}")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)) or not 0 <= self.timeout < 1e9:
            raise ValueError(f"timeout must be a number of seconds, or 0 for any time, got {self.timeout!r}")


_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_OTHER_LOOPS = ("loops.evaluation_loop", "loops.prediction_loop")
_ADAPTER = "midepoch.integrations.lightning"

_SAVES = {"midepoch.integrations.accelerate", "midepoch.checkpoint.manager", "transformers.trainer"}
"""Modules of programs in which a position is saved otherwise, or which warn themselves."""

_DEPTH = 24
"""Frames that are looked at. From the loop of Lightning to ``iter(loader)`` there are 7 in Lightning 2.6."""


def check_surroundings(options: Options) -> None:
    """Raise WorldError if ranks were connected after the loader was made. Warn of trainers that do not save it."""
    if options.found_alone and connected() > 1:
        raise WorldError(
            f"this loader was made before the {connected()} ranks were connected, so that each would load all rows. "
            "Make it after init_process_group or jax.distributed.initialize, or with rank= and world_size=."
        )
    accelerate = loaded("accelerate.state")
    if (
        getattr(getattr(accelerate, "AcceleratorState", None), "_shared_state", None)
        and not _SAVES & sys.modules.keys()
    ):
        warn_once(
            "accelerator.prepare leaves this loader as it is, and accelerator.save_state does not save its position. "
            "Use midepoch.integrations.accelerate.prepare(accelerator, loader), or save loader.state_dict() yourself."
        )
    if _trained_by_lightning():
        warnings.warn(
            "Lightning trains with a loader directly, and a resumed run may lose or repeat rows: Lightning saves the "
            "position after batches that it has fetched ahead, and does not load it after a complete epoch. Use "
            "fit(model, datamodule=data), where data = midepoch.integrations.lightning.ResumableData(lambda: "
            "ds.loader(…)).",
            stacklevel=2,
        )


def _trained_by_lightning() -> bool:
    """Return True if the innermost loop of Lightning on the stack is the one for training, without ResumableData."""
    loaded = [name for name in _LIGHTNING if name in sys.modules]
    if not loaded:
        return False
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        module = frame.f_globals.get("__name__", "")
        if module == _ADAPTER or module in [f"{name}.{loop}" for name in loaded for loop in _OTHER_LOOPS]:
            return False
        if module in [f"{name}.loops.fit_loop" for name in loaded]:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


ATTRIBUTES = each_name(
    {
        "sampler, batch_sampler, generator": "The order belongs to the dataset: loader.dataset, and loader.shard for "
        "the part of this rank.",
        "shuffle": "Shuffle the dataset before: ds.shuffle(seed=…).loader(…).",
        "seed": "Use loader.pipeline, or ds.shuffle(seed=…).loader(…).",
        "step, global_step": "Use loader.steps, the global batches since the run began.",
        "map": "Map the dataset before: ds.map(function).loader(…).",
        "filter": "Filter the dataset before: ds.filter(function).loader(…).",
        "take": "Use ds.take(n).loader(…) for rows, or steps_per_epoch=… for batches.",
        "skip, seek, skip_first_batches": "Load a state: loader.load_state_dict(state). For rows, "
        "ds.skip(n).loader(…).",
        "load, restore": "Use loader.load_state_dict(state), or midepoch.PipelineCheckpoint.",
        "resume": "Use loader.load_state_dict(state), or PipelineCheckpoint.restore_latest(loader, model, optimizer).",
        "save, checkpoint": "Use loader.state_dict(), which is JSON-able, or midepoch.PipelineCheckpoint.",
        "shutdown": "Use loader.close().",
        "exclude_documents": "Use loader.exclude(documents=[('web', 17)]).",
        "reset, reset_state": "Use loader.set_epoch(epoch), which begins that epoch.",
        "current_epoch": "Use loader.epoch.",
        "next": "Use next(loader), or iterate it.",
        "to": "Use ds.loader(batch_size, device=…).",
        "column_names": "Use loader.dataset.column_names.",
        "schema": "Use loader.dataset.schema.",
        "world_size": "Use loader.shard.count.",
        "rank": "Use loader.shard.index.",
        "multiprocessing_context": "Use loader.options.multiprocessing_context.",
    }
)

HINTED = (
    *("__init__", "set_epoch", "state_dict", "load_state_dict", "check_state", "stats", "on_stats", "progress"),
    *("exclude", "set_weights", "lease", "get_state", "set_state", "current_pass", "end_pass", "close"),
)

HINTS = {
    "load_state_dict": {"strict": "Use allow=[…] to name what may differ."},
    "set_weights": {"*": "Pass a dict, set_weights({'web': 0.5, 'code': 0.5}), or a list of weights."},
}
