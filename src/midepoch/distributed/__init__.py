"""The ranks of a run, and the values on which they agree.

- ``world``: data-parallel rank and world size, from torch.distributed, JAX, Ray Train or the launcher
- ``keyvalue``: the key-value store that the processes of a run share, values that ranks exchange through it, names of
  the starts of a run, and seeds that are drawn once for all ranks
"""
