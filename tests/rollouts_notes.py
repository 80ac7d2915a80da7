"""Notes about prompts in examples/rollouts, written in the learner and in its workers before anything else sees them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class NotedLease:
    """A lease in a worker whose rejection is noted first."""

    def __init__(self, lease: Any, prompt: int, folder: Path) -> None:
        self._lease, self._prompt, self._folder = lease, prompt, folder

    def reject(self) -> bool:
        note(self._folder / f"rejected-{os.getpid()}.txt", self._prompt)
        return bool(self._lease.reject())


def generate(folder: Path, lease: Any, prompt: dict[str, Any], weights: Any) -> Any:
    import worker

    return worker.generate(NotedLease(lease, int(prompt["prompt"]), folder), prompt, weights)


def note(path: Path, *words: object) -> None:
    with open(path, "a") as log:
        print(*words, file=log)
