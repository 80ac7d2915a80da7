"""Calling the commands in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from midepoch.cli.app import app


def call(*arguments: Any, columns: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])


def of_json(*arguments: Any) -> Any:
    found = call(*arguments, "--json")
    assert found.exit_code in (0, 1), found.output + found.stderr
    return json.loads(found.stdout)


def refused(*arguments: Any) -> str:
    found = call(*arguments)
    assert found.exit_code == 2 and not found.stdout, found.output
    return found.stderr
