"""Data of the package ``datasets``: Hugging Face's split notation, folders of ``save_to_disk``, and the Arrow files of
``datasets.load_dataset(…)``, which are found by ``datasets`` once, then remembered.

The notation: ``train[100:]``, ``train[:10%]``, ``train[-20%:]``, ``train[10:20]+test``.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import math
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from midepoch.errors import DataError, DataNotFoundError, FormatError
from midepoch.storage.address import Address, Secrets, is_secret
from midepoch.storage.cache_files import CacheSlot, atomic_write, default_index_dir, read_or_make
from midepoch.storage.open_files import redact_logs

_log = logging.getLogger("midepoch")
_PART = re.compile(
    r"(?P<split>\w+(?:\.\w+)*)"
    r"(?:\[(?:(?P<start>-?[\d_]+)(?P<start_pct>%)?)?:(?:(?P<stop>-?[\d_]+)(?P<stop_pct>%)?)?\])?"
    r"(?:\((?P<rounding>\w+)\))?"
)


@dataclass(frozen=True)
class SplitPart:
    """One term of the notation."""

    split: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False
    whole_percents: bool = False

    def rows(self, length: int) -> tuple[int, int]:
        """Return the half-open range of rows in a split of this length."""
        if self.whole_percents and self.percent and length < 100:
            raise ValueError(
                f"(pct1_dropremainder) of a split of {length} rows is always empty: at least 100 rows are needed"
            )

        def absolute(bound: int | None, default: int) -> int:
            if bound is None:
                return default
            if self.percent:
                bound = bound * (length // 100) if self.whole_percents else round(bound * length / 100.0)
            return min(max(length + bound, 0) if bound < 0 else bound, length)

        start, stop = absolute(self.start, 0), absolute(self.stop, length)
        return start, max(start, stop)


def parse_split(text: str) -> tuple[SplitPart, ...]:
    """Return the terms of a split notation. Raise ValueError with an example if it is not valid."""
    parts = []
    for term in re.split(r"\s*\+\s*", str(text).strip()):
        match = _PART.fullmatch(term)
        if match is None:
            raise ValueError(
                f"cannot read the split {text!r}: expected something like 'train', 'train[:10%]', 'a[5:]+b'"
            )
        start, stop = match["start"], match["stop"]
        percent = bool(match["start_pct"] or match["stop_pct"])
        if percent and any(abs(int(bound)) > 100 for bound in (start, stop) if bound):
            raise ValueError(f"cannot read the split {text!r}: percentages go from -100% to 100%")
        if match["rounding"] not in (None, "closest", "pct1_dropremainder"):
            raise ValueError(f"cannot read the split {text!r}: rounding is 'closest' or 'pct1_dropremainder'")
        parts.append(
            SplitPart(
                match["split"],
                int(start) if start else None,
                int(stop) if stop else None,
                percent,
                match["rounding"] == "pct1_dropremainder",
            )
        )
    return tuple(parts)


def bound_of(bound: int | str | None, length: int) -> int | None:
    """Return a bound of a slice of ``length`` rows: a number, or a percentage like "80%" or "-12.5%"."""
    if bound is None or hasattr(bound, "__index__"):
        return bound  # type: ignore[return-value]
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)%", str(bound).strip())
    if match is None or abs(float(match[1])) > 100:
        raise ValueError(f"a bound must be a row number or a percentage like '80%' or '-10%', got {bound!r}")
    return round(float(match[1]) * length / 100.0)


def split_sizes(rows: int, train: Any, test: Any) -> tuple[int, int]:
    """Return the numbers of rows of two parts, given as shares or numbers of rows. By default, a quarter is the test.

    Raise ValueError if a part would be empty, or if both are more than there are.
    """
    sizes: list[int | None] = []
    for name, size in (("train_size", train), ("test_size", test)):
        if size is None:
            sizes.append(None)
        elif isinstance(size, bool) or not isinstance(size, (Integral, Real)):
            raise TypeError(f"{name} must be a share such as 0.1, or a number of rows, got {size!r}")
        elif not isinstance(size, Integral) and not 0 < float(size) < 1:
            raise ValueError(f"{name} must be a share above 0 and below 1, or a number of rows, got {size!r}")
        else:
            # As scikit-learn and datasets round: the test up, the training part down.
            share = int(size) if isinstance(size, Integral) else rows * float(size)
            sizes.append(math.ceil(share) if name == "test_size" else math.floor(share))
    first, last = sizes
    if first is None and last is None:
        last = math.ceil(rows * 0.25)
    last = rows - (first or 0) if last is None else last
    first = rows - last if first is None else first
    if first < 1 or last < 1 or first + last > rows:
        seed = " A seed is passed by name: seed=42." if isinstance(train, Integral) else ""
        raise ValueError(
            f"{rows:,} rows cannot be split into {first:,} for training and {last:,} for the test. Choose sizes of at "
            f"least one row each, and not more together than there are.{seed}"
        )
    if train is not None and test is not None and last > first:
        _log.warning(
            "train_test_split: the test has %s rows and the training part %s. The first argument is test_size.",
            last,
            first,
        )
    if first + last < rows and isinstance(train, Integral) and not isinstance(test, Integral):
        _log.warning(
            "train_test_split: %s rows are in neither part, because train_size is %s. A seed is named: seed=%s.",
            f"{rows - first - last:,}",
            first,
            first,
        )
    return first, last


def apportion(counts: Sequence[int], total: int) -> list[int]:
    """Divide a total in proportion to some counts, exactly: each share is rounded down, and largest remainders get one.

    >>> apportion([70, 20, 11], 10)
    [7, 2, 1]
    """
    rows = sum(counts)
    shares = [count * total // rows for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda at: -(counts[at] * total % rows))
    for at in by_remainder[: total - sum(shares)]:
        shares[at] += 1
    return shares


def expand_all(parts: Sequence[SplitPart], splits: Iterable[str], where: str) -> tuple[SplitPart, ...]:
    """Replace ``all`` by every split in turn. Raise DataNotFoundError for a split that is not in ``where``."""
    known = list(splits)
    if "all" not in known and any(part != SplitPart("all") for part in parts if part.split == "all"):
        raise ValueError("'all' cannot be sliced. Slice the splits themselves, as in 'train[:10%]+test[:10%]'")
    expanded: list[SplitPart] = []
    for part in parts:
        if part.split == "all" and "all" not in known:
            expanded += map(SplitPart, known)
        elif part.split in known:
            expanded.append(part)
        else:
            raise DataNotFoundError(f"there is no split {part.split!r} in {where}. There are: {', '.join(known)}.")
    return tuple(expanded)


DICT, STATE = "dataset_dict.json", "state.json"


def saved_splits(path: Path) -> dict[str, list[Path]] | None:
    """Return the Arrow files by split of a folder with a dataset dict, or None for a folder with a single dataset."""
    if not path.exists():
        raise DataNotFoundError(f"{str(path)!r} does not exist.")
    if (path / STATE).is_file():
        return None
    if not (path / DICT).is_file():
        raise DataNotFoundError(
            f"{path} was not written by save_to_disk: it has neither {STATE} nor {DICT}. "
            "For files of other programs (Parquet, Arrow, JSON, CSV) use midepoch.from_files."
        )
    names = _read_json(path / DICT).get("splits", [])
    return {str(name): saved_files(path / str(name)) for name in names}


def saved_files(path: Path) -> list[Path]:
    """Return the Arrow files of a folder with a single dataset, in order."""
    state = _read_json(path / STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise FormatError(f"{path} was saved with an indices mapping. Load it with datasets and save it again.")
    try:
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise FormatError(f"{path / STATE} does not list the data files.") from None
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataNotFoundError(
            f"{path} is incomplete: {', '.join(missing[:3])} missing ({len(missing)} of {len(files)})."
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataNotFoundError(f"{path} does not exist.") from None
    except (ValueError, OSError) as problem:
        raise FormatError(f"{path} cannot be read: {problem}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} contains {type(content).__name__} where an object was expected.")
    return content


VERSION = 1

_CREDENTIALS = {"token", "storage_options", "download_config"}
# Arguments that control how data is fetched, not which data: not part of the key, and never saved.
_NOT_DATA = {*_CREDENTIALS, "download_mode", "num_proc", "keep_in_memory", "verification_mode"}


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
        path = os.path.abspath(self.path) if os.path.exists(self.path) else self.path
        fields = [path, self.name, self.data_files, self.data_dir, self.revision, kwargs]
        names = [name for name in (self.data_dir, *_flat(self.data_files)) if name]
        if any("://" not in name and not os.path.isabs(name) for name in names):  # other files in another folder
            fields.append(os.getcwd())
        return hashlib.blake2b(_canonical([VERSION, *fields]).encode(), digest_size=16).hexdigest()

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

    def recall() -> dict[str, list[Path]] | None:
        """Return the files found last time, or None if files were removed or changed since."""
        if force:
            return None
        try:
            entry = json.loads(path.read_text())
            if entry["version"] != VERSION or [tuple(each) for each in entry["inputs"]] != request.inputs(path.parent):
                return None
            splits = {name: [Path(file) for file in files] for name, files in entry["splits"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return splits if all(file.is_file() for files in splits.values() for file in files) else None

    def ask(slot: CacheSlot) -> dict[str, list[Path]]:
        inputs = request.inputs(path.parent)
        splits = _ask_datasets(request, num_proc)
        entry = {
            "version": VERSION,
            "dataset": {"path": Address(request.path).public, "name": request.name, "revision": request.revision},
            "inputs": inputs,
            "splits": {name: [str(file) for file in files] for name, files in splits.items()},
        }
        slot.keep(lambda: atomic_write(path, json.dumps(entry, indent=1).encode()))
        return splits

    return read_or_make(path, f"the list of files of {Address(request.path)!r}", recall, ask)


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
        splits = {}
        for name, split in found.items():
            splits[str(name)] = [Path(entry["filename"]) for entry in split.cache_files]
            if not split.cache_files and len(split):
                where = repr(Address(request.path))
                raise DataError(f"split {name!r} of {where} is in memory only: there are no Arrow files to read.")
        return splits
    raise failure  # outside of the handler: a chained error would be shown with its credentials


_BUILDERS = {
    "csv": "csv",
    "tsv": "csv",
    "json": "json",
    "jsonl": "json",
    "parquet": "parquet",
    "arrow": "arrow",
    "txt": "text",
}


def _failure(request: HubRequest, problem: Exception, missing: bool) -> DataError:
    """Return the error to raise for an error of ``datasets``, chained to it unless that shows credentials."""
    given = {name: value for name, value in request.kwargs.items() if name in _CREDENTIALS or is_secret(name)}
    secrets = Secrets.of(given, *map(Address, (request.path, request.data_dir or "", *_flat(request.data_files))))
    name = repr(Address(request.path))
    if missing:
        text = f"datasets could not find {name}: {problem}. Check the name, data_files and the network."
        failure: DataError = DataNotFoundError(secrets.clean(text))
    else:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(problem))
        if isinstance(problem, TypeError) and unknown is not None:
            return DataError(
                f"load_dataset({name}) has no argument {unknown[1]!r}: neither midepoch, nor datasets' reader of that "
                "format. Omit it, or correct its name."
            )
        files = [str(one) for one in _flat(request.data_files)]
        ends = {_BUILDERS[end] for one in files if (end := one.rpartition(".")[2].lower()) in _BUILDERS}
        if request.path in _BUILDERS.values() and ends and request.path not in ends:
            return DataError(
                f"load_dataset({name}) reads another format than that of {Address(files[0])}. Use "
                f"load_dataset({min(ends)!r}, …), or midepoch.from_files(path), which recognizes it."
            )
        cause = problem.__cause__ or problem.__context__
        detail = f" ({type(cause).__name__}: {cause})" if cause is not None else ""
        text = f"datasets could not load {name}: {type(problem).__name__}: {problem}{detail}"
        failure = DataError(secrets.clean(text))
    shown = "".join(traceback.format_exception(problem))
    failure.__cause__ = problem if secrets.clean(shown) == shown else None
    return failure


def _flat(data_files: Any) -> Iterable[str]:
    if isinstance(data_files, (str, os.PathLike)):
        yield os.fspath(data_files)
        return
    for value in data_files.values() if isinstance(data_files, Mapping) else data_files or ():
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
