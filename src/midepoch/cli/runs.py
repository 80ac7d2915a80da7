"""``midepoch audit``, ``report`` and ``watch``: the proof of a run from its ledger, and its page."""

from __future__ import annotations

import os
import re
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midepoch.cli import common
from midepoch.cli.common import Answer
from midepoch.cli.data import Config, Format, Scope, Split, Storage, Window, open_data, shuffled
from midepoch.errors import DataNotFoundError

if TYPE_CHECKING:
    from midepoch.audit import Delivery, Document, Run

_LISTED = 20
_RARE = {
    "filtered": "filtered",
    "dropped": "dropped",
    "pending": "to come",
    "skipped": "skipped",
    "again": "again",
    "excluded": "excluded",
    "excluded_outputs": "outputs excluded",
}
"""Columns that are shown if one of their numbers is not 0."""
_LEASES = {
    "leased": "leased",
    "acknowledged": "acknowledged",
    "rejected": "of these rejected",
    "out": "still out",
    "returned": "returned",
}
"""Columns of runs with leases."""
Stream = Annotated[str | None, typer.Option(help="One of several loaders that recorded there, by its name.")]


def audit(
    run: Annotated[Path, typer.Argument(help="The folder given to loader(audit=…).", show_default=False)],
    step: Annotated[int | None, typer.Option(help="The rows of this step (counted from 1).")] = None,
    row: Annotated[str | None, typer.Option(help="The steps that saw this row: its number, or source:number.")] = None,
    source: Annotated[int | None, typer.Option(help="The source of the row, if there are several (from 0).")] = None,
    against: Annotated[Path | None, typer.Option(help="Another run, to count the rows that both have seen.")] = None,
    stream: Stream = None,
) -> Answer:
    """Prove from its ledger what a run has seen: rows delivered once, more than once, never.

    Exits with 1 if a row of a finished part of an epoch was lost or repeated.

    midepoch audit runs/7

    midepoch audit runs/7 --step 1000

    midepoch audit runs/7 --row 123456 --json

    midepoch audit runs/7 --row web:123456

    midepoch audit runs/7 --against runs/8
    """
    from midepoch._internal.progress import shown
    from midepoch.audit import read_run, read_runs

    if sum(given is not None for given in (step, row, against)) > 1:
        raise ValueError("use only one of --step, --row and --against")
    if step is None and row is None and against is None:
        from midepoch.tools.report.page import proof_of

        runs = [read_run(run, stream)] if stream is not None else read_runs(run)
        exact = all(one.exact for one in runs)
        found = {"exact": exact, "loaders": list(map(proof_of, runs))}
        return Answer(found, lambda: _show_proofs(runs), not exact)
    ledger = read_run(run, stream)
    if against is not None:
        with shown("comparing", "rows") as report:
            other = read_run(against, ledger.streams[ledger.stream] or None)
            overlap = ledger.overlap(other, report)
        numbers = {str(ledger.folder): overlap.first, str(other.folder): overlap.second, "both": overlap.both}
        rows = ({"run": name, "rows": number} for name, number in numbers.items())
        title = "rows of the files that were seen at least once"
        return Answer(overlap._asdict(), lambda: common.print_table(rows, title=title))
    if step is not None:
        return _rows(ledger, ledger.documents_of_step(step), lambda: ledger.rows_of_step(step), f"step {step}")
    name, _, number = str(row).rpartition(":")
    sources = len(ledger.sources)
    if not number.isdecimal():
        raise ValueError(f"--row takes the number of a row, or source:number, got {row!r}")
    if not name and source is None and sources > 1:
        raise ValueError(
            f"--row {row}: there are {sources} sources. Give one of them, as in --row 0:{row} or NAME:{row}."
        )
    chosen: Any = int(name) if name.isdecimal() else name or source or 0
    documents = ledger.documents_of_row(int(number), chosen)
    if documents is None and isinstance(chosen, str):
        raise ValueError(
            f"--row {row}: names of sources are recorded with provenance=True. Without it, name the source by its "
            f"number in the mix, from 0: --row {number} --source 0."
        )
    return _rows(ledger, documents, lambda: ledger.steps_of_row(int(number), chosen), f"row {row}")


def _show_proofs(runs: list[Run]) -> None:
    for run in runs:
        _show_proof(run, len(runs) > 1)


