"""Saving one step: every rank writes what is its own, rank 0 commits when all are in."""

from __future__ import annotations

import json
import logging
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midepoch.agreement import differences
from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint import tensors
from midepoch.checkpoint.directory import Directory, Process, VanishedError
from midepoch.checkpoint.files import Summing, Sums, sums_of
from midepoch.checkpoint.helpers import Helper
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.ranks import Follower, Leader, lead
from midepoch.checkpoint.tree import Encoded
from midepoch.errors import CheckpointError, CheckpointSaveError
from midepoch.imports import loaded
from midepoch.reasons import reason
from midepoch.world import World

_log = logging.getLogger("midepoch")
_LIBRARIES = ("midepoch", "numpy", "pyarrow", "torch", "jax", "flax", "optax")
_LOOKS = 100
BACKEND_PART = "arrays"
"""The folder that a backend fills."""


@dataclass
class Job:
    """All that goes into a step, taken at the moment of the call."""

    step: int
    parts: dict[str, Encoded]
    backend: str
    metadata: dict[str, Any]
    about: dict[str, Any]
    group: str = ""
    """Where the ranks meet: a name that no other save has, in this run or another."""
    state: Any = None
    """The state of the pipeline where one holds for all ranks: they are compared before anything is written."""
    shared: frozenset[str] = field(default_factory=frozenset)
    """Parts that are the same on all ranks: rank 0 alone writes them."""
    write_arrays: Callable[[Path], None] | None = None
    """What the backend has to write, on all ranks."""


def save(directory: Directory, job: Job, world: World, timeout: float, members: dict[int, Process]) -> list[Manifest]:
    """Write and commit a step: on rank 0 the manifests that there are then, this one last.

    Raises CheckpointSaveError; what was there is as it was. Ctrl-C stays what it is, also where a library has made
    another error of it.
    """
    started = time.monotonic()
    handled = sys.exc_info()[1]  # a save while the caller handles an interrupt of its own
    try:
        if world.rank:
            _follow(directory, job, Follower(directory.board, job.group, world, timeout, members))
            return []
        token = secrets.token_hex(8)
        meeting = Leader(directory.board, job.group, world, timeout, token, members) if world.size > 1 else None
        found = _lead(directory, job, world, token, meeting)
    except CheckpointSaveError:
        raise
    except Exception as problem:
        if (interrupt := _interrupt_behind(problem, handled)) is not None:
            raise interrupt from None
        why = reason(problem).rstrip(".")
        raise CheckpointSaveError(
            f"step {job.step} was not saved to {directory.name}: {why}. {_intact(directory)}"
        ) from problem
    seconds = time.monotonic() - started
    _log.info("saved step %d: %.1f MB in %.2f s to %s", job.step, found[-1].nbytes / 1e6, seconds, directory.name)
    return found


