"""Saving of one step: every rank writes its own files, rank 0 commits when all have finished."""

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
from typing import Any, NamedTuple

from midepoch._internal.values import loaded, reason
from midepoch.checkpoint import manifest as manifests
from midepoch.checkpoint import rng, stateful
from midepoch.checkpoint.backends import Backend
from midepoch.checkpoint.files import Checksums, ChecksumSink, file_checksums
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.rendezvous import Follower, Leader, Members, Notes, lead
from midepoch.checkpoint.store import Steps
from midepoch.checkpoint.tree import INLINE, EncodedTree, encode
from midepoch.distributed.keyvalue import differences
from midepoch.distributed.world import World
from midepoch.errors import CheckpointSaveError, MidepochError

_log = logging.getLogger("midepoch")
_LIBRARIES = ("midepoch", "numpy", "pyarrow", "torch", "jax", "flax", "optax")
_IDENTITY = ("data", "rows", "selection", "scope", "seed", "window", "aligned", "lanes", "pipeline", "parts")
BACKEND_PART = "arrays"
"""Folder that a backend fills."""


class RankState(NamedTuple):
    """Description of a rank's pipeline that rank 0 compares before anything is committed."""

    common: Any = None
    """Entries of the state that are the same on all ranks."""
    is_global: bool = True
    """True if the state of one rank is that of all."""
    own: Any = None
    """The state, if each rank has one of its own and those of all ranks can be checked together."""


@dataclass
class SaveJob:
    """Contents of a step that this rank saves, taken at the moment of the call."""

    step: int
    backend: str
    metadata: dict[str, Any]
    group: str
    """Name of the rendezvous: no other save has it, in this run or another."""
    parts: dict[str, EncodedTree] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)
    """By name, the class that a part was saved from."""
    state: RankState = field(default_factory=RankState)
    check_states: Callable[[list[Any]], None] | None = None
    """Raises an error if the states of all ranks could not be loaded together."""
    write_arrays: Callable[[Path], None] | None = None
    """Writer of the backend, called on all ranks."""


@dataclass(frozen=True)
class Contents:
    """Objects to save, or to restore into."""

    pipeline: Any
    models: Mapping[str, Any]
    extra: Mapping[str, Any]
    rng: bool

    def fill(self, job: SaveJob, world: World, backend: Backend | None, *, copy: bool, allow_pickle: bool) -> None:
        """Encode what this rank saves. With ``copy`` a backend copies the arrays that it writes later."""

        def encoded(value: Any, name: str, inline: int = INLINE) -> EncodedTree:
            return encode(value, name, allow_pickle=allow_pickle, inline=inline)

        stateful.check_saveable(self.pipeline, self.models, self.extra)
        extras = {f"extra.{manifests.checked_name(name)}": value for name, value in self.extra.items()}
        job.classes = {name: stateful.class_name(owner) for name, owner in {**self.models, **extras}.items()}
        if self.pipeline is not None:
            self._fill_state(job, world, encoded)
        if backend is not None and self.models:
            snapshot = backend.snapshot(self.models, copy=copy)
            job.write_arrays = snapshot.write
            job.parts |= {} if world.rank else snapshot.parts
        own = {**self.models, **extras} if backend is None else extras
        for part, owner in own.items():
            stateful.check_not_distributed(owner, part)
        if not world.rank:
            for part, owner in own.items():
                job.parts[part] = encoded(stateful.state_of(owner), part, INLINE if part in extras else 0)
        if self.rng:
            part = "rng" if world.size == 1 else rank_part("rng", world.rank)
            job.parts[part] = encoded(rng.capture(), "rng")

    def _fill_state(self, job: SaveJob, world: World, encoded: Callable[[Any, str], EncodedTree]) -> None:
        state = stateful.state_of(self.pipeline)
        tree = encoded(state, "data")
        job.classes["data"] = stateful.class_name(self.pipeline)
        is_global = world.size == 1 or stateful.is_global_state(self.pipeline, state)
        if not is_global:
            job.parts[rank_part("data", world.rank)] = tree
            make_checker = getattr(stateful.unwrap(self.pipeline), "_states_checker", None)
            job.check_states = None if make_checker is None else make_checker()
        elif not world.rank:
            job.parts["data"] = tree
        own = None if job.check_states is None else state
        job.state = RankState(common_state(tree.json, is_global), is_global, own)


