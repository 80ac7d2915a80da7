"""Resolution of paths to files: a file, a list, a glob or a folder, in any store, in the same order on every host."""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

from midepoch._internal.hints import OPEN_ALREADY, is_array, is_dataset, name_of, opener_of
from midepoch.errors import DataNotFoundError, FormatError
from midepoch.sources import manifests
from midepoch.sources.listing import (
    all_visible,
    beginning,
    existing_folder,
    file_at,
    files_at,
    files_below,
    is_web,
    nearest,
    refuse_part,
    refuse_tables,
)
from midepoch.sources.names import (
    FORMATS,
    GLOB,
    KINDS,
    OF_TOKENS,
    Expanded,
    Listing,
    choose,
    files_of_repository,
    format_of,
    format_of_bytes,
    formats_of,
    is_metadata,
    listing_of,
    not_read,
    other_reader,
    spelled_out,
    translated,
    warn_of_splits,
)
from midepoch.sources.splits import DICT, STATE
from midepoch.storage.address import advice_on, refuse_lost_slash
from midepoch.storage.addresses import check_utf8, resolve
from midepoch.storage.hub import Hub
from midepoch.storage.stores import Entry, Store

PathLike = str | os.PathLike[str]
_log = logging.getLogger("midepoch")
_FEW = 16
"""Maximum number of paths that are requested one by one. For more, their folders are listed."""


@dataclass(frozen=True)
class DataFiles:
    """Files in order, with their format.

    ``listed``: they are manifests, which name the data files. ``listing``: each file is a row, and all of them are one
    entry.
    """

    format: str
    entries: tuple[Entry, ...]
    listed: bool = False
    listing: Listing | None = None


def resolved(texts: Sequence[str], *, fresh: bool = False, **where: Any) -> tuple[Store, tuple[str, ...]]:
    """Return the store of some addresses, and their paths in it. ``where``: the arguments of ``resolve``.

    ``fresh``: the store asks the Hub again, instead of using what this machine has listed recently.
    """
    store, first = resolve(texts[0], **where)
    paths = [first]
    for text in texts[1:]:
        other, path = resolve(text, **where)
        paths.append(path)
        if other.local and store.local:
            continue
        if other.identity != store.identity:
            raise ValueError(f"all files of a dataset must be in one store, {other.name(path)} is in another")
        if other.secrets != store.secrets:
            raise ValueError(
                f"all files of a dataset must be opened with the same credentials, {other.name(path)} has others"
            )
    if fresh:
        store.refresh()
    return store, tuple(paths)


def find_files(store: Store, texts: Sequence[str], paths: Sequence[str], wanted: str | None) -> DataFiles:
    """Return the files for some paths in a store. ``texts``: the paths as the user wrote them.

    Globs and folders are sorted; a list keeps its order.
    """
    found = expand(store, paths, texts, wanted)
    entries = tuple(chain.from_iterable(each.entries for each in found))
    kinds = {each.kind: each.entries[0].path for each in found}
    if kinds.keys() & set(manifests.FORMATS):
        if len(kinds) > 1:
            listed = ", ".join(
                f"{kind or 'files without a manifest'} ({store.name(path)})" for kind, path in kinds.items()
            )
            raise FormatError(f"the paths have different formats: {listed}. Open them as separate datasets.")
        return DataFiles(str(wanted or found[0].kind), entries, listed=True)
    if wanted == "litdata" and kinds.keys() == {"parquet"}:  # its ParquetLoader
        wanted = None
    counts = Counter(entry.path for entry in entries) if len(texts) > 1 else {}
    if twice := [path for path, count in counts.items() if count > 1]:
        _log.warning("%s is given more than once, and its rows are in the dataset as often", store.name(twice[0]))
    chosen = wanted or (found[0].kind if len(kinds) == 1 else None) or _common_format(store, entries)
    if chosen in KINDS:
        listing = listing_of(found)
        return DataFiles(chosen, (listing.entry,), listing=listing)
    return DataFiles(chosen, entries)


def paths_of(paths: PathLike | Iterable[PathLike]) -> list[str]:
    """Return one or several paths as a list of strings."""
    if isinstance(paths, (str, os.PathLike)):
        return [check_path(paths)]
    package = type(paths).__module__.partition(".")[0]
    is_other = isinstance(paths, (bytes, Mapping)) or package in (*_NO_PATHS, "_io") or not isinstance(paths, Iterable)
    if is_other or (isinstance(paths, (list, tuple)) and paths and not isinstance(paths[0], (str, os.PathLike))):
        raise TypeError(_not_a_path(paths))
    within = paths if isinstance(paths, Generator) or is_array(paths) else None
    listed = [check_path(path, within) for path in paths]
    if not listed and within is not None:
        raise DataNotFoundError(
            f"no files given: the {name_of(paths)} yields no paths. For rows, call {opener_of(paths)}."
        )
    if not listed:
        raise DataNotFoundError("no files given: the list of paths is empty. Pass at least one path.")
    return listed


