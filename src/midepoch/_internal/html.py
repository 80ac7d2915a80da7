"""HTML tables that represent datasets, loaders and states in notebooks."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_CELL = "text-align:left;padding:.15em .9em .15em 0;vertical-align:top"


_LONGEST = 60  # characters of a value
_SIZE = 64  # pixels of a thumbnail


def table(title: str, rows: Mapping[str, Any], share: float | None = None, below: str = "") -> str:
    """Return a table of names and values. ``share`` is the filled fraction of a bar below the title.

    ``below``: HTML after the table.

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
    whole = f'<b>{escape(title)}</b>{bar}<table style="border:none">{cells}</table>{below}'
    return f'<div style="font-size:90%">{whole}</div>'


def preview(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of rows with the names of their columns. Values are cut, and images become thumbnails.

    >>> preview([{"id": 1, "text": "a < b"}])
    '<table...id...text...1...a &lt; b...</table>'
    """
    if not rows:
        return ""
    head = "".join(f'<th style="{_CELL}">{escape(str(name))}</th>' for name in rows[0])
    cells = ("".join(f'<td style="{_CELL}">{_shown(value)}</td>' for value in row.values()) for row in rows)
    return f'<table style="border:none"><tr>{head}</tr>{"".join(f"<tr>{each}</tr>" for each in cells)}</table>'


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return _thumbnail(value["bytes"]) or _shown(value["path"] or value["bytes"])
    if isinstance(value, list) and len(value) > _LONGEST:
        value = value[:_LONGEST]  # most are too long to be read
    text = value if isinstance(value, str) else f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value)
    return escape(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")


def _thumbnail(data: Any) -> str | None:
    try:
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            image.thumbnail((_SIZE, _SIZE))
            file = io.BytesIO()
            image.convert("RGB").save(file, "PNG")
    except Exception:  # without Pillow, sounds, damaged images: decoders raise anything
        return None
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
