"""Making an index on the Ray cluster that this process is connected to, while a worker is killed and a node is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import midepoch.open.files
from midepoch.integrations.ray import build_index

OPTIONS = {"filters": [("id", "<", 900)]}  # so that rows are looked at, too


def workers() -> list[int]:
    """Workers of this cluster that look through files at this moment; another one may run on the same machine."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(b"ray::_some"):
                files = [os.readlink(link) for link in (process / "fd").iterdir()]
                if any(name.startswith(os.environ["RAY_TMPDIR"]) for name in files):  # its logs
                    found.append(int(process.name))
        except OSError:
            continue
    return found


def busy() -> list[int]:
    """The same, waited for: on a slow machine none may be at work in this very moment."""
    end = time.monotonic() + 1
    while not (found := workers()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def index(folder: Path, lose_a_node: Callable[[], None]) -> None:
    """Of FOLDER/lake into FOLDER/by-ray; FOLDER/index.json tells what happened."""
    seen: list[tuple[int, int]] = []
    killed: list[int] = []
    lost: list[bool] = []

    @contextmanager
    def shown(_what: str, _unit: str) -> Iterator[Callable[[int, int], None]]:
        def report(done: int, total: int) -> None:
            seen.append((done, total))
            if not killed and (running := busy()):
                os.kill(running[0], signal.SIGKILL)
                killed.append(running[0])
            elif killed and not lost and done > total // 3:
                lose_a_node()
                lost.append(True)

        yield report

    midepoch.open.files.shown = shown  # type: ignore[assignment]  # it draws a bar on a terminal
    path = build_index(folder / "lake", index_dir=folder / "by-ray", **OPTIONS)
    (folder / "index.json").write_text(
        json.dumps({"path": str(path), "seen": seen, "killed": len(killed), "lost": len(lost)})
    )
