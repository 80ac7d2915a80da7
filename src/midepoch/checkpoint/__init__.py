"""Checkpoints: data, model, optimizer and random generators committed together, or not at all.

``PipelineCheckpoint`` (``manager.py``) is the door. Behind it: ``tree.py`` and ``tensors.py`` turn values into JSON and
safetensors, ``local.py`` and ``remote.py`` keep and commit steps on a disk or in an object store, ``ranks.py`` lets the
ranks of a run meet, ``backends/`` hands models to Orbax or torch's distributed checkpoints instead.
"""

from midepoch.checkpoint.keep import Keep
from midepoch.checkpoint.manager import PipelineCheckpoint
from midepoch.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
)

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "Keep",
    "PipelineCheckpoint",
]
