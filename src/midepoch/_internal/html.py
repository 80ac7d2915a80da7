"""HTML table that represents datasets, loaders and states in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

_CELL = "text-align:left;padding:.15em .9em .15em 0;vertical-align:top"


def table(title: str, rows: Mapping[str, Any], share: float | None = None) -> str:
    """Return a table of names and values. ``share`` is the filled fraction of a bar below the title.

    >>> table("Loader", {"rows": "1 < 2"})
    '<div ...<b>Loader</b>...rows...1 &lt; 2...</div>'
    """
    bar = ""
    if share is not None:
        percent = 100 * min(1.0, max(0.0, share))
        bar = (
            '<div style="background:rgba(127,127,127,.25);border-radius:3px;height:6px;width:20em;margin:.3em 0">'
            f'<div style="background:#3b82f6;border-radius:3px;height:6px;width:{percent:.2f}%"></div></div>'
        )
    cells = "".join(
        f'<tr><td style="{_CELL};opacity:.7">{escape(str(name))}</td><td style="{_CELL}">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f'<div style="font-size:90%"><b>{escape(title)}</b>{bar}<table style="border:none">{cells}</table></div>'
