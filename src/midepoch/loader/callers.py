"""Detection of frameworks that iterate a loader in a way that loses its position."""

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
