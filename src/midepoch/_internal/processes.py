"""Liveness of processes. /proc is used where it exists, because it also shows zombies."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path


def alive(pid: int) -> bool:
    """Return True if a process with this id is running, whichever user owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process of another user
    fields = _fields(pid)
    return fields is None or not _ended(fields)


def started(pid: int) -> str:
    """Return the start time of a process, in ticks since boot. Empty if there is no such process."""
    fields = _fields(pid)
    if fields is None:
        return "" if os.path.isdir("/proc/self") or not alive(pid) else "running"
    return "" if _ended(fields) else fields[19]


@lru_cache(1)
def machine() -> str:
    """Return the scope in which process ids are unique: host, boot and PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot} {_namespace()}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # each container has its own process ids
    except OSError:
        return ""


def _fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process name. None if the file does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()
    except OSError:
        return None


def _ended(fields: list[str]) -> bool:
    return fields[0] in ("Z", "X")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
