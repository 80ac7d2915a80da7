"""How much memory Arrow data takes."""

from __future__ import annotations

import pyarrow as pa


def bytes_of(data: pa.RecordBatch | pa.Table) -> int:
    """Bytes of its values, or of the buffers that hold them: pyarrow 20 cannot count those of string views."""
    try:
        return int(data.nbytes)
    except pa.ArrowTypeError:
        return int(data.get_total_buffer_size())
