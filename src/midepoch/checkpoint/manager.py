"""PipelineCheckpoint: where a training run keeps its life."""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from typing import Any

from midepoch.agreement import run_identity
from midepoch.checkpoint import loading, parts, rng, saving
from midepoch.checkpoint.arguments import given_models, open_directory, plain_metadata, wanted_of
from midepoch.checkpoint.backends import backend_named
from midepoch.checkpoint.background import Background, Snapshots
from midepoch.checkpoint.directory import Process
from midepoch.checkpoint.keep import Keep, keep_from
from midepoch.checkpoint.like import imposed
from midepoch.checkpoint.manifest import Manifest, checked_name
from midepoch.checkpoint.notes import tell_absence
from midepoch.checkpoint.ranks import Follower, Leader, lead
from midepoch.checkpoint.restoring import Loaded, Wanted, latest, load
from midepoch.checkpoint.tree import INLINE, Encoded, encode
from midepoch.checks import whole
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError
from midepoch.reasons import reason
from midepoch.world import World, find_world

_log = logging.getLogger("midepoch")
_meetings: Counter[tuple[str, str, int]] = Counter()  # of this process, by directory, purpose and rank


class PipelineCheckpoint:
    """Data, model, optimizer and random generators of a run, committed together or not at all.

    checkpoint = PipelineCheckpoint("checkpoints", keep=3)
    step = checkpoint.restore_latest(loader, model, optimizer) or 0
    for batch in loader:
        step += 1
        train_step(model, optimizer, batch)
        if step % 1000 == 0:
            checkpoint.save(loader, model, optimizer, step=step, metadata={"loss": loss})

    ``directory`` is a folder or an address like ``s3://bucket/run`` (with ``storage_options`` as for
    ``from_files``). Every rank makes one and calls ``save`` and ``restore_latest``; rank and world size are found, or
    given. ``keep``: how many of the newest steps stay, or a ``Keep``. ``timeout``: how many seconds ranks wait for each
    other.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        keep: int | Keep | None = None,
        backend: str = "files",
        async_save: bool = False,
        *,
        allow_pickle: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: float = 1800.0,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory = open_directory(directory, storage_options)
        self._keep = keep_from(keep, "PipelineCheckpoint(keep=…)")
        self._given_world = (rank, world_size)
        self._backend_name, self._async, self._allow_pickle = backend, async_save, allow_pickle
        self._timeout = timeout
        self._backend = backend_named(backend, self._world)
        self._background, self._snapshots = Background(), Snapshots()
        self._members: dict[int, Process] = {}
        self._damaged: set[tuple[int, int]] = set()  # (step, sequence) of what was found damaged by reading it

    def __repr__(self) -> str:
        return f"PipelineCheckpoint({self._directory.name!r}, backend={self._backend_name!r}, async_save={self._async})"

    @property
    def _world(self) -> World:
        return find_world(*self._given_world)

    # Saving

    def save(
        self,
        pipeline: Any = None,
        model: Any = None,
        optimizer: Any = None,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        keep: int | Keep | None = None,
        extra: Mapping[str, Any] | None = None,
        rng: bool = True,
    ) -> int:
        """Save a step, on every rank, and return its number: the one after the last, unless given.

        Each of ``pipeline``, ``model``, ``optimizer`` and the values of ``extra`` has a state of its own (``get_state``
        or ``state_dict``, a flax module) or is a tree of values and arrays. ``rng``: also the random generators of
        Python, numpy and torch. ``keep`` holds for this call. With ``async_save`` it returns when all has been copied;
        an error is raised by the next call (of several ranks one may have failed alone: there, after that call has
        saved its own step). Raises CheckpointSaveError, and leaves what was there as it was.
        """
        rules = self._keep if keep is None else keep_from(keep, "save(keep=…)")
        world = self._world
        if world.size == 1:
            self._background.wait()
        earlier: BaseException | None = None
        number = self._next_step(world) if step is None else whole(step, "save(step=…)")
        group = self._meeting(f"save-{number}", world)
        memory: dict[str, Any] = {}
        try:
            # What went wrong before may have done so on this rank alone: the others save this step, and so does it.
            earlier = self._background.ended()
            job = self._job(number, pipeline, model, optimizer, metadata, extra, rng, world)
            job.group = group
            if self._async:
                job.parts, memory = self._snapshots.take(job.parts)
                self._background.start(f"saving step {number}", lambda: self._run(job, world, rules, memory))
        except BaseException as problem:
            if world.size > 1:
                tell_absence(self._directory.board, group, world, problem)
            if earlier is not None:
                raise problem from earlier
            raise
        if not self._async:
            self._run(job, world, rules, memory)
        if earlier is not None:
            raise earlier
        return number

    def _run(self, job: saving.Job, world: World, rules: Keep, memory: dict[str, Any]) -> None:
        try:
            self._prune(saving.save(self._directory, job, world, self._timeout, self._members), rules)
        finally:
            self._snapshots.give_back(memory)

    def _meeting(self, what: str, world: World) -> str:
        """The name of a meeting, the same on all ranks: each of them has been to as many of its kind."""
        if world.size == 1:
            return what
        place = (self._directory.name, what, world.rank)
        _meetings[place] += 1
        return f"{what}-{_meetings[place]}{run_identity(world)}"

    def _next_step(self, world: World) -> int:
        if world.size > 1:
            raise ValueError("save(step=…) is needed where there are several ranks: they must agree on it.")
        return whole(max(self._directory.steps(), default=0) + 1, "the next step")

    def _job(
        self,
        step: int,
        pipeline: Any,
        model: Any,
        optimizer: Any,
        metadata: Mapping[str, Any] | None,
        extra: Mapping[str, Any] | None,
        with_rng: bool,
        world: World,
    ) -> saving.Job:
        things = given_models(model, optimizer)
        parts.check_saveable(pipeline, things, extra)
        extras = {f"extra.{checked_name(name)}": thing for name, thing in (extra or {}).items()}
        job = saving.Job(step, {}, self._backend_name, plain_metadata(metadata or {}), {})
        job.about = {name: parts.class_of(thing) for name, thing in {**things, **extras}.items()}
        if pipeline is not None:
            state = parts.tree_of(pipeline)
            everyone = world.size == 1 or parts.is_global(pipeline, state)
            part = "data" if everyone else loading.rank_part("data", world.rank)
            job.parts[part] = self._encoded(state, "data")
            job.about["data"] = parts.class_of(pipeline)
            job.state = saving.in_common(job.parts[part].json, everyone) if world.size > 1 else None
        if self._backend is not None and things:
            taken = self._backend.take(things, copy=self._async, allow_pickle=self._allow_pickle)
            job.parts |= taken.parts
            job.write_arrays = taken.write
        own = extras if self._backend is not None else {**things, **extras}
        for part, thing in own.items():
            parts.check_not_spread(thing, part)
        if not world.rank:
            for part, thing in own.items():
                job.parts[part] = self._encoded(parts.tree_of(thing), part, INLINE if part in extras else 0)
        if with_rng:
            part = "rng" if world.size == 1 else loading.rank_part("rng", world.rank)
            job.parts[part] = self._encoded(rng.capture(), "rng")
        job.shared = frozenset({"data", *things, *extras})
        return job

    def _encoded(self, value: Any, name: str, inline: int = INLINE) -> Encoded:
        return encode(value, name, allow_pickle=self._allow_pickle, inline=inline)

    def _prune(self, manifests: list[Manifest], rules: Keep) -> None:
        """Drop what no rule wants, of what was there before the last commit and the step of that commit.

        The newest step that is whole stays; without one, everything does.
        """
        if rules == Keep():
            return
        try:
            good = [found for found in manifests if self._is_whole(found)]
            dropped = set(rules.dropped(good, time.time()))
            for found in manifests:
                if found.step in dropped:
                    self._directory.remove(found.step, only=found)
        except Exception as problem:  # the new step is saved: this is no reason to stop
            _log.warning("old steps could not be removed from %s: %s", self._directory.name, reason(problem))

    def _is_whole(self, manifest: Manifest) -> bool:
        if (manifest.step, manifest.sequence) in self._damaged:
            return False
        sizes = self._directory.sizes(manifest)
        return all(sizes.get(name) == sums.size for name, sums in manifest.files.items())

    # Restoring

    def restore_latest(
        self,
        pipeline: Any = None,
        model: Any = None,
        optimizer: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        rng: bool = True,
    ) -> int | None:
        """Restore the step that was saved last, and return its number; None if there is none.

        A damaged step is reported and passed over for the one before; if all are damaged, CheckpointDamagedError. If
        it belongs to other data, another pipeline or model: CheckpointMismatchError, and nothing is restored.
        """
        world = self._world
        group = self._meeting("restore", world)
        try:
            self._background.wait()
            wanted = wanted_of(pipeline, model, optimizer, extra, rng)
        except BaseException as problem:
            if world.size > 1:
                tell_absence(self._directory.board, group, world, problem)
            raise
        try:
            loaded = self._agreed_latest(wanted, group, world)
        except OSError as problem:
            if world.size == 1 or problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            _log.warning("the ranks cannot meet in %s (%s): each looks for itself", self._directory.name, problem)
            loaded = self._latest(wanted)
        if loaded is None:
            return None
        loaded.restore(self._backend_of)
        return loaded.manifest.step

    def restore(
        self,
        pipeline: Any = None,
        model: Any = None,
        optimizer: Any = None,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        rng: bool = True,
    ) -> int:
        """Restore a certain step. Raises CheckpointNotFoundError or CheckpointDamagedError where there is no such."""
        self._background.wait()
        self._restore(whole(step, "restore(step=…)"), wanted_of(pipeline, model, optimizer, extra, rng))
        return step

    def read(self, step: int, part: str, *, like: Any = None) -> Any:
        """The values of a part ("data", "model", "optimizer", the name of an extra), restored into nothing.

        ``like``: a tree whose classes, libraries and devices they get, as a JAX tree of named tuples needs.
        """
        self._background.wait()
        tree = self._read(self._manifest(step), part)
        return tree if like is None else imposed(like, tree, part)

    def _read(self, manifest: Manifest, part: str) -> Any:
        if part in ("model", "optimizer") and manifest.backend != "files":
            loading.check_arrays_of(manifest, [part])
            loading.verify(self._directory, manifest)
            with self._directory.fetched(manifest) as folder:
                return self._backend_of(manifest).read(
                    folder / saving.BACKEND_PART,
                    part,
                    lambda name: loading.read_json(self._directory, manifest, name),
                    allow_pickle=self._allow_pickle,
                )
        name = part if part in ("model", "optimizer") else f"extra.{part}"
        if part == "data":
            name = loading.data_part(manifest, self._world)
        return loading.open_part(self._directory, manifest, name, allow_pickle=self._allow_pickle).read()

    # Looking

    def steps(self) -> list[int]:
        """The numbers of the steps that are there, in order."""
        self._background.wait()
        return self._directory.steps()

    def latest_step(self) -> int | None:
        """The step that was saved last, or None. (Not always the largest number: a run may have gone back.)"""
        self._background.wait()
        found = saving.readable(self._directory)
        return found[-1].step if found else None

    def metadata(self, step: int) -> dict[str, Any]:
        """What was given as metadata when a step was saved."""
        self._background.wait()
        return dict(self._manifest(step).metadata)

    def manifest(self, step: int) -> Manifest:
        """Everything about a step but its contents: when it was saved, by how many ranks, which parts, how large."""
        self._background.wait()
        return self._manifest(step)

    def verify(self, step: int) -> None:
        """Read all of a step; raises CheckpointDamagedError if anything is not as it was written."""
        self._background.wait()
        loading.verify(self._directory, self._manifest(step))

    def delete(self, step: int) -> None:
        """Remove a step."""
        self._background.wait()
        if whole(step, "delete") not in self._directory.steps():
            raise CheckpointNotFoundError(f"{self._directory.name} has no step {step}.")
        self._directory.remove(step)

    def wait(self) -> None:
        """Wait until what is being saved is saved; raises what went wrong."""
        self._background.wait()

    def __enter__(self) -> PipelineCheckpoint:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self._background.report()

    # Inside

    def _manifest(self, step: int) -> Manifest:
        try:
            return self._directory.manifest(whole(step, "step"))
        except CheckpointNotFoundError as problem:
            there = ", ".join(map(str, self._directory.steps()[-8:])) or "none"
            raise CheckpointNotFoundError(f"{problem}. The steps there are: {there}.") from None
        except CheckpointDamagedError as problem:
            raise CheckpointDamagedError(f"step {step} of {self._directory.name}: {problem}.") from None

    def _restore(self, step: int, wanted: Wanted) -> None:
        manifest = self._manifest(step)
        try:
            loaded = load(self._directory, manifest, wanted, self._world, self._allow_pickle)
        except CheckpointDamagedError as problem:
            raise CheckpointDamagedError(f"step {step} of {self._directory.name}: {problem}.") from None
        loaded.restore(self._backend_of)

    def _agreed_latest(self, wanted: Wanted, group: str, world: World) -> Loaded | None:
        """The latest step that is not damaged: rank 0 finds it for all."""
        if world.size == 1:
            return self._latest(wanted)
        self._members.clear()  # ranks may have been replaced
        if world.rank:
            follower = Follower(self._directory.board, group, world, self._timeout, self._members)
            try:
                follower.join(None)
            except BaseException as problem:
                follower.fail(problem)
                raise
            step = follower.outcome()["step"]
            return (
                None if step is None else load(self._directory, self._manifest(step), wanted, world, self._allow_pickle)
            )
        leader = Leader(self._directory.board, group, world, self._timeout, secrets.token_hex(8), self._members)
        found: list[Loaded | None] = []

        def action() -> dict[str, Any]:
            leader.admit()
            found.append(self._latest(wanted))
            return {"step": found[0].manifest.step if found[0] is not None else None}

        lead(leader, action)
        return found[0]

    def _latest(self, wanted: Wanted) -> Loaded | None:
        return latest(self._directory, wanted, self._world, self._allow_pickle, self._damaged)

    def _backend_of(self, manifest: Manifest) -> Any:
        if manifest.backend == self._backend_name and self._backend is not None:
            return self._backend
        found = backend_named(manifest.backend, self._world)
        if found is None:
            raise CheckpointDamagedError(f"the backend {manifest.backend!r} has no folder")
        return found
