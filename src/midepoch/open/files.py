"""Opening data: Hugging Face datasets, folders of ``save_to_disk``, and files of any format, anywhere."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from midepoch._internal.hints import hinted
from midepoch._internal.progress import shown
from midepoch._internal.values import one_of
from midepoch.dataset import Dataset, habits
from midepoch.dataset.functions import names_of
from midepoch.errors import DataNotFoundError
from midepoch.order import Order, Selection
from midepoch.pipeline.leaf import ON_ERROR, Leaf
from midepoch.pipeline.spec import PipelineSpec
from midepoch.sources import Access, CacheSpec, Source
from midepoch.sources.files import DataFiles, PathLike, check_path, find_files, paths_of, resolved
from midepoch.sources.filters import Filter, parse_filter
from midepoch.sources.index import Index
from midepoch.sources.lake import Request, open_index, open_lake
from midepoch.sources.names import check_format, format_of, with_delimiter
from midepoch.sources.splits import (
    HubRequest,
    SplitPart,
    arrow_files,
    expand_all,
    parse_split,
    saved_files,
    saved_splits,
)
from midepoch.storage.address import Address, is_address
from midepoch.storage.addresses import check_utf8
from midepoch.storage.cache_files import default_index_dir, named_folder
from midepoch.storage.stores import Retry, Store

DEFAULT_CACHE_BYTES = 4 << 30
_log = logging.getLogger("midepoch")
_KEY = re.compile(r"/([A-Za-z_]\w*)=[^/]*(?=/)")


@hinted(habits.OPEN["from_files"])
def from_files(
    paths: PathLike | Iterable[PathLike],
    *,
    format: str | None = None,
    delimiter: str | None = None,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    partitioning: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    cache_dir: PathLike | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    retry: Retry | None = None,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    validate: bool = True,
    on_error: str = "raise",
) -> Dataset:
    """Return a dataset of files in place: a file, a list, a glob (``**`` crosses folders), braces, or a folder.

    Arrow, Parquet, ORC, CSV, JSON (lines or one array), text by lines, tar shards of WebDataset, shards of MDS and
    LitData, and folders of images, audio or video; text and tar also compressed. They are on a local disk, in an object
    store (``s3://``, ``gs://``, ``az://``), on the Hugging Face Hub (``hf://datasets/…``) or in any file system of
    fsspec. A folder or glob is sorted by path. A list keeps its order, and so do braces (``shard-{000..146}.tar``).

    Arrow files on a local disk are mapped, unless they are compressed or dictionary-encoded. Blocks of all others are
    decoded once, and ``cache_bytes`` of them are kept: in memory or, with worker processes or ranks to share them, or
    if it is given, in ``cache_dir``.

    - ``format``: default: detected from the files
    - ``delimiter`` of CSV files, such as ``";"``; default: a comma, or a tab for ``.tsv``
    - ``columns``: others are never read
    - ``filters``: a pyarrow expression, or a list as in Parquet readers: ``[("label", "in", [1, 2])]``; blocks whose
      statistics exclude it are never fetched
    - ``partitioning="hive"``: folders called ``key=value`` become columns
    - ``storage_options`` (or a ``filesystem`` of pyarrow or fsspec): credentials, which are written nowhere
    - ``validate=False``: trust the index without listing the files
    - ``on_error="skip"``: skip blocks that cannot be read
    """
    if partitioning not in (None, "hive"):
        raise ValueError(f"partitioning must be None or 'hive', got {partitioning!r}")
    names = None if columns is None else list(names_of(columns))
    opening = Opening(names, cache_dir, cache_bytes, index_dir, force_reindex, on_error)
    texts = paths_of(paths)
    where = {"storage_options": storage_options, "filesystem": filesystem, "retry": retry}
    store, given = resolved(texts, fresh=force_reindex, **where)
    chosen = parse_filter(filters)
    wanted = check_format(format)
    with_code = with_delimiter(wanted, delimiter)

    def find() -> DataFiles:
        found = find_files(store, texts, given, wanted if delimiter is None else "csv")
        for path in (entry.path for entry in found.entries if format is None and delimiter is not None):
            if format_of(path) not in ("csv", "text", None):
                raise ValueError(f"delimiter is for CSV files, but {store.name(path)} is not one. Omit it.")
        return found if delimiter is None else replace(found, format=with_code or found.format)

    index = opening.index(store, given, with_code, find, chosen, partitioning, validate=validate)
    if partitioning is None and index.files:
        known = [*index.schema.names, *_KEY.findall("".join(f"{path}/" for path in given))]
        if keys := [key for key in _KEY.findall(index.files[0].path) if key not in known]:
            _log.warning("folders are named %s=…: partitioning='hive' makes it a column", keys[0])
    return opening.dataset(index, store, chosen)


def local_folder(given: PathLike, what: str) -> Path:
    """Return a local folder. Raise ValueError for an address."""
    folder = named_folder(given, what)
    if is_address(given):
        raise ValueError(f"{what} must be a local folder, got the address {Address(os.fspath(given))}")
    return folder


@hinted(habits.OPEN["load_from_disk"])
def load_from_disk(
    path: PathLike,
    split: str | None = None,
    *,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    on_error: str = "raise",
) -> Dataset:
    """Return a dataset written by ``datasets``' ``save_to_disk``. ``split`` may slice: ``"train[:90%]"``.

    A dataset dict needs a split; a single dataset needs none (to slice it, use any name).
    """
    opening = Opening(index_dir=index_dir, force_reindex=force_reindex, on_error=on_error)
    folder = local_folder(check_path(path), "path")
    check_utf8(os.path.abspath(folder))
    splits = saved_splits(folder)
    if splits is None:
        files = saved_files(folder)
        parts = parse_split(split) if split is not None else (SplitPart("train"),)
        if len({part.split for part in parts}) > 1:
            raise DataNotFoundError(
                f"{folder} contains a single dataset without splits, but split={split!r} names several. Omit the split."
            )
        return _of_splits(parts, {part.split: files for part in parts}, opening)
    if split is None:
        raise ValueError(f"{folder} contains the splits {', '.join(splits)}. Choose one with split=…")
    return _of_splits(expand_all(parse_split(split), splits, str(folder)), splits, opening)


_BUILDERS = ("arrow", "csv", "json", "parquet", "text")


@hinted(habits.OPEN["load_dataset"])
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
    """Return a Hugging Face dataset, by hub name, format ("parquet", "json", …) or local folder.

    The first call runs ``datasets.load_dataset`` and indexes the Arrow files in its cache. Later calls read the index,
    without network access. Changed local files are detected; for a new version of a hub dataset pass
    ``force_reindex=True``. ``split`` takes the full notation: ``"train[:90%]"``, ``"train[10:20]+test"``.
    """
    for argument in load_dataset_kwargs:
        if hint := habits.OPEN["load_dataset"].get(argument):
            raise TypeError(f"load_dataset() has no argument {argument!r}. {hint}")
    parts = parse_split(split)
    path = check_path(path)
    if os.path.isfile(path):
        raise ValueError(
            f"load_dataset takes a name or a folder, got the file {path!r}. Call midepoch.from_files(path)."
        )
    if path in _BUILDERS and data_files is None and data_dir is None and not os.path.isdir(path):
        raise TypeError(f"load_dataset({path!r}) needs data_files=…, or call midepoch.from_files(paths).")
    request = HubRequest(path, name, data_files, data_dir, revision, load_dataset_kwargs)
    force = force_reindex or "force" in str(load_dataset_kwargs.get("download_mode", "")).lower()
    opening = Opening(index_dir=index_dir, force_reindex=force_reindex, on_error=on_error)
    splits = arrow_files(request, index_dir=opening.index_folder, force=force, num_proc=num_proc)
    return _of_splits(expand_all(parts, splits, repr(Address(path))), splits, opening)


def _of_splits(parts: Sequence[SplitPart], splits: Mapping[str, list[Path]], opening: Opening) -> Dataset:
    """Return the rows that the slices select of all named splits, which are one source."""
    names = list(dict.fromkeys(part.split for part in parts))
    for name in names:
        if not splits[name]:
            raise DataNotFoundError(f"split {name!r} has no rows.")
    with shown("indexing", "files") as report:
        index = open_index(
            [file for name in names for file in splits[name]],
            index_dir=opening.index_folder,
            force=opening.force_reindex,
            skip_damage=opening.on_error == "skip",
            progress=report,
        )
    files = np.cumsum([0, *(len(splits[name]) for name in names)])
    ends = np.cumsum([0, *index.files.rows])[files].tolist()
    bounds = dict(zip(names, pairwise(ends), strict=True))
    for name in [name for name, (first, end) in bounds.items() if first == end]:
        _log.warning("split %r has no row: its files are empty or damaged", name)
    ranges = []
    for part in parts:
        first, end = bounds[part.split]
        start, stop = part.rows(end - first)
        ranges.append((first + start, first + stop))
    return make_dataset(Source(index), Selection.of_ranges(ranges), on_error=opening.on_error)


def make_dataset(source: Source, selection: Selection | None = None, *, on_error: str = "raise") -> Dataset:
    """Return all rows of a source (or those selected), in the order of the files."""
    filtered = source.access is not None and source.access.filter is not None
    where = ", ".join(map(source.name, source.files[:3])) + (", …" if len(source.files) > 3 else "")
    if not source.rows and not filtered:
        raise DataNotFoundError(f"there are no rows in {where}. Check the path, and the program that wrote the data.")
    order = Order(Selection.of_ranges([(0, source.rows)]) if selection is None else selection)
    if not len(order):
        _log.warning("the dataset is empty: the %s leaves no row of %s", "filter" if filtered else "split", where)
    return Dataset(PipelineSpec.of(Leaf(source, order, on_error=on_error)))


@dataclass(frozen=True)
class Opening:
    """Arguments of ``from_files`` that functions for other sources share."""

    columns: Sequence[str] | None = None
    cache_dir: PathLike | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    index_dir: PathLike | None = None
    force_reindex: bool = False
    on_error: str = "raise"

    def __post_init__(self) -> None:
        _ = self.cache, one_of(self.on_error, ON_ERROR, "on_error")

    @property
    def cache(self) -> CacheSpec:
        """The cache of decoded blocks."""
        if isinstance(self.cache_bytes, bool) or not isinstance(self.cache_bytes, int) or self.cache_bytes < 1:
            raise ValueError(f"cache_bytes must be a number of bytes of at least 1, got {self.cache_bytes!r}")
        if self.cache_dir is None:
            return CacheSpec(str(default_index_dir() / "blocks"), self.cache_bytes)
        folder = os.path.abspath(local_folder(self.cache_dir, "cache_dir"))
        check_utf8(folder)
        return CacheSpec(folder, self.cache_bytes, chosen=True)

    @property
    def index_folder(self) -> Path | None:
        return None if self.index_dir is None else local_folder(self.index_dir, "index_dir")

    def index(
        self,
        store: Store,
        paths: tuple[str, ...],
        format: str | None,
        find: Callable[[], DataFiles],
        chosen: Filter | None = None,
        partitioning: str | None = None,
        *,
        validate: bool,
    ) -> Index:
        """Return the index of the files that ``find`` returns. See ``Request``."""
        request = Request(store, paths, format, chosen, partitioning, self.on_error == "skip", find)
        folder, force = self.index_folder, self.force_reindex
        with shown("indexing", "files") as report:
            return open_lake(request, index_dir=folder, force=force, validate=validate, progress=report)

    def dataset(self, index: Index, store: Store, chosen: Filter | None = None) -> Dataset:
        """Return the rows of an index."""
        source = Source(index, None if index.in_place and store.local else Access(store, chosen, self.cache))
        ds = make_dataset(source, on_error=self.on_error)
        return ds if self.columns is None else ds.select_columns(list(self.columns))
