"""Restoring of a step: everything needed is read and verified before anything is changed."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from midepoch.checkpoint import disk, files, rng, stateful
from midepoch.checkpoint.backends import Backend, Restorable
from midepoch.checkpoint.manifest import Manifest, checked_name
from midepoch.checkpoint.rendezvous import Follower, Leader, Members, lead
from midepoch.checkpoint.saving import BACKEND_PART, Contents, rank_part
from midepoch.checkpoint.store import CheckpointStore, StepRemovedError, read_manifests, retrying
from midepoch.checkpoint.tensor_files import StoredArray, StoredTree, find_arrays
from midepoch.checkpoint.tree import array_specs
from midepoch.distributed.world import World
from midepoch.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)

_log = logging.getLogger("midepoch")


def verify(store: CheckpointStore, manifest: Manifest, besides: Collection[str] = ()) -> None:
    """Read every file of a step; raises CheckpointDamagedError with the name of the first damaged one."""
    for name, sums in manifest.files.items():
        if name not in besides:
            with store.source(manifest, name) as source:
                files.verify_file(source, sums, name)


def has_part(manifest: Manifest, part: str) -> bool:
    return f"{part}.json" in manifest.files


def open_part(store: CheckpointStore, manifest: Manifest, part: str, *, allow_pickle: bool) -> StoredTree:
    """Return the verified tree of a part. CheckpointNotFoundError if the step has none of that name."""
    tree = read_json(store, manifest, part)
    specs = array_specs(tree)
    arrays: Mapping[str, StoredArray] = {}
    if specs:
        name = f"{part}.safetensors"
        if name not in manifest.files:
            raise CheckpointDamagedError(f"{name} is missing")
        with store.source(manifest, name) as source:
            arrays = find_arrays(disk.verify_and_reopen(source, manifest.files[name], name), specs.items())
    return StoredTree(tree, arrays, allow_pickle)


def read_json(store: CheckpointStore, manifest: Manifest, part: str) -> Any:
    """Return the verified JSON of a part."""
    name = f"{part}.json"
    if not has_part(manifest, part):
        raise _without(manifest, part)
    try:
        with store.source(manifest, name) as source:
            return json.loads(bytes(files.read_verified(source, manifest.files[name], name)))
    except (ValueError, RecursionError) as problem:
        raise CheckpointDamagedError(f"{name} cannot be read: {problem!r:.200}") from None


def check_backend_parts(manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointNotFoundError if a backend has not saved all of these."""
    for name in names:
        if name not in manifest.parts:
            raise _without(manifest, name)


def _without(manifest: Manifest, name: str) -> CheckpointNotFoundError:
    parts = ", ".join(sorted(map(str, manifest.parts))) or "nothing"
    return CheckpointNotFoundError(f"step {manifest.step} was saved without {name}. It has: {parts}.")


def data_part(manifest: Manifest, world: World) -> str:
    """Return the name of the part with this rank's state of the pipeline."""
    own = rank_part("data", world.rank)
    if has_part(manifest, "data"):
        return "data"
    if manifest.world_size != world.size and has_part(manifest, rank_part("data", 0)):
        raise CheckpointMismatchError(
            "world_size",
            manifest.world_size,
            world.size,
            "each rank saved its own state, which only fits the same world size; ds.loader(…) of midepoch saves one "
            "state for any world size",
        )
    return own if has_part(manifest, own) else "data"


@dataclass(frozen=True)
class Restore:
    """A target and its saved values. Arrays in ``outline`` may not be read yet."""

    name: str
    target: Any
    outline: Any
    read: Callable[[], Any]

    def __call__(self) -> None:
        stateful.load_state(self.target, self.read(), self.name)


