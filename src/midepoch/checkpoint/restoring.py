"""Restoring a step: all that is wanted of it is read and checked before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from midepoch.checkpoint import inplace, loading, parts, rng
from midepoch.checkpoint.backends import Backend, Restorable
from midepoch.checkpoint.directory import Directory, VanishedError
from midepoch.checkpoint.manifest import Manifest, checked_name
from midepoch.checkpoint.saving import BACKEND_PART
from midepoch.checkpoint.stored import StoredTree
from midepoch.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from midepoch.world import World

_log = logging.getLogger("midepoch")
_LOOKS = 100


@dataclass(frozen=True)
class Wanted:
    """What to restore into."""

    pipeline: Any = None
    models: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    rng: bool = True


@dataclass(frozen=True)
class Values:
    """The values that were saved of a thing. ``outline`` says what they are, with arrays that may not be read yet."""

    name: str
    thing: Any
    outline: Any
    read: Callable[[], Any]


@dataclass(frozen=True)
class Loaded:
    """A step, read and found whole; nothing has been restored yet."""

    directory: Directory
    manifest: Manifest
    trees: list[Values]
    models: Mapping[str, Any]  # those that a backend restores
    generators: Callable[[], None] | None
    read_json: Callable[[str], Any]
    allow_pickle: bool

    def restore(self, backend_of: Callable[[Manifest], Backend]) -> None:
        """Restore everything, or raise and leave the pipeline as it was. CheckpointMismatchError if it does not fit."""
        for values in self.trees:
            _check_class(self.manifest, values.name, values.thing)
            parts.check(values.thing, values.outline, values.name)
        if not self.models:
            self._give_all([])
            return
        backend = backend_of(self.manifest)
        with self.directory.fetched(self.manifest) as folder:
            self._give_all(
                backend.load(folder / BACKEND_PART, self.models, self.read_json, allow_pickle=self.allow_pickle)
            )

    def _give_all(self, models: list[Restorable]) -> None:
        undo: list[Callable[[], None]] = []
        try:
            for values in self.trees:
                if values.name == "data":
                    undo.append(_undo(values.thing))
                    parts.give(values.thing, values.read(), values.name)
                else:
                    _give(self.manifest, values.name, partial(_read_and_give, values))
            for model in models:
                _give(self.manifest, model.name, model.give)
        except BaseException:
            for back in undo:
                back()
            raise
        if self.generators is not None:
            self.generators()


def load(directory: Directory, manifest: Manifest, wanted: Wanted, world: World, allow_pickle: bool) -> Loaded:
    """Read what is wanted of a step, and check all of it. Raises CheckpointDamagedError."""

    def opened(part: str) -> StoredTree:
        seen.update((f"{part}.json", f"{part}.safetensors"))
        return loading.open_part(directory, manifest, part, allow_pickle=allow_pickle)

    def read(part: str) -> Any:
        return opened(part).read()

    seen: set[str] = set()
    trees: list[Values] = []
    if wanted.pipeline is not None:
        everyone = loading.rank_parts("data", manifest)
        every = everyone and parts.takes_all(wanted.pipeline)
        state = [read(part) for part in everyone] if every else read(loading.data_part(manifest, world))
        trees.append(Values("data", wanted.pipeline, state, lambda: state))
    trees += [_values(name, thing, opened(f"extra.{checked_name(name)}")) for name, thing in wanted.extra.items()]
    own = manifest.backend == "files"
    if own:
        trees += [_values(name, thing, opened(name)) for name, thing in wanted.models.items()]
    else:
        loading.check_arrays_of(manifest, wanted.models)
    generators = _generators(manifest, world, read) if wanted.rng else None
    loading.verify(directory, manifest, besides=seen)
    return Loaded(
        directory,
        manifest,
        trees,
        {} if own else wanted.models,
        generators,
        lambda part: loading.read_json(directory, manifest, part),
        allow_pickle,
    )


def _values(name: str, thing: Any, stored: StoredTree) -> Values:
    if parts.reads_later(thing):
        return Values(name, thing, stored.outline(), lambda: stored.read(inplace.targets(thing, stored.json)))
    tree = stored.read()
    return Values(name, thing, tree, lambda: tree)


def _read_and_give(values: Values) -> None:
    parts.give(values.thing, values.read(), values.name)


def latest(
    directory: Directory, wanted: Wanted, world: World, allow_pickle: bool, damaged: set[tuple[int, int]]
) -> Loaded | None:
    """The step that was committed last and is not damaged. Passing over one is logged; all damaged is an error.

    The (step, sequence) of those that were found damaged are added to ``damaged``.
    """
    for _ in range(_LOOKS):
        try:
            return _latest_of(directory, wanted, world, allow_pickle, damaged)
        except VanishedError:  # pruned by another process, which has committed a newer one before
            continue
    raise CheckpointError(f"the steps of {directory.name} are removed faster than they can be read.")


def _latest_of(
    directory: Directory, wanted: Wanted, world: World, allow_pickle: bool, damaged: set[tuple[int, int]]
) -> Loaded | None:
    problems: list[str] = []
    newer: dict[int, CheckpointError] = {}
    manifests: list[Manifest] = []
    for step in directory.steps():
        try:
            manifests.append(directory.manifest(step))
        except VanishedError:
            raise
        except CheckpointDamagedError as problem:
            problems.append(f"step {step}: {problem}")
        except CheckpointError as problem:  # of a newer version
            newer[step] = problem
    for manifest in sorted(manifests, key=lambda one: (one.sequence, one.step), reverse=True):
        if newer and max(newer) > manifest.step:
            raise newer[max(newer)]  # it would be the latest: not a reason to fall back
        try:
            found = load(directory, manifest, wanted, world, allow_pickle)
        except CheckpointDamagedError as problem:
            if directory.manifest(manifest.step) != manifest:  # saved again by another process while it was read
                raise VanishedError(f"step {manifest.step} was saved again") from None
            problems.append(f"step {manifest.step}: {problem}")
            damaged.add((manifest.step, manifest.sequence))
            continue
        for text in problems:
            _log.error("%s: %s. It was passed over for step %d.", directory.name, text, manifest.step)
        return found
    if newer:
        raise newer[max(newer)]
    if problems:
        raise CheckpointDamagedError(
            f"no step of {directory.name} can be restored: {'; '.join(problems)}. "
            "To start without, name another folder."
        )
    return None


def _undo(pipeline: Any) -> Callable[[], None]:
    """What puts a pipeline back. Not a StatefulDataLoader: it would start its workers only to say where it stands."""
    if not parts.is_iterator(pipeline):
        return lambda: None
    try:
        before = parts.tree_of(pipeline)
    except Exception:  # one that has no state yet
        return lambda: None
    return lambda: parts.give(pipeline, before, "data")


def _check_class(manifest: Manifest, name: str, thing: Any) -> None:
    """Raise CheckpointMismatchError for the state of another class, where nothing else would tell them apart."""
    saved = manifest.parts.get(name if name in ("data", "model", "optimizer") else f"extra.{name}")
    current = parts.class_of(thing)
    # By the last name: a script's own classes lie in another module when they are imported.
    if parts.is_known_by_class(thing) and isinstance(saved, str) and saved.split(".")[-1] != current.split(".")[-1]:
        raise CheckpointMismatchError(
            f"the class of {name}",
            saved,
            current,
            "another class (if it was only renamed, take its state from PipelineCheckpoint.read)",
        )


def _give(manifest: Manifest, name: str, give: Callable[[], None]) -> None:
    try:
        give()
    except CheckpointMismatchError:
        raise
    except Exception as problem:
        raise CheckpointError(
            f"step {manifest.step}: {name} refused its state ({type(problem).__name__}: {problem}). It may be restored "
            "in part: make it anew."
        ) from problem


def _generators(manifest: Manifest, world: World, read: Callable[[str], Any]) -> Callable[[], None] | None:
    """What sets the random generators: those of this rank, or fresh ones for a rank that was not there."""
    own = "rng" if world.rank == 0 and loading.has_part(manifest, "rng") else loading.rank_part("rng", world.rank)
    if loading.has_part(manifest, own):
        state = rng.checked(read(own))
        return lambda: rng.restore(state)
    for part in ("rng", loading.rank_part("rng", 0)):
        if loading.has_part(manifest, part):
            state = rng.checked(read(part))
            return lambda: rng.reseed(state, world.rank)
    return None
