"""Calls of functions in worker processes, in a file to which all of them append."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.feeding.work import Scale, Tokenizer


class TimedTokenizer(Tokenizer):
    """A tokenizer that records its calls. ``source`` is the number of the source that it tokenizes."""

    def __init__(self, log: Path, source: int, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self._log, self._source = log, source

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, list[list[int]]]:
        began = time.monotonic()
        made = super().__call__(texts, **options)
        record(self._log, "tokenized", source=self._source, rows=len(texts), began=began)
        return made


def tokenizers(log: Path, scale: Scale) -> list[TimedTokenizer]:
    """Return tokenizers of two sources. Processes that are forked from now on record their start, too."""
    modules = set(sys.modules)
    os.register_at_fork(after_in_child=lambda: record(log, "forked"))
    made = [TimedTokenizer(log, source, scale.vocabulary) for source in range(2)]
    record(log, "made", modules=len(modules))
    return made


def record(log: Path, what: str, **details: Any) -> None:
    """Append a line: the process, the time, the CPU that the process has used, and its imported modules."""
    line = {"what": what, "pid": os.getpid(), "at": time.monotonic(), "cpu": time.process_time(), **details}
    line.setdefault("modules", len(sys.modules))
    with log.open("a") as file:  # one write of a short line: those of processes do not mix
        file.write(json.dumps(line) + "\n")


def summary(log: Path, start: float, end: float) -> dict[str, Any]:
    """Return what happened until the first batch, in seconds after the start."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    forks = {line["pid"]: line for line in lines if line["what"] == "forked"}
    calls = [line for line in lines if line["what"] == "tokenized" and line["at"] <= end]
    firsts = [next((call for call in calls if call["pid"] == pid), None) for pid in forks]
    found: dict[str, Any] = {
        "processes forked until": max((fork["at"] for fork in forks.values()), default=start) - start,
        "first call until": min(call["at"] for call in calls) - start,
        "CPU of a worker until its first result, median": _median([call["cpu"] for call in firsts if call]),
        "modules that a worker imports before": _median(
            [call["modules"] - forks[call["pid"]]["modules"] for call in firsts if call]
        ),
    }
    for source in range(2):
        own = [call for call in calls if call["source"] == source]
        found |= {
            f"source {source}, first result": min((call["at"] for call in own), default=end) - start,
            f"source {source}, calls until the first batch": len(own),
            f"source {source}, rows until the first batch": sum(call["rows"] for call in own),
            f"source {source}, seconds of a call, median": _median([call["at"] - call["began"] for call in own]),
        }
    return {name: round(value, 3) for name, value in found.items()}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
