"""Names that users of other loaders try on a loader, and the names to use instead."""

from __future__ import annotations

_ORDER = "The order belongs to the dataset: loader.dataset, and loader.shard for the part of this rank."

ATTRIBUTES = {
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "generator": _ORDER,
    "shuffle": "Shuffle the dataset before: ds.shuffle(seed=…).loader(…).",
    "seed": "Use loader.pipeline, or ds.shuffle(seed=…).loader(…).",
    "step": "Use loader.steps, the global batches since the run began.",
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
    *("exclude", "set_weights", "lease", "get_state", "set_state", "current_pass", "end_pass", "close"),
)
HINTS = {"load_state_dict": {"strict": "Use allow=[…] to name what may differ."}}
