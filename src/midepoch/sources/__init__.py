"""Where rows come from: files as they lie, the index of their blocks, and fingerprints of their contents.

A ``Source`` is an ordered, fingerprinted set of blocks in files. Finding it costs one scan of the files' block headers,
kept in an index; a later open reads the index and nothing else. No file of the user's is ever written to.
"""

from midepoch.sources.source import Access, CacheSpec, Source

__all__ = ["Access", "CacheSpec", "Source"]
