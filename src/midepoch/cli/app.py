"""The command ``midepoch``: the list of its commands, which are in files of their own and imported when they run."""

from __future__ import annotations

import re
import sys
import textwrap
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from midepoch import __version__


class _Entry(NamedTuple):
    """A command in the list: its module in ``midepoch.cli``, its panel, and the first line of its help."""

    module: str
    panel: str
    help: str


_DATA, _STATES, _RUNS, _MACHINE = "Data", "States and checkpoints", "Runs", "This machine"

# The first lines are repeated here, so that the list needs no import of numpy and pyarrow: 0.1 s instead of 0.9.
COMMANDS = {
    "info": _Entry("info", _DATA, "Show files, blocks, rows, bytes, columns, and the distribution of rows."),
    "peek": _Entry("info", _DATA, "Show rows at a position, as a training run would get them, and their files."),
    "index": _Entry("machine", _DATA, "Create the index of some data, with progress, or check the existing one."),
    "bench": _Entry(
        "machine",
        _DATA,
        "Measure rows/s and GB/s by workers and batch size, beside the limit of the machine, and recommend a setting.",
    ),
    "inspect": _Entry(
        "inspect", _STATES, "Describe a state or checkpoint: epoch, percent, next file and row, steps left."
    ),
    "diff": _Entry(
        "inspect",
        _STATES,
        "Show the differences between two states, or a state and a dataset, and whether it would resume.",
    ),
    "verify": _Entry("inspect", _STATES, "Read every byte of a folder of checkpoints, and report damaged steps."),
    "plan": _Entry(
        "plan",
        _STATES,
        "Show the effect of a resume: the next rows, steps left, reads of each machine. Or what a schedule will "
        "consume.",
    ),
    "report": _Entry(
        "runs",
        _RUNS,
        "Draw runs or a dataset: speed, progress, consumption, restarts, layout, shuffle quality. One HTML file.",
    ),
    "watch": _Entry(
        "runs",
        _RUNS,
        "Show runs in progress, live: the page of midepoch report, by default only on this machine.",
    ),
    "audit": _Entry(
        "runs", _RUNS, "Prove from its ledger what a run has seen: rows delivered once, more than once, never."
    ),
    "doctor": _Entry(
        "machine", _MACHINE, "Check versions, limits on files and memory, caches, and settings that often go wrong."
    ),
    "demo": _Entry(
        "machine",
        _MACHINE,
        "Train a small model, kill it in mid-epoch, resume with other workers, and prove that nothing was lost.",
    ),
}

_OPTIONS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 120},
}


class _Commands(TyperGroup):  # type: ignore[misc]
    """The commands. Errors about their arguments are printed without the credentials in them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, entry in COMMANDS.items():  # for the list and for completion; resolve_command imports them
            self.add_command(TyperCommand(name, help=entry.help, rich_markup_mode=None))

    def format_commands(self, _: Any, formatter: Any) -> None:
        for panel in dict.fromkeys(entry.panel for entry in COMMANDS.values()):
            with formatter.section(panel):
                entries = [(name, entry.help) for name, entry in COMMANDS.items() if entry.panel == panel]
                formatter.write_dl(entries, col_spacing=2)

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        name, _, rest = super().resolve_command(context, arguments)
        return name, None if name is None else runnable(name), rest

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except Exception as problem:
            if isinstance(getattr(problem, "message", None), str):  # typer's own errors, about the arguments
                from midepoch.storage.redaction import Secrets

                given = [argument.removeprefix("--storage=").partition("=") for argument in sys.argv[1:]]
                secrets = Secrets.of({name: value for name, sign, value in given if sign})
                problem.message = secrets.clean(problem.message)  # type: ignore[attr-defined]
            raise


class _Command(TyperCommand):  # type: ignore[misc]
    """A command. The examples are those paragraphs of its description that begin with ``midepoch``."""

    def format_epilog(self, _: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for text in self.epilog.splitlines():  # a long one continues on the next line, as a shell reads it
                room = {"width": formatter.width - 2, "break_long_words": False, "break_on_hyphens": False}
                before = " " * formatter.current_indent
                bound = re.sub(r"( -\S+) (?=[^-])", "\\1\xa0", text)  # an option, and its value
                lines = textwrap.wrap(bound, initial_indent=before, subsequent_indent=3 * before, **room)
                formatter.write(" \\\n".join(lines).replace("\xa0", " ") + "\n")


def runnable(name: str) -> Any:
    """Return a command with its arguments, from its module."""
    from midepoch.cli.common import explained

    function = getattr(import_module(f"midepoch.cli.{COMMANDS[name].module}"), name)
    paragraphs = [" ".join(text.split()) for text in function.__doc__.split("\n\n")]
    examples = [text for text in paragraphs if text.startswith("midepoch ")]
    description = "\n\n".join(text for text in paragraphs if text not in examples)
    alone = typer.Typer(add_completion=False, **_OPTIONS)
    alone.command(name, cls=_Command, help=description, epilog="\n".join(examples))(explained(function))
    return typer.main.get_command(alone)


app = typer.Typer(cls=_Commands, no_args_is_help=True, **_OPTIONS)


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
