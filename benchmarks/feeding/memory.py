"""Memory of this process and its children, shared pages counted once."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")


def megabytes() -> dict[str, float]:
    """Return the proportional set size (PSS) of this process and all its descendants in MB, in all and by kind."""
    total = dict.fromkeys(KINDS, 0.0)
    for process in family():
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except (OSError, ProcessLookupError):
            continue  # it has exited
        for line in lines:
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0]) / 1024
    return {name: round(value, 1) for name, value in total.items()}


def family() -> list[int]:
    """Return the ids of this process and its descendants."""
    found = [os.getpid()]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except (OSError, ProcessLookupError):
                continue
    return found
