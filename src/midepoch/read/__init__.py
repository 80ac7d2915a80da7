"""Row ids in, record batches out.

One path: rows are read from memory-mapped Arrow. Blocks whose file layout is their memory layout are gathered directly
from the mapping, column by column, with one copy. Compressed and dictionary-encoded blocks are decoded first.
"""

from midepoch.read.reader import MIN_RUN, Reader, ReadRows

__all__ = ["MIN_RUN", "ReadRows", "Reader"]
