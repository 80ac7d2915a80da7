"""Output, help and exit status of all commands (0: success, 1: a problem was found, 2: an error)."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console, ConsoleDimensions
from rich.markup import render
from rich.measure import measure_renderables
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
    """Console that prints names and values literally, without markup, and with control characters escaped.

    Everything is as wide as the terminal, or as ``COLUMNS``, also in a pipe. Nothing is truncated: numbers stay on one
    line, texts are folded, and sentences are wrapped between words.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._width = options.get("width")  # without COLUMNS at the time of the import

    @property
    def size(self) -> ConsoleDimensions:
        """The width and height. ``COLUMNS`` counts when something is printed, and also for a terminal without codes."""
        found, columns = super().size, os.environ.get("COLUMNS", "")
        width = self._width or (int(columns) if columns.isdecimal() else 0) or found.width
        return ConsoleDimensions(width, found.height)

    def print(self, *objects: Any, **options: Any) -> None:
        for each in objects:
            if isinstance(each, Table):
                if each.title:
                    self.print(Text(printable(str(each.title)), "italic"))
                each.title = None
                super().print(self._fit(each), **options)
            else:
                text = each if isinstance(each, Text) else Text(printable(each))
                super().print(_wrapped(text, self.width), **options)

    def _fit(self, table: Table) -> Table:
        """Return a table that is no wider than the console: with less space, folded texts, or as a list of its rows."""
        widths, least = [], []
        unlimited = self.options.update(max_width=1_000_000)
        for column in table.columns:
            column.overflow = "fold"
            column.no_wrap = column.no_wrap or column.justify == "right"
            cells = [text for text in (column.header, *column.cells) if text]
            widths.append(measure_renderables(self, unlimited, cells).maximum if cells else 0)
            least.append(widths[-1] if column.no_wrap else min(widths[-1], _LEAST))
        for padding in (1, 0):
            table.padding, lines = (0, padding), 1 + (1 + 2 * padding) * len(widths)
            if sum(widths) + lines <= self.width:
                return table
            if sum(least) + lines <= self.width:
                table.width = self.width
                return table
        return _as_list(table)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def _wrapped(text: Text, width: int) -> Text:
    """Return a text with new lines between its words. A longer word, such as an address, stays in one piece."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        first, breaks = 0, []
        for word in re.finditer(r"\S+", line.plain):
            if word.end() - first > width and line.plain[first : word.start()].strip():
                first = word.start()
                breaks.append(first)
        lines += line.divide(breaks)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _as_list(table: Table) -> Table:
    """Return a table of two columns: the header and the value of each cell, row after row."""
    made = Table(show_header=False, padding=(0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, cells, strict=True):
            made.add_row(column.header, cell)
        made.add_section()
    return made


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
