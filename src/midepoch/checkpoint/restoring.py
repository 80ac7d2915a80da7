"""Restoring of a step: everything needed is read and verified before anything is changed."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from midepoch.checkpoint import files, rng, stateful
from midepoch.checkpoint.backends import Backend, Restorable
from midepoch.checkpoint.local import verified
from midepoch.checkpoint.manifest import Manifest, checked_name
from midepoch.checkpoint.rendezvous import Follower, Leader, Members, Notes, lead
from midepoch.checkpoint.saving import BACKEND_PART, Contents, rank_part
from midepoch.checkpoint.store import StepRemovedError, Steps
from midepoch.checkpoint.tree import StoredTree
from midepoch.distributed.world import World
from midepoch.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, CheckpointNotFoundError

_log = logging.getLogger("midepoch")


@dataclass(frozen=True)
class Step:
    """A step and its files. Everything that is read is verified, or CheckpointDamagedError is raised."""

    steps: Steps
    manifest: Manifest
    allow_pickle: bool

    def verify(self, besides: Collection[str] = ()) -> None:
        """Read every file; the error has the name of the first damaged one."""
        for name, sums in self.manifest.files.items():
            if name not in besides:
                files.verify_file(self.steps.source(self.manifest, name), sums, name)

    def has(self, part: str) -> bool:
        return f"{part}.json" in self.manifest.files

    def json(self, part: str) -> Any:
        """Return the JSON of a part. CheckpointNotFoundError if the step has none of that name."""
        name = f"{part}.json"
        if not self.has(part):
            parts = ", ".join(sorted(map(str, self.manifest.parts))) or "nothing"
            raise CheckpointNotFoundError(
                f"step {self.manifest.step} was saved without {part}. It has: {parts}. Omit the rest."
            )
        try:
            source = self.steps.source(self.manifest, name)
            return json.loads(bytes(files.read_verified(source, self.manifest.files[name], name)))
        except (ValueError, RecursionError) as problem:
            raise CheckpointDamagedError(f"{name} cannot be read: {problem!r:.200}") from None

    def open(self, part: str) -> StoredTree:
        """Return the tree of a part, its arrays not read yet."""
        name = f"{part}.safetensors"

        def source() -> files.FileSource:
            if name not in self.manifest.files:
                raise CheckpointDamagedError(f"{name} is missing")
            return verified(self.steps.source(self.manifest, name), self.manifest.files[name], name)

        return StoredTree.opened(self.json(part), source, self.allow_pickle)

    def data_part(self, world: World) -> str:
        """Return the name of the part with this rank's state of the pipeline."""
        own = rank_part("data", world.rank)
        if self.manifest.world_size != world.size and self.has(rank_part("data", 0)):
            raise CheckpointMismatchError(
                "world_size",
                self.manifest.world_size,
                world.size,
                "each rank saved its own state, which only fits the same world size; ds.loader(…) of midepoch saves "
                "one state for any world size",
            )
        return own if self.has(own) else "data"


@dataclass(frozen=True)
class LoadedStep:
    """A step that was read and verified; nothing has been restored yet."""

    step: Step
    targets: Contents
    parts: list[Restorable]  # without those that a backend restores
    set_generators: Callable[[], None] | None

    def restore(self, backend_of: Callable[[Manifest], Backend]) -> int:
        """Restore everything, or raise and leave the pipeline as it was. CheckpointMismatchError if it does not fit.

        Returns the number of the step.
        """
        manifest, parts = self.step.manifest, [*self.parts]
        for part in parts:
            part.check()
        self._note_others()
        with ExitStack() as stack:
            if self.targets.models and manifest.backend != "files":
                folder = stack.enter_context(self.step.steps.store.local_copy(manifest))
                parts += backend_of(manifest).load(folder / BACKEND_PART, self.targets.models, self.step.json)
            self._restore_all(parts)
        return manifest.step

    def _note_others(self) -> None:
        """Warn of parts that are not restored. The weights alone are for something else."""
        targets, manifest = self.targets, self.step.manifest
        names = {*targets.models, *targets.extra} | ({"data"} if targets.pipeline is not None else set())
        own = ("data-", "rng-")  # of each rank
        saved = {part.partition("-")[0] if part.startswith(own) else part for part in manifest.parts}
        left = [part for part in sorted(saved - {"rng"}) if part.removeprefix("extra.") not in names]
        if left and names & {"data", "optimizer"}:
            texts = [f"extra={{{part[6:]!r}: …}}" if part.startswith("extra.") else f"the {part}" for part in left]
            _log.warning(
                "step %d also has %s: restore was not given %s. Pass %s, or the values and the data are of "
                "different steps.",
                manifest.step, " and ".join(texts), *["them" if len(left) > 1 else "it"] * 2,
            )  # fmt: skip

    def _restore_all(self, parts: Sequence[Restorable]) -> None:
        undo = _undo(self.targets.pipeline)
        try:
            for part in parts:
                try:
                    part.restore()
                except Exception as problem:
                    if part.name == "data" or isinstance(problem, CheckpointMismatchError):
                        raise
                    raise CheckpointError(
                        f"step {self.step.manifest.step}: {part.name} refused its state "
                        f"({type(problem).__name__}: {problem}). It may be restored in part. Create it again."
                    ) from problem
        except BaseException:
            undo()
            raise
        if self.set_generators is not None:
            self.set_generators()


