"""Arrays that are read when their values are needed, one after the other: a restore holds no second copy of a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from midepoch.checkpoint.arrays import Bytes, Kind, flat_bytes, is_array, make
from midepoch.checkpoint.files import Source
from midepoch.checkpoint.helpers import in_threads
from midepoch.checkpoint.tree import decode
from midepoch.errors import CheckpointDamagedError

_READERS = 4
_CHUNK = 8 << 20


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in a file that has been checked."""

    name: str
    kind: Kind
    source: Source
    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kind.shape

    @property
    def ndim(self) -> int:
        return len(self.kind.shape)

    def __getitem__(self, index: tuple[()]) -> Stored:
        """A scalar is what an array without axes is."""
        return self

    def read(self) -> Any:
        """The array, in memory of its own."""
        data = np.empty(self.kind.nbytes, np.uint8)
        self._fill(data)
        return make(self.kind, data)

    def read_into(self, target: Any) -> Any:
        """A torch or numpy array of the same kind, filled with the values."""
        if self.kind.library == "numpy":
            self._fill(target.reshape(-1).view(np.uint8))
        elif not target.is_contiguous():
            target.detach().copy_(self.read())
        elif target.numel():
            flat = flat_bytes(target)
            if target.device.type == "cpu":
                self._fill(flat.numpy())
            else:
                self._fill_device(flat)
        return target

    def _fill(self, data: Bytes) -> None:
        starts = range(0, len(data), _CHUNK)
        if len(starts) == 1:
            self._read(data, 0)
        elif starts:
            in_threads(_READERS, lambda start: self._read(data[start : start + _CHUNK], start), starts)

    def _fill_device(self, flat: Any) -> None:
        torch: Any = sys.modules["torch"]
        chunk = np.empty(min(_CHUNK, len(flat)), np.uint8)
        for start in range(0, len(flat), _CHUNK):
            part = chunk[: len(flat) - start]
            self._read(part, start)
            flat[start : start + len(part)].copy_(torch.from_numpy(part))

    def _read(self, data: Bytes, start: int) -> None:
        if self.source.read_into(data.data, self.first + start) != len(data):
            raise CheckpointDamagedError(f"the array {self.name!r:.80} ends too early")


@dataclass(frozen=True)
class StoredTree:
    """A tree of values whose arrays have not been read."""

    json: Any
    arrays: Mapping[str, Stored]
    allow_pickle: bool = False

    def outline(self) -> Any:
        """The tree with a ``Stored`` for each array: to see whether it fits."""
        return decode(self.json, self.arrays, allow_pickle=self.allow_pickle)

    def read(self, targets: Mapping[str, Any] | None = None) -> Any:
        """The tree, its arrays read into the targets of their names, or into new ones."""
        targets = targets or {}
        arrays = {
            name: stored.read_into(targets[name]) if name in targets else stored.read()
            for name, stored in self.arrays.items()
        }
        return decode(self.json, arrays, allow_pickle=self.allow_pickle)


def is_array_or_stored(value: Any) -> bool:
    """Check for an array of any library, read or not."""
    return isinstance(value, Stored) or is_array(value)
