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
        matches = {path: match[1] for path in paths if text in path and (match := pattern.fullmatch(path)) is not None}
        if matches:
            marks = [path for path, root in matches.items() if root == min(matches.values())]
            root = matches[marks[0]]
            article = "an" if noun.startswith("I") else "a"
            which = f"is {article}" if root == folder.rstrip("/") else f"contains {store.name(root)}, {article}"
            opened = store.name(max(marks) if noun.startswith("I") else root)
            raise FormatError(
                f"{store.name(folder)} {which} {noun}. Its files contain rows that were deleted or replaced. "
                f"Use midepoch.{function}({opened!r}), or list the files one by one to read all of them."
            )
