"""What all commands share: how they print, and how they end (0: all is well, 1: something was found, 2: an error)."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from midepoch.errors import MidepochError

F = TypeVar("F", bound=Callable[..., Any])

console = Console(soft_wrap=True, highlight=False)
errors = Console(stderr=True, soft_wrap=True, highlight=False)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def explained(command: F) -> F:
    """Errors of midepoch, and bad arguments, as a line instead of a traceback."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except (MidepochError, ValueError, TypeError, OSError, ImportError) as problem:
            sys.stderr.write(f"midepoch: {problem}\n")
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def bytes_text(size: float) -> str:
    """In words.

    >>> bytes_text(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
