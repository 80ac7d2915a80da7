"""The page: one HTML file that needs nothing else, with its numbers inside."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from midepoch._internal.jsonable import to_jsonable

_NUMBERS = "/*numbers*/null"
_LIVE = "/*live*/false"


def render(found: dict[str, Any], *, live: bool = False) -> str:
    """The page of what ``collect`` found. ``live``: it asks where it came from for newer numbers."""
    page = files("midepoch.tools.report").joinpath("page.html").read_text(encoding="utf-8")
    # "<" inside of a script could end it, whatever a file or column is called.
    numbers = json.dumps(to_jsonable(found), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace(_LIVE, "true" if live else "false", 1).replace(_NUMBERS, numbers, 1)
