"""Delta tables: the version to read, and its files, partitions, column mapping and deletion vectors.

The log is read by the package ``deltalake``. It is needed only to build an index, or to find the version at a time: the
number of the latest version is in the names of the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midepoch._internal.progress import Progress
from midepoch.errors import DataNotFoundError, FetchError, FormatError, MidepochError
from midepoch.sources.formats.table_parquet import SnapshotFile, described
from midepoch.sources.lake import Files
from midepoch.sources.tables.opening import described_type, package, scanned_files
from midepoch.storage.damage import refusals
from midepoch.storage.stores import Entry, Store

Version = int | str | datetime | None
LOG = "_delta_log"
_NAME = re.compile(r"(\d{20})\.(json|checkpoint\.[\w.-]*parquet|checkpoint\.[\w-]+\.json)")
_SUPPORTED = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}


@dataclass(frozen=True)
class DeltaTableAt:
    """A Delta table at one version. ``commit``: the file of the log that shows this version."""

    store: Store
    path: str
    uri: str
    options: Mapping[str, str]
    version: int
    commit: Entry

    @property
    def name(self) -> str:
        return self.store.name(self.path)

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the version. A table that was removed and created again has another commit."""
        return ("delta", self.path, str(self.version), str(self.commit.size), str(self.commit.mtime_ns))

    def scan(self, progress: Progress) -> Files:
        """Scan the files of this version."""
        with _refusing(self.store, self.name):
            table = _open(self.store, self.name, self.uri, self.options, self.version)
            schema, files = _contents(table, self.store, self.path, self.name)
        return scanned_files(self.store, self.name, f"delta {self.version}", schema, files, progress)


def find_version(store: Store, path: str, uri: str, options: Mapping[str, str], version: Version) -> DeltaTableAt:
    """Return the table at a version: a number, the latest one, or the one at a time."""
    name = store.name(path)
    if version is not None and not isinstance(version, int):
        version = _version_at(store, name, uri, options, version)
    commit = None
    if version is not None:
        if isinstance(version, bool) or version < 0:
            raise ValueError(f"version must be a number of at least 0, a timestamp or None, got {version!r}")
        commit = store.stat(f"{path}/{LOG}/{version:020d}.json")
    if version is None or commit is None:
        found: dict[int, Entry] = {}
        for entry in store.list(f"{path}/{LOG}"):
            match = _NAME.fullmatch(entry.path.rpartition("/")[2])
            if match is not None and (match[2] == "json" or int(match[1]) not in found):
                found[int(match[1])] = entry
        if not found:
            raise DataNotFoundError(
                f"{name} is not a Delta table: there is no {LOG} with versions. Check the path, or open its files with "
                "from_files."
            )
        version = max(found) if version is None else version
        if version not in found:
            raise DataNotFoundError(
                f"{name} has no version {version}: its log has {min(found)} to {max(found)}. Choose one of them."
            )
        commit = found[version]
    return DeltaTableAt(store, path, uri, options, version, commit)


def _open(store: Store, name: str, uri: str, options: Mapping[str, str], version: int | None) -> Any:
    deltalake = package("deltalake", "Delta", "deltalake", "delta")
    if store.local and unquote(uri) != uri:  # it would read the log of a table in the folder with the other name
        raise FormatError(
            f"the Delta table {name} cannot be read: deltalake takes the % in its path for a quoted character. Rename "
            "the folder, or make a link to it."
        )
    with _refusing(store, name):
        return deltalake.DeltaTable(uri, version=version, storage_options=dict(options) or None)


def _version_at(store: Store, name: str, uri: str, options: Mapping[str, str], time: str | datetime) -> int:
    if not isinstance(time, (str, datetime)):
        raise ValueError(f"version must be a number, a timestamp or None, got {time!r}")

    def failure(_problem: BaseException, text: str) -> MidepochError:
        return DataNotFoundError(
            f"{name} has no version at {time}: {_without_trace(text)}. Pass a later time, with its zone, as in "
            "2026-01-31T00:00:00Z, or the number of a version."
        )

    table = _open(store, name, uri, options, None)
    with refusals(store.secrets.clean, failure):
        table.load_as_version(time)
        return int(table.version())


