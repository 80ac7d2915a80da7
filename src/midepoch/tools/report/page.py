"""The page of a report: one self-contained HTML file, and its contents as plain numbers.

They are those of a dataset, of a run's ledger with the consumption of each epoch by each start, and of its checkpoints.

The quality of a shuffle is shown beside that of a true permutation of as many rows: picture, serial correlation,
batches. Batches are judged by classes: the values of a label, else the files of the rows, else tenths of the data.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch._internal.hints import hinted
from midepoch._internal.values import to_jsonable
from midepoch.audit import Run, read_runs
from midepoch.audit.passes import Generation
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.checkpoint.manager import step_health
from midepoch.dataset import Dataset
from midepoch.errors import DataNotFoundError, MidepochError, StateError
from midepoch.order import EpochOrder, Order, Selection, Shuffle, SourceLayout, Weighted
from midepoch.pipeline.spec import PipelineSpec
from midepoch.storage.address import Address
from midepoch.tools.report.now import curves, names_of, now
from midepoch.transforms.batch import check_columns

Int64Array = npt.NDArray[np.int64]
_MOST_FILES = 400
_MOST_CHECKPOINTS = 200
_CELLS = 48
_PICTURE = 48 * 48 * 8
_RUNS, _RUN = 8, 4096
_LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BATCHES = 120
_TENTHS = 10


@hinted()
def collect(
    run: str | Path | Sequence[str | Path] | None = None,
    dataset: Dataset | None = None,
    *,
    stream: str | None = None,
    checkpoints: str | Path | None = None,
    read_checkpoints: bool = True,
    label: str | None = None,
    batch_size: int = 256,
) -> dict[str, Any]:
    """Return the contents of a report on a run (the folder given to ``audit=``), a dataset, or both.

    ``run``: several folders for runs side by side.
    ``checkpoints``: their folder; default: ``checkpoints`` beside or in the run's folder, if there is one.
    ``read_checkpoints``: read every byte of them. ``label``: a column whose values should be spread evenly.
    """
    if run is None and dataset is None:
        raise ValueError("pass a run, a dataset, or both")
    if label is not None and dataset is None:
        raise ValueError("labels are in the data: pass the dataset, too")
    folders = [] if run is None else [run] if isinstance(run, (str, Path)) else list(run)
    made = time.time()
    runs = [  # of several loaders that recorded in a folder, the one with the most steps first
        (str(folder), one)
        for folder in folders
        for one in sorted(read_runs(folder), key=lambda run: -run.steps)
        if stream in (None, one.stream, one.streams[one.stream])
    ]
    if folders and not runs:
        raise DataNotFoundError(f"no loader {stream!r} recorded in {', '.join(map(str, folders))}.")
    data, shuffle = None, None
    if dataset is not None and not runs:
        data, spec = _layout(dataset), dataset.pipeline
        if spec.numbered and len(dataset):
            shuffle = _shuffle(spec.order, spec.source.layout, dataset.epoch, batch_size, dataset, label)
    if checkpoints is None and len(folders) == 1:
        folder = Path(folders[0]).expanduser()
        beside = (folder / "checkpoints", folder.parent / "checkpoints")
        checkpoints = next((one for one in beside if one.is_dir()), None)
    return {
        "title": ", ".join(map(str, folders)) or _title(dataset),
        "made": made,
        "runs": [
            {"folder_path": folder, **_of_run(one, dataset, label, made, alone=len(runs) == 1)} for folder, one in runs
        ],
        "data": data,
        "shuffle": shuffle,
        "checkpoints": None if checkpoints is None else _health(checkpoints, read_checkpoints),
    }


def _title(dataset: Dataset | None) -> str:
    assert dataset is not None
    source, files = dataset.pipeline.node.leaves[0].source, dataset.num_files
    first = source.name(source.files[0]) if source.files else "a dataset"
    return first if files == 1 else f"{Path(first).parent.name or first} ({files:,} files)"


def _layout(ds: Dataset) -> dict[str, Any]:
    sources = [leaf.source for leaf in ds.pipeline.node.leaves]
    files: list[dict[str, Any]] = [
        {"name": source.name(file), "rows": file.rows, "blocks": file.blocks, "bytes": file.size, "source": number}
        for number, source in enumerate(sources)
        for file in source.files
    ]
    names = [f"source {number}" for number in range(len(sources))]
    return _listed(
        files, names, [{"name": field.name, "type": str(field.type)} for field in ds.schema], ds.pipeline.rows
    )


def _layout_of_run(run: Run) -> dict[str, Any]:
    """Return the layout as far as the ledger contains it: the data itself is not needed."""
    files = []
    for number, source in enumerate(run.order.sources):
        names = source.about["files"]
        for i, count in enumerate(np.diff(source.layout.file_starts)):
            name = names[i] if i < len(names) else f"file {i}"
            files.append({"name": name, "rows": int(count), "blocks": None, "bytes": None, "source": number})
    return _listed(files, names_of(run.order), None, sum(source.rows for source in run.order.sources))


def _listed(files: list[dict[str, Any]], sources: list[str], columns: Any, rows: int) -> dict[str, Any]:
    """Return the layout of some files. Neighbouring files are merged if there are too many to draw."""

    def sums(group: list[dict[str, Any]], *keys: str) -> dict[str, int | None]:
        return {key: None if None in (of := [file[key] for file in group]) else sum(of) for key in keys}

    size = max(1, -(-len(files) // _MOST_FILES))
    groups = [files[i : i + size] for i in range(0, len(files), size)]
    merged = (
        {
            "name": f"{group[0]['name']} … {group[-1]['name']}",
            "source": group[0]["source"],
            **sums(group, "rows", "blocks", "bytes"),
        }
        for group in groups
    )
    about = {"files": len(files), "sources": sources, "list": files if size == 1 else list(merged)}
    return {**about, "rows": rows, "columns": columns, **sums(files, "blocks", "bytes")}


def _of_run(run: Run, ds: Dataset | None, label: str | None, made: float, *, alone: bool) -> dict[str, Any]:
    """Return the contents of the ledger, and of the data if the dataset is given and is that of the run.

    ``alone``: there is no other run to which the data may belong.
    """
    sources, last = run.order.sources, run.generations[-1].shape
    fingerprints = {source.about["data"] for source in sources}
    if ds is not None and {leaf.source.fingerprint for leaf in ds.pipeline.node.leaves} != fingerprints:
        if alone and len(run.streams) == 1:
            raise StateError(
                f"the data is not that of the run: its fingerprint is {ds.pipeline.source.fingerprint}, the run's "
                f"{', '.join(source.about['data'] for source in sources)}."
            )
        ds = None
    shuffle = None
    if len(sources) == 1:  # of several sources, batches are as mixed as the weights
        order, batch = sources[0], last.global_batch
        if last.batching.budget:  # it counts batches by tokens
            batch = max(1, batch * order.rows // max(1, min(run.every[-1].end, order.rows)))
        shuffle = _shuffle(order.order, order.layout, last.epoch, batch, ds, label)
    starts = {name: number for number, name in enumerate(dict.fromkeys(one.shape.attempt for one in run.every))}
    kept = {one.key for one in run.generations}
    pieces, proof = _pieces(run, starts, kept), proof_of(run)
    return {
        **proof,
        "folder": run.folder.name,
        "starts": len(starts),  # without those that only loaded a state
        "seed": run.order.about["seed"],
        "pipeline": run.order.about["pipeline"],
        "epochs": [{**one, "pieces": pieces.get(one["epoch"], [])} for one in proof["epochs"]],
        "passes": [
            {
                "start": starts[one.shape.attempt],
                "epoch": one.shape.epoch,
                "from": run.reached(one, 0),
                "to": run.reached(one, one.most_steps),
                "ranks": one.shape.ranks,
                "batch": one.shape.global_batch,
                "workers": one.first.header.workers,
                "began": one.times[0],
                "last": one.times[1],
                "how": one.how,
                "kept": one.key in kept,
                "missing": len(one.missing),
            }
            for one in run.every
        ],
        "speed": curves(run, starts),
        "now": now(run, made),
        "data": _layout_of_run(run) if ds is None else {**_layout(ds), "sources": names_of(run.order)},
        "shuffle": shuffle,
    }


def _shuffle(
    order: Order, layout: SourceLayout, epoch: int, batch: int, ds: Dataset | None, label: str | None
) -> dict[str, Any] | None:
    """Return the quality of a shuffle, by the values of a column of the dataset if both are given."""
    if isinstance(order.shuffle, Weighted):
        return None
    labels: Callable[[Int64Array], Any] | None = None
    if ds is not None and label is not None:
        everything = Order(Selection.of_ranges([(0, ds.pipeline.source.rows)]))
        plain = Dataset(PipelineSpec.of(replace(ds.pipeline.base, order=everything)))
        check_columns([label], plain.column_names, "label")
        column = plain.select_columns([label]).with_format("arrow")

        def labels(rows: Int64Array) -> Any:
            return column[order.selection.source_rows(rows).tolist()][label].to_pylist()

    found = quality(order, layout, epoch, batch=batch, labels=labels)
    return {**found, "label": None if labels is None else label}


def _health(where: str | Path, read: bool) -> dict[str, Any]:
    found = {"folder": Path(Address(str(where)).public).name, "steps": [], "more": 0, "read": read, "problem": None}
    try:
        saved = PipelineCheckpoint(where, rank=0, world_size=1)
        steps = saved.steps()
    except (MidepochError, OSError) as problem:
        return {**found, "problem": str(problem)}
    shown = [vars(step_health(saved, step, read=read)) for step in steps[-_MOST_CHECKPOINTS:]]
    return {**found, "steps": shown, "more": len(steps) - len(shown)}


def proof_of(run: Run) -> dict[str, Any]:
    """Return what the ledger of a run proves, JSON-able."""
    epochs = []
    for one in run.epochs:
        leases = None if one.leases is None else one.leases._asdict()
        epochs.append({**vars(one), "leases": leases, "exact": one.exact, "complete": one.complete})
    return {
        "stream": run.stream,
        "name": run.streams[run.stream],
        "exact": run.exact,
        "steps": run.steps,
        "unit": run.unit,
        "starts": run.attempts,
        "world_sizes": run.worlds,
        "problems": run.problems,
        "epochs": epochs,
        "weight_changes": [one._asdict() for one in run.weight_changes],
    }


def _pieces(run: Run, starts: dict[str, int], kept: set[Any]) -> dict[int, list[dict[str, Any]]]:
    """Return by epoch the positions that each pass delivered: kept, or repeated after a crash."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for one in [*run.generations, *(one for one in run.every if one.key not in kept)]:
        pieces = found[one.shape.epoch]
        for first, stop, share, again in _parts(run, one, one.kept_steps if one.key in kept else 0):
            piece = {
                "start": starts[one.shape.attempt],
                "ranks": one.shape.ranks,
                "from": first,
                "to": stop,
                "share": share,
                "again": again,
            }
            if pieces and piece == {**pieces[-1], "from": pieces[-1]["to"], "to": stop}:
                pieces[-1]["to"] = stop  # a pass may have been left and continued
            elif stop > first:
                pieces.append(piece)
    return found


