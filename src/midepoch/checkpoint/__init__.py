"""Checkpoints: data, model, optimizer and random generators committed together, or not at all.

| noun | meaning | module |
|---|---|---|
| manager | ``PipelineCheckpoint``: saves, restores and lists steps | ``manager``, with ``saving`` and ``restoring`` |
| step | everything saved in one call, under a number | |
| part | one tree of a step: data, model, optimizer, rng, an extra | ``stateful``, ``rng`` |
| tree | values as JSON, large arrays in safetensors | ``tree``, ``arrays`` |
| manifest | list of a step's files with their checksums; written last | ``manifest``, ``files`` |
| store | folder on a disk or of objects | ``local``, ``remote`` |
| copy | files of one save of a step; committed by its manifest | ``store``: one protocol for all stores |
| rendezvous | agreement of the ranks before a commit or a restore | ``rendezvous`` |
| retention | rules by which old steps are removed: ``Keep`` | ``manifest`` |
| snapshot | copy in memory that a background thread writes | ``background`` |
| backend | other writer of a model's arrays: Orbax, torch's distributed checkpoints | ``backends`` |
"""

from midepoch.checkpoint.manager import PipelineCheckpoint
from midepoch.checkpoint.manifest import Keep
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
