"""Whether a process is there: by the kernel's files where there are any, which also tell of those that have ended and
only wait to be buried.
"""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process of this number runs, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    fields = _fields(pid)
    return fields is None or not _ended(fields)


def started(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty if there is none."""
    fields = _fields(pid)
    if fields is None:
        return "" if os.path.isdir("/proc/self") or not alive(pid) else "running"
    return "" if _ended(fields) else fields[19]


@lru_cache(1)
def machine() -> str:
    """The machine on which numbers of processes mean something, since it was last started."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot} {_namespace()}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # containers of one machine have numbers of their own
    except OSError:
        return ""


def _fields(pid: int) -> list[str] | None:
    """What the kernel says of a process, behind its name; None where it says nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()
    except OSError:
        return None


def _ended(fields: list[str]) -> bool:
    return fields[0] in ("Z", "X")
