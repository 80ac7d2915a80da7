"""The page: one self-contained HTML file with its numbers."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from midepoch._internal.hints import hinted
from midepoch._internal.jsonable import to_jsonable

_NUMBERS = "/*numbers*/null"
_LIVE = "/*live*/false"
_STYLE = "/*style*/"
_SCRIPT = "/*script*/"


@hinted()
def render(found: dict[str, Any], *, live: bool = False) -> str:
    """Return the page of the contents from ``collect``. ``live``: it requests newer numbers from its server."""
    # "<" inside a script could end it, as part of the name of a file or column.
    numbers = json.dumps(to_jsonable(found), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _part("page.html")
    for mark, part in (
        (_STYLE, _part("page.css")),
        (_SCRIPT, _part("draw.js") + _part("page.js")),
        (_LIVE, "true" if live else "false"),
        (_NUMBERS, numbers),  # last: they may contain any text
    ):
        page = page.replace(mark, part, 1)
    return page


def _part(name: str) -> str:
    return files("midepoch.tools.report").joinpath(name).read_text(encoding="utf-8")
