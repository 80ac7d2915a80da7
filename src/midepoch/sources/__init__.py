"""Sources of rows: files in place, the index of their blocks, and fingerprints of their contents.

A ``Source`` is an ordered, fingerprinted set of blocks in files. The first open scans the block headers of the files
and saves them in an index. Later opens read only the index. The user's files are never written to.
"""

from midepoch.sources.formats import CacheSpec
from midepoch.sources.source import Access, Source

__all__ = ["Access", "CacheSpec", "Source"]
