"""The loader: turns a dataset into batches with threads or worker processes, and owns the cursor.

The main process counts the batches it delivers. Workers never report a state: worker w of W makes the batches g ≡ w
(mod W) of one sequence, so the cursor is the position it started from plus batches delivered × global batch.
"""

from midepoch.loader.leases import Lease
from midepoch.loader.loader import Loader
from midepoch.loader.options import Options, ahead_for

__all__ = ["Lease", "Loader", "Options", "ahead_for"]