def _show_proof(run: Run, several: bool) -> None:
    which = f", loader {run.streams[run.stream] or run.stream}" if several else ""
    rare = {name: title for name, title in _RARE.items() if any(getattr(one, name) for one in run.epochs)}
    leased = {title: name for name, title in _LEASES.items() if any(one.leases is not None for one in run.epochs)}
    rows = []
    for one in run.epochs:
        so_far = "complete" if one.complete else "exact so far"
        wrong = "record incomplete" if one.epoch in run.incomplete else "not exact"
        rows.append(
            {
                "epoch": one.epoch,
                run.unit: one.rows,
                "once": one.once,
                "repeated": (one.repeated, "red" if one.repeated else ""),
                "never": (one.never, "red" if one.never else ""),
                "steps": one.steps,
                **{title: getattr(one, name) for name, title in rare.items()},
                **{title: getattr(one.leases, name, "") for title, name in leased.items()},
                "": (so_far, "green") if one.exact and not run.problems else (wrong, "red"),
            }
        )
    right = ("repeated", "never", *leased)
    common.print_table(rows, title=f"{run.folder}{which}: {run.steps:,} steps", right=right)
    common.say(f"{common.counted(run.attempts, 'start')}; ranks: {' → '.join(map(str, run.worlds))}")
    for one in run.epochs:
        if one.examples and not one.exact:
            common.say(f"epoch {one.epoch}: lost or repeated at positions {', '.join(map(str, one.examples))}, …")
    for change in run.weight_changes:
        place = f"epoch {change.epoch}, position {change.position:,}"
        place += "" if change.phase is None else f", phase {change.phase}"
        weights = ", ".join(f"{name} {100 * share:.1f} %" for name, share in change.weights.items())
        common.say(f"weights from step {change.step:,} on ({place}): {weights}")
    for problem in run.problems:
        common.say((problem, "red"))


_NAMING = ("step", "row")


def _rows(run: Run, documents: list[Document] | None, find: Callable[[], list[Delivery]], what: str) -> Answer:
    """Return the rows of a step or the steps of a row: documents if they are recorded, else what ``find`` returns.

    Files of this folder, and those of data in memory, are shown without their folders.
    """
    of_step = what.startswith("step")
    if documents is None:
        found = [{**one._asdict(), "place": run.sources[one.source].place(one.row)} for one in find()]
        shown = found
        names = ["step", "epoch", "rank", "position"]
        if of_step:
            names = ["rank", "position", *["source"] * (len(run.sources) > 1), "row"]
        names += ["part"] * any(one["part"] for one in found)
        note = (
            "These are the rows that were consumed. loader(…, provenance=True) records each document that was "
            "delivered, and its tokens."
        ) * bool(run.generations[-1].lanes)
    else:
        found = [one._asdict() for one in documents]
        shown = [
            {
                **one._asdict(),
                "source": one.name,
                "tokens": "all" if one.stop is None else f"{one.start:,} to {one.stop:,}",
            }
            for one in documents
        ]
        packed = any(one.stop is not None for one in documents)
        names = [*(() if of_step else ("step", "epoch")), "rank", "sequence", *["offset"] * packed]
        names += [*(("source", "row") if of_step else ()), *["tokens"] * packed]
        if documents and not of_step:
            what = f"row {documents[0].name}:{documents[0].row}"
        note = (
            "To leave one out: loader.exclude(documents=[(source, row)]). The column row counts over all files of a "
            "source; the number beside the name of a file counts in that file."
        ) * of_step

    what += f", loader {run.streams[run.stream] or run.stream}" * (len(run.streams) > 1)

    def show() -> None:
        from midepoch.storage.cache_files import default_index_dir

        if not shown:
            common.say(f"{what}: not in the history of these weights")
            return
        folders = "|".join(map(re.escape, (os.getcwd(), str(default_index_dir() / "memory" / "DIGEST"))))
        folders = rf" ({folders})[\\/]".replace("DIGEST", r"\w+")
        rows = [
            # Numbers that name something are shown as commands take them: without separators.
            {name: str(one[name]) if name in _NAMING else one[name] for name in names}
            | {"where it is": re.sub(folders, " ", one["place"])}
            for one in shown
        ]
        common.print_table(rows, title=what, right=["tokens", *_NAMING], most=_LISTED)
        if note:
            common.say(note)

    return Answer(found, show)


