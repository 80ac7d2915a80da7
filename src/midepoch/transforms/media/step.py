"""decode: files in a column to arrays, one for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from midepoch.transforms.batch import Batch
from midepoch.transforms.columns import check_columns
from midepoch.transforms.function import RunContext, failed
from midepoch.transforms.media.files import reader_of


class Decoder(Protocol):
    """The options of one kind of file. ``decode`` may be called by several threads, and releases the GIL."""

    @property
    def text(self) -> str:
        """The options as text: the result of ``decode`` follows from it and from the file."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of every result, or None if it differs."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def check(self) -> None:
        """Raise MidepochError if no package can decode such files."""

    def decode(self, data: Any) -> Any:
        """Return the array of a file, possibly a view. Raise an exception if it is damaged."""


@dataclass(frozen=True)
class Decode:
    """One call of ``Dataset.decode``. ``tensors``: results are torch tensors, otherwise numpy arrays."""

    column: str
    decoder: Decoder
    root: str | None = None
    tensors: bool = False
    on_error: str = "raise"

    @property
    def name(self) -> str:
        return f"decode({self.column})"

    @property
    def text(self) -> str:
        return f"decode[{self.column} {self.decoder.text}]"

    def _room(self, shape: tuple[int, ...], run: RunContext) -> Any:
        room = None if run.collect is None else run.collect(shape, self.decoder.dtype)
        return np.empty(shape, self.decoder.dtype) if room is None else room

    def apply(self, batch: Batch, run: RunContext) -> Batch:
        """Return the batch with the decoded column: one array if all rows have the same shape, else a list."""
        check_columns([self.column], list(batch.columns), "decode")
        read, shape = reader_of(self.column, batch.columns[self.column], self.root), self.decoder.shape
        stacked = None if shape is None else self._room((len(batch), *shape), run)
        arrays: list[Any] = []
        kept: list[int] = []
        for i in range(len(batch)):
            path = None
            try:
                data, path = read(i)
                array = self.decoder.decode(data)
            except Exception as problem:
                call = f"decode({self.column!r})" if path is None else f"decode({self.column!r}) of {path}"
                failed(call, self.on_error, problem, run, [int(batch.rows[i])])
                continue
            if stacked is None:
                arrays.append(_tensor(array) if self.tensors else array)
            else:
                stacked[len(kept)] = array
            kept.append(i)
        made: Any = arrays if stacked is None else stacked[: len(kept)]
        if stacked is not None and self.tensors:
            made = _tensor(made)
        if len(kept) < len(batch):
            batch = batch.keep(np.array(kept, dtype=np.int64))
        nullable = {name: paths for name, paths in batch.nullable.items() if name != self.column}
        return batch.with_columns({**batch.columns, self.column: made}, nullable)


def _tensor(array: Any) -> Any:
    import torch

    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = array.copy(order="K")  # not transposed: 25 µs for 500 × 400, otherwise 190 µs
    return torch.from_numpy(array)
