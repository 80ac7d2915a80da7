"""Opening data: Hugging Face datasets, folders of ``save_to_disk``, and Arrow files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from midepoch.dataset import Dataset, make_dataset
from midepoch.errors import DataNotFoundError
from midepoch.order import Selection
from midepoch.progress import shown
from midepoch.sources import Source
from midepoch.sources.disk import saved_files, saved_splits
from midepoch.sources.files import PathLike, list_files
from midepoch.sources.hub import Request, arrow_files
from midepoch.sources.index import Index, open_index
from midepoch.sources.splits import SplitPart, check_splits, expand_all, parse_split


def from_files(
    paths: PathLike | Iterable[PathLike],
    *,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    on_error: str = "raise",
) -> Dataset:
    """A dataset of Arrow IPC files (stream or file format): a file, a list, a glob, or a folder.

    A folder or glob is sorted by path; a list keeps its order. ``on_error="skip"`` goes on without record batches that
    cannot be read.
    """
    index = _index(list_files(paths), index_dir, force_reindex, on_error)
    return make_dataset(Source((index,)), on_error=on_error)


def load_from_disk(
    path: PathLike,
    split: str | None = None,
    *,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    on_error: str = "raise",
) -> Dataset:
    """A dataset written by ``datasets``' ``save_to_disk``. ``split`` may slice: ``"train[:90%]"``.

    A dataset dict needs a split; a single dataset needs none (to slice it, any name will do).
    """
    folder = Path(os.path.expanduser(path))
    splits = saved_splits(folder)
    if splits is None:
        files = saved_files(folder)
        parts = parse_split(split) if split is not None else (SplitPart("train"),)
        if len({part.split for part in parts}) > 1:
            raise DataNotFoundError(f"{folder} holds a single dataset without splits; split={split!r} names several.")
        return _of_splits(parts, {part.split: files for part in parts}, index_dir, force_reindex, on_error)
    if split is None:
        raise ValueError(f"{folder} holds the splits {', '.join(splits)}: choose one with split=…")
    parts = expand_all(parse_split(split), list(splits))
    check_splits(parts, splits, str(folder))
    return _of_splits(parts, splits, index_dir, force_reindex, on_error)


def load_dataset(
    path: str,
    name: str | None = None,
    *,
    split: str,
    data_files: Any = None,
    data_dir: str | None = None,
    revision: str | None = None,
    force_reindex: bool = False,
    num_proc: int | None = None,
    index_dir: PathLike | None = None,
    on_error: str = "raise",
    **load_dataset_kwargs: Any,
) -> Dataset:
    """A Hugging Face dataset, by hub name, script of formats ("parquet", "json", …) or local folder.

    The first time this runs ``datasets.load_dataset`` and indexes the Arrow files it leaves in its cache; later it
    reads the index and asks nobody. Changed local files are noticed; for a hub dataset that has a new version pass
    ``force_reindex=True``. ``split`` takes the whole notation: ``"train[:90%]"``, ``"train[10:20]+test"``.
    """
    parts = parse_split(split)
    request = Request(str(path), name, data_files, data_dir, revision, load_dataset_kwargs)
    force = force_reindex or "force" in str(load_dataset_kwargs.get("download_mode", "")).lower()
    folder = None if index_dir is None else Path(os.path.expanduser(index_dir))
    splits = arrow_files(request, index_dir=folder, force=force, num_proc=num_proc)
    parts = expand_all(parts, list(splits))
    check_splits(parts, splits, repr(path))
    return _of_splits(parts, splits, index_dir, force_reindex, on_error)


def _of_splits(
    parts: Sequence[SplitPart],
    splits: Mapping[str, list[Path]],
    index_dir: PathLike | None,
    force: bool,
    on_error: str,
) -> Dataset:
    """One source of all splits named, and of it the rows that the slices mean. Slices share the split's index."""
    names = list(dict.fromkeys(part.split for part in parts))
    for name in names:
        if not splits[name]:
            raise DataNotFoundError(f"split {name!r} holds no rows.")
    indexes = {name: _index(splits[name], index_dir, force, on_error) for name in names}
    first, starts = 0, {}
    for name in names:
        starts[name] = first
        first += int(indexes[name].starts[-1])
    ranges = []
    for part in parts:
        start, stop = part.rows(int(indexes[part.split].starts[-1]))
        ranges.append((starts[part.split] + start, starts[part.split] + stop))
    return make_dataset(Source(tuple(indexes.values())), Selection.of_ranges(ranges), on_error=on_error)


def _index(files: Sequence[Path], index_dir: PathLike | None, force: bool, on_error: str) -> Index:
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
    folder = None if index_dir is None else Path(os.path.expanduser(index_dir))
    with shown("indexing", "files") as report:
        return open_index(files, index_dir=folder, force=force, skip_damage=on_error == "skip", progress=report)