def rank_part(part: str, rank: int) -> str:
    """Return the name of a part that each rank saves for itself."""
    return f"{part}-{rank:05d}"


def common_state(state: Any, is_global: bool) -> Any:
    """Return the entries of a pipeline's state that are equal on all ranks, without what interfaces add per rank.

    ``is_global``: the state of one rank is that of all.
    """
    if isinstance(state, Mapping) and "midepoch" in state:
        positions = ("epoch", "position") if is_global else ()
        return {name: state[name] for name in (*positions, *_IDENTITY) if name in state}
    return state if is_global else None


def save(
    steps: Steps, job: SaveJob, world: World, timeout: float, members: Members, check: Callable[[], None]
) -> list[Manifest]:
    """Write and commit a step; return on rank 0 the manifests of all steps, this one last.

    ``check``: called on rank 0 before anything is written. Its errors are those of the save, on all ranks.
    Raises CheckpointSaveError; earlier steps are unchanged. KeyboardInterrupt is raised as such, also if a library has
    replaced it with another error.
    """
    started = time.monotonic()
    notes = Notes(steps.store, job.group)
    handled = sys.exc_info()[1]  # of a caller that saves while it handles an interrupt
    try:
        if world.rank:
            _follow(steps, job, Follower(notes, world, timeout, members))
            return []
        token = secrets.token_hex(8)
        leader = Leader(notes, world, timeout, members, token) if world.size > 1 else None
        committed = _lead(steps, job, world, token, leader, check)
    except CheckpointSaveError:
        raise
    except Exception as problem:
        if (interrupt := _causing_interrupt(problem, handled)) is not None:
            raise interrupt from None
        cause = reason(problem).rstrip(".")
        raise CheckpointSaveError(
            f"step {job.step} was not saved to {steps.name}: {cause}. {_describe_steps(steps)}"
        ) from problem
    seconds = time.monotonic() - started
    _log.info("saved step %d: %.1f MB in %.2f s to %s", job.step, committed[-1].nbytes / 1e6, seconds, steps.name)
    return committed


def _causing_interrupt(problem: BaseException | None, handled: BaseException | None) -> KeyboardInterrupt | None:
    """Return the KeyboardInterrupt that caused an error, if any; not one that was ``handled`` before."""
    while problem is not None and problem is not handled:
        if isinstance(problem, KeyboardInterrupt):
            return problem
        problem = problem.__cause__ or problem.__context__
    return None


def _describe_steps(steps: Steps) -> str:
    try:
        numbers = steps.numbers()
    except Exception:
        return "Earlier steps are unchanged."
    if not numbers:
        return "There are no earlier steps."
    return f"Earlier steps are unchanged ({len(numbers)}, up to {numbers[-1]})."


def _lead(
    steps: Steps, job: SaveJob, world: World, token: str, leader: Leader | None, check: Callable[[], None]
) -> list[Manifest]:
    def action() -> tuple[int, list[Manifest]]:
        check()
        steps.begin(job.step, token)
        if leader is not None:
            _compare(job, leader.admit())
            if job.write_arrays is not None:
                leader.go()
        files = _write(steps, job, token, world)
        if leader is not None:
            for payload in leader.gather().values():
                files |= {name: Checksums(size, tuple(crc32)) for name, (size, crc32) in payload.items()}
        # Only steps that exist before the commit may be pruned after it.
        existing, _ = steps.manifests()
        # By the clock, too: one that cannot be read for a moment may have a larger one.
        sequence = max([int(time.time() * 1e6), *(manifest.sequence + 1 for manifest in existing)])
        about = (job.metadata, _versions(), job.classes)
        new = Manifest(job.step, sequence, time.time(), job.backend, world.size, files, *about)
        new = steps.commit(token, new)
        return job.step, [*(manifest for manifest in existing if manifest.step != job.step), new]

    return lead(leader, action, lambda: steps.abandon(job.step, token))


