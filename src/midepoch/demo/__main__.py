"""``python -m midepoch.demo``: create data, run the training three times, and show the proof."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

FILES, EPOCHS, BATCH = 6, 2, 64
LEAST_ROWS = 6_000

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m midepoch.demo", description=__doc__)
    parser.add_argument("--keep", type=Path, help="use and keep this folder instead of a temporary one")
    parser.add_argument("--rows", type=int, default=24_000, help="rows of the dataset (default: 24,000)")
    args = parser.parse_args()
    if args.rows < LEAST_ROWS:
        parser.error(
            f"--rows must be at least {LEAST_ROWS}, so that the run can be killed in mid-epoch, got {args.rows}"
        )
    try:
        sys.exit(0 if run(args.keep, args.rows) else 1)
    except ImportError as problem:
        sys.exit(str(problem))


def run(keep: Path | None = None, rows: int = 24_000) -> bool:
    """Run the demonstration in a folder to keep or a temporary one. Return True if the proof holds."""
    if missing := [name for name in ("torch", "datasets") if find_spec(name) is None]:
        raise ImportError(f'the demo needs {" and ".join(missing)}: pip install "midepoch[torch,hf,demo]"')
    with tempfile.TemporaryDirectory(prefix="midepoch-demo-") as temporary:
        return show(keep or Path(temporary), rows)


def show(folder: Path, rows: int) -> bool:
    """Run the complete demonstration. Return True if the proof holds."""
    started = time.monotonic()
    os.environ["MIDEPOCH_CACHE"] = str(folder / "index")
    steps = EPOCHS * -(-rows // BATCH)
    kill_at = steps * 2 // 3 + 12  # in the middle of the second epoch, between two checkpoints
    with console.status("making a dataset in the Hugging Face cache layout"):
        make_data(folder, rows)
    with progress_of(console) as progress:
        whole, killed = folder / "uninterrupted", folder / "killed"
        train(whole, 2, progress, "1. uninterrupted, 2 workers", steps)
        train(killed, 2, progress, f"2. 2 workers, kill -9 at step {kill_at}", kill_at, kill=True)
        cut, log = int(saved(killed / "checkpoint.pt")["step"]), read_log(killed)
        train(killed, 3, progress, f"3. resumed at step {cut} with 3 workers", steps, first=cut)
    proved = prove(whole, killed, log, cut, rows)
    console.print(f"[dim]{time.monotonic() - started:.0f} s[/dim]")
    return proved


_TEXTS = 58
"""Characters of a line of progress beside its bar."""


def progress_of(console: Console) -> Progress:
    """Return the progress of the runs, as wide as the terminal at most."""
    bar = BarColumn(max(2, min(40, console.width - _TEXTS)))
    return Progress(TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def make_data(folder: Path, rows: int) -> None:
    """Write Parquet files and load them once with ``datasets``. Training reads the Arrow files in its cache."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import midepoch

    words = ["river", "stone", "cloud", "lamp", "bread", "glass", "wheel", "paper", "storm", "field"]
    good, bad = ["fine", "bright", "gentle"], ["broken", "bitter", "grim"]
    size = rows // FILES
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for file in range(FILES):
        ids = range(file * size, (file + 1) * size)
        labels = [(i * 7919) % 2 for i in ids]
        texts = [
            " ".join([*(words[(i * k) % 10] for k in range(3, 11)), (good if label else bad)[i % 3]])
            for i, label in zip(ids, labels, strict=True)
        ]
        pq.write_table(pa.table({"id": ids, "text": texts, "label": labels}), folder / "data" / f"{file}.parquet")
    midepoch.load_dataset("parquet", data_files=f"{folder}/data/*.parquet", cache_dir=f"{folder}/cache", split="train")


def train(
    run: Path,
    workers: int,
    progress: Progress,
    what: str,
    last: int,
    *,
    kill: bool = False,
    first: int = 0,
) -> None:
    """Run the training in a separate process, which prints its steps. With ``kill``, kill it at the last step."""
    run.mkdir(exist_ok=True)
    (run / "rows.log").unlink(missing_ok=True)
    command = [sys.executable, "-m", "midepoch.demo.train", f"--run={run}"]
    command += [f"--num-workers={workers}", f"--epochs={EPOCHS}"]
    if kill:
        command += [f"--wait-at={last + 20}"]  # on a busy machine it might finish before it is killed
    task = progress.add_task(what, total=last, completed=first)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            for step in map(int, process.stdout or ()):
                progress.update(task, completed=min(step, last))
                if kill and step >= last:
                    process.kill()
                    break  # its workers have the pipe, too
        except BaseException:
            process.kill()
            raise
    if process.returncode != (-signal.SIGKILL if kill else 0):
        sys.exit(f"the training ended with status {process.returncode}")
    progress.update(task, completed=last)


def read_log(run: Path) -> dict[int, list[int]]:
    """Return the row ids by step, from complete lines only: the kill may have truncated the last one."""
    lines = (run / "rows.log").read_text().split("\n")[:-1]
    steps = (list(map(int, line.split())) for line in lines)
    return {numbers[0]: numbers[1:] for numbers in steps}


def saved(path: Path) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = torch.load(path)
    return found


def prove(whole: Path, killed: Path, before: dict[int, list[int]], cut: int, rows: int) -> bool:
    """Compare the logged rows of the killed and resumed run with those of the uninterrupted run."""
    import torch

    expected, steps = read_log(whole), -(-rows // BATCH)
    found = {**{step: ids for step, ids in before.items() if step <= cut}, **read_log(killed)}
    same_order = found == expected
    table = Table(title="proof, from the logs of row ids", title_justify="left")
    for name in ("epoch", "rows", "seen once", "lost", "repeated"):
        table.add_column(name, justify="right")
    clean = True
    for epoch in range(EPOCHS):
        seen = Counter(row for step in range(epoch * steps + 1, (epoch + 1) * steps + 1) for row in found.get(step, []))
        lost, repeated = rows - len(seen), sum(count - 1 for count in seen.values())
        clean = clean and not lost and not repeated
        once = sum(count == 1 for count in seen.values())
        table.add_row(str(epoch), *(f"{count:,}" for count in (rows, once, lost, repeated)))
    console.print(table)
    a, b = (saved(run / "final.pt")["model"] for run in (whole, killed))
    same_model = all(torch.equal(a[name], b[name]) for name in a)
    rolled_back = len([step for step in before if step > cut])
    console.print(
        f"killed at step {max(before)}, resumed from the checkpoint at step {cut} ({rolled_back} steps redone)"
    )
    for claim, holds in {
        "batches and their order as in the uninterrupted run": same_order,
        "final weights bit for bit those of the uninterrupted run": same_model,
    }.items():
        console.print(f"{claim}: {'[green]yes[/green]' if holds else '[red]NO[/red]'}")
    return clean and same_order and same_model


if __name__ == "__main__":
    main()
