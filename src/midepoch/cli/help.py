"""``midepoch COMMAND --help``, written from the signature of the command.

typer's own help needs pydantic, Markdown and tracebacks: 0.45 s of CPU time instead of 0.2.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from rich.markup import render
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

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
            for text in examples:
                formatter.write(f"{'':>{formatter.current_indent}}{text}\n")


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
