"""What users hold: a ``Dataset``, the steps that are added to one, and several datasets as one.

*Dataset*: a frozen pipeline and a cursor. *Step*: what is done to rows. *Mix, concat, zip*: several datasets combined.
"""

from midepoch.dataset.dataset import Dataset

__all__ = ["Dataset"]
