"""PipelineCheckpoint: the checkpoints of a training run."""

from __future__ import annotations

import errno
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from midepoch._internal.hints import hinted_methods, no_attribute, warn_once
from midepoch._internal.values import integer, reason
from midepoch.checkpoint import restoring, saving
from midepoch.checkpoint.backends import backend_named
from midepoch.checkpoint.background import Background, Snapshots
from midepoch.checkpoint.manifest import Keep, Manifest, checked_metadata, parse_keep
from midepoch.checkpoint.rendezvous import Members, Notes
from midepoch.checkpoint.restoring import StepLoader
from midepoch.checkpoint.stateful import check_saveable, fit, refuse_copies
from midepoch.checkpoint.store import Steps, open_store
from midepoch.distributed.keyvalue import run_identity
from midepoch.distributed.world import World, find_world
from midepoch.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, CheckpointSaveError

_log = logging.getLogger("midepoch")
_rendezvous: Counter[tuple[str, str, int]] = Counter()  # of this process, by directory, purpose and rank


_KEEP = "Use keep=3, or keep=midepoch.Keep(…)."
_WHEN = "Call save() when you want it: if loader.steps % 1000 == 0."
_EXTRA = "Use extra={'scheduler': scheduler} for other objects, in save() and in restore_latest()."
_VALUES = "Use metadata={'loss': loss} for numbers and texts."
_OF_FOLDER = "It is an argument of PipelineCheckpoint('checkpoints', …)."
_LATEST = "Use restore_latest(loader, model, optimizer)."

_PARTS = {
    **dict.fromkeys(("scheduler", "lr_scheduler", "scaler", "ema"), _EXTRA),
    **dict.fromkeys(("metrics", "loss", "epoch", "config"), _VALUES),
    **dict.fromkeys(("loader", "dataloader"), "It is the first argument: pipeline."),
}

HINTS = {
    "__init__": {
        **dict.fromkeys(("keep_last", "max_to_keep", "total_limit", "save_total_limit"), _KEEP),
        **dict.fromkeys(("every", "save_interval_steps", "save_steps", "interval"), _WHEN),
        "directory missing": "For example PipelineCheckpoint('checkpoints', keep=3).",
    },
    "save": {
        **_PARTS,
        "too many": _EXTRA,
        **dict.fromkeys(("async_save", "backend", "allow_pickle", "timeout"), _OF_FOLDER),
    },
    "restore": {
        **_PARTS,
        "step missing": "Pass it by name, restore(loader, step=7). For the newest step, use restore_latest(loader, …).",
    },
    "restore_latest": {**_PARTS, "step": "Use restore(loader, step=3)."},
    "metadata": {"step missing": "For the newest, pass checkpoint.latest_step()."},
}

ATTRIBUTES = {
    **dict.fromkeys(("load", "load_latest", "restore_last", "resume", "load_state_dict"), _LATEST),
    **dict.fromkeys(("latest", "last", "last_step"), "Use latest_step()."),
    **dict.fromkeys(("all_steps", "list", "list_steps"), "Use steps()."),
    **dict.fromkeys(("wait_until_finished", "wait_for_save", "join", "flush"), "Use wait()."),
    "state_dict": "Use save(loader, model, optimizer, step=…).",
}
"""Names of other checkpoint libraries."""


