"""``midepoch doctor``, ``demo``, ``index`` and ``bench``: this machine, and some data on it."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from midepoch.cli import common
from midepoch.cli.common import Answer
from midepoch.cli.data import DATA, Columns, Config, Data, Format, Made, Scope, Split, Storage, made_by, open_data

_COLOURS = {"good": "green", "mind": "yellow", "bad": "red"}


def doctor() -> Answer:
    """Check versions, limits on files and memory, caches, and settings that often go wrong.

    Exits with 1 if something will not work.

    midepoch doctor

    midepoch doctor --json > machine.json
    """
    from midepoch.tools.doctor import examine

    findings = examine()
    rows = (
        {"": (one.verdict, _COLOURS[one.verdict]), "what": one.what, "found": one.found, "what to do": one.remedy}
        for one in findings
    )
    bad = any(one.verdict == "bad" for one in findings)
    return Answer(list(map(asdict, findings)), lambda: common.print_table(rows), bad)


def demo(
    keep: Annotated[Path | None, typer.Option(help="Use and keep this folder instead of a temporary one.")] = None,
) -> None:
    """Train a small model, kill it in mid-epoch, resume with other workers, and prove that nothing was lost.

    Requires torch and datasets: pip install "midepoch[torch,hf,cli]".

    midepoch demo
    """
    from midepoch.demo.__main__ import run

    if not run(keep):
        raise typer.Exit(1)


def index(
    data: Data,
    split: Split = None,
    config: Config = None,
    force: Annotated[bool, typer.Option(help="Recreate the index if there is one.")] = False,
    index_dir: Annotated[str | None, typer.Option(help="Folder of the indexes. [default: $MIDEPOCH_CACHE]")] = None,
    storage: Storage = None,
    format: Format = None,
) -> Answer:
    """Create the index of some data, with progress, or check the existing one.

    Exits with 1 if it cannot be saved.

    midepoch index s3://bucket/lake/

    midepoch index 'data/*.arrow' --force
    """
    from midepoch.storage.cache_files import default_index_dir

    began = time.monotonic()
    options = {} if index_dir is None else {"index_dir": index_dir}
    ds = open_data(data, split, config, storage, format, force_reindex=force, **options)
    source = ds.pipeline.source
    found: dict[str, Any] = {
        "files": len(source.files),
        "blocks": len(source.layout.block_starts) - 1,
        "rows": source.rows,
        "fingerprint": source.fingerprint,
        "index_dir": str(index_dir or default_index_dir()),
        "saved": source.index.path is not None,
        "seconds": round(time.monotonic() - began, 3),
    }
    counts = ", ".join(common.counted(found[f"{noun}s"], noun) for noun in ("file", "block", "row"))
    saved = "indexed in" if found["saved"] else "the index could not be saved in"
    text = f"{counts}; {saved} {found['index_dir']} ({found['seconds']:.1f} s)"
    return Answer(found, lambda: common.say(text), not found["saved"])


def bench(
    data: Annotated[list[str] | None, DATA] = None,
    split: Split = None,
    config: Config = None,
    batch_sizes: Annotated[str, typer.Option("--batch-size", help="Rows per batch; several, with commas.")] = "64,256",
    workers: Annotated[
        str | None, typer.Option(help="Workers; several, with commas. [default: 0, 1, 2, 4 … cores]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for each setting.")] = 2.0,
    columns: Columns = None,
    shuffle: Annotated[bool, typer.Option(help="Shuffle, as for training.")] = True,
    scope: Scope = None,
    dataset: Made = None,
    storage: Storage = None,
    format: Format = None,
) -> Answer:
    """Measure rows/s and GB/s by workers and batch size, beside the limit of the machine, and recommend a setting.

    midepoch bench 'data/*.parquet' --columns tokens

    midepoch bench --dataset train.py:make_dataset --workers 0,2,4,8 --batch-size 32
    """
    from midepoch._internal.processes import cores
    from midepoch._internal.progress import shown
    from midepoch.dataset import Dataset
    from midepoch.tools.bench import advise, find_limit, try_settings

    if (dataset is None) == (not data):
        raise ValueError("pass the data, or --dataset with a function that returns it")
    ds: Any = made_by(dataset) if dataset is not None else open_data(data or [], split, config, storage, format)
    if not isinstance(ds, Dataset):
        raise TypeError(f"{dataset} must return a dataset, not a loader: bench tries workers and batch sizes itself")
    if dataset is None:
        ds = ds.select_columns([name.strip() for name in columns.split(",")]) if columns else ds
        ds = ds.shuffle(0, scope) if shuffle else ds
    powers = [2**power for power in range(cores().bit_length())]
    counts = _numbers(workers, "--workers", 0) if workers else [0, *powers]
    with shown("trying", "settings") as report:
        trials = try_settings(
            ds, batch_sizes=_numbers(batch_sizes, "--batch-size", 1), workers=counts, seconds=seconds, report=report
        )
    if not any(one.stats.rows_per_second for one in trials):
        raise ValueError("no full batch could be measured: the data has too few rows. Pass a smaller --batch-size.")
    limit = None if ds.pipeline.numbered is None else find_limit(ds, seconds)
    best, why = advise(trials)
    rates = ("rows_per_second", "bytes_per_second")
    measured = [{**asdict(one), **{name: getattr(one.stats, name) for name in rates}} for one in trials]
    advice = {"num_workers": best.num_workers, "batch_size": best.batch_size, "why": why}
    about = {"trials": measured, "limit": limit and asdict(limit), "recommended": advice}

    def show() -> None:
        rows = []
        for one in trials:
            row = {
                "workers": one.num_workers,
                "batch size": one.batch_size,
                "rows/s": f"{one.stats.rows_per_second:,.0f}",
                "GB/s": f"{one.stats.bytes_per_second / 1e9:,.3f}",
                "first batch": f"{1000 * one.stats.first_batch:,.0f} ms",
            }
            if limit is not None:
                row["of the limit"] = f"{one.stats.rows_per_second / max(limit.rows_per_second, 1e-9):.2f} ×"
            rows.append({name: (cell, "bold green" if one is best else "") for name, cell in row.items()})
        common.print_table(rows, right=list(rows[0]))
        if limit is not None:
            rates = f"{limit.rows_per_second:,.0f} rows/s, {limit.bytes_per_second / 1e9:,.3f} GB/s"
            common.say(f"limit: {rates} ({limit.how})")
        chosen = f"recommended: loader(batch_size={best.batch_size}, num_workers={best.num_workers})"
        common.say((chosen, "bold"), f": {why}")

    return Answer(about, show)


def _numbers(text: str, name: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ValueError(f"{name} takes integers of at least {least}, separated by commas, got {text!r}")
    return numbers
