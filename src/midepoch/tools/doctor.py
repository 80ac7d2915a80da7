"""Findings about a machine for loading data: versions, limits, caches, settings that often go wrong."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from midepoch._internal.processes import cores
from midepoch._native import library
from midepoch.distributed.world import find_world
from midepoch.errors import WorldError
from midepoch.storage.cache_files import default_index_dir, file_system, is_network, make_private

_NEEDED = ("numpy", "pyarrow")
_SHOWN = (*_NEEDED, "torch", "datasets", "jax", "ray")
_OTHERS = ("torchdata", "transformers", "accelerate", "lightning", "orbax-checkpoint", "fsspec", "cloudpickle", "typer")
_OPEN_FILES = 4096
_ROOM = 5 << 30


@dataclass(frozen=True)
class Finding:
    """A finding. ``verdict``: "good", "mind" (it may slow things down), "bad" (it will not work)."""

    verdict: str
    what: str
    found: str
    remedy: str = ""


def _finding(what: str, text: str, remedy: str = "", *, fatal: bool = False) -> Finding:
    """Return a finding, which is good if there is nothing to do."""
    return Finding("good" if not remedy else "bad" if fatal else "mind", what, text, remedy)


def examine() -> list[Finding]:
    """Return all findings, always in the same order."""
    return [*_versions(), *_limits(), _folder(), *_settings()]


def _versions() -> Iterator[Finding]:
    yield _finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    bounds = _least()
    for name in ("midepoch", *_SHOWN, *_OTHERS):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _NEEDED:
                yield _finding(name, "not installed", f"pip install {name}", fatal=True)
            continue
        least = bounds.get(name, "0")
        remedy = f"{least} or newer is required" if _numbers(version) < _numbers(least) else ""
        yield _finding(name, version, remedy, fatal=name in _NEEDED)
    if library.kernel() is not None:
        yield _finding("native kernel", "in use")
    elif library.is_switched_off():
        remedy = f"packing is slower: unset {library.SWITCH}"
        yield _finding("native kernel", f"switched off by {library.SWITCH}=0: numpy", remedy)
    else:
        remedy = "packing is slower: install a wheel for this platform, or from source with a C compiler"
        yield _finding("native kernel", "none for this platform: numpy", remedy)


def _least() -> dict[str, str]:
    """Return the lowest version of each package that midepoch requires, from its own metadata."""
    found: dict[str, str] = {}
    for asked in importlib.metadata.requires("midepoch") or ():
        if (bound := re.match(r"([\w-]+)(?:\[[^\]]*\])?\s*>=\s*([\d.]+)", asked)) is not None:
            found.setdefault(bound[1], bound[2])
    return found


def _numbers(version: str) -> list[int]:
    parts = version.split("+")[0].split(".")
    return [int("".join(filter(str.isdigit, part)) or 0) for part in parts[:3]]


def _limits() -> Iterator[Finding]:
    """Yield the findings about cores, open files and memory."""
    usable, all_cores, quota = cores(), os.cpu_count() or 1, _of_container("cpu.max")
    if len(quota) == 2 and (share := quota[0] / quota[1]) < usable:
        remedy = f"use at most {max(1, int(share))} workers over all ranks"
        yield _finding("cores", f"{usable}, but the container may use only {share:g}", remedy)
    else:
        yield _finding("cores", str(usable) if usable == all_cores else f"{usable} of {all_cores}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield _finding("open files", "no limit")
    else:
        most = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
        remedy = f"ulimit -n {most}, for thousands of files" if soft < _OPEN_FILES else ""
        yield _finding("open files", f"{soft:,} at most", remedy)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = min(_of_container("memory.max"), default=total)
        less = f", of which this container may use {limit / 1e9:.0f} GB" if limit < total else ""
        yield _finding("memory", f"{total / 1e9:.0f} GB{less}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        remedy = "midepoch's workers do not need it, torch's DataLoader does: docker run --shm-size=8g"
        yield _finding("shared memory", f"{size / 1e9:.1f} GB in /dev/shm", remedy if size < 1 << 30 else "")


def _of_container(name: str) -> list[float]:
    """Return the limits of this container in a file of its cgroup, those that it has."""
    try:
        return [float(text) for text in Path("/sys/fs/cgroup", name).read_text().split() if text != "max"]
    except (OSError, ValueError):
        return []


def _folder() -> Finding:
    folder = default_index_dir()
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        text = f"{folder}: {problem.strerror}"
        return _finding("index folder", text, "set MIDEPOCH_CACHE: without it every start indexes again")
    free, remedy = shutil.disk_usage(folder).free, ""
    if free < _ROOM:
        remedy = "decoded blocks are stored there, too: set MIDEPOCH_CACHE to a larger disk"
    elif is_network(folder):
        remedy = "set MIDEPOCH_CACHE to a local disk: processes share decoded blocks there"
    return _finding("index folder", f"{folder} ({file_system(folder) or 'disk'}, {free / 1e9:.0f} GB free)", remedy)


def _settings() -> Iterator[Finding]:
    try:
        world = find_world()
        yield _finding("ranks", f"rank {world.rank} of {world.size}" if world.size > 1 else "one process")
    except WorldError as problem:
        yield _finding("ranks", str(problem), "unset the variables of the launcher that was not used", fatal=True)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores():
        yield _finding("OMP_NUM_THREADS", threads, f"more than the {cores()} available cores")
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("true", "1"):
        yield _finding("TOKENIZERS_PARALLELISM", "true", "unset it: workers already tokenize in parallel")
    if "1" in (os.environ.get("HF_DATASETS_OFFLINE"), os.environ.get("HF_HUB_OFFLINE")):
        yield _finding("Hugging Face", "offline: only cached data can be loaded")
