"""Findings about a machine for loading data: versions, limits, caches, settings that often go wrong."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
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


def examine() -> list[Finding]:
    """Return all findings, always in the same order."""
    return [*_versions(), _kernel(), *_processor(), *_files(), *_memory(), *_folders(), *_settings()]


def _versions() -> Iterator[Finding]:
    fits = sys.version_info >= (3, 10)
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("good" if fits else "bad", "Python", text, "" if fits else "3.10 or newer is required")
    bounds = _least()
    for name in ("midepoch", *_SHOWN, *_OTHERS):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _NEEDED:
                yield Finding("bad", name, "not installed", f"pip install {name}")
            continue
        least = bounds.get(name)
        if least is not None and _numbers(version) < _numbers(least):
            yield Finding("bad" if name in _NEEDED else "mind", name, version, f"{least} or newer is required")
        else:
            yield Finding("good", name, version)


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


def _kernel() -> Finding:
    if library.kernel() is not None:
        return Finding("good", "native kernel", "in use")
    if library.is_switched_off():
        text = f"switched off by {library.SWITCH}=0: numpy"
        return Finding("mind", "native kernel", text, f"packing is slower: unset {library.SWITCH}")
    remedy = "packing is slower: install a wheel for this platform, or from source with a C compiler"
    return Finding("mind", "native kernel", "none for this platform: numpy", remedy)


def _processor() -> Iterator[Finding]:
    usable, all_cores = cores(), os.cpu_count() or 1
    quota = _quota()
    if quota is not None and quota < usable:
        text = f"{usable}, but the container may use only {quota:g}"
        yield Finding("mind", "cores", text, f"use at most {max(1, int(quota))} workers over all ranks")
    else:
        yield Finding("good", "cores", str(usable) if usable == all_cores else f"{usable} of {all_cores}")


def _quota() -> float | None:
    """Return the number of cores that a container may use, if there is a limit."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        remedy = f"ulimit -n {min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536}, for thousands of files"
        yield Finding("mind", "open files", f"{soft:,} at most", remedy)
    else:
        yield Finding("good", "open files", f"{soft:,} at most" if soft != resource.RLIM_INFINITY else "no limit")


def _memory() -> Iterator[Finding]:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = _memory_limit()
        if limit is not None and limit < total:
            yield Finding(
                "good", "memory", f"{total / 1e9:.0f} GB, of which this container may use {limit / 1e9:.0f} GB"
            )
        else:
            yield Finding("good", "memory", f"{total / 1e9:.0f} GB")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        small = size < 1 << 30
        remedy = "midepoch's workers do not need it, torch's DataLoader does: docker run --shm-size=8g" if small else ""
        yield Finding("mind" if small else "good", "shared memory", f"{size / 1e9:.1f} GB in /dev/shm", remedy)


def _memory_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def _folders() -> Iterator[Finding]:
    folder = default_index_dir()
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        text = f"{folder}: {problem.strerror}"
        yield Finding("mind", "index folder", text, "set MIDEPOCH_CACHE: without it every start indexes again")
        return
    free = shutil.disk_usage(folder).free
    kind = file_system(folder)
    text = f"{folder} ({kind or 'disk'}, {free / 1e9:.0f} GB free)"
    if free < _ROOM:
        yield Finding(
            "mind", "index folder", text, "decoded blocks are stored there, too: set MIDEPOCH_CACHE to a larger disk"
        )
    elif is_network(folder):
        yield Finding(
            "mind",
            "index folder",
            text,
            "set MIDEPOCH_CACHE to a local disk: processes share decoded blocks there",
        )
    else:
        yield Finding("good", "index folder", text)


def _settings() -> Iterator[Finding]:
    try:
        world = find_world()
        yield Finding("good", "ranks", f"rank {world.rank} of {world.size}" if world.size > 1 else "one process")
    except WorldError as problem:
        yield Finding("bad", "ranks", str(problem), "unset the variables of the launcher that was not used")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdigit() and int(threads) > cores():
        yield Finding("mind", "OMP_NUM_THREADS", threads, f"more than the {cores()} available cores")
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("true", "1"):
        yield Finding("mind", "TOKENIZERS_PARALLELISM", "true", "unset it: workers already tokenize in parallel")
    if os.environ.get("HF_DATASETS_OFFLINE") == "1" or os.environ.get("HF_HUB_OFFLINE") == "1":
        yield Finding("good", "Hugging Face", "offline: only cached data can be loaded")
