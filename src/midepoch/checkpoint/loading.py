"""Reading a step: all of it checked before any of it is restored."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from midepoch.checkpoint import files, tensors, tree
from midepoch.checkpoint.directory import Directory
from midepoch.checkpoint.manifest import Manifest
from midepoch.checkpoint.stored import Stored, StoredTree
from midepoch.errors import CheckpointDamagedError, CheckpointMismatchError, CheckpointNotFoundError
from midepoch.world import World


def verify(directory: Directory, manifest: Manifest, besides: Collection[str] = ()) -> None:
    """Read every file of a step; raises CheckpointDamagedError, which names the first that is not as it was written."""
    for name, sums in manifest.files.items():
        if name in besides:
            continue
        with directory.source(manifest, name) as source:
            files.check(source, sums, name)


def has_part(manifest: Manifest, part: str) -> bool:
    return f"{part}.json" in manifest.files


def open_part(directory: Directory, manifest: Manifest, part: str, *, allow_pickle: bool) -> StoredTree:
    """The tree of values of a part, checked. CheckpointNotFoundError if the step has none of that name."""
    text = read_json(directory, manifest, part)
    kinds = tree.array_kinds(text)
    arrays: Mapping[str, Stored] = {}
    if kinds:
        name = f"{part}.safetensors"
        if name not in manifest.files:
            raise CheckpointDamagedError(f"{name} is missing")
        with directory.source(manifest, name) as source:
            held = files.held(source, manifest.files[name], name)
        arrays = tensors.find(held, kinds.items())
    return StoredTree(text, arrays, allow_pickle)


def read_json(directory: Directory, manifest: Manifest, part: str) -> Any:
    """What a part's JSON says, checked."""
    if not has_part(manifest, part):
        raise _without(manifest, part)
    try:
        with directory.source(manifest, f"{part}.json") as source:
            return json.loads(bytes(files.read_checked(source, manifest.files[f"{part}.json"], f"{part}.json")))
    except (ValueError, RecursionError) as problem:
        raise CheckpointDamagedError(f"{part}.json cannot be read: {problem!r:.200}") from None


def check_arrays_of(manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointNotFoundError if a backend has not saved all of these."""
    for name in names:
        if name not in manifest.parts:
            raise _without(manifest, name)


def _without(manifest: Manifest, name: str) -> CheckpointNotFoundError:
    there = ", ".join(sorted(map(str, manifest.parts))) or "nothing"
    return CheckpointNotFoundError(f"step {manifest.step} was saved without {name}. It has: {there}.")


def data_part(manifest: Manifest, world: World) -> str:
    """The part that holds this rank's state of the pipeline."""
    if has_part(manifest, "data"):
        return "data"
    own = rank_part("data", world.rank)
    if manifest.world_size != world.size and has_part(manifest, rank_part("data", 0)):
        raise CheckpointMismatchError(
            "world_size",
            manifest.world_size,
            world.size,
            "each rank saved a state of its own, which fits the same number of ranks only; ds.loader(…) of midepoch "
            "keeps one for any number",
        )
    return own if has_part(manifest, own) else "data"


def rank_parts(part: str, manifest: Manifest) -> list[str]:
    """What every rank has saved for itself, in order; empty if none has."""
    found = [rank_part(part, rank) for rank in range(manifest.world_size)]
    return found if all(has_part(manifest, one) for one in found) else []


def rank_part(part: str, rank: int) -> str:
    """The name of what one rank of several has saved for itself."""
    return f"{part}-{rank:05d}"