def _interrupt_behind(problem: BaseException | None, handled: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that an error came of, if any; not one that was ``handled`` before."""
    while problem is not None and problem is not handled:
        if isinstance(problem, KeyboardInterrupt):
            return problem
        problem = problem.__cause__ or problem.__context__
    return None


def _intact(directory: Directory) -> str:
    try:
        steps = directory.steps()
    except Exception:
        return "The steps saved before are as they were."
    return f"The steps saved before are as they were ({len(steps)}, up to {steps[-1]})." if steps else "There are none."


def _lead(directory: Directory, job: Job, world: World, token: str, meeting: Leader | None) -> list[Manifest]:
    found: list[Manifest] = []

    def action() -> dict[str, Any]:
        directory.begin(job.step, token)
        if meeting is not None:
            _compare(job, meeting.admit())
            if job.write_arrays is not None:
                meeting.go()
        files = _write(directory, job, token, world)
        if meeting is not None:
            for says in meeting.gather().values():
                files |= {name: Sums(size, tuple(crc32)) for name, (size, crc32) in says.items()}
        there = readable(directory)  # only what is there before the commit may be pruned after it
        found.extend(manifest for manifest in there if manifest.step != job.step)
        sequence = max((manifest.sequence for manifest in there), default=0) + 1
        new = _manifest(directory, job, token, world, files, sequence)
        directory.commit(job.step, token, manifests.to_bytes(new, _words(new.time)))
        found.append(new)
        return {"step": job.step}

    lead(meeting, action, lambda: directory.abandon(job.step, token))
    return found


def _follow(directory: Directory, job: Job, meeting: Follower) -> None:
    try:
        token = meeting.join(job.state)
        if job.write_arrays is not None:
            meeting.allowed()
        files = _write(directory, job, token, meeting.world)
        meeting.done({name: (sums.size, sums.crc32) for name, sums in files.items()})
    except BaseException as problem:
        meeting.fail(problem)
        if isinstance(problem, FileNotFoundError):
            meeting.raise_failure()  # of rank 0, which has removed what was being written
        raise
    meeting.outcome()


def in_common(state: Any, everyone: bool) -> Any:
    """The part of a pipeline's state that is the same on all ranks: not what interfaces add for each of them.

    ``everyone``: the state of one rank is that of all.
    """
    if isinstance(state, Mapping) and "midepoch" in state:
        places = ("epoch", "position") if everyone else ()
        return {name: state[name] for name in (*places, *_IDENTITY) if name in state}
    return state if everyone else None


_IDENTITY = ("data", "rows", "selection", "scope", "seed", "window", "aligned", "lanes", "pipeline", "parts")


def _compare(job: Job, others: Mapping[int, Any]) -> None:
    """Ranks whose pipelines differ, or are at different places, would come back with rows lost or repeated."""
    state = json.loads(json.dumps(job.state))
    for rank, other in sorted(others.items()):
        if other == state:
            continue
        if isinstance(state, Mapping) and isinstance(other, Mapping):
            how = differences({0: state, rank: other})
        else:
            how = f"{_about(state)} on rank 0 and {_about(other)} on rank {rank}"
        if how:
            raise CheckpointSaveError(
                f"step {job.step} was not saved: the pipelines of the ranks differ: {how}. Save where all ranks have "
                "had the same number of batches of the same pipeline."
            )


def _about(state: Any) -> str:
    return "no pipeline" if state is None else f"{state!r:.200}"


def _write(directory: Directory, job: Job, token: str, world: World) -> dict[str, Sums]:
    """Write this rank's files; their sums by name."""
    written: dict[str, Sums] = {}
    if job.write_arrays is not None:  # first: the ranks do so together, and a rank that failed before would be missing
        written |= _write_arrays(directory, job, token, world)
    for part, encoded in job.parts.items():
        if world.rank and part in job.shared:
            continue
        written |= _write_part(directory, job.step, token, part, encoded)
    return written


def _write_part(directory: Directory, step: int, token: str, part: str, encoded: Encoded) -> dict[str, Sums]:
    written: dict[str, Sums] = {}
    text = json.dumps(encoded.json, allow_nan=False).encode()
    with directory.sink(step, token, f"{part}.json") as sink:
        summing = Summing(sink)
        summing.write(text)
        written[f"{part}.json"] = summing.sums
    if encoded.arrays:
        with Helper("sum") as helper, directory.sink(step, token, f"{part}.safetensors") as sink:
            summing = Summing(sink, helper)
            tensors.write(summing, encoded.arrays)
            written[f"{part}.safetensors"] = summing.sums
    return written


def _write_arrays(directory: Directory, job: Job, token: str, world: World) -> dict[str, Sums]:
    """Let the backend write. Who shares a folder with others takes the files that nobody had before."""
    assert job.write_arrays is not None
    with directory.scratch(job.step, token, BACKEND_PART) as folder:
        job.write_arrays(folder)
        if world.rank and not directory.scratch_is_own:
            return {}
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {f"{BACKEND_PART}/{path.relative_to(folder).as_posix()}": sums_of(path) for path in paths}


def _manifest(
    directory: Directory, job: Job, token: str, world: World, files: dict[str, Sums], sequence: int
) -> Manifest:
    return Manifest(
        step=job.step,
        sequence=sequence,
        time=time.time(),
        backend=job.backend,
        world_size=world.size,
        files=files,
        metadata=job.metadata,
        versions=_versions(),
        parts=job.about,
        folder=directory.folder_of(token),
    )


def readable(directory: Directory) -> list[Manifest]:
    """The manifests that can be read, in the order of their commits."""
    for _ in range(_LOOKS):
        found, vanished = [], False
        for step in directory.steps():
            try:
                found.append(directory.manifest(step))
            except VanishedError:  # pruned by another process, which has committed another before: look again
                vanished = True
            except CheckpointError:
                continue
        if not vanished:
            break
    return sorted(found, key=lambda manifest: (manifest.sequence, manifest.step))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        module = loaded(name)
        if module is not None and hasattr(module, "__version__"):
            versions[name] = str(module.__version__)
    return versions


def _words(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
