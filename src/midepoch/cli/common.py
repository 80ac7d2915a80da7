"""Output and exit status of all commands (0: success, 1: a problem was found, 2: an error)."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from midepoch._internal.values import to_jsonable
from midepoch.errors import MidepochError
from midepoch.storage.address import redacted

_LEAST = 12
"""Minimum characters of a text column. A table that would have less is printed as a list of its rows."""


class _Console(Console):  # type: ignore[misc]
    """Console as wide as the terminal, or as ``COLUMNS`` at the time when something is printed, also in a pipe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(soft_wrap=True, highlight=False, markup=False, **options)
        self._width = options.get("width")  # without COLUMNS at the time of the import

    @property
    def size(self) -> ConsoleDimensions:
        found, columns = super().size, os.environ.get("COLUMNS", "")
        width = self._width or (int(columns) if columns.isdecimal() else 0) or found.width
        return ConsoleDimensions(width, found.height)


console, errors = _Console(), _Console(stderr=True)


def say(*parts: Any, to: _Console | None = None) -> None:
    """Print a line of texts, each plain or with a style: ("refused", "red"). They are wrapped between words.

    A longer word, such as an address, stays in one piece.
    """
    to = to or console
    lines: list[Text] = []
    for line in Text.assemble(*map(_cell, parts)).split("\n", allow_blank=True):
        first, breaks = 0, []
        for word in re.finditer(r"\S+", line.plain):
            if word.end() - first > to.width and line.plain[first : word.start()].strip():
                first = word.start()
                breaks.append(first)
        lines += line.divide(breaks)
    for line in lines:
        line.rstrip()
    to.print(Text("\n").join(lines))


def print_table(
    rows: Iterable[Mapping[str, Any] | None],
    *,
    title: str = "",
    right: Collection[str] = (),
    header: bool = True,
    most: int | None = None,
) -> None:
    """Print rows, each a value by the name of its column. None is a line between rows.

    Nothing is truncated: numbers stay on one line, and texts are folded. A table for which the console is too narrow is
    printed as a list of its rows. Columns of integers, and those in ``right``, are aligned to the right. Without a
    ``header`` the first column has names, which are folded if the other columns have no room beside them. ``most``:
    number of rows to print.
    """
    every = list(rows)
    rows = every[:most]
    if not (names := list(next(filter(None, rows), ()))):
        return
    if title:
        say((title, "italic"))
    cells = {name: [_cell(row[name]) for row in rows if row] for name in names}
    whole = {name for name in names if name in right or all(type(row[name]) is int for row in rows if row)}
    widths = {name: max(map(_width, [_cell(name if header else ""), *cells[name]])) for name in names}
    lines = {padding: 1 + (1 + 2 * padding) * len(names) for padding in (1, 0)}
    others = sum(min(widths[name], _LEAST) for name in names[1:])
    whole |= set() if header or widths[names[0]] + others + lines[0] > console.width else {names[0]}
    least = sum(widths[name] if name in whole else min(widths[name], _LEAST) for name in names)
    padding = next((padding for padding in lines if least + lines[padding] <= console.width), None)
    if padding is None and header:
        items = ([*({"name": name, "value": row[name]} for name in names), None] for row in rows if row)
        print_table([item for row in items for item in row], header=False)
    else:
        table = Table(show_header=header, padding=(0, padding or 0))
        table.width = console.width if sum(widths.values()) + lines[padding or 0] > console.width else None
        for number, name in enumerate(names):
            style, justify = "" if header or number else "bold", "right" if header and name in whole else "left"
            table.add_column(name, style=style, justify=justify, no_wrap=name in whole, overflow="fold")
        for row in rows:
            if row is None:
                table.add_section()
            else:
                table.add_row(*(_cell(row[name]) for name in names))
        console.print(table)
    if len(every) > len(rows):
        say(f"… and {len(every) - len(rows):,} more (all of them with --json)")


def _cell(value: Any) -> Text:
    """Return a value, or a value with a style, literally: without markup, and with control characters escaped."""
    if isinstance(value, Text):
        return value
    value, style = value if isinstance(value, tuple) else (value, "")
    return Text(f"{value:,}" if type(value) is int else "" if value is None else printable(str(value)), style)


def _width(cell: Text) -> int:
    return max(int(line.cell_len) for line in cell.split("\n", allow_blank=True))


def short(value: Any, most: int) -> str:
    """Return a value as text, cut if it is longer than some characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """Escape control characters of the terminal.

    >>> printable("a\\x1b]0;b\\n")
    'a\\\\x1b]0;b\\n'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


class Answer(NamedTuple):
    """The result of a command: JSON-able, and a function that prints it. ``bad``: it is a problem (exit status 1)."""

    value: Any
    show: Callable[[], None]
    bad: bool = False


def command(function: Callable[..., Answer | None]) -> Callable[..., None]:
    """Return a function as typer takes it: one that returns an Answer has an option ``--json``.

    Errors are printed as a line instead of a traceback. ``MIDEPOCH_DEBUG=1`` shows the traceback.
    """

    @functools.wraps(function)
    def run(*arguments: Any, as_json: bool = False, **options: Any) -> None:
        try:
            answer = function(*arguments, **options)
            if answer is None:
                return
            if as_json:
                sys.stdout.write(json.dumps(to_jsonable(answer.value), indent=2) + "\n")
            else:
                answer.show()
        except (typer.Exit, typer.Abort):
            raise
        except Exception as problem:
            if os.environ.get("MIDEPOCH_DEBUG"):
                raise
            message = isinstance(problem, (MidepochError, ValueError, TypeError, OSError, ImportError)) and str(problem)
            text = redacted(message or f"{type(problem).__name__}: {problem}")
            sys.stderr.write(f"midepoch: {printable(text)}\n")
            raise typer.Exit(2) from None
        if answer.bad:
            raise typer.Exit(1)

    signature = inspect.signature(function, eval_str=True)
    if signature.return_annotation is Answer:
        as_json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_AS_JSON)
        signature = signature.replace(parameters=[*signature.parameters.values(), as_json])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


_AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
