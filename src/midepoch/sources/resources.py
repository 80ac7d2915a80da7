"""Retries of local file access after errors of the machine, such as too many open files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from midepoch.errors import CorruptBlockError, MidepochError
from midepoch.sources.damage import error_number, is_damage

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
