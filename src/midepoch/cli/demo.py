"""``midepoch demo``: train, kill, resume, prove."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    keep: Annotated[Path | None, typer.Option(help="Use and keep this folder instead of a temporary one.")] = None,
) -> None:
    """Train a small model, kill it in mid-epoch, resume with other workers, and prove that nothing was lost.

    Requires torch and datasets: pip install "midepoch\\[torch,hf,cli]".

    [bold]midepoch demo[/]
    """
    from midepoch.demo.__main__ import run

    if not run(keep):
        raise typer.Exit(1)
