"""Changes expressions of modules one at a time, runs tests, and lists the changes that no test noticed.

    python -m mutation order/turns.py order/intervals.py --tests order --count 50 --seed 1

Modules are paths in the package, tests are paths in ``tests``. Every change runs in a fork of a process that has
imported the libraries, and not the package.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src/midepoch"
TESTS = Path(__file__).parents[1]
LIBRARIES = ("numpy", "pyarrow.compute", "pyarrow.parquet", "torch", "rich.console")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Change:
    """A change of one node: ``number`` counts the changes of a module."""

    def __init__(self, number: int, line: int, before: str, after: str) -> None:
        self.number, self.line, self.before, self.after = number, line, before, after


def changes(tree: ast.Module, wanted: int = -1) -> Iterator[Change]:
    """Yield every change of a module. That with the number ``wanted`` is made in the tree."""
    number = 0
    for node in ast.walk(tree):
        for before, after, apply in _of(node):
            if number == wanted:
                apply()
            yield Change(number, getattr(node, "lineno", 0), before, after)
            number += 1


def _of(node: ast.AST) -> Iterator[tuple[str, str, Any]]:
    def replaced(field: str, value: Any) -> tuple[str, str, Any]:
        other = copy.deepcopy(node)
        setattr(other, field, value)
        return ast.unparse(node), ast.unparse(other), lambda: setattr(node, field, value)

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield replaced("ops", [SWAPS[type(node.ops[0])]()])
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS and not _is_text(node):
        yield replaced("op", SWAPS[type(node.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield replaced("value", node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield replaced("value", not node.value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield ast.unparse(node), ast.unparse(node.operand), lambda: setattr(node, "op", _Yes())
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        test = ast.UnaryOp(ast.Not(), node.test)
        ast.copy_location(test, node.test)
        text = ast.unparse(node.test)
        yield f"if {text}", f"if not ({text})", lambda: setattr(node, "test", test)


class _Yes(ast.Not):
    """Marks a ``not`` that is taken away: replaced by its operand before the tree is compiled."""


class _Taken(ast.NodeTransformer):
    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if isinstance(node.op, _Yes) else node


def _is_text(node: ast.AST) -> bool:
    """Return True for sums of texts, and for unions of types."""
    inside = list(ast.walk(node))
    return any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in inside)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a change."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._number = path, number
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        self._name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        tree = ast.parse(self._path.read_text())
        list(changes(tree, self._number))
        exec(compile(ast.fix_missing_locations(_Taken().visit(tree)), str(self._path), "exec"), module.__dict__)


def survives(path: Path, number: int, tests: list[str], seconds: float) -> bool:
    """Return True if the tests pass with a change. An endless loop is noticed."""
    pid = os.fork()
    if not pid:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.meta_path.insert(0, _Finder(path, number))
        os.chdir(TESTS.parent)
        code = 1
        try:
            import pytest

            code = int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header"]))
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", help="paths in the package")
    parser.add_argument("--tests", nargs="+", required=True, help="paths in tests, the quickest first")
    parser.add_argument("--count", type=int, default=1 << 30, help="draw this number of changes (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a run counts as noticed")
    args = parser.parse_args()
    for name in LIBRARIES:
        importlib.import_module(name)
    found: list[tuple[Path, Change]] = []
    for name in args.modules:
        path = PACKAGE / name
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found += [(each, change) for change in changes(ast.parse(each.read_text()))]
    drawn = random.Random(args.seed).sample(found, min(args.count, len(found)))
    tests, left = [str(TESTS / name) for name in args.tests], []
    if not survives(found[0][0], -2, tests, 10 * args.seconds):
        raise SystemExit("the tests fail without a change")
    print(f"{len(drawn)} of {len(found)} changes", flush=True)
    for number, (path, change) in enumerate(drawn, 1):
        if survives(path, change.number, tests, args.seconds):
            left.append(change)
            where = f"{path.relative_to(PACKAGE)}:{change.line}"
            print(f"{where}: {change.before:.100} -> {change.after:.100}", flush=True)
        if number % 25 == 0:
            print(f"{number} changes, {len(left)} not noticed", flush=True)
    print(json.dumps({"changes": len(drawn), "not noticed": len(left)}))


if __name__ == "__main__":
    main()
