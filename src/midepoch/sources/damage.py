"""Damage of a row or block, which ``on_error="skip"`` passes over, and everything else, which it never does."""

from __future__ import annotations

import errno
import os
import re

import pyarrow as pa

from midepoch.errors import CorruptBlockError, FetchError, FormatError, MapError, MidepochError

_SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
_OF_NUMBERS = (errno.EINVAL, errno.EOVERFLOW, errno.EFBIG, errno.ERANGE, errno.EDOM, errno.EILSEQ)
"""Refusals of a request that was computed from damaged numbers: an offset or a length that cannot be."""
_OF_THE_MACHINE = (*_SHORTAGES, errno.EDQUOT, errno.EIO, errno.ESTALE)
_MOST_COMPRESSED = 1 << 12  # times; constants compress better, so that this alone proves nothing
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_NUMBER = re.compile(r"\[errno (\d+)\]", re.IGNORECASE)
_TEXTS = {os.strerror(number): number for number in errno.errorcode}


def is_damage(problem: BaseException, size: int | None = None, *, of_row: bool = False) -> bool:
    """Return whether a problem lies in the data, so that the rows it concerns can be skipped.

    A missing package, a type that is not supported, and whatever the operating system refuses are not damage: skipping
    would lose healthy rows. But where more memory was asked for than the machine has, and than a file of ``size`` bytes
    is likely to hold compressed, its lengths are damaged. ``of_row``: the problem came up in a function of one row,
    which may name a file that is missing or a server that does not answer: then only what every other row would meet as
    well is no damage.
    """
    if size is not None and isinstance(problem, MemoryError):
        asked = max(map(int, re.findall(r"[0-9]+", str(problem))), default=0)
        return asked > max(_MOST_COMPRESSED * size, _MEMORY)
    if isinstance(problem, (ImportError, MemoryError, pa.ArrowNotImplementedError)):
        return False
    if isinstance(problem, OSError) and not isinstance(problem, MidepochError):
        number = error_number(problem)
        return number is None or (number not in _OF_THE_MACHINE if of_row else number in _OF_NUMBERS)
    if isinstance(problem, MidepochError) and not isinstance(problem, (CorruptBlockError, FormatError, MapError)):
        return False
    return problem.__cause__ is None or is_damage(problem.__cause__, of_row=of_row)


def error_number(problem: OSError) -> int | None:
    """The number of an error of the operating system, which pyarrow at times writes only into its text; else None."""
    if problem.errno is not None:
        return problem.errno
    text = str(problem)
    if (match := _NUMBER.search(text)) is not None:
        return int(match[1])
    return _TEXTS.get(text.rpartition(": ")[2])


def refusal(problem: Exception, text: str) -> Exception:
    """The error to raise for a problem that is not damage, which no ``on_error`` passes over."""
    if isinstance(problem, MemoryError):
        return MemoryError(f"{text}. Use fewer workers, or less cache_bytes.")
    if isinstance(problem, OSError) and error_number(problem) in _SHORTAGES:
        return FetchError(f"{text}. The machine has no memory, open files or disk left: raise its limits.")
    if isinstance(problem, OSError):
        return FetchError(f"{text}. The file may be healthy: check its disk, its mount and its permissions.")
    return FormatError(f"{text}. pyarrow does not support this: write the column in another type, or leave it out.")
