"""Damage of a row or block, which ``on_error="skip"`` passes over, and everything else, which it never does."""

from __future__ import annotations

import errno
import os
import re

import pyarrow as pa

from midepoch.errors import CorruptBlockError, FetchError, FormatError, MapError, MidepochError

_OF_THE_MACHINE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
_MOST_COMPRESSED = 1 << 12  # times
_TEXTS = tuple(map(os.strerror, _OF_THE_MACHINE))


def is_damage(problem: BaseException, size: int | None = None) -> bool:
    """Return whether a problem lies in the data, so that the rows it concerns can be skipped.

    A missing package, a type that is not supported, and a machine without memory, files or disk left are not damage:
    skipping would lose healthy rows. But where more memory was asked for than a file of ``size`` bytes can hold
    compressed, its lengths are damaged.
    """
    if size is not None and isinstance(problem, MemoryError):
        asked = max(map(int, re.findall(r"[0-9]+", str(problem))), default=0)
        return asked > _MOST_COMPRESSED * size
    if isinstance(problem, (ImportError, MemoryError, pa.ArrowNotImplementedError)):
        return False
    if isinstance(problem, OSError) and not isinstance(problem, MidepochError):
        return problem.errno not in _OF_THE_MACHINE and not any(text in str(problem) for text in _TEXTS)
    if isinstance(problem, MidepochError) and not isinstance(problem, (CorruptBlockError, FormatError, MapError)):
        return False
    return problem.__cause__ is None or is_damage(problem.__cause__)


def refusal(problem: Exception, text: str) -> Exception:
    """The error to raise for a problem that is not damage, which no ``on_error`` passes over."""
    if isinstance(problem, MemoryError):
        return MemoryError(f"{text}. Use fewer workers, or less cache_bytes.")
    if isinstance(problem, OSError):
        return FetchError(f"{text}. The machine has no memory, open files or disk left: raise its limits.")
    return FormatError(f"{text}. pyarrow does not support this: write the column in another type, or leave it out.")
