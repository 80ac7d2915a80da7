"""Row ids in, record batches out.

One path: rows come out of memory-mapped Arrow. Blocks that lie in the file as they are in memory are gathered straight
from the mapping, a column at a time, with one copy; compressed or dictionary-encoded blocks are decoded first.
"""

from midepoch.read.reader import MIN_RUN, Reader, Rows

__all__ = ["MIN_RUN", "Reader", "Rows"]
