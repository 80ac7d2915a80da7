"""The order of the rows of a run, stored beside the ledger: enough to find the row at a position years later.

It takes a few hundred bytes for each source. Shuffles by window or file also store the first rows of blocks or files.
Draws by weight store the weights: up to 8 bytes a row. The data itself is not needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from midepoch.audit.lanes import tree_of
from midepoch.errors import StateError
from midepoch.order import EpochOrder, Order, Selection, SourceLayout, Weighted
from midepoch.order.schedule import Schedule, shares
from midepoch.order.selection import Shard
from midepoch.pipeline.leaf import Leaf
from midepoch.pipeline.node import Mix, Node
from midepoch.pipeline.planned import GivenLengths, Planning
from midepoch.pipeline.spec import PipelineSpec, leaf_identity
from midepoch.state.format import order_of

if TYPE_CHECKING:
    from midepoch.audit.passes import Generation


class WeightChange(NamedTuple):
    """Weights that ``Loader.set_weights`` has set, and the first step that has them.

    ``weights``: shares of 1, by the name of the source, or its number if it has no name. ``phase``: the phase of the
    schedule in which they apply, if there is a schedule.
    """

    step: int
    epoch: int
    position: int
    phase: str | None
    weights: dict[str, float]


@dataclass(frozen=True)
class RecordedMix:
    """Names of the sources, weights that were set and the number of their phase, and the schedule as text."""

    names: Sequence[str]
    weights: Sequence[float] | None = None
    phase: int = 0
    text: str = ""

    @cached_property
    def schedule(self) -> Schedule | None:
        """The schedule of the pass."""
        return Schedule.from_dict(json.loads(self.text)) if self.text else None

    def phase_at(self, position: int) -> int | None:
        """Return the number of the phase at a position of the pass, or None if it is not known."""
        plan = () if self.schedule is None else self.schedule.plan
        ends = (number for number, phase in enumerate(plan) if phase.outputs is None or position < phase.outputs)
        number = next(ends, len(plan) - 1)
        is_known = bool(plan) and (plan[number].outputs is not None or number + 1 == len(plan))
        return number if is_known else None

    def weights_at(self, position: int) -> tuple[float, ...] | None:
        """Return the weights at a position of the pass as shares of 1, or None if they are not known."""
        number = self.phase_at(position)
        if self.weights is not None and (self.schedule is None or number == self.phase):
            return shares(self.weights)
        if self.schedule is None or number is None:
            return None
        phase = self.schedule.plan[number]
        if phase.final_weights is None:
            return shares([float(phase.weights.get(name, 0)) for name in self.names])
        if phase.outputs is None:
            return None
        outputs = max(1, phase.outputs - phase.first_output)
        place = phase.start + (phase.stop - phase.start) * (position - phase.first_output) // outputs
        segments = self.schedule.segments(self.names, Shard())
        segment = segments.at(place)
        return segments.weights[-1 if segment is None else segment]

    def change(self, step: int, epoch: int, position: int) -> WeightChange:
        """Return the weights that were set, as a change at a step."""
        assert self.weights is not None
        weights = shares(self.weights)
        names = self.names or list(map(str, range(len(weights))))
        phase = None if self.schedule is None else self.schedule.plan[self.phase].name
        return WeightChange(step, epoch, position, phase, dict(zip(names, weights, strict=True)))


def mix_of(node: Node, epoch: int) -> RecordedMix | None:
    """Return the mix of a pipeline, if it has a schedule or weights that were set.

    With a schedule, weights apply only in the epoch in which they were set.
    """
    mix = node.base
    if not isinstance(mix, Mix) or (mix.learned is None and mix.schedule is None):
        return None
    names, text = list(mix.names), "" if mix.schedule is None else mix.schedule.text
    if mix.learned is not None and (mix.schedule is None or mix.learned.epoch == epoch):
        return RecordedMix(names, list(mix.learned.weights), mix.learned.phase, text)
    return RecordedMix(names, text=text)


def weight_changes(passes: Iterable[tuple[int, Generation, KnownOrder]]) -> list[WeightChange]:
    """Return the changes of weights over the passes of a run. Each comes with the number of steps before it."""
    found: list[WeightChange] = []
    last, given = None, None
    for steps, one, order in passes:
        mix, now = one.first.header.mix, order.mix
        if mix is None and given not in (None, now):  # resumed with another mix
            mix = now
        current = None if mix is None or mix.weights is None else (mix.phase, mix.weights)
        if current is not None and current != last and mix is not None:
            found.append(mix.change(steps + 1, one.shape.epoch, one.cursor.position))
        last, given = current, now
    return found


Int64Array = npt.NDArray[np.int64]
SUFFIX = ".order"
_MOST_NAMES = 10_000


def stream_name(spec: PipelineSpec, name: str) -> str:
    """Return a name of the rows that a loader iterates: the same on every start, for any seed and lanes."""
    fields = {key: value for key, value in _identity(spec).items() if key not in ("seed", "lanes")}
    return _name({**fields, "name": name})


def order_name(spec: PipelineSpec) -> str:
    """Return a name of the rows and their order, except for weights and schedules that change during a run."""
    return _name(_identity(spec))


def _identity(spec: PipelineSpec) -> dict[str, Any]:
    """Return the identity of a pipeline without weights that were set, and without a schedule, which may change."""
    fields = dict(spec.identity)
    if isinstance(spec.node.base, Mix):
        fields["parts"] = parts = dict(fields["parts"])
        parts.pop("learned", None)
        if parts.pop("schedule", None) is not None:
            del parts["weights"]
    return fields


def _name(identity: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()


def save_order(folder: Path, spec: PipelineSpec) -> None:
    """Store the order of a pipeline, unless it is stored already."""
    path = folder / f"{order_name(spec)}{SUFFIX}"
    if path.exists() and path.stat().st_size:
        return
    about = {
        **spec.identity,
        "tree": None if spec.unit == "rows" else tree_of(spec.node),
        "sources": [{**leaf_identity(leaf), "files": _files(leaf)} for leaf in spec.leaves],
    }
    leaves = enumerate(spec.leaves)
    arrays = {f"{name}_{number}": array for number, leaf in leaves for name, array in _arrays(leaf).items()}
    _write(path, about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8), **arrays)


def _arrays(leaf: Leaf) -> dict[str, npt.NDArray[Any]]:
    order, source = leaf.order, leaf.source
    arrays: dict[str, npt.NDArray[Any]] = {"file_starts": _steps(source.layout.file_starts)}
    if order.shuffle is not None and order.shuffle.scope == "window":
        arrays["block_starts"] = _steps(source.layout.block_starts)
    if isinstance(order.shuffle, Weighted):
        arrays["weights"] = order.shuffle.weights
    if order.selection.picks is not None:
        arrays["picks"] = order.selection.picks
    else:
        arrays["ranges"] = order.selection.ranges
    return arrays


def _files(leaf: Leaf) -> list[str]:
    files = leaf.source.files if len(leaf.source.files) <= _MOST_NAMES else ()
    return [leaf.source.name(file) for file in files]


def _steps(starts: Int64Array) -> Int64Array:
    """Return differences, which compress a hundredfold."""
    return np.diff(starts, prepend=0)


class KnownSource:
    """The rows of one source in their order, read from beside a ledger."""

    def __init__(self, about: dict[str, Any], arrays: Mapping[str, Int64Array]) -> None:
        self.about, self._arrays = about, arrays
        """Data, rows, selection, scope, seed, …"""
        self._last: tuple[int, EpochOrder] | None = None

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return int(self.about["rows"])

    @property
    def numbered(self) -> int:
        """Number of the rows that have a number in the dataset. Draws by weight may be more or fewer."""
        return len(self.order.selection)

    @cached_property
    def order(self) -> Order:
        """The order: the row at each position of an epoch."""
        weights = self._arrays.get("weights")
        if "picks" in self._arrays:
            return order_of(self.about, Selection(picks=self._arrays["picks"]), weights)
        ranges = [(int(a), int(b)) for a, b in self._arrays["ranges"]]
        return order_of(self.about, Selection.of_ranges(ranges), weights)

    @cached_property
    def layout(self) -> SourceLayout:
        """The first rows of files, and of blocks if the order needs them."""
        files = np.cumsum(self._arrays["file_starts"])
        return SourceLayout(np.cumsum(self._arrays.get("block_starts", self._arrays["file_starts"])), files)

    def at(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch. The last one is kept: that of draws without replacement is sorted."""
        if self._last is None or self._last[0] != epoch:
            self._last = (epoch, self.order.at(epoch, self.layout))
        return self._last[1]

    @property
    def source_rows(self) -> int:
        """Number of all rows of the files, selected or not."""
        return self.layout.rows

    def in_source(self, chosen: Int64Array) -> Int64Array:
        """Return the rows of the files for row numbers of the dataset."""
        return self.order.selection.source_rows(chosen)

    def place(self, row: int) -> str:
        """Return the file of a row of the dataset, and its number in that file, in words."""
        source_row = int(self.in_source(np.array([row]))[0])
        starts, files = self.layout.file_starts, self.about["files"]
        number = int(np.searchsorted(starts, source_row, side="right")) - 1
        name = files[number] if number < len(files) else f"file {number}"
        return f"row {source_row - int(starts[number])} of {name}"


