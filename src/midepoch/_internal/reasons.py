"""Errors as text."""

from __future__ import annotations


def reason(problem: BaseException) -> str:
    """Return the text of an error, or the name of its class if it has no text, as with KeyboardInterrupt.

    >>> reason(MemoryError())
    'MemoryError'
    """
    return str(problem).strip() or type(problem).__name__
