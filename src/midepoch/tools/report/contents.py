"""The contents of a report as plain numbers: of a dataset, of a run's ledger, of its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch._internal.address import Address
from midepoch._internal.hints import hinted
from midepoch.audit import Run, read_runs
from midepoch.checkpoint import PipelineCheckpoint
from midepoch.checkpoint.manager import step_health
from midepoch.dataset import Dataset
from midepoch.errors import DataNotFoundError, MidepochError, StateError
from midepoch.order import Order, Selection, Weighted
from midepoch.pipeline.spec import PipelineSpec
from midepoch.tools.report.batches import batches
from midepoch.tools.report.consumption import of_run
from midepoch.tools.report.mixture import names_of
from midepoch.tools.report.quality import quality

Int64Array = npt.NDArray[np.int64]
_MOST_FILES = 400
_MOST_CHECKPOINTS = 200


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
    runs = [(str(folder), one) for folder in folders for one in _runs(folder, stream)]
    if folders and not runs:
        raise DataNotFoundError(f"no loader {stream!r} recorded in {', '.join(map(str, folders))}.")
    found: dict[str, Any] = {
        "title": ", ".join(map(str, folders)) or _title(dataset),
        "made": made,
        "runs": [
            {"folder_path": folder, **_of_run(one, dataset, label, made, alone=len(runs) == 1)} for folder, one in runs
        ],
        "data": _layout(dataset) if dataset is not None and not runs else None,
        "shuffle": _shuffle(dataset, label, batch_size) if dataset is not None and not runs else None,
        "checkpoints": None,
    }
    where = checkpoints if checkpoints is not None else _beside(folders[0] if len(folders) == 1 else None)
    if where is not None:
        found["checkpoints"] = _health(where, read_checkpoints)
    return found


def _runs(folder: str | Path, stream: str | None) -> list[Run]:
    """Return the loaders that recorded in a folder, the one with the most steps first."""
    runs = [one for one in read_runs(folder) if stream in (None, one.stream, one.streams[one.stream])]
    return sorted(runs, key=lambda one: -one.steps)


def _title(dataset: Dataset | None) -> str:
    assert dataset is not None
    source, files = dataset.pipeline.node.leaves[0].source, dataset.num_files
    first = source.name(source.files[0]) if source.files else "a dataset"
    return first if files == 1 else f"{Path(first).parent.name or first} ({files:,} files)"


def _layout(ds: Dataset) -> dict[str, Any]:
    sources = [leaf.source for leaf in ds.pipeline.node.leaves]
    files = [
        {"name": source.name(file), "rows": file.rows, "blocks": file.blocks, "bytes": file.size, "source": number}
        for number, source in enumerate(sources)
        for file in source.files
    ]
    return {
        "rows": ds.pipeline.rows,
        "files": len(files),
        "blocks": sum(len(source.layout.block_starts) - 1 for source in sources),
        "bytes": sum(file["bytes"] for file in files),
        "columns": [{"name": field.name, "type": str(field.type)} for field in ds.schema],
        "sources": [f"source {number}" for number in range(len(sources))],
        "list": _fewer(files),
    }


def _layout_of_run(run: Run) -> dict[str, Any]:
    """Return the layout as far as the ledger contains it: the data itself is not needed."""
    files = []
    for number, source in enumerate(run.order.sources):
        names = source.about["files"]
        for i, count in enumerate(np.diff(source.layout.file_starts)):
            name = names[i] if i < len(names) else f"file {i}"
            files.append({"name": name, "rows": int(count), "blocks": None, "bytes": None, "source": number})
    return {
        "rows": sum(source.rows for source in run.order.sources),
        "files": len(files),
        "blocks": None,
        "bytes": None,
        "columns": None,
        "sources": names_of(run.order),
        "list": _fewer(files),
    }


def _fewer(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge neighbouring files if there are too many to draw."""
    size = -(-len(files) // _MOST_FILES)
    if size <= 1:
        return files
    merged = []
    for i in range(0, len(files), size):
        group = files[i : i + size]
        sums = {
            key: None if group[0][key] is None else sum(one[key] for one in group)
            for key in ("rows", "blocks", "bytes")
        }
        merged.append({"name": f"{group[0]['name']} … {group[-1]['name']}", "source": group[0]["source"], **sums})
    return merged


def _of_run(run: Run, ds: Dataset | None, label: str | None, made: float, *, alone: bool) -> dict[str, Any]:
    """Return the contents of the ledger, and of the data if the dataset is given and is that of the run.

    ``alone``: there is no other run to which the data may belong.
    """
    sources, last = run.order.sources, run.generations[-1].shape
    matches = ds is not None and {leaf.source.fingerprint for leaf in ds.pipeline.node.leaves} == {
        source.about["data"] for source in sources
    }
    if ds is not None and not matches and alone and len(run.streams) == 1:
        raise StateError(
            f"the data is not that of the run: its fingerprint is {ds.pipeline.source.fingerprint}, the run's "
            f"{', '.join(source.about['data'] for source in sources)}."
        )
    contents = {
        **of_run(run, made),
        "data": {**_layout(ds), "sources": names_of(run.order)} if ds is not None and matches else _layout_of_run(run),
        "shuffle": None,
        "batches": batches(run),
    }
    if len(sources) == 1 and not isinstance(
        sources[0].order.shuffle, Weighted
    ):  # of several sources, batches are as mixed as the weights
        order = sources[0]
        labels = _labels(ds, label, order.order.selection) if ds is not None and matches and label is not None else None
        batch = last.global_batch
        if last.batching.budget:  # it counts batches by tokens
            batch = max(1, batch * order.rows // max(1, min(run.every[-1].end, order.rows)))
        shuffle = quality(order.order, order.layout, last.epoch, batch=batch, labels=labels)
        contents["shuffle"] = {**shuffle, "label": label if labels is not None else None}
    return contents


def _shuffle(ds: Dataset, label: str | None, batch: int) -> dict[str, Any] | None:
    if not ds.pipeline.numbered or not len(ds) or isinstance(ds.pipeline.order.shuffle, Weighted):
        return None
    order = ds.pipeline.order
    labels = None if label is None else _labels(ds, label, order.selection)
    return {**quality(order, ds.pipeline.source.layout, ds.epoch, batch=batch, labels=labels), "label": label}


def _labels(ds: Dataset, label: str, selection: Selection) -> Callable[[Int64Array], Any]:
    """Return a function from rows of a selection of the files to the values of a column."""
    everything = Order(Selection.of_ranges([(0, ds.pipeline.source.rows)]))
    plain = (
        Dataset(PipelineSpec.of(replace(ds.pipeline.base, order=everything)))
        .select_columns([label])
        .with_format("arrow")
    )
    return lambda rows: plain[selection.source_rows(rows).tolist()][label].to_pylist()


def _beside(run: str | Path | None) -> Path | None:
    if run is None:
        return None
    folder = Path(run).expanduser()
    return next((one for one in (folder / "checkpoints", folder.parent / "checkpoints") if one.is_dir()), None)


def _health(where: str | Path, read: bool) -> dict[str, Any]:
    folder = Path(Address(str(where)).public).name
    try:
        saved = PipelineCheckpoint(where, rank=0, world_size=1)
        steps = saved.steps()
    except (MidepochError, OSError) as problem:
        return {"folder": folder, "steps": [], "more": 0, "read": read, "problem": str(problem)}
    shown = [step_health(saved, step, read=read) for step in steps[-_MOST_CHECKPOINTS:]]
    return {
        "folder": folder,
        "steps": [vars(one) for one in shown],
        "more": len(steps) - len(shown),
        "read": read,
        "problem": None,
    }
