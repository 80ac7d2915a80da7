"""Small functions on values: integers that are checked, errors as text, values for JSON, modules that are loaded."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

LARGEST = 2**62


def integer(value: Any, what: str, least: int = 0, hint: str = "") -> int:
    """Return the value as an int. Raise TypeError if it is not an integer, ValueError if it is below ``least``.

    ``hint``: a sentence for what else people pass.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{what}: expected an integer, got {value!r:.60}{'. ' * bool(hint)}{hint}")
    if not least <= number < LARGEST:
        raise ValueError(f"{what}: expected at least {least}, got {value}{'. ' * bool(hint)}{hint}")
    return number


def one_of(value: Any, allowed: Sequence[Any], what: str, hint: str = "") -> Any:
    """Return the value. Raise ValueError if it is not one of those that are allowed.

    ``hint``: a sentence for what else people pass.
    """
    if value not in allowed:
        names = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ValueError(f"{what} must be {names}, got {value!r:.60}{'. ' * bool(hint)}{hint}")
    return value


def reason(problem: BaseException) -> str:
    """Return the text of an error, or the name of its class if it has no text, as with KeyboardInterrupt.

    >>> reason(MemoryError())
    'MemoryError'
    """
    return str(problem).strip() or type(problem).__name__


def to_jsonable(value: Any) -> Any:
    """Return a value that JSON can represent: NaN and infinity as None, bytes as their length, dates and others as
    text.

    >>> to_jsonable({"a": [1, float("nan")], "b": b"12"})
    {'a': [1, None], 'b': {'bytes': 2}}
    """
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": len(value)}
    return value if value is None or isinstance(value, (str, int)) else str(value)


def loaded(name: str) -> Any:
    """Return a module that has been imported, else None.

    A module that is being imported counts as not imported: a signal handler that saves may have interrupted the import,
    and a partial module lacks names.
    """
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module
