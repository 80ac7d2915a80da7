"""Every error midepoch raises on purpose.

    MidepochError
    ├── DataError                     the data cannot be used as it is
    │   ├── DataNotFoundError         a path, glob, folder, split or column is not there (also a FileNotFoundError)
    │   ├── FormatError               a file is not what it should be: foreign, truncated, of another schema
    │   │   └── DifferentSchemasError files of one dataset have different columns
    │   ├── ColumnError               a column is missing or named twice (also a KeyError)
    │   ├── CorruptBlockError         a block of an indexed file cannot be read
    │   ├── DataChangedError          a file is not what it was when it was indexed
    │   └── FetchError                a store did not hand over an object, after all retries
    ├── MapError                      a user's function raised or returned something unusable; names the row
    ├── StateError                    a state cannot be read: garbage, or written by a newer version
    │   └── CheckpointMismatchError   a state of other data, another order, pipeline or model
    ├── CheckpointError               a checkpoint cannot be used as it is asked for
    │   ├── CheckpointSaveError       a step was not saved; the steps before it are as they were
    │   ├── CheckpointDamagedError    a step is not what its manifest says
    │   └── CheckpointNotFoundError   there is no such step, or no such part of it (also a FileNotFoundError)
    ├── WorldError                    it is not clear which rank this is, or ranks do not stand where they should
    └── WorkerError                   a worker process died or failed; names the worker

Bad arguments raise ``ValueError`` or ``TypeError`` as everywhere in Python.
"""

from __future__ import annotations

from typing import Any


class MidepochError(Exception):
    """The root of the tree: catches everything midepoch raises on purpose."""


class DataError(MidepochError):
    """The data cannot be used as it is."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A path, glob, folder or split holds nothing."""


class FormatError(DataError):
    """A file is foreign, truncated, or of another schema than its neighbours."""


class DifferentSchemasError(FormatError):
    """Files of one dataset have different columns."""


class ColumnError(DataError, KeyError):
    """A column is missing, or named twice."""

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0]) if self.args else ""


class CorruptBlockError(DataError):
    """A block (record batch, row group, stripe, range of lines) of an indexed file cannot be read."""


class DataChangedError(DataError):
    """A file is not what it was when it was indexed."""


class FetchError(DataError):
    """A store did not hand over an object, after all retries."""


class MapError(MidepochError):
    """A user's function raised, or returned something that cannot be used."""


class StateError(MidepochError):
    """A state cannot be read at all."""


class CheckpointMismatchError(StateError):
    """A state that belongs to other data, another order or another pipeline.

    Nothing has been changed when this is raised. ``field``, ``saved`` and ``current`` say what differs.
    """

    def __init__(self, field: str, saved: Any = None, current: Any = None, cause: str | None = None) -> None:
        self.field, self.saved, self.current, self.cause = field, saved, current, cause
        if cause is None:  # made again from its text alone, as torch does with an error of a worker
            super().__init__(field)
            return
        super().__init__(
            f"the state does not belong here: {field} differs.\n"
            f"  saved:   {saved!r}\n  current: {current!r}\n  likely cause: {cause}\n"
            "Nothing was changed. Build everything as it was when the state was saved, or start without the state."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.saved, self.current, self.cause)


class CheckpointError(MidepochError):
    """A checkpoint cannot be used as it is asked for."""


class CheckpointSaveError(CheckpointError):
    """A step was not saved. The steps saved before it are as they were."""


class CheckpointDamagedError(CheckpointError):
    """A step is not what its manifest says: cut, changed, incomplete."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such step, or no such part of it."""


class WorldError(MidepochError):
    """It is not clear which rank of how many this process is, or the ranks of a run do not go together."""


class WorkerError(MidepochError):
    """A worker process died or failed."""