_NO_PATHS = ("datasets", "midepoch", "pyarrow", "pandas", "polars", "torch")


def check_path(given: Any, within: Any = None) -> str:
    """Return a path as a string. Raise TypeError for anything else, about its container ``within`` if given."""
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(path, str):
        raise TypeError(_not_a_path(given if within is None else within))
    refuse_lost_slash(given)
    if not path:
        raise ValueError("a path is empty. Pass the path of a file or folder, '.' for the current folder.")
    if path.startswith("pipe:"):
        raise ValueError(f"commands are not run, got {path[:60]!r}. Pass the address itself, for example s3://….")
    return path


def _not_a_path(given: Any) -> str:
    if hasattr(given, "read"):
        return f"expected paths of files, got the open file {given!r:.60}. Pass its name."
    if isinstance(given, Mapping) and given and all(isinstance(each, (str, os.PathLike)) for each in given.values()):
        return f"expected paths of files, got a dict of {', '.join(map(str, given))}. Open each of them by itself."
    if (opener := opener_of(given)) is not None:
        return f"expected paths of files, got a {name_of(given)}. Call {opener}."
    if is_dataset(given):
        return f"expected paths of files, got a {name_of(given)}. {OPEN_ALREADY}"
    return f"expected paths of files (a str, a pathlib.Path or a list of them), got {given!r:.60}. Pass paths."


def expand(store: Store, paths: Sequence[str], texts: Sequence[str], wanted: str | None) -> list[Expanded]:
    """Return the files that paths, folders and globs mean. ``texts`` are the paths as the user wrote them."""
    found = [each for path, text in zip(paths, texts, strict=True) for each in _expanded(store, path, text, wanted)]
    check_utf8(*[entry[0] for each in found for entry in each.entries])
    return found


def _expanded(store: Store, path: str, given: str, wanted: str | None) -> list[Expanded]:
    name = store.name(path)
    where = f" (looked in {os.getcwd()})" if store.local and "://" not in given else ""
    # In a store one listing finds a folder. Only a path with the name of a file is checked as a file first.
    named = store.local or format_of(path, wanted) is not None or is_web(path)
    entry = file_at(store, path) if named else None
    if entry is not None:
        manifest = manifests.of_file(store, entry, wanted)
        return [Expanded("", [entry]) if manifest is None else _described(store, *manifest)]
    folder = existing_folder(store, path)
    if (spelled := spelled_out(path, folder)) is not None:
        return _all_of(store, spelled, given, wanted)
    inner = file_at(store, f"{path.rstrip('/')}/{manifests.NAME}") if store.local else None
    if inner is not None and (manifest := manifests.of_file(store, inner, wanted)) is not None:
        return [_described(store, *manifest)]  # without a listing of the folder
    if (glob := GLOB.search(path, len(folder))) is not None:
        base = path[: glob.start()].rpartition("/")[0]
        matches = re.compile(re.escape(folder) + translated(path[len(folder) :])).fullmatch
        all_files = files_below(store, base or "/")
        found = [each for each in all_visible(all_files, base) if matches(each.path)]
        refuse_part(store, base)
        refuse_tables(store, base, [each.path for each in all_files], [each.path for each in found])
        if wanted in OF_TOKENS:  # without files written beside them, unless no name matches
            found = [each for each in found if format_of(each.path, wanted)] or found
        if not found:
            raise DataNotFoundError(f"no file matches {name!r}{where}. {_mistyped(given) or nearest(store, base)}")
        found.sort(key=itemgetter(0))
        described = [manifest for each in found if (manifest := manifests.of_file(store, each, wanted)) is not None]
        # Manifests name the other files.
        return [_described(store, *manifest) for manifest in described] or [Expanded(base or "/", found)]
    found = files_below(store, path)
    if not found and not store.is_folder(path):
        entry = None if named else file_at(store, path)
        if entry is None:
            parts = [part.strip() for part in given.split(",")]
            several = store.local and len(parts) > 1 and all(map(os.path.exists, parts))
            remedy = f"Pass the {len(parts)} paths as a list: {parts}." if several else _mistyped(given)
            remedy = remedy or nearest(store, path)
            raise DataNotFoundError(f"{name!r} does not exist{where}. {remedy}")
        return [Expanded("", [entry])]
    refuse_part(store, path.rstrip("/"))
    refuse_tables(store, path, [each.path for each in found])
    visible = sorted(all_visible(found, path), key=itemgetter(0))  # by path
    if (manifest := manifests.chosen(store, path, visible, wanted)) is not None:
        return [_described(store, *manifest)]
    otherwise = "has only hidden files, checkpoints or caches" if found else "is empty"
    return [_chosen(store, path, visible, wanted, otherwise)]


