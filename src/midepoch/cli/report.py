"""``midepoch report`` and ``midepoch watch``: reports on data and runs."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from midepoch.cli import common
from midepoch.cli.data import Config, Format, Split, Storage, open_data
from midepoch.errors import DataNotFoundError

Stream = Annotated[str | None, typer.Option(help="One of several loaders that recorded there, by its name.")]
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
    scope: Annotated[str | None, typer.Option(help="Scope of the shuffle: rows, window or files.")] = None,
    window: Annotated[int | None, typer.Option(help="Blocks per window of the shuffle.")] = None,
    split: Split = None,
    config: Config = None,
    storage: Storage = None,
    format: Format = None,
    as_json: common.AsJson = False,
) -> None:
    """Draw runs or a dataset: speed, progress, consumption, restarts, layout, shuffle quality. One HTML file.

    [bold]midepoch report runs/7 -o report.html[/]

    [bold]midepoch report runs/7 runs/8[/]

    [bold]midepoch report 'data/*.parquet' --shuffle 42 --scope window --window 16 --label class[/]
    """
    from midepoch.sources.storage import atomic_write
    from midepoch.tools.report import collect, render

    if not output.parent.is_dir():
        raise DataNotFoundError(f"there is no folder {output.parent} to write {output.name} to.")
    is_run = all(map(_is_run, target))
    if shuffle is None and (scope is not None or window is not None):
        raise ValueError("--scope and --window are settings of a shuffle. Pass its seed with --shuffle.")
    if is_run and shuffle is not None:
        raise ValueError("a run already has an order: --shuffle is for data only")
    paths = data if is_run else target
    ds = open_data(paths, split, config, storage, format) if paths else None
    if ds is not None and shuffle is not None:
        ds = ds.shuffle(shuffle, scope, window)
    contents = collect(
        (target[0] if len(target) == 1 else target) if is_run else None,
        ds,
        stream=stream,
        checkpoints=checkpoints,
        label=label,
        batch_size=batch_size,
    )
    if as_json:
        common.print_json(contents)
        return
    atomic_write(output, render(contents).encode())
    common.console.print(f"wrote {output} ({common.bytes_text(output.stat().st_size)})")


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
    """Show runs in progress, live: the page of [bold]midepoch report[/], by default only on this machine.

    From another machine: ssh -L 8765:127.0.0.1:8765 machine, then open http://127.0.0.1:8765/ there.

    [bold]midepoch watch runs/7[/]

    [bold]midepoch watch runs/7 runs/8[/]

    [bold]midepoch watch runs/7 --host 0.0.0.0 --port 9000[/]
    """
    from midepoch.audit.passes import ledger_folder
    from midepoch.tools.report import collect
    from midepoch.tools.report.watch import Watch

    def look() -> dict[str, Any]:
        return collect(
            runs[0] if len(runs) == 1 else runs, stream=stream, checkpoints=checkpoints, read_checkpoints=False
        )

    for run in runs:
        ledger_folder(run)
    with Watch(look, host, port, token) as server:
        common.console.print(f"{server.address}  (Ctrl-C stops it)")
        if open_browser:
            webbrowser.open(server.address)
        server.serve()
