"""Levanter: a dataset as an ``AsyncDataset``, whose batch at a step is the same on any number of devices.

loader = trainer.data_loader(Positions(ds.shuffle(seed=42)))
trainer.train(state, loader.iter_from_step(state.step))
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from levanter.data.dataset import AsyncDataset

from midepoch._internal.values import integer
from midepoch.dataset import Dataset
from midepoch.dataset.reading import by_number


class Positions(AsyncDataset[Any]):  # type: ignore[misc]
    """Rows by their position in the run: position 0 is the first row of epoch 0, and each epoch has its own order.

    A row is a dict of numpy arrays, or of the format that was chosen by ``with_format``. ``epochs``: number of epochs;
    default: unlimited. Positions are computed, so Levanter resumes at any step without reading the rows before it.
    Levanter itself assigns positions to devices and processes.
    """

    def __init__(self, data: Dataset, *, epochs: int | None = None) -> None:
        super().__init__()
        if not isinstance(data, Dataset):
            raise TypeError(f"Positions takes a Dataset, got {type(data).__name__}. Leave out loader(…).")
        if data.pipeline.numbered is None:
            raise TypeError(
                f"Levanter reads rows by position, but rows of this dataset have none ({data.pipeline.node.text}). "
                "Call cache() after those steps, which numbers the rows, or leave them out."
            )
        if data.pipeline.shard.count > 1:
            raise ValueError(
                f"the dataset is shard {data.pipeline.shard.index} of {data.pipeline.shard.count}. Pass the complete "
                "dataset: Levanter gives each process its own rows."
            )
        if not len(data):
            raise ValueError("the dataset has no rows.")
        self._data = data if data.pipeline.format is not None else data.with_format("numpy")
        self._rows = len(data)
        self._length = None if epochs is None else self._rows * integer(epochs, "Positions(epochs=…)", 1)

    def is_finite(self) -> bool:
        return self._length is not None

    async def final_length_is_known(self) -> bool:
        return self.is_finite()

    async def current_len(self) -> int | None:
        return self._length

    async def async_len(self) -> int:
        if self._length is None:
            raise ValueError("Positions without epochs=… has no length.")
        return self._length

    async def wait_until_len_at_least(self, length: int) -> int:
        return length if self._length is None else self._length

    async def get_batch(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the rows at these positions. They are read and decoded in a thread."""
        return await asyncio.to_thread(self._read, np.asarray(indices, dtype=np.int64))

    def _read(self, positions: Any) -> list[Any]:
        length = self._length
        if len(positions) and (positions.min() < 0 or (length is not None and positions.max() >= length)):
            raise IndexError(f"positions must be in [0, {length}), got {positions.min()} to {positions.max()}")
        found: list[Any] = [None] * len(positions)
        for epoch in np.unique(positions // self._rows).tolist():
            (places,) = np.nonzero(positions // self._rows == epoch)
            wanted = (positions[places] % self._rows).tolist()
            columns = by_number(self._data).get(wanted, epoch, self._rows)
            sizes = {len(values) for values in columns.values()}
            if sizes != {len(wanted)}:
                raise ValueError(
                    f"{len(wanted) - min(sizes, default=0)} of {len(wanted)} rows of epoch {epoch} were skipped under "
                    "on_error='skip', and Levanter needs a row at every position. Leave out on_error, or call cache()."
                )
            for number, place in enumerate(places.tolist()):
                found[place] = {name: values[number] for name, values in columns.items()}
        return found
