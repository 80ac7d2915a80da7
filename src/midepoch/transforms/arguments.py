"""Short text of a step's arguments for the state: equal in every process, and different for other values.

It covers values with a meaning outside of this process: numbers, texts, bytes, containers of them, arrays and tensors.
For anything else (a model, a tokenizer, an open file, a path) only the name of the argument is used. The same holds for
credentials, in arguments with such a name and in addresses, so that they can be rotated.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from midepoch._internal.values import loaded
from midepoch.storage.address import Address, is_secret
from midepoch.transforms.encode import OfItem, Tokenize
from midepoch.transforms.filter import FilterExpression
from midepoch.transforms.function import Function

_LONGEST = 80
_UNKNOWN = b"?"
_SIMPLE = (bool, int, float, complex, datetime.date, datetime.time, datetime.timedelta)


def arguments_of(step: Any) -> str:
    """Return the expression of a filter, or a digest of a function's arguments (``fn_kwargs``), "-" without any."""
    if isinstance(step, FilterExpression):
        text = str(step.expression)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 14]}… {_hashed(text.encode())}"
    if not isinstance(step, Function):
        return "-"
    given: dict[str, Any] = {str(name): value for name, value in step.fn_kwargs.items()}
    function = step.function.function if isinstance(step.function, OfItem) else step.function
    if isinstance(function, Tokenize):
        given = {"output": function.output, **function.options}
    while isinstance(function, partial):
        given = {"partial": [given, list(function.args), dict(function.keywords)]}
        function = function.func
    return _hashed(_packed(given)) if given else "-"


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def _packed(value: Any) -> bytes:
    """Return a value as bytes that begin with its kind and length, so that different values have different bytes."""
    kind, data = _encoded(value)
    return f"{kind} {len(data)} ".encode() + data


def _item(name: Any, value: Any) -> bytes:
    secret = isinstance(name, str) and isinstance(value, str) and is_secret(name)
    return _packed(name) + (_UNKNOWN if secret else _packed(value))


def _encoded(value: Any) -> tuple[str, bytes]:
    kind = type(value).__name__
    if isinstance(value, enum.Enum):
        return "enum", f"{kind}.{value.name}".encode()
    if isinstance(value, str):
        identity = Address(value).identity
        return kind, repr(value if identity == value else identity).encode()
    if value is None or isinstance(value, _SIMPLE):
        return kind, repr(value).encode()
    if isinstance(value, (bytes, bytearray)):
        return "bytes", bytes(value)
    if isinstance(value, (list, tuple)):
        return "list", b"".join(map(_packed, value))
    if isinstance(value, (set, frozenset)):
        return "set", b"".join(sorted(map(_packed, value)))
    if isinstance(value, Mapping):
        return "dict", b"".join(sorted(_item(name, inner) for name, inner in value.items()))
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        array = np.ascontiguousarray(value)
        return f"array {array.dtype.str} {array.shape}", array.tobytes()
    if isinstance(value, re.Pattern):
        return "pattern", repr((value.pattern, value.flags)).encode()
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_sparse:
        flat = value.detach().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"tensor {value.dtype} {tuple(value.shape)}", data
    return "?", _UNKNOWN
