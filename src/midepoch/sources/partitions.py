"""Hive partitions: folders called ``key=value`` whose values are columns of all rows below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from midepoch.errors import FormatError

_NULL = "__HIVE_DEFAULT_PARTITION__"
Values = tuple[tuple[str, Any], ...]


def hive_values(paths: Sequence[str]) -> tuple[list[Values], pa.Schema]:
    """The values of each path, and their types: whole numbers where all are, else text."""
    texts = [_texts(path) for path in paths]
    keys = list(texts[0])
    for path, found in zip(paths, texts, strict=True):
        if list(found) != keys:
            raise FormatError(
                f"the files are not partitioned alike: {paths[0]} has {keys or 'no keys'}, {path} has {list(found)}."
            )
    types = {key: pa.int64() if all(_is_int(found[key]) for found in texts) else pa.string() for key in keys}
    values = [tuple((key, _typed(found[key], types[key])) for key in keys) for found in texts]
    return values, pa.schema(list(types.items()))


def _texts(path: str) -> dict[str, str | None]:
    parts = [part.split("=", 1) for part in path.split("/")[:-1] if "=" in part and not part.startswith("=")]
    return {unquote(key): None if value == _NULL else unquote(value) for key, value in parts}


def _is_int(text: str | None) -> bool:
    return text is None or (re.fullmatch(r"-?[0-9]{1,19}", text) is not None and abs(int(text)) < 1 << 63)


def _typed(text: str | None, kind: pa.DataType) -> Any:
    return text if text is None or kind != pa.int64() else int(text)
