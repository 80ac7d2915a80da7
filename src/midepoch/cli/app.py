"""The command ``midepoch``: one line for each of its commands, which are in files of their own."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from midepoch import __version__
from midepoch._internal.redaction import Secrets
from midepoch.cli.audit import audit
from midepoch.cli.bench import bench
from midepoch.cli.common import explained
from midepoch.cli.demo import demo
from midepoch.cli.doctor import doctor
from midepoch.cli.index import index
from midepoch.cli.info import info
from midepoch.cli.inspect import diff, inspect, verify
from midepoch.cli.peek import peek
from midepoch.cli.plan import plan
from midepoch.cli.report import report, watch


class _Commands(TyperGroup):  # type: ignore[misc]
    """The commands. Errors about their arguments are printed without the credentials in them."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except Exception as problem:
            if isinstance(getattr(problem, "message", None), str):  # typer's own errors, about the arguments
                given = [argument.removeprefix("--storage=").partition("=") for argument in sys.argv[1:]]
                secrets = Secrets.of({name: value for name, sign, value in given if sign})
                problem.message = secrets.clean(problem.message)  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PANELS: dict[str, tuple[Any, ...]] = {
    "Data": (info, peek, index, bench),
    "States and checkpoints": (inspect, diff, verify, plan),
    "Runs": (report, watch, audit),
    "This machine": (doctor, demo),
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(command.__name__, rich_help_panel=panel)(explained(command))


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