@dataclass(frozen=True)
class LoadedStep:
    """A step that was read and verified; nothing has been restored yet."""

    store: CheckpointStore
    manifest: Manifest
    restores: list[Restore]
    models: Mapping[str, Any]  # those that a backend restores
    set_generators: Callable[[], None] | None
    allow_pickle: bool

    def restore(self, backend_of: Callable[[Manifest], Backend]) -> None:
        """Restore everything, or raise and leave the pipeline as it was. CheckpointMismatchError if it does not fit."""
        for restore in self.restores:
            _check_class(self.manifest, restore.name, restore.target)
            stateful.check_fits(restore.target, restore.outline, restore.name)
        if not self.models:
            self._restore_all([])
            return
        backend = backend_of(self.manifest)
        with self.store.local_copy(self.manifest) as folder:
            self._restore_all(
                backend.load(folder / BACKEND_PART, self.models, self._read_json, allow_pickle=self.allow_pickle)
            )

    def _read_json(self, part: str) -> Any:
        return read_json(self.store, self.manifest, part)

    def _restore_all(self, models: list[Restorable]) -> None:
        undo: list[Callable[[], None]] = []
        try:
            for restore in self.restores:
                if restore.name == "data":
                    undo.append(_undo(restore.target))
                    restore()
                else:
                    _restore_one(self.manifest, restore.name, restore)
            for model in models:
                _restore_one(self.manifest, model.name, model.restore)
        except BaseException:
            for back in undo:
                back()
            raise
        if self.set_generators is not None:
            self.set_generators()


def load(store: CheckpointStore, manifest: Manifest, targets: Contents, world: World, allow_pickle: bool) -> LoadedStep:
    """Read the parts of a step for these targets, and verify all of it. Raises CheckpointDamagedError."""
    seen: set[str] = set()

    def opened(part: str) -> StoredTree:
        seen.update((f"{part}.json", f"{part}.safetensors"))
        return open_part(store, manifest, part, allow_pickle=allow_pickle)

    def read(part: str) -> Any:
        return opened(part).read()

    restores: list[Restore] = []
    if targets.pipeline is not None:
        ranks = [rank_part("data", rank) for rank in range(manifest.world_size)]
        if stateful.accepts_all_ranks(targets.pipeline) and ranks and all(has_part(manifest, part) for part in ranks):
            state = [read(part) for part in ranks]
        else:
            state = read(data_part(manifest, world))
        restores.append(Restore("data", targets.pipeline, state, lambda: state))
    restores += [
        _restore(name, target, opened(f"extra.{checked_name(name)}")) for name, target in targets.extra.items()
    ]
    own = manifest.backend == "files"
    if own:
        restores += [_restore(name, target, opened(name)) for name, target in targets.models.items()]
    else:
        check_backend_parts(manifest, targets.models)
    set_generators = _generators(manifest, world, read) if targets.rng else None
    verify(store, manifest, besides=seen)
    return LoadedStep(store, manifest, restores, {} if own else targets.models, set_generators, allow_pickle)


def _restore(name: str, target: Any, stored: StoredTree) -> Restore:
    if stateful.reads_lazily(target):
        outline = stored.outline()
        return Restore(name, target, outline, lambda: stored.read(stateful.restore_targets(target, stored.json)))
    tree = stored.read()
    return Restore(name, target, tree, lambda: tree)


