"""Every error midepoch raises on purpose.

    MidepochError
    ├── DataError                     the data cannot be used as it is
    │   ├── DataNotFoundError         a path, glob, folder or split does not exist (also a FileNotFoundError)
    │   ├── FormatError               a file has an unknown format, is truncated, or has another schema
    │   │   └── DifferentSchemasError files of one dataset have different columns
    │   ├── ColumnError               a column is missing or named twice (also a KeyError)
    │   ├── CorruptBlockError         a block of an indexed file cannot be read
    │   ├── DataChangedError          a file has changed since it was indexed
    │   └── FetchError                a store did not deliver an object after all retries
    ├── MapError                      a user's function raised or returned an unusable value; names the row
    ├── StateError                    a state cannot be read: not a state, or written by a newer version
    │   └── CheckpointMismatchError   a state of different data, order, pipeline or model
    ├── CheckpointError               a checkpoint cannot be used as requested
    │   ├── CheckpointSaveError       a step was not saved; earlier steps are unchanged
    │   ├── CheckpointDamagedError    a step does not match its manifest
    │   └── CheckpointNotFoundError   a step, or a part of it, does not exist (also a FileNotFoundError)
    ├── WorldError                    the rank is ambiguous, or the ranks of a run are inconsistent
    ├── WorkerError                   a worker process died or failed; names the worker
    └── LeaseError                    a lease cannot be acknowledged: the process of its loader is gone

Bad arguments raise ``ValueError`` or ``TypeError`` as everywhere in Python.
"""

from __future__ import annotations

import re
from typing import Any

_DOUBLE_DOT = re.compile(r"(?<=\w)\.\.(?= [A-Z]|$)")
"""The end of a sentence that quotes another error, which may have a dot of its own."""


class MidepochError(Exception):
    """Base class of every error that midepoch raises on purpose."""

    def __str__(self) -> str:
        return _DOUBLE_DOT.sub(".", super().__str__())


class DataError(MidepochError):
    """The data cannot be used as it is."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A path, glob, folder or split does not exist or is empty."""


class FormatError(DataError):
    """A file has an unknown format, is truncated, or has another schema than the files beside it."""


class DifferentSchemasError(FormatError):
    """Files of one dataset have different columns."""


class ColumnError(DataError, KeyError):
    """A column is missing, or named twice."""

    def __str__(self) -> str:  # KeyError would quote the message
        return _DOUBLE_DOT.sub(".", str(self.args[0])) if self.args else ""


class CorruptBlockError(DataError):
    """A block (record batch, row group, stripe, range of lines) of an indexed file cannot be read."""


class DataChangedError(DataError):
    """A file has changed since it was indexed."""


class FetchError(DataError):
    """A store did not deliver an object after all retries."""


class MapError(MidepochError):
    """A user's function raised or returned an unusable value."""


class StateError(MidepochError):
    """A state cannot be read at all."""


class CheckpointMismatchError(StateError):
    """A state that belongs to different data, another order or another pipeline.

    Nothing has changed when this is raised. ``field``, ``saved`` and ``current`` describe the difference.
    """

    def __init__(self, field: str, saved: Any = None, current: Any = None, cause: str | None = None) -> None:
        self.field, self.saved, self.current, self.cause = field, saved, current, cause
        if cause is None:  # torch recreates the error of a worker from its text alone
            super().__init__(field)
            return
        super().__init__(
            f"the state does not match: {field} differs.\n"
            f"  saved:   {saved!r}\n  current: {current!r}\n  likely cause: {cause}\n"
            "Nothing was changed. Rebuild the pipeline as it was when the state was saved, or start without the state."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.saved, self.current, self.cause)


class CheckpointError(MidepochError):
    """A checkpoint cannot be used as requested."""


class CheckpointSaveError(CheckpointError):
    """A step was not saved. Earlier steps are unchanged."""


class CheckpointDamagedError(CheckpointError):
    """A step does not match its manifest: it is truncated, changed or incomplete."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A step, or a part of it, does not exist."""


class WorldError(MidepochError):
    """The rank or world size of this process is ambiguous, or the ranks of a run are inconsistent."""


class WorkerError(MidepochError):
    """A worker process died or failed."""


class LeaseError(MidepochError):
    """A lease cannot be acknowledged: the process of its loader has exited, or is on another machine."""
