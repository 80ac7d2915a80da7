"""Opening tables: Delta Lake, Apache Iceberg and Lance, at a snapshot that is pinned when they are opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from midepoch._internal.hints import hinted
from midepoch._internal.progress import shown
from midepoch.dataset import Dataset, habits
from midepoch.distributed.keyvalue import Counters, first_value
from midepoch.open.files import DEFAULT_CACHE_BYTES, Opening
from midepoch.sources.files import PathLike, check_path
from midepoch.sources.filters import Filter, parse_filter
from midepoch.sources.index import Index, read_or_build
from midepoch.sources.lake import index_path, indexed
from midepoch.sources.tables import delta, iceberg, lance
from midepoch.sources.tables.opening import iceberg_properties, options_of_iceberg, reader_of, store_options
from midepoch.storage.addresses import resolve
from midepoch.storage.stores import Retry

T = TypeVar("T", delta.DeltaTableAt, lance.LanceTableAt)
V = TypeVar("V")
_openings = Counters()


@hinted(habits.OPEN["from_delta"])
def from_delta(
    uri: Any,
    *,
    version: int | str | datetime | None = None,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: PathLike | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    retry: Retry | None = None,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    on_error: str = "raise",
) -> Dataset:
    """Return the rows of a Delta table at one version, without its deleted rows.

    ``uri``: a path or an address, or a table of ``deltalake``, whose version is then opened. Partitions, renamed
    columns, deletion vectors and changed schemas are read as the table defines them.

    - ``version``: a number, or a time (a datetime, or text as in ISO 8601); default: the latest version. It is pinned:
      workers never see a newer one, and a state of another version is refused
    - ``storage_options``: credentials, under the names of ``from_files`` or of ``deltalake``
    - all others as in ``from_files``
    """
    opening = Opening(columns, cache_dir, cache_bytes, index_dir, force_reindex, on_error)
    if hasattr(uri, "table_uri"):
        uri, version = uri.table_uri, uri.version() if version is None else version
    chosen, address = parse_filter(filters), _address(uri)
    store, path = resolve(address, store_options(address, storage_options), retry=retry)
    reader = reader_of(store, path, address, storage_options)
    table = _pinned("delta", path, version, partial(delta.find_version, store, path, *reader))
    return _opened(table, chosen, opening)


@hinted(habits.OPEN["from_iceberg"])
def from_iceberg(
    table: Any,
    *,
    snapshot_id: int | str | datetime | None = None,
    catalog_options: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: PathLike | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    retry: Retry | None = None,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    on_error: str = "raise",
) -> Dataset:
    """Return the rows of an Iceberg table at one snapshot, without its deleted rows.

    ``table``: a name, ``"catalog.namespace.table"``, the path of a metadata file or of a folder with a version hint, or
    a table of ``pyiceberg``. Changed schemas, positional deletes, equality deletes and deletion vectors are read as the
    table defines them.

    - ``snapshot_id``: a number, a tag or branch, or a datetime; default: the current snapshot. It is pinned: workers
      never see a newer one, and a state of another snapshot is refused
    - ``catalog_options``: properties of the catalog, as in ``pyiceberg.catalog.load_catalog``
    - ``storage_options``: credentials, as in ``from_files``; default: those of the catalog
    - all others as in ``from_files``
    """
    opening = Opening(columns, cache_dir, cache_bytes, index_dir, force_reindex, on_error)
    chosen = parse_filter(filters)
    if isinstance(table, (str, os.PathLike)):
        properties = iceberg_properties(os.fspath(table), storage_options)
        load = partial(iceberg.load_table, check_path(table), catalog_options or {}, properties)
        table = load()
    elif not hasattr(table, "metadata_location"):
        raise TypeError(f"expected a name, a path or a table of pyiceberg, got {type(table).__name__}.")
    else:
        load = partial(iceberg.newest, table)
    location = table.location()
    options = store_options(location, storage_options) or options_of_iceberg(location, table.io.properties)
    store, path = resolve(location, options, retry=retry)
    snapshot, schema = iceberg.find_snapshot(table, store.name(path), snapshot_id)
    if snapshot_id is None and (agreed := _agreed("iceberg", path, snapshot.snapshot_id)) != snapshot.snapshot_id:
        if table.metadata.snapshot_by_id(agreed) is None:  # committed since this rank loaded the table
            table = load()
        snapshot, schema = iceberg.find_snapshot(table, store.name(path), agreed)
    return _opened(iceberg.IcebergTableAt(store, path, table, snapshot, schema), chosen, opening)


@hinted(habits.OPEN["from_lance"])
def from_lance(
    uri: Any,
    *,
    version: int | str | None = None,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: PathLike | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    retry: Retry | None = None,
    index_dir: PathLike | None = None,
    force_reindex: bool = False,
    on_error: str = "raise",
) -> Dataset:
    """Return the rows of a Lance table at one version, without its deleted rows. Blobs are delivered as bytes.

    ``uri``: a path or an address, or a dataset of ``lance``, whose version is then opened.

    - ``version``: a number, or a tag; default: the latest version. It is pinned: workers never see a newer one, and a
      state of another version is refused
    - ``storage_options``: credentials, under the names of ``from_files`` or of ``lance``
    - all others as in ``from_files``
    """
    opening = Opening(columns, cache_dir, cache_bytes, index_dir, force_reindex, on_error)
    if hasattr(uri, "lance_schema"):
        uri, version = uri.uri, uri.version if version is None else version
    chosen, address = parse_filter(filters), _address(uri)
    store, path = resolve(address, store_options(address, storage_options), retry=retry)
    store = replace(store, reader="a Lance table")
    table = _pinned("lance", path, version, partial(lance.find_version, store, path))
    return _opened(table, chosen, opening)


def _address(uri: Any) -> str:
    if uri is None or isinstance(uri, (list, tuple)):
        raise TypeError(
            f"expected the path or the address of one table, got {uri!r}. Open several tables one by one, and combine "
            "them with midepoch.concat."
        )
    return check_path(uri)


def _pinned(kind: str, path: str, version: V | None, find: Callable[[V | int | None], T]) -> T:
    """Return the table at a version. The default is the latest version, on which all ranks agree."""
    table = find(version)
    if version is None and (agreed := _agreed(kind, path, table.version)) != table.version:
        return find(agreed)
    return table


def _agreed(kind: str, path: str, latest: int) -> int:
    """Return the version that all ranks open, that of the first, if torch.distributed or JAX connects them."""
    key = f"table/{kind}/{path}"
    return int(first_value(f"{key}/{_openings.next(key)}", str(latest)) or latest)


def _opened(
    table: delta.DeltaTableAt | iceberg.IcebergTableAt | lance.LanceTableAt, chosen: Filter | None, opening: Opening
) -> Dataset:
    """Return the rows of a snapshot. It never changes: an existing index is used without checking the files."""
    skip = opening.on_error == "skip"
    path = index_path(opening.index_folder, chosen, "table", table.store.identity, *table.key, str(skip))
    with shown("indexing", "files") as report:

        def build() -> Index:
            return indexed(table.scan(report), chosen, skip_damage=skip, report=report)

        index = read_or_build(path, build, force=opening.force_reindex)
    return opening.dataset(index, table.store, chosen)
