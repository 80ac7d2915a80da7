"""``midepoch plan``: what a resume would do."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from midepoch.checkpoint import PipelineCheckpoint
from midepoch.cli import common
from midepoch.dataset import Dataset
from midepoch.errors import CheckpointDamagedError, CheckpointNotFoundError, StateError
from midepoch.load import from_files, load_from_disk
from midepoch.loader import Loader
from midepoch.plan import ResumePlan, plan_resume, state_in
from midepoch.state import check

_RANKS, _ROWS = 8, 12


def plan(
    checkpoint: Annotated[str, typer.Option(help="A folder or address of checkpoints, or a state as a JSON file.")],
    world_size: Annotated[int, typer.Option(help="How many ranks there will be.", min=1)],
    batch_size: Annotated[int, typer.Option(help="How many rows each rank gets at a step.", min=1)],
    num_workers: Annotated[int, typer.Option(help="How many workers each rank has.", min=0)] = 0,
    step: Annotated[int | None, typer.Option(help="Which step of the checkpoints; the latest by default.")] = None,
    part: Annotated[
        str | None, typer.Option(help="Which part of the checkpoint: data, or the name of an extra.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="The files, to check the state against. Repeatable.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="A function that makes the dataset or loader: package.module:function or file.py:function."),
    ] = None,
    ends: Annotated[
        str | None, typer.Option(help="drop, pad or uneven, as for the loader. [default: uneven, or the loader's]")
    ] = None,
    machines: Annotated[int, typer.Option(help="Over how many machines the ranks are spread.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Of how many steps to show the rows.", min=0)] = 3,
    as_json: common.AsJson = False,
) -> None:
    """Say what a resume would do: accepted or the mismatch, the next rows, steps left, what each machine will read.

    Ends with 1 if the state would be refused.

    [bold]midepoch plan --checkpoint runs/7/checkpoints --world-size 6 --num-workers 4 --batch-size 48[/]

    [bold]midepoch plan --checkpoint state.json --world-size 64 --batch-size 8 --data 'data/*.parquet'[/]

    [bold]midepoch plan --checkpoint runs/7/checkpoints --world-size 6 --batch-size 48 --dataset train.py:make_loader[/]
    """
    state, which = _state(checkpoint, step, part, world_size)
    made = _made(dataset) if dataset is not None else _opened(data, state) if data else None
    found = plan_resume(
        state,
        made,
        world_size=world_size,
        batch_size=batch_size,
        num_workers=num_workers,
        ends=ends,
        steps=steps,
        machines=machines,
    )
    if as_json:
        common.print_json({"checkpoint": checkpoint, "step": which, "num_workers": num_workers, **asdict(found)})
    else:
        _show(found, which, world_size)
    if not found.accepted:
        raise typer.Exit(1)


def _state(checkpoint: str, step: int | None, part: str | None, ranks: int) -> tuple[Any, int | None]:
    """The state, and of which step: the one that ``restore_latest`` would take, if none is named."""
    if os.path.isfile(checkpoint):
        try:
            return state_in(json.loads(Path(checkpoint).read_text()), part), None
        except ValueError as problem:
            raise StateError(f"{checkpoint} is not JSON: {problem}") from None
    saved = PipelineCheckpoint(checkpoint, rank=0, world_size=ranks)
    latest = saved.latest_step()
    if latest is None:
        raise CheckpointNotFoundError(f"there is no checkpoint in {checkpoint}.")
    if step is not None:
        return _read(saved, step, part), step
    older = [number for number in reversed(saved.steps()) if number != latest]
    for number in (latest, *older):
        try:
            return _read(saved, number, part), number
        except CheckpointDamagedError as problem:
            common.console.print(f"[yellow]step {number} would be passed over: {problem}[/]")
    raise CheckpointDamagedError(f"all steps in {checkpoint} are damaged.")


def _read(saved: PipelineCheckpoint, step: int, part: str | None) -> Any:
    try:
        return state_in(saved.read(step, part or "data"))
    except CheckpointNotFoundError:
        if part is None:
            raise
        return state_in(saved.read(step, "data"), part)  # one of several pipelines that were saved together


def _made(name: str) -> Any:
    module, _, function = name.rpartition(":")
    if not module or not function:
        raise ValueError(f"--dataset takes package.module:function or file.py:function, got {name!r}")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).resolve().parent))
        found = runpy.run_path(module, run_name="midepoch_plan").get(function)
    else:
        sys.path.insert(0, os.getcwd())
        found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"there is no function {function!r} in {module}")
    made = found()
    made = made[0] if isinstance(made, tuple) and made else made
    made = getattr(made, "_loader", made)  # of StructuredDataset and its loader
    if not isinstance(made, (Dataset, Loader)):
        raise TypeError(f"{name} must return a dataset or loader of midepoch, got {type(made).__name__}")
    return made


def _opened(paths: list[str], state: Any) -> Any:
    """The files, in the order that the state tells of, so that only the data itself can differ."""
    one = state[0] if isinstance(state, list) else state
    check(one)
    if one.get("_filters") or one.get("_partitioning"):
        raise ValueError("the data was filtered or partitioned: --data cannot tell how. Use --dataset.")
    if re.fullmatch(r"\d+:\d+", one["selection"]) is None:
        raise ValueError("rows were selected in a way that --data cannot tell. Use --dataset.")
    saved = len(paths) == 1 and any(Path(paths[0], name).is_file() for name in ("state.json", "dataset_dict.json"))
    ds = load_from_disk(paths[0]) if saved else from_files(paths[0] if len(paths) == 1 else paths)
    start, stop = map(int, one["selection"].split(":"))
    if stop <= len(ds):
        ds = ds.slice(start, stop)
    if one["scope"] != "none":
        ds = ds.shuffle(one["seed"], one["scope"], one["window"])
    for kind in one["pipeline"].split(","):
        if kind != "none":
            ds = ds.map(_nothing, batched="batched" in kind)
    return ds


def _nothing(_: Any) -> Any:
    return {}


def _show(plan: ResumePlan, step: int | None, ranks: int) -> None:
    say = common.console.print
    if not plan.accepted:
        say("[red]refused[/]: the state would not be loaded.")
        say(plan.problem or "", markup=False)
        return
    against = {"dataset": "checked against the dataset", "index": "its data was found by its fingerprint"}
    say(
        f"[green]accepted[/]{f' (step {step})' if step is not None else ''}: {against.get(plan.checked, 'not checked')}"
    )
    share = 100 * plan.position / max(1, plan.rows)
    say(f"epoch {plan.epoch}, position {plan.position:,} of {plan.rows:,} ({share:.1f} %)")
    say(
        f"{plan.steps_left:,} steps left in this epoch, {plan.steps_per_epoch:,} in each one after it; "
        f"global batch {plan.global_batch:,}"
    )
    if plan.dropped:
        say(f"{plan.dropped:,} rows at the end of the epoch are dropped")
    if plan.padded:
        say(f"the last step is padded with {plan.padded:,} rows")
    if plan.ranks_left_out:
        say(f"[yellow]the last step has no row for {plan.ranks_left_out} of {ranks} ranks: use ends drop or pad[/]")
    for note in plan.notes:
        say(f"[yellow]{note}[/]")
    if plan.batches:
        say(_rows_table(plan, ranks))
    table = Table(title="until the end of the epoch", title_justify="left")
    for name in ("machine", "ranks", "rows", "blocks", "about MB"):
        table.add_column(name, justify="right")
    for number, one in enumerate(plan.machines):
        size = "?" if one.bytes is None else f"{one.bytes / 1e6:,.1f}"
        blocks = "?" if one.blocks is None else f"{one.blocks:,}"
        table.add_row(str(number), "{} to {}".format(*one.ranks), f"{one.rows:,}", blocks, size)
    say(table)


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
            table.add_row("", "…", f"{ranks - _RANKS} ranks more (all of them with --json)")
    return table
