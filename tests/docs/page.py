"""The code of a page of the documentation: found, and run.

    python page.py PAGE [FOLDER OF PROGRAMS]

A page is Markdown. Its ```python blocks are run one after the other in one namespace, its ```bash blocks by bash, all of
them in the current folder. What a reader need not see stands in a comment:

    <!-- prepare
    tokenize = str.split
    -->

A ```text block right behind one that was run is what that one prints. A comment ``# → value`` behind a statement is the
value of the expression (or of the name that it is assigned to), or what it prints. "…" stands for any text in both.

A block that a reader puts into a file is written to that file, and not run:

    <!-- file: train.py -->

What cannot be run here says why, right above itself; Python must compile all the same:

    <!-- not run: needs four GPUs -->

What needs packages that some machines do not have is run where they can be imported, and compiled elsewhere:

    <!-- needs: torchvision -->
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)$")
_MARK = re.compile(r"^ *<!-- (?P<kind>not run|file|needs): (?P<what>.+?) -->$")
_PREPARE = re.compile(r"^ *<!-- prepare(?P<rest>.*)$")
_SNIPPET = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.MULTILINE)
_ARROW = re.compile(r"# → ?(?P<expected>.*)$")


class PageError(Exception):
    """A page that says something of its code which is not so, or does not say what it must."""


@dataclass(frozen=True)
class Block:
    """A piece of code or output: its language ("prepare" for what readers do not see) and its first line in the page."""

    language: str
    text: str
    line: int
    not_run: str | None = None
    file: str | None = None
    needs: str | None = None
    """The packages without which it is not run."""
    output: str | None = None
    """What the page says that it prints."""

    @property
    def runs(self) -> bool:
        return self.not_run is None and self.file is None


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page in their order; PageError for one that is neither to be run nor marked."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    at, behind = 0, False  # behind: nothing but empty lines since the last block
    mark: re.Match[str] | None = None
    while at < len(lines):
        line, at = lines[at], at + 1
        if (marked := _MARK.match(line)) is not None:
            mark, behind = marked, False
        elif (prepared := _PREPARE.match(line)) is not None:
            if prepared["rest"].strip():
                raise PageError(f"{page}:{at}: a preparation begins on the next line")
            end = _end(lines, at, re.compile(r"^ *-->$"), page)
            found.append(Block("prepare", "\n".join(lines[at:end]), at + 1))
            at, behind = end + 1, False
        elif (fence := _FENCE.match(line)) is not None:
            end = _end(lines, at, re.compile(rf"^ *{fence['ticks']} *$"), page)
            text = "\n".join(each.removeprefix(fence["indent"]) for each in lines[at:end])
            text = _SNIPPET.sub(lambda match: (ROOT / match["path"]).read_text(), text)
            said = {mark["kind"]: mark["what"]} if mark is not None else {}
            block = Block(
                _language(fence["info"]), text, at + 1, said.get("not run"), said.get("file"), said.get("needs")
            )
            _add(found, block, behind, f"{page}:{at}")
            at, mark, behind = end + 1, None, True
        elif line.strip():
            if mark is not None:
                raise PageError(f"{page}:{at}: {mark[0].strip()} stands right above a block, and here is none")
            behind = False
    if mark is not None:
        raise PageError(f"{page}: {mark[0].strip()} stands right above a block, and at the end is none")
    return found


def _end(lines: list[str], at: int, closing: re.Pattern[str], page: Path) -> int:
    for number in range(at, len(lines)):
        if closing.match(lines[number]):
            return number
    raise PageError(f"{page}:{at}: what begins here has no end")


def _language(info: str) -> str:
    words = info.strip().split()
    return words[0] if words else ""


def _add(found: list[Block], block: Block, behind: bool, where: str) -> None:
    if block.language == "text" and block.runs:
        last = found.pop() if behind else None
        if last is None or not last.runs or last.output is not None:
            raise PageError(f"{where}: text stands right behind the block that prints it, or is marked as not run")
        found.append(replace(last, output=block.text))
        return
    if block.language not in ("python", "bash") and block.runs:
        raise PageError(f"{where}: a block of {block.language or 'no language'} is neither run nor marked as not run")
    found.append(block)


def run(page: Path, programs: str | None) -> None:
    """Run all blocks of a page, in the current folder and the namespace of ``__main__``."""
    names = sys.modules["__main__"].__dict__
    for block in blocks_of(page):
        where = f"{page}:{block.line}"
        if not block.runs or not _all_load(block.needs):
            if block.language == "python":
                compile(block.text, str(page), "exec")
            if block.file is not None:
                Path(block.file).write_text(block.text + "\n")
            continue
        printed = _bash(block.text, programs, where) if block.language == "bash" else _python(block, names, page)
        if block.output is not None and not fits(block.output, printed):
            raise PageError(f"{where} prints\n{printed}\nbut the page says\n{block.output}")


def _all_load(packages: str | None) -> bool:
    """Import the packages that a block needs, and return whether all can be: some are installed for another torch."""
    for name in (packages or "").split():
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            return False
    return True


def _bash(text: str, programs: str | None, where: str) -> str:
    path = os.pathsep.join(filter(None, (programs, os.environ.get("PATH"))))
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise PageError(f"{where} ends with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _python(block: Block, names: dict[str, Any], page: Path) -> str:
    """Statement by statement, as the lines of the page that they are; returns what was printed."""
    lines = block.text.splitlines()
    arrows = {number for number, line in enumerate(lines, 1) if _ARROW.search(line)}
    printed = io.StringIO()
    for node in ast.parse(block.text).body:
        assert node.end_lineno is not None
        arrow = _ARROW.search(lines[node.end_lineno - 1])
        arrows.discard(node.end_lineno)
        last = node.end_lineno
        ast.increment_lineno(node, block.line - 1)
        before = printed.tell()
        with contextlib.redirect_stdout(_Both(printed)):
            if isinstance(node, ast.Expr):
                value = eval(compile(ast.Expression(node.value), str(page), "eval"), names)
            else:
                exec(compile(ast.Module([node], []), str(page), "exec"), names)
                value = _assigned(node, names)
        if arrow is not None:
            said = printed.getvalue()[before:]
            got = said if said else repr(value)
            if not fits(arrow["expected"], got):
                raise PageError(
                    f"{page}:{block.line + last - 1} gives {got.strip()}, the page says {arrow['expected']}"
                )
    if arrows:
        line = block.line + min(arrows) - 1
        raise PageError(f"{page}:{line}: '# →' stands at the end of a statement of its own, or nobody checks it")
    return printed.getvalue()


def _assigned(node: ast.stmt, names: dict[str, Any]) -> Any:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return names[target.id] if isinstance(target, ast.Name) else None


class _Both(io.TextIOBase):
    """Writes to a file, and shows it: what was printed before an error helps to find it."""

    def __init__(self, kept: io.StringIO) -> None:
        self._kept, self._shown = kept, sys.stdout

    def write(self, text: str) -> int:
        self._shown.write(text)
        return self._kept.write(text)


def fits(expected: str, printed: str) -> bool:
    """Whether a text is what is expected: any space is as good as any other, "…" stands for any text."""
    wanted = re.escape(" ".join(expected.split())).replace("…", ".*?")
    return re.fullmatch(wanted, " ".join(printed.split())) is not None


if __name__ == "__main__":
    run(Path(sys.argv[1]), *sys.argv[2:3] or [None])