@dataclass(frozen=True)
class StepLoader:
    """Loader of the steps of a store into these targets.

    The (step, sequence) of steps that are found damaged are added to ``damaged``.
    """

    steps: Steps
    targets: Contents
    world: World
    allow_pickle: bool
    damaged: set[tuple[int, int]]

    def load(self, manifest: Manifest) -> LoadedStep:
        """Read the parts of a step for the targets, and verify all of it. Raises CheckpointDamagedError."""
        step = Step(self.steps, manifest, self.allow_pickle)
        seen: set[str] = set()

        def opened(part: str) -> StoredTree:
            seen.update((f"{part}.json", f"{part}.safetensors"))
            return step.open(part)

        parts: list[Restorable] = []

        def add(name: str, part: str, target: Any) -> None:
            saved_class, stored = manifest.parts.get("data" if part.startswith("data") else part), opened(part)
            is_lazy = stateful.reads_lazily(target)
            outline = stored.outline() if is_lazy else stored.read()

            def check() -> None:
                stateful.check_class(target, saved_class, name)
                stateful.check_fits(target, outline, name)

            def restore() -> None:
                tree = stored.read(stateful.restore_targets(target, outline)) if is_lazy else outline
                stateful.load_state(target, tree, name)

            parts.append(Restorable(name, restore, check))

        pipeline = self.targets.pipeline
        if pipeline is not None:
            ranks = [rank_part("data", rank) for rank in range(manifest.world_size)]
            # Some resume from the states of all ranks, with any world size.
            if getattr(pipeline, "takes_states_of_all_ranks", False) and ranks and all(map(step.has, ranks)):
                states = [opened(part).read() for part in ranks]
                restore = partial(stateful.load_state, pipeline, states, "data")
                parts.append(Restorable("data", restore, partial(stateful.check_fits, pipeline, states, "data")))
            else:
                add("data", step.data_part(self.world), pipeline)
        for name, target in self.targets.extra.items():
            add(name, f"extra.{checked_name(name)}", target)
        for name, target in self.targets.models.items() if manifest.backend == "files" else ():
            add(name, name, target)
        set_generators = _generators(step, self.world, opened) if self.targets.rng else None
        step.verify(besides=seen)
        return LoadedStep(step, self.targets, parts, set_generators)

    def agreed_latest(self, group: str, timeout: float, members: Members) -> LoadedStep | None:
        """Return the latest step that is not damaged: rank 0 finds it for all ranks."""
        if self.world.size == 1:
            return self.latest()
        members.forget()
        notes = Notes(self.steps.store, group)
        if self.world.rank:
            follower = Follower(notes, self.world, timeout, members)
            try:
                follower.join(None)
            except BaseException as problem:
                follower.fail(problem)
                raise
            step = follower.outcome()["step"]
            return None if step is None else self.load(named_manifest(self.steps, step))
        leader = Leader(notes, self.world, timeout, members, secrets.token_hex(8))

        def action() -> tuple[int | None, LoadedStep | None]:
            leader.admit()
            found = self.latest()
            return None if found is None else found.step.manifest.step, found

        return lead(leader, action)

    def latest(self) -> LoadedStep | None:
        """Return the newest step that is not damaged. Damaged ones are logged; raises if all are."""
        return self.steps.retrying(self._latest)

    def _latest(self) -> LoadedStep | None:
        manifests, errors = self.steps.manifests()
        newer = {step: error for step, error in errors.items() if not isinstance(error, CheckpointDamagedError)}
        problems = [f"step {step}: {error}" for step, error in errors.items() if step not in newer]
        for manifest in reversed(manifests):
            if newer and max(newer) > manifest.step:
                break  # it would be the latest: not a reason to fall back
            try:
                loaded = self.load(manifest)
            except CheckpointDamagedError as problem:
                if self.steps.manifest(manifest.step) != manifest:  # saved again by another process meanwhile
                    raise StepRemovedError(f"step {manifest.step} was saved again") from None
                problems.append(f"step {manifest.step}: {problem}")
                self.damaged.add((manifest.step, manifest.sequence))
                continue
            for text in problems:
                _log.error("%s: %s. Falling back to step %d.", self.steps.name, text, manifest.step)
            return loaded
        if newer:
            raise newer[max(newer)]
        if problems:
            raise CheckpointDamagedError(
                f"no step of {self.steps.name} can be restored: {'; '.join(problems)}. "
                "To start from the beginning, use another folder."
            )
        if others := _instead_of_steps(self.steps.name):
            _log.warning("%s has no step: nothing is restored. %s", self.steps.name, others)
        else:
            _log.info("%s has no step: this is a first start", self.steps.name)
        return None


