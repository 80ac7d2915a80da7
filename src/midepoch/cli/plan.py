"""``midepoch plan``: the effect of a resume, or the consumption of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from midepoch.cli import common
from midepoch.cli.common import Answer
from midepoch.cli.data import Format, Made, Part, Step, Storage, data_given, is_path, open_data
from midepoch.errors import DataNotFoundError
from midepoch.storage.address import Address

if TYPE_CHECKING:
    from midepoch.tools.plan import ResumePlan
    from midepoch.tools.schedule import SchedulePlan


def _of_schedule(
    path: str,
    sources: list[str] | None,
    storage: list[str] | None,
    column: list[str] | None,
    tokenizer: str | None,
    **options: Any,
) -> Answer:
    """Return the consumption of a schedule. It is bad if a phase or ``max_passes`` cannot be filled or checked."""
    from midepoch.order.schedule import Schedule
    from midepoch.tools.schedule import plan_schedule

    schedule = Schedule.load(path)
    columns = column if column and "=" not in column[0] else None
    by_name = {} if columns else _pairs(column, "--column", "COLUMN", path, schedule.names)
    given = _pairs(sources, "--source", "PATH", path, schedule.names)
    datasets = {}
    for name, paths in {**schedule.sources, **given}.items():
        if name not in schedule.names:
            continue
        paths = [paths] if isinstance(paths, str) else paths
        try:
            if not is_path(paths[0]):
                raise DataNotFoundError(f"there is no file {paths[0]}.")
            datasets[name] = open_data(paths, storage=storage)
        except DataNotFoundError as problem:
            hint = f"Check the path in the schedule, or pass --source {name}=PATH."
            raise type(problem)(f"source {name!r}: {problem} {hint}") from None
    model = None if tokenizer is None else _tokenizer(tokenizer)
    plan = plan_schedule(schedule, datasets, column=columns[0] if columns else by_name, tokenizer=model, **options)
    bad = plan.problem is not None or bool(plan.unchecked)
    return Answer({"schedule": path, **asdict(plan)}, lambda: _show_schedule(plan), bad)


def _tokenizer(name: str) -> Any:
    """Return the tokenizer in a file, in a folder, or of a model of the Hub."""
    try:
        if name.endswith(".json"):
            from tokenizers import Tokenizer

            return Tokenizer.from_file(name)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except ImportError as problem:
        raise ValueError(
            f"--tokenizer needs the package {problem.name}. Install it: pip install {problem.name}."
        ) from None
    except Exception as problem:
        reason = (str(problem) or type(problem).__name__).splitlines()[0][:200].rstrip(".")
        raise ValueError(
            f"--tokenizer {name}: it cannot be loaded: {reason}. Name a tokenizer.json, a folder or a model of the Hub."
        ) from None


def _pairs(given: list[str] | None, option: str, value: str, path: str, names: Sequence[str]) -> dict[str, str]:
    """Return the values of an option by the names of the sources of a schedule."""
    found: dict[str, str] = {}
    for pair in given or ():
        name, _, text = pair.partition("=")
        if not name or not text:
            raise ValueError(f"{option} takes NAME={value}, got {pair!r}")
        if name in found:
            several = " For several files, use a glob or a folder." if value == "PATH" else ""
            raise ValueError(f"{option} {name} is given twice.{several}")
        if name not in names:
            raise ValueError(f"{option} {name}: the sources of {path} are {', '.join(names)}.")
        found[name] = text
    return found


def _show_schedule(plan: SchedulePlan) -> None:
    total = plan.phases[-1].stop
    length = "no end" if total is None else f"{total:,} {plan.unit}"
    steps = "" if plan.steps is None else f", {common.counted(plan.steps, 'step')}"
    how = "exact" if plan.exact else "estimated from the weights and the mean lengths of documents"
    common.say((common.counted(len(plan.phases), "phase"), "bold"), f": {length}{steps}; rows are {how}")
    phases = (
        {
            "phase": one.name,
            "steps": one.steps,
            "batch": one.global_batch_size,
            "length": one.sequence_length,
            "rows": _amount(one.rows, plan.exact),
            "tokens": _amount(one.tokens, False),
        }
        for one in plan.phases
    )
    common.print_table(phases, title="phases", right=("steps", "batch", "length", "rows", "tokens"))
    for line in _bars(plan, common.console.width, common.console.options.ascii_only):
        common.say(line)
    common.print_table(_consumption(plan), title="consumption", right=("share", "rows", "tokens", "passes"))
    names = [use.source for use in plan.totals]
    for cap in plan.caps:
        step = "" if cap.step is None else f", step {cap.step:,}"
        shares = [f"{name} {100 * share:.1f} %" for name, share in cap.shares.items()]
        rest = f"its share goes to the others: {', '.join(shares)}" if shares else "no other source is left"
        passes = common.counted(cap.max_passes, "pass").replace("passs", "passes")
        where = f"in phase {cap.phase!r} at {cap.position:,} {plan.unit}{step}"
        common.say((cap.source, _style(names.index(cap.source))), f" reaches its limit of {passes} {where}; {rest}")
    for note in plan.notes:
        common.say(("note: ", "yellow"), note)
    if plan.problem is not None:
        common.say(("problem: ", "red"), plan.problem)


def _consumption(plan: SchedulePlan) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a table: the sources of each phase, and of the run."""
    names, caps = [use.source for use in plan.totals], {cap.source: f" of {cap.max_passes}" for cap in plan.caps}
    phases = [(one.name, [use for use in one.uses if use.share or use.rows]) for one in plan.phases]
    for phase, uses in (*phases, ("all", plan.totals)):
        for number, use in enumerate(uses):
            of = caps.get(use.source, "") if uses is plan.totals else ""
            yield {
                "phase": "" if number else phase,
                "source": (use.source, _style(names.index(use.source))),
                "share": f"{100 * use.share:.1f} %",
                "rows": _amount(use.rows, plan.exact),
                "tokens": _amount(use.tokens, False),
                "passes": "" if use.passes is None else f"{use.passes:.2f}{of}",
            }
        yield None


