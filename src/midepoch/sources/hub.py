"""Arrow files of ``datasets.load_dataset(…)``: found by ``datasets`` once, then remembered."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midepoch.errors import DataError, DataNotFoundError
from midepoch.storage.address import Address, Secrets, is_secret
from midepoch.storage.cache_files import atomic_write, default_index_dir, locked
from midepoch.storage.fsspec_files import redact_logs

VERSION = 1

_CREDENTIALS = {"token", "storage_options", "download_config"}
# Arguments that control how data is fetched, not which data: not part of the key, and never saved.
_NOT_DATA = {
    *_CREDENTIALS,
    "download_mode",
    "num_proc",
    "keep_in_memory",
    "verification_mode",
}


@dataclass(frozen=True, repr=False)
class HubRequest:
    """The arguments of ``load_dataset`` that identify the data."""

    path: str
    name: str | None = None
    data_files: Any = None
    data_dir: str | None = None
    revision: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        given = {name: value for name, value in self.kwargs.items() if value is not None}
        kwargs = {name: value for name, value in given.items() if name not in _NOT_DATA and not is_secret(name)}
        fields = [_absolute(self.path), self.name, self.data_files, self.data_dir, self.revision, kwargs]
        local = [os.getcwd()] if self._relative() else []
        text = _canonical([VERSION, *fields, *local])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _relative(self) -> bool:
        """Return True if the same arguments mean other files in another working folder."""
        names = [name for name in (self.data_dir, *_flat(self.data_files)) if name]
        return any("://" not in name and not os.path.isabs(name) for name in names)

    def inputs(self, index_dir: Path) -> list[tuple[str, int, int]]:
        """Return path, size and mtime of the local files from which the data is built. Empty for data of a hub."""
        ours = [os.path.abspath(index_dir), os.path.abspath(self.kwargs.get("cache_dir") or index_dir)]
        base = self.path if os.path.isdir(self.path) else "."
        folder = os.path.join(base, self.data_dir) if self.data_dir else base
        names: list[str] = []
        for pattern in _flat(self.data_files):
            if "://" not in pattern:
                names += glob.glob(os.path.join(glob.escape(folder), os.path.expanduser(pattern)), recursive=True)
        if self.data_files is None and (self.data_dir or os.path.isdir(self.path)) and os.path.isdir(folder):
            names += [os.path.join(root, name) for root, _, files in os.walk(folder) for name in files]
        found = []
        for name in sorted({os.path.abspath(name) for name in names}):
            made_here = any(os.path.dirname(name).startswith(folder) for folder in ours) and self.data_files is None
            if os.path.isfile(name) and not made_here and not os.path.basename(name).startswith("."):
                stat = os.stat(name)
                found.append((name, stat.st_size, stat.st_mtime_ns))
        return found


def arrow_files(
    request: HubRequest, *, index_dir: Path | None = None, force: bool = False, num_proc: int | None = None
) -> dict[str, list[Path]]:
    """Return the Arrow files in the Hugging Face cache by split. Run ``datasets`` only if they are not known yet."""
    path = (index_dir or default_index_dir()) / f"{request.key}.midepoch-dataset"
    if not force and (known := _recall(path, request)) is not None:
        return known
    with locked(path, f"the list of files of {Address(request.path)!r}") as place:
        if not force and (known := _recall(path, request)) is not None:  # another process has done it
            return known
        inputs = request.inputs(path.parent)
        splits = _ask_datasets(request, num_proc)
        entry = {
            "version": VERSION,
            "dataset": {"path": Address(request.path).public, "name": request.name, "revision": request.revision},
            "inputs": inputs,
            "splits": {name: [str(file) for file in files] for name, files in splits.items()},
        }
        place.keep(lambda: atomic_write(path, json.dumps(entry, indent=1).encode()))
    return splits


def _recall(path: Path, request: HubRequest) -> dict[str, list[Path]] | None:
    """Return the files found last time, or None if files were removed or changed since."""
    try:
        entry = json.loads(path.read_text())
        if entry["version"] != VERSION or [tuple(each) for each in entry["inputs"]] != request.inputs(path.parent):
            return None
        splits = {name: [Path(file) for file in files] for name, files in entry["splits"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return splits if all(file.is_file() for files in splits.values() for file in files) else None


def _ask_datasets(request: HubRequest, num_proc: int | None) -> dict[str, list[Path]]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "loading a dataset for the first time needs Hugging Face's datasets: `pip install midepoch[hf]`."
        ) from None
    kwargs = {name: value for name, value in request.kwargs.items() if name != "keep_in_memory"}
    if kwargs.pop("streaming", False):
        raise ValueError(
            "streaming=True has no Arrow files to read. Leave it out: midepoch never loads data into memory. To read "
            "without a download, use midepoch.from_files('hf://datasets/ORG/NAME/data/train-*.parquet')"
        )
    redact_logs()
    try:
        found = datasets.load_dataset(
            request.path,
            request.name,
            data_files=request.data_files,
            data_dir=request.data_dir,
            revision=request.revision,
            num_proc=num_proc,
            keep_in_memory=False,
            **kwargs,
        )
    except Exception as problem:
        missing = isinstance(problem, (FileNotFoundError, datasets.exceptions.DatasetNotFoundError))
        failure = _failure(request, problem, missing)
    else:
        if isinstance(found, datasets.Dataset):
            found = {str(found.split or "train"): found}
        return {str(name): _files_of(request, name, split) for name, split in found.items()}
    raise failure  # outside of the handler: a chained error would be shown with its credentials


def _failure(request: HubRequest, problem: Exception, missing: bool) -> DataError:
    """Return the error to raise for an error of ``datasets``, chained to it unless that shows credentials."""
    given = {name: value for name, value in request.kwargs.items() if name in _CREDENTIALS or is_secret(name)}
    secrets = Secrets.of(given, *map(Address, (request.path, request.data_dir or "", *_flat(request.data_files))))
    name = repr(Address(request.path))
    if missing:
        failure: DataError = DataNotFoundError(secrets.clean(f"datasets could not find {name}: {problem}"))
    else:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(problem))
        if isinstance(problem, TypeError) and unknown is not None:
            return DataError(
                f"load_dataset({name}) has no argument {unknown[1]!r}: neither midepoch, nor datasets' reader of that "
                "format. Omit it, or correct its name."
            )
        cause = problem.__cause__ or problem.__context__
        detail = f" ({type(cause).__name__}: {cause})" if cause is not None else ""
        text = f"datasets could not load {name}: {type(problem).__name__}: {problem}{detail}"
        failure = DataError(secrets.clean(text))
    shown = "".join(traceback.format_exception(problem))
    failure.__cause__ = problem if secrets.clean(shown) == shown else None
    return failure


def _files_of(request: HubRequest, name: Any, split: Any) -> list[Path]:
    files = [Path(entry["filename"]) for entry in split.cache_files]
    if not files and len(split):
        shown = repr(Address(request.path))
        raise DataError(f"split {name!r} of {shown} is in memory only: there are no Arrow files to read.")
    return files


def _flat(data_files: Any) -> Iterable[str]:
    if data_files is None:
        return
    if isinstance(data_files, (str, os.PathLike)):
        yield os.fspath(data_files)
    elif isinstance(data_files, Mapping):
        for value in data_files.values():
            yield from _flat(value)
    else:
        for value in data_files:
            yield from _flat(value)


def _canonical(value: Any) -> str:
    """Return a text that is equal for equal arguments, in any order of their keys."""
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{key!r}:{_canonical(inner)}" for key, inner in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, (str, os.PathLike)):
        return repr(Address(os.fspath(value)).identity)  # the same data with any credentials
    return repr(value)


def _absolute(path: str) -> str:
    return os.path.abspath(path) if os.path.exists(path) else path