_LISTED = 20


def _instead_of_steps(folder: str) -> str:
    """Return what a local folder has that could be meant, as a sentence, or ""."""
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.startswith("checkpoint-") or name.endswith((".pt", ".pth", ".ckpt", ".safetensors")):
                return f"It has {name}, which another library wrote: load it with that."
            inside = os.path.join(folder, name)
            if os.path.isdir(inside) and any(one.startswith("step_") for one in os.listdir(inside)):
                return f"There are steps in {inside}: use PipelineCheckpoint({inside!r})."
    with suppress(OSError):
        parent, own = os.path.split(os.path.abspath(folder))
        letters = _DIGITS.sub("", own)  # runs/7 is no misspelt runs/6
        others = [name for name in os.listdir(parent) if _DIGITS.sub("", name) != letters]
        for name in difflib.get_close_matches(own, others, 3, 0.75):
            beside = os.path.join(parent, name)
            if os.path.isdir(beside) and any(one.startswith("step_") for one in os.listdir(beside)):
                return f"There are steps in {beside}: if that is meant, use PipelineCheckpoint({beside!r})."
    return ""


_DIGITS = re.compile(r"\d+")


def named_manifest(steps: Steps, step: int) -> Manifest:
    """Return the manifest of a step; errors name the steps that exist, or the folder."""
    try:
        return steps.manifest(step)
    except CheckpointNotFoundError as problem:
        numbers = steps.numbers()
        existing = ", ".join([*["…"] * (len(numbers) > _LISTED), *map(str, numbers[-_LISTED:])]) or "none"
        raise CheckpointNotFoundError(f"{problem}. Existing steps: {existing}.") from None
    except CheckpointDamagedError as problem:
        raise CheckpointDamagedError(f"step {step} of {steps.name}: {problem}.") from None


def _undo(pipeline: Any) -> Callable[[], None]:
    """Return an action that resets a pipeline. Not a StatefulDataLoader: it would start its workers for its state."""
    if stateful.kind_of(pipeline) != "pipeline":
        return lambda: None
    try:
        before = stateful.state_of(pipeline)
    except Exception:  # it has no state yet
        return lambda: None
    return lambda: stateful.load_state(pipeline, before, "data")


def _generators(step: Step, world: World, opened: Callable[[str], StoredTree]) -> Callable[[], None] | None:
    """Return an action that sets the random generators: those of this rank, or new ones for an additional rank."""
    own = "rng" if world.rank == 0 and step.has("rng") else rank_part("rng", world.rank)
    for part in (own, "rng", rank_part("rng", 0)):
        if step.has(part):
            state = rng.checked(opened(part).read())
            return lambda: rng.restore(state) if part == own else rng.reseed(state, world.rank)
    return None
