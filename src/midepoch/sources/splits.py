"""Folders of ``save_to_disk``, and Hugging Face's split notation.

The notation: ``train[100:]``, ``train[:10%]``, ``train[-20%:]``, ``train[10:20]+test``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from midepoch.errors import DataNotFoundError, FormatError

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
    if not isinstance(bound, str):
        return bound
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)%", bound.strip())
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
        raise ValueError(f"{rows:,} rows cannot be split into {first:,} for training and {last:,} for the test.")
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


def expand_all(parts: Sequence[SplitPart], splits: Sequence[str]) -> tuple[SplitPart, ...]:
    """Replace ``all`` by every split in turn."""
    if "all" not in splits and any(part != SplitPart("all") for part in parts if part.split == "all"):
        raise ValueError("'all' cannot be sliced. Slice the splits themselves, as in 'train[:10%]+test[:10%]'")
    return tuple(
        each
        for part in parts
        for each in (map(SplitPart, splits) if part.split == "all" and "all" not in splits else (part,))
    )


def check_splits(parts: Sequence[SplitPart], splits: Mapping[str, object] | Sequence[str], where: str) -> None:
    for part in parts:
        if part.split not in splits:
            raise DataNotFoundError(f"there is no split {part.split!r} in {where}. There are: {', '.join(splits)}.")


_DICT, _STATE = "dataset_dict.json", "state.json"


def saved_splits(path: Path) -> dict[str, list[Path]] | None:
    """Return the Arrow files by split of a folder with a dataset dict, or None for a folder with a single dataset."""
    if not path.exists():
        raise DataNotFoundError(f"{str(path)!r} does not exist.")
    if (path / _STATE).is_file():
        return None
    if not (path / _DICT).is_file():
        raise DataNotFoundError(
            f"{path} was not written by save_to_disk: it has neither {_STATE} nor {_DICT}. "
            "For plain Arrow files use midepoch.from_files."
        )
    names = _read_json(path / _DICT).get("splits", [])
    return {str(name): saved_files(path / str(name)) for name in names}


def saved_files(path: Path) -> list[Path]:
    """Return the Arrow files of a folder with a single dataset, in order."""
    state = _read_json(path / _STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise FormatError(f"{path} was saved with an indices mapping. Load it with datasets and save it again.")
    try:
        files = [path / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise FormatError(f"{path / _STATE} does not list the data files.") from None
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
