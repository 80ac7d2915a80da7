"""Memory size of Arrow data."""

from __future__ import annotations

import pyarrow as pa


def bytes_of(data: pa.RecordBatch | pa.Table) -> int:
    """Return the bytes of the values, or of their buffers: pyarrow 20 cannot count the values of string views."""
    try:
        return int(data.nbytes)
    except pa.ArrowTypeError:
        return int(data.get_total_buffer_size())
