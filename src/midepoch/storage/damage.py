"""Meaning of errors: damaged data, which ``on_error="skip"`` skips, unlike all other errors; files that have changed or
are missing; and waits that a server asks for (``Retry-After``, or the ``RateLimit`` header of the Hub).

Local files are read again after errors of the machine, such as too many open files.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import pyarrow as pa

from midepoch.errors import (
    CorruptBlockError,
    DataChangedError,
    DataNotFoundError,
    FetchError,
    FormatError,
    MapError,
    MidepochError,
)

_SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
_OF_NUMBERS = (errno.EINVAL, errno.EOVERFLOW, errno.EFBIG, errno.ERANGE, errno.EDOM, errno.EILSEQ)
"""Errors of a request that was computed from damaged numbers: an impossible offset or length."""
_OF_THE_MACHINE = (*_SHORTAGES, errno.EDQUOT, errno.EIO, errno.ESTALE)
_MOST_COMPRESSED = 1 << 12  # ratio; constants compress better, so that it is not sufficient evidence
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_NUMBER = re.compile(r"\[errno (\d+)\]", re.IGNORECASE)
_TEXTS = {os.strerror(number): number for number in errno.errorcode}


class DamageError(FormatError):
    """No row of a file can be read. With ``on_error="skip"``, the file is left out."""


def unreadable(problem: Exception, text: str) -> FormatError:
    """Return the error for a file that a library cannot read: it is damaged, unless the library lacks a feature."""
    return DamageError(text) if is_damage(problem) else FormatError(text)


def is_damage(problem: BaseException, size: int | None = None, *, of_row: bool = False) -> bool:
    """Return True if a problem is in the data, so that the affected rows can be skipped.

    A missing package, an unsupported type, and errors of the operating system are not damage: skipping would lose
    healthy rows. A request for more memory than the machine has, and than a file of ``size`` bytes can plausibly
    contain, is damage: its lengths are wrong. ``of_row``: the problem occurred in a function of one row, which may
    refer to a missing file or an unreachable server. Then only errors that affect every row are not damage.
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
    """Return the errno of an error, or None. pyarrow sometimes puts it only into the text."""
    if problem.errno is not None:
        return problem.errno
    text = str(problem)
    if (match := _NUMBER.search(text)) is not None:
        return int(match[1])
    return _TEXTS.get(text.rpartition(": ")[2])


def refusal(problem: Exception, text: str) -> Exception:
    """Return the error to raise for a problem that is not damage. No ``on_error`` skips it."""
    if isinstance(problem, MemoryError):
        return MemoryError(f"{text}. Use fewer workers, or less cache_bytes.")
    if isinstance(problem, OSError) and error_number(problem) in _SHORTAGES:
        return FetchError(f"{text}. The machine is out of memory, open files or disk space. Raise its limits.")
    if isinstance(problem, OSError):
        return FetchError(f"{text}. The file may be intact. Check its disk, its mount and its permissions.")
    return FormatError(f"{text}. pyarrow does not support this. Write the column in another type, or leave it out.")


def changed(path: str, difference: str) -> DataChangedError:
    """Return the error for a file that is no longer as it was indexed."""
    return DataChangedError(
        f"{path} has changed since it was indexed ({difference}). Open the dataset again with force_reindex=True to "
        "use the new contents. A state saved before will then be refused."
    )


def removed(path: str) -> DataNotFoundError:
    """Return the error for a file that is no longer there."""
    return DataNotFoundError(
        f"{path} was removed after the dataset was opened. Restore it, or open the dataset again without it."
    )


T = TypeVar("T")

PAUSES = (0.05, 0.2, 0.8)
"""Seconds between attempts to access a local file."""
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def retried(action: Callable[[], T], path: str) -> T:
    """Run an action on a local file, and retry it after a pause if the operating system refused it.

    A persistent refusal is raised as OSError, damage as CorruptBlockError.
    """
    for pause in (*PAUSES, None):
        try:
            return action()
        except (MidepochError, *_LASTING):
            raise
        except OSError as problem:
            if is_damage(problem):
                raise CorruptBlockError(f"{path} cannot be read: {problem}") from None
            if pause is None:
                number = error_number(problem) or 0
                raise OSError(number, os.strerror(number), path) from None
            time.sleep(pause)
    raise AssertionError("unreachable")


_LIMIT = re.compile(r"\br\s*=\s*0\s*(?:;.*?)?;\s*t\s*=\s*(\d+)")
"""``"api";r=0;t=55``: no requests are left, and the window ends in 55 seconds."""


class ThrottledError(ConnectionError):
    """A server refused a request for now. ``retry_after``: the seconds it asked to wait, if it did."""

    def __init__(self, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


def requested_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the headers of an answer ask to wait, or None."""
    named = {str(name).lower(): str(value).strip() for name, value in headers.items()}
    if value := named.get("retry-after"):
        from email.utils import parsedate_to_datetime  # takes 5 ms, which opening local files does not need

        with suppress(ValueError, TypeError, OverflowError):
            seconds = float(value) if value[0].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
            if math.isfinite(seconds):
                return max(0.0, seconds)
    limit = _LIMIT.search(named.get("ratelimit", ""))
    return float(limit[1]) if limit is not None else None


def retry_after(problem: BaseException) -> float | None:
    """Return the seconds that a server asked to wait, for an error of this or of another package, or None."""
    if isinstance(problem, ThrottledError):
        return problem.retry_after
    headers = getattr(problem, "headers", None) or getattr(getattr(problem, "response", None), "headers", None)
    return requested_wait(headers) if isinstance(headers, Mapping) else None


@contextmanager
def refusals(clean: Callable[[str], str], failure: Callable[[BaseException, str], MidepochError]) -> Iterator[None]:
    """Convert errors of a library that reads tables to those of this package. ``failure`` returns the error for one of
    the library, and its text without credentials, which ``clean`` removes.
    """
    try:
        yield
        return
    except MidepochError:
        raise
    except BaseException as problem:
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":  # of lance
            raise
        converted = failure(problem, clean(str(problem)))
    raise converted from None  # outside of the handler: a chained error would be shown with its credentials


def expired(name: str) -> DataNotFoundError:
    """Return the error for a file of a snapshot that no longer exists."""
    return DataNotFoundError(
        f"{name} does not exist. A snapshot of a table needs it: a cleanup of the table (VACUUM, expire_snapshots) has "
        "removed it, or the table was not copied completely. Open a newer version, or restore the file."
    )
