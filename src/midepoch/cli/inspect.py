"""``midepoch inspect``, ``diff`` and ``verify``: states and checkpoints, in words."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from midepoch.cli import common
from midepoch.cli.common import Answer
from midepoch.cli.data import Format, Made, Part, Step, Storage, data_given
from midepoch.errors import CheckpointNotFoundError, StateError
from midepoch.storage.address import Address

_TEXT = 1000

State = Annotated[
    str,
    typer.Argument(
        help="A state as a JSON file, a folder or address of checkpoints, the folder of a run, or the output of "
        "Hugging Face's Trainer, Accelerate or Lightning.",
        show_default=False,
    ),
]


def inspect(
    state: State,
    step: Step = None,
    part: Part = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of a rank and step, to compute the steps left.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks, to compute the steps left.")] = 1,
    last_batch: Annotated[str, typer.Option(help="drop, pad or uneven, as for the loader.")] = "uneven",
) -> Answer:
    """Describe a state or checkpoint: epoch, percent, next file and row, steps left.

    midepoch inspect state.json

    midepoch inspect runs/7/checkpoints --step 4000 --batch-size 32 --world-size 8

    midepoch inspect trainer_output
    """
    from midepoch.cli.states import open_state
    from midepoch.tools.describe import describe

    found, number, place = open_state(state, step, part)
    summary = describe(found, batch_size=batch_size, world_size=world_size, last_batch=last_batch)
    title = Address(place).public if number is None else f"{Address(place)}, step {number}"
    lines = summary.lines() | ({"sources": "\n".join(summary.sources)} if summary.sources else {})
    table = [{"name": name, "text": text} for name, text in lines.items()]
    about = {"step": number, "place": Address(place).public, **asdict(summary), "share": summary.share}
    return Answer(about, lambda: common.print_table(table, title=title, header=False))


def diff(
    first: State,
    second: Annotated[str | None, typer.Argument(help="Another state or folder of checkpoints.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files to compare with instead. Repeatable.")] = None,
    dataset: Made = None,
    step: Annotated[int | None, typer.Option(help="The step of the first checkpoints.")] = None,
    other_step: Annotated[int | None, typer.Option(help="The step of the second checkpoints.")] = None,
    part: Part = None,
    storage: Storage = None,
    format: Format = None,
) -> Answer:
    """Show the differences between two states, or a state and a dataset, and whether it would resume.

    Exits with 1 if it would be refused.

    midepoch diff monday.json tuesday.json

    midepoch diff runs/7/checkpoints runs/8/checkpoints --step 100 --other-step 200

    midepoch diff state.json --dataset train.py:make_loader
    """
    from midepoch.cli.states import open_state
    from midepoch.tools.describe import differences

    if sum(given is not None for given in (second, data or None, dataset)) != 1:
        raise ValueError("pass one thing to compare with: a second state, --data or --dataset")
    state = open_state(first, step, part).state
    other = data_given(dataset, data, state, storage, format)
    if other is None:
        other = open_state(str(second), other_step, part).state
    fields = differences(state, other)
    problem = next((f"{one.field} differs: {one.cause}" for one in fields if one.cause), None)
    if second is None:
        try:
            other.check_state(state)
            problem = None
        except StateError as refused:
            problem = str(refused)

    def show() -> None:
        common.print_table(
            {
                "field": one.field,
                "first": common.short(one.first, _TEXT),
                "second": common.short(one.second, _TEXT),
                "what it means": one.cause or "does not matter",
            }
            for one in fields
        )
        if problem is not None:
            common.say(("would not resume", "red"), f": {problem}")
        elif second is None:
            common.say(("would resume", "green"))
        else:
            same = "the same data, order and pipeline" if fields else "the same position"
            common.say((same, "green"), ": each can be loaded in place of the other")

    differs = [each._asdict() for each in fields]
    bad = problem is not None
    return Answer({"resumes": not bad, "problem": problem, "differs": differs}, show, bad)


def verify(
    checkpoints: Annotated[str, typer.Argument(help="A folder or address of checkpoints.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
) -> Answer:
    """Read every byte of a folder of checkpoints, and report damaged steps.

    Exits with 1 if one is damaged.

    midepoch verify runs/7/checkpoints

    midepoch verify s3://bucket/run/checkpoints --step 4000
    """
    from midepoch._internal.progress import Bar
    from midepoch.checkpoint import PipelineCheckpoint
    from midepoch.checkpoint.manager import step_health
    from midepoch.cli.states import checkpoint_folder

    checkpoints = checkpoint_folder(checkpoints)
    saved = PipelineCheckpoint(checkpoints, rank=0, world_size=1)
    steps = saved.steps() if step is None else [step]
    if not steps:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {Address(checkpoints)}. Pass the folder that PipelineCheckpoint was given."
        )
    checked = []
    with Bar("verifying", "steps") as bar:
        for number, one in enumerate(steps, 1):
            checked.append(step_health(saved, one, read=True))
            bar.update(number, len(steps))
    rows = (
        {
            "step": str(each.step),
            "saved": time.strftime("%Y-%m-%d %H:%M", time.localtime(each.time)) if each.time else "?",
            "ranks": each.world_size or "?",
            "parts": ", ".join(each.parts),
            "size": "?" if each.bytes is None else common.bytes_text(each.bytes),
            "": ("complete", "green") if each.problem is None else (each.problem, "red"),
        }
        for each in checked
    )
    return Answer(
        list(map(asdict, checked)),
        lambda: common.print_table(rows, title=Address(checkpoints).public, right=("step", "ranks", "size")),
        any(each.problem is not None for each in checked),
    )
