"""Output, help and exit status of all commands (0: success, 1: a problem was found, 2: an error)."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console, ConsoleDimensions
from rich.markup import render
from rich.table import Table
from rich.text import Text
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from midepoch._internal.values import to_jsonable
from midepoch.errors import MidepochError
from midepoch.storage.redaction import redacted

F = TypeVar("F", bound=Callable[..., Any])


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
    ``header`` the first column has names. ``most``: number of rows to print.
    """
    every = list(rows)
    rows = every[:most]
    if not (names := list(next(filter(None, rows), ()))):
        return
    if title:
        say((title, "italic"))
    cells = {name: [_cell(row[name]) for row in rows if row] for name in names}
    whole = {name for name in names if name in right or all(type(row[name]) is int for row in rows if row)}
    whole |= set() if header else {names[0]}
    widths = {name: max(map(_width, [_cell(name if header else ""), *cells[name]])) for name in names}
    least = sum(widths[name] if name in whole else min(widths[name], _LEAST) for name in names)
    lines = {padding: 1 + (1 + 2 * padding) * len(names) for padding in (1, 0)}
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


def printable(text: str) -> str:
    """Escape control characters of the terminal.

    >>> printable("a\\x1b]0;b\\n")
    'a\\\\x1b]0;b\\n'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


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


_TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
_PROGRAM = "midepoch "


class _Parameter(NamedTuple):
    """An argument or option: as it is typed, and what is said about it."""

    typed: str
    help: str
    is_option: bool


def write_help(command: Callable[..., Any], name: str, formatter: Any) -> None:
    """Write the usage, description, arguments, options and examples of a command."""
    parameters = list(_parameters(command))
    arguments = [one for one in parameters if not one.is_option]
    options = [one for one in parameters if one.is_option]
    formatter.write_usage(_PROGRAM + name, " ".join(["[OPTIONS]", *(one.typed for one in arguments)]))
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    texts = [render(" ".join(paragraph.split())).plain for paragraph in paragraphs]
    for text in (text for text in texts if not text.startswith(_PROGRAM)):
        formatter.write_paragraph()
        formatter.write_text(text)
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl([(one.typed.strip("[]"), one.help) for one in arguments])
    with formatter.section("Options"):
        formatter.write_dl([*((one.typed, one.help) for one in options), ("-h, --help", "Show this message and exit.")])
    if examples := [text for text in texts if text.startswith(_PROGRAM)]:
        with formatter.section("Examples"):
            for text in examples:  # a long one continues on the next line, as a shell reads it
                room = {"width": formatter.width - 2, "break_long_words": False, "break_on_hyphens": False}
                before = " " * formatter.current_indent
                bound = re.sub(r"( -\S+) (?=[^-])", "\\1\xa0", text)  # an option, and its value
                lines = textwrap.wrap(bound, initial_indent=before, subsequent_indent=3 * before, **room)
                formatter.write(" \\\n".join(lines).replace("\xa0", " ") + "\n")


def _parameters(command: Callable[..., Any]) -> Iterator[_Parameter]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        annotation, *about = get_args(hints[name])
        info = next(one for one in about if isinstance(one, ParameterInfo))
        value = next((_TYPES[one] for one in _leaves(annotation) if one in _TYPES), None)
        required = parameter.default is inspect.Parameter.empty
        repeated = "list[" in str(annotation)
        notes = [*_bounds(info), *([] if required or repeated else _default(parameter.default, info))]
        if isinstance(info, ArgumentInfo):
            typed = f"{info.metavar or name.upper()}{'...' * repeated}"
            yield _Parameter(typed if required else f"[{typed}]", " ".join([info.help or "", *notes]), False)
            continue
        assert isinstance(info, OptionInfo)
        flag = "--" + name.replace("_", "-")
        names = _declared(info) or ([flag] if value else [f"{flag} / --no-{flag[2:]}"])
        typed = f"{', '.join(sorted(names, key=len))} {value or ''}".strip()
        yield _Parameter(typed, " ".join([info.help or "", *notes, *["[required]"] * required]), True)


def _declared(info: ParameterInfo) -> list[str]:
    """Return the names that were given to an option. In ``Annotated``, typer takes the first one for a default."""
    return [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]


def _leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation is made of: ``list[str] | None`` is of str."""
    inner = [one for one in get_args(annotation) if one is not NoneType]
    if not inner:
        yield annotation
    for one in inner:
        yield from _leaves(one)


def _bounds(info: ParameterInfo) -> list[str]:
    least, most = (f"{bound:g}" if bound is not None else None for bound in (info.min, info.max))
    if least is not None and most is not None:
        return [f"[{least} to {most}]"]
    return [f"[at least {least}]"] if least is not None else [f"[at most {most}]"] if most is not None else []


def _default(default: Any, info: ParameterInfo) -> list[str]:
    if default is None or info.show_default is False or re.search(r"\[default|Default:", info.help or ""):
        return []
    if isinstance(default, bool):
        return [f"[default: {'yes' if default else 'no'}]"] if not _declared(info) else []
    return [f"[default: {default}]"]
