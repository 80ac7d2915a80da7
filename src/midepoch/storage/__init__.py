"""Storage: addresses and their credentials, files on a disk, in an object store, on the Hub, or in any fsspec system.

An address becomes a ``Store`` and a path (``addresses.resolve``). A store lists, opens and reads files, with one retry
rule and one set of errors. ``cache_files`` has the files that midepoch writes for itself.
"""
