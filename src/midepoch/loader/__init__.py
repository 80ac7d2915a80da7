"""The loader: turns a dataset into batches with threads or worker processes, and owns the cursor.

The main process counts what it hands out. No worker ever reports a state: worker w of W makes whole batches g ≡ w
(mod W) of the same sequence, so the cursor is the position it started from plus batches delivered × global batch.
"""

from midepoch.loader.loader import Loader
from midepoch.loader.options import Options, ahead_for

__all__ = ["Loader", "Options", "ahead_for"]