Checkpoints = Annotated[
    str | None, typer.Option(help="Folder of the checkpoints. [default: 'checkpoints' in or beside the run's folder]")
]


def report(
    target: Annotated[
        list[str], typer.Argument(help="Folders of runs (given to loader(audit=…)), or data.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("report.html"),
    data: Annotated[
        list[str] | None, typer.Option(help="The files of a run, to show more of them. Repeatable.")
    ] = None,
    checkpoints: Checkpoints = None,
    stream: Stream = None,
    label: Annotated[
        str | None, typer.Option(help="A column whose values should be spread evenly over batches.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="For data: rows of a global batch.")] = 256,
    shuffle: Annotated[int | None, typer.Option(help="For data: shuffle with this seed.")] = None,
    scope: Scope = None,
    window: Window = None,
    split: Split = None,
    config: Config = None,
    storage: Storage = None,
    format: Format = None,
) -> Answer:
    """Draw runs or a dataset: speed, progress, consumption, restarts, layout, shuffle quality. One HTML file.

    midepoch report runs/7 -o report.html

    midepoch report runs/7 runs/8

    midepoch report 'data/*.parquet' --shuffle 42 --scope window --window 16 --label class
    """
    from midepoch.storage.cache_files import atomic_write
    from midepoch.tools.report import collect, render

    if not output.parent.is_dir():
        raise DataNotFoundError(f"there is no folder {output.parent} to write {output.name} to. Create it first.")
    if output.is_dir():
        raise ValueError(f"{output} is a folder. Name a file in it: -o {output / 'report.html'}.")
    is_run = all(map(_is_run, target))
    if is_run and (shuffle, scope, window) != (None, None, None):
        raise ValueError("a run already has an order: --shuffle, --scope and --window are for data only")
    paths = data if is_run else target
    ds = shuffled(open_data(paths, split, config, storage, format), shuffle, scope, window) if paths else None
    contents = collect(
        target if is_run else None,
        ds,
        stream=stream,
        checkpoints=checkpoints,
        label=label,
        batch_size=batch_size,
    )

    def write() -> None:
        atomic_write(output, render(contents).encode())
        common.say(f"wrote {output} ({common.bytes_text(output.stat().st_size)})")

    return Answer(contents, write)


def _is_run(text: str) -> bool:
    from midepoch.audit.passes import ledger_folder

    if not os.path.isdir(os.path.expanduser(text)):
        return False
    try:
        ledger_folder(text)
    except DataNotFoundError:
        return False
    return True


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Folders given to loader(audit=…).", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free port.")] = 8765,
    host: Annotated[str, typer.Option(help="Addresses other than this machine's own require a token.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="Part of the address. [default: drawn if required]")] = None,
    checkpoints: Checkpoints = None,
    stream: Stream = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Show runs in progress, live: the page of midepoch report, by default only on this machine.

    From another machine: ssh -L 8765:127.0.0.1:8765 machine, then open http://127.0.0.1:8765/ there.

    midepoch watch runs/7

    midepoch watch runs/7 runs/8

    midepoch watch runs/7 --host 0.0.0.0 --port 9000
    """
    from midepoch.tools.report import collect
    from midepoch.tools.report.watch import Watch

    def look() -> dict[str, Any]:
        return collect(runs, stream=stream, checkpoints=checkpoints, read_checkpoints=False)

    for run in runs:
        _wait_for_ledger(run)
    with Watch(look, host, port, token) as server:
        common.say(f"{server.address}  (Ctrl-C stops it)")
        if open_browser:
            webbrowser.open(server.address)
        server.serve()


def _wait_for_ledger(run: Path) -> None:
    """Wait for the first batch of a run. Its folder is empty from the creation of the loader until then."""
    from midepoch.audit.passes import ledger_folder

    given, is_told = run.expanduser(), False
    while True:
        empty = any(folder.is_dir() and not any(folder.iterdir()) for folder in (given, given / "ledger"))
        try:
            ledger_folder(run)
            return
        except DataNotFoundError:
            if not empty:
                raise
        if not is_told:
            common.say(f"waiting for the first batch of {run}  (Ctrl-C stops it)")
        is_told = True
        time.sleep(0.5)
