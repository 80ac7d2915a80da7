"""``midepoch plan``: the effect of a resume, or the consumption of a schedule."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from midepoch._internal.address import Address
from midepoch.cli import common
from midepoch.cli.data import Format, Made, Storage, data_of_state, made_by

if TYPE_CHECKING:
    from midepoch.tools.plan import ResumePlan

_RANKS, _ROWS = 8, 12


def plan(
    checkpoint: Annotated[
        str | None, typer.Option(help="A folder or address of checkpoints, or a state as a JSON file.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks of the resumed run.", min=1)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows of each rank at a step. Not for batches by max_tokens.", min=1)
    ] = None,
    num_workers: Annotated[int, typer.Option(help="Workers of each rank.", min=0)] = 0,
    step: Annotated[int | None, typer.Option(help="The step of the checkpoints. Default: the latest.")] = None,
    part: Annotated[str | None, typer.Option(help="The part of the checkpoint: data, or the name of an extra.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files to check the state against. Repeatable.")] = None,
    storage: Storage = None,
    format: Format = None,
    dataset: Made = None,
    last_batch: Annotated[
        str | None, typer.Option(help="drop, pad or uneven, as for the loader. [default: uneven, or the loader's]")
    ] = None,
    machines: Annotated[int, typer.Option(help="Number of machines of the ranks.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Number of steps whose rows are shown.", min=0)] = 3,
    schedule: Annotated[
        str | None, typer.Option(help="A schedule as a YAML or JSON file, instead of a checkpoint.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of a source of the schedule. Default: those in its file. Repeatable."),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column with the tokens of a row. Default: input_ids, where it exists.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks of the run of the schedule.", min=1)] = 1,
    eos: Annotated[bool, typer.Option("--eos", help="pack() adds a token to each document.")] = False,
    seed: Annotated[int, typer.Option(help="The seed of the mix of the schedule.", min=0)] = 0,
    as_json: common.AsJson = False,
) -> None:
    """Show the effect of a resume: the next rows, steps left, reads of each machine. Or what a schedule will consume.

    With --checkpoint and --world-size: the effect of a resume. Exits with 1 if the state would be refused.

    With --schedule: rows, tokens and passes by phase and source. Exits with 1 if a phase cannot be filled.

    [bold]midepoch plan --checkpoint runs/7/checkpoints --world-size 6 --num-workers 4 --batch-size 48[/]

    [bold]midepoch plan --checkpoint state.json --world-size 64 --batch-size 8 --data 'data/*.parquet'[/]

    [bold]midepoch plan --checkpoint runs/7/checkpoints --world-size 6 --batch-size 48 --dataset train.py:make_loader[/]

    [bold]midepoch plan --schedule run.yaml --source 'web=data/web/*.parquet' --source code=data/code --ranks 64[/]
    """
    if schedule is not None:
        if checkpoint is not None:
            raise ValueError("--checkpoint and --schedule cannot be used together. Use one of them.")
        from midepoch.cli.schedule import plan_file

        plan_file(schedule, source, storage, as_json, column=column, ranks=ranks, eos=eos, seed=seed)
        return
    if checkpoint is None or world_size is None:
        missing = "--checkpoint" if checkpoint is None else "--world-size"
        raise ValueError(f"plan needs {missing}. Use --checkpoint and --world-size, or --schedule.")
    for name, given in (("--source", source), ("--column", column), ("--eos", eos)):
        if given:
            raise ValueError(f"{name} requires --schedule.")
    from midepoch.cli.states import open_state
    from midepoch.tools.plan import plan_resume

    state, which, place = open_state(checkpoint, step, part, ranks=world_size)
    made = made_by(dataset) if dataset is not None else data_of_state(data, state, storage, format) if data else None
    resume = plan_resume(
        state,
        made,
        world_size=world_size,
        batch_size=batch_size,
        num_workers=num_workers,
        last_batch=last_batch,
        steps=steps,
        machines=machines,
    )
    if as_json:
        common.print_json(
            {"checkpoint": Address(place).public, "step": which, "num_workers": num_workers, **asdict(resume)}
        )
    else:
        _show(resume, which, world_size)
    if not resume.accepted:
        raise typer.Exit(1)


def _show(plan: ResumePlan, step: int | None, ranks: int) -> None:
    say = common.say
    if not plan.accepted:
        say(("refused", "red"), ": the state would not be loaded.")
        say(plan.problem or "")
        return
    against = {"dataset": "checked against the dataset", "index": "its data was found by its fingerprint"}
    which = f" (step {step})" if step is not None else ""
    say(("accepted", "green"), f"{which}: {against.get(plan.checked, 'not checked')}")
    about = "about " if plan.lanes else ""
    if plan.rows:
        share = 100 * plan.position / plan.rows
        say(f"epoch {plan.epoch}, position {plan.position:,} of {about}{plan.rows:,} ({share:.1f} %)")
        say(
            f"{about}{plan.steps_left:,} steps left in this epoch, {plan.steps_per_epoch:,} in each one after it; "
            f"global batch {plan.global_batch:,}"
        )
    else:
        say(f"epoch {plan.epoch}, position {plan.position:,}; global batch {plan.global_batch:,}")
    for rank, lanes in list(enumerate(plan.lanes))[:_RANKS]:
        say(f"rank {rank} runs lane{'s' * (len(lanes) > 1)} {', '.join(map(str, lanes[:_ROWS]))}")
    if plan.excluded:
        say(f"{plan.excluded:,} {'outputs' if plan.lanes else 'positions'} ahead are excluded, or acknowledged already")
    if plan.dropped:
        say(f"{plan.dropped:,} rows at the end of the epoch are dropped")
    if plan.padded:
        say(f"the last step is padded with {plan.padded:,} rows")
    if plan.ranks_left_out:
        left_out = f"the last step has no row for {plan.ranks_left_out} of {ranks} ranks. Use last_batch drop or pad."
        say((left_out, "yellow"))
    for note in plan.notes:
        say((note, "yellow"))
    if plan.batches:
        common.console.print(_rows_table(plan, ranks))
    table = Table(title="until the end of the epoch", title_justify="left")
    for name in ("machine", "ranks", "rows", "blocks", "about MB"):
        table.add_column(name, justify="right")
    for number, one in enumerate(plan.machines):
        size = "?" if one.bytes is None else f"{one.bytes / 1e6:,.1f}"
        blocks = "?" if one.blocks is None else f"{one.blocks:,}"
        table.add_row(str(number), "{} to {}".format(*one.ranks), f"{one.rows:,}", blocks, size)
    common.console.print(table)


def _rows_table(plan: ResumePlan, ranks: int) -> Table:
    table = Table(title="the next rows, by their numbers before the shuffle", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("rows")
    for number, batch in enumerate(plan.batches, 1):
        for rank, rows in list(enumerate(batch))[:_RANKS]:
            more = ", …" if len(rows) > _ROWS else ""
            table.add_row(f"+{number}", str(rank), ", ".join(map(str, rows[:_ROWS])) + more)
        if ranks > _RANKS:
            table.add_row("", "…", f"{ranks - _RANKS} more ranks (all of them with --json)")
    return table