def _without_trace(text: str) -> str:
    """Return the text of an error of ``deltalake`` without the functions that it was raised in."""
    return re.split(r"\n\s*0: ", text, maxsplit=1)[0]


def _refusing(store: Store, name: str) -> AbstractContextManager[None]:
    """Return a context that converts errors of ``deltalake``."""

    def failure(problem: BaseException, text: str) -> MidepochError:
        text = _without_trace(text)
        if type(problem).__name__ == "TableNotFoundError":
            return DataNotFoundError(f"{name} is not a Delta table: {text}. Check the path.")
        if not store.local and re.search(r"object store|request|connect|timed? ?out|HTTP", text, re.IGNORECASE):
            return FetchError(f"the log of {name} could not be read: {text}")
        return FormatError(f"the Delta table {name} cannot be read: {text}")

    return refusals(store.secrets.clean, failure)


def _contents(table: Any, store: Store, path: str, name: str) -> tuple[pa.Schema, list[tuple[Entry, SnapshotFile]]]:
    """Return the columns and the files of an open table, oldest files first."""
    features = set(table.protocol().reader_features or ())
    unsupported = sorted(features - _SUPPORTED)
    if unsupported:
        raise FormatError(
            f"the Delta table {name} uses {', '.join(unsupported)}, which is not supported. Write a table without it."
        )
    mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    schema = pa.schema([_described(field, mode) for field in pa.schema(table.schema().to_arrow())])
    deleted = _deleted(table, store, path, name) if "deletionVectors" in features else {}
    actions = pa.table(table.get_add_actions())
    names = [each for each in ("path", "size_bytes", "modification_time", "partition") if each in actions.schema.names]
    rows = sorted(actions.select(names).to_pylist(), key=lambda row: (row["modification_time"], row["path"]))
    files = []
    for row in rows:
        place = _place(store, path, name, row["path"])
        contents = SnapshotFile(schema, row.get("partition") or {}, deleted.pop(place, None))
        files.append((Entry(place, row["size_bytes"], 0), contents))
    if deleted:
        raise FormatError(f"the Delta table {name} has deleted rows of {next(iter(deleted))}, which it does not list.")
    return schema, files


def _deleted(table: Any, store: Store, path: str, name: str) -> dict[str, npt.NDArray[np.int64]]:
    """Return the deleted rows of each file, by its path in the store."""
    root = table.table_uri
    found: dict[str, npt.NDArray[np.int64]] = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        for uri, kept in zip(*batch.columns, strict=True):
            place = _under(uri.as_py(), root, path) or _place(store, path, name, uri.as_py())
            mask = kept.values.cast(pa.uint8()).to_numpy(zero_copy_only=False)
            rows = np.flatnonzero(mask == 0).astype(np.int64)
            found |= {place: rows} if len(rows) else {}
    return found


def _under(uri: str, root: str, path: str) -> str | None:
    """Return the path in the store of an address below the root of a table. The root may be a resolved link."""
    file, folder = (unquote(urlsplit(each).path) for each in (uri, root))
    folder = folder.rstrip("/") + "/"
    return f"{path}/{file[len(folder) :]}" if file.startswith(folder) else None


def _place(store: Store, path: str, name: str, given: str) -> str:
    """Return the path in the store of a file of the log, which is relative to the table, or absolute in a clone."""
    if "://" not in given and not given.startswith("/"):
        return f"{path}/{unquote(given)}"
    parts = urlsplit(given)
    if store.local and parts.scheme in ("", "file"):
        return unquote(parts.path)
    if store.scheme == f"{parts.scheme}://":
        return unquote(parts.netloc + parts.path)
    raise FormatError(f"the Delta table {name} has a file in another store, {parts.scheme}://: this is not supported.")


def _described(field: pa.Field, mode: str) -> pa.Field:
    """Return a field with the id and the name that files have for it in a mode of column mapping."""
    about = {name.decode(): value.decode() for name, value in (field.metadata or {}).items()}
    names = [about.get("delta.columnMapping.physicalName", field.name)] if mode in ("name", "id") else []
    number = int(about["delta.columnMapping.id"]) if mode == "id" and "delta.columnMapping.id" in about else None
    kind = described_type(field.type, partial(_described, mode=mode))
    return described(pa.field(field.name, kind), number=number, names=names)
