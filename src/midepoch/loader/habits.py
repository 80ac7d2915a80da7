"""Habits of other loaders: names that users try, and frameworks that iterate in a way that loses the position."""

from __future__ import annotations

import sys
import warnings

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_OTHER_LOOPS = ("loops.evaluation_loop", "loops.prediction_loop")
_ADAPTER = "midepoch.integrations.lightning"

_DEPTH = 24
"""Frames that are looked at. From the loop of Lightning to ``iter(loader)`` there are 7 in Lightning 2.6."""


def warn_of_lightning() -> None:
    """Warn if Lightning's training loop begins a pass of a loader. Python shows such a warning once."""
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
