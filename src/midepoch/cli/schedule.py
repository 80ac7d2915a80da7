"""``midepoch plan --schedule``: the consumption of a schedule, as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from midepoch.cli import common
from midepoch.cli.data import is_path, open_data
from midepoch.cli.picture import drawn, style_of
from midepoch.errors import DataNotFoundError

if TYPE_CHECKING:
    from midepoch.dataset import Dataset
    from midepoch.tools.schedule_plan import SchedulePlan, Use


def plan_file(
    path: str, sources: Sequence[str] | None, storage: list[str] | None, as_json: bool, **options: Any
) -> None:
    """Print the consumption of the schedule in a file. Exit with 1 if a phase cannot be filled."""
    from midepoch.order.schedule import Schedule
    from midepoch.tools.schedule_plan import plan_schedule

    schedule = Schedule.load(path)
    paths: dict[str, str | list[str]] = {**schedule.sources, **_pairs(sources)}
    unknown = [name for name in _pairs(sources) if name not in schedule.names]
    if unknown:
        raise ValueError(f"--source {unknown[0]}: the sources of {path} are {', '.join(schedule.names)}.")
    datasets = {name: _opened(name, given, storage) for name, given in paths.items() if name in schedule.names}
    plan = plan_schedule(schedule, datasets, **options)
    if as_json:
        stretches = [
            {**one._asdict(), "phase": plan.phases[one.phase].name, "shares": _by_name(plan, one.shares)}
            for one in plan.stretches
        ]
        common.print_json({"schedule": path, **asdict(plan), "stretches": stretches})
    else:
        _show(plan)
    if plan.problem is not None:
        raise typer.Exit(1)


def _opened(name: str, given: str | list[str], storage: list[str] | None) -> Dataset:
    """Return the data of a source. Errors name the source."""
    paths = [given] if isinstance(given, str) else given
    try:
        if not is_path(paths[0]):
            raise DataNotFoundError(f"there is no file {paths[0]}.")
        return open_data(paths, storage=storage)
    except DataNotFoundError as problem:
        hint = f"Check the path in the schedule, or pass --source {name}=PATH."
        raise type(problem)(f"source {name!r}: {problem} {hint}") from None


def _pairs(given: Sequence[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in given or ():
        name, sign, path = pair.partition("=")
        if not sign or not name or not path:
            raise ValueError(f"--source takes NAME=PATH, got {pair!r}")
        if name in found:
            raise ValueError(f"--source {name} is given twice. For several files, use a glob or a folder.")
        found[name] = path
    return found


def _by_name(plan: SchedulePlan, shares: Sequence[float]) -> dict[str, float]:
    return {use.source: share for use, share in zip(plan.totals, shares, strict=True)}


def _show(plan: SchedulePlan) -> None:
    total = plan.phases[-1].stop
    length = "no end" if total is None else f"{total:,} {plan.unit}"
    steps = "" if plan.steps is None else f", {common.counted(plan.steps, 'step')}"
    how = "exact" if plan.exact else "estimated from the weights and the mean lengths of documents"
    common.say((common.counted(len(plan.phases), "phase"), "bold"), f": {length}{steps}; rows are {how}")
    common.console.print(_phases(plan))
    names = [use.source for use in plan.totals]
    for line in drawn(plan, names, common.console.width, common.console.options.ascii_only):
        common.console.print(line)
    common.console.print(_consumption(plan))
    for cap in plan.caps:
        step = "" if cap.step is None else f", step {cap.step:,}"
        shares = [f"{name} {100 * share:.1f} %" for name, share in cap.shares.items()]
        rest = f"its share goes to the others: {', '.join(shares)}" if shares else "no other source is left"
        passes = common.counted(cap.max_passes, "pass").replace("passs", "passes")
        where = f"in phase {cap.phase!r} at {cap.position:,} {plan.unit}{step}"
        common.say((cap.source, style_of(names.index(cap.source))), f" reaches its limit of {passes} {where}; {rest}")
    for note in plan.notes:
        common.say(("note: ", "yellow"), note)
    if plan.problem is not None:
        common.say(("problem: ", "red"), plan.problem)


def _phases(plan: SchedulePlan) -> Table:
    table = Table("phase", title="phases", title_justify="left")
    for name in ("steps", "batch", "length", "rows", "tokens"):
        table.add_column(name, justify="right")
    for one in plan.phases:
        numbers = (one.steps, one.global_batch_size, one.sequence_length)
        shown = ["" if number is None else f"{number:,}" for number in numbers]
        table.add_row(one.name, *shown, _amount(one.rows, plan.exact), _amount(one.tokens, False))
    return table


def _consumption(plan: SchedulePlan) -> Table:
    table = Table("phase", "source", title="consumption", title_justify="left")
    for name in ("share", "rows", "tokens", "passes"):
        table.add_column(name, justify="right")
    for one in plan.phases:
        for number, use in enumerate(use for use in one.uses if use.share or use.rows):
            table.add_row("" if number else one.name, *_cells(plan, use, False))
        table.add_section()
    for number, use in enumerate(plan.totals):
        table.add_row("" if number else "all", *_cells(plan, use, True))
    return table


def _cells(plan: SchedulePlan, use: Use, total: bool) -> list[Text | str]:
    passes = "" if use.passes is None else f"{use.passes:.2f}"
    cap = next((cap for cap in plan.caps if cap.source == use.source), None)
    if total and cap is not None and passes:
        passes = f"{passes} of {cap.max_passes}"
    style = style_of([one.source for one in plan.totals].index(use.source))
    share = f"{100 * use.share:.1f} %"
    return [common.styled(use.source, style), share, _amount(use.rows, plan.exact), _amount(use.tokens, False), passes]


def _amount(number: int | None, exact: bool) -> str:
    """Return a number as people read it: exact ones with all digits."""
    if number is None:
        return ""
    if exact or number < 10_000_000:
        return f"{number:,}"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,}"