def _parts(run: Run, one: Generation, kept_steps: int) -> list[tuple[int, int, float, bool]]:
    """Return the parts of a pass: begin, end, share of the ranks that delivered it, True if it was repeated later.

    They count positions or, in lanes, the rows of the sources that were consumed over all lanes.
    """
    if one.lanes:
        lanes = run.lanes_of(one)
        begin, reached, made = (lanes.consumed(one, steps) for steps in (0, kept_steps, one.most_steps))
        return [(begin, reached, 1.0, False), (reached, made, 1.0, True)]
    common, most = (pick(min(count, kept_steps) for count in one.steps.values()) for pick in (min, max))
    common = 0 if one.missing else common
    begin, by_all, by_some, made = (run.reached(one, steps) for steps in (0, common, most, one.most_steps))
    ahead = sum(count > common for count in one.steps.values()) / one.shape.ranks
    return [(begin, by_all, 1.0, False), (by_all, by_some, ahead, False), (by_some, made, 1.0, True)]


@hinted()
def render(found: dict[str, Any], *, live: bool = False) -> str:
    """Return the page of the contents from ``collect``. ``live``: it requests newer numbers from its server."""
    # "<" inside a script could end it, as part of the name of a file or column.
    numbers = json.dumps(to_jsonable(found), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _part("page.html")
    page = page.replace("/*style*/", _part("page.css"), 1)
    page = page.replace("/*script*/", _part("draw.js") + _part("page.js"), 1)
    page = page.replace("/*live*/false", "true" if live else "false", 1)
    return page.replace("/*numbers*/null", numbers, 1)  # last: they may contain any text


def _part(name: str) -> str:
    return files("midepoch.tools.report").joinpath(name).read_text(encoding="utf-8")


def quality(
    order: Order, layout: SourceLayout, epoch: int, *, batch: int, labels: Callable[[Int64Array], Any] | None = None
) -> dict[str, Any]:
    """Return the quality of one epoch's order, and of a true permutation with the same seed.

    ``labels``: the classes of rows, if known.
    """
    shuffle, rows = order.shuffle, len(order)
    seed = shuffle.seed if shuffle is not None else 0
    of_row, name = _classes(order, layout, labels)

    def judged(one: Order) -> dict[str, Any]:
        of_epoch = one.at(epoch, layout)
        positions = _evenly(rows - 1, min(rows, _PICTURE))
        # Counts by cell: position from left to right, row of the data from top to bottom.
        x, y = positions * _CELLS // rows, of_epoch.chosen(positions) * _CELLS // rows
        return {
            "picture": np.bincount(y * _CELLS + x, minlength=_CELLS * _CELLS).tolist(),
            "serial": _serial(of_epoch, rows),
            "imbalance": _imbalance(of_epoch, rows, batch, of_row),
        }

    return {
        "scope": shuffle.scope if shuffle else "none",
        "window": shuffle.window if isinstance(shuffle, Shuffle) and shuffle.scope == "window" else None,
        "seed": shuffle.seed if shuffle else None,
        "lanes": order.lanes,
        "epoch": epoch,
        "batch": batch,
        "classes": name,
        "cells": _CELLS,
        "mine": judged(order),
        "true": judged(replace(order, shuffle=Shuffle(seed, "rows"), lanes=1)),
        "noise": 2 / float(np.sqrt(max(1, min(rows, _RUNS * _RUN)))),
        "spans": None if rows <= _RUN else [min(_RUNS, rows - _RUN + 1), _RUN],
    }


def _evenly(last: int, count: int) -> Int64Array:
    """Return numbers from 0 to the last one, spread evenly, without repetition."""
    return np.unique(np.linspace(0, last, count).astype(np.int64))


def _serial(order: EpochOrder, rows: int) -> list[list[float]]:
    """Return (distance, correlation, pairs): Pearson's coefficient of the row numbers at positions p and p + distance.

    Of small data all such pairs are taken, of large data those within a few spans of positions. 1 is file order; 0
    means that the rows are unrelated.
    """
    length = min(rows, _RUN)
    starts = _evenly(rows - length, _RUNS)
    runs = [order.chosen(np.arange(start, start + length)).astype(np.float64) for start in starts]
    correlations = []
    for lag in _LAGS:
        if lag >= length // 2:
            break
        first, second = (np.concatenate([run[part] for run in runs]) for part in (slice(None, -lag), slice(lag, None)))
        first, second = first - first.mean(), second - second.mean()
        spread = float(np.sqrt((first @ first) * (second @ second)))
        if spread > 0:
            correlation = float(np.clip((first @ second) / spread, -1.0, 1.0))
            correlations.append([lag, correlation, len(first)])
    return correlations


def _imbalance(order: EpochOrder, rows: int, batch: int, of_row: Callable[[Int64Array], Int64Array]) -> dict[str, Any]:
    """Return the difference between the classes of some batches and of the data: 0 is equal, 1 nothing in common."""
    batch = max(1, min(batch, rows))
    whole = max(1, rows // batch)
    starts = _evenly(whole - 1, min(whole, _BATCHES)) * batch
    positions = (starts[:, None] + np.arange(batch)).ravel()
    classes = of_row(order.chosen(positions)).reshape(len(starts), batch)
    # Drawn, not every n-th: labels may alternate.
    sample = of_row(np.arange(rows) if rows <= 4 * _RUN else np.random.default_rng(0).integers(0, rows, 4 * _RUN))
    count = int(max(classes.max(), sample.max())) + 1
    everywhere = np.bincount(sample, minlength=count) / len(sample)
    shares = np.stack([np.bincount(one, minlength=count) / batch for one in classes])
    off = np.abs(shares - everywhere).sum(axis=1) / 2
    return {"positions": starts.tolist(), "values": [round(float(one), 4) for one in off], "mean": float(off.mean())}


def _classes(
    order: Order, layout: SourceLayout, labels: Callable[[Int64Array], Any] | None
) -> tuple[Callable[[Int64Array], Int64Array], str]:
    """Return a function from row numbers (of the dataset) to classes from 0 on, and the names of the classes."""
    if labels is not None:
        known: dict[Any, int] = {}
        return lambda rows: np.array([known.setdefault(one, len(known)) for one in labels(rows)], np.int64), "label"
    if len(layout.file_starts) > 2:
        source_rows, files = order.selection.source_rows, layout.file_starts
        return lambda rows: files.searchsorted(source_rows(rows), side="right") - 1, "file"
    total = len(order)
    return lambda rows: rows * _TENTHS // max(1, total), "tenth of the data"
