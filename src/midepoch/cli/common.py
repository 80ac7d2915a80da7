"""Output and exit status of all commands (0: success, 1: a problem was found, 2: an error)."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.measure import measure_renderables
from rich.table import Table
from rich.text import Text

from midepoch._internal.jsonable import to_jsonable
from midepoch._internal.redaction import redacted
from midepoch.errors import MidepochError

F = TypeVar("F", bound=Callable[..., Any])


_LEAST = 12
"""Minimum characters of a text column, before a table gets wider than the terminal."""


class _Console(Console):  # type: ignore[misc]
    """Console that prints names and values literally, without markup, and with control characters escaped.

    Nothing in a table is truncated. Numbers stay on one line, texts are folded, and in a pipe or file tables have their
    full width.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        for each in objects:
            if isinstance(each, Table):
                self._fit(each)
        super().print(*objects, **options)

    def _fit(self, table: Table) -> None:
        natural = least = 1
        unlimited = self.options.update(max_width=1_000_000)
        for column in table.columns:
            column.overflow = "fold"
            column.no_wrap = column.no_wrap or column.justify == "right"
            cells = [text for text in (column.header, *column.cells) if text]
            width = measure_renderables(self, unlimited, cells).maximum if cells else 0
            natural += width + 3
            least += (width if column.no_wrap else min(width, _LEAST)) + 3
        if natural > self.width:
            table.width = max(self.width, least) if self.is_terminal else natural

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    """Escape control characters of the terminal.

    >>> printable("a\\x1b]0;b\\n")
    'a\\\\x1b]0;b\\n'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


console = _Console(soft_wrap=True, highlight=False, markup=False)
errors = _Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def explained(command: F) -> F:
    """Print errors as a line instead of a traceback. ``MIDEPOCH_DEBUG=1`` shows the traceback."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as problem:
            if os.environ.get("MIDEPOCH_DEBUG"):
                raise
            message = isinstance(problem, (MidepochError, ValueError, TypeError, OSError, ImportError)) and str(problem)
            text = redacted(message or f"{type(problem).__name__}: {problem}")
            sys.stderr.write(f"midepoch: {printable(text)}\n")
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(to_jsonable(value), indent=2) + "\n")


def say(*parts: str | tuple[str, str]) -> None:
    """Print a line of texts, each plain or with a style."""
    console.print(Text.assemble(*((printable(part), "") if isinstance(part, str) else part for part in parts)))


def styled(text: str, style: str) -> Text:
    """Return a text in a colour."""
    return Text(printable(text), style)


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    >>> counted(1, "file"), counted(2000, "file")
    ('1 file', '2,000 files')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def bytes_text(size: float) -> str:
    """Return a size in words.

    >>> bytes_text(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