@hinted_methods(HINTS)
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
    ``from_files``). Every rank creates one and calls ``save`` and ``restore_latest``; rank and world size are detected
    unless given. ``keep``: the number of newest steps to keep, or a ``Keep``. ``timeout``: seconds that ranks wait for
    each other.
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
        if not isinstance(directory, (str, PathLike)) or not fspath(directory):
            raise TypeError(f"PipelineCheckpoint takes a folder, such as 'checkpoints', got {directory!r:.60}")
        self._steps = Steps(open_store(directory, storage_options))
        self._keep = parse_keep(keep, "PipelineCheckpoint(keep=…)")
        self._given_world = (rank, world_size)
        self._backend_name, self._async, self._allow_pickle = backend, async_save, allow_pickle
        self._timeout = timeout
        self._backend = backend_named(backend, self._world, allow_pickle)
        self._background, self._snapshots = Background(), Snapshots()
        self._members = Members(self._steps.store, self._world)
        self._damaged: set[tuple[int, int]] = set()  # (step, sequence) of steps that were found damaged when read
        self._asked, self._kept = False, frozenset[int]()  # steps of a start that this one did not look at
        self._least = math.inf  # the least step that was to be saved, until it is asked for them

    if not TYPE_CHECKING:  # a type checker would allow every name

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("a PipelineCheckpoint", name, dir(type(self)), ATTRIBUTES)

    def __repr__(self) -> str:
        return f"PipelineCheckpoint({self._steps.name!r}, backend={self._backend_name!r}, async_save={self._async})"

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
        or ``state_dict``, a flax module) or is a tree of values and arrays. ``rng``: also save the random generators
        of Python, numpy and torch. ``keep`` applies to this call. With ``async_save`` it returns when everything has
        been copied; an error is raised by the next call (if only some ranks failed: after that call has saved its own
        step). Raises CheckpointSaveError, and leaves earlier steps unchanged.

        A start that has restored, read and deleted nothing does not replace a step of an earlier one.
        """
        rules = self._keep if keep is None else parse_keep(keep, "save(keep=…)")
        world = self._world
        if world.size == 1:
            self._background.wait()
        earlier: BaseException | None = None
        if step is None and world.size > 1:
            raise ValueError("save(step=…) is required with several ranks: they must agree on it.")
        number = integer(max(self._steps.numbers(), default=0) + 1 if step is None else step, "save(step=…)")
        group = self._group_name(f"save-{number}", world)
        memory: dict[Any, Any] = {}
        try:
            # An earlier error may be of this rank alone: the others save this step, and so does this one.
            earlier = self._background.finish()
            checked = checked_metadata({} if metadata is None else metadata)
            job = saving.SaveJob(number, self._backend_name, checked, group)
            contents = _contents(pipeline, model, optimizer, extra, rng)
            contents.fill(job, world, self._backend, copy=self._async, allow_pickle=self._allow_pickle)
            if self._async:
                job.parts, memory = self._snapshots.copy(job.parts)
                self._background.start(f"saving step {number}", lambda: self._run(job, world, rules, memory))
        except BaseException as problem:
            if world.size > 1:
                Notes(self._steps.store, group).report_absence(world, problem)
            if earlier is not None:
                raise problem from earlier
            raise
        if not self._async:
            self._run(job, world, rules, memory)
        if earlier is not None:
            raise earlier
        return number

    def _refuse_forgotten(self, number: int) -> None:
        """Keep the steps of an earlier start if this one has restored nothing and saves a step before the last of them.

        Raise CheckpointSaveError if it would replace one.
        """
        if not self._asked:
            self._least = min(number, self._least)
            steps = self._steps.numbers()
            self._asked = True
            if max(steps, default=-1) >= self._least:
                self._kept = frozenset(steps)
        if not self._kept:
            return
        text = (
            f"{self._steps.name} has steps up to {max(self._kept)} of an earlier start, and this one has restored "
            "nothing. To continue the earlier one, call restore_latest() before training. For another run, use another "
            "folder"
        )
        if number in self._kept:
            raise CheckpointSaveError(f"step {number} is not replaced: {text}, or delete({number}).")
        warn_once("%s. The earlier steps are kept.", text)

    def _run(self, job: saving.SaveJob, world: World, rules: Keep, memory: dict[Any, Any]) -> None:
        try:
            check = partial(self._refuse_forgotten, job.step)
            self._prune(saving.save(self._steps, job, world, self._timeout, self._members, check), rules)
        finally:
            self._snapshots.release(memory)

    def _group_name(self, purpose: str, world: World) -> str:
        """Return the name of a rendezvous, equal on all ranks: each has been to as many of this purpose."""
        if world.size == 1:
            return purpose
        key = (self._steps.name, purpose, world.rank)
        _rendezvous[key] += 1
        return f"{purpose}-{_rendezvous[key]}{run_identity(world)}"

    def _prune(self, manifests: list[Manifest], rules: Keep) -> None:
        """Remove the steps that no rule keeps, of those before the last commit and the step of that commit.

        The newest intact step is kept; without one, all steps are.
        """
        if rules == Keep():
            return
        try:
            own = [manifest for manifest in manifests if manifest.step not in self._kept]
            read = [manifest for manifest in own if (manifest.step, manifest.sequence) not in self._damaged]
            intact = [manifest for manifest in read if self._steps.is_complete(manifest)]
            dropped = set(rules.dropped(intact, time.time()))
            if rules.metric and not any(isinstance(one.metadata.get(rules.metric), (int, float)) for one in intact):
                _log.warning(
                    "no step has a number %r in its metadata, so none is the best. Pass save(…, metadata={%r: loss}).",
                    rules.metric,
                    rules.metric,
                )
            for manifest in manifests:
                if manifest.step in dropped:
                    self._steps.remove(manifest.step, only=manifest)
        except Exception as problem:  # the new step is saved: this is no reason to stop
            _log.warning("old steps could not be removed from %s: %s", self._steps.name, reason(problem))

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

        A damaged step is logged, and the one before it is restored; if all are damaged, CheckpointDamagedError. If
        it belongs to other data, another pipeline or model: CheckpointMismatchError, and nothing is restored.
        """
        world = self._world
        group = self._group_name("restore", world)
        try:
            self._background.wait()
            self._asked = True
            loader = self._loader(pipeline, model, optimizer, extra, rng)
        except BaseException as problem:
            if world.size > 1:
                Notes(self._steps.store, group).report_absence(world, problem)
            raise
        try:
            loaded = loader.agreed_latest(group, self._timeout, self._members)
        except OSError as problem:
            if world.size == 1 or problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            _log.warning(
                "the ranks cannot meet in %s (%s): each finds the latest step itself", self._steps.name, problem
            )
            loaded = loader.latest()
        return None if loaded is None else loaded.restore(self._backend_of)

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
        """Restore the step of this number. Raises CheckpointNotFoundError or CheckpointDamagedError."""
        manifest = self.manifest(step)
        try:
            loaded = self._loader(pipeline, model, optimizer, extra, rng).load(manifest)
        except CheckpointDamagedError as problem:
            raise CheckpointDamagedError(f"step {step} of {self._steps.name}: {problem}.") from None
        if not self._world.rank:
            self._note_newer(manifest)
        return loaded.restore(self._backend_of)

    def _note_newer(self, manifest: Manifest) -> None:
        """Warn of a step of a part of the run that was left: a step before it was saved after it."""
        with suppress(OSError, CheckpointError):
            for newest in self._steps.manifests()[0][-1:]:
                if newest.step < manifest.step:
                    _log.warning(
                        "step %d of %s was saved before the run went back, and step %d after that. What has changed "
                        "since then, such as an exclusion, is not in it. restore_latest() restores step %d.",
                        manifest.step, self._steps.name, newest.step, newest.step,
                    )  # fmt: skip

    def _loader(
        self, pipeline: Any, model: Any, optimizer: Any, extra: Mapping[str, Any] | None, rng: bool
    ) -> StepLoader:
        contents = _contents(pipeline, model, optimizer, extra, rng)
        check_saveable(contents.pipeline, contents.models, contents.extra)
        refuse_copies({**contents.extra, **contents.models})
        return StepLoader(self._steps, contents, self._world, self._allow_pickle, self._damaged)

    def read(self, step: int, part: str, *, like: Any = None) -> Any:
        """Return the values of a part ("data", "model", "optimizer", the name of an extra) without restoring them.

        ``like``: a tree whose classes, libraries and devices they get, as a JAX tree of named tuples needs.
        """
        found = restoring.Step(self._steps, self.manifest(step), self._allow_pickle)
        is_model = part in ("model", "optimizer")
        if is_model and found.manifest.backend != "files":
            found.verify()
            backend = self._backend_of(found.manifest)
            with self._steps.store.local_copy(found.manifest) as folder:
                tree = backend.read(folder / saving.BACKEND_PART, part, found.json)
        elif part == "data":
            tree = found.open(found.data_part(self._world)).read()
        else:
            tree = found.open(part if is_model else f"extra.{part}").read()
        return tree if like is None else fit(like, tree, part)

    def _backend_of(self, manifest: Manifest) -> Any:
        if manifest.backend == self._backend_name and self._backend is not None:
            return self._backend
        backend = backend_named(manifest.backend, self._world, self._allow_pickle)
        if backend is None:
            raise CheckpointDamagedError(f"the backend {manifest.backend!r} has no folder")
        return backend

    # Steps

    def steps(self) -> list[int]:
        """Return the numbers of all steps, in order."""
        self._background.wait()
        return self._steps.numbers()

    def latest_step(self) -> int | None:
        """Return the step that was saved last, or None. (Not always the largest number: a run may have gone back.)"""
        self._background.wait()
        manifests, _ = self._steps.manifests()
        return manifests[-1].step if manifests else None

    def metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata that a step was saved with."""
        return dict(self.manifest(step).metadata)

    def manifest(self, step: int) -> Manifest:
        """Return everything about a step except its contents: time, world size, parts, sizes."""
        self._background.wait()
        self._asked = True
        return restoring.named_manifest(
            self._steps, integer(step, "step", hint="For the newest, use restore_latest, or latest_step().")
        )

    def verify(self, step: int) -> None:
        """Read all of a step; raises CheckpointDamagedError if anything differs from what was written."""
        restoring.Step(self._steps, self.manifest(step), self._allow_pickle).verify()

    def delete(self, step: int) -> None:
        """Remove a step."""
        self._background.wait()
        if integer(step, "delete") not in self._steps.numbers():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointNotFoundError(f"{self._steps.name} has no step {step}. Existing steps: {there}.")
        self._steps.remove(step)
        self._kept -= {step}

    def wait(self) -> None:
        """Wait until the save in the background has finished; raises its error."""
        self._background.wait()

    def __enter__(self) -> PipelineCheckpoint:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()
        else:
            self._background.log_error()


def _contents(pipeline: Any, model: Any, optimizer: Any, extra: Any, rng: bool) -> saving.Contents:
    models = {name: owner for name, owner in (("model", model), ("optimizer", optimizer)) if owner is not None}
    return saving.Contents(pipeline, models, {} if extra is None else extra, rng)


@dataclass(frozen=True)
class StepHealth:
    """Description of a step; ``problem`` is None if it is intact."""

    step: int
    time: float | None = None
    bytes: int | None = None
    world_size: int | None = None
    parts: tuple[str, ...] = ()
    problem: str | None = None


def step_health(checkpoint: PipelineCheckpoint, step: int, *, read: bool) -> StepHealth:
    """Describe a step; with ``read``, after reading every byte. Raises CheckpointNotFoundError if it does not exist."""
    try:
        manifest = checkpoint.manifest(step)
    except CheckpointDamagedError as problem:
        return StepHealth(step, problem=str(problem))
    description = (step, manifest.time, manifest.nbytes, manifest.world_size, tuple(sorted(manifest.parts)))
    try:
        if read:
            checkpoint.verify(step)
    except (CheckpointDamagedError, CheckpointNotFoundError) as problem:
        return StepHealth(*description, problem=str(problem))
    return StepHealth(*description)
