"""The files of a start of a run: their names, and those of earlier processes."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from midepoch.audit.records import SUFFIX, numbered, read_passes, steps_in
from midepoch.distributed.runs import start_name
from midepoch.distributed.world import World
from midepoch.errors import StateError
from midepoch.order import Shard

_MOST_FILES = 16
"""Maximum number of files searched for the previous process of this rank."""


def new_file(folder: Path, attempt: str, shard: Shard, stream: str) -> tuple[str, list[tuple[str, int]]]:
    """Return a name for a new file of a start, and the files of earlier processes with the numbers of their steps.

    Starts are numbered by the files in the folder, not by clocks, which differ between machines.
    """
    mark = hashlib.blake2b(attempt.encode(), digest_size=5).hexdigest()
    known = [(*found, path) for path in folder.glob(f"*{SUFFIX}") if (found := numbered(path)) is not None]
    current = max((number for number, other, _ in known if other == mark), default=0)
    last = max((number for number, _, _ in known), default=0)
    number = current if current and current == last else last + 1
    previous = [
        *_last([one for one in known if one[1] == mark], shard, stream),
        *_last([one for one in known if one[1] != mark], shard, stream),
    ]
    return f"{number:06}-{mark}-rank{shard.index:05}of{shard.count:05}-{secrets.token_hex(4)}{SUFFIX}", previous


def _last(known: list[tuple[int, str, Path]], shard: Shard, stream: str) -> list[tuple[str, int]]:
    """Return the last of these files of the same rows and rank by another process, and the number of its steps.

    A later file names those before it, so the last one is named by none of the others.
    """
    paths = [path for _, _, path in sorted(known, reverse=True) if f"-rank{shard.index:05}of" in path.name]
    files: dict[str, int] = {}
    named: set[str] = set()
    for path in paths[:_MOST_FILES]:
        try:
            passes = read_passes(path)
        except (OSError, StateError):
            continue
        if passes and passes[0].process != process_name() and passes[0].shape.stream == stream:
            files[path.name] = steps_in(passes, stream)
            named |= {name for one in passes for name, _ in one.previous}
    return [one for one in files.items() if one[0] not in named][:1]


def attempt_name(shard: Shard) -> str:
    """Return the name of this start. Raises ValueError if the ranks have none in common."""
    if found := start_name(World(shard.index, shard.count)).strip("-"):
        return found
    if shard.count == 1:
        return process_name()
    raise ValueError(
        f"a ledger of {shard.count} ranks needs a name that all ranks of this start share and no other start has, "
        "and none was found. Initialise torch.distributed or jax.distributed before the loader is created, set "
        "MIDEPOCH_RUN_ID for all ranks, or pass audit=midepoch.audit.Ledger(folder, attempt=…)."
    )


_births: dict[int, str] = {}


def process_name() -> str:
    """Return a name of this process that no other has, nor a fork of it."""
    return f"{socket.gethostname()}-{os.getpid()}-{_births.setdefault(os.getpid(), secrets.token_hex(4))}"


def host_of(process: str) -> str:
    """Return the name of the machine of a process."""
    return process.rsplit("-", 2)[0]


def process_space() -> str:
    """Return a name of the processes that can be seen from here: of a boot of a machine, or of a container on it.

    Empty if the system does not tell.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def is_gone(process: str, space: str) -> bool | None:
    """Return True if a process has exited. None if it cannot be seen from here."""
    number = process.rsplit("-", 2)[1]
    if not space or space != process_space():
        return None
    try:  # a process that was killed exists until its parent notes that
        return Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
    except OSError:
        return None