def _follow(steps: Steps, job: SaveJob, follower: Follower) -> None:
    try:
        token = follower.join(job.state)
        if job.write_arrays is not None:
            follower.wait_for_go()
        files = _write(steps, job, token, follower.world)
        follower.done({name: (sums.size, sums.crc32) for name, sums in files.items()})
    except BaseException as problem:
        follower.fail(problem)
        if isinstance(problem, FileNotFoundError):
            follower.raise_failure()  # of rank 0, which has removed the attempt
        raise
    follower.outcome()


def _compare(job: SaveJob, others: Mapping[int, Any]) -> None:
    """Raise CheckpointSaveError if pipelines or positions of the ranks differ: a resume would lose or repeat rows."""
    common = json.loads(json.dumps(job.state.common))
    states = {rank: RankState(*payload) for rank, payload in sorted(others.items())}
    for rank, other in states.items():
        if other.is_global != job.state.is_global:
            idle, leasing = (rank, 0) if other.is_global else (0, rank)
            raise CheckpointSaveError(
                f"step {job.step} was not saved: rank {idle} has not begun to lease, and rank {leasing} has. "
                "Save when all ranks are in their lease() block."
            )
        if isinstance(common, Mapping) and isinstance(other.common, Mapping):
            difference = differences({0: common, rank: other.common})
        elif other.common != common:
            difference = f"{_describe(common)} on rank 0 and {_describe(other.common)} on rank {rank}"
        else:
            difference = ""
        if difference:
            raise CheckpointSaveError(
                f"step {job.step} was not saved: the pipelines of the ranks differ: {difference}. Save after all ranks "
                "have received the same number of batches of the same pipeline."
            )
    if job.check_states is None:
        return
    try:
        job.check_states([job.state.own, *(other.own for other in states.values())])
    except MidepochError as problem:
        raise CheckpointSaveError(
            f"step {job.step} was not saved, because the states of the ranks could not be loaded together: {problem}"
        ) from problem


def _describe(state: Any) -> str:
    return "no pipeline" if state is None else f"{state!r:.200}"


def _write(steps: Steps, job: SaveJob, token: str, world: World) -> dict[str, Checksums]:
    """Write the files of this rank; return their checksums by name."""
    written: dict[str, Checksums] = {}
    if job.write_arrays is not None:  # first: all ranks do so together, and one that failed before would be missing
        written |= _write_backend(steps, job, token, world)
    for part, encoded in job.parts.items():
        for name, write in encoded.files(part).items():
            with steps.sink(job.step, token, name) as sink:
                summing = ChecksumSink(sink)
                write(summing)
                written[name] = summing.checksums
    return written


def _write_backend(steps: Steps, job: SaveJob, token: str, world: World) -> dict[str, Checksums]:
    """Let the backend write. In a folder that ranks share, rank 0 lists the files of all."""
    assert job.write_arrays is not None
    store = steps.store
    with store.scratch(store.attempt(job.step, token), BACKEND_PART) as folder:
        job.write_arrays(folder)
        if world.rank and not store.scratch_is_private:
            return {}
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {f"{BACKEND_PART}/{path.relative_to(folder).as_posix()}": file_checksums(path) for path in paths}


def _versions() -> dict[str, str]:
    modules = {name: loaded(name) for name in _LIBRARIES}
    versions = {name: str(module.__version__) for name, module in modules.items() if hasattr(module, "__version__")}
    return {"python": platform.python_version(), **versions}
