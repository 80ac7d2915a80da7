"""The state of a command: a JSON file, or a step of a folder of checkpoints of midepoch or of a framework."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from midepoch.checkpoint import PipelineCheckpoint
from midepoch.cli import common
from midepoch.cli.data import refuse_function
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError, StateError
from midepoch.sources.names import format_of_bytes
from midepoch.storage.address import Address, is_address
from midepoch.tools.describe import state_in

_TRAINER = "midepoch.json"
_ACCELERATE = re.compile(r"midepoch-(.+)\.json")
_LIGHTNING = ".ckpt"


class Chosen(NamedTuple):
    """A state, its step if it is that of a checkpoint, and the file or folder in which it was found."""

    state: Any
    step: int | None
    place: str


def open_state(where: str, step: int | None = None, part: str | None = None) -> Chosen:
    """Return the state in a file or a checkpoint. Default: the step that ``restore_latest`` takes.

    A folder may also be the output of Hugging Face's Trainer, of Accelerate's ``save_state`` or of Lightning, or the
    folder of a run with a folder ``checkpoints`` in it.
    """
    refuse_function(where)
    if is_address(where):
        return _of_midepoch(where, step, part)
    path = Path(where).expanduser()
    if not path.exists():
        raise CheckpointNotFoundError(
            f"{Address(where)} does not exist. Pass a state as a JSON file, or a folder of checkpoints."
        )
    if path.is_file():
        return _in_file(path, part)
    chosen = _of_framework(path, step, part)
    if chosen is None and (inner := checkpoint_folder(where)) != where:
        chosen = open_state(inner, step, part)
    return chosen or _of_midepoch(where, step, part)


def checkpoint_folder(where: str) -> str:
    """Return the folder ``checkpoints`` of the folder of a run, and any other folder or address as it is."""
    inner = Path(where).expanduser() / "checkpoints"
    if is_address(where) or not inner.is_dir():
        return where
    return where if PipelineCheckpoint(where, rank=0, world_size=1).latest_step() is not None else str(inner)


def _in_file(path: Path, part: str | None) -> Chosen:
    if path.suffix == _LIGHTNING:
        return _of_lightning(path, part)
    content = path.read_bytes()
    kind = format_of_bytes(content[:512])
    if kind is not None:
        raise StateError(f"{path} is data ({kind}), not a state. Use `midepoch info`, or `midepoch peek` for its rows.")
    if content.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise StateError(
            f"{path} is a file of torch.save. Write the state that is in it as JSON, in Python: "
            "json.dump(torch.load(path)[…], open('state.json', 'w'))."
        )
    try:
        tree = json.loads(content.decode())
    except ValueError as problem:
        raise StateError(
            f"{path} is not JSON: {problem}. Pass a state as a JSON file, or a folder of checkpoints."
        ) from None
    return Chosen(state_in(tree, part), None, str(path))


def _of_framework(folder: Path, step: int | None, part: str | None) -> Chosen | None:
    """Return the state in a folder that Trainer, Accelerate or Lightning has written, or None if it is none."""
    steps = {
        int(name[1]): path
        for path in (*folder.glob(f"checkpoint-*/{_TRAINER}"), folder / _TRAINER)
        if (name := re.fullmatch(r"checkpoint-(\d+)", path.resolve().parent.name)) is not None and path.is_file()
    }
    if steps:
        number = max(steps) if step is None else step
        if number not in steps:
            there = ", ".join(map(str, sorted(steps)))
            raise CheckpointNotFoundError(f"there is no step {number} with {_TRAINER} in {folder}. There are: {there}.")
        return _in_file(steps[number], part)._replace(step=number)
    if (folder / _TRAINER).is_file():
        return _in_file(folder / _TRAINER, part)
    prepared = {name[1]: path for path in folder.iterdir() if (name := _ACCELERATE.fullmatch(path.name)) is not None}
    if part in prepared:
        return _in_file(prepared[part], None)
    if len(prepared) > 1:
        raise CheckpointNotFoundError(
            f"there are several loaders in {folder}. Choose one with --part: {', '.join(sorted(prepared))}."
        )
    if prepared:
        return _in_file(next(iter(prepared.values())), part)
    saved = sorted(folder.glob(f"*{_LIGHTNING}"), key=lambda path: path.stat().st_mtime)
    if step is not None:
        saved = [path for path in saved if re.search(rf"step={step}\b", path.name)]
    return _in_file(saved[-1], part) if saved else None


def _of_lightning(path: Path, part: str | None) -> Chosen:
    """Return the state in a checkpoint of Lightning. It is read without running any code that is in it."""
    try:
        import torch
    except ImportError:
        raise StateError(
            f"{path} is a checkpoint of Lightning, which needs torch to be read: pip install torch"
        ) from None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as problem:
        reason = str(problem).splitlines()[0]
        raise StateError(
            f"{path} cannot be read without running code that is in it: {reason} In Python, "
            'torch.load(path, weights_only=False)["ResumableData"]["train"] is the state, if you trust the file.'
        ) from None
    data = saved.get("ResumableData") if isinstance(saved, dict) else None
    if not data:
        raise CheckpointNotFoundError(
            f"{path} does not contain the position in the data: it was written without ResumableData."
        )
    return Chosen(state_in(data, part), saved.get("global_step"), str(path))


def _of_midepoch(where: str, step: int | None, part: str | None) -> Chosen:
    saved = PipelineCheckpoint(where, rank=0, world_size=1)
    latest = saved.latest_step()
    if latest is None:
        there = ""
        if not is_address(where):
            names = sorted(os.listdir(os.path.expanduser(where)))
            there = (
                f", which contains {', '.join(names[:5])}{', …' * (len(names) > 5)}" if names else ", which is empty"
            )
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {Address(where)}{there}. Pass the folder that PipelineCheckpoint was given; "
            "data goes to --data."
        )
    if step is not None:
        return Chosen(_read(saved, where, step, part), step, where)
    for number in (latest, *(older for older in reversed(saved.steps()) if older != latest)):
        try:
            return Chosen(_read(saved, where, number, part), number, where)
        except CheckpointDamagedError as problem:
            common.say((f"step {number} would be skipped: {problem}", "yellow"), to=common.errors)
    raise CheckpointDamagedError(f"all steps in {Address(where)} are damaged.")


def _read(saved: PipelineCheckpoint, where: str, step: int, part: str | None) -> Any:
    """Return the state in a step, or the list of those of all ranks if each has saved its own."""
    if part not in (None, "data"):
        with suppress(CheckpointNotFoundError):
            return state_in(saved.read(step, part))
    name = None if part == "data" else part  # of one of several pipelines that were saved together
    manifest = saved.manifest(step)
    if "data.json" in manifest.files:
        return state_in(saved.read(step, "data"), name)
    size = manifest.world_size
    ranks = (PipelineCheckpoint(where, rank=rank, world_size=size) for rank in range(size))
    states = [state_in(rank.read(step, "data"), name) for rank in ranks]
    return states if size > 1 else states[0]
