"""Size limit of a cache folder, over the blocks of all data, runs and machines that use it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from midepoch.sources.storage import sweep

BLOCK = ".block"
LOCK = ".lock"
_RECENT_SECONDS = 60.0
_UNUSED_SECONDS = 24 * 3600.0

NextUse = Callable[[int], float]


def mark_used(path: Path) -> None:
    """Record that a block was used now, in its access time. Its modification time is kept."""
    with suppress(OSError):
        stat = os.stat(path)
        os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))


def make_room(root: Path, limit: int, own: Path, next_use: NextUse) -> None:
    """Remove blocks until those below ``root`` take at most ``limit`` bytes, beginning with the one needed last.

    For blocks in the folder ``own`` the next use is known; for others, the time of the last use.
    """
    candidates = []
    for path in root.rglob(f"*{BLOCK}"):
        with suppress(OSError, ValueError):
            stat = path.stat()
            age = time.time() - max(stat.st_atime, stat.st_mtime)
            distance = next_use(int(path.stem)) if path.parent == own else _distance_of_others(age)
            candidates.append(((distance, age), path, stat.st_size))
    total = sum(size for _, _, size in candidates)
    for _, path, size in sorted(candidates, key=lambda each: each[0], reverse=True):
        if total <= limit:
            break
        with suppress(OSError):
            path.unlink()
            total -= size


def bytes_kept(root: Path) -> int:
    """Return the total bytes of all blocks below a folder."""
    total = 0
    for path in root.rglob(f"*{BLOCK}"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def tidy(root: Path, own: Path) -> None:
    """Remove temporary files of dead processes, and folders without blocks that were unused for a day."""
    for folder in root.iterdir():
        with suppress(OSError):
            lock = folder / LOCK
            sweep(folder, ".*.tmp")
            if folder != own and os.listdir(folder) == [LOCK] and time.time() - lock.stat().st_mtime > _UNUSED_SECONDS:
                lock.unlink()
                folder.rmdir()


def _distance_of_others(age: float) -> float:
    return float("inf") if age > _RECENT_SECONDS else 0.0
