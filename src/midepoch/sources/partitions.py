"""Hive partitions: folders named ``key=value`` whose values become columns of all rows below."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from midepoch.errors import FormatError

_NULL = "__HIVE_DEFAULT_PARTITION__"
_GLOB = re.compile(r"[*?\[]")
Values = tuple[tuple[str, Any], ...]


def hive_values(paths: Sequence[str]) -> tuple[list[Values], pa.Schema]:
    """Return the values of each path and their types: integers if all values are, else text."""
    texts = [_texts(path) for path in paths]
    keys = list(texts[0])
    for path, values in zip(paths, texts, strict=True):
        if list(values) != keys:
            raise FormatError(
                f"the files are not partitioned alike: {paths[0]} has {keys or 'no keys'}, {path} has {list(values)}."
            )
    types = {key: pa.int64() if all(_is_int(text[key]) for text in texts) else pa.string() for key in keys}
    typed = [tuple((key, _typed(text[key], types[key])) for key in keys) for text in texts]
    return typed, pa.schema(list(types.items()))


def below(given: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the paths of files relative to the roots of their partitions.

    For a given folder the root is the folder, or the first parent that is not itself a partition. For a file or a glob
    the partitions are the nearest consecutive folders named ``key=value``.
    """
    files = set(given).intersection(paths)
    others = [text for text in given if text not in files]
    relative = []
    for path in paths:
        roots = [_root(text, path) for text in ((path,) if path in files else others)]
        root = max((each for each in roots if path.startswith(each)), key=len, default="")
        relative.append(path[len(root) :].lstrip("/"))
    return relative


def _root(text: str, path: str) -> str:
    plain, *glob = _GLOB.split(text, maxsplit=1)
    if text != path and not glob:
        above = text.rstrip("/").split("/")
        while above and "=" in above[-1]:  # a folder that is itself a partition
            above.pop()
        return "/".join([*above, ""])
    folders = path.split("/")[:-1]
    fixed = plain.split("/")[:-1] if text != path else folders
    if any("=" in folder for folder in folders[len(fixed) :]):
        folders = fixed  # the glob matches some of the partitions
    else:
        while any("=" in folder for folder in folders) and "=" not in folders[-1]:
            folders.pop()
    while folders and "=" in folders[-1]:
        folders.pop()
    return "".join(f"{folder}/" for folder in folders)


def _texts(path: str) -> dict[str, str | None]:
    parts = [part.split("=", 1) for part in path.split("/")[:-1] if "=" in part and not part.startswith("=")]
    return {unquote(key): None if value == _NULL else unquote(value) for key, value in parts}


def _is_int(text: str | None) -> bool:
    return text is None or (re.fullmatch(r"-?[0-9]{1,19}", text) is not None and abs(int(text)) < 1 << 63)


def _typed(text: str | None, kind: pa.DataType) -> Any:
    return text if text is None or kind != pa.int64() else int(text)
