"""Every block of code in the documentation runs, and gives what the page says; the site is whole."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page import ROOT, blocks_of

import s3
from forks import PYTHON, Forks
from midepoch.audit import read_run

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "README.md",
        ROOT / "benchmarks/README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
    )
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, framework_forks: Forks) -> Path:
    """The programs that pages call, forked from a process that has imported what they need."""
    folder = tmp_path_factory.mktemp("programs")
    framework_forks.executable(folder / "midepoch", "-m", "midepoch")
    framework_forks.executable(folder / "python")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings for a real object store; what lies in the folder "store" of a page lies in it."""
    (tmp_path / "store" / "bucket").mkdir(parents=True)  # rclone is slow with one that comes later
    # Pages fill it before they read it. One that remembers nothing takes seconds to find what was written through it.
    with s3.Server(tmp_path / "store", "--dir-cache-time=1s") as server:
        yield {
            "AWS_ACCESS_KEY_ID": s3.KEY,
            "AWS_SECRET_ACCESS_KEY": s3.SECRET,
            "AWS_ENDPOINT_URL": f"http://{server.endpoint}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@pytest.mark.parametrize("page", PAGES)
def test_page(
    page: str, tmp_path: Path, programs: Path, framework_forks: Forks, request: pytest.FixtureRequest
) -> None:
    if not blocks_of(ROOT / page):
        return
    # Caches of its own: pages have datasets of one name and different contents.
    caches = {"MIDEPOCH_CACHE": str(tmp_path / ".cache"), "HF_HOME": str(tmp_path / ".hf")}
    settings = {**caches, "PYTHONPATH": os.pathsep.join(sys.path), PYTHON: str(programs / "python")}
    if "s3://" in (ROOT / page).read_text():
        settings |= request.getfixturevalue("store")
    script = str(Path(__file__).with_name("page.py"))
    of_hub = "hf://" in (ROOT / page).read_text()  # the settings of the Hub are read when a package of it is imported
    [done] = (request.getfixturevalue("torch_forks") if of_hub else framework_forks).run(
        [script, str(ROOT / page), str(programs)], cwd=tmp_path, env=settings
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def test_the_program_of_the_readme_is_killed_and_resumed(tmp_path: Path, torch_forks: Forks) -> None:
    """As it stands, but for the signal, and for other workers the second time."""
    program = next(block.text for block in blocks_of(ROOT / "README.md") if block.language == "python")
    every = "    if loader.steps % 20 == 0:\n"
    assert program.count(every) == 1 and program.count("num_workers=2") == 1
    kill = "    if loader.steps == 33:\n        import signal\n        signal.raise_signal(signal.SIGKILL)\n"
    (tmp_path / "first.py").write_text(program.replace(every, kill + every))
    (tmp_path / "again.py").write_text(program.replace("num_workers=2", "num_workers=3"))
    settings = {"MIDEPOCH_CACHE": str(tmp_path / ".cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    for name, code in (("first.py", -9), ("again.py", 0)):
        [done] = torch_forks.run([str(tmp_path / name)], cwd=tmp_path, env=settings)
        assert done.returncode == code, done.stderr[-3000:]
    run = read_run(tmp_path / "run")
    (epoch,) = run.epochs
    assert run.exact and run.attempts == 2 and (epoch.once, epoch.steps, epoch.complete) == (800, 70, True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\ncode\n```", "no language is neither run nor marked"),
        ("```json\n{}\n```", "json is neither run nor marked"),
        ("```text\n1\n```", "right behind the block that prints it"),
        ("```python\n1\n```\nThis gives:\n```text\n1\n```", "right behind the block that prints it"),
        ("```python\nprint(1)\n```\n```text\n1\n```\n```text\n2\n```", "right behind the block that prints it"),
        ("<!-- not run: lazy -->\nprose\n```python\n1\n```", "right above a block, and here is none"),
        ("<!-- not run: lazy -->", "at the end is none"),
        ("```python\n1\n", "has no end"),
        ("```python\n1 +\n```", "SyntaxError"),
        ("<!-- not run: needs a GPU -->\n```python\n1 +\n```", "SyntaxError"),
        ("```python\nx\n```", "NameError"),
        ("<!-- prepare\nx = 2\n-->\n```python\nx  # → 1\n```", "page.md:5 gives 2, the page says 1"),
        ("```python\nx = 1\nx = x + 1  # → 3\n```", "page.md:3 gives 2, the page says 3"),
        ("```python\nfor x in [1]:\n    print(x)  # → 1\n    x\n```", "page.md:3: '# →' stands at the end"),
        ("```python\nprint(1)\n```\n```text\n2\n```", "but the page says"),
        ("```bash\nfalse\n```", "ends with 1"),
        ("<!-- needs: json -->\n```python\nprint(1)\n```\n```text\n2\n```", "but the page says"),
        ("<!-- needs: nothing_of_that_name -->\n```python\n1 +\n```", "SyntaxError"),
        ("```bash\necho 1\n```\n```text\n2\n```", "but the page says"),
    ],
)
def test_what_is_wrong_with_a_page_is_told(text: str, problem: str, tmp_path: Path, torch_forks: Forks) -> None:
    (tmp_path / "page.md").write_text(text)
    [done] = torch_forks.run([str(Path(__file__).with_name("page.py")), "page.md"], cwd=tmp_path)
    assert done.returncode == 1
    assert problem in done.stderr


GOOD = """
<!-- prepare
x = 1
-->

```python
x + 1  # → 2
print(x)  # → 1
y = [x,
     x]  # → [1, 1]
```

- indented

    ```python
    print(y)
    print("and more")
    ```

    ```text
    [1, …]
    and
    more
    ```

<!-- file: later.py -->
```python
print("later")
```

```bash
python later.py
```

```text
later
```

<!-- not run: needs a package that is not there -->
```python
import nothing_of_that_name
```

<!-- needs: nothing_of_that_name -->
```python
print(nothing_of_that_name)
```

```text
anything
```

<!-- needs: json -->
```python
print("run")
```

```text
run
```
"""


def test_what_is_right_with_a_page(tmp_path: Path, programs: Path, torch_forks: Forks) -> None:
    (tmp_path / "page.md").write_text(GOOD)
    [done] = torch_forks.run([str(Path(__file__).with_name("page.py")), "page.md", str(programs)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [block.language for block in blocks_of(tmp_path / "page.md")] == [
        "prepare",
        *["python"] * 3,
        "bash",
        *["python"] * 3,
    ]


def test_whoever_is_not_run_says_why() -> None:
    """A list to look at: what is left out, and for which reason."""
    reasons = {block.not_run for page in PAGES for block in blocks_of(ROOT / page) if block.not_run is not None}
    assert all(len(reason.split()) > 1 for reason in reasons)


_NAMED = re.compile(r"(?<![\w/])((?:tests|src|examples|scripts|benchmarks|docs)/[\w/.-]*\w)(?:::(\w+))?")


@pytest.mark.parametrize("page", [*PAGES, "SECURITY.md"])
def test_files_and_tests_that_are_named_are_there(page: str) -> None:
    for path, function in _NAMED.findall((ROOT / page).read_text()):
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), f"{path}::{function}"


def test_messages_on_the_page_of_errors_are_those_of_the_code() -> None:
    said = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                said.add("".join(each.value if isinstance(each, ast.Constant) else "…" for each in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.add(re.sub(r"%[.\d]*[sdrf]", "…", node.value))
    page = (ROOT / "docs/errors.md").read_text()
    tables = re.findall(r"^\| message \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    messages = [message for table in tables for message in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)]
    assert len(messages) > 120
    for message in messages:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
        assert any(all(part in one for part in parts) for one in said), message


def own_pages() -> list[Path]:
    """The pages of the site, without those that only include another file."""
    return [path for path in sorted(ROOT.glob("docs/**/*.md")) if not path.read_text().startswith("--8<--")]


def test_the_documentation_stays_small_enough_to_be_read() -> None:
    pages = own_pages()
    assert len(pages) <= 30
    assert sum(len(re.findall(r"\S*\w\S*", path.read_text())) for path in pages) <= 35_000


def test_code_fits_into_a_window_of_1280_pixels() -> None:
    for path in own_pages():
        shown = [line for block in blocks_of(path) if block.language != "prepare" for line in block.text.splitlines()]
        assert [line for line in shown if len(line) > 120] == [], path.name


def test_the_index_for_assistants_lists_every_page_once() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/llms.txt").read_text())
    assert sorted(listed) == sorted(path.name for path in own_pages() if path.name != "index.md")


def test_restarts_of_torchrun_are_shown_with_the_variable_they_need() -> None:
    """Without it, torch shares one TCP store over all restarts, and the restarted ranks can hang."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert variable in Path(dynamic_rendezvous.__file__).read_text(), "torch does not know it any more"
    texts = [ROOT / page for page in PAGES] + sorted(ROOT.glob("examples/**/*.py"))
    shown = [path for path in texts if re.search(r"--max[-_]restarts", path.read_text())]
    assert ROOT / "docs/distributed.md" in shown
    assert [path.name for path in shown if variable not in path.read_text()] == []
