"""Values as JSON can have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Numbers that JSON has no word for as None, bytes as their number, dates and the like as text.

    >>> plain({"a": [1, float("nan")], "b": b"12"})
    {'a': [1, None], 'b': {'bytes': 2}}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": len(value)}
    return value if value is None or isinstance(value, (str, int)) else str(value)