def _amount(number: int | None, exact: bool) -> str:
    """Return a number as people read it: exact ones with all digits."""
    if number is None:
        return ""
    if exact or number < 10_000_000:
        return f"{number:,}"
    size, unit = next(one for one in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if number >= one[0])
    return f"{number / size:,.2f} {unit}"


_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")
_FILLS, _ASCII_FILLS = "█▒░▓▚▤▥▦", "#.+=o*x%"
_WIDEST, _LONGEST = 100, 20


def _style(source: int) -> str:
    """Return the colour of a source, by its number."""
    return _STYLES[source % len(_STYLES)]


def _bars(plan: SchedulePlan, width: int, ascii_only: bool) -> Iterator[Text]:
    """Yield a bar for each phase, with the shares of its rows, and a legend."""
    fills = _ASCII_FILLS if ascii_only else _FILLS
    names = [Text(common.printable(phase.name)) for phase in plan.phases]
    for name in names:
        name.truncate(_LONGEST, overflow="ellipsis")
    margin = max(name.cell_len for name in names) + 1
    room = max(1, min(width, _WIDEST) - margin)
    yield Text("share of rows", "italic")
    for name, phase in zip(names, plan.phases, strict=True):
        line, end = Text.assemble(name, " " * (margin - name.cell_len)), 0.0
        for number, use in enumerate(phase.uses):
            end += use.share
            line.append(fills[number % len(fills)] * (margin + round(end * room) - line.cell_len), _style(number))
        yield line
    entries = [
        Text.assemble((fills[number % len(fills)] * 2, _style(number)), f" {common.printable(use.source)}")
        for number, use in enumerate(plan.totals)
    ]
    indent = " " * max(0, min(margin, width - max(entry.cell_len for entry in entries)))
    line = Text.assemble(indent, entries[0])
    for entry in entries[1:]:
        if line.cell_len + 3 + entry.cell_len > width:
            yield line
            line = Text.assemble(indent, entry)
        else:
            line = Text.assemble(line, "   ", entry)
    yield line


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
    step: Step = None,
    part: Part = None,
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
        list[str] | None,
        typer.Option(
            help="The column with the tokens of a row, or NAME=COLUMN for one source. Repeatable. "
            "Default: input_ids, or text with --tokenizer."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, a folder or a model of the Hub, to count the tokens of text.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks of the run of the schedule.", min=1)] = 1,
    eos: Annotated[bool, typer.Option("--eos", help="pack() adds a token to each document.")] = False,
    seed: Annotated[int, typer.Option(help="The seed of the mix of the schedule.", min=0)] = 0,
) -> Answer:
    """Show the effect of a resume: the next rows, steps left, reads of each machine. Or what a schedule will consume.

    With --checkpoint and --world-size: the effect of a resume. Exits with 1 if the state would be refused.

    With --schedule: rows, tokens and passes by phase and source. Exits with 1 if a phase cannot be filled, or if
    max_passes cannot be checked.

    midepoch plan --checkpoint runs/7/checkpoints --world-size 6 --num-workers 4 --batch-size 48

    midepoch plan --checkpoint state.json --world-size 64 --batch-size 8 --data 'data/*.parquet'

    midepoch plan --checkpoint runs/7/checkpoints --world-size 6 --batch-size 48 --dataset train.py:make_loader

    midepoch plan --schedule run.yaml --source 'web=data/web/*.parquet' --source code=data/code --ranks 64
    """
    if schedule is not None:
        if checkpoint is not None:
            raise ValueError("--checkpoint and --schedule cannot be used together. Use one of them.")
        return _of_schedule(schedule, source, storage, column, tokenizer, ranks=ranks, eos=eos, seed=seed)
    if checkpoint is None or world_size is None:
        missing = "--checkpoint" if checkpoint is None else "--world-size"
        raise ValueError(f"plan needs {missing}. Use --checkpoint and --world-size, or --schedule.")
    for name, given in (("--source", source), ("--column", column), ("--tokenizer", tokenizer), ("--eos", eos)):
        if given:
            raise ValueError(f"{name} requires --schedule.")
    from midepoch.cli.states import open_state
    from midepoch.tools.plan import plan_resume

    state, which, place = open_state(checkpoint, step, part)
    resume = plan_resume(
        state,
        data_given(dataset, data, state, storage, format),
        world_size=world_size,
        batch_size=batch_size,
        num_workers=num_workers,
        last_batch=last_batch,
        steps=steps,
        machines=machines,
    )
    about = {"checkpoint": Address(place).public, "step": which, "num_workers": num_workers, **asdict(resume)}
    return Answer(about, lambda: _show(resume, which, world_size), not resume.accepted)


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
    rows = []
    for number, batch in enumerate(plan.batches, 1):
        for rank, mine in enumerate(batch[:_RANKS]):
            text = ", ".join([*map(str, mine[:_ROWS]), *["…"] * (len(mine) > _ROWS)])
            rows.append({"step": f"+{number}", "rank": rank, "rows": text})
        if len(batch) > _RANKS:
            more = f"{len(batch) - _RANKS} more ranks (all of them with --json)"
            rows.append({"step": "", "rank": "…", "rows": more})
    common.print_table(rows, title="the next rows, by their numbers before the shuffle", right=("step", "rank"))
    machines = (
        {
            "machine": number,
            "ranks": "{} to {}".format(*one.ranks),
            "rows": one.rows,
            "blocks": "?" if one.blocks is None else one.blocks,
            "about MB": "?" if one.bytes is None else f"{one.bytes / 1e6:,.1f}",
        }
        for number, one in enumerate(plan.machines)
    )
    common.print_table(machines, title="until the end of the epoch", right=("ranks", "blocks", "about MB"))
