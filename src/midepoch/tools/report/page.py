"""The page: one self-contained HTML file with its numbers."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from midepoch._internal.jsonable import to_jsonable

_NUMBERS = "/*numbers*/null"
_LIVE = "/*live*/false"


def render(found: dict[str, Any], *, live: bool = False) -> str:
    """Return the page of the contents from ``collect``. ``live``: it requests newer numbers from its server."""
    page = files("midepoch.tools.report").joinpath("page.html").read_text(encoding="utf-8")
    # "<" inside a script could end it, as part of the name of a file or column.
    numbers = json.dumps(to_jsonable(found), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace(_LIVE, "true" if live else "false", 1).replace(_NUMBERS, numbers, 1)
