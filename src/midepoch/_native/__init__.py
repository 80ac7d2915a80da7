"""Bulk work on ragged rows: by a small C library where one is built, otherwise by numpy, with the same results.

``kernel.c`` has no dependency, not even Python.h, and is called with ctypes, which releases the GIL. Each function
here checks its arguments in both cases, and raises ValueError if a range is out of bounds. ``MIDEPOCH_NATIVE=0`` in
the environment selects numpy.
"""

from midepoch._native import library
from midepoch._native.bins import best_fit
from midepoch._native.ranges import copy_ranges, fill_ranges, number_concatenated, number_ranges

__all__ = [
    "best_fit",
    "copy_ranges",
    "fill_ranges",
    "library",
    "number_concatenated",
    "number_ranges",
]