@dataclass(frozen=True)
class StepLoader:
    """Loader of the steps of a store into these targets.

    The (step, sequence) of steps that are found damaged are added to ``damaged``.
    """

    store: CheckpointStore
    targets: Contents
    world: World
    allow_pickle: bool
    damaged: set[tuple[int, int]]

    def load(self, manifest: Manifest) -> LoadedStep:
        return load(self.store, manifest, self.targets, self.world, self.allow_pickle)

    def agreed_latest(self, group: str, timeout: float, members: Members) -> LoadedStep | None:
        """Return the latest step that is not damaged: rank 0 finds it for all ranks."""
        if self.world.size == 1:
            return self.latest()
        members.forget()
        if self.world.rank:
            follower = Follower(self.store.board, group, self.world, timeout, members=members)
            try:
                follower.join(None)
            except BaseException as problem:
                follower.fail(problem)
                raise
            step = follower.outcome()["step"]
            return None if step is None else self.load(named_manifest(self.store, step))
        leader = Leader(self.store.board, group, self.world, timeout, secrets.token_hex(8), members=members)
        found: list[LoadedStep | None] = []

        def action() -> dict[str, Any]:
            leader.admit()
            found.append(self.latest())
            return {"step": found[0].manifest.step if found[0] is not None else None}

        lead(leader, action)
        return found[0]

    def latest(self) -> LoadedStep | None:
        """Return the newest step that is not damaged. Damaged ones are logged; raises if all are."""
        return retrying(self.store, self._latest)

    def _latest(self) -> LoadedStep | None:
        manifests, errors = read_manifests(self.store)
        problems = [f"step {step}: {error}" for step, error in errors.items() if _is_damage(error)]
        newer = {step: error for step, error in errors.items() if not _is_damage(error)}
        for manifest in reversed(manifests):
            if newer and max(newer) > manifest.step:
                break  # it would be the latest: not a reason to fall back
            try:
                loaded = self.load(manifest)
            except CheckpointDamagedError as problem:
                if self.store.manifest(manifest.step) != manifest:  # saved again by another process meanwhile
                    raise StepRemovedError(f"step {manifest.step} was saved again") from None
                problems.append(f"step {manifest.step}: {problem}")
                self.damaged.add((manifest.step, manifest.sequence))
                continue
            for text in problems:
                _log.error("%s: %s. Falling back to step %d.", self.store.name, text, manifest.step)
            return loaded
        if newer:
            raise newer[max(newer)]
        if problems:
            raise CheckpointDamagedError(
                f"no step of {self.store.name} can be restored: {'; '.join(problems)}. "
                "To start from the beginning, use another folder."
            )
        return None


def _is_damage(error: CheckpointError) -> bool:
    """Return False for a step of a newer version."""
    return isinstance(error, CheckpointDamagedError)


def named_manifest(store: CheckpointStore, step: int) -> Manifest:
    """Return the manifest of a step; errors name the steps that exist, or the folder."""
    try:
        return store.manifest(step)
    except CheckpointNotFoundError as problem:
        steps = ", ".join(map(str, store.steps()[-8:])) or "none"
        raise CheckpointNotFoundError(f"{problem}. Existing steps: {steps}.") from None
    except CheckpointDamagedError as problem:
        raise CheckpointDamagedError(f"step {step} of {store.name}: {problem}.") from None


def _undo(pipeline: Any) -> Callable[[], None]:
    """Return an action that resets a pipeline. Not a StatefulDataLoader: it would start its workers for its state."""
    if not stateful.is_iterator(pipeline):
        return lambda: None
    try:
        before = stateful.state_of(pipeline)
    except Exception:  # it has no state yet
        return lambda: None
    return lambda: stateful.load_state(pipeline, before, "data")


def _check_class(manifest: Manifest, name: str, target: Any) -> None:
    """Raise CheckpointMismatchError for the state of another class, where nothing else distinguishes them."""
    saved = manifest.parts.get(name if name in ("data", "model", "optimizer") else f"extra.{name}")
    current = stateful.class_name(target)
    if not stateful.is_identified_by_class(target) or not isinstance(saved, str):
        return
    if saved.split(".")[-1] != current.split(".")[-1]:  # a script's own classes have another module when imported
        cause = "another class (if it was only renamed, take its state from PipelineCheckpoint.read)"
        raise CheckpointMismatchError(f"the class of {name}", saved, current, cause)


def _restore_one(manifest: Manifest, name: str, restore: Callable[[], None]) -> None:
    try:
        restore()
    except CheckpointMismatchError:
        raise
    except Exception as problem:
        raise CheckpointError(
            f"step {manifest.step}: {name} refused its state ({type(problem).__name__}: {problem}). It may be restored "
            "in part. Create it again."
        ) from problem


def _generators(manifest: Manifest, world: World, read: Callable[[str], Any]) -> Callable[[], None] | None:
    """Return an action that sets the random generators: those of this rank, or new ones for an additional rank."""
    own = "rng" if world.rank == 0 and has_part(manifest, "rng") else rank_part("rng", world.rank)
    if has_part(manifest, own):
        state = rng.checked(read(own))
        return lambda: rng.restore(state)
    for part in ("rng", rank_part("rng", 0)):
        if has_part(manifest, part):
            state = rng.checked(read(part))
            return lambda: rng.reseed(state, world.rank)
    return None
