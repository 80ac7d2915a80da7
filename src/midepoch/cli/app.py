"""The command ``midepoch``: the list of its commands, which import what they need when they run.

So the list needs neither numpy nor pyarrow: 0.2 s instead of 0.9.
"""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from midepoch import __version__
from midepoch.cli.common import command
from midepoch.cli.info import info, peek
from midepoch.cli.inspect import diff, inspect, verify
from midepoch.cli.machine import bench, demo, doctor, index
from midepoch.cli.plan import plan
from midepoch.cli.runs import audit, report, watch
from midepoch.storage.address import Secrets

COMMANDS: dict[str, tuple[Any, ...]] = {
    "Data": (info, peek, index, bench),
    "States and checkpoints": (inspect, diff, verify, plan),
    "Runs": (report, watch, audit),
    "This machine": (doctor, demo),
}
"""Commands by panel of the list."""


_INSTEAD = {
    "--rows": "-n, --row",
    **dict.fromkeys(("--limit", "--num", "--count", "--head"), "-n"),
    **dict.fromkeys(("head", "show", "cat", "view", "print", "sample", "rows"), "peek"),
    **dict.fromkeys(("stats", "schema", "describe", "ls", "list"), "info"),
    **dict.fromkeys(("state", "checkpoint", "checkpoints"), "inspect"),
    **dict.fromkeys(("check", "validate"), "verify"),
    "prove": "audit",
    "serve": "watch",
}
"""Options and commands of other programs, and those of this one."""


class _Commands(TyperGroup):  # type: ignore[misc]
    """The commands. Errors about their arguments are printed without the credentials in them."""

    def format_commands(self, _: Any, formatter: Any) -> None:
        for panel, functions in COMMANDS.items():
            with formatter.section(panel):
                entries = [self.commands[function.__name__] for function in functions]
                formatter.write_dl([(one.name, one.help.partition("\n")[0]) for one in entries], col_spacing=2)

    def parse_args(self, context: Any, arguments: list[str]) -> Any:
        if arguments[:1] in (["version"], ["help"]):  # as commands of other programs
            arguments = [*arguments[1:2], f"--{arguments[0]}"]
        return super().parse_args(context, arguments)

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except Exception as problem:
            if isinstance(getattr(problem, "message", None), str):  # typer's own errors, about the arguments
                given = [argument.removeprefix("--storage=").partition("=") for argument in sys.argv[1:]]
                secrets = Secrets.of({name: value for name, sign, value in given if sign})
                problem.message = secrets.clean(problem.message) + _way_out(problem)  # type: ignore[attr-defined]
            raise


def _way_out(problem: Any) -> str:
    """Return what to type instead, for what people know from other programs. Nothing if it is not known."""
    text = problem.message
    if (option := getattr(problem, "option_name", "")) in _INSTEAD:
        problem.possibilities = _INSTEAD[option].split(", ")
    elif text.startswith("No such command"):
        wanted = _INSTEAD.get(text.split("'")[1])
        names = ", ".join(function.__name__ for functions in COMMANDS.values() for function in functions)
        return f" Did you mean {wanted}?" if wanted else "" if "Did you mean" in text else f" There are: {names}."
    elif text.startswith("Got unexpected extra argument"):
        if re.search(r"\.ya?ml\)", text):
            return ". A schedule needs the name of its option: --schedule FILE."
        return ". Other values need the name of an option, such as --checkpoint FOLDER or --step N: see --help."
    return ""


class _Command(TyperCommand):  # type: ignore[misc]
    """A command. The examples are those paragraphs of its description that begin with ``midepoch``."""

    def __init__(self, *rest: Any, help: str, **options: Any) -> None:
        paragraphs = [" ".join(text.split()) for text in help.split("\n\n")]
        self._examples = [text for text in paragraphs if text.startswith("midepoch ")]
        description = "\n\n".join(text for text in paragraphs if text not in self._examples)
        super().__init__(*rest, help=description, **options)

    def format_epilog(self, _: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for text in self._examples:  # a long one continues on the next line, as a shell reads it
                room = {"width": formatter.width - 2, "break_long_words": False, "break_on_hyphens": False}
                before = " " * formatter.current_indent
                bound = re.sub(r"( -\S+) (?=[^-])", "\\1\xa0", text)  # an option, and its value
                lines = textwrap.wrap(bound, initial_indent=before, subsequent_indent=3 * before, **room)
                formatter.write(" \\\n".join(lines).replace("\xa0", " ") + "\n")


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for _functions in COMMANDS.values():
    for _function in _functions:
        app.command(cls=_Command)(command(_function))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"midepoch {__version__}")
        raise typer.Exit


@app.callback()  # type: ignore[untyped-decorator]
def _midepoch(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Training data in place, resumed exactly and immediately, on any cluster size.

    Commands exit with 0 on success, 1 if they found a problem, and 2 on an error.
    """
