"""The command line: ``midepoch audit``, ``midepoch plan``, …. Requires ``pip install "midepoch[cli]"``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command ``midepoch``."""
    try:
        from midepoch.cli.app import app
    except ModuleNotFoundError as problem:
        if problem.name not in ("typer", "rich"):
            raise
        sys.exit(f'the command line requires {problem.name}: pip install "midepoch[cli]"')
    app(prog_name="midepoch")  # also as python -m midepoch
