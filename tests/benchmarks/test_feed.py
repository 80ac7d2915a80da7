"""benchmarks/feed.py: every part runs with tiny sizes, and counts memory and calls as it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_runs import run

pytest.importorskip("torch")
pytest.importorskip("PIL")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")


MEMORY = """
import json, multiprocessing, numpy as np
from benchmarks.feeding import memory

def child(ready, stop):
    pages = np.ones(64 << 20, np.uint8)
    ready.set()
    stop.wait()

if __name__ == "__main__":
    before = memory.megabytes()
    shared = np.ones(64 << 20, np.uint8)
    alone = memory.megabytes()
    context = multiprocessing.get_context("fork")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=child, args=(ready, stop))
    process.start()
    ready.wait()
    print(json.dumps([before["Pss"], alone["Pss"], memory.megabytes()["Pss"], len(memory.family())]))
    stop.set()
    process.join()
"""


@pytest.mark.slow  # 8 s, of which no line is the package's
def test_all_parts_run(tmp_path: Path, python: str) -> None:
    run(python, "-m", "benchmarks.feed", "--smoke", "--json", str(tmp_path / "figures.json"))
    report: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    figures = {part: report[part]["figures"] for part in ("transport", "threads", "first", "memory")}
    assert set(figures["transport"]) == {"midepoch", "DataLoader"}
    assert all(run["rate"] > 0 for runs in figures["threads"].values() for run in runs)
    watched = figures["first"]["watched"]["2 workers, workers"]["workers"]
    assert watched["source 0, calls until the first batch"] > 0
    assert watched["source 1, rows until the first batch"] > 0
    assert 0 < watched["first call until"] < figures["first"]["watched"]["2 workers, workers"]["seconds"]
    assert {found["processes"] for name, found in figures["memory"].items() if "one process" in name} == {1}
    assert all(found["processes"] >= 3 for name, found in figures["memory"].items() if "2 workers" in name)


def test_memory_counts_shared_pages_once() -> None:
    before, alone, both, processes = json.loads(run(sys.executable, "-c", MEMORY))
    assert processes == 2
    assert 60 < alone - before < 80
    assert 60 < both - alone < 90, "the pages of the child, not those that it shares"
