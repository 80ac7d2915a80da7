"""Folders that a manifest describes: ``index.json`` of MosaicML's MDS shards and of LitData's chunks.

Only the manifest is looked up when a dataset is opened. The files that it names are listed when the index is built, and
each is compared with the index when it is read: 10,000 shards need no ``stat`` (0.1 s) for a second opening.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources.listing import beginning, file_at, files_at
from midepoch.storage.stores import Entry, Store

NAME = "index.json"
FORMATS = ("mds", "litdata")
_KEYS = {"shards": "mds", "chunks": "litdata"}
_BEGINNING = re.compile(rb'\s*\{\s*"(shards|chunks)"\s*:\s*\[')
_PARQUET = re.compile(rb'"filename":\s*"[^"]*\.parquet"')
_CHUNK = re.compile(r"(?:.*/)?chunk-\d+-\d+(?:\.\w+)?\.bin")
_HEAD = 512


def is_manifest(path: str) -> bool:
    """Return True if a file may be a manifest, by its name."""
    return path == NAME or path.endswith("/" + NAME)


def manifest_format(store: Store, entry: Entry) -> str | None:
    """Return the format that a manifest describes: "mds", "litdata", or "parquet" (of LitData's ``ParquetLoader``).

    None for any other JSON file. Both packages write their keys in order, so that the first bytes suffice.
    """
    start = beginning(store, entry, _HEAD)
    if (match := _BEGINNING.match(start)) is not None:
        return "parquet" if _PARQUET.search(start) else _KEYS[match[1].decode()]
    try:
        contents = read_manifest(store, entry)
    except FormatError:
        return None
    return next((form for key, form in _KEYS.items() if isinstance(contents.get(key), list)), None)


def read_manifest(store: Store, entry: Entry) -> dict[str, Any]:
    """Return the contents of a manifest. Raise FormatError if it cannot be parsed."""
    text = beginning(store, entry)
    try:
        contents = json.loads(text)
        if not isinstance(contents, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as problem:
        raise FormatError(f"{store.name(entry.path)}: not a manifest: {problem}. Copy or download it again.") from None
    return contents


def chosen(store: Store, folder: str, found: Sequence[Entry], wanted: str | None) -> tuple[str, Entry] | None:
    """Return the manifest of a folder and its format, or None if there is none. ``found``: the files of the folder.

    The manifest may be in the folder or in one folder below it, as for splits. Raise FormatError if there are several.
    """
    if not _may_be(wanted):
        return None
    top = folder.rstrip("/")
    has_any = NAME in "\n".join([entry[0] for entry in found])  # without a call for each of 10,000 files
    named = [entry for entry in found if is_manifest(entry.path)] if has_any else []
    outer = [entry for entry in named if os.path.dirname(entry.path).rstrip("/") == top]
    kinds = [manifest for entry in outer or named if (manifest := of_file(store, entry, wanted)) is not None]
    if len(kinds) > 1:
        mixed = len({kind for kind, _ in kinds}) > 1
        folders = sorted(store.name(os.path.dirname(entry.path)) + f" ({kind})" * mixed for kind, entry in kinds)
        listed = ", ".join(folders[:5]) + (", …" if len(folders) > 5 else "")
        remedy = "open each and combine them with midepoch.mix" if mixed else "pass a list of folders"
        raise FormatError(
            f"{store.name(folder)} contains {len(folders)} datasets with an index.json: {listed}. Choose one of them "
            f"by its folder, or {remedy}."
        )
    if not kinds and outer and (wanted is not None or any(".mds" in entry.path for entry in found)):
        read_manifest(store, outer[0])
        raise FormatError(
            f"{store.name(outer[0].path)} is not a manifest of {wanted or 'mds'}: it has no list of files. Copy or "
            "download it again."
        )
    if not kinds and wanted is not None:
        raise DataNotFoundError(
            f"no {NAME} of format {wanted!r} in {store.name(folder)}. Check the path: the manifest names the files of "
            "the dataset."
        )
    return kinds[0] if kinds else None


def _may_be(wanted: str | None) -> bool:
    return wanted is None or wanted.partition(":")[0] in FORMATS


def of_file(store: Store, entry: Entry, wanted: str | None) -> tuple[str, Entry] | None:
    """Return a file and its format if it is a manifest, else None."""
    if not is_manifest(entry.path) or not _may_be(wanted) or (kind := manifest_format(store, entry)) is None:
        return None
    if wanted is not None and wanted.partition(":")[0] != (kind if kind in FORMATS else "litdata"):
        raise FormatError(f"{store.name(entry.path)} describes {kind} data, format={wanted!r} was given. Omit it.")
    return kind, entry


def is_litdata(store: Store, path: str) -> bool:
    """Return True if a path is the manifest of LitData's chunks, or a folder that has one."""
    entry = file_at(store, path if is_manifest(path) else f"{path.rstrip('/')}/{NAME}")
    return entry is not None and manifest_format(store, entry) == "litdata"


def refuse_chunks(store: Store, entries: Sequence[Entry]) -> None:
    """Raise FormatError for chunks of LitData among files of tokens: their headers would be read as tokens."""
    chunk = next((entry.path for entry in entries if _CHUNK.fullmatch(entry.path)), None)
    if chunk is not None and is_litdata(store, folder := os.path.dirname(chunk)):
        raise FormatError(
            f"{store.name(chunk)} is a chunk of LitData: it has a header before its tokens. Pass its folder "
            f"without dtype: midepoch.from_tokens({store.name(folder)!r}, sequence_length)."
        )


def inside(store: Store, manifest: Entry, name: Any) -> str:
    """Return the path of a file that a manifest names. Raise FormatError for one outside of its folder."""
    if not isinstance(name, str) or not name or name.startswith("/") or ".." in name.split("/"):
        raise FormatError(f"{store.name(manifest.path)} names the file {name!r}, which is not below its folder.")
    folder = os.path.dirname(manifest.path)
    return f"{folder}/{name}" if folder else name


def parquet_files(store: Store, manifest: Entry) -> list[Entry]:
    """Return the Parquet files that a manifest of LitData names, in its order."""
    chunks = read_manifest(store, manifest)["chunks"]
    paths = [inside(store, manifest, chunk.get("filename")) for chunk in chunks]
    present = files_at(store, paths)
    for path in paths:
        if path not in present:
            raise DataNotFoundError(
                f"{store.name(path)} does not exist, but {store.name(manifest.path)} names it. Copy or download it."
            )
    return [present[path] for path in paths]
