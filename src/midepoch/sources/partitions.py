"""Hive partitions: folders called ``key=value`` whose values are columns of all rows below."""

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


def below(given: Sequence[str], paths: Sequence[str]) -> list[str]:
    """The paths of files below the roots of their partitions.

    A folder that was given may be a partition itself; those above it are none otherwise. A file or a glob has no such
    border: there they are the nearest folders called ``key=value`` that follow on each other.
    """
    files = set(given).intersection(paths)
    others = [text for text in given if text not in files]
    found = []
    for path in paths:
        roots = [_root(text, path) for text in ((path,) if path in files else others)]
        root = max((each for each in roots if path.startswith(each)), key=len, default="")
        found.append(path[len(root) :].lstrip("/"))
    return found


def _root(text: str, path: str) -> str:
    plain, *glob = _GLOB.split(text, maxsplit=1)
    if text != path and not glob:
        above = text.rstrip("/").split("/")
        while above and "=" in above[-1]:  # a folder that is a partition itself
            above.pop()
        return "/".join([*above, ""])
    folders = path.split("/")[:-1]
    fixed = plain.split("/")[:-1] if text != path else folders
    if any("=" in folder for folder in folders[len(fixed) :]):
        folders = fixed  # some of the partitions are matched by the glob
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
