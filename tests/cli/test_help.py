"""Help of the command line: it says what the commands take, and imports neither their work nor their libraries."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from midepoch.cli.app import COMMANDS, app

PANELS = {function.__name__: panel for panel, functions in COMMANDS.items() for function in functions}
SCRIPT = """
import json, os, sys
import midepoch.cli.app
for command in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    sys.argv = ["midepoch", *filter(None, [command]), "--help"]
    try:
        from midepoch.cli import main
        main()
    except SystemExit as ended:
        assert not ended.code
    print(json.dumps([command, *sorted(name for name in sys.modules if "." not in name)]), flush=True)
    os._exit(0)
"""
HEAVY = {"numpy", "pyarrow", "torch", "datasets", "markdown_it"}


def test_help_imports_nothing_heavy() -> None:
    """Of each command in a fork of a process that has imported the list of commands."""
    commands = ["", *PANELS]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *commands], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [command for command, *_ in found] == commands
    for command, *names in found:
        modules = set(names)
        assert "typer" in modules and not modules & HEAVY, command
        assert command or "pydantic" not in modules  # with which typer itself reads arguments, in 0.05 s


@pytest.mark.parametrize("command", PANELS)
def test_help_names_every_argument_and_option(command: str) -> None:
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "ignored", "--help"]).stdout
    text = re.sub(r"\n {4,}", " ", text)  # lines that were folded
    parameters = get_command(app).commands[command].params
    usage = text.splitlines()[0]
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            assert parameter.name in usage.lower()  # DATA, or {data} in newer versions of typer
            assert (f"[{parameter.name}" in usage.lower()) is not parameter.required
            assert re.search(
                rf"^  {parameter.name}\b.*{re.escape(parameter.help[:40])}", text, re.IGNORECASE | re.MULTILINE
            )
        else:
            [line] = [
                line for line in text.splitlines() if re.match(rf"  (-\w, )?{max(parameter.opts, key=len)} ", line)
            ]
            names = (*parameter.opts, *parameter.secondary_opts)
            assert all(re.search(rf"(^|[ ,]){name}([ ,]|$)", line) for name in names)
            assert ("[required]" in line) is bool(parameter.required) and parameter.help[:40] in line
    named = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))
    assert named == {name for parameter in parameters for name in parameter.opts if name.startswith("--")} | {"--help"}
    assert f"Examples:\n  midepoch {command}" in text


@pytest.mark.parametrize("command", PANELS)
def test_the_list_has_the_first_line_of_each_command(command: str) -> None:
    (function,) = (one for one in COMMANDS[PANELS[command]] if one.__name__ == command)
    first = " ".join(inspect.cleandoc(function.__doc__).split("\n\n")[0].split())
    listed = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["--help"]).stdout
    panel = listed.partition(f"\n{PANELS[command]}:\n")[2].partition("\n\n")[0]
    assert f"{command} {first}" in " ".join(panel.split())


def test_python_m_midepoch() -> None:
    command = [sys.executable, "-m", "midepoch"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("Usage: midepoch [OPTIONS] COMMAND")
    done = subprocess.run([*command, "pek"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "No such command 'pek'" in done.stderr


def test_the_option_format_lists_all_formats() -> None:
    from midepoch.cli.data import Format
    from midepoch.sources.names import FORMATS

    assert str(Format.__metadata__[0].help).endswith(f": {', '.join(FORMATS)}.")
