"""``midepoch doctor``: problems of this machine for training, and their solutions."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.table import Table

from midepoch.cli import common

_COLOURS = {"good": "green", "mind": "yellow", "bad": "red"}


def doctor(as_json: common.AsJson = False) -> None:
    """Check versions, limits on files and memory, caches, and settings that often go wrong.

    Exits with 1 if something will not work.

    [bold]midepoch doctor[/]

    [bold]midepoch doctor --json > machine.json[/]
    """
    from midepoch.tools.doctor import examine

    findings = examine()
    if as_json:
        common.print_json([asdict(one) for one in findings])
    else:
        table = Table("", "what", "found", "what to do")
        for one in findings:
            table.add_row(common.styled(one.verdict, _COLOURS[one.verdict]), one.what, one.found, one.remedy)
        common.console.print(table)
    if any(one.verdict == "bad" for one in findings):
        raise typer.Exit(1)