def _chosen(store: Store, path: str, visible: list[Entry], wanted: str | None, otherwise: str) -> Expanded:
    """Return the files of a folder that are the data. ``otherwise``: what the folder is if no file is visible."""
    name = store.name(path)
    formats = formats_of([each.path for each in visible], wanted)
    typed, kind = choose(name, visible, formats, wanted)
    if isinstance(store.given, Hub) and kind is None:
        typed = files_of_repository(path, typed, parquet_only=wanted is None)
    else:
        warn_of_splits(name, path, typed)
    if not typed and wanted in FORMATS:
        typed = [each for each, named in zip(visible, formats, strict=True) if named is None]
    if not typed:
        others = ", ".join(sorted({os.path.splitext(each.path)[1] or each.path for each in visible})[:5])
        contents = f"it contains only {others}" if others else f"it {otherwise}"
        raise DataNotFoundError(
            f"no {wanted or 'data'} files in {name}: {contents}."
            f"{other_reader([each.path for each in visible]) or ' Check the path.'}"
        )
    unread = not_read([each.path for each, named in zip(visible, formats, strict=True) if named is None])
    if wanted is None and unread is not None:
        first = os.path.basename(typed[0].path)
        _log.warning("%s: only files like %s are read (%d in all). %s", name, first, len(typed), unread)
    kinds = set(formats) - {None}
    return Expanded(path, typed, kind or (kinds.pop() if len(kinds) == 1 else None))


def _described(store: Store, kind: str, manifest: Entry) -> Expanded:
    """Return the manifest and its format. Parquet files that it names are read like any others."""
    return Expanded("", manifests.parquet_files(store, manifest) if kind == "parquet" else [manifest], kind)


def _all_of(store: Store, paths: list[str], given: str, wanted: str | None) -> list[Expanded]:
    """Return the files of paths, in order. If there are many, they are looked up together."""
    found: dict[str, Entry] = {}
    if len(paths) > _FEW and not GLOB.search("".join(paths)) and not is_web(paths[0]):
        found = files_at(store, paths)
    parts: list[Expanded] = []
    for path in paths:
        known = path in found and not manifests.is_manifest(path)
        parts += [Expanded("", [found[path]])] if known else _expanded(store, path, given, wanted)
    return parts


def _mistyped(path: str) -> str:
    """Return the sentence about backslashes or variables in a path, or "" if it has none."""
    if "\\" in path and os.sep == "/":
        return f"Folders are separated by /: {path.replace(chr(92), '/')!r}, and not by backslashes."
    return advice_on(path)


def _common_format(store: Store, entries: Sequence[Entry]) -> str:
    """Return the format that the names of all files indicate, else the first bytes of the first file."""
    named = _formats_of(entries)
    if len(named) > 1 and any(kind in KINDS for kind in named):
        named = _formats_of([entry for entry in entries if not is_metadata(entry.path)])
    if len(named) > 1:
        saved = next((entry.path for entry in entries if posixpath.basename(entry.path) in (DICT, STATE)), None)
        if saved is not None and "arrow" in named:
            folder = store.name(posixpath.dirname(saved))
            raise FormatError(f"{folder} was written by save_to_disk. Call midepoch.load_from_disk({folder!r}).")
        listed = ", ".join(f"{kind} ({store.name(path)})" for kind, path in named.items())
        raise FormatError(
            f"the files have different formats: {listed}. Pass format=… for those of "
            "one format, or open each by itself and combine them with midepoch.concat([a, b]) or mix([a, b])."
        )
    if named:
        return next(iter(named))
    name, start = store.name(entries[0].path), beginning(store, entries[0], 8)
    if (kind := format_of_bytes(start)) is not None:
        return kind
    if (reason := not_read([entries[0].path])) is not None:
        raise FormatError(f"{name}: {reason}")
    raise FormatError(
        f"{name}: neither its name nor its first bytes ({start!r}) show its format. Pass format=…: "
        f"{', '.join(map(repr, FORMATS))}.{other_reader([entries[0].path])}"
    )


def _formats_of(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the formats that the names of files indicate, each with the path of a file."""
    named: dict[str, str] = {}
    paths = [entry.path for entry in entries]
    for path, kind in zip(paths, formats_of(paths, None), strict=True):
        if kind is not None:
            named.setdefault(kind, path)
    return named
