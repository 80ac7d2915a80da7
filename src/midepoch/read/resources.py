"""Errors of the machine, which say nothing about the data: too many open files, no memory for a mapping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from midepoch.errors import CorruptBlockError
from midepoch.sources.damage import is_damage

T = TypeVar("T")

_PAUSES = (0.05, 0.2, 0.8)


def retried(action: Callable[[], T], path: str) -> T:
    """Run an action on a file, again after a pause where the machine lacked a resource.

    A lasting shortage is raised as the OSError that it is, other failures as CorruptBlockError.
    """
    for pause in (*_PAUSES, None):
        try:
            return action()
        except FileNotFoundError:
            raise
        except OSError as problem:
            if is_damage(problem):
                raise CorruptBlockError(f"{path} cannot be read: {problem}") from None
            if pause is None:
                raise
            time.sleep(pause)
    raise AssertionError("unreachable")
