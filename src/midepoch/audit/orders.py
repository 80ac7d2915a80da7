"""The order of the rows of a run, kept beside the ledger: enough to say years later which row stood at a position.

A few hundred bytes; for shuffles by window or file, also where blocks or files begin. The data itself is not needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midepoch import state as states
from midepoch.errors import StateError
from midepoch.order import EpochOrder, Layout, Order, Selection
from midepoch.pipeline import Pipeline

Int64Array = npt.NDArray[np.int64]

SUFFIX = ".order"
_MOST_NAMES = 10_000


def stream_name(pipeline: Pipeline, name: str) -> str:
    """Of the rows that a loader goes through: the same on every start, whatever seed and lanes it has."""
    identity = {key: value for key, value in states.identity(pipeline).items() if key not in ("seed", "lanes")}
    return _name({**identity, "name": name})


def order_name(pipeline: Pipeline) -> str:
    """Of the rows and their order: two runs with the same name see the same rows at a position."""
    return _name(states.identity(pipeline))


def _name(identity: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()


def save_order(folder: Path, pipeline: Pipeline) -> None:
    """Write down the order of a pipeline, unless it is there."""
    path = folder / f"{order_name(pipeline)}{SUFFIX}"
    if path.exists() and path.stat().st_size:
        return
    order, source = pipeline.order, pipeline.source
    arrays: dict[str, Int64Array] = {"file_starts": _steps(source.layout.file_starts)}
    if order.shuffle is not None and order.shuffle.scope == "window":
        arrays["block_starts"] = _steps(source.layout.block_starts)
    if order.selection.picks is not None:
        arrays["picks"] = order.selection.picks
    else:
        arrays["ranges"] = np.array(order.selection.ranges, dtype=np.int64).reshape(-1, 2)
    files = source.files if len(source.files) <= _MOST_NAMES else ()
    about = {**states.identity(pipeline), "files": [source.name(file) for file in files]}
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    np.savez_compressed(buffer, about=text, **arrays)  # type: ignore[arg-type]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with temporary.open("wb") as file:
        file.write(buffer.getvalue())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)  # by all ranks, the same


def _steps(starts: Int64Array) -> Int64Array:
    """As differences, which compress a hundredfold."""
    return np.diff(starts, prepend=0)


class KnownOrder:
    """The rows of a run in their order, read from beside its ledger."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._path = name, folder / f"{name}{SUFFIX}"

    @cached_property
    def _stored(self) -> dict[str, Any]:
        try:
            with np.load(self._path, allow_pickle=False) as stored:
                found = {key: stored[key] for key in stored.files}
            return {**found, "about": json.loads(found["about"].tobytes())}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as problem:
            raise StateError(f"{self._path} cannot be read, so rows cannot be named: {problem}") from None

    @property
    def about(self) -> dict[str, Any]:
        """What it was: data, rows, selection, scope, seed, …"""
        found: dict[str, Any] = self._stored["about"]
        return found

    @cached_property
    def order(self) -> Order:
        """Which row stands at a position of an epoch."""
        if "picks" in self._stored:
            return states.order_of(self.about, Selection(picks=self._stored["picks"]))
        ranges = [(int(a), int(b)) for a, b in self._stored["ranges"]]
        return states.order_of(self.about, Selection.of_ranges(ranges))

    @cached_property
    def layout(self) -> Layout:
        """Where files begin, and blocks, where the order needs them."""
        files = np.cumsum(self._stored["file_starts"])
        return Layout(np.cumsum(self._stored.get("block_starts", self._stored["file_starts"])), files)

    def at(self, epoch: int) -> EpochOrder:
        return self.order.at(epoch, self.layout)

    @property
    def source_rows(self) -> int:
        """All rows of the files, chosen or not."""
        return self.layout.rows

    def in_source(self, chosen: Int64Array) -> Int64Array:
        """Row numbers of the dataset as rows of its files."""
        return self.order.selection.source_rows(chosen)

    def place(self, row: int) -> str:
        """Where a row of the dataset lies, in words."""
        source_row = int(self.in_source(np.array([row]))[0])
        starts, files = self.layout.file_starts, self.about["files"]
        number = int(np.searchsorted(starts, source_row, side="right")) - 1
        name = files[number] if number < len(files) else f"file {number}"
        return f"row {source_row - int(starts[number])} of {name}"
