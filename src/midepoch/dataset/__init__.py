"""The public interface: a ``Dataset``, its steps, and combinations of datasets.

*Dataset*: a frozen pipeline and a cursor. *Step*: an operation on rows. *Mix, concat, zip*: several datasets as one.
"""

from midepoch.dataset.dataset import Dataset

__all__ = ["Dataset"]
