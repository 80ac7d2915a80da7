"""The command ``midepoch``: one line for each of its commands, which are in files of their own."""

from __future__ import annotations

import typer

from midepoch.cli.audit import audit
from midepoch.cli.common import explained
from midepoch.cli.plan import plan

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Training data from where it lies, resumed exactly, at once, on any shape of cluster.",
)
app.command("audit")(explained(audit))
app.command("plan")(explained(plan))