SourceKey = tuple[str, int]
"""The identity of a source in a run: a digest of its rows and their order, and the number of equal ones before it."""


class KnownOrder:
    """The order of a run, read from beside its ledger: that of one source, or a tree of several."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._path = name, folder / f"{name}{SUFFIX}"

    @cached_property
    def _stored(self) -> dict[str, npt.NDArray[Any]]:
        return _read(
            self._path, "about", f"{self._path} cannot be read, so rows cannot be identified. Restore it from a copy"
        )

    @cached_property
    def about(self) -> dict[str, Any]:
        """The identity of the pipeline: data, rows, selection, scope, seed, …"""
        found: dict[str, Any] = json.loads(self._stored["about"].tobytes())
        return found

    @property
    def tree(self) -> dict[str, Any] | None:
        """The shape of the cursors of lanes, or None if positions can be computed."""
        tree: dict[str, Any] | None = self.about["tree"]
        return tree

    @cached_property
    def sources(self) -> list[KnownSource]:
        """All sources, in the order of the tree."""
        sources = []
        for number, about in enumerate(self.about["sources"]):
            end = f"_{number}"
            arrays = {name.removesuffix(end): array for name, array in self._stored.items() if name.endswith(end)}
            sources.append(KnownSource(about, arrays))
        return sources

    @cached_property
    def keys(self) -> list[SourceKey]:
        """The identity of each source, which it keeps in another mix."""
        names = [_name({**source.about, "files": None}) for source in self.sources]
        return [(name, names[:number].count(name)) for number, name in enumerate(names)]

    @property
    def mix(self) -> RecordedMix | None:
        """The mix with the weights that it was given, or None if there is none."""
        parts = self.about.get("parts") or {}
        return RecordedMix(parts.get("names", ()), parts["weights"]) if "weights" in parts else None

    @property
    def source(self) -> KnownSource:
        """The only source. Raises StateError if there are several."""
        if len(self.sources) > 1:
            raise StateError("the run has several sources, but this is known for one source only.")
        return self.sources[0]

    def lengths(self, length: str) -> GivenLengths:
        """Return the lengths of the rows by which batches were formed. Raises StateError if they are not stored."""
        stored = _read(
            _lengths_path(self._path.parent, self.name, length),
            "lengths",
            "the rows of batches by tokens cannot be named: their lengths are not beside the ledger, as they are for "
            f"up to {MOST_ROWS:,} rows",
        )
        return GivenLengths(stored["lengths"].astype(np.int64))


MOST_ROWS = 4_000_000
"""Rows up to which lengths are stored, and batches of an epoch counted when a pass begins: about a second."""


def _lengths_path(folder: Path, order: str, length: str) -> Path:
    return folder / f"{order}-{hashlib.blake2b(length.encode(), digest_size=4).hexdigest()}.lengths"


def save_lengths(folder: Path, spec: PipelineSpec, planning: Planning) -> None:
    """Store the lengths of the rows of a pipeline, unless they are stored or too many."""
    path = _lengths_path(folder, order_name(spec), planning.budget.length)
    selection = spec.base.order.selection
    if len(selection) > MOST_ROWS or (path.exists() and path.stat().st_size):
        return
    rows = np.arange(len(selection), dtype=np.int64)
    lengths = planning.lengths.of(selection.source_rows(rows) if planning.by_source else rows)
    _write(path, lengths=lengths.astype(np.uint32))


def _write(path: Path, **arrays: npt.NDArray[Any]) -> None:
    """Write arrays to a file that all ranks write, equal."""
    content, temporary = io.BytesIO(), path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    try:
        with temporary.open("wb") as file:
            file.write(content.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, name: str, problem: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a file, among them ``name``. Raise StateError, which says the problem, if there are none."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
            if name not in arrays:  # the end of the archive, which lists them, is damaged
                raise ValueError(f"it has no {name}")
            return arrays
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise StateError(f"{problem} ({error}).") from None
