"""Index of a set of files: the location of every block. Written once, checked by ``stat``, opened memory-mapped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
