"""A cluster in one process under one seeded scheduler: ``scripts/simulate SEED``.

Ranks are greenlets that run the code of the library. Everything below it is simulated: the disk, the object store, the
key-value store, the clock and the launcher. A history is a function of its seed.
"""
