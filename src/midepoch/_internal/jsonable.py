"""Conversion of values to JSON-compatible ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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
