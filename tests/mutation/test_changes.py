"""The changes of mutation testing: each is another program, and a test that notices it ends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutation import __main__ as mutation

CODE = """
def halves(numbers, limit=10):
    found = []
    for number in numbers:
        if number < limit and not number % 2:
            found.append(number // 2)
    return found
"""


def made(number: int) -> str:
    tree = ast.parse(CODE)
    list(mutation.changes(tree, number))
    return ast.unparse(ast.fix_missing_locations(mutation._Taken().visit(tree)))


def test_every_change_is_another_program_and_is_named_by_its_line() -> None:
    known = list(mutation.changes(ast.parse(CODE)))
    programs = [made(one.number) for one in known]
    assert len({*programs, ast.unparse(ast.parse(CODE))}) == len(known) + 1
    lines, original = CODE.splitlines(), ast.unparse(ast.parse(CODE)).splitlines()
    for one, program in zip(known, programs, strict=True):
        changed = [number for number, line in enumerate(program.splitlines(), 2) if line != original[number - 2]]
        assert changed == [one.line], (one.before, one.after)
        assert one.before.removeprefix("if ").replace("(", "").replace(")", "") in lines[one.line - 1]
    assert {(one.before, one.after) for one in known} >= {
        ("number < limit", "number <= limit"), ("not number % 2", "number % 2"), ("10", "11"),
        ("number < limit and (not number % 2)", "number < limit or not number % 2"),
    }  # fmt: skip


@pytest.mark.parametrize(("body", "passes"), [("assert len(Lanes.name) > 2", True), ("while True: pass", False)])
def test_a_test_that_does_not_end_notices_a_change(body: str, passes: bool, tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text(f"class Lanes:\n    name = 'lanes'\n\n\ndef test_it():\n    {body}\n")
    changed = mutation.PACKAGE / "order" / "intervals.py"
    assert mutation.survives(changed, 0, [str(path)], 20.0 if passes else 3.0) is passes
