"""Selection of rows of a column of any type. pyarrow cannot take views and unions, but can concatenate slices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64Array = npt.NDArray[np.int64]


def taken(column: pa.Array, places: Int64Array) -> pa.Array:
    """Return the values at these places."""
    try:
        # Not pa.array, which would import pandas.
        numbers = pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(np.ascontiguousarray(places))])
        return column.take(numbers)
    except pa.ArrowNotImplementedError:
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(places)).tolist()
        runs = zip(places[starts].tolist(), lengths, strict=True)
        return pa.concat_arrays([column.slice(0, 0), *(column.slice(start, length) for start, length in runs)])
