"""Recognition of folders of Delta, Iceberg and Lance tables, whose files must not be read without their logs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from midepoch.errors import FormatError
from midepoch.sources.stores import Store

_MARKS = (
    ("/_delta_log/", re.compile(r"(.*?)/_delta_log/\d{20}\..*"), "Delta table", "from_delta"),
    (".manifest", re.compile(r"(.*?)/_versions/\d+\.manifest"), "Lance table", "from_lance"),
    (
        ".metadata.json",
        re.compile(r"(.*?)/metadata/(?:v\d+|\d+-[0-9a-fA-F-]{36})(?:\.gz)?\.metadata\.json(?:\.gz)?"),
        "Iceberg table",
        "from_iceberg",
    ),
)


def refuse_tables(store: Store, folder: str, paths: Sequence[str]) -> None:
    """Raise FormatError if a folder is a table or contains one: some of its files hold deleted rows."""
    for text, pattern, noun, function in _MARKS:
        for path in paths:
            if text in path and (match := pattern.fullmatch(path)) is not None:
                table = store.name(match[1])
                which = "is a" if match[1].rstrip("/") == folder.rstrip("/") else f"contains {table}, a"
                article = which + ("n" if noun.startswith("I") else "")
                raise FormatError(
                    f"{store.name(folder)} {article} {noun}. Its files contain rows that were deleted or replaced. "
                    f"Use midepoch.{function}({table!r}), or list the files one by one to read all of them."
                )
